"""The recipe of docs/models.md with a small model: text to a store, a public model in, four islands, and out again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from diloco_jax.cli.main import main
from diloco_jax.settings.text import load
from diloco_jax.training.data.corpus import load_source
from diloco_jax.training.data.order import eval_batches
from diloco_jax.training.data.tokenizer import train_tokenizer
from tests.runtime.helpers import run
from tests.tools.export.folders import drawn, make_run, model_of

TEXT = "".join(f"island {n} sends {n * n} gradients to the syncer, which merges {n % 7}\n" for n in range(4000))
BASE: dict[str, Any] = {
    "name": "recipe",
    "islands": {"count": 4, "devices": 1},
    "train": {"steps": 60, "seq_len": 32, "batch_size": 16, "eval_every": 0, "eval_batch_size": 8},
    "optimizer": {"learning_rate": 0.01, "warmup_steps": 5},
    "protocol": {"sync_every": 6, "num_fragments": 3, "snapshot_every": 20},
    "trackers": [],
}


@pytest.mark.slow
@pytest.mark.net
@pytest.mark.timeout(600)
def test_continued_pre_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch", reason="the extra 'parity' has torch and transformers")
    transformers = pytest.importorskip("transformers", reason="the extra 'parity' has torch and transformers")
    texts, tokenizer, public, store = (tmp_path / name for name in ("texts", "tokenizer", "public", "store"))
    for folder in (texts, tokenizer):
        folder.mkdir()
    (texts / "a.txt").write_text(TEXT)
    train_tokenizer([TEXT], 300, tokenizer)
    model = model_of("qwen3")
    begun = make_run(tmp_path / "begun", model, drawn(model), data={"format": "text", "tokenizer": str(tokenizer)})
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(BASE | {"data": {"format": "store", "path": str(store)}}))
    config, run_dir, out = tmp_path / "config.yaml", tmp_path / "run", tmp_path / "out"

    assert main(["export", str(begun), "--out", str(public)]) == 0
    assert run("tokenize", texts, "--tokenizer", public, "--out", store).returncode == 0
    assert main(["import", str(public), "--config", str(tmp_path / "base.yaml"), "--out", str(config)]) == 0
    result = run("train", config, "--run-dir", run_dir, "--quiet", timeout_s=500)
    assert result.returncode == 0, result.stdout + result.stderr
    capsys.readouterr()
    losses = []
    for what in (config, run_dir):
        assert main(["eval", str(what), "--json"]) == 0
        losses.append(json.loads(capsys.readouterr().out)["loss"])
    assert losses[1] < 0.8 * losses[0]

    assert main(["export", str(run_dir), "--out", str(out)]) == 0
    theirs, settings = transformers.AutoModelForCausalLM.from_pretrained(out), load(config)
    count = settings.train.final_eval_batches
    batches = eval_batches(load_source(settings.data, 32), 8, count)
    tokens = torch.tensor(np.concatenate([batch["tokens"] for batch in batches]), dtype=torch.int64)
    with torch.no_grad():
        logits = theirs(tokens[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
    assert losses[1] == pytest.approx(expected, abs=1e-4)
