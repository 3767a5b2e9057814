"""The environment that scripts make: what they install into it, with a stand-in for pip that installs nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# It makes an environment whose Python records the arguments of pip, and fails or stops there if the test says so.
PYTHON = f"""#!/bin/sh
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip install "*)
    echo "$*" | sed 's/.*--editable //; s/ --constraint.*//' >>pip.log
    case "$(cat broken 2>/dev/null)" in killed) kill -9 $PPID ;; failed) exit 1 ;; esac
    touch "$(dirname "$0")/diloco" && chmod +x "$(dirname "$0")/diloco" ;;
  *) exec {sys.executable} "$@" ;;
esac
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name in ("pyproject.toml", "constraints-py311.txt", "scripts/_env.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "python").write_text(PYTHON, encoding="utf-8")
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def start(clone: Path, script: str, chosen: str = "") -> list[str]:
    """Start a script of the repository up to the end of its installation; return what pip was to install."""
    (clone / "pip.log").write_text("", encoding="utf-8")
    lines = (ROOT / "scripts" / script).read_text(encoding="utf-8").splitlines()
    head = lines[: next(number for number, line in enumerate(lines) if line.startswith("source ")) + 1]
    (clone / "scripts" / script).write_text("\n".join(head), encoding="utf-8")
    around = os.environ | {"DILOCO_PYTHON": str(clone / "python"), "DILOCO_EXTRAS": chosen}
    ended = subprocess.run(["bash", f"scripts/{script}"], cwd=clone, env=around, capture_output=True, text=True)
    installed = (clone / "pip.log").read_text(encoding="utf-8").split()
    assert (ended.returncode == 0) != (clone / "broken").exists(), ended.stderr
    return installed


def test_scripts_only_add_what_they_need_and_lack(clone: Path) -> None:
    assert start(clone, "train") == ["."]
    assert start(clone, "train") == []
    assert start(clone, "test") == [".[test]"]
    assert start(clone, "train") == start(clone, "test") == []
    assert start(clone, "lint") == [".[test,docs,dev]"], "what is there stays"
    assert start(clone, "train") == start(clone, "test") == start(clone, "docs") == start(clone, "lint") == []
    assert start(clone, "test", chosen="test, parity") == [".[test,docs,dev,parity]"]
    assert start(clone, "test") == start(clone, "test", chosen="parity") == []
    with (clone / "pyproject.toml").open("a", encoding="utf-8") as file:
        file.write("# changed")
    assert start(clone, "train") == [".[test,docs,dev,parity]"]


def test_the_first_script_installs_its_own_extras(clone: Path) -> None:
    assert start(clone, "docs") == [".[docs]"]
    assert start(clone, "train", chosen="doc") == [".[docs,doc]"], "a part of a name is another name"


@pytest.mark.parametrize("broken", ["failed", "killed"])
def test_an_installation_that_did_not_end_is_done_again(clone: Path, broken: str) -> None:
    assert start(clone, "test") == [".[test]"]
    (clone / ".venv" / "old").touch()
    (clone / "broken").write_text(broken, encoding="utf-8")
    assert start(clone, "lint") == [".[test,docs,dev]"]
    (clone / "broken").unlink()
    assert (clone / ".venv" / ".installing").exists() == (broken == "killed")
    # A failed pip changes nothing. A killed one may have left anything.
    assert start(clone, "test") == ([".[test]"] if broken == "killed" else [])
    assert (clone / ".venv" / "old").exists() == (broken == "failed")
