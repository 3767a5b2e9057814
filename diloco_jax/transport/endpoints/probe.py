"""The syncer's answers to `diloco doctor`: its run and versions, its clock, and the speed of the link.

A measurement must not disturb a run. So the syncer admits one at a time, which ends after SECONDS_MAX and moves at most
IDLE_BYTES_MAX in each direction, or RUN_BYTES_MAX while learners are connected. It still slows learners for those
seconds, because their payloads share the line.
"""

import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.session.calls import refusing
from diloco_jax.transport.trust.security import Denied, Gate

PROBE = "Probe"
SECONDS_MAX = 10.0
IDLE_BYTES_MAX = 1 << 30
RUN_BYTES_MAX = 64 << 20
# A caller that stalls is cut off this long after SECONDS_MAX.
HANG_S = 5.0
NOISE_BYTES_MIN, NOISE_BYTES_MAX = 16 << 10, 512 << 10
PACKAGES = ("diloco-jax", "jax", "jaxlib", "numpy", "grpcio")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that both sides of a link should share, by name."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def noise() -> Iterator[bytes]:
    """Yield random bytes without end.

    The pieces grow with the number of bytes sent: small pieces measure a slow link exactly, and large ones cost a fast
    link little time.
    """
    block = memoryview(os.urandom(NOISE_BYTES_MAX))
    sent = 0
    while True:
        size = min(NOISE_BYTES_MAX, max(NOISE_BYTES_MIN, sent // 32))
        sent += size
        yield bytes(block[:size])


@dataclass
class _Measurement:
    """One caller's measurement: the bytes that its connections may still move together."""

    number: int
    left_bytes: int
    calls: int = 1


@dataclass(eq=False)
class ProbeDesk:
    """Service for the method PROBE of one listener."""

    run_id: str
    gate: Gate
    sessions: Callable[[], int]
    # Returns the settings that learners must agree on; any thread may call it.
    settings: Callable[[], Mapping[str, str]] = dict
    _lock: AbstractContextManager[Any] = field(default_factory=threading.Lock, init=False)
    _measurement: _Measurement | None = field(default=None, init=False)

    def serve(self, requests: Iterator[bytes], context: Any) -> Iterator[pb.ProbeReply]:
        """Serve one call: a ping, or one connection of a measurement."""
        with refusing(context):
            self.gate.check(dict(context.invocation_metadata()))
        watchdog = threading.Timer(SECONDS_MAX + HANG_S, context.cancel)
        watchdog.daemon = True
        context.add_callback(watchdog.cancel)
        watchdog.start()
        try:
            asked = pb.ProbeRequest.FromString(next(requests, b""))
        except DecodeError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"malformed request: {error}")
        if asked.kind == pb.PROBE_PING:
            yield self._facts()
            return
        if asked.kind not in (pb.PROBE_UP, pb.PROBE_DOWN):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"no probe of kind {asked.kind}: update this side")
        with refusing(context):
            measurement = self._join(asked.probe)
        if not context.add_callback(lambda: self._leave(measurement)):
            self._leave(measurement)
            return
        seconds = min(SECONDS_MAX, max(0.0, asked.seconds))  # NaN becomes 0
        if asked.kind == pb.PROBE_UP:
            yield self._count(requests, measurement, seconds)
        else:
            yield from self._flood(measurement, seconds)

    def _facts(self) -> pb.ProbeReply:
        return pb.ProbeReply(
            unix_s=time.time(),
            run_id=self.run_id,
            versions=versions(),
            sessions=self.sessions(),
            settings=self.settings(),
        )

    def _join(self, number: int) -> _Measurement:
        """Return the caller's measurement; its first connection starts it."""
        with self._lock:
            running = self._measurement
            if running is None:
                left = RUN_BYTES_MAX if self.sessions() else IDLE_BYTES_MAX
                running = self._measurement = _Measurement(number, left)
            elif running.number == number:
                running.calls += 1
            else:
                raise Denied(grpc.StatusCode.ABORTED, "somebody else measures at this moment: try again later")
            return running

    def _leave(self, measurement: _Measurement) -> None:
        with self._lock:
            measurement.calls -= 1
            if not measurement.calls and self._measurement is measurement:
                self._measurement = None

    def _spend(self, measurement: _Measurement, size: int) -> bool:
        with self._lock:
            measurement.left_bytes -= size
            return measurement.left_bytes > 0

    def _count(self, requests: Iterator[bytes], measurement: _Measurement, seconds: float) -> pb.ProbeReply:
        began_s = ended_s = 0.0
        received = 0
        for message in requests:
            ended_s = time.monotonic()
            if not began_s:
                # The bytes of the first message may have taken any time to arrive.
                began_s = ended_s
                continue
            received += len(message)
            if not self._spend(measurement, len(message)) or ended_s - began_s >= seconds:
                break
        return pb.ProbeReply(received_bytes=received, received_s=ended_s - began_s)

    def _flood(self, measurement: _Measurement, seconds: float) -> Iterator[pb.ProbeReply]:
        until_s = time.monotonic() + seconds
        for piece in noise():
            if time.monotonic() >= until_s or not self._spend(measurement, len(piece)):
                return
            yield pb.ProbeReply(noise=piece)
