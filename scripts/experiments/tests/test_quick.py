"""Every experiment with `--quick`: real trainings of a tiny model, with tapes and processes, up to a page.

The figures are not tested, because they mean nothing with so small settings.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.records import read
from experiments.spec import load, names
from tests.limits import SLOW_HANGS_S
from tests.runtime.helpers import environment

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.net
@pytest.mark.extra("dev")
@pytest.mark.nightly
@pytest.mark.parametrize("name", names())
def test_it_runs(name: str, tmp_path: Path) -> None:
    around = environment() | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts")])}
    command = [sys.executable, "-m", "experiments", name, "--quick", "--work", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=around, timeout=SLOW_HANGS_S)
    assert ran.returncode == 0, ran.stderr
    out = tmp_path / "quick"
    records, arms = read(out / "records" / f"{name}.jsonl"), load(name).quick["arms"]
    assert {each["arm"] for each in records} == set(arms)
    assert all(each["loss"] and each["tokens"] > 0 and each["curve"] for each in records)
    text = (out / f"{name}.md").read_text(encoding="utf-8")
    assert "a trial of the machinery, not evidence" in text and (out / f"{name}.svg").exists()
    again = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=around, timeout=SLOW_HANGS_S)
    assert again.returncode == 0 and read(out / "records" / f"{name}.jsonl") == records, "nothing is run again"
