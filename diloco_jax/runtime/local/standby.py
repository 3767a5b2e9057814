"""Spare processes of islands, with imports done and programs loaded, so that a failed island resumes immediately.

A spare waits for one line on its standard input, which makes it an island. Before that it has no incarnation, session,
certificate or tape, and only the supervisor knows it. On emulated devices a spare loads the model and its programs. An
accelerator belongs to its island, so a spare for it has only done its imports.

At the start of a run the islands wait in the same way: they import while the syncer starts, and load as soon as their
programs are compiled. Such an early island has its incarnation and its log from the first moment.

Emulated islands of the same kind also share programs: one process compiles them while the syncer starts, and all
islands load them. Compiling takes such an island several times as long as everything else before its first step, and
islands that share cores would all compile at the same time. Islands with accelerators compile for themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from diloco_jax.runtime.local.machine import Machine, emulated_devices
from diloco_jax.runtime.local.processes import Process
from diloco_jax.runtime.records.files import HEALTH, LOGS

if TYPE_CHECKING:
    from diloco_jax.settings.run import RunConfig

# The first word for an early island: its programs are compiled, or nobody compiles them for it. The second word is the
# name of their set, if they may have one.
COMPILED = "compiled"


class EarlyIslands:
    """The islands of a run that its supervisor starts before the syncer listens, by name."""

    def __init__(self, start: Callable[[str], Process]) -> None:
        self._start = start
        self._islands: dict[str, Process] = {}
        self._compiled = False

    def begin(self, names: Iterable[str]) -> None:
        self._islands = {name: self._start(name) for name in names}

    def load(self, set_of: Callable[[str], str]) -> None:
        """Let the islands load their programs, given the names of their sets; later calls have no effect."""
        if self._compiled:
            return
        self._compiled = True
        for name, island in self._islands.items():
            _send(island, f"{COMPILED} {set_of(name)}\n")

    def take(self, name: str, address: str) -> Process | None:
        """Let an island join the run at this address; None if it was not started early.

        An island that has ended meanwhile is returned too, since the supervisor handles every end in the same way.
        """
        island = self._islands.pop(name, None)
        if island is not None:
            _close(island, f"{address.strip()}\n")
        return island

    def end(self) -> None:
        """End the islands that have no address yet."""
        for island in self._islands.values():
            island.process.kill()
            island.process.wait()
            _close(island)


class Spares:
    """The spare processes of a run for its supervisor: one per incarnation of an island, loaded one at a time."""

    def __init__(self, run_dir: Path, start: Callable[[str], Process]) -> None:
        self._run_dir = run_dir
        self._start = start
        self._spares: dict[str, Process] = {}

    def tend(self, name: str) -> None:
        """Start a spare for an island that trains, if this incarnation had none and no other spare is loading."""
        loading = any(each.process.poll() is None and not self.ready(other) for other, each in self._spares.items())
        if name not in self._spares and not loading and (self._run_dir / HEALTH / f"{name}.ready").exists():
            mark_of(self._run_dir, name).unlink(missing_ok=True)
            self._spares[name] = self._start(name)

    def ready(self, name: str) -> bool:
        """Tell whether an island has a spare that is loaded and waits."""
        spare = self._spares.get(name)
        return spare is not None and spare.process.poll() is None and mark_of(self._run_dir, name).exists()

    def take(self, name: str, address: str, incarnation: str) -> Process | None:
        """Turn the spare of an island into the island, even if it still loads; None if there is no spare."""
        spare = self._spares.pop(name, None)
        if spare is None or not _close(spare, f"{address.strip()} {incarnation}\n") or spare.process.poll() is not None:
            return None
        log = self._run_dir / LOGS / f"{name}.log"
        return Process(name, spare.process, log, log.stat().st_size if log.exists() else 0)

    def end(self) -> None:
        for spare in self._spares.values():
            spare.process.kill()
            spare.process.wait()
            _close(spare)


def _send(waiting: Process, words: str) -> bool:
    """Send a line to a process that waits for it; False if it has ended."""
    pipe = waiting.process.stdin
    assert pipe is not None, "a process that waits has a pipe"
    try:
        pipe.write(words.encode())
        pipe.flush()
    except OSError:
        return False
    return True


def _close(waiting: Process, words: str = "") -> bool:
    """Send the last line to a process that waits for it; False if it has ended."""
    sent = _send(waiting, words)
    pipe = waiting.process.stdin
    assert pipe is not None
    # Words that could not be sent are flushed once more.
    with contextlib.suppress(OSError):
        pipe.close()
    return sent


def shared_by_several(config: RunConfig, machine: Machine) -> list[str]:
    """Name one island of each kind that has several members, all of them emulated in separate processes."""
    if not machine.emulates or config.islands.controller == "single" or config.islands.command:
        return []
    kinds: dict[str, list[str]] = {}
    for name in config.islands.names:
        own = config.island(name)
        if own.hosts == 1 and not own.topology:
            kind = own._replace(name="", zone="", devices=emulated_devices(config, name))
            kinds.setdefault(repr(kind), []).append(name)
    return [names[0] for names in kinds.values() if len(names) * config.islands.slices > 1]


def mark_of(run_dir: Path, name: str) -> Path:
    """Return the file that a spare creates when it is loaded and waits."""
    return run_dir / HEALTH / f"{name}.standby"
