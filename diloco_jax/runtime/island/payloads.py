"""The heavy part of what a learner sends, made and handed to the link by one thread, urgent payloads first.

A round waits for a fragment's value and a restarted syncer for an anchor; a joining learner's state may take longer,
and must not slow the donor's steps (spare_time.py).
"""

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from diloco_jax.core import codec
from diloco_jax.protocol.messages import AnchorValue, FragmentValue, StatePart
from diloco_jax.runtime.island.adoptions import STATE_PART_BYTES
from diloco_jax.runtime.island.spare_time import SpareTime
from diloco_jax.training.whole_state.moving import MovingState
from diloco_jax.training.whole_state.staging import CopyGone
from diloco_jax.transport.link import Link, LinkClosed, Payload

Values = Mapping[str, np.ndarray]
URGENT, BULK = 0, 1
JOBS_MAX = 1024  # that wait; a peer that asks for more without taking them is not served

log = logging.getLogger(__name__)


class StagedUpdate(Protocol):
    """A staged fragment, as this thread sees it."""

    def encode(self) -> Payload:
        """Wait for it and return its payload; NotFinite if it is not, and the format cannot say so."""


class PayloadSender:
    """The thread "payload". Its methods return at once and may be called from any thread.

    An error that nobody expected goes to `on_failure`, on the thread.
    """

    def __init__(self, on_failure: Callable[[Exception], None]) -> None:
        self._on_failure = on_failure
        self._spare_time = SpareTime()
        self._bulk_rests_until_s = 0.0
        self._changed = threading.Condition()
        self._jobs: list[tuple[int, int, Callable[[], None]]] = []  # a heap: urgency, age, job
        self._numbers = itertools.count()
        self._closed = False
        threading.Thread(target=self._work, name="payload", daemon=True).start()

    def value(self, link: Link, message: FragmentValue, staged: StagedUpdate) -> None:
        self._add(URGENT, lambda: link.send(message, self._gradient(message, staged)))

    def anchor(self, link: Link, message: AnchorValue, anchor: Values) -> None:

        def send() -> None:
            payload = codec.encode(anchor, "float32")
            link.send(message._replace(payload_bytes=len(payload)), payload)

        self._add(URGENT, send)

    def part(self, link: Link, message: StatePart, moving: MovingState) -> None:
        """Send one part of a staged state; nothing if there is no such part."""
        parts = moving.count(STATE_PART_BYTES)
        if not 0 <= message.part < parts:
            log.info(f"{message.receiver} asked for part {message.part} of a state of {parts}; not answered")
            return

        def send() -> None:
            try:
                pieces = moving.part(message.part, STATE_PART_BYTES)
            except CopyGone as error:
                log.info(f"part {message.part} of a state was not sent to {message.receiver}: {error}")
                return
            size, checksum = sum(piece.nbytes for piece in pieces), codec.digest(pieces)
            link.send(message._replace(parts=parts, digest=checksum, payload_bytes=size), pieces)

        self._add(BULK, send)

    def close(self) -> None:
        """Forget what waits and end the thread after what it does now."""
        with self._changed:
            self._closed = True
            self._jobs.clear()
            self._changed.notify()

    def _gradient(self, message: FragmentValue, staged: StagedUpdate) -> Payload:
        try:
            return staged.encode()
        except codec.NotFinite as error:  # any other error is a fault of this program, and is told as one
            log.info(f"fragment {message.fragment_id} of round {message.global_step} has no value: {error}")
            return b""  # an answer all the same, so that nobody waits; the syncer leaves it out

    def _add(self, urgency: int, job: Callable[[], None]) -> None:
        with self._changed:
            if self._closed:
                return
            if len(self._jobs) >= JOBS_MAX:
                log.warning(f"{JOBS_MAX} payloads wait already; one more is not sent")
                return
            heapq.heappush(self._jobs, (urgency, next(self._numbers), job))
            self._changed.notify()

    def _next(self) -> tuple[int, int, Callable[[], None]] | None:
        """Wait for the next job; None at the end."""
        with self._changed:
            while not self._closed:
                rest_s = 0.0
                if self._jobs:
                    rest_s = self._bulk_rests_until_s - time.monotonic() if self._jobs[0][0] == BULK else 0.0
                    if rest_s <= 0:
                        return heapq.heappop(self._jobs)
                self._changed.wait(rest_s or None)
            return None

    def _work(self) -> None:
        while (following := self._next()) is not None:
            urgency, _, job = following
            began_s = time.thread_time()
            try:
                job()
            except LinkClosed:  # the link thread learns of it too, and reconnects
                pass
            except Exception as error:  # it would be lost with the thread
                self._on_failure(error)
            if urgency == BULK:
                rest_s = self._spare_time.rest_s(time.thread_time() - began_s)
                self._bulk_rests_until_s = time.monotonic() + rest_s
            del following, job  # what it has staged must not stay in memory until the next one comes
