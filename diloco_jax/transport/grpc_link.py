"""The transport over gRPC: the syncer listens, islands dial.

A learner opens two channels with a TCP connection each, so that a control message never waits behind a payload.
The synchronous API is used on purpose: its client is the one that stays stable when connections break often.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc

from diloco_jax.protocol.messages import SYNCER, LearnerMessage
from diloco_jax.transport.calls import (
    CONNECT,
    DRAIN,
    SERVICE,
    STATUS,
    call_metadata,
    channel_options,
    header_metadata,
    open_channel,
    read_drain_request,
    read_header,
    unanswered,
)
from diloco_jax.transport.link import (
    LEARNER_TYPES,
    Delivery,
    Payload,
    Rejected,
    TransportConfig,
    TransportError,
    check_name,
    payload_parts,
    split_address,
)
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.security import (
    Denied,
    auth_context,
    credentials,
    diagnose,
    syncer_credentials,
)
from diloco_jax.transport.sessions import Inbox, Refused, SessionListener
from diloco_jax.transport.stream import DENIALS, REFUSAL, Lane, StreamSession

PATIENCE_S = 1.0  # how long a connection may take before we look for what is wrong


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

    Args:
        config: How; its files are read anew at every call.
        run_id: Name of the run, the same on both sides.
        epoch: Newest life of the syncer that we have heard of; a syncer of an earlier one refuses. 0: none.
        learner_id: Our name. With certificates, that of ours.
        incarnation: Grows with every start of this learner.

    Raises:
        TransportError: Nobody answered in time, or the syncer refused, or one side does not trust the other; why.
        ValueError: Our name is not allowed, our own certificate, key or token cannot be used, or the address is not
            loopback and plaintext was not allowed.
    """
    own = credentials(config, check_name(learner_id))
    number = time.monotonic_ns()  # grows within a process; across processes the incarnation does
    header = pb.Header(run_id=run_id, epoch=epoch, incarnation=incarnation, session=number)
    session = StreamSession(Inbox(), header, learner_id, SYNCER, config)
    link = GrpcLink(session, [], [])
    headers = {lane: header_metadata(lane.ours) for lane in session.lanes.values()}
    for lane in session.lanes.values():
        channel = open_channel(config, own)
        link._channels.append(channel)
        call = channel.stream_stream(f"/{SERVICE}/{CONNECT}")(
            session.write(lane), metadata=(headers[lane], *own.metadata), wait_for_ready=True
        )
        session.bind(lane, call.cancel)
        link._ended.append(_watch(session, lane, call))
        session.start_reader(lane, call)
    trouble = _await_ready(session, config, learner_id)
    if trouble is None:
        return link
    answered, reason = not session.open and not trouble, session.reason
    session.fail("not connected")
    session.cancel()
    link.close(grace_s=1.0)
    if answered:
        kind = Rejected if session.refused else TransportError
        raise kind(f"the syncer at {config.address} refused {learner_id!r}: {reason}")
    raise unanswered(config, trouble)


def _await_ready(session: StreamSession, config: TransportConfig, learner_id: str) -> str | None:
    """Wait for the session; None when it is ready, else what is wrong, "" if that cannot be told.

    A reason that only a person can mend ends the wait: gRPC would go on trying, in silence.
    """
    until_s = time.monotonic() + config.connect_timeout_s
    if session.wait_ready(min(PATIENCE_S, config.connect_timeout_s / 2)):
        return None
    over, troubles = threading.Event(), list[str]()

    def look() -> None:  # beside the wait: on a bad network it takes seconds, and the session may come meanwhile
        while not over.is_set():
            trouble = diagnose(config, learner_id)
            if trouble and not over.is_set():
                troubles.append(trouble)
                session.fail(trouble)
            over.wait(PATIENCE_S)

    threading.Thread(target=look, name=f"diloco-look-{learner_id}", daemon=True).start()
    ready = session.wait_ready(max(0.0, until_s - time.monotonic()))
    over.set()
    return None if ready else "".join(troubles[:1])


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
            *channel_options(config),
            ("grpc.so_reuseport", 0),  # else a second syncer gets the same port without an error
            ("grpc.http2.min_ping_interval_without_data_ms", 500),  # learners choose how often they ping
            ("grpc.http2.max_ping_strikes", 0),
        ]
        self._server = grpc.server(_DaemonThreads(), options=options, maximum_concurrent_rpcs=config.connections_max)
        handlers = {
            CONNECT: grpc.stream_stream_rpc_method_handler(self._serve),
            STATUS: grpc.unary_unary_rpc_method_handler(self._tell, response_serializer=_serialised),
            DRAIN: grpc.unary_unary_rpc_method_handler(self._drain, response_serializer=_serialised),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        server_credentials, self._gate = syncer_credentials(config)
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
        del request
        try:
            self._gate.check(call_metadata(context))
        except Denied as error:
            context.abort(error.code, str(error))
        return pb.StatusReply(json=self.status_json)

    def _drain(self, request: bytes, context: Any) -> pb.DrainReply:
        """Answer `diloco drain`."""
        try:
            self._gate.check(call_metadata(context))
            learner_id = read_drain_request(request)
            self._gate.check_speaks_for(learner_id, auth_context(context), or_syncer=True)
        except Denied as error:
            context.abort(error.code, str(error))
        except ValueError as error:
            return pb.DrainReply(ok=False, message=str(error))
        ok, message = self.request_drain(learner_id)
        return pb.DrainReply(ok=ok, message=message)

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
        except Denied as error:
            context.abort(error.code, str(error))
        except Refused as error:
            context.abort(REFUSAL if error.final else grpc.StatusCode.ABORTED, str(error))
        if not context.add_callback(lambda: session.fail_lost(lane)):
            session.fail_lost(lane)
        session.mark_ready(lane)
        if session.wait_ready(self.config.connect_timeout_s):
            try:
                self.establish(session)
            except Refused as error:
                context.abort(REFUSAL if error.final else grpc.StatusCode.ABORTED, str(error))
            session.start_reader(lane, requests)
            yield lane.header
        else:
            session.fail(f"the second connection did not come within {self.config.connect_timeout_s:g} s")
        yield from session.write(lane)

    def _open_lane(self, context: Any) -> tuple[StreamSession, Lane]:
        """Check the caller's credentials before anything that it says, then find or make its session."""
        metadata = call_metadata(context)
        self._gate.check(metadata)
        header, name = read_header(metadata)
        self._gate.check_speaks_for(header.sender, auth_context(context))

        def make() -> StreamSession:
            return StreamSession(self.inbox, header, SYNCER, header.sender, self.config)

        session = self.admit(header.run_id, header.epoch, header.sender, header.incarnation, header.session, make)
        lane = session.lanes[name]
        if not session.bind(lane, context.cancel):
            raise Refused(f"the {lane.name} connection of this session is open already")
        return session, lane


def _serialised(reply: pb.StatusReply | pb.DrainReply) -> bytes:
    return reply.SerializeToString()


# ---- questions ----------------------------------------------------------------------------------------------------


def ask_status(config: TransportConfig) -> str:
    """The status that the syncer at `config.address` last gave out, as JSON.

    Raises:
        TransportError: Nobody answered in time, or our credentials do not do.
        ValueError: Our own certificate, key or token cannot be used, or the address is not loopback and plaintext was
            not allowed.
    """
    reply: pb.StatusReply = _ask(config, STATUS, b"", pb.StatusReply.FromString)
    return reply.json


def ask_drain(config: TransportConfig, learner_id: str) -> tuple[bool, str]:
    """Ask the syncer at `config.address` to let a learner leave; whether it does, and its words.

    Raises:
        TransportError: Nobody answered in time, or our credentials do not do.
        ValueError: As for `ask_status`, or the name cannot be that of a learner.
    """
    request = pb.DrainRequest(learner_id=check_name(learner_id)).SerializeToString()
    reply: pb.DrainReply = _ask(config, DRAIN, request, pb.DrainReply.FromString)
    return reply.ok, reply.message


def _ask(config: TransportConfig, method: str, request: bytes, read: Callable[[bytes], Any]) -> Any:
    own = credentials(config, SYNCER, owner=False)
    with open_channel(config, own) as channel:
        ask = channel.unary_unary(f"/{SERVICE}/{method}", response_deserializer=read)
        try:
            return ask(request, timeout=config.connect_timeout_s, wait_for_ready=True, metadata=own.metadata)
        except grpc.RpcError as error:
            if error.code() in DENIALS:
                raise TransportError(f"the syncer at {config.address} refused: {error.details()}") from None
            if error.code() not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE):
                answer = f"{error.code().name}: {error.details()}"
                raise TransportError(f"the syncer at {config.address} did not answer but with {answer}") from None
            raise unanswered(config, diagnose(config, SYNCER)) from None


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
