"""A merge shard: it holds its share of the global model, receives values from learners and sends versions to them.

The shard decides nothing. The syncer's control process starts it, and sends it commands over a pipe in order. The shard
ends when the pipe ends. The caller's thread handles one command or delivery after the other.
"""

import io
import itertools
import logging
import os
import queue
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np

from diloco_jax.core.passes import Flat, Squares, State
from diloco_jax.protocol.messages import FragmentValue, GlobalFragment, Hello
from diloco_jax.runtime.model.model_share import Bytes, HeldStates, ModelShare, make_setup
from diloco_jax.runtime.records.signals import be_killed_with_parent
from diloco_jax.settings.resolved import ResolvedRun
from diloco_jax.settings.run import RunConfig
from diloco_jax.transport.endpoints.grpc_link import GrpcListener, listen
from diloco_jax.transport.link import Delivery, Traffic

# The longest sleep, so that the traffic is reported from time to time.
IDLE_S = 0.5

log = logging.getLogger(__name__)


class ShardAnswer(NamedTuple):
    """The answer to the command of this number, or the reason why it failed."""

    number: int
    result: Any = None
    error: str = ""


class ShardHello(NamedTuple):
    """A learner said hello in this session."""

    learner_id: str
    session: int


class ShardHolds(NamedTuple):
    """A learner's value arrived, and the shard keeps its part under this number."""

    session: int
    message: FragmentValue
    part: int
    size: int


ShardEvent = ShardHello | ShardHolds | Traffic


@dataclass(eq=False)
class Pipe:
    """One end of the connection between the control process and a merge shard (docs/decisions/0033-shard-commands.md).

    A message is pickled as in multiprocessing: both ends run the same program on the same host, and only a process and
    its child have the pipe. The bytes of its arrays follow without pickling. The writer is a separate thread behind a
    queue that never blocks, so any thread may send, even during a garbage collection.
    """

    connection: Connection
    # Gets every message, on the pipe's own thread.
    on_message: Callable[[Any], None]
    # Called once on that thread, with the reason, when the other end has closed.
    on_end: Callable[[str], None]

    def __post_init__(self) -> None:
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="pipe-out", daemon=True)

    def start(self) -> None:
        self._writer.start()
        threading.Thread(target=self._read, name="pipe-in", daemon=True).start()

    def send(self, message: Any) -> None:
        """Queue a message; never blocks, any thread. The caller must not change its arrays afterwards."""
        self._outgoing.put(message)

    def close(self, timeout_s: float) -> None:
        """Write what is queued for at most `timeout_s` seconds, and end the connection."""
        self._outgoing.put(None)
        self._writer.join(timeout_s)
        self.connection.close()

    def _write(self) -> None:
        try:
            while (message := self._outgoing.get()) is not None:
                self._write_one(message)
                # This frees the message's arrays before the next one arrives.
                del message
        except OSError:
            # The reader reports the end.
            return

    def _write_one(self, message: Any) -> None:
        head, buffers = io.BytesIO(), list[Any]()
        ForkingPickler(head, 5, True, buffers.append).dump(message)
        views = [buffer.raw() for buffer in buffers]
        self.connection.send((head.getvalue(), [view.nbytes for view in views]))
        for view in views:
            while view:
                view = view[os.write(self.connection.fileno(), view) :]

    def _read(self) -> None:
        try:
            while True:
                head, sizes = self.connection.recv()
                arrays = [np.empty(size, np.uint8) for size in sizes]
                for array in arrays:
                    view = array.data
                    while view:
                        count = os.readv(self.connection.fileno(), [view])
                        if not count:
                            raise EOFError("the connection ended")
                        view = view[count:]
                self.on_message(ForkingPickler.loads(head, buffers=arrays))
        except (EOFError, OSError) as error:
            self.on_end(str(error) or "the connection ended")


class ShardRun:
    """One merge shard's process.

    Its public methods from `begin` are the commands of the control process, obeyed in their order. A command that
    returns a Future is answered when the Future is done.
    """

    def __init__(self, config: RunConfig, shard: int, connection: Connection) -> None:
        self._config = config
        self._shard = shard
        self._share: ModelShare
        self._commands: queue.SimpleQueue[tuple[int, Callable[..., Any], tuple[Any, ...]]] = queue.SimpleQueue()
        self._listener: GrpcListener | None = None
        self._pipe = Pipe(connection, self._on_command, lambda reason: os._exit(0))
        self._merges = ThreadPoolExecutor(1, "merge")
        self._reads = ThreadPoolExecutor(1, "read")
        # Parts of learners' values, by the number that the control process knows.
        self._held: dict[int, Bytes] = {}
        self._numbers = itertools.count()
        self._captures: dict[int, HeldStates] = {}
        self._traffic = Traffic(0, 0)
        self._over = False

    def run(self) -> None:
        """Serve until the control process ends it, or has ended itself."""
        # A stopped process would not notice the end of the pipe.
        be_killed_with_parent()
        for number in (signal.SIGINT, signal.SIGTERM):
            # The control process decides, and ends the learners' sessions first.
            signal.signal(number, signal.SIG_IGN)
        self._pipe.start()
        while not self._over:
            self._take()
        self._pipe.close(5.0)

    def _on_command(self, command: tuple[int, Callable[..., Any], tuple[Any, ...]]) -> None:
        self._commands.put(command)
        if self._listener is not None:
            self._listener.wake()

    def _take(self) -> None:
        """Handle one delivery, if one arrives in time, and all commands."""
        if self._listener is None:
            self._obey(*self._commands.get())
            return
        delivery = self._listener.receive(IDLE_S)
        if delivery is not None:
            self._on_delivery(delivery)
        while not self._commands.empty() and not self._over:
            self._obey(*self._commands.get())
        if self._listener.traffic != self._traffic:
            self._traffic = self._listener.traffic
            self._pipe.send(self._traffic)

    def _on_delivery(self, delivery: Delivery) -> None:
        message = delivery.message
        if not isinstance(message, Hello | FragmentValue) or message.learner_id != delivery.peer:
            return
        if isinstance(message, Hello):
            self._pipe.send(ShardHello(delivery.peer, delivery.session))
            return
        part = next(self._numbers)
        self._held[part] = delivery.payload
        self._pipe.send(ShardHolds(delivery.session, message, part, len(delivery.payload)))

    def _obey(self, number: int, command: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        result = command(self, *arguments)
        if isinstance(result, Future) and number:
            result.add_done_callback(partial(self._answer, number))

    def _answer(self, number: int, done: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            self._pipe.send(ShardAnswer(number, done.result()))
            return
        words = str(error)
        if not isinstance(error, ValueError):
            log.error("a command failed", exc_info=error)
            words = f"{type(error).__name__}: {error}"
        self._pipe.send(ShardAnswer(number, error=words))

    def begin(self, run: ResolvedRun, threads: int) -> None:
        """Create this shard's share of the model, for merges with `threads` threads; the first command."""
        self._share = ModelShare(make_setup(run), self._shard, threads)

    def listen(self, address: str, epoch: int) -> Future[str]:
        """Listen for learners in this epoch of the syncer; answer with the address and its real port."""
        answer: Future[str] = Future()
        try:
            transport = replace(self._config.transport, address=address)
            self._listener = listen(transport, run_id=self._config.name, epoch=epoch)
            answer.set_result(self._listener.address)
        except ValueError as error:
            answer.set_exception(error)
        return answer

    def hang_up(self, grace_s: float) -> None:
        """Send what is queued for learners for at most `grace_s` seconds, and end their sessions."""
        assert self._listener is not None, "a listener was closed that never was"
        self._listener.close(grace_s)

    def send(self, peer: str, message: GlobalFragment) -> None:
        """Send a learner this shard's part of the version in the message."""
        assert self._listener is not None, "a version was to be sent before anybody could hear it"
        self._listener.send(peer, message, self._share.payload(message.fragment_id, message.base))

    def inspect(self, fragment_id: int, parts: Sequence[int], bases: Sequence[int]) -> Future[Squares]:
        """Answer with the squared norms of these parts."""
        held = [self._held[number] for number in parts]
        return self._merges.submit(self._share.inspect, fragment_id, held, bases)

    def update(
        self, fragment_id: int, version: int, chosen: Sequence[int], weights: np.ndarray
    ) -> Future[tuple[bool, list[int]]]:
        """Answer with the result of ModelShare.update."""
        return self._merges.submit(self._share.update, fragment_id, version, chosen, weights)

    def forget(self, fragment_id: int) -> None:
        self._merges.submit(self._share.forget, fragment_id)

    def publish(self, fragment_id: int) -> None:
        self._share.publish(fragment_id)

    def load(self, fragment_id: int, version: int, state: State) -> None:
        self._share.load(fragment_id, version, state)

    def restore(self, fragment_id: int, version: int, flat: Flat) -> None:
        self._share.restore(fragment_id, version, flat)

    def capture(self, number: int, bounded: bool) -> None:
        """Capture the present states under this number."""
        self._captures[number] = self._share.capture(bounded)

    def read(self, capture: int, fragment_id: int, value_only: bool) -> Future[State]:
        """Answer with a captured fragment's state, or only its value."""
        return self._reads.submit(_read, self._captures.get(capture), fragment_id, value_only)

    def free(self, part: int) -> None:
        """Drop a part of a learner's value."""
        self._held.pop(part, None)

    def release(self, capture: int, fragment_id: int | None) -> None:
        """Drop a capture, or a fragment of one; a merge may wait for it."""
        if capture in self._captures:
            self._captures[capture].release(fragment_id)
            if fragment_id is None:
                del self._captures[capture]

    def end(self) -> None:
        """End the process; the last command."""
        self._over = True


def _read(held: HeldStates | None, fragment_id: int, value_only: bool) -> State:
    # The capture was given up meanwhile.
    if held is None:
        raise ValueError("the capture was released")
    return held.read(fragment_id, value_only)
