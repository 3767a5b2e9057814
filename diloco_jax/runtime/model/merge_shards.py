"""The merge shards of a syncer, seen from their owner: separate processes on this host.

This process starts the shards, sends them commands over a pipe (the methods of ShardRun), and ends with an error when
one of them ends; a shard ends when the pipe ends. A stopped shard (SIGSTOP) would block merges, snapshots and the end
of the run. So it is killed after STOPPED_S, and the run recovers as from any failure of a shard. This process knows
only numbers and sizes of learners' values and outgoing versions. A shard frees an object when this process holds no
reference to it any more.
"""

from __future__ import annotations

import itertools
import logging
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Pipe as connect_pair
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from diloco_jax.core.passes import Flat, Squares, State
from diloco_jax.runtime.model.model_share import Bytes, Setup
from diloco_jax.runtime.model.shard_process import Pipe, ShardAnswer, ShardEvent, ShardRun
from diloco_jax.runtime.records.signals import is_stopped
from diloco_jax.settings.resolved import ResolvedRun

# The command that runs a shard.
MERGE_SHARD = "merge-shard"
END_S = 5.0
ANSWER_POLL_S = 1.0
# A shard may be stopped this long while this process runs and waits for it.
STOPPED_S = 10.0

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(eq=False)
class RemoteShare:
    """A share in a separate process, with the methods of a ModelShare; parts of learners' values are HeldParts."""

    shard: int
    config_path: Path
    # Gets the shard's own messages, on a separate thread.
    on_event: Callable[[tuple[int, ShardEvent]], None]
    # Gets the error when the shard has ended, on that thread.
    on_death: Callable[[Exception], None]

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[int, Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._captures = itertools.count()
        self._death: Exception | None = None
        self._ending = False
        # Why this process killed the shard.
        self._killed_for = ""
        ours, theirs = connect_pair()
        command = [sys.executable, "-m", "diloco_jax", MERGE_SHARD, str(self.config_path)]
        words = ["--shard", str(self.shard), "--connection", str(theirs.fileno())]
        self.process = subprocess.Popen([*command, *words], pass_fds=[theirs.fileno()])
        theirs.close()
        self._pipe = Pipe(ours, self._on_message, self._on_end)
        self._pipe.start()

    def tell(self, command: Callable[Concatenate[ShardRun, P], None], *arguments: P.args, **_: P.kwargs) -> None:
        """Send a command without an answer; any thread."""
        self._pipe.send((0, command, arguments))

    def ask(self, command: Callable[Concatenate[ShardRun, P], Future[T]], *arguments: P.args, **_: P.kwargs) -> T:
        """Send a command, and wait for its answer; any thread.

        Raises:
            ConnectionError: The shard has ended.
            ValueError: The command failed.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._death is not None:
                raise self._death
            number = next(self._numbers)
            self._calls[number] = future
        self._pipe.send((number, command, arguments))
        return self._await(future)

    def _await(self, future: Future[T]) -> T:
        # Counted in looks, so that it does not grow while this process is stopped too.
        stopped_s = 0.0
        while True:
            try:
                return future.result(ANSWER_POLL_S)
            except TimeoutError:
                stopped_s = stopped_s + ANSWER_POLL_S if is_stopped(self.process.pid) else 0.0
            if stopped_s >= STOPPED_S:
                self._killed_for = f"it was stopped (SIGSTOP) for {stopped_s:g} s while the syncer waited: killed"
                self.process.kill()
                return future.result()

    def end(self) -> None:
        """Tell the shard to end."""
        self._ending = True
        self.tell(ShardRun.end)

    def await_end(self) -> None:
        """Wait for the shard's end, and kill it if it takes too long."""
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            why = "was stopped (SIGSTOP)" if is_stopped(self.process.pid) else "did not end"
            log.warning(f"merge shard {self.shard} (process {self.process.pid}) {why}: killed after {END_S:g} s")
            self.process.kill()
            self.process.wait()
        self._pipe.close(0.1)

    def _on_message(self, message: ShardAnswer | ShardEvent) -> None:
        if not isinstance(message, ShardAnswer):
            self.on_event((self.shard, message))
            return
        with self._lock:
            future = self._calls.pop(message.number)
        if message.error:
            future.set_exception(ValueError(f"merge shard {self.shard}: {message.error}"))
        else:
            future.set_result(message.result)

    def _on_end(self, reason: str) -> None:
        why = self._killed_for or reason
        error = ConnectionError(
            f"merge shard {self.shard} (process {self.process.pid}) has ended ({why}); its output is in this log, and "
            "the syncer must be started again"
        )
        with self._lock:
            self._death = error
            calls, self._calls = self._calls, {}
        for future in calls.values():
            future.set_exception(error)
        if not self._ending:
            self.on_death(error)

    def inspect(self, fragment_id: int, parts: Sequence[HeldPart], bases: Sequence[int]) -> Squares:
        return self.ask(ShardRun.inspect, fragment_id, [part.number for part in parts], bases)

    def update(
        self, fragment_id: int, version: int, chosen: Sequence[int], weights: np.ndarray
    ) -> tuple[bool, list[int]]:
        return self.ask(ShardRun.update, fragment_id, version, chosen, weights)

    def forget(self, fragment_id: int) -> None:
        self.tell(ShardRun.forget, fragment_id)

    def publish(self, fragment_id: int) -> None:
        self.tell(ShardRun.publish, fragment_id)

    def capture(self, bounded: bool = False) -> HeldCapture:
        return HeldCapture(self, next(self._captures), bounded)

    def load(self, fragment_id: int, version: int, state: State) -> None:
        self.tell(ShardRun.load, fragment_id, version, state)

    def restore(self, fragment_id: int, version: int, flat: Flat) -> None:
        self.tell(ShardRun.restore, fragment_id, version, flat)

    def payload(self, fragment_id: int, base: int) -> Bytes:
        """Return an empty payload, because the shard sends it itself."""
        return b""


class HeldPart:
    """A part of a learner's value, of `size` bytes; the shard keeps it while this object exists."""

    def __init__(self, share: RemoteShare, number: int, size: int) -> None:
        self.number = number
        self.size = size
        weakref.finalize(self, share.tell, ShardRun.free, number).atexit = False


class HeldCapture:
    """A capture of a shard's present states, with the methods of HeldStates; kept while this object exists."""

    def __init__(self, share: RemoteShare, number: int, bounded: bool) -> None:
        self._share = share
        self._number = number
        share.tell(ShardRun.capture, number, bounded)
        weakref.finalize(self, share.tell, ShardRun.release, number, None).atexit = False

    def read(self, fragment_id: int, value_only: bool) -> State:
        return self._share.ask(ShardRun.read, self._number, fragment_id, value_only)

    def release(self, fragment_id: int | None = None) -> None:
        self._share.tell(ShardRun.release, self._number, fragment_id)


class MergeShards:
    """The processes with the shares of a model; all of them together use `threads` threads for merges."""

    def __init__(
        self,
        setup: Setup,
        run: ResolvedRun,
        config_path: Path,
        threads: int,
        on_event: Callable[[tuple[int, ShardEvent]], None],
        on_death: Callable[[Exception], None],
    ) -> None:
        self.setup = setup
        count = setup.shares.count
        self.shares = [RemoteShare(shard, config_path, on_event, on_death) for shard in range(count)]
        for share in self.shares:
            share.tell(ShardRun.begin, run, max(1, threads // count))

    def end(self) -> None:
        for share in self.shares:
            share.end()
        for share in self.shares:
            share.await_end()
