"""Records: one line of JSON for each finished job; pages are generated from records alone."""

import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from experiments.spec import ROOT

Record = dict[str, Any]
CURVE_MAX = 60


def read(path: Path) -> list[Record]:
    """Return the records of a file without an incomplete last line; none if the file does not exist.

    Raises:
        ValueError: another line is not a record; the message names it.
    """
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise ValueError(f"{path} line {number} is not a record; repair or remove it") from None
    return found


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Add one record in one atomic step; an incomplete last line is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(each, sort_keys=True) + "\n" for each in [*read(path), record])
    part = path.with_suffix(".part")
    with part.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(path)


def thinned(points: Iterable[tuple[float, float]], most: int = CURVE_MAX) -> list[list[float]]:
    """Average a curve in at most `most` parts of equally many points: [[tokens at a part's end, mean loss], ...]."""
    points = list(points)
    parts = min(most, len(points))
    bounds = [len(points) * part // parts for part in range(parts + 1)] if parts else []
    groups = [points[start:stop] for start, stop in pairwise(bounds)]
    return [[round(group[-1][0]), round(sum(loss for _, loss in group) / len(group), 4)] for group in groups]


def by_digest(records: Sequence[Record]) -> dict[str, Record]:
    """Return the newest record of each digest."""
    return {record["digest"]: record for record in records}


def elsewhere(path: Path) -> dict[str, Record]:
    """Return the records of other experiments beside a file by digest, because equal settings are trained once."""
    others = sorted(set(path.parent.glob("*.jsonl")) - {path})
    return by_digest([record for other in others for record in read(other)])


def here(*, accelerated: bool) -> dict[str, str]:
    """Return commit, machine and date for a record of now."""
    return {
        "commit": _commit(),
        "machine": machine(accelerated=accelerated),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _commit() -> str:
    commit = _output("git", "-C", str(ROOT), "rev-parse", "--short=10", "HEAD")
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no", "--", "diloco_jax")
    # A "+" means that the package had uncommitted changes.
    return f"{commit or 'unknown'}{'+' if changed else ''}"


def machine(*, accelerated: bool) -> str:
    """Describe the GPU of this machine if a job may use one, otherwise its processor."""
    gpu = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines() if accelerated else []
    if gpu and os.environ.get("JAX_PLATFORMS") != "cpu":
        return f"{len(gpu)} x {gpu[0].strip()}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} cores, {platform.machine()}, {platform.system()}"


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
