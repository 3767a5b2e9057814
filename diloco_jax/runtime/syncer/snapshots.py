"""Snapshots of the whole run: the global model and the machine at one moment, written while the run goes on.

A snapshot is captured on the thread that owns model and machine, which costs nothing, and written on a thread of its
own, fragment by fragment: there is no second copy of the model (HeldStates). It holds everything that a
syncer needs to go on as if nothing had happened:

    parameters, outer   arrays; what versions they are, their digests and medians are in `meta`
    machine             the state of the machine after the input that asked for the snapshot
    tape_bytes          where on the tape the inputs begin that came later, behind the line of this snapshot
    tape_head           head of the tape's hash chain before that line, which holds it too; "" of an older release
    stats               what the machine does not count (stats.py)
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
from diloco_jax.runtime.syncer.parts import Parts

POLL_S = 1.0

log = logging.getLogger(__name__)


class TapeExtent(NamedTuple):
    """The tape of a run, as far as it is written."""

    path: Path
    size: int  # bytes, of its closed segments too


class OtherHistory(ValueError):
    """A snapshot was taken in a history that is not the one on the run's tape."""


class Snapshot(NamedTuple):
    """The run at one moment, without the values of its model."""

    global_step: int
    machine: str  # JSON of the machine's state
    tape_bytes: int
    tokens: int
    stats: Mapping[str, Any]
    kept_s: float  # on the run's clock
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
    """Write a snapshot, piece by piece, let go of its capture, and delete all but the newest `keep`."""
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
        checkpoint.prune(folder, keep)  # what a failed one left too, which may be most of a disk


def read_snapshot(path: Path, model: GlobalModel, tape: TapeExtent) -> Snapshot:
    """Read a snapshot back into a model of the same config; OtherRelease if this release does not read such ones.

    ValueError if it cannot be read, is damaged, is of another model, or was not taken of this tape; the model may be
    half of it then.
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
        raise ValueError(f"checkpoint {path} holds a model, but no {error}: a run cannot go on from it") from error
    except ValueError as error:
        raise type(error)(f"snapshot {path} cannot be used: {error}") from error
    return snapshot


def check_of_history(meta: Mapping[str, Any], tape: TapeExtent) -> None:
    """Check that a snapshot with this description was taken in the history on a tape; OtherHistory if it was not.

    What a tape cannot tell of a checkpoint, such as one that holds values alone, counts as its own.
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
    """Rename the snapshots of other histories: they would be taken for the newest, and be deleted as the oldest."""
    for path in checkpoint.complete(folder):
        try:
            check_of_history(checkpoint.CheckpointReader(path).meta, tape)
        except OtherHistory as error:
            log.warning(f"{path.name} is set aside: {error}")
            checkpoint.set_aside(path, checkpoint.OTHER_HISTORY)
        except ValueError:
            # It cannot be read, so nobody takes it for the newest; it is deleted in its turn.
            continue


class SnapshotWriter:
    """Takes the snapshots of a run, while it goes on and at its end; writes one at a time, on a thread of its own.

    A disk that fails costs a snapshot, never the run.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._folder = parts.run_dir / CHECKPOINTS
        self._thread = ThreadPoolExecutor(1, "snapshot")
        self._writing: Future[None] | None = None
        self._pieces = 0  # written so far
        self.saved = False  # the last snapshot of the run
        self.condition = ""  # why the newest attempt failed; "" when it did not
        self.failures = 0
        self._lost: ConnectionError | None = None  # says that a merge shard is gone
        self.took_s: float | None = None  # to write the newest one
        self._line = (-1, "")  # where the newest snapshot's line ends on the tape, and the head in it

    @property
    def busy(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def save(self) -> None:
        """Capture this moment, and begin to write it in the background, unless the one before is still written."""
        if self.busy:
            step = self._parts.machine.global_step
            log.info(f"no snapshot at global step {step}: the one before is still being written")
            return
        try:
            self.submit(*self._capture())
        except TapeStopped as error:
            log.warning(f"no snapshot of this moment: {error}")

    def _capture(self) -> tuple[Capture, Snapshot]:
        """Write on the tape that this moment is captured, and capture it; a second time without another line."""
        parts, machine, tape = self._parts, self._parts.machine, self._parts.tape
        tape.flush()
        if self._line[0] != tape.position:
            head = tape.head
            parts.taped.on_snapshot(machine.global_step, parts.clock.now_s(), head)
            tape.flush()
            self._line = (tape.position, head)
        capture, stats, (end, head) = parts.model.capture(bounded=True), parts.stats, self._line
        state, counted = json.dumps(machine.state()), stats.state()
        return capture, Snapshot(machine.global_step, state, end, stats.tokens, counted, parts.clock.now_s(), head)

    def submit(self, capture: Capture, snapshot: Snapshot) -> None:
        assert not self.busy, "one snapshot at a time"
        self._writing = self._thread.submit(self.write, capture, snapshot)

    def write(self, capture: Capture, snapshot: Snapshot) -> None:
        """Write now, on this thread; what goes wrong is in `condition` and in the log."""
        began_s, config = time.monotonic(), self._parts.config
        keep = config.checkpoints.keep
        try:
            path = write_snapshot(
                self._folder, config.name, self._parts.model, capture, snapshot, keep, self._count_piece
            )
        except ConnectionError as error:  # a merge shard is gone, and with it what was to be written
            self._lost, self.failures = error, self.failures + 1
            self.condition = f"the snapshot of global step {snapshot.global_step} cannot be written: {error}"
            log.warning(self.condition)
            return
        except Exception as error:  # Orbax and TensorStore raise what they like for a disk that takes nothing
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

    def _count_piece(self) -> None:
        self._pieces += 1

    def rescue(self) -> None:
        """Keep the model after an error that nobody thought of, but not the machine, which may be in between."""
        self.wait()
        parts, global_step = self._parts, self._parts.machine.global_step
        if global_step in map(checkpoint.global_step_of, checkpoint.complete(self._folder)):
            return
        meta = {"global_step": global_step, "tokens": parts.stats.tokens, "run": parts.config.name}
        pieces = parts.model.pieces(parts.model.capture(), value_only=True)
        try:
            checkpoint.save_pieces(self._folder, (checkpoint.PARAMETERS,), pieces, meta)
        except Exception as error:  # as above; the reason why the run ends is the one to tell
            log.warning(f"the model of global step {global_step} cannot be saved: {error}")

    def wait(self, tell: Callable[[], None] = lambda: None) -> None:
        """Wait until the snapshot that is being written is written; `tell` is called while it makes progress."""
        seen = -1
        while self._writing is not None and self.busy:
            if self._pieces != seen:
                seen = self._pieces
                tell()
            wait([self._writing], POLL_S)

    def save_last(self, tell: Callable[[], None]) -> None:
        """Save the end of the run, or where it was stopped; written before this returns, if that can be.

        `tell` says that the run is alive meanwhile. Stopping the run ends attempts on a disk that takes nothing.
        ConnectionError if a merge shard is gone and the run was not stopped.
        """
        if self._parts.machine.restoring:
            log.warning("no snapshot of this moment: newer values were still on their way from learners")
            return
        self.wait(tell)
        try:
            self._write_now(tell)
            while self.condition and self._lost is None and not self._parts.stop.wait(RETRY_S):
                tell()
                self._write_now(tell)
        except TapeStopped as error:
            log.warning(f"no snapshot of this moment: {error}")
            return
        if self._lost is not None and not self._parts.stop.is_set():
            raise self._lost  # no attempt of this process can succeed, but one of its successor
        self.saved = not self.condition

    def _write_now(self, tell: Callable[[], None]) -> None:
        self.submit(*self._capture())
        self.wait(tell)

    def close(self) -> None:
        self._thread.shutdown(wait=True)
