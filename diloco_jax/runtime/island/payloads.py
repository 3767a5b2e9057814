"""The thread that encodes payloads and gives them to the link, urgent payloads first.

A round waits for a fragment's value, and a restarted syncer waits for an anchor. The state for a joining learner may
take longer, and must not slow the donor's steps (spare_time.py).
"""

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

from diloco_jax.core import codec
from diloco_jax.protocol.messages import AnchorValue, FragmentValue, StateChunk
from diloco_jax.runtime.island.adoptions import STATE_PART_BYTES
from diloco_jax.runtime.island.spare_time import SpareTime
from diloco_jax.runtime.island.threads import start_thread
from diloco_jax.training.island_state import StagedUpdate
from diloco_jax.training.whole_state.finite import UnusableState
from diloco_jax.training.whole_state.moving import MovingState
from diloco_jax.training.whole_state.staging import CopyGone
from diloco_jax.transport.link import Buffer, Link, LinkClosed, Payload

URGENT, BULK = 0, 1
# Limit of waiting jobs; a peer that requests more without reading them is not served.
JOBS_MAX = 1024

log = logging.getLogger(__name__)


class PayloadSender:
    """The thread "payload"; its methods return at once, and any thread may call them.

    The thread gives an unexpected error to `on_failure`.
    """

    def __init__(self, on_failure: Callable[[Exception], None]) -> None:
        self._on_failure = on_failure
        self._spare_time = SpareTime()
        self._bulk_rests_until_s = 0.0
        self._changed = threading.Condition()
        # A heap of (urgency, age, job).
        self._jobs: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._closed = False
        start_thread(self._work, "payload", daemon=True)

    def value(self, link: Link, message: FragmentValue, staged: StagedUpdate) -> None:
        """Encode and send a fragment's value for a round."""
        self._add(URGENT, lambda: link.send(message, self._gradient(message, staged)))

    def anchor(self, link: Link, message: AnchorValue, encode: Callable[[], Payload]) -> None:
        """Encode and send an anchor, or one host's bytes of it, to a restarted syncer."""

        def send() -> None:
            payload = encode()
            pieces = [payload] if isinstance(payload, Buffer) else payload
            size = sum(memoryview(piece).nbytes for piece in pieces)
            link.send(message._replace(payload_bytes=size), pieces)

        self._add(URGENT, send)

    def part(self, link: Link, message: StateChunk, moving: MovingState, refuse: Callable[[str], None]) -> None:
        """Send one part of a staged state; send nothing if there is no such part.

        Args:
            refuse: is called with the reason if the state is not finite, so that no island may get it.
        """
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
            except UnusableState as error:
                log.warning(f"{message.receiver} gets no state of this island: {error}")
                refuse(str(error))
                return
            size, checksum = sum(piece.nbytes for piece in pieces), codec.digest(pieces)
            link.send(message._replace(parts=parts, digest=checksum, payload_bytes=size), pieces)

        self._add(BULK, send)

    def close(self) -> None:
        """Drop the waiting jobs, and end the thread after the present one."""
        with self._changed:
            self._closed = True
            self._jobs.clear()
            self._changed.notify()

    def _gradient(self, message: FragmentValue, staged: StagedUpdate) -> Payload:
        try:
            return staged.encode()
        # Any other error is a fault of this program, and is raised as one.
        except codec.NotFinite as error:
            log.info(f"fragment {message.fragment_id} of round {message.global_step} has no value: {error}")
            # An empty answer, so that nobody waits; the syncer leaves it out of the merge.
            return b""

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
        """Wait for the next job, and return it; None at the end."""
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
            # The link thread notices it too, and reconnects.
            except LinkClosed:
                pass
            # An error would be lost with the thread.
            except Exception as error:
                self._on_failure(error)
            if urgency == BULK:
                rest_s = self._spare_time.rest_s(time.thread_time() - began_s)
                self._bulk_rests_until_s = time.monotonic() + rest_s
            # This frees the staged copy while the thread waits for the next job.
            del following, job
