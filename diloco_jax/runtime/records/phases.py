"""Phases of processes that do not train yet: one line each in the run's folder, for people who wait.

health/NAME.phase is there from the start of a process until it trains, or listens. What is counted in it follows a
comma: "compiling or loading programs, 3 of 7 are ready".
"""

import contextlib
import time
from pathlib import Path
from typing import NamedTuple

from diloco_jax.runtime.records.files import HEALTH

SUFFIX = ".phase"
WORDS_MAX = 200


class StartPhase(NamedTuple):
    """A process, and what it does before its first step."""

    name: str  # syncer, an island, or another process of the run
    words: str
    ago_s: float  # since it said so


def tell_phase(run_dir: Path, name: str, words: str) -> None:
    """Say what a process does; "" when it needs no words any more. A disk that takes nothing is no reason to stop."""
    path = run_dir / HEALTH / f"{name}{SUFFIX}"
    with contextlib.suppress(OSError):
        if words:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(words, encoding="utf-8")
        else:
            path.unlink(missing_ok=True)


def read_phases(run_dir: Path) -> list[StartPhase]:
    """Return the phases that processes of this folder have told last, by name."""
    found, now_s = [], time.time()
    for path in sorted((run_dir / HEALTH).glob(f"*{SUFFIX}")):
        with contextlib.suppress(OSError):  # it is over
            words = path.read_text(encoding="utf-8", errors="replace")[:WORDS_MAX]
            found.append(StartPhase(path.name.removesuffix(SUFFIX), words, max(0.0, now_s - path.stat().st_mtime)))
    return [phase for phase in found if phase.words]


def forget_phases(run_dir: Path) -> None:
    """Forget what processes said that are gone."""
    for path in (run_dir / HEALTH).glob(f"*{SUFFIX}"):
        tell_phase(run_dir, path.name.removesuffix(SUFFIX), "")
