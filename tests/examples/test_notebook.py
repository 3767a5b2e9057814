"""docs/notebook.ipynb runs from its first cell to its last, as it would in Jupyter, and is kept without outputs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import HANGS_S
from tests.runtime.helpers import ROOT, environment

CELLS = json.loads((ROOT / "docs" / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
CHECKS = """
import shutil
assert summary["complete"] and summary["global_steps"] == 300 and set(summary["learners"]) == {"a", "b"}
assert summary["eval_loss"] < 3.5 < losses["a"][0][1], "it has learned nothing"
assert all(facts["participation"] > 0.5 for facts in summary["learners"].values())
assert chart.count("<polyline") == 2 and chart._repr_html_().startswith("<img") and (folder / "model.npz").exists()
shutil.rmtree(folder)
"""


def test_it_is_kept_without_outputs() -> None:
    code = [cell for cell in CELLS if cell["cell_type"] == "code"]
    assert 8 <= len(CELLS) <= 13 and len(code) > 5
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


@pytest.mark.long
@pytest.mark.net
def test_it_runs(tmp_path: Path) -> None:
    program = "\n".join("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code") + CHECKS
    words = {"input": program, "env": environment(), "cwd": tmp_path, "capture_output": True, "text": True}
    # The program has no file, as in a notebook.
    done = subprocess.run([sys.executable, "-"], timeout=HANGS_S, check=False, **words)
    assert done.returncode == 0, done.stdout + done.stderr
