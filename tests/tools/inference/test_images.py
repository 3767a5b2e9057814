"""The config of docs/after.md: two islands learn to read digits, and their training is done again bit for bit."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from diloco_jax.cli import main as cli
from diloco_jax.runtime.records.telemetry import read_metrics
from tests.runtime.helpers import ROOT, environment

PAGE = (ROOT / "docs" / "after.md").read_text(encoding="utf-8")


# The test makes three runs; tests/training/models has what vision models compute.
@pytest.mark.slow
@pytest.mark.net
def test_images_are_learned_evaluated_audited_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(ROOT / "docs" / "examples" / "digits.py", tmp_path)
    (tmp_path / "digits.yaml").write_text(re.findall(r"```yaml\n(name: .*?)```", PAGE, re.DOTALL)[0])

    def diloco(*words: str) -> Any:
        command = [sys.executable, "-m", "diloco_jax", *words, "--json"]
        done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    summary = diloco("train", "digits.yaml", "--run-dir", "run", "--islands.controller=single")  # fewer processes
    assert summary["complete"] and summary["eval_scores"].keys() == {"accuracy"}
    told = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "eval"]
    assert all(0 <= row["scores"]["accuracy"] <= 1 for row in told) and told[-1]["loss"] < 2.5
    replayed = diloco("replay", "run")
    assert replayed["identical"] and replayed["sha256"] == replayed["expected_sha256"], replayed

    monkeypatch.syspath_prepend(tmp_path)
    assert cli.main(["audit", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert cli.main(["eval", str(tmp_path / "run"), "--json"]) == 0
    evaluated = json.loads(capsys.readouterr().out)
    assert evaluated["scores"] == summary["eval_scores"] and evaluated["tokens"] == 8 * 16
    assert evaluated["loss"] == pytest.approx(summary["eval_loss"], abs=1e-5) and evaluated["bits_per_byte"] is None
