"""Snapshots of the whole run: the global model and the machine at one moment, written while the run continues.

The thread that owns model and machine captures a snapshot, which costs nothing. A separate thread writes it, fragment
by fragment, without a second copy of the model (HeldStates). A snapshot holds everything that a syncer needs to
continue as if nothing had happened:

    parameters, outer   arrays; `meta` has their versions, digests and medians
    machine             state of the machine after the input that asked for the snapshot
    tape_bytes          end of this snapshot's line on the tape, where later inputs start
    tape_head           head of the tape's hash chain before that line, which also has it; "" in older releases
    stats               counts that the machine does not keep (stats.py)
"""

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from diloco_jax.protocol.releases import STAMP, check_readable
from diloco_jax.runtime.model.arithmetic import Capture
from diloco_jax.runtime.model.global_model import OUTER, GlobalModel
from diloco_jax.runtime.records import checkpoint
from diloco_jax.runtime.records.files import CHECKPOINTS
from diloco_jax.runtime.records.os_errors import remedy
from diloco_jax.runtime.records.tape_chain import head_in
from diloco_jax.runtime.records.tape_file import RETRY_S, TapeStopped, line_before
from diloco_jax.runtime.syncer.context import SyncerContext

POLL_S = 1.0

log = logging.getLogger(__name__)


class TapeExtent(NamedTuple):
    """The tape of a run up to its present end."""

    path: Path
    # In bytes, with the closed segments.
    size: int


class OtherHistory(ValueError):
    """A snapshot was taken in a history that is not the one on the run's tape."""


class Snapshot(NamedTuple):
    """The run at one moment, without the values of its model."""

    global_step: int
    # State of the machine as JSON.
    machine: str
    tape_bytes: int
    tokens: int
    stats: Mapping[str, Any]
    # Time on the run's clock.
    kept_s: float
    tape_head: str = ""


def write_snapshot(
    folder: Path,
    run: str,
    model: GlobalModel,
    capture: Capture,
    snapshot: Snapshot,
    keep: int,
    on_piece: Callable[[], None] = lambda: None,
) -> Path:
    """Write a snapshot piece by piece, release its capture, and delete all but the newest `keep` snapshots."""
    state = json.loads(snapshot.machine)
    meta = {"run": run, "stamp": STAMP, "epoch": state["epoch"][0], **model.plain(capture)}
    meta |= {**snapshot._asdict(), "machine": state}

    def pieces() -> Iterator[checkpoint.SavedPart]:
        for piece in model.pieces(capture):
            on_piece()
            yield piece
            del piece

    try:
        return checkpoint.save_pieces(folder, (checkpoint.PARAMETERS, OUTER), pieces(), meta)
    finally:
        capture.release()
        # A failed snapshot may have filled most of a disk, so its files go too.
        checkpoint.prune(folder, keep)


def read_snapshot(path: Path, model: GlobalModel, tape: TapeExtent) -> Snapshot:
    """Read a snapshot into a model of the same config.

    Raises:
        OtherRelease: this release does not read such snapshots.
        ValueError: the snapshot is unreadable or damaged, or belongs to another model or tape. Some values of `model`
            may be replaced then.
    """
    reader = checkpoint.CheckpointReader(path)
    meta = reader.meta
    check_readable(f"snapshot {path}", meta.get("stamp", STAMP))
    try:
        found = {"tape_head": meta.get("tape_head", "")}
        found |= {name: meta[name] for name in Snapshot._fields if name not in found}
        snapshot = Snapshot(**found | {"machine": json.dumps(found["machine"])})
        check_of_history(meta, tape)
        model.load_saved(reader.piece, meta)
    except (KeyError, IndexError) as error:
        raise ValueError(f"checkpoint {path} holds a model, but no {error}: a run cannot continue from it") from error
    except ValueError as error:
        raise type(error)(f"snapshot {path} cannot be used: {error}") from error
    return snapshot


def check_of_history(meta: Mapping[str, Any], tape: TapeExtent) -> None:
    """Check that a snapshot with this description was taken in the history on a tape; OtherHistory if it was not.

    A checkpoint without a position on the tape, such as one with values alone, passes.
    """
    if not isinstance(end := meta.get("tape_bytes", 0), int) or end <= 0:
        return
    if end > tape.size:
        raise OtherHistory(f"it was taken at byte {end} of a tape that has {tape.size}")
    head = meta.get("tape_head", "")
    if (line := line_before(tape.path, end)) is None or (head and head_in(line) != head):
        raise OtherHistory(
            f"it is of another run, or of another history of this one: byte {end} of the tape is not its own"
        )


def set_others_aside(folder: Path, tape: TapeExtent) -> None:
    """Rename the snapshots of other histories, which would count as the newest, or be deleted as the oldest."""
    for path in checkpoint.complete(folder):
        try:
            check_of_history(checkpoint.CheckpointReader(path).meta, tape)
        except OtherHistory as error:
            log.warning(f"{path.name} is set aside: {error}")
            checkpoint.set_aside(path, checkpoint.OTHER_HISTORY)
        except ValueError:
            # An unreadable snapshot is never the newest, and is deleted later.
            continue


class SnapshotWriter:
    """Takes the snapshots of a run, during it and at its end, and writes one at a time on a separate thread.

    A disk failure costs a snapshot, never the run.

    Args:
        on_saved: Is called with each snapshot that was written, on the thread that wrote it.
    """

    def __init__(self, context: SyncerContext, on_saved: Callable[[Path], object] = lambda path: None) -> None:
        self._context = context
        self._on_saved = on_saved
        self._folder = context.run_dir / CHECKPOINTS
        self._thread = ThreadPoolExecutor(1, "snapshot")
        self._writing: Future[None] | None = None
        # Pieces written so far.
        self._pieces = 0
        # Whether the last snapshot of the run is written.
        self.saved = False
        # Why the newest attempt failed; "" if it did not.
        self.condition = ""
        self.failures = 0
        # Seconds that the newest snapshot took.
        self.took_s: float | None = None
        # Where the line of the newest snapshot ends on the tape, and the head in it.
        self._line = (-1, "")

    @property
    def busy(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def save(self) -> None:
        """Capture this moment and write it in the background, unless a snapshot is still being written."""
        if self.busy:
            step = self._context.machine.global_step
            log.info(f"no snapshot at global step {step}: the one before is still being written")
            return
        try:
            self.submit(*self._capture())
        except TapeStopped as error:
            log.warning(f"no snapshot of this moment: {error}")

    def _capture(self) -> tuple[Capture, Snapshot]:
        """Record a snapshot on the tape and capture it; a second capture of the same moment adds no line."""
        context, machine, tape = self._context, self._context.machine, self._context.tape
        tape.flush()
        if self._line[0] != tape.position:
            head = tape.head
            context.taped.on_snapshot(machine.global_step, context.clock.now_s(), head)
            tape.flush()
            self._line = (tape.position, head)
        capture, stats, (end, head) = context.model.capture(bounded=True), context.stats, self._line
        state, counted = json.dumps(machine.state()), stats.state()
        return capture, Snapshot(machine.global_step, state, end, stats.tokens, counted, context.clock.now_s(), head)

    def submit(self, capture: Capture, snapshot: Snapshot) -> None:
        assert not self.busy, "one snapshot at a time"
        self._writing = self._thread.submit(self.write, capture, snapshot)

    def write(self, capture: Capture, snapshot: Snapshot) -> None:
        """Write a snapshot on this thread; a failure is reported in `condition` and the log."""
        began_s, config = time.monotonic(), self._context.config
        keep = config.checkpoints.keep
        try:
            path = write_snapshot(
                self._folder, config.name, self._context.model, capture, snapshot, keep, self._count_piece
            )
        except Exception as error:
            # Orbax and TensorStore raise various errors for a disk that cannot be written.
            reason = " ".join(str(error).split())[:300]
            self.condition = (
                f"the snapshot of global step {snapshot.global_step} cannot be written ({type(error).__name__}: "
                f"{reason}): {remedy(error, self._folder)}"
            )
            self.failures += 1
            log.warning(self.condition)
            return
        self.condition, self.took_s = "", time.monotonic() - began_s
        log.info(f"global step {snapshot.global_step}: snapshot {path.name}")
        self._on_saved(path)

    def _count_piece(self) -> None:
        self._pieces += 1

    def rescue(self) -> None:
        """Save the model after an unexpected error, without the machine, whose state may be inconsistent."""
        self.wait()
        context, global_step = self._context, self._context.machine.global_step
        if global_step in map(checkpoint.global_step_of, checkpoint.complete(self._folder)):
            return
        meta = {"global_step": global_step, "tokens": context.stats.tokens, "run": context.config.name}
        pieces = context.model.pieces(context.model.capture(), value_only=True)
        try:
            checkpoint.save_pieces(self._folder, (checkpoint.PARAMETERS,), pieces, meta)
        except Exception as error:
            # The error that ends the run is more important than this one.
            log.warning(f"the model of global step {global_step} cannot be saved: {error}")

    def wait(self, tell: Callable[[], None] = lambda: None) -> None:
        """Wait for the snapshot that is being written, and call `tell` while it makes progress."""
        seen = -1
        while self._writing is not None and self.busy:
            if self._pieces != seen:
                seen = self._pieces
                tell()
            wait([self._writing], POLL_S)

    def save_last(self, tell: Callable[[], None]) -> None:
        """Save the final state of the run, or its state when it was stopped, before this returns.

        Failed attempts are repeated until one succeeds or the run is stopped.

        Args:
            tell: reports that the run is alive; called during the wait.
        """
        if self._context.machine.restoring:
            log.warning("no snapshot of this moment: newer values were still on their way from learners")
            return
        # Nobody takes over a run that ends, and the copy would delay the end.
        self._on_saved = lambda path: None
        self.wait(tell)
        try:
            self._write_now(tell)
            while self.condition and not self._context.stop.wait(RETRY_S):
                tell()
                self._write_now(tell)
        except TapeStopped as error:
            log.warning(f"no snapshot of this moment: {error}")
            return
        self.saved = not self.condition

    def _write_now(self, tell: Callable[[], None]) -> None:
        self.submit(*self._capture())
        self.wait(tell)

    def close(self) -> None:
        self._thread.shutdown(wait=True)
