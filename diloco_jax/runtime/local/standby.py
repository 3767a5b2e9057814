"""Spare processes of islands, with imports done and programs loaded, so that a failed island resumes immediately.

A spare waits for one line on its standard input, which makes it an island. Before that it has no incarnation, session,
certificate or tape, and only the supervisor knows it. On emulated devices a spare loads the model and its programs. An
accelerator belongs to its island, so a spare for it has only done its imports.

Emulated islands of the same kind also share programs: one process compiles them while the syncer starts, and all
islands load them. Compiling takes such an island several times as long as everything else before its first step, and
islands that share cores would all compile at the same time. Islands with accelerators compile for themselves.
"""

import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from diloco_jax.runtime.island.built_in import LOADING, BuiltInLoop
from diloco_jax.runtime.island.host import Host, Report
from diloco_jax.runtime.local.machine import Machine, emulated_devices
from diloco_jax.runtime.local.processes import Process
from diloco_jax.runtime.records.files import HEALTH, LOGS
from diloco_jax.settings.resolved import resolve
from diloco_jax.settings.run import RunConfig

# The nice value of a spare that loads.
LOW_PRIORITY = 19


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
            _mark(self._run_dir, name).unlink(missing_ok=True)
            self._spares[name] = self._start(name)

    def ready(self, name: str) -> bool:
        """Tell whether an island has a spare that is loaded and waits."""
        spare = self._spares.get(name)
        return spare is not None and spare.process.poll() is None and _mark(self._run_dir, name).exists()

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


def _close(spare: Process, words: str = "") -> bool:
    """Send the last line to a spare; False if it has ended."""
    pipe = spare.process.stdin
    assert pipe is not None, "a spare has a pipe"
    try:
        with pipe:
            pipe.write(words.encode())
    except OSError:
        return False
    return True


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


def compiled_loop(config: RunConfig, island: str, report: Report = lambda words: None) -> BuiltInLoop:
    """Return the loop of an island with all of its programs compiled, and stored in the folder of `keep_programs`."""
    report(LOADING)
    loop = BuiltInLoop(config.of_island(island), island)
    host = Host(resolve(config, loop.island.shapes, loop.island.kinds), loop.island, loop.warm_up_steps, loop.evaluate)
    host.warm_up(report)
    report("compiling the evaluation")
    host.warm_up_evaluation()
    return loop


def stand_by(config: RunConfig, run_dir: Path, name: str, *, loads: bool) -> tuple[str, int, BuiltInLoop | None] | None:
    """Load what an island needs, and wait for the line that makes this process the island.

    Args:
        loads: load the model and its programs if devices are emulated.

    Returns:
        The syncer's address, the incarnation, and the loop if it is loaded; None if the line never comes.
    """
    undo = _lower_priority()
    # The order of samples needs Grain, which a learner imports only when it draws the order.
    for module in ("diloco_jax.runtime.learner.run", "grain"):
        importlib.import_module(module)
    loop = compiled_loop(config, name) if loads and os.environ.get("JAX_PLATFORMS") == "cpu" else None
    mark = _mark(run_dir, name)
    mark.touch()
    words = sys.stdin.readline().split()
    with contextlib.suppress(OSError):
        mark.unlink(missing_ok=True)
    if len(words) != 2:
        return None
    undo()
    log = os.open(run_dir / LOGS / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    return words[0], int(words[1]), loop


def _mark(run_dir: Path, name: str) -> Path:
    """Return the file that a spare creates when it is loaded and waits."""
    return run_dir / HEALTH / f"{name}.standby"


def _lower_priority() -> Callable[[], None]:
    """Lower the priority of this process, if the system allows to undo that; return the function that undoes it."""
    before, may = os.nice(0), []

    # On Linux each thread has a priority.
    def try_it() -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), before + 1)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), before)
            may.append(True)

    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()
    if not may or not sys.platform.startswith("linux"):
        return lambda: None
    os.setpriority(os.PRIO_PROCESS, 0, LOW_PRIORITY)

    def undo() -> None:
        # Threads that were started since then have the low priority too. Some may have ended.
        for thread_id in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, int(thread_id), before)

    return undo
