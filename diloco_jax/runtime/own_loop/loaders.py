"""Loaders that an island reads its own data from: their batches, and the state that the island saves and restores.

An island saves the state after the batch that was trained last, even if the loop or the loader reads ahead. It saves
the newest state that it took at or before that batch, and the number of batches to skip from there.
"""

import json
import re
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

from diloco_jax.runtime.island.loader_state import Loader
from diloco_jax.runtime.own_loop.data_shard import DataShard
from diloco_jax.runtime.own_loop.plain import pack, unpack

# A loop may read so many batches more than it has trained.
AHEAD_MAX = 64
# Taking states of a loader that is read ahead may cost one part in so many of the time.
STATE_SHARE = 20
HEAD_BYTES_MAX = 1024
# The only names of files that TensorFlow writes for an iterator.
TF_FILE = re.compile(r"position(\.index|\.data-\d{5}-of-\d{5})")


class GetSet:
    """A loader with `get_state` and `set_state`: an iterator of Grain."""

    kind = "get_state"

    def __init__(self, source: Any) -> None:
        self.source = source

    def state(self) -> bytes:
        return pack(self.source.get_state())

    def restore(self, state: bytes) -> None:
        self.source.set_state(unpack(state))


class StateDict:
    """A loader with `state_dict` and `load_state_dict`: Hugging Face's IterableDataset, torchdata's StatefulDataLoader.

    Its state must be loaded before the iteration starts.
    """

    kind = "state_dict"

    def __init__(self, source: Any) -> None:
        self.source = source

    def state(self) -> bytes:
        return pack(self.source.state_dict())

    def restore(self, state: bytes) -> None:
        self.source.load_state_dict(unpack(state))


class TensorFlowIterator:
    """An iterator of tf.data; its state is a checkpoint of TensorFlow, with the contents of its shuffle buffers."""

    kind = "tf.data"

    def __init__(self, source: Any) -> None:
        self.source = source

    def _checkpoint(self) -> Any:
        return sys.modules["tensorflow"].train.Checkpoint(iterator=self.source)

    def state(self) -> bytes:
        with tempfile.TemporaryDirectory(prefix="diloco-loader-") as folder:
            self._checkpoint().write(f"{folder}/position")
            files = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
        return pack({name: content for name, content in files.items() if TF_FILE.fullmatch(name)})

    def restore(self, state: bytes) -> None:
        with tempfile.TemporaryDirectory(prefix="diloco-loader-") as folder:
            for name, content in unpack(state).items():
                if not TF_FILE.fullmatch(name) or not isinstance(content, bytes):
                    raise ValueError(f"{name[:80]!r} is not a file of an iterator's checkpoint")
                Path(folder, name).write_bytes(content)
            self._checkpoint().read(f"{folder}/position").assert_consumed()


class CountedBatches:
    """Any iterable that yields the same batches at every start; its state is the number of batches that were read."""

    kind = "count"

    def __init__(self, source: Iterable[Any]) -> None:
        self._iterator = iter(source)
        self._count = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._iterator)
        self._count += 1
        return batch

    def state(self) -> bytes:
        return pack(self._count)

    def restore(self, state: bytes) -> None:
        count = unpack(state)
        if not isinstance(count, int) or not self._count <= count:
            raise ValueError(f"the state is {count!r}, not a number of batches")
        while self._count < count:
            try:
                next(self)
            except StopIteration:
                raise ValueError(f"it ended after {self._count} of the {count} batches to skip") from None


class Position(NamedTuple):
    """A loader's state, and how many batches had been read when it was taken; negative before batches to skip."""

    read: int
    state: bytes


class Batches:
    """The batches of a loader, one after the other, and the state after the batch that was trained last.

    A loop may also read from the loader itself. Then the state at the end of a step counts, so such a loop must not
    read ahead.

    Args:
        source: The loader.
        iterate: Returns an iterator over its batches, after its state was restored.
        kind: How the state is made, so that a state of another kind of loader is refused.
        batches_per_step: Batches that one step trains.
    """

    def __init__(
        self, source: Loader, iterate: Callable[[], Iterator[Any]], kind: str, batches_per_step: int = 1
    ) -> None:
        self._source = source
        self._iterate = iterate
        self._kind = kind
        self._per_step = batches_per_step
        self._iterator: Iterator[Any] | None = None
        # A thread of the loop may read while the loop trains.
        self._lock = threading.Lock()
        self._read = self._trained = 0
        # Whether a batch is being read; the loader's own state is then that of neither batch.
        self._reading = False
        # Whether the loop reads from here, and not from the loader itself.
        self._used = False
        # States at batches from the newest trained one on, if the loop reads ahead.
        self._marks: deque[Position] = deque()
        self._ahead = False
        self._rest_until_s = 0.0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        with self._lock:
            if self._iterator is None:
                if not self._marks:
                    self._mark()
                self._iterator = self._iterate()
            self._reading = self._used = True
        # Without the lock, because a step must not wait for a slow batch that a thread reads ahead.
        batch = next(self._iterator)
        with self._lock:
            self._reading = False
            self._read += 1
            if self._ahead and time.monotonic() >= self._rest_until_s:
                self._mark()
        return batch

    def _mark(self) -> Position:
        began_s = time.monotonic()
        found = Position(self._read, self._source.state())
        ended_s = time.monotonic()
        self._rest_until_s = ended_s + STATE_SHARE * (ended_s - began_s)
        self._marks.append(found)
        return found

    def stepped(self) -> None:
        """Record that a step has trained its batches; ValueError if the loop reads more batches than it trains."""
        with self._lock:
            if not self._used:
                return
            self._trained = min(self._read, self._trained + self._per_step)
            waiting = self._read - self._trained
            if waiting > AHEAD_MAX:
                raise ValueError(
                    f"the loop has read {waiting} batches more than its steps trained ({self._per_step} per step): "
                    "give the true number: loader=diloco_jax.loader(source, batches_per_step=N)"
                )
            self._ahead = self._ahead or self._reading or waiting > 0
            while len(self._marks) > 1 and self._marks[1].read <= self._trained:
                self._marks.popleft()

    def state(self) -> bytes:
        """Return the position after the batch that was trained last."""
        with self._lock:
            if not self._used:
                found, skip = self._source.state(), 0
            else:
                known = any(mark.read == self._trained for mark in self._marks)
                if not known and self._read == self._trained and not self._reading:
                    self._mark()
                newest = next(mark for mark in reversed(self._marks) if mark.read <= self._trained)
                found, skip = newest.state, self._trained - newest.read
            return pack({"kind": self._kind, "skip": skip}) + b"\n" + found

    def restore(self, state: bytes) -> None:
        """Continue after the batch of this position; ValueError if it is not of such a loader."""
        head, line, _ = state[:HEAD_BYTES_MAX].partition(b"\n")
        about = json.loads(head) if line else {}
        kind, skip = about.get("kind"), about.get("skip")
        if kind != self._kind or not isinstance(skip, int) or skip < 0:
            raise ValueError(f"the state is of a loader with {kind!r}, and this one has {self._kind!r}")
        with self._lock:
            found = state[len(head) + 1 :]
            self._source.restore(found)
            # Some loaders return their state before their first batch as if nothing had been restored.
            self._marks = deque([Position(-skip, found)])
            if skip:
                self._iterator = self._iterate()
                for number in range(skip):
                    if next(self._iterator, self) is self:
                        raise ValueError(f"the loader ended after {number} of the {skip} batches to skip")


def loader(source: Any, *, batches_per_step: int = 1, by_count: bool = False) -> Batches:
    """Return the batches of a loader whose position an island can save; `join(loader=...)` calls this function itself.

    Args:
        source: A dataset, loader or iterator of Grain; a dataset or iterator of tf.data; an IterableDataset of Hugging
            Face; a StatefulDataLoader of torchdata; or any object with `state() -> bytes`, `restore(bytes)` and
            `__iter__`.
        batches_per_step: Batches that one step of the loop reads, such as those of an accumulated gradient.
        by_count: Whether to save the number of batches in place of the source's own state. The source may then be any
            iterable that yields the same batches at every start. A returning island reads and drops that many.

    Raises:
        ValueError: The source has no state.
    """
    if not isinstance(batches_per_step, int) or batches_per_step < 1:
        raise ValueError(f"batches_per_step is {batches_per_step!r}; give a whole number from 1")
    if isinstance(source, Batches):
        return source
    if by_count:
        counted = CountedBatches(source)
        return Batches(counted, lambda: counted, counted.kind, batches_per_step)
    known = adapted(source)
    # A dataset of Grain or tf.data has no position; its iterator does.
    if known is None and not hasattr(source, "__next__") and hasattr(source, "__iter__"):
        source = iter(source)
        known = adapted(source)
    if known is None:
        raise ValueError(
            f"a loader of type {type(source).__name__} has no state that an island can save: give an iterator of Grain "
            "or tf.data, an IterableDataset of Hugging Face, a StatefulDataLoader, or an object with state() and "
            "restore(); if it yields the same batches at every start, give diloco_jax.loader(source, by_count=True)"
        )
    found, kind = known
    return Batches(found, lambda: iter(source), kind, batches_per_step)


def loader_of(given: Any, place: Callable[[], DataShard], incarnation: int) -> Batches | None:
    """Return the batches of `join`'s loader, a source or a function (index, count, incarnation) that makes one."""
    if given is None:
        return None
    if callable(given) and not hasattr(given, "__iter__") and adapted(given) is None:
        given = given(place().index, place().count, incarnation)
    return loader(given)


def adapted(source: Any) -> tuple[Loader, str] | None:
    """Return a loader with its kind, with the methods that an island calls; None if it has no state."""
    if isinstance(source, Loader):
        return source, "state"
    for kind in (GetSet, StateDict):
        if all(callable(getattr(source, name, None)) for name in METHODS[kind.kind]):
            return kind(source), kind.kind
    if type(source).__module__.partition(".")[0] == "tensorflow" and hasattr(source, "__next__"):
        return TensorFlowIterator(source), TensorFlowIterator.kind
    return None


METHODS = {GetSet.kind: ("get_state", "set_state"), StateDict.kind: ("state_dict", "load_state_dict")}
