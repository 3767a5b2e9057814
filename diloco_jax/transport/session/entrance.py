"""The port of a listener: it serves the streams of sessions, their control calls and their bulk connections."""

import contextlib
import logging
import secrets
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import grpc

from diloco_jax.transport.link import SUBSCRIBER, TransportConfig
from diloco_jax.transport.session import calls
from diloco_jax.transport.session.front import NO_CERTIFICATE, Front
from diloco_jax.transport.session.refusals import REFUSALS
from diloco_jax.transport.session.sessions import Refused
from diloco_jax.transport.session.stream import StreamSession
from diloco_jax.transport.session.stripe import TICKET_BYTES, Stripe, accept_stripe, find_lane, refuse_stripe
from diloco_jax.transport.trust.security import BulkContexts, Credentials, Denied, Gate

# Where gRPC itself listens: whatever comes from outside comes through the front.
INNER = "127.0.0.1:0"

log = logging.getLogger(__name__)


class Entrance:
    """The port of one listener.

    A caller opens a control call, whose handler passes the session to `serve`. The call's metadata answer with a
    ticket. With it the caller opens the bulk connections of the session at the same port.

    Args:
        contexts: Settings of TLS for bulk connections.
    """

    def __init__(self, config: TransportConfig, own: Credentials, gate: Gate, contexts: BulkContexts) -> None:
        self._config = config
        self._own = own
        self._gate = gate
        self._contexts = contexts
        self._lock = threading.Lock()
        # Ticket for bulk connections -> session; a new dict for each change.
        self._tickets: dict[bytes, StreamSession] = {}

    def open(self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler]) -> str:
        """Listen on `config.address`, and return it with the real port; ValueError if this machine cannot."""
        inner = replace(self._config, address=INNER)
        self._server, at = calls.open_server(inner, service, handlers, self._own.server)
        try:
            self._front = Front(self._config, at, self._serve_bulk)
        except ValueError:
            self._server.stop(0)
            raise
        return self._front.address

    def serve(
        self,
        session: StreamSession,
        requests: Iterator[bytes],
        context: Any,
        establish: Callable[[StreamSession], object] = lambda session: None,
    ) -> Iterator[bytes]:
        """Serve the control call of a session: this generator writes, a separate thread reads.

        Args:
            establish: Called when all connections of the session are open; it may raise Refused.
        """
        ticket = secrets.token_bytes(TICKET_BYTES)
        with self._lock:
            self._tickets = {key: each for key, each in self._tickets.items() if each.open} | {ticket: session}
        if not context.add_callback(lambda: session.fail_lost(session.control)):
            session.fail_lost(session.control)
        context.send_initial_metadata(((calls.TICKET_KEY, ticket),))
        session.mark_ready(session.control)
        if session.wait_ready(self._config.connect_timeout_s):
            with calls.refusing(context):
                establish(session)
            session.mark_established()
            session.start_reader(requests)
            yield session.ready_frame()
        else:
            session.fail(f"not all connections came within {self._config.connect_timeout_s:g} s")
        yield from session.write_control()

    def _serve_bulk(self, stream: socket.socket) -> None:
        """Serve one bulk connection; this thread becomes its reader."""
        host = ""
        try:
            host = str(stream.getpeername()[0])
            connection, caller, ticket, number = accept_stripe(
                stream, self._contexts.current(), self._config, calls.GREETING_S
            )
        except ssl.SSLError:
            REFUSALS.tell(host, NO_CERTIFICATE)
            return
        except (OSError, EOFError) as error:
            log.debug(f"a bulk connection came to nothing: {error}")
            return
        try:
            session = self._tickets.get(ticket)
            if session is not None:
                subscribes = session.peer.startswith(SUBSCRIBER)
                self._gate.check_speaks_for(session.header.sender, caller, or_subscriber=subscribes)
            session, lane = find_lane(session, number, connection)
        except (Denied, Refused) as error:
            with contextlib.suppress(OSError):
                REFUSALS.tell(host, str(error))
            refuse_stripe(connection, str(error))
            return
        stripe = Stripe(session, lane, connection)
        session.mark_ready(lane)
        # The thread of the control call establishes the session, or ends it.
        stripe.run(opens=session.wait_established())

    def stop_judging(self) -> None:
        """No longer take an end that gRPC makes for a caller that it cannot understand, because the listener closes."""
        self._front.ends = True

    def close(self, sessions: Sequence[StreamSession], reason: str, grace_s: float) -> None:
        """Send what is queued for at most `grace_s` seconds, then end all sessions; safe to call again."""
        self.stop_judging()
        calls.close_server(self._server, sessions, reason, grace_s)
        for session in sessions:
            session.cancel()
        self._front.close()
