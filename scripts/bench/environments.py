"""Environments of other projects for comparisons, each in a separate folder with its own versions."""

import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def python_with(name: str, pins: Sequence[str], *, ours: bool = False) -> Path:
    """Return the interpreter of the environment `.bench/name`; make it if it is missing or has other versions.

    Args:
        name: name of the folder.
        pins: requirements for pip.
        ours: also include the packages of this project's environment.
    """
    folder = ROOT / ".bench" / name
    stamp, python = folder / ".stamp", folder / "bin" / "python"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == " ".join(pins):
        return python
    sys.stderr.write(f"installing {' '.join(pins)} into {folder.relative_to(ROOT)}, once\n")
    folder.mkdir(parents=True, exist_ok=True)
    (folder.parent / ".gitignore").write_text("*\n", encoding="utf-8")
    venv.create(folder, clear=True, with_pip=True)
    if ours:
        path = Path(sysconfig.get_path("purelib", vars={"base": str(folder)})) / "ours.pth"
        path.write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n", encoding="utf-8")
    subprocess.run([python, "-m", "pip", "install", "--quiet", *pins], check=True, stdout=sys.stderr)
    stamp.write_text(" ".join(pins), encoding="utf-8")
    return python


if __name__ == "__main__":
    print(python_with(sys.argv[1], sys.argv[2:], ours=True))
