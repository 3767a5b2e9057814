"""A merge shard: holds its share of the global model, takes values from learners and sends versions to them.

It decides nothing: the syncer's control process, which starts it and owns it, says over a pipe what to do with what, in
which order. When the pipe ends, so does the process. The caller's thread takes one command or delivery after the other.
"""

import itertools
import logging
import os
import queue
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from diloco_jax.protocol.messages import FragmentValue, Hello
from diloco_jax.runtime.model import shard_commands as commands
from diloco_jax.runtime.model.global_model import make_setup
from diloco_jax.runtime.model.model_share import HeldStates, ModelShare
from diloco_jax.runtime.model.shard_pipe import Pipe
from diloco_jax.settings.run import RunConfig
from diloco_jax.transport.grpc_link import GrpcListener, listen
from diloco_jax.transport.link import Delivery, Traffic

IDLE_S = 0.5  # longest sleep, so that what was moved is told from time to time

Arrays = Sequence[np.ndarray]
Work = Callable[[], tuple[Any, Arrays]]  # returns the answer to a call, and the arrays beside it

log = logging.getLogger(__name__)


class ShardRun:
    """One merge shard's process."""

    def __init__(self, config: RunConfig, shard: int, connection: Connection) -> None:
        self._config = config
        self._shard = shard
        self._commands: queue.SimpleQueue[tuple[int, Any, Arrays]] = queue.SimpleQueue()
        self._listener: GrpcListener | None = None
        self._pipe = Pipe(connection, self._on_command, lambda reason: os._exit(0))
        self._merges = ThreadPoolExecutor(1, "merge")
        self._reads = ThreadPoolExecutor(1, "read")
        self._held: dict[int, bytes | memoryview] = {}  # parts of learners' values, by the number that control knows
        self._numbers = itertools.count()
        self._captures: dict[int, HeldStates] = {}
        self._traffic = Traffic(0, 0)
        self._over = False

    def run(self) -> None:
        """Serve until the control process says that it is over, or is gone."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # control decides, and says goodbye to learners first
        self._pipe.start()
        _, begin, _ = self._commands.get()
        assert isinstance(begin, commands.ShardBegin), "the first command must be to begin"
        share = ModelShare(make_setup(self._config, begin.plan), self._shard, begin.threads)
        while not self._over:
            self._take(share)
        self._pipe.close(5.0)

    def _on_command(self, command: tuple[int, Any], arrays: Arrays) -> None:
        self._commands.put((*command, arrays))
        if self._listener is not None:
            self._listener.wake()

    def _take(self, share: ModelShare) -> None:
        """Handle one delivery, if one comes in time, and all commands."""
        if self._listener is None:
            self._execute(share, *self._commands.get())
            return
        delivery = self._listener.receive(IDLE_S)
        if delivery is not None:
            self._on_delivery(delivery)
        while not self._commands.empty() and not self._over:
            self._execute(share, *self._commands.get())
        if self._listener.traffic != self._traffic:
            self._traffic = self._listener.traffic
            self._pipe.send(self._traffic)

    def _on_delivery(self, delivery: Delivery) -> None:
        message = delivery.message
        if not isinstance(message, Hello | FragmentValue) or message.learner_id != delivery.peer:
            return
        if isinstance(message, Hello):
            self._pipe.send(commands.ShardHello(delivery.peer, delivery.session))
            return
        part = next(self._numbers)
        self._held[part] = delivery.payload
        self._pipe.send(commands.ShardHolds(delivery.session, message, part, len(delivery.payload)))

    def _execute(self, share: ModelShare, number: int, command: Any, arrays: Arrays) -> None:
        match command:
            case commands.ShardSend(peer, message):
                assert self._listener is not None, "a version was to be sent before anybody could hear it"
                self._listener.send(peer, message, share.payload(message.fragment_id, message.base))
            case commands.ShardFree(part, capture, fragment_id):
                self._held.pop(part, None)
                if capture in self._captures:  # a merge may wait for it
                    self._captures[capture].release(None if fragment_id < 0 else fragment_id)
                    if fragment_id < 0:
                        del self._captures[capture]
            case commands.ShardInspect(fragment_id, numbers, bases):
                parts = [self._held[each] for each in numbers]
                self._submit(self._merges, number, lambda: (None, [share.inspect(fragment_id, parts, bases)]))
            case commands.ShardUpdate(fragment_id, version, chosen, weights):
                own = np.array(weights)
                self._submit(self._merges, number, lambda: (share.update(fragment_id, version, chosen, own), ()))
            case commands.ShardForget(fragment_id):
                self._merges.submit(share.forget, fragment_id)
            case commands.ShardPublish(fragment_id):
                share.publish(fragment_id)
            case commands.ShardLoad(fragment_id, version, names):
                share.load(fragment_id, version, commands.unpack_state(names, arrays))
            case commands.ShardRestore(fragment_id, version):
                share.restore(fragment_id, version, arrays[0])
            case commands.ShardCapture(capture, bounded):
                self._captures[capture] = share.capture(bounded)
            case commands.ShardRead(capture, fragment_id, value_only):
                held = self._captures.get(capture)
                if held is None:  # it was given up meanwhile
                    self._pipe.send(commands.ShardAnswer(number, error="the capture was let go of"))
                else:
                    self._submit(self._reads, number, lambda: commands.pack_state(held.read(fragment_id, value_only)))
            case commands.ShardListen():
                self._listen(number, command)
            case commands.ShardHangUp(grace_s):
                assert self._listener is not None, "a listener was closed that never was"
                self._listener.close(grace_s)
            case commands.ShardEnd():
                self._over = True
            case _:
                raise AssertionError(f"a shard has no command {command}")

    def _listen(self, number: int, command: commands.ShardListen) -> None:
        transport = replace(self._config.transport, address=command.address)
        try:
            self._listener = listen(transport, run_id=self._config.name, epoch=command.epoch)
        except ValueError as error:
            self._pipe.send(commands.ShardAnswer(number, error=str(error)))
        else:
            self._pipe.send(commands.ShardAnswer(number, self._listener.address))

    def _submit(self, worker: ThreadPoolExecutor, number: int, work: Work) -> None:
        """Answer a call from a worker's thread, with its result or with what went wrong."""

        def answer(future: Future[tuple[Any, Arrays]]) -> None:
            error = future.exception()
            if error is not None:
                log.error("a command failed", exc_info=error)
                self._pipe.send(commands.ShardAnswer(number, error=f"{type(error).__name__}: {error}"))
                return
            result, arrays = future.result()
            self._pipe.send(commands.ShardAnswer(number, result), arrays)

        worker.submit(work).add_done_callback(answer)
