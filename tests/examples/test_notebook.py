"""docs/notebook.ipynb runs from its first cell to its last, as it would in Jupyter, and shows the outputs of a run."""

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
assert chart._repr_svg_().count("<polyline") == 2 and (folder / "model.npz").exists()
shutil.rmtree(folder)
"""


def test_it_shows_what_a_run_printed_and_drew() -> None:
    code = [cell for cell in CELLS if cell["cell_type"] == "code"]
    assert 8 <= len(CELLS) <= 14 and len(code) > 6
    assert all(cell["execution_count"] is None for cell in code)
    texts = ["".join(each["text"]) for cell in code for each in cell["outputs"] if each["output_type"] == "stream"]
    assert any("300 rounds, loss of the merged model" in text for text in texts)
    assert not any("/work" in text or "/home" in text for text in texts), "a folder of one machine"
    (picture,) = [each["data"]["image/svg+xml"] for cell in code for each in cell["outputs"] if "data" in each]
    assert "".join(picture).count("<polyline") == 2


@pytest.mark.long
@pytest.mark.net
def test_it_runs(tmp_path: Path) -> None:
    program = "\n".join("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code") + CHECKS
    words = {"input": program, "env": environment(), "cwd": tmp_path, "capture_output": True, "text": True}
    # The program has no file, as in a notebook.
    done = subprocess.run([sys.executable, "-"], timeout=HANGS_S, check=False, **words)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.nightly
@pytest.mark.net
def test_it_installs_itself_into_an_empty_environment(tmp_path: Path) -> None:
    """The first cell installs a wheel, and the others then run there; a package index must be reachable."""
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, timeout=HANGS_S, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "empty")], check=True, timeout=HANGS_S)
    program = "\n".join("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code") + CHECKS
    variables = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    variables["DILOCO_SOURCE"] = str(wheel)
    words = {"input": program, "env": variables, "cwd": tmp_path, "capture_output": True, "text": True}
    python = tmp_path / "empty" / "bin" / "python"
    done = subprocess.run([str(python), "-"], timeout=4 * HANGS_S, check=False, **words)
    assert done.returncode == 0, done.stdout + done.stderr
