"""Names, options, metadata and errors that the gRPC calls of both sides share, and short requests to a syncer.

Metadata arrive before everything else and are small. So they have separate limits, which are checked before a session
exists.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager
from operator import methodcaller
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from diloco_jax.protocol.messages import SYNCER
from diloco_jax.protocol.texts import REASON_LENGTH_MAX, clean
from diloco_jax.transport.link import (
    HOSTS_MAX,
    STRIPES_MAX,
    TransportConfig,
    TransportError,
    bucket_scheme,
    check_free,
    check_name,
)
from diloco_jax.transport.partials import HOLDINGS_BYTES_MAX, PeerHoldings
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.session import operator_requests as operator
from diloco_jax.transport.session.operator_requests import OperatorRequest
from diloco_jax.transport.session.refusals import REFUSALS
from diloco_jax.transport.session.sessions import Refused
from diloco_jax.transport.session.stream import DENIALS, REFUSAL, StreamSession
from diloco_jax.transport.store.requests import ask_in_bucket
from diloco_jax.transport.trust.security import Credentials, Denied, credentials, diagnose, is_loopback

SERVICE, OPEN, STATUS, DRAIN, OPERATE = "diloco.v1.Syncer", "Open", "Status", "Drain", "Operate"
# What a subscriber opens. An older syncer does not know the call, and so cannot take a subscriber for a learner.
SUBSCRIBE = "Subscribe"
# What a learner of protocol 1 opens.
CONNECT = "Connect"
ISLAND_SERVICE, FOLLOW = "diloco.v1.Island", "Follow"
HEADER_KEY = "diloco-header-bin"
HEADER_BYTES_MAX = 1024
HOLDINGS_KEY = "diloco-holdings-bin"
TICKET_KEY = "diloco-ticket-bin"
# A connection has this long from its start until TLS is up and HTTP/2 has greeted; gRPC's default is 120.
GREETING_S = 20.0
# A connection may be open this long without a call; a learner's connection always has one.
IDLE_S = 60.0
# Header, holdings and token, in the encoding of HTTP/2.
METADATA_BYTES_MAX = 16 << 10
# Limit of one message of a call; the status of ten thousand learners is the largest.
MESSAGE_BYTES_MAX = 16 << 20
serialized = methodcaller("SerializeToString")


def channel_options(config: TransportConfig) -> list[tuple[str, int]]:
    """Return the channel options of both sides.

    gRPC ignores names that it does not know, so a typing error is silent.
    """
    return [
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_metadata_size", METADATA_BYTES_MAX),
        ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
        ("grpc.keepalive_time_ms", round(config.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(config.keepalive_timeout_s * 1000)),
        # The default is a minute. This timeout ends a connection to a stopped process whose kernel still answers.
        ("grpc.http2.ping_timeout_ms", round(config.keepalive_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # A piece of `diloco doctor`'s measurement travels in one frame.
        ("grpc.http2.max_frame_size", 1 << 20),
        # Without it that measurement needs a gigabyte to fill a 60 ms link.
        ("grpc.http2.lookahead_bytes", 16 << 20),
    ]


def open_server(
    config: TransportConfig, service: str, handlers: Mapping[str, grpc.RpcMethodHandler], own: grpc.ServerCredentials
) -> tuple[grpc.Server, str]:
    """Start a server on `config.address`; return it and its address with the real port.

    Raises:
        ValueError: This process cannot listen there.
    """
    options = [
        *channel_options(config),
        # Otherwise a second process gets the same port without an error.
        ("grpc.so_reuseport", 0),
        # Callers choose how often they ping.
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 0),
        # Each connection holds a descriptor, so one that never greets must end.
        ("grpc.server_handshake_timeout_ms", round(GREETING_S * 1000)),
        ("grpc.max_connection_idle_ms", round(IDLE_S * 1000)),
        # Without it anyone who can reach the port takes all descriptors of this process.
        ("grpc.max_allowed_incoming_connections", 2 * config.connections_max),
    ]
    server = grpc.server(DaemonThreads(), options=options, maximum_concurrent_rpcs=config.connections_max)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    try:
        check_free(config.address)
        port = server.add_secure_port(config.address, own)
    except (OSError, RuntimeError) as error:
        raise cannot_listen(config.address, error) from None
    server.start()
    return server, f"{config.address.rpartition(':')[0]}:{port}"


@contextmanager
def refusing(context: Any) -> Iterator[None]:
    """End a call with the reason why its caller was denied or refused, and log it."""
    caller = REFUSALS.caller_of(context.peer())
    try:
        yield
    except Denied as error:
        REFUSALS.tell(caller, str(error))
        context.abort(error.code, str(error))
    except Refused as error:
        REFUSALS.tell(caller, str(error))
        context.abort(REFUSAL if error.final else grpc.StatusCode.ABORTED, str(error))


def close_server(server: grpc.Server, sessions: Sequence[StreamSession], reason: str, grace_s: float) -> None:
    """Send what is queued for at most `grace_s` seconds, then end all sessions; safe to call again."""
    until_s = time.monotonic() + grace_s
    for session in sessions:
        session.retire(reason)
    for session in sessions:
        session.wait_written(until_s)
    # Streams whose last frame was just written get a little more time to end by themselves.
    left_s = max(0.2, until_s - time.monotonic())
    server.stop(left_s).wait(left_s + 1.0)


def cannot_listen(address: str, why: object, setting: str = "transport.address") -> ValueError:
    """Return the error for an address that this process cannot listen on."""
    return ValueError(
        f"cannot listen on {setting} {address} ({why}): stop the process that has the port, choose another one (0 is "
        "any free port), or use an address of this machine"
    )


def keep_freed_memory() -> None:
    """Make glibc keep the memory of processed frames for later frames, which halves the time to receive.

    glibc returns a freed block to the system, which zeroes its pages for the next frame, unless it has seen a larger
    block freed before; it remembers sizes up to 32 MiB. This block's pages are never touched. Other C libraries ignore
    the call.
    """
    bytearray(31 << 20)


def open_channel(config: TransportConfig, own: Credentials) -> grpc.Channel:
    """Return a channel to `config.address` with a separate connection."""
    options: list[tuple[str, int | str]] = [
        *channel_options(config),
        *own.options,
        # Otherwise both channels share one TCP connection.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.enable_http_proxy", int(not is_loopback(config.address))),
    ]
    return grpc.secure_channel(config.address, own.channel, options)


def unanswered(config: TransportConfig, trouble: str) -> TransportError:
    """Return the error for a syncer that did not answer; `trouble` is the result of `diagnose`."""
    if trouble:
        return TransportError(f"no connection with the syncer at {config.address}: {trouble}")
    return TransportError(
        f"no syncer answered at {config.address} within {config.connect_timeout_s:g} s: start it, correct "
        "that address, or raise transport.connect_timeout_s"
    )


def ask_status(config: TransportConfig) -> str:
    """Return the newest status of the syncer at `config.address` as JSON; raises as `ask`."""
    reply: pb.StatusReply = ask(config, STATUS, b"", pb.StatusReply.FromString)
    return reply.json


def ask_operator(config: TransportConfig, request: OperatorRequest) -> tuple[bool, str]:
    """Send an operator's request; return whether the syncer accepts, and its answer. Raises as `ask`."""
    action, name, why = request
    if action == operator.DRAIN:
        # A syncer of an older release knows this call.
        method, message = DRAIN, pb.DrainRequest(learner_id=check_name(name)).SerializeToString()
    else:
        method = OPERATE
        message = pb.OperatorRequest(action=action, learner_id=check_name(name), why=why).SerializeToString()
    reply: pb.DrainReply = ask(config, method, message, pb.DrainReply.FromString)
    return reply.ok, clean(reply.message, REASON_LENGTH_MAX)


def ask(config: TransportConfig, method: str, request: bytes, read: Callable[[bytes], Any], name: str = SYNCER) -> Any:
    """Send one request to the syncer at `config.address`, and return its answer.

    Args:
        request: The request's bytes.
        read: Parser of the answer's bytes.
        name: Name of the caller; it replaces "{name}" in the config's file names.

    Raises:
        TransportError: Nobody answered in time, or the syncer refused our credentials.
        ValueError: Our own certificate, key or token cannot be used, or the address is not loopback and plaintext was
            not allowed.
    """
    if bucket_scheme(config.address):
        return ask_in_bucket(config, method, request, read, name)
    own = credentials(config, name, owner=False)
    with open_channel(config, own) as channel:
        call = channel.unary_unary(f"/{SERVICE}/{method}", response_deserializer=read)
        try:
            return call(request, timeout=config.connect_timeout_s, wait_for_ready=True, metadata=own.metadata)
        except grpc.RpcError as error:
            raise failure(config, error, name) from None


def failure(config: TransportConfig, error: Exception, name: str) -> TransportError:
    """Return the error for a request without an answer, in words for people."""
    if not isinstance(error, grpc.Call):
        return TransportError(f"the syncer at {config.address} ended the call without an answer")
    if error.code() in DENIALS:
        return TransportError(f"the syncer at {config.address} refused: {clean(error.details(), REASON_LENGTH_MAX)}")
    if error.code() not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE):
        if error.code() is REFUSAL:
            return TransportError(
                f"the syncer at {config.address} cannot answer: {clean(error.details(), REASON_LENGTH_MAX)}"
            )
        answer = f"{error.code().name}: {clean(error.details(), REASON_LENGTH_MAX)}"
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            # A syncer that waits for a loop's model serves only the calls of `join`.
            hint = "it has no model yet, or is of another release of diloco_jax"
            return TransportError(f"the syncer at {config.address} cannot answer yet: {hint} ({answer})")
        return TransportError(f"the syncer at {config.address} did not answer but with {answer}")
    return unanswered(config, diagnose(config, name))


def header_metadata(header: pb.Header) -> tuple[str, bytes]:
    """Return the header as an item of a call's metadata; ValueError if the names in it are too long."""
    raw = header.SerializeToString()
    if len(raw) > HEADER_BYTES_MAX:
        raise ValueError(f"the names of run and learner take {len(raw)} bytes, the limit is {HEADER_BYTES_MAX}")
    return HEADER_KEY, raw


def read_header(metadata: Mapping[str, str | bytes]) -> pb.Header:
    """Return the header in a call's metadata.

    Raises:
        Refused: The header is missing, too large or malformed, or does not name a stream of a session.
    """
    raw = metadata.get(HEADER_KEY, b"")
    try:
        header = pb.Header.FromString(raw if isinstance(raw, bytes) and len(raw) <= HEADER_BYTES_MAX else b"")
    except DecodeError:
        header = pb.Header()
    if header.lane not in (pb.LANE_CONTROL, pb.LANE_BULK):
        raise Refused(f"the call's {HEADER_KEY} metadata names no lane")
    if not 1 <= header.stripes <= STRIPES_MAX:
        raise Refused(f"{header.sender!r} wants {header.stripes} bulk connections: set transport.stripes to 1 to 16")
    if header.stripe >= (header.stripes if header.lane == pb.LANE_BULK else 1):
        raise Refused(f"{header.sender!r} opens connection {header.stripe} of {header.stripes} of a lane")
    if header.hosts > HOSTS_MAX or header.host >= max(1, header.hosts):
        raise Refused(f"{header.sender!r} has host {header.host} of {header.hosts}: use at most {HOSTS_MAX}, from 0 on")
    return header


def check_connections(header: pb.Header, config: TransportConfig) -> None:
    """Check that all hosts of a learner together fit into `connections_max`; Refused if they do not."""
    wanted = header.hosts * (header.stripes + 1)
    if wanted > config.connections_max:
        raise Refused(
            f"{header.sender!r} has {header.hosts} hosts with {header.stripes + 1} connections each, but the syncer's "
            f"transport.connections_max is {config.connections_max}: raise it above {wanted}"
        )


def holdings_metadata(holdings: pb.Holdings) -> tuple[tuple[str, bytes], ...]:
    """Return what we state as a receiver of payloads as items of a call's metadata."""
    return ((HOLDINGS_KEY, holdings.SerializeToString()),)


def read_holdings(metadata: Mapping[str, str | bytes]) -> PeerHoldings:
    """Return what the caller states as a receiver of payloads; Refused if the list is too long or malformed."""
    raw = metadata.get(HOLDINGS_KEY, b"")
    if not isinstance(raw, bytes) or len(raw) > HOLDINGS_BYTES_MAX:
        raise Refused(f"the call's {HOLDINGS_KEY} metadata has {len(raw)} bytes, the limit is {HOLDINGS_BYTES_MAX}")
    try:
        return PeerHoldings(pb.Holdings.FromString(raw))
    except (DecodeError, ValueError) as error:
        raise Refused(f"the call's {HOLDINGS_KEY} metadata are unusable: {error}") from None


def read_drain_request(raw: bytes) -> OperatorRequest:
    """Return the request that a learner leave; ValueError if it is malformed or the name is not allowed."""
    try:
        return OperatorRequest(operator.DRAIN, check_name(pb.DrainRequest.FromString(raw).learner_id))
    except DecodeError as error:
        raise ValueError(f"malformed request: {error}") from None


def read_operator_request(raw: bytes) -> OperatorRequest:
    """Return the request to ban or admit a learner; ValueError if it is malformed or not allowed."""
    try:
        read = pb.OperatorRequest.FromString(raw)
    except DecodeError as error:
        raise ValueError(f"malformed request: {error}") from None
    if read.action not in (operator.BAN, operator.ADMIT):
        raise ValueError(f"this syncer cannot do {read.action[:80]!r}: use the same release on both sides")
    return OperatorRequest(read.action, check_name(read.learner_id), read.why)


class DaemonThreads(futures.Executor):
    """Executor with one daemon thread per call.

    With a pool, the process would wait at its exit for calls that last as long as the run.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        future: futures.Future[Any] = futures.Future()

        def body() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            # Every executor catches all of them: the future carries the error.
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=body, name="diloco-call", daemon=True).start()
        return future
