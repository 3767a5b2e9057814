"""A bulk connection of a session beside gRPC: how it opens, its frames, and its two threads.

The dialling side sends GREETING, the ticket that the session's control call brought, and the number of the stripe. Then
both sides send frames as in `wire.bulk_frame`; the listener's first one says that the session is open. A side without
anything to send for `keepalive_s` sends an empty frame, so that a dead connection is noticed.
"""

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from typing import Any

from diloco_jax.transport import wire
from diloco_jax.transport.connection import Connection
from diloco_jax.transport.link import TransportConfig, TransportError
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.session.sessions import Refused
from diloco_jax.transport.session.stream import LINGER_S, Lane, Outgoing, StreamSession
from diloco_jax.transport.trust.security import BULK_PROTOCOL, dial_listener

# No HTTP/2 client and no TLS client starts like this.
GREETING = b"diloco bulk 2\r\n\0"
TICKET_BYTES = 16
_HELLO_BYTES = len(GREETING) + TICKET_BYTES + 1
# The reason of a refusal may take so much longer on the control call.
CONTROL_S = 1.0
# Bytes that nobody waits for go here.
WASTE_BYTES = 1 << 18


class Stripe:
    """One connection of a session's bulk lane; its threads are one that writes and one that reads.

    Args:
        control: On the dialling side, the event of the end of the control call.
    """

    def __init__(
        self, session: StreamSession, lane: Lane, connection: Connection, control: threading.Event | None = None
    ) -> None:
        self._session = session
        self._lane = lane
        self._connection = connection
        self._control = control
        self._prefix = memoryview(bytearray(wire.PREFIX_BYTES))
        # Held while a frame is written; also at the end, so that nobody writes to a descriptor that is free.
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._threads = 2
        self._read_all = threading.Event()
        # Set when both threads are done and the descriptor is free.
        self.ended = threading.Event()
        lane.stop_reading, lane.send_at_once = connection.stop_reading, self.send_at_once
        # The session may have ended before it could cut this connection.
        if not session.open:
            connection.stop_reading()

    def run(self, *, opens: bool = False) -> None:
        """Start the writer, and read until the connection ends.

        Args:
            opens: Whether to send the frame that says that the session is open.
        """
        title = f"{self._lane.title}-{self._session.peer}"
        threading.Thread(target=self._write, args=(opens,), name=f"diloco-write-{title}", daemon=True).start()
        threading.current_thread().name = f"diloco-read-{title}"
        try:
            self._read()
        except wire.WireError as error:
            self._session.fail(
                f"{self._session.peer!r} sent on the {self._lane.name} connection what cannot be used: {error}"
            )
        except EOFError:
            if not self._lane.said_goodbye:
                self._prefer_control()
                self._session.fail_lost(self._lane)
        # A reader that ended silently would leave a session that never ends.
        except Exception as error:
            self._session.fail_lost(self._lane, error)
        finally:
            self._read_all.set()
            self._leave()

    def _write(self, opens: bool) -> None:
        """Send the lane's pieces until its outbox is closed."""
        lane = self._lane
        try:
            if opens:
                self._send(wire.ready_head())
            while (content := self._take()) is not None:
                self._send(*content)
                # This frees the payload while the writer waits for the next one.
                del content
            self._send(wire.goodbye_head(lane.outbox.reason))
            self._connection.finish()
        # A writer that ended silently would leave a session that never ends.
        except Exception as error:
            self._fail_to_write(error)
        finally:
            lane.written.set()
            self._leave()

    def _fail_to_write(self, error: Exception) -> None:
        # The peer may have sent its reason before it closed the connection; the reader finds it.
        self._read_all.wait(LINGER_S)
        if not self._lane.said_goodbye:
            self._session.fail_lost(self._lane, error)

    def send_at_once(self, item: Outgoing) -> bool:
        """Send a small message on this thread without a wait; False if it has to go through the outbox."""
        if not self._turn.acquire(blocking=False):
            return False
        piece = None if self.ended.is_set() else self._session.pieces.take_only(item)
        if piece is None:
            self._turn.release()
            return False
        rest: list[memoryview] = []
        failure: Exception | None = None
        try:
            rest = self._connection.send_at_once(self._frame(wire.piece_head(piece), piece.views, piece.chunk.digested))
        # The message has its number already, so the session ends if it cannot be sent.
        except Exception as error:
            failure = error
        if not rest and failure is None:
            self._turn.release()
            return True
        title = f"{self._lane.title}-{self._session.peer}"
        thread = threading.Thread(
            target=self._send_rest, args=(rest, failure), name=f"diloco-rest-{title}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            self._turn.release()
            self._session.fail_lost(self._lane, error)
        return True

    def _send_rest(self, rest: list[memoryview], failure: Exception | None) -> None:
        """Send what the connection did not take at once, or end the session for the failure; then end the turn."""
        try:
            if failure is not None:
                raise failure
            self._connection.send(rest)
        except Exception as error:
            self._fail_to_write(error)
        finally:
            self._turn.release()

    def _take(self) -> tuple[bytes, Sequence[memoryview], bool] | None:
        """Return head and data of the next frame, and whether the data are digested; None at the end."""
        try:
            piece = self._session.pieces.take(self._session.config.keepalive_s)
        except TimeoutError:
            return b"", (), False
        return None if piece is None else (wire.piece_head(piece), piece.views, piece.chunk.digested)

    def _send(self, head: bytes, views: Sequence[memoryview] = (), digested: bool = False) -> None:
        frame = self._frame(head, views, digested)
        with self._turn:
            self._connection.send(frame)

    def _frame(self, head: bytes, views: Sequence[memoryview], digested: bool) -> list[memoryview]:
        frame = wire.bulk_frame(head, views, checked=not self._connection.encrypted, digested=digested)
        self._session.count(sent_bytes=sum(part.nbytes for part in frame))
        return frame

    def _read(self) -> None:
        session, lane = self._session, self._lane
        while True:
            self._connection.fill(self._prefix)
            prefix = wire.read_prefix(self._prefix)
            head = memoryview(bytearray(prefix.head_bytes))
            self._connection.fill(head)
            if not self._connection.encrypted:
                wire.check_head(prefix, head)
            if not head.nbytes and not prefix.data_bytes:
                continue
            event = lane.reader.read_head(bytes(head), prefix.data_bytes)
            if isinstance(event, wire.Ready):
                session.mark_ready(lane)
            elif isinstance(event, wire.Goodbye):
                # A listener that refuses the connection says so before anything else.
                if not lane.ready:
                    self._prefer_control()
                    session.fail(event.reason)
                session.hear_goodbye(lane, event.reason)
            else:
                self._receive(prefix, event)
            session.count(received_bytes=wire.PREFIX_BYTES + prefix.head_bytes + prefix.data_bytes)
            del event

    def _receive(self, prefix: wire.Prefix, event: wire.Incoming) -> None:
        """Receive the data of a chunk into the payload's memory, and deliver what is complete."""
        assembly = self._session.assembly
        place = assembly.claim(event.message, event.chunk, prefix.data_bytes)
        if place is None:
            self._discard(prefix.data_bytes)
            return
        try:
            self._connection.fill(place.view)
            if not self._connection.encrypted:
                wire.check_data(prefix, event.chunk, place.view)
        except wire.WireError:
            assembly.leave(place)
            raise
        except BaseException:
            # The next session checks the whole payload.
            assembly.leave(place, self._connection.arrived)
            raise
        assembly.filled(place)
        del place
        assembly.deliver(self._session.offer)

    def _prefer_control(self) -> None:
        """Wait a moment for the control call's end, if the session is not open: its reason says more."""
        if self._control is not None and not self._lane.ready:
            self._control.wait(CONTROL_S)

    def _discard(self, size: int) -> None:
        """Read what nobody waits for, so that the peer's Goodbye gets through."""
        waste = memoryview(bytearray(min(size, WASTE_BYTES)))
        while size:
            self._connection.fill(waste[:size])
            size -= min(size, waste.nbytes)

    def _leave(self) -> None:
        with self._lock:
            self._threads -= 1
            if self._threads:
                return
        with self._turn:
            self._connection.close()
            self.ended.set()


def open_stripe(
    session: StreamSession,
    lane: Lane,
    ticket: bytes,
    context: ssl.SSLContext | None,
    server: str,
    control: threading.Event,
) -> Stripe:
    """Dial the listener for one stripe of a session; OSError if it does not answer."""
    config = session.config
    stream = dial_listener(config.address, context, config.connect_timeout_s, server)
    connection = Connection(stream, silence_s(config))
    try:
        if not session.bind(lane, connection.cut):
            raise ConnectionError("it was opened twice")
        connection.send([memoryview(GREETING + ticket + bytes((lane.ours.stripe,)))])
    except BaseException:
        connection.close()
        raise
    return Stripe(session, lane, connection, control)


def accept_stripe(
    stream: socket.socket, context: ssl.SSLContext | None, config: TransportConfig, greeting_s: float
) -> tuple[Connection, dict[str, list[bytes]], bytes, int]:
    """Return a caller's connection, the names in its certificate, its ticket and the number of its stripe.

    Args:
        greeting_s: Seconds that the caller has for TLS and the greeting.

    Raises:
        OSError: The caller's certificate is not valid, it sent something else, or too slowly. The connection is closed.
        EOFError: It left.
    """
    until_s = time.monotonic() + greeting_s
    try:
        if context is not None:
            stream = context.wrap_socket(stream, server_side=True, do_handshake_on_connect=False)
        connection, names = accept_connection(stream, config, greeting_s)
        hello = bytearray(_HELLO_BYTES)
        connection.fill(memoryview(hello), until_s)
        if not hello.startswith(GREETING):
            raise TransportError("a bulk connection without the greeting")
        return connection, names, bytes(hello[len(GREETING) : -1]), hello[-1]
    except BaseException:
        stream.close()
        raise


def accept_connection(
    stream: socket.socket, config: TransportConfig, greeting_s: float
) -> tuple[Connection, dict[str, list[bytes]]]:
    """Return a caller's connection, after the handshake of TLS if it has TLS, and the names in its certificate.

    Raises:
        OSError: The caller's certificate is not valid, or its handshake took more than `greeting_s` seconds.
    """
    names: dict[str, list[bytes]] = {}
    if isinstance(stream, ssl.SSLSocket):
        stream.settimeout(greeting_s)
        stream.do_handshake()
        if stream.selected_alpn_protocol() != BULK_PROTOCOL:
            raise TransportError("the caller changed its protocol")
        names = certified_names(stream)
    return Connection(stream, silence_s(config)), names


def refuse_stripe(connection: Connection, reason: str) -> None:
    """Tell the caller why its connection is closed, and close it."""
    with contextlib.suppress(OSError):
        connection.send(wire.bulk_frame(wire.goodbye_head(reason), (), checked=not connection.encrypted))
        connection.finish()
    connection.close()


def find_lane(session: StreamSession | None, stripe: int, connection: Connection) -> tuple[StreamSession, Lane]:
    """Return the session and the lane of a new connection, which now has it; Refused if there is none for it."""
    lane = None if session is None else session.lanes.get((pb.LANE_BULK, stripe))
    if session is None or lane is None:
        raise Refused("no session here waits for this bulk connection", final=False)
    if not session.bind(lane, connection.cut):
        raise Refused("this bulk connection of the session is open already")
    return session, lane


def certified_names(stream: ssl.SSLSocket) -> dict[str, list[bytes]]:
    """Return the names in the caller's certificate, under the keys that gRPC uses for them."""
    # The types of typeshed do not tell the fields apart.
    certificate: dict[str, Any] = dict(stream.getpeercert() or {})
    others = certificate.get("subjectAltName", ())
    subject = [pair for part in certificate.get("subject", ()) for pair in part]
    return {
        "peer_dns": [value.encode() for kind, value in others if kind == "DNS"],
        "peer_uri": [value.encode() for kind, value in others if kind == "URI"],
        "x509_common_name": [value.encode() for kind, value in subject if kind == "commonName"],
    }


def silence_s(config: TransportConfig) -> float:
    """Return after how many seconds without a byte a bulk connection is lost."""
    return config.keepalive_s + config.keepalive_timeout_s
