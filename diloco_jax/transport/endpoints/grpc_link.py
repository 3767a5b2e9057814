"""The transport between learners and the syncer: the syncer listens, islands dial.

A learner opens one connection of gRPC for control messages, so that they never wait behind a payload, and several bulk
connections beside it that share the payloads, because one connection alone does not fill a long link. All of them reach
one port (session/entrance.py). The module uses gRPC's synchronous API, because only its client stays stable when
connections break often.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import grpc

from diloco_jax.protocol.messages import (
    SYNCER,
    HostBlocks,
    LearnerMessage,
    MetricsReport,
)
from diloco_jax.protocol.releases import PROTOCOL
from diloco_jax.transport.endpoints.greeting import DescriptionDesk
from diloco_jax.transport.endpoints.probe import PROBE, ProbeDesk
from diloco_jax.transport.link import (
    HOST_TYPES,
    LEARNER_TYPES,
    SUBSCRIBER,
    SUBSCRIBER_TYPES,
    SYNCER_TYPES,
    TO_HOST_TYPES,
    Delivery,
    Payload,
    Rejected,
    TransportConfig,
    TransportError,
    check_name,
    payload_parts,
)
from diloco_jax.transport.partials import Partials
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.session import calls
from diloco_jax.transport.session.description import DESCRIBE, Description
from diloco_jax.transport.session.dialled import DialledStreams
from diloco_jax.transport.session.entrance import Entrance
from diloco_jax.transport.session.inbox import Inbox
from diloco_jax.transport.session.listener import Listener
from diloco_jax.transport.session.operator_requests import OperatorRequest
from diloco_jax.transport.session.sessions import Refused, SessionBook
from diloco_jax.transport.session.stream import StreamSession
from diloco_jax.transport.trust.security import BulkContexts, Denied, Gate, bulk_context, credentials, diagnose

# A connection may take this long before we look for the cause.
PATIENCE_S = 1.0

log = logging.getLogger(__name__)


class GrpcLink:
    """A learner's or a subscriber's session with a syncer, opened by `connect`."""

    def __init__(self, session: StreamSession, streams: DialledStreams, sends: tuple[type, ...]) -> None:
        self._session = session
        self._streams = streams
        self._sends = sends
        self.number = session.header.session

    @property
    def open(self) -> bool:
        return self._session.open

    @property
    def receiving(self) -> bool:
        return self._session.waiting_bytes > 0 or self._session.assembly.receiving

    def wake(self) -> None:
        """Make a waiting `receive` return None at once; any thread may call it."""
        self._session.inbox.wake()

    def send(self, message: LearnerMessage | MetricsReport | HostBlocks, payload: Payload = b"") -> None:
        allowed = HOST_TYPES if self._session.host else self._sends
        parts = payload_parts(message, payload, allowed, self._session.config.payload_bytes_max)
        self._session.send(message, parts)

    def receive(self, timeout_s: float) -> Delivery | None:
        item = self._session.inbox.get(timeout_s)
        return None if item is None else item[1]

    def close(self, grace_s: float = 5.0) -> None:
        self._streams.close("closed by the learner", grace_s)


def connect(
    config: TransportConfig,
    *,
    run_id: str,
    epoch: int = 0,
    learner_id: str,
    incarnation: int,
    partials: Partials | None = None,
    number: int = 0,
    host: int = 0,
    hosts: int = 1,
    subscribes: bool = False,
    run: str = "",
) -> GrpcLink:
    """Open a session with the syncer at `config.address`, waiting for it at most `config.connect_timeout_s`.

    Args:
        epoch: Newest epoch of the syncer that we know; a syncer of an earlier epoch refuses. 0 if none is known.
        partials: Incomplete payloads of earlier sessions of this process with this syncer; this session continues
            them, and adds its own at its end. None: payloads that are cut are sent again.
        number: Number of the session; 0 for a new one, which is larger than all before it.
        host: Number of this host among the learner's hosts; hosts other than 0 need the number of the leader's session.
        subscribes: Whether this process only receives the model; `learner_id` is then the subscriber's name.
        run: Id of the run that we have joined, "" for none; the syncer of another run refuses.

    Raises:
        TransportError: Nobody answered in time, or the syncer refused, or one side does not trust the other; with
            the reason.
        ValueError: Our name is not allowed, our own certificate, key or token cannot be used, or the address is not
            loopback and plaintext was not allowed.
    """
    own = credentials(config, check_name(learner_id))
    calls.keep_freed_memory()
    # The number grows within a process; across processes the incarnation grows.
    number = number or time.monotonic_ns()
    header = pb.Header(run_id=run_id, epoch=epoch, incarnation=incarnation, session=number, stripes=config.stripes)
    header.run = run
    header.host, header.hosts = host, hosts if hosts > 1 else 0
    partials = Partials(0, config.resume_s) if partials is None else partials
    readable = TO_HOST_TYPES if host else SYNCER_TYPES
    session = StreamSession(Inbox(), header, learner_id, SYNCER, config, partials, readable)
    context = bulk_context(config, learner_id)
    method = calls.SUBSCRIBE if subscribes else calls.OPEN
    streams = DialledStreams(session, own, f"/{calls.SERVICE}/{method}", context)
    link = GrpcLink(session, streams, SUBSCRIBER_TYPES if subscribes else LEARNER_TYPES)
    trouble = _await_ready(session, config, learner_id)
    if trouble is None:
        return link
    answered, reason = not session.open and not trouble, session.reason
    session.fail("not connected")
    session.cancel()
    link.close(grace_s=1.0)
    if answered:
        refusal = f"the syncer at {config.address} refused {learner_id!r}: {reason}"
        if session.refused == "denied":
            raise Denied(grpc.StatusCode.PERMISSION_DENIED, refusal)
        raise (Rejected if session.refused else TransportError)(refusal)
    raise calls.unanswered(config, trouble)


def _await_ready(session: StreamSession, config: TransportConfig, learner_id: str) -> str | None:
    """Wait for the session; return None when it is ready, else the cause of the failure, "" if it is unknown.

    A cause that only a person can remove ends the wait, because gRPC would retry in silence.
    """
    until_s = time.monotonic() + config.connect_timeout_s
    if session.wait_ready(min(PATIENCE_S, config.connect_timeout_s / 2)):
        return None
    over, troubles = threading.Event(), list[str]()

    # The diagnosis runs beside the wait: on a bad network it takes seconds, and the session may open meanwhile.
    def look() -> None:
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


class GrpcListener(Listener):
    """The syncer's side, opened by `listen`.

    Attributes:
        address: Address for learners, with the real port.
        desk: Service for `diloco doctor`.
        greeter: Service that describes the run to users' training loops.
    """

    def __init__(self, config: TransportConfig, run_id: str, epoch: int, subscribers_max: int, run: str = "") -> None:
        super().__init__(config, run_id, epoch, subscribers_max, run)
        calls.keep_freed_memory()
        # (learner, host) -> (incarnation, incomplete payloads of its sessions)
        self._partials: dict[tuple[str, int], tuple[int, Partials]] = {}
        own = credentials(config, SYNCER)
        self._gate = Gate(encrypted=config.encrypted, token=own.token)
        self.desk = ProbeDesk(run_id, self._gate, lambda: self._book.connected)
        self.greeter = DescriptionDesk(self._gate)
        self._entrance = Entrance(config, own, self._gate, BulkContexts(config, SYNCER))
        handlers = {
            calls.OPEN: grpc.stream_stream_rpc_method_handler(partial(self._serve, self._book)),
            calls.SUBSCRIBE: grpc.stream_stream_rpc_method_handler(partial(self._serve, self._subscribers)),
            calls.CONNECT: grpc.stream_stream_rpc_method_handler(self._refuse_older),
            DESCRIBE: grpc.unary_unary_rpc_method_handler(self.greeter.serve, response_serializer=calls.serialized),
            calls.STATUS: grpc.unary_unary_rpc_method_handler(self._tell, response_serializer=calls.serialized),
            calls.DRAIN: grpc.unary_unary_rpc_method_handler(
                partial(self._operate, calls.read_drain_request, True), response_serializer=calls.serialized
            ),
            calls.OPERATE: grpc.unary_unary_rpc_method_handler(
                partial(self._operate, calls.read_operator_request, False), response_serializer=calls.serialized
            ),
            PROBE: grpc.stream_stream_rpc_method_handler(self.desk.serve, response_serializer=calls.serialized),
        }
        self.address = self._entrance.open(calls.SERVICE, handlers)

    def announce(
        self, settings: Callable[[], Mapping[str, str]], description: Description, number_of: Callable[[str], int]
    ) -> None:
        super().announce(settings, description, number_of)
        self.desk.settings = settings
        self.greeter.description, self.greeter.number_of = description, number_of

    def _tell(self, request: bytes, context: Any) -> pb.StatusReply:
        """Answer `diloco status`."""
        del request
        with calls.refusing(context):
            self._gate.check(dict(context.invocation_metadata()))
        return pb.StatusReply(json=self.status_json)

    def _operate(
        self, read: Callable[[bytes], OperatorRequest], by_learner: bool, raw: bytes, context: Any
    ) -> pb.DrainReply:
        """Answer `diloco drain`, `ban` or `admit`; only a drain is allowed to the learner itself."""
        try:
            with calls.refusing(context):
                self._gate.check(dict(context.invocation_metadata()))
                request = read(raw)
                who = request.learner_id if by_learner else SYNCER
                self._gate.check_speaks_for(who, context.auth_context(), or_syncer=True)
        except ValueError as error:
            return pb.DrainReply(ok=False, message=str(error))
        ok, message = self._requests.ask(request)
        return pb.DrainReply(ok=ok, message=message)

    def close(self, grace_s: float = 5.0) -> None:
        """Send what is queued for at most `grace_s` seconds, then end all sessions; safe to call again."""
        self._entrance.stop_judging()
        sessions = [each for each in self.stop_admitting() if isinstance(each, StreamSession)]
        # What was sent before is in the queues of the sessions then.
        self._cutting.shutdown(wait=True)
        self._entrance.close(sessions, "closed by the syncer", grace_s)

    def _refuse_older(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """Refuse a learner of a release whose payloads travel within gRPC."""
        del requests
        with calls.refusing(context):
            self._gate.check(dict(context.invocation_metadata()))
            raise Refused(f"this learner speaks protocol 1, the syncer protocol {PROTOCOL}: upgrade the learner")

    def _serve(self, book: SessionBook, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """Serve the control call of a learner, or of a subscriber."""
        with calls.refusing(context):
            session = self._admit(book, context)
        yield from self._entrance.serve(session, requests, context, book.establish)

    def _admit(self, book: SessionBook, context: Any) -> StreamSession:
        """Check the caller's credentials before everything else, then create its session."""
        metadata = dict(context.invocation_metadata())
        self._gate.check(metadata)
        header = calls.read_header(metadata)
        subscribes = book is self._subscribers
        self._gate.check_speaks_for(header.sender, context.auth_context(), or_subscriber=subscribes)
        held = calls.read_holdings(metadata)
        calls.check_connections(header, self.config)
        session = book.admit(header, partial(self._make_subscription if subscribes else self._make_session, header))
        assert isinstance(session, StreamSession), "this listener makes no other ones"
        if session.header.stripes != header.stripes:
            raise Refused(f"this session has {session.header.stripes} bulk connections, not {header.stripes}")
        if not session.bind(session.control, context.cancel):
            raise Refused("this control connection of the session is open already")
        session.pieces.held = held
        return session

    def _make_session(self, header: pb.Header) -> StreamSession:
        partials = self._partials_of(header)
        readable = HOST_TYPES if header.host else LEARNER_TYPES
        return StreamSession(self._inbox, header, SYNCER, header.sender, self.config, partials, readable)

    def _make_subscription(self, header: pb.Header) -> StreamSession:
        if header.hosts:
            raise Refused(f"{header.sender!r} says {header.hosts} hosts: a subscriber is one process")
        # A subscriber sends no payload.
        partials = Partials(0, self.config.resume_s)
        name = f"{SUBSCRIBER}{header.sender}"
        # It requests one value at a time, so values that wait are those of one that does not read what it requests.
        config = replace(self.config, queue_payloads_max=1)
        return StreamSession(self._inbox, header, SYNCER, header.sender, config, partials, SUBSCRIBER_TYPES, name)

    def _partials_of(self, header: pb.Header) -> Partials:
        """Return the incomplete payloads of this host's incarnation; the caller holds the lock of `admit`."""
        name, incarnation = (header.sender, header.host), header.incarnation
        known = self._partials.get(name)
        if known is None or known[0] != incarnation:
            if known is not None:
                known[1].forget()
            self._partials = {name: each for name, each in self._partials.items() if each[1].held_bytes}
            # All hosts of a learner together keep at most one payload.
            bytes_max = self.config.payload_bytes_max // max(1, header.hosts)
            known = (incarnation, Partials(bytes_max, self.config.resume_s))
            self._partials[name] = known
        return known[1]


def listen(
    config: TransportConfig, *, run_id: str, epoch: int = 0, subscribers_max: int = 0, run: str = ""
) -> GrpcListener:
    """Listen on `config.address`.

    Args:
        subscribers_max: The most subscribers at a time.

    Raises:
        ValueError: The port is in use, or the address is not loopback and plaintext was not allowed.
    """
    return GrpcListener(config, run_id, epoch, subscribers_max, run)
