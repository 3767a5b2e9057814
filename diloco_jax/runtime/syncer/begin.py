"""The start of a syncer's process: a new run, a run whose syncer failed, or a run that has only its folder left.

fresh     There is no tape: the initial model and a new machine.
failover  There is a tape: the newest readable snapshot, then every later decision from the tape, with what the rounds
          showed to be usual (protocol/exclusion.py). Learners, which are alive, send the values that the snapshot
          lacks (protocol/syncer/comeback.py).
rewind    There is a tape, and no learner is alive, or `diloco rewind` chose the newest snapshot: the newest readable
          snapshot alone. Later rounds are void.
"""

import json
import logging
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from diloco_jax.protocol.effects import Effect, Note, SaveSnapshot
from diloco_jax.protocol.exclusion import RateHistory
from diloco_jax.protocol.releases import decided_elsewhere
from diloco_jax.protocol.syncer.observations import remembered
from diloco_jax.protocol.syncer.tape import (
    BEGINNING,
    Moment,
    Moments,
    count_epochs,
    limits_before,
    repeat_bans,
    replay,
    returns,
    stamps,
)
from diloco_jax.runtime.model.global_model import Parameters
from diloco_jax.runtime.records import checkpoint
from diloco_jax.runtime.records.files import (
    CHECKPOINTS,
    REWIND_FILE,
    TAPE_FILE,
    check_history,
    has_begun,
    how_to_use,
    rewind_chosen,
)
from diloco_jax.runtime.records.tape_file import last_time_s, read_lines
from diloco_jax.runtime.syncer.context import SyncerContext
from diloco_jax.runtime.syncer.snapshots import Snapshot, TapeExtent, read_snapshot, set_others_aside

FRESH, FAILOVER, REWIND = "fresh", "failover", "rewind"
# The refused snapshots that an error names, and the characters of each reason.
NAMED_MAX, REASON_MAX = 4, 160
RUN_ID_BYTES = 8

log = logging.getLogger(__name__)


def mode_of(run_dir: Path, *, rewind: bool) -> str:
    """Return how a syncer starts in a folder; ValueError if the folder lacks the history for it."""
    check_history(run_dir, rewinds=rewind)
    if has_begun(run_dir):
        # A damaged end of the tape is reported before anything changes.
        last_time_s(run_dir / TAPE_FILE)
        return REWIND if rewind or rewind_chosen(run_dir) else FAILOVER
    return FRESH


def begin(context: SyncerContext, initial: Callable[[], Parameters], mode: str, now_s: float) -> list[Effect]:
    """Restore machine, model and statistics, and return the effects of the first input.

    Args:
        initial: draws the initial values again.

    Raises:
        ValueError: the tape or the snapshots do not allow it; the message has the remedy.
    """
    if mode == FRESH:
        run = secrets.token_hex(RUN_ID_BYTES)
        log.info(f"the run starts; its id is {run}")
        return context.taped.on_begin(context.model.digests, now_s, run)
    if context.config.model.initial:
        _check_weights(context)
    folder, tape = context.run_dir / CHECKPOINTS, TapeExtent(context.run_dir / TAPE_FILE, context.tape.position)
    refused: list[tuple[Path, ValueError]] = []
    read = partial(read_snapshot, model=context.model, tape=tape)
    loaded = checkpoint.newest_readable(folder, read, lambda *each: refused.append(each))
    if loaded is None and refused:
        # A damaged snapshot may have replaced some of the values.
        context.model.begin(initial())
    if mode == REWIND:
        return _rewind(context, loaded, refused, now_s)
    set_others_aside(folder, tape)
    return _fail_over(context, loaded[1] if loaded is not None else None, now_s)


def _check_weights(context: SyncerContext) -> None:
    """Compare the initial values with those at the start of the run: their folder may have changed."""
    kind, _, digests, *_ = json.loads(next(read_lines(context.run_dir / TAPE_FILE)))
    if kind == "begin" and digests != context.model.digests:
        raise ValueError(
            f"model.weights {context.config.model.weights} holds other values than this run started with; name the "
            "folder with the old values, or start a new run"
        )


def _fail_over(context: SyncerContext, snapshot: Snapshot | None, now_s: float) -> list[Effect]:
    tape, states = context.run_dir / TAPE_FILE, dict[Moment, Any]()
    start, loaded = 0, BEGINNING
    if snapshot is not None:
        start, loaded = snapshot.tape_bytes, Moment(snapshot.global_step, snapshot.tape_head)
        states[loaded] = _restored(context, snapshot)
    if (limits := limits_before(read_lines(tape, start))) is not None:
        context.machine.on_limits(limits)
    uses = returns(read_lines(tape, start))
    seen, kept, count = _RunObservations(context), Moments[Any](uses), 0
    kept.keep(loaded, seen.state)
    lines = remembered(read_lines(tape, start), context.machine, seen, kept)
    try:
        for effects in replay(lines, context.machine, states, uses):
            count += 1
            for effect in effects:
                if isinstance(effect, Note) and effect.kind == "merged":
                    context.stats.on_merged(effect.members, effect.global_step)
                elif isinstance(effect, SaveSnapshot):
                    kept.keep(Moment(effect.global_step), seen.state)
    except ValueError as error:
        why = decided_elsewhere(stamps(read_lines(tape)))
        raise ValueError(f"{tape}, with lines counted from byte {start} on: {error}{why and f'; {why}'}") from error
    origin = f"the snapshot of global step {loaded.global_step}" if snapshot is not None else "the initial model"
    log.info(f"restarted from {origin} and {count} inputs of the tape, at global step {context.machine.global_step}")
    return context.taped.on_restart(
        context.model.versions, context.model.digests, loaded.global_step, now_s, loaded.head
    )


class _RunObservations:
    """The counts of a run and the rates of its rounds: what the machine's state does not have."""

    def __init__(self, context: SyncerContext) -> None:
        self._stats, self._model = context.stats, context.model
        self.on_report, self.on_merged = context.stats.on_report, context.model.recall

    def state(self) -> tuple[dict[str, Any], list[RateHistory]]:
        return self._stats.state(), self._model.histories

    def restore(self, state: tuple[dict[str, Any], list[RateHistory]]) -> None:
        counts, self._model.histories = state
        self._stats.restore(counts)


def _rewind(
    context: SyncerContext,
    loaded: tuple[Path, Snapshot] | None,
    refused: Sequence[tuple[Path, ValueError]],
    now_s: float,
) -> list[Effect]:
    folder = context.run_dir / CHECKPOINTS
    if loaded is None and refused:
        why = "; ".join(f"{path.name}: {str(error)[:REASON_MAX]}" for path, error in refused[:NAMED_MAX])
        why += f"; and {len(refused) - NAMED_MAX} more" if len(refused) > NAMED_MAX else ""
        raise ValueError(
            f"{folder} holds {len(refused)} snapshots, but this run can continue from none of them ({why}). To use "
            f"one, {how_to_use(context.run_dir)}"
        )
    if loaded is None:
        raise ValueError(
            f"{folder} holds no snapshot; start a new run (another --run-dir), and set protocol.snapshot_every so that "
            "the next one leaves some"
        )
    path, snapshot = loaded
    set_others_aside(folder, TapeExtent(context.run_dir / TAPE_FILE, context.tape.position))
    # A snapshot of the void rounds must not count as the newest later.
    for other in checkpoint.complete(folder):
        if checkpoint.global_step_of(other) > snapshot.global_step:
            checkpoint.set_aside(other)
    # The state is restored before the tape records it.
    state = _restored(context, snapshot)
    repeat_bans(read_lines(context.run_dir / TAPE_FILE, snapshot.tape_bytes), context.machine)
    # Epochs are counted from the snapshot on, so that a long tape is not read whole.
    epoch = state["epoch"][0] + count_epochs(read_lines(context.run_dir / TAPE_FILE, snapshot.tape_bytes))
    log.info(f"the run continues from {path.name}; later rounds are void")
    effects = context.taped.on_rewind(state, snapshot.global_step, epoch, now_s, snapshot.tape_head)
    context.tape.flush()
    (context.run_dir / REWIND_FILE).unlink(missing_ok=True)
    return effects


def _restored(context: SyncerContext, snapshot: Snapshot) -> dict[str, Any]:
    """Restore machine and statistics; return the machine's state."""
    state: dict[str, Any] = json.loads(snapshot.machine)
    try:
        context.machine.restore(state)
        context.stats.restore(snapshot.stats)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ValueError(
            f"the snapshot of global step {snapshot.global_step} was written by another version of this program "
            f"({type(error).__name__}: {error}); continue with that version, or start a new run"
        ) from error
    return state
