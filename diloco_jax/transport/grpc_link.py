"""The transport over gRPC: the syncer listens, islands dial.

A learner opens two channels with a TCP connection each, so that a control message never waits behind a payload.
The synchronous API is used on purpose: its client is the one that stays stable when connections break often.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc

from diloco_jax.protocol.messages import SYNCER, LearnerMessage
from diloco_jax.transport import wire
from diloco_jax.transport.link import (
    LEARNER_TYPES,
    Delivery,
    Payload,
    Rejected,
    TransportConfig,
    TransportError,
    payload_parts,
    split_address,
)
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.security import credentials, is_loopback
from diloco_jax.transport.sessions import CLOSING, Inbox, Refused, SessionListener
from diloco_jax.transport.stream import LANES, Lane, StreamSession

_SERVICE, _METHOD, _STATUS = "diloco.v1.Syncer", "Connect", "Status"
_HEADER_KEY = "diloco-header-bin"


def _options(config: TransportConfig) -> list[tuple[str, int]]:
    """Channel options of both sides. gRPC ignores a name that it does not know, so a typing error here is silent."""
    return [
        ("grpc.max_receive_message_length", wire.FRAME_BYTES_MAX),
        ("grpc.max_send_message_length", wire.FRAME_BYTES_MAX),
        ("grpc.keepalive_time_ms", round(config.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(config.keepalive_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.lookahead_bytes", 16 << 20),  # else one connection needs a gigabyte to fill a 60 ms link
    ]


# ---- learner ----------------------------------------------------------------------------------------------------


class GrpcLink:
    """A learner's session with a syncer; `connect` makes it."""

    def __init__(self, session: StreamSession, channels: list[grpc.Channel], ended: list[threading.Event]) -> None:
        self._session = session
        self._channels = channels
        self._ended = ended

    def send(self, message: LearnerMessage, payload: Payload = b"") -> None:
        """Queue a message; never blocks. See Link.send."""
        parts = payload_parts(message, payload, LEARNER_TYPES, self._session.config.payload_bytes_max)
        self._session.send(message, parts)

    def receive(self, timeout_s: float) -> Delivery | None:
        """Return the next delivery, or None after `timeout_s` seconds; 0 only looks."""
        item = self._session.inbox.get(timeout_s)
        return None if item is None else item[1]

    def close(self, grace_s: float = 5.0) -> None:
        """Send what is queued for at most `grace_s` seconds, then end the session; safe to call again."""
        until_s = time.monotonic() + grace_s
        self._session.retire("closed by the learner")
        for ended in self._ended:
            ended.wait(max(0.0, until_s - time.monotonic()))
        for channel in self._channels:
            channel.close()


def connect(config: TransportConfig, *, run_id: str, epoch: int = 0, learner_id: str, incarnation: int) -> GrpcLink:
    """Open a session with the syncer at `config.address`, waiting for it at most `config.connect_timeout_s`.

    Raises:
        TransportError: Nobody answered in time, or the syncer refused, with its reason.
        ValueError: The address is not loopback and plaintext was not allowed.
    """
    channel_credentials = credentials(config).channel
    number = time.monotonic_ns()  # grows within a process; across processes the incarnation does
    header = pb.Header(run_id=run_id, epoch=epoch, incarnation=incarnation, session=number)
    session = StreamSession(Inbox(), header, learner_id, SYNCER, config)
    options = [
        *_options(config),
        ("grpc.use_local_subchannel_pool", 1),  # else both channels share one TCP connection
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.enable_http_proxy", int(not is_loopback(config.address))),
    ]
    link = GrpcLink(session, [], [])
    for lane in session.lanes.values():
        channel = grpc.secure_channel(config.address, channel_credentials, options)
        link._channels.append(channel)
        call = channel.stream_stream(f"/{_SERVICE}/{_METHOD}")(
            session.write(lane), metadata=((_HEADER_KEY, _lane_metadata(lane)),), wait_for_ready=True
        )
        session.bind(lane, call.cancel)
        link._ended.append(_watch(session, lane, call))
        session.start_reader(lane, call)
    if session.wait_ready(config.connect_timeout_s):
        return link
    answered, reason = not session.open, session.reason
    session.fail("not connected")
    session.cancel()
    link.close(grace_s=1.0)
    if answered:
        kind = Rejected if session.refused and CLOSING not in reason else TransportError
        raise kind(f"the syncer at {config.address} refused {learner_id!r}: {reason}")
    raise TransportError(
        f"no syncer answered at {config.address} within {config.connect_timeout_s:g} s: start it, correct "
        "transport.address, or raise transport.connect_timeout_s"
    )


def _lane_metadata(lane: Lane) -> bytes:
    return pb.Frame.FromString(lane.header).header.SerializeToString()


def _watch(session: StreamSession, lane: Lane, call: Any) -> threading.Event:
    """Return an event that is set when the call is over; a call that is cut fails the session even while its reader
    waits for room in the inbox."""
    ended = threading.Event()

    def on_end() -> None:
        if call.code() is not grpc.StatusCode.OK:
            session.fail_lost(lane, call)
        ended.set()

    if not call.add_callback(on_end):
        on_end()
    return ended


# ---- syncer -----------------------------------------------------------------------------------------------------


class _DaemonThreads(futures.Executor):
    """A thread per call. A pool would make the process wait at exit for calls that last as long as the run."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        future: futures.Future[Any] = futures.Future()

        def body() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # as every executor does: the future carries it
                future.set_exception(error)

        threading.Thread(target=body, name="diloco-call", daemon=True).start()
        return future


class GrpcListener(SessionListener[StreamSession]):
    """The syncer's side; `listen` makes it."""

    def __init__(self, config: TransportConfig, run_id: str, epoch: int) -> None:
        super().__init__(config, run_id, epoch)
        self.status_json = "{}"  # the driver replaces it whenever it likes
        options = [
            *_options(config),
            ("grpc.so_reuseport", 0),  # else a second syncer gets the same port without an error
            ("grpc.http2.min_ping_interval_without_data_ms", 500),  # learners choose how often they ping
            ("grpc.http2.max_ping_strikes", 0),
        ]
        self._server = grpc.server(_DaemonThreads(), options=options, maximum_concurrent_rpcs=config.connections_max)
        handlers = {
            _METHOD: grpc.stream_stream_rpc_method_handler(self._serve),
            _STATUS: grpc.unary_unary_rpc_method_handler(self._tell, response_serializer=_serialised),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
        server_credentials = credentials(config).server
        try:
            _probe(config.address)
            port = self._server.add_secure_port(config.address, server_credentials)
        except (OSError, RuntimeError) as error:
            raise ValueError(
                f"cannot listen on transport.address {config.address} ({error}): stop the process that has the port, "
                "choose another one (0: any free port), or use an address of this machine"
            ) from None
        self._address = f"{config.address.rpartition(':')[0]}:{port}"
        self._server.start()

    def _tell(self, request: bytes, context: Any) -> pb.StatusReply:
        """Answer `diloco status`."""
        del request, context
        return pb.StatusReply(json=self.status_json)

    @property
    def address(self) -> str:
        """Where learners connect, with the real port."""
        return self._address

    def close(self, grace_s: float = 5.0) -> None:
        """Send what is queued for at most `grace_s` seconds, then end all sessions; safe to call again."""
        until_s = time.monotonic() + grace_s
        sessions = self.stop_admitting()
        for session in sessions:
            session.retire("closed by the syncer")
        for session in sessions:
            session.wait_written(until_s)
        # The little extra lets streams whose last frame was just written end by themselves.
        left_s = max(0.2, until_s - time.monotonic())
        self._server.stop(left_s).wait(left_s + 1.0)

    def _serve(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """One lane of one learner: this generator writes, a thread of its own reads."""
        try:
            session, lane = self._open_lane(context)
        except Refused as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        if not context.add_callback(lambda: session.fail_lost(lane)):
            session.fail_lost(lane)
        session.mark_ready(lane)
        if session.wait_ready(self.config.connect_timeout_s):
            session.start_reader(lane, requests)
            yield lane.header
        else:
            session.fail(f"the second connection did not come within {self.config.connect_timeout_s:g} s")
        yield from session.write(lane)

    def _open_lane(self, context: Any) -> tuple[StreamSession, Lane]:
        raw = dict(context.invocation_metadata()).get(_HEADER_KEY, b"")
        header = pb.Header()
        with contextlib.suppress(Exception):  # what is left empty is refused below
            header.ParseFromString(raw)
        names = {number: name for name, number in LANES.items()}
        if header.lane not in names:
            raise Refused(f"the call's {_HEADER_KEY} metadata names no lane")

        def make() -> StreamSession:
            return StreamSession(self.inbox, header, SYNCER, header.sender, self.config)

        session = self.admit(header.run_id, header.epoch, header.sender, header.incarnation, header.session, make)
        lane = session.lanes[names[header.lane]]
        if not session.bind(lane, context.cancel):
            raise Refused(f"the {lane.name} connection of this session is open already")
        return session, lane


def _serialised(reply: pb.StatusReply) -> bytes:
    return reply.SerializeToString()


def ask_status(config: TransportConfig) -> str:
    """The status that the syncer at `config.address` last gave out, as JSON.

    Raises:
        TransportError: Nobody answered in time.
        ValueError: The address is not loopback and plaintext was not allowed.
    """
    options = [*_options(config), ("grpc.enable_http_proxy", int(not is_loopback(config.address)))]
    with grpc.secure_channel(config.address, credentials(config).channel, options) as channel:
        ask = channel.unary_unary(f"/{_SERVICE}/{_STATUS}", response_deserializer=pb.StatusReply.FromString)
        try:
            reply: pb.StatusReply = ask(b"", timeout=config.connect_timeout_s, wait_for_ready=True)
        except grpc.RpcError as error:
            raise TransportError(
                f"no syncer answered at {config.address} within {config.connect_timeout_s:g} s "
                f"({error.code().name}): start it, or correct the address"
            ) from None
    return reply.json


def _probe(address: str) -> None:
    """Bind and let go. gRPC would find out as well, but it prints its internal log before it raises."""
    host, port = split_address(address)
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does: TIME_WAIT is not "in use"
        probe.bind(target)


def listen(config: TransportConfig, *, run_id: str, epoch: int = 0) -> GrpcListener:
    """Listen on `config.address`.

    Raises:
        ValueError: The port is in use, or the address is not loopback and plaintext was not allowed.
    """
    return GrpcListener(config, run_id, epoch)
