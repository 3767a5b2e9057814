"""The processes of islands of several slices, as their command lines and logs show them."""

import re
from pathlib import Path

from tests.runtime.helpers import processes_of


def pids_of(run_dir: Path, number: int, host: str = "", island: str = "island-0") -> list[int]:
    """Return the processes of a slice, or of one of its hosts, such as "--host 1 "."""
    found = processes_of(run_dir).items()
    words = f" --island {island} ", f" --slice {number} ", host
    return [pid for pid, command in found if all(word in command for word in words)]


def leader_of(run_dir: Path, island: str = "island-0") -> int:
    """Return the slice that leads in the newest term."""
    leads = rf"slice (\d) leads {island} in term (\d+)"
    return max((int(match[2]), int(match[1])) for match in _found(run_dir, island, leads))[1]


def whole_times(run_dir: Path, slices: int, island: str = "island-0") -> int:
    """Return how often all slices have come together."""
    return len(_found(run_dir, island, rf"; {slices} train\n"))


def _found(run_dir: Path, island: str, pattern: str) -> list[re.Match[str]]:
    """Return what matches in the logs of all slices of an island."""
    logs = (run_dir / "logs").glob(f"{island}.slice-*.log")
    return [match for path in logs for match in re.finditer(pattern, path.read_text(encoding="utf-8"))]
