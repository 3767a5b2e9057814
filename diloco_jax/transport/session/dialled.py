"""The streams of a session on the dialling side, each with a TCP connection."""

import ssl
import threading
import time
from typing import Any

import grpc

from diloco_jax.protocol.releases import PROTOCOL
from diloco_jax.transport.session.calls import TICKET_KEY, header_metadata, holdings_metadata, open_channel
from diloco_jax.transport.session.stream import Lane, StreamSession
from diloco_jax.transport.session.stripe import TICKET_BYTES, open_stripe
from diloco_jax.transport.trust.security import SYNCER_HOST, Credentials

# How long the status of a call may follow its headers.
STATUS_S = 1.0


class DialledStreams:
    """The streams of one session; `session.wait_ready` waits until all are open.

    The control call brings the ticket for the bulk connections.

    Args:
        context: Settings of TLS for the bulk connections.
        server: Host that the listener's certificate must name, as for `credentials`.
    """

    def __init__(
        self,
        session: StreamSession,
        own: Credentials,
        method: str,
        context: ssl.SSLContext | None,
        server: str = SYNCER_HOST,
    ) -> None:
        self._session = session
        self._context = context
        self._server = server
        self._channel = open_channel(session.config, own)
        holdings = holdings_metadata(session.partials.announce())
        metadata = (header_metadata(session.control.ours), *own.metadata, *holdings)
        open_call = self._channel.stream_stream(method)
        self._call: Any = open_call(session.write_control(), metadata=metadata, wait_for_ready=True)
        session.bind(session.control, self._call.cancel)
        self._ended = [_watch(session, session.control, self._call)]
        session.start_reader(self._call)
        threading.Thread(target=self._open_stripes, name=f"diloco-dial-{session.peer}", daemon=True).start()

    def _open_stripes(self) -> None:
        """Dial all stripes with the ticket of the control call; the call's end is noticed elsewhere."""
        ticket = dict(self._call.initial_metadata() or ()).get(TICKET_KEY, b"")
        if len(ticket) == TICKET_BYTES:
            for lane in self._session.lanes.values():
                if lane.bulk:
                    ended = threading.Event()
                    self._ended.append(ended)
                    threading.Thread(target=self._run_stripe, args=(lane, ticket, ended), daemon=True).start()
        # A refused call has no ticket either. It counts as active until gRPC has read its status, which has the reason.
        elif not self._ended[0].wait(STATUS_S) and self._call.is_active():
            self._session.refused = "refused"
            self._session.fail(f"it gave no ticket for bulk connections; this side speaks protocol {PROTOCOL}")

    def _run_stripe(self, lane: Lane, ticket: bytes, ended: threading.Event) -> None:
        try:
            stripe = open_stripe(self._session, lane, ticket, self._context, self._server, self._ended[0])
        # A stripe that ended silently would leave a session that never opens.
        except Exception as error:
            self._session.fail_lost(lane, error)
        else:
            stripe.run()
            stripe.ended.wait()
        finally:
            ended.set()

    def close(self, reason: str, grace_s: float) -> None:
        """Send what is queued for at most `grace_s` seconds, then end the session; safe to call again."""
        until_s = time.monotonic() + grace_s
        self._session.retire(reason)
        for ended in list(self._ended):
            ended.wait(max(0.0, until_s - time.monotonic()))
        self._session.cancel()
        self._channel.close()


def _watch(session: StreamSession, lane: Lane, call: Any) -> threading.Event:
    """Return an event that is set when the call is over.

    A call that is cut fails the session at once, even while its reader waits for room in the inbox.
    """
    ended = threading.Event()

    def on_end() -> None:
        if call.code() is not grpc.StatusCode.OK:
            session.fail_lost(lane, call)
        ended.set()

    if not call.add_callback(on_end):
        on_end()
    return ended
