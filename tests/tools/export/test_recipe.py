"""The recipe of docs/public-models.md with a small model: two texts, a public model in, four islands, out again."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from diloco_jax.cli.main import main
from diloco_jax.settings.text import load
from diloco_jax.training.data.tokenizer import train_tokenizer
from tests.limits import SLOW_HANGS_S
from tests.runtime.helpers import ROOT, merged, processes_of, run, start, status, wait_for
from tests.tools.export.folders import drawn, loss_of_theirs, make_run, model_of
from tests.training.convert.cases import LIST
from tests.training.convert.variants import make

LINES = [f"island {n} sends {n * n} gradients to the syncer, which merges {n % 7}\n" for n in range(4000)]
PAGE = (ROOT / "docs" / "public-models.md").read_text(encoding="utf-8")
OF_THE_PAGE = yaml.safe_load(PAGE.split("# base.yaml\n")[1].split("```")[0])
SMALL: dict[str, Any] = {
    "islands": {"devices": 1},
    "train": {"steps": 200, "tokens": 0, "seq_len": 32, "batch_size": 16, "eval_batch_size": 8},
    "model": {"args": {"loss_chunk": 75, "dtype": "float32"}},
    "optimizer": {"learning_rate": 0.01, "warmup_steps": 5},
    # Every round needs all four: the run cannot end before the killed island is back.
    "protocol": {"sync_every": 6, "num_fragments": 3, "snapshot_every": 20, "quorum": 4},
    "trackers": [],
}


# Random folders that transformers writes, by name in cases.py.
THEIRS = {variant.name: variant for variant in LIST}


def write_public(folder: Path, name: str, tokenizer: Path) -> Path:
    """The folder of a public model with a tokenizer: our own Llama, or one of THEIRS."""
    public = folder / "public"
    if name in THEIRS:
        variant = THEIRS[name]
        make(variant._replace(config=variant.config | {"vocab_size": 300}), public)
        shutil.copytree(tokenizer, public, dirs_exist_ok=True)
        return public
    begun = make_run(
        folder / "begun", model_of(), drawn(model_of()), data={"format": "text", "tokenizer": str(tokenizer)}
    )
    assert main(["export", str(begun), "--out", str(public)]) == 0
    return public


def prepare(folder: Path, name: str) -> tuple[Path, Path]:
    """A public model with its tokenizer, and a config that begins with it, on a mixture of two stores."""
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text("".join(LINES[::2]))
    (folder / "b.jsonl").write_text("".join(json.dumps({"text": line * 3}) + "\n" for line in LINES[1::2]))
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    train_tokenizer(LINES, 300, tokenizer)
    public = write_public(folder, name, tokenizer)
    mixture = {}
    for name, source, weight in (("text", "texts", 1), ("jsonl", "b.jsonl", 3)):
        mixture[name] = {"path": str(folder / name), "weight": weight}
        made = run("tokenize", folder / source, "--tokenizer", public, "--out", folder / name)
        assert made.returncode == 0, made.stderr
    (folder / "base.yaml").write_text(yaml.safe_dump(merged(OF_THE_PAGE, SMALL) | {"data": {"mixture": mixture}}))
    config = folder / "config.yaml"
    assert main(["import", str(public), "--config", str(folder / "base.yaml"), "--out", str(config)]) == 0
    return public, config


@pytest.mark.net
# Fast tests beside this one, and test_stores.py and test_mixture.py of tests/training, cover the parts.
@pytest.mark.slow
@pytest.mark.extra("parity")
@pytest.mark.parametrize("name", ["ours", "gemma4_shared", "qwen3_5"])
def test_continued_pre_training(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import transformers

    _, config = prepare(tmp_path, name)
    run_dir, out = tmp_path / "run", tmp_path / "out"

    training = start("train", config, "--run-dir", run_dir, "--quiet")
    wait_for(lambda: status(run_dir).get("global_step", 0) > 20, "training", training, SLOW_HANGS_S)
    victim = next(pid for pid, command in processes_of(run_dir).items() if "--island island-2" in command)
    os.kill(victim, signal.SIGKILL)
    output, _ = training.communicate(timeout=SLOW_HANGS_S)
    assert training.returncode == 0, output
    assert json.loads((run_dir / "summary.json").read_text())["learners"]["island-2"]["restarts"] == 1
    assert main(["audit", str(run_dir), "--json"]) == 0
    capsys.readouterr()
    losses = []
    for what in (config, run_dir):
        assert main(["eval", str(what), "--json"]) == 0
        losses.append(json.loads(capsys.readouterr().out)["loss"])
    assert losses[1] < 0.8 * losses[0]

    assert main(["export", str(run_dir), "--out", str(out)]) == 0
    theirs, settings = transformers.AutoModelForCausalLM.from_pretrained(out), load(config)
    expected = loss_of_theirs(theirs, settings.data, 8, settings.train.final_eval_batches)
    print(f"loss {losses[0]} before, {losses[1]} after, {expected} in transformers")
    assert losses[1] == pytest.approx(expected, abs=1e-6)
