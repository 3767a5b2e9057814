"""The processes that load what an island needs before they are part of the run; standby.py has their supervisor's side.

A spare replaces an island that fails. An early island waits for its syncer's address. Both wait for lines on their
standard input, and end if it is closed.
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
from diloco_jax.runtime.local.programs import kept_if_complete
from diloco_jax.runtime.local.standby import COMPILED, mark_of
from diloco_jax.runtime.records.files import LOGS
from diloco_jax.runtime.records.pulse import Pulse
from diloco_jax.runtime.records.signals import ended_at_once, without_collections
from diloco_jax.settings.resolved import resolve
from diloco_jax.settings.run import RunConfig

# The nice value of a spare that loads.
LOW_PRIORITY = 19
# Phases of an early island.
COMPILING = "waiting for its programs"
AWAITING = "waiting for the syncer"


def compiled_loop(
    config: RunConfig, island: str, report: Report = lambda words: None, *, evaluates: bool = True
) -> BuiltInLoop:
    """Return the loop of an island with its programs compiled, and stored in the folder of `keep_programs`.

    Args:
        evaluates: also compile the evaluation, which an island that joins at once compiles beside its first steps.
    """
    report(LOADING)
    loop = BuiltInLoop(config.of_island(island), island)
    host = Host(resolve(config, loop.island.shapes, loop.island.kinds), loop.island, loop.warm_up_steps, loop.evaluate)
    host.warm_up(report)
    # It loads the compiled pass over arriving values.
    host.global_values()
    if evaluates:
        report("compiling the evaluation")
        host.warm_up_evaluation()
    return loop


@ended_at_once()
def come_early(config: RunConfig, name: str, pulse: Pulse, *, loads: bool) -> tuple[str, BuiltInLoop | None] | None:
    """Load what an island needs while its syncer starts, and wait for the syncer's address.

    Args:
        pulse: signs of life of the island, for its phases.
        loads: load the model and its programs before the address is known.

    Returns:
        The address, and the loop if it is loaded; None if the supervisor ends before.
    """
    _import_rest()
    # The supervisor ends processes that wait.
    pulse.phase(COMPILING)
    pulse.rest()
    words = sys.stdin.readline().split()
    if words[:1] != [COMPILED]:
        return None
    pulse.patient()
    loop = None
    if loads:
        with kept_if_complete("".join(words[1:])):
            loop = compiled_loop(config, name, pulse.phase, evaluates=False)
    pulse.phase(AWAITING)
    pulse.rest()
    address = sys.stdin.readline().strip()
    pulse.patient()
    return (address, loop) if address else None


def _import_rest() -> None:
    """Import what a learner needs later: the order of samples uses Grain, which is imported when it draws the order."""
    with without_collections():
        for module in ("diloco_jax.runtime.learner.run", "grain"):
            importlib.import_module(module)


@ended_at_once()
def stand_by(config: RunConfig, run_dir: Path, name: str, *, loads: bool) -> tuple[str, int, BuiltInLoop | None] | None:
    """Load what an island needs, and wait for the line that makes this process the island.

    Args:
        loads: load the model and its programs if devices are emulated.

    Returns:
        The syncer's address, the incarnation, and the loop if it is loaded; None if the line never comes.
    """
    undo = _lower_priority()
    _import_rest()
    loop = compiled_loop(config, name) if loads and os.environ.get("JAX_PLATFORMS") == "cpu" else None
    mark = mark_of(run_dir, name)
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
