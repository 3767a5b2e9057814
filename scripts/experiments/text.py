"""The large text: source and documentation of the Python and Debian packages that this machine has, as a token store.

Nothing is downloaded. Files are taken once each (equal contents count as one), in an order that their contents decide,
so what is held out is a fair share; machines with other packages have another text, and the store's name says how much.
"""

import hashlib
import json
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.plan import Choice, chosen
from experiments.runner import say
from experiments.spec import Experiment, sizes
from experiments.ways import JobFailed, environment

SUFFIXES = {".py", ".pyi", ".pyx", ".md", ".rst", ".txt", ".h", ".hpp", ".c", ".cc", ".cpp", ".js", ".ts", ".sh", ".pl"}
SYSTEM = ("/usr/share/doc", "/usr/include", "/usr/src", "/usr/lib/python3", "/usr/share/perl", "/usr/lib/node_modules")
BYTES_LEAST, BYTES_MOST = 400, 1_000_000  # of a file
TOTAL_MOST = 600_000_000  # characters: tokenized in minutes, and read a few times by the largest budget
SHARD = 64_000_000


def roots() -> list[Path]:
    """List the folders that packages fill."""
    own = {sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")}
    return [path for path in map(Path, [*sorted(own), *SYSTEM]) if path.is_dir()]


def documents(folders: Sequence[Path], most: int = TOTAL_MOST) -> Iterator[str]:
    """Yield the texts below some folders, each content once, in the order of their digests."""
    found: dict[str, Path] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix in SUFFIXES and path.is_file() and BYTES_LEAST <= path.stat().st_size <= BYTES_MOST:
                found.setdefault(hashlib.sha256(path.read_bytes()).hexdigest(), path)
    left = most
    for _, path in sorted(found.items()):
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        left -= len(text)
        if left < 0:
            return
        yield text


def gather(folder: Path, folders: Sequence[Path], most: int = TOTAL_MOST, shard: int = SHARD) -> int:
    """Write texts as JSONL, some files of about equal size; returns their characters. Does nothing if it was done."""
    mark = folder / "gathered"
    if mark.exists():
        return int(mark.read_text(encoding="utf-8"))
    folder.mkdir(parents=True, exist_ok=True)
    total = number = 0
    stream = None
    for text in documents(folders, most):
        if stream is None or stream.tell() > shard:
            if stream is not None:
                stream.close()
            stream = (folder / f"part-{number:03}.jsonl").open("w", encoding="utf-8")
            number += 1
        stream.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
        total += len(text)
    if stream is not None:
        stream.close()
    mark.write_text(str(total), encoding="utf-8")
    return total


def make_text(experiment: Experiment, choice: Choice, work: Path) -> None:
    """Make the token store that the sizes of an experiment name, unless it is there.

    Raises:
        JobFailed: `diloco tokenize` failed.
    """
    for vocab in sorted({sizes()[case.size].text for case in chosen(experiment, choice).cases} - {0}):
        store = work / f"text-{vocab}"
        if (store / "store.json").exists():
            continue
        characters = gather(work / "texts", roots())
        say(f"tokenizing {characters / 1e6:.0f}M characters of this machine's packages with {vocab} ids, once")
        words = ["tokenize", str(work / "texts"), "--tokenizer", f"train:{vocab}", "--out", str(store)]
        command = [sys.executable, "-m", "diloco_jax", *words, "--patterns", "*.jsonl"]
        if subprocess.run(command, env=environment(None, work), check=False).returncode:
            raise JobFailed(f"`{' '.join(command)}` failed, see above")
