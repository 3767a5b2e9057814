"""The beginning of a syncer's process: a new run, one whose syncer died, or one of which only the folder is left.

fresh     no tape: the initial model, a new machine
failover  a tape: the newest readable snapshot, then every decision after it from the tape; what values the snapshot
          lacks comes from the learners, who are alive and hold them (protocol/syncer/comeback.py)
rewind    a tape, and nobody is alive: the newest readable snapshot alone; what came after it is void
"""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from diloco_jax.protocol.effects import Effect, Note, SaveSnapshot
from diloco_jax.protocol.messages import StepReport
from diloco_jax.protocol.syncer.tape import lives, replay
from diloco_jax.runtime.model.global_model import Parameters
from diloco_jax.runtime.records import checkpoint
from diloco_jax.runtime.records.files import CHECKPOINTS, TAPE_FILE
from diloco_jax.runtime.records.tape_file import last_time_s, read_lines
from diloco_jax.runtime.syncer.parts import Parts
from diloco_jax.runtime.syncer.snapshots import Snapshot, read_snapshot

FRESH, FAILOVER, REWIND = "fresh", "failover", "rewind"

log = logging.getLogger(__name__)


def mode_of(run_dir: Path, *, rewind: bool) -> str:
    tape = run_dir / TAPE_FILE
    if not tape.exists() or last_time_s(tape) is None:
        return FRESH
    return REWIND if rewind else FAILOVER


def begin(parts: Parts, initial: Callable[[], Parameters], mode: str, now_s: float) -> list[Effect]:
    """Bring machine, model and statistics to where they go on; returns the effects of the first input.

    ValueError, with what to do, if the tape or the snapshots do not allow it. `initial` makes the initial values again.
    """
    if mode == FRESH:
        return parts.taped.on_begin(parts.model.digests, now_s)
    if parts.config.model.weights:
        _check_weights(parts)
    folder, tape_bytes = parts.run_dir / CHECKPOINTS, (parts.run_dir / TAPE_FILE).stat().st_size
    loaded = checkpoint.newest_readable(folder, lambda path: read_snapshot(path, parts.model, tape_bytes))
    if loaded is None and checkpoint.complete(folder):
        parts.model.begin(initial())  # one that is damaged may have been read in part
    if mode == REWIND:
        return _rewind(parts, loaded, now_s)
    return _fail_over(parts, loaded[1] if loaded is not None else None, now_s)


def _check_weights(parts: Parts) -> None:
    """Compare the initial values with those that the run began with: their folder may have moved, or changed."""
    kind, _, digests, *_ = json.loads(next(read_lines(parts.run_dir / TAPE_FILE)))
    if kind == "begin" and digests != parts.model.digests:
        raise ValueError(
            f"model.weights {parts.config.model.weights} holds other values than this run began with; name the folder "
            "with the old ones, or start a new run"
        )


def _fail_over(parts: Parts, snapshot: Snapshot | None, now_s: float) -> list[Effect]:
    states: dict[int, Any] = {}
    start, loaded = 0, -1
    if snapshot is not None:
        states[snapshot.global_step] = _restored(parts, snapshot)
        start, loaded = snapshot.tape_bytes, snapshot.global_step
    count, counted = 0, {loaded: parts.stats.state()}
    lines = _counted(read_lines(parts.run_dir / TAPE_FILE, start), parts, counted)
    for effects in replay(lines, parts.machine, states):
        count += 1
        for effect in effects:
            if isinstance(effect, Note) and effect.kind == "merged":
                parts.stats.on_merged(effect.members, effect.global_step)
            elif isinstance(effect, SaveSnapshot):
                counted[effect.global_step] = parts.stats.state()
    origin = f"the snapshot of global step {loaded}" if loaded >= 0 else "the initial model"
    log.info(f"restarted from {origin} and {count} inputs of the tape, at global step {parts.machine.global_step}")
    return parts.taped.on_restart(parts.model.versions, parts.model.digests, loaded, now_s)


def _counted(lines: Iterator[str], parts: Parts, counted: dict[int, dict[str, Any]]) -> Iterator[str]:
    """Pass lines on; each report is counted just before the machine gets it, as it was when it was written.

    What had been counted goes to `counted` by the global step of each snapshot, in case the run went back to it.
    """
    for line in lines:
        if line.startswith('["StepReport"'):
            _, then_s, *fields = json.loads(line)
            parts.stats.on_report(StepReport(*fields), then_s)
        elif line.startswith('["snapshot"'):
            counted[json.loads(line)[2]] = parts.stats.state()
        elif line.startswith('["rewind"') and (kept := counted.get(json.loads(line)[2])):
            parts.stats.restore(kept)  # else the machine's replay says that its snapshot is not on the tape
        yield line


def _rewind(parts: Parts, loaded: tuple[Path, Snapshot] | None, now_s: float) -> list[Effect]:
    folder = parts.run_dir / CHECKPOINTS
    if loaded is None:
        raise ValueError(
            f"{folder} holds no snapshot from which this run can go on; start a new run (another --run-dir), and set "
            "protocol.snapshot_every so that the next one leaves some"
        )
    path, snapshot = loaded
    for other in checkpoint.complete(folder):  # of the void future: nobody may take it for the newest later
        if checkpoint.global_step_of(other) > snapshot.global_step:
            checkpoint.set_aside(other)
    epoch = lives(read_lines(parts.run_dir / TAPE_FILE)) + 1
    state = _restored(parts, snapshot)  # before the tape says that it was
    log.info(f"the run goes on from {path.name}; what came after it is void")
    return parts.taped.on_rewind(state, snapshot.global_step, epoch, now_s)


def _restored(parts: Parts, snapshot: Snapshot) -> dict[str, Any]:
    """Restore machine and statistics; return the machine's state."""
    state: dict[str, Any] = json.loads(snapshot.machine)
    try:
        parts.machine.restore(state)
        parts.stats.restore(snapshot.stats)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ValueError(
            f"the snapshot of global step {snapshot.global_step} was written by another version of this program "
            f"({type(error).__name__}: {error}); go on with that version, or start a new run"
        ) from error
    return state
