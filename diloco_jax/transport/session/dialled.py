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
from diloco_jax.transport.trust.security import Credentials

# How long the status of a call may follow its headers.
STATUS_S = 1.0


class DialledStreams:
    """The streams of one session; `session.wait_ready` waits until all are open.

    Args:
        beside: Whether the stripes of the bulk lane are connections beside gRPC. The control call brings the ticket
            for them. Otherwise every stream is a call.
        context: Settings of TLS for connections beside gRPC.
    """

    def __init__(
        self,
        session: StreamSession,
        own: Credentials,
        method: str,
        *,
        beside: bool = False,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._session = session
        self._context = context
        self._channels: list[grpc.Channel] = []
        self._ended: list[threading.Event] = []
        lanes = [lane for lane in session.lanes.values() if not (lane.bulk and beside)]
        headers = [header_metadata(lane.ours) for lane in lanes]
        holdings = holdings_metadata(session.partials.announce())
        calls = []
        for lane, named in zip(lanes, headers, strict=True):
            channel = open_channel(session.config, own)
            self._channels.append(channel)
            metadata = (named, *own.metadata, *(() if lane.bulk else holdings))
            call = channel.stream_stream(method)(session.write(lane), metadata=metadata, wait_for_ready=True)
            calls.append(call)
            session.bind(lane, call.cancel)
            self._ended.append(_watch(session, lane, call))
            session.start_reader(lane, call)
        # The call of the control lane, or of the bulk lane's first stripe if there is no control lane.
        self.first: Any = calls[0]
        if beside:
            threading.Thread(target=self._open_stripes, name=f"diloco-dial-{session.peer}", daemon=True).start()

    def _open_stripes(self) -> None:
        """Dial all stripes with the ticket of the control call; the call's end is noticed elsewhere."""
        ticket = dict(self.first.initial_metadata() or ()).get(TICKET_KEY, b"")
        if len(ticket) == TICKET_BYTES:
            for lane in self._session.lanes.values():
                if lane.bulk:
                    ended = threading.Event()
                    self._ended.append(ended)
                    threading.Thread(target=self._run_stripe, args=(lane, ticket, ended), daemon=True).start()
        # A refused call has no ticket either. It counts as active until gRPC has read its status, which has the reason.
        elif not self._ended[0].wait(STATUS_S) and self.first.is_active():
            self._session.refused = "refused"
            self._session.fail(f"it gave no ticket for bulk connections; this side speaks protocol {PROTOCOL}")

    def _run_stripe(self, lane: Lane, ticket: bytes, ended: threading.Event) -> None:
        try:
            stripe = open_stripe(self._session, lane, ticket, self._context, self._ended[0])
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
        for channel in self._channels:
            channel.close()


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
