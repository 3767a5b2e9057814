"""Texts of four kinds for islands with separate corpora: `python -m experiments.kinds FOLDER CHARACTERS`.

They are those of this machine's packages (text.py), so machines with other packages have other texts. Prose is what
people read about programs.
"""

import sys
from pathlib import Path

from experiments.text import documents, roots

KINDS = {
    "python": {".py", ".pyi"},
    "c": {".h", ".hpp", ".c", ".cc", ".cpp"},
    "prose": {".md", ".rst", ".txt"},
    "markup": {".json", ".html", ".xml"},
}
# So that no file is more than a few per cent of a text.
BYTES_MOST = 100_000


def main() -> None:
    """Write one file for each kind."""
    folder, characters = Path(sys.argv[1]), int(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for name, suffixes in KINDS.items():
        text = "\n".join(documents(roots(), characters, suffixes, BYTES_MOST))
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
