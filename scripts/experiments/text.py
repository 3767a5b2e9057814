"""The large text: a token store of the source and documentation of this machine's Python and Debian packages.

Nothing is downloaded. Files with equal contents count as one, and the order of files depends on their contents, so that
the held-out part is a fair sample. Machines with other packages have another text.
"""

import hashlib
import json
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence, Set
from pathlib import Path

from experiments.plan import Choice, chosen
from experiments.runner import say
from experiments.spec import Experiment, sizes
from experiments.ways import JobFailed, environment

SUFFIXES = {".py", ".pyi", ".pyx", ".md", ".rst", ".txt", ".h", ".hpp", ".c", ".cc", ".cpp", ".js", ".ts", ".sh", ".pl"}
SYSTEM = ("/usr/share/doc", "/usr/include", "/usr/src", "/usr/lib/python3", "/usr/share/perl", "/usr/lib/node_modules")
# The limits for a file.
BYTES_LEAST, BYTES_MOST = 400, 1_000_000
# The limit of characters for the text; it is tokenized in minutes, and the largest budget reads it a few times.
TOTAL_MOST = 600_000_000
SHARD = 64_000_000


def roots() -> list[Path]:
    """List the folders of installed packages."""
    own = {sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")}
    return [path for path in map(Path, [*sorted(own), *SYSTEM]) if path.is_dir()]


def documents(
    folders: Sequence[Path], most: int = TOTAL_MOST, suffixes: Set[str] = SUFFIXES, bytes_most: int = BYTES_MOST
) -> Iterator[str]:
    """Yield the texts below some folders, each content once, in the order of their digests.

    Args:
        most: limit of the characters of all texts.
        suffixes: endings of their files.
        bytes_most: limit for a file.
    """
    found: dict[str, Path] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix in suffixes and path.is_file() and BYTES_LEAST <= path.stat().st_size <= bytes_most:
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
    """Write texts as JSONL files of about equal size, unless they exist, and return the number of characters."""
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
    """Make the token store for the sizes of an experiment, unless it exists.

    Raises:
        JobFailed: `diloco tokenize` failed.
    """
    for vocab in sorted({sizes()[case.size].text for case in chosen(experiment, choice).cases} - {0}):
        store = work / f"text-{vocab}"
        if (store / "store.json").exists():
            continue
        characters = gather(work / "texts", roots())
        say(f"tokenizing {characters / 1e6:.0f}M characters of this machine's packages into {vocab} ids, once")
        words = ["tokenize", str(work / "texts"), "--tokenizer", f"train:{vocab}", "--out", str(store)]
        command = [sys.executable, "-m", "diloco_jax", *words, "--patterns", "*.jsonl"]
        if subprocess.run(command, env=environment(None, work), check=False).returncode:
            raise JobFailed(f"`{' '.join(command)}` failed; its output names the cause")
