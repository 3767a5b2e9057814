"""The questions of `diloco doctor` to a syncer: its name, its time, and the rate of the link to it."""

import math
import secrets
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import grpc

from diloco_jax.protocol.texts import clean_all
from diloco_jax.transport.endpoints.probe import HANG_S, PROBE, SECONDS_MAX, noise
from diloco_jax.transport.link import TransportConfig, TransportError
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.session.calls import SERVICE, failure, open_channel, read_shards
from diloco_jax.transport.trust.security import credentials

PINGS = 8


class Greeting(NamedTuple):
    """A syncer's answer about itself, with its distance."""

    run_id: str  # name of its run
    versions: Mapping[str, str]  # of its packages, by name
    settings: Mapping[str, str]  # what learners must agree on, by name; empty if it has not begun yet
    sessions: int  # learners that are connected to it
    shards: tuple[str, ...]  # host:port of its merge shards
    rtt_s: float  # shortest round trip of several, in seconds
    skew_s: float  # by how much its clock is ahead of ours, in seconds

    @property
    def skew_error_s(self) -> float:
        """Return the most by which `skew_s` may be wrong: half of that round trip."""
        return self.rtt_s / 2


class Rate(NamedTuple):
    """A measured rate of payload."""

    moved_bytes: int  # how much was counted
    bytes_per_s: float  # over all connections together


def greet(config: TransportConfig, name: str) -> Greeting:
    """Ask the syncer at `config.address` who it is, several times, to see how long that takes.

    TransportError if nobody answers, or our credentials do not do; ValueError if they or the address cannot be used.
    """
    own = credentials(config, name)
    ping, timeout_s = pb.ProbeRequest(kind=pb.PROBE_PING).SerializeToString(), config.connect_timeout_s
    best = (math.inf, 0.0)  # shortest round trip, and the clock's lead then
    with open_channel(config, own) as channel:
        method = _method(channel)
        try:
            for number in range(PINGS + 1):
                before_s, began_s = time.time(), time.monotonic()
                reply = next(method(iter([ping]), timeout=timeout_s, wait_for_ready=True, metadata=own.metadata))
                rtt_s = time.monotonic() - began_s
                if number:  # the first one also opened the connection
                    best = min(best, (rtt_s, reply.unix_s - before_s - rtt_s / 2))
        except (grpc.RpcError, StopIteration) as error:
            raise failure(config, error, name) from None
    try:
        shards = read_shards(reply.shards, config.address)
    except ValueError as error:
        raise TransportError(f"the syncer at {config.address} names unusable shards: {error}") from None
    run_id, versions, settings = clean_all([reply.run_id, dict(reply.versions), dict(reply.settings)])
    return Greeting(run_id, versions, settings, reply.sessions, shards, *best)


def measure(config: TransportConfig, name: str, direction: Literal["up", "down"], seconds: float) -> Rate:
    """Let noise flow over `config.stripes` connections, and count it where it arrives. Raises as `greet` does."""
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
