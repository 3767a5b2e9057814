"""docs/examples/levanter.diff applies to the installed levanter, and what it makes trains as an island of a real run.

Levanter is large and wants an older protobuf than the generated stubs (docs/examples/README.md), so most have it not.
"""

import importlib.util
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.examples.test_own_loops import EXAMPLES, OWN, play

pytestmark = [pytest.mark.net, pytest.mark.slow]

DIFF = EXAMPLES / "levanter.diff"


def names_of_bytes() -> dict[str, int]:
    """GPT-2's tokenizer, without a merge: a token for every byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = {byte: chr(256 + n) for n, byte in enumerate(b for b in range(256) if b not in plain)}
    return {others.get(byte, chr(byte)): byte for byte in range(256)} | {"<|endoftext|>": 256}


def write_job(folder: Path) -> None:
    """A config of levanter's for a small job without a network."""
    (folder / "gpt2").mkdir()
    (folder / "gpt2/config.json").write_text('{"model_type": "gpt2"}')
    (folder / "gpt2/vocab.json").write_text(json.dumps(names_of_bytes()))
    (folder / "gpt2/merges.txt").write_text("#version: 0.2\n")
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:20]
    rows = [json.dumps({"text": file.read_text(encoding="utf-8", errors="replace")[:8000]}) for file in files]
    (folder / "text.jsonl").write_text("\n".join(rows))
    data = {"train_urls": ["text.jsonl"], "cache_dir": "cache", "tokenizer": "gpt2"}
    model = {"type": "gpt2", "hidden_dim": 32, "num_heads": 2, "num_layers": 2, "seq_len": 64}
    trainer = {"train_batch_size": 16, "num_train_steps": 1000, "require_accelerator": False, "tracker": []}
    optimizer = {"learning_rate": 0.003, "warmup": 2, "lr_schedule": "constant"}
    job = {"data": data, "model": model, "trainer": trainer, "optimizer": optimizer}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))


def test_levanter_is_an_island(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("levanter") is None:
        pytest.skip("levanter is not installed; docs/examples/README.md says how")
    installed = importlib.util.find_spec("levanter").submodule_search_locations[0]  # type: ignore[union-attr]
    shutil.copytree(Path(installed) / "main", tmp_path / "levanter" / "main")
    subprocess.run(["patch", "-p0", "-i", DIFF], cwd=tmp_path, check=True)
    program = (tmp_path / "levanter" / "main" / "train_lm.py").rename(tmp_path / "train_lm.py")
    shutil.rmtree(tmp_path / "levanter")
    write_job(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # The data of this example are finite.
    lockstep = {"protocol": OWN["protocol"] | {"overlap_steps": 0}}
    summary = play(tmp_path, OWN | lockstep, [str(program), "--config_path", "job.yaml"], patience_s=500)
    assert summary["num_parameters"] > 30_000
