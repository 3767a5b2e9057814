"""Requests of `diloco doctor` to a syncer: for its run, its clock, and the rate of the link to it."""

import math
import secrets
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import grpc

from diloco_jax.protocol.texts import clean_all
from diloco_jax.transport.endpoints.probe import HANG_S, PROBE, SECONDS_MAX, noise
from diloco_jax.transport.link import TransportConfig
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.session.calls import SERVICE, failure, open_channel
from diloco_jax.transport.trust.security import credentials

PINGS = 8


class Greeting(NamedTuple):
    """A syncer's answer to a ping, with the measured round trip and clock difference."""

    # The name of its run.
    run_id: str
    # The versions of its packages, by name.
    versions: Mapping[str, str]
    # The settings that learners must agree on, by name; empty if the run has not started.
    settings: Mapping[str, str]
    # The number of connected learners.
    sessions: int
    # The shortest of several round trips.
    rtt_s: float
    # The syncer's clock minus this machine's clock.
    skew_s: float

    @property
    def skew_error_s(self) -> float:
        """Return the largest possible error of `skew_s`, half a round trip."""
        return self.rtt_s / 2


class Rate(NamedTuple):
    """A measured rate of payload."""

    moved_bytes: int
    # The sum over all connections.
    bytes_per_s: float


def greet(config: TransportConfig, name: str) -> Greeting:
    """Ping the syncer at `config.address` several times, and return its answer with the shortest round trip.

    Raises:
      TransportError: the syncer does not answer, or does not accept our credentials.
      ValueError: the credentials or the address cannot be used.
    """
    own = credentials(config, name)
    ping, timeout_s = pb.ProbeRequest(kind=pb.PROBE_PING).SerializeToString(), config.connect_timeout_s
    # The shortest round trip, and the clock difference measured with it.
    best = (math.inf, 0.0)
    with open_channel(config, own) as channel:
        method = _method(channel)
        try:
            for number in range(PINGS + 1):
                before_s, began_s = time.time(), time.monotonic()
                reply = next(method(iter([ping]), timeout=timeout_s, wait_for_ready=True, metadata=own.metadata))
                rtt_s = time.monotonic() - began_s
                # The first ping also opened the connection, so its time does not count.
                if number:
                    best = min(best, (rtt_s, reply.unix_s - before_s - rtt_s / 2))
        except (grpc.RpcError, StopIteration) as error:
            raise failure(config, error, name) from None
    run_id, versions, settings = clean_all([reply.run_id, dict(reply.versions), dict(reply.settings)])
    return Greeting(run_id, versions, settings, reply.sessions, *best)


def measure(config: TransportConfig, name: str, direction: Literal["up", "down"], seconds: float) -> Rate:
    """Measure the rate of `config.stripes` connections with random bytes, at the receiver. Raises as `greet`."""
    own = credentials(config, name)
    seconds = min(seconds, SECONDS_MAX)
    kind = pb.PROBE_UP if direction == "up" else pb.PROBE_DOWN
    first = pb.ProbeRequest(kind=kind, probe=secrets.randbits(64), seconds=seconds).SerializeToString()
    timeout_s = config.connect_timeout_s + seconds + HANG_S

    def run(_: int) -> Rate:
        with open_channel(config, own) as channel:
            requests = _upload(first) if direction == "up" else iter([first])
            call = _method(channel)(requests, timeout=timeout_s, wait_for_ready=True, metadata=own.metadata)
            try:
                if direction == "down":
                    return _count(call, seconds)
                reply = next(call)
                return _rate(reply.received_bytes, reply.received_s)
            finally:
                call.cancel()

    try:
        with ThreadPoolExecutor(config.stripes, "diloco-probe") as pool:
            rates = list(pool.map(run, range(config.stripes)))
    except (grpc.RpcError, StopIteration) as error:
        raise failure(config, error, name) from None
    return Rate(sum(rate.moved_bytes for rate in rates), sum(rate.bytes_per_s for rate in rates))


def _method(channel: grpc.Channel) -> Any:
    return channel.stream_stream(f"/{SERVICE}/{PROBE}", response_deserializer=pb.ProbeReply.FromString)


def _upload(first: bytes) -> Iterator[bytes]:
    yield first
    for piece in noise():
        yield pb.ProbeRequest(noise=piece).SerializeToString()


def _count(replies: Iterator[pb.ProbeReply], seconds: float) -> Rate:
    began_s = ended_s = 0.0
    received = 0
    for reply in replies:
        ended_s = time.monotonic()
        if not began_s:
            began_s = ended_s
            continue
        received += len(reply.noise)
        if ended_s - began_s >= seconds:
            break
    return _rate(received, ended_s - began_s)


def _rate(moved_bytes: int, elapsed_s: float) -> Rate:
    return Rate(moved_bytes, moved_bytes / elapsed_s if elapsed_s > 0 else 0.0)
