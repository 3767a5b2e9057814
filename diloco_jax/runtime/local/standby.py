"""Spare processes of islands: imports done and programs loaded, so that an island which dies is back in a moment.

A spare waits for one line on its standard input, the word to go. Before it, it is nobody: it has no incarnation, no
session, no certificate and no tape, and only the supervisor knows of it. Emulated devices are the process's own, and a
spare loads the model and its programs on them; an accelerator is its island's alone, and a spare of one has done its
imports.

Emulated islands that are alike share programs too: one process compiles them while the syncer begins, and all load
them. Compiling takes such an island several times as long as everything else before its first step, and islands that
share cores would all do it at the same time. Real accelerators are left to their islands.
"""

import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from diloco_jax.runtime.island.built_in import LOADING, BuiltInLoop
from diloco_jax.runtime.island.host import Host, Told
from diloco_jax.runtime.local.machine import Machine, emulated_devices
from diloco_jax.runtime.local.processes import Process
from diloco_jax.runtime.records.files import HEALTH, LOGS
from diloco_jax.settings.resolved import resolve
from diloco_jax.settings.run import RunConfig

LOW_PRIORITY = 19  # nice value of a spare that loads


class Spares:
    """The spare processes of a run, for its supervisor: one for each life of an island, loaded one at a time."""

    def __init__(self, run_dir: Path, start: Callable[[str], Process]) -> None:
        self._run_dir = run_dir
        self._start = start
        self._spares: dict[str, Process] = {}

    def tend(self, name: str) -> None:
        """Start a spare for an island that trains, if it had none in this life and no other one is loading."""
        loading = any(each.process.poll() is None and not self.ready(other) for other, each in self._spares.items())
        if name not in self._spares and not loading and (self._run_dir / HEALTH / f"{name}.ready").exists():
            _mark(self._run_dir, name).unlink(missing_ok=True)
            self._spares[name] = self._start(name)

    def ready(self, name: str) -> bool:
        """Tell whether an island has a spare that waits for its word."""
        spare = self._spares.get(name)
        return spare is not None and spare.process.poll() is None and _mark(self._run_dir, name).exists()

    def take(self, name: str, address: str, incarnation: str) -> Process | None:
        """Let the spare of an island become it, if there is one; a spare that still loads has a head start."""
        spare = self._spares.pop(name, None)
        if spare is None or not _close(spare, f"{address.strip()} {incarnation}\n") or spare.process.poll() is not None:
            return None
        return Process(name, spare.process, self._run_dir / LOGS / f"{name}.log")

    def end(self) -> None:
        for spare in self._spares.values():
            spare.process.kill()
            spare.process.wait()
            _close(spare)


def _close(spare: Process, words: str = "") -> bool:
    """Say the last words to a spare; False if it has ended."""
    pipe = spare.process.stdin
    assert pipe is not None, "a spare has a pipe"
    try:
        with pipe:
            pipe.write(words.encode())
    except OSError:
        return False
    return True


def shared_by_several(config: RunConfig, machine: Machine) -> list[str]:
    """Name one island of each kind that has several members, all of them emulated in a process of their own."""
    if not machine.emulates or config.islands.controller == "single" or config.islands.command:
        return []
    kinds: dict[str, list[str]] = {}
    for name in config.islands.names:
        own = config.island(name)
        if own.hosts == 1 and not own.topology:
            kind = own._replace(name="", zone="", devices=emulated_devices(config, name))
            kinds.setdefault(repr(kind), []).append(name)
    return [names[0] for names in kinds.values() if len(names) > 1]


def compiled_loop(config: RunConfig, island: str, told: Told = lambda words: None) -> BuiltInLoop:
    """Return the loop of an island with all that it runs compiled, and kept where `keep_programs` said."""
    told(LOADING)
    loop = BuiltInLoop(config, island)
    host = Host(resolve(config, loop.island.shapes, loop.island.kinds), loop.island, loop.warm_up, loop.evaluate)
    host.warm_up(told)
    told("compiling the evaluation")
    host.warm_up_evaluation()
    return loop


def stand_by(config: RunConfig, run_dir: Path, name: str, *, loads: bool) -> tuple[str, int, BuiltInLoop | None] | None:
    """Load what an island needs, and wait for the word to become it: syncer's address, incarnation, and a loaded loop.

    None if the word never comes. The model and its programs are loaded where `loads` says so and devices are emulated.
    """
    undo = _lower_priority()
    importlib.import_module("diloco_jax.runtime.learner.run")
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
    """Return the file that a spare has made when it waits for its word."""
    return run_dir / HEALTH / f"{name}.standby"


def _lower_priority() -> Callable[[], None]:
    """Let whoever trains go first, if this system lets us take it back; returns what does so."""
    before, may = os.nice(0), []

    def try_it() -> None:  # priorities are of threads on Linux
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
        for thread_id in os.listdir("/proc/self/task"):  # those that were started since have it too
            with contextlib.suppress(OSError):  # it has ended
                os.setpriority(os.PRIO_PROCESS, int(thread_id), before)

    return undo
