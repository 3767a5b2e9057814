"""A merge shard: holds its share of the global model, takes values from learners and sends versions to them.

It decides nothing: the syncer's control process, which starts it and owns it, says over a pipe what to do with what, in
which order. When the pipe ends, so does the process.

Threads
  * the caller's: share and listener; takes one command or delivery after the other. Never computes.
  * "merge": measures and merges. "fetch": copies what was captured. "pipe-in", "pipe-out": the pipe.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import signal
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from diloco_jax.core.kinds import Kind
from diloco_jax.protocol.messages import FragmentValue, GlobalFragment, Hello
from diloco_jax.runtime.model.arithmetic import FragmentState, ModelShare
from diloco_jax.runtime.model.global_model import make_setup
from diloco_jax.runtime.model.shard_pipe import Frame, Pipe, pack_state, unpack_state
from diloco_jax.settings.run import RunConfig
from diloco_jax.transport.grpc_link import GrpcListener, listen
from diloco_jax.transport.link import Delivery

IDLE_S = 0.5  # longest sleep, so that what was moved is told from time to time

log = logging.getLogger(__name__)


class ShardRun:
    """One merge shard's process.

    Args:
        config: the run.
        shard: which share of the model.
        connection: to the control process.
    """

    def __init__(self, config: RunConfig, shard: int, connection: socket.socket) -> None:
        self._config = config
        self._shard = shard
        self._commands: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._listener: GrpcListener | None = None
        self._pipe = Pipe(connection, self._on_frame, lambda reason: os._exit(0))
        self._merges = ThreadPoolExecutor(1, "merge")
        self._fetches = ThreadPoolExecutor(1, "fetch")
        self._held: dict[int, bytes | memoryview] = {}  # parts of learners' values, by the number that control knows
        self._numbers = itertools.count()
        self._captures: dict[int, Mapping[int, FragmentState]] = {}
        self._traffic = (0, 0)
        self._over = False

    def run(self) -> None:
        """Serve until the control process says that it is over, or is gone."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # control decides, and says goodbye to learners first
        self._pipe.start()
        begin = self._commands.get()
        assert begin is not None and begin.head["op"] == "begin", "the first command must be to begin"
        shapes = {path: tuple(shape) for path, shape in begin.head["shapes"].items()}
        kinds = {path: Kind(*kind) for path, kind in begin.head["kinds"].items()}
        config = self._config
        plan = config.fragments.plan(shapes, kinds, config.protocol.num_fragments)
        self._share = ModelShare(make_setup(config, plan), self._shard, int(begin.head["threads"]))
        while not self._over:
            self._take()
        self._pipe.close(5.0)

    def _on_frame(self, frame: Frame) -> None:
        self._commands.put(frame)
        if self._listener is not None:
            self._listener.wake()

    def _take(self) -> None:
        """Handle one delivery, if one comes in time, and all commands."""
        if self._listener is None:
            self._execute(self._commands.get())
            return
        delivery = self._listener.receive(IDLE_S)
        if delivery is not None:
            self._on_delivery(delivery)
        while not self._commands.empty() and not self._over:
            self._execute(self._commands.get())
        if self._listener.traffic != self._traffic:
            self._traffic = self._listener.traffic
            self._pipe.send({"op": "traffic", "moved": self._traffic})

    def _on_delivery(self, delivery: Delivery) -> None:
        message = delivery.message
        if not isinstance(message, Hello | FragmentValue) or message.learner_id != delivery.peer:
            return
        told = {"op": type(message).__name__, "learner": delivery.peer, "session": delivery.session}
        if isinstance(message, FragmentValue):
            number = next(self._numbers)
            self._held[number] = delivery.payload
            told |= {"message": list(message), "number": number, "size": len(delivery.payload)}
        self._pipe.send(told)

    # ---- commands -------------------------------------------------------------------------------------------------

    def _execute(self, frame: Frame | None) -> None:
        assert frame is not None
        head, arrays, share = frame.head, frame.arrays, self._share
        fragment_id: int = head.get("fragment", -1)
        match head["op"]:
            case "send":
                self._send(head["peers"], GlobalFragment(*head["message"]))
            case "free":
                del self._held[head["number"]]
            case "inspect":
                payloads = [self._held[number] for number in head["numbers"]]
                bases = head["bases"]
                self._submit(self._merges, head, lambda: ({}, [share.inspect(fragment_id, payloads, bases)]))
            case "update":
                self._submit(self._merges, head, lambda: self._update(head, arrays[0]))
            case "forget":
                self._merges.submit(share.forget, fragment_id)
            case "publish":
                share.publish(fragment_id)
            case "load":
                share.load(fragment_id, head["version"], unpack_state(head["names"], arrays))
            case "restore":
                share.restore(fragment_id, head["version"], arrays[0])
            case "capture":
                self._captures[head["capture"]] = share.capture()
            case "release":
                del self._captures[head["capture"]]
            case "fetch":
                states = self._captures[head["capture"]]
                self._submit(self._fetches, head, lambda: self._fetch(states, values_only=head["values_only"]))
            case "listen":
                self._listen(head)
            case "close":
                assert self._listener is not None, "a listener was closed that never was"
                self._listener.close(head["grace_s"])
            case "end":
                self._over = True
            case op:
                raise AssertionError(f"a shard has no command {op}")

    def _send(self, peers: list[str], message: GlobalFragment) -> None:
        assert self._listener is not None, "a version was to be sent before anybody could hear it"
        payload = self._share.payload(message.fragment_id, message.base)
        for peer in peers:
            self._listener.send(peer, message, payload)

    def _listen(self, head: Mapping[str, Any]) -> None:
        transport = replace(self._config.transport, address=head["address"])
        try:
            listener = listen(transport, run_id=self._config.name, epoch=head["epoch"])
        except ValueError as error:
            self._pipe.send({"op": "reply", "call": head["call"], "error": str(error)})
            return
        self._listener = listener
        self._pipe.send({"op": "reply", "call": head["call"], "address": listener.address})

    def _update(self, head: Mapping[str, Any], weights: np.ndarray) -> tuple[dict[str, Any], list[np.ndarray]]:
        finite, digests = self._share.update(head["fragment"], head["version"], head["chosen"], weights)
        return {"finite": bool(finite)}, [np.array(digests, np.uint64)]

    def _fetch(
        self, states: Mapping[int, FragmentState], *, values_only: bool
    ) -> tuple[dict[str, Any], list[np.ndarray]]:
        counts, names, arrays = {}, {}, []
        for fragment_id, state in states.items():
            own, found = pack_state(state.state)
            names[str(fragment_id)] = [] if values_only else own
            arrays += found[:1] if values_only else found
            counts[str(fragment_id)] = 1 if values_only else len(found)
        return {"counts": counts, "names": names}, arrays

    def _submit(
        self,
        worker: ThreadPoolExecutor,
        head: Mapping[str, Any],
        work: Callable[[], tuple[dict[str, Any], list[np.ndarray]]],
    ) -> None:
        """Answer a call from a worker's thread, with its result or with what went wrong."""

        def answer(future: Future[tuple[dict[str, Any], list[np.ndarray]]]) -> None:
            error = future.exception()
            if error is not None:
                log.error(f"command {head['op']} failed", exc_info=error)
                self._pipe.send({"op": "reply", "call": head["call"], "error": f"{type(error).__name__}: {error}"})
                return
            said, arrays = future.result()
            self._pipe.send({"op": "reply", "call": head["call"], **said}, arrays)

        worker.submit(work).add_done_callback(answer)
