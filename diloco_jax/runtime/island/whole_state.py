"""A learner's whole state outside of its island: parts that arrive from a donor, and what it saved on disk."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from diloco_jax.core.codec import Bytes
from diloco_jax.protocol.learner.start import Saved
from diloco_jax.runtime.records import checkpoint
from diloco_jax.runtime.records.files import CHECKPOINTS, LEARNERS
from diloco_jax.training.whole_state.staging import StagedState

STATE_PART_BYTES = 1 << 20  # small, so that a fragment's value never waits long behind a part
SAVED_KEPT = 2
STATE = "state"  # the group of arrays in a learner's checkpoint

log = logging.getLogger(__name__)


class ReceivedState:
    """The parts of a donor's state, in memory for exactly one state of this island's layout.

    Args:
        num_bytes: size of a whole state.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._parts = -(-num_bytes // STATE_PART_BYTES)
        self._buffer: bytearray | None = None
        self._problem = ""
        self.donor_incarnation = 0

    def keep(self, part: int, parts: int, payload: Bytes, donor_incarnation: int) -> None:
        """Keep part `part` of `parts`. One that does not fit makes the whole state unusable."""
        self.donor_incarnation = donor_incarnation
        start = part * STATE_PART_BYTES
        size = min(STATE_PART_BYTES, self._num_bytes - start)
        if parts != self._parts or len(payload) != size:
            self._problem = (
                f"part {part} of {parts} has {len(payload)} bytes, but a state here has {self._num_bytes} bytes in "
                f"{self._parts} parts: the donor has another model or optimizer"
            )
            return
        if self._buffer is None:
            self._buffer = bytearray(self._num_bytes)
        self._buffer[start : start + size] = payload

    def drop(self) -> None:
        """Forget everything."""
        self._buffer, self._problem = None, ""

    def take(self) -> bytearray:
        """Return the whole state and forget it.

        Raises:
            ValueError: a part did not fit.
        """
        buffer, problem = self._buffer, self._problem
        self.drop()
        if problem or buffer is None:
            raise ValueError(problem or "no part arrived")
        return buffer


class StateName(NamedTuple):
    """The name of a learner's state on disk."""

    incarnation: int
    local_step: int
    global_step: int
    digests: tuple[int, ...]  # of the global values that its parameters are based on


class SavedState(NamedTuple):
    """A state of an earlier life, read from disk."""

    name: StateName
    values: dict[str, np.ndarray]  # leaf -> array

    @property
    def described(self) -> Saved:
        """Return what the machine needs to know of it."""
        return Saved(self.name.global_step, self.name.digests)


class SavedStates:
    """The states of one learner on disk, written in the background, one at a time.

    Args:
        hosts: processes of the island. With several nothing is saved or found: Orbax makes every process of a JAX job
            take part in a save, by collectives that would meet those of training.
    """

    def __init__(self, run_dir: Path, learner_id: str, hosts: int = 1) -> None:
        self.kept = hosts == 1  # whether states are saved
        self._folder = run_dir / CHECKPOINTS / LEARNERS / learner_id
        self._worker = ThreadPoolExecutor(1, "save")
        self._saving: Future[None] | None = None

    def find(self) -> Future[SavedState | None]:
        """Begin to read the newest state that can be read."""
        return self._worker.submit(self._find)

    def _find(self) -> SavedState | None:
        found = checkpoint.newest_readable(self._folder, _read) if self.kept else None
        return found[1] if found else None

    @property
    def busy(self) -> bool:
        """True while a state is being written: its copy is in memory, and another one would be a second."""
        return self._saving is not None and not self._saving.done()

    def save(self, staged: StagedState, done: Callable[[], None], name: StateName) -> None:
        """Begin to write a staged state; a disk that refuses it costs this state, not the run.

        Args:
            done: called when it was read, or could not be.
        """
        assert not self.busy, "a second state is saved before the first is written"
        self._saving = self._worker.submit(self._save, staged, done, name)

    def _save(self, staged: StagedState, done: Callable[[], None], name: StateName) -> None:
        try:
            try:
                values = staged.value()
            finally:
                done()
            written = checkpoint.save(self._folder, {STATE: values}, name._asdict())
            for path in checkpoint.complete(self._folder):
                if path.name > written.name:  # of a history that the run went back behind
                    shutil.rmtree(path)
            checkpoint.prune(self._folder, SAVED_KEPT)
        except Exception as error:  # whatever Orbax and TensorStore raise for a disk that is full or gone
            reason = " ".join(str(error).split())[:300]
            log.warning(f"the state of global step {name.global_step} was not saved ({reason}); training goes on")

    def close(self, wait: bool) -> None:
        """Take no more; with `wait`, return when what was begun is written."""
        self._worker.shutdown(wait=wait, cancel_futures=True)


def _read(path: Path) -> SavedState:
    groups, meta = checkpoint.load(path, STATE)
    try:
        incarnation, local_step, global_step = (int(meta[key]) for key in StateName._fields[:3])
        name = StateName(incarnation, local_step, global_step, tuple(map(int, meta["digests"])))
    except (KeyError, TypeError) as error:
        raise ValueError(f"checkpoint {path} is not of a learner ({error})") from error
    return SavedState(name, groups[STATE])
