"""The streams of a session on the dialling side, each with a TCP connection and a call."""

import threading
import time
from typing import Any

import grpc

from diloco_jax.transport.session.calls import header_metadata, holdings_metadata, open_channel
from diloco_jax.transport.session.stream import Lane, StreamSession
from diloco_jax.transport.trust.security import Credentials


class DialledStreams:
    """The calls of one session, all opened at once; `session.wait_ready` waits until all are answered."""

    def __init__(self, session: StreamSession, own: Credentials, method: str) -> None:
        self._session = session
        self._channels: list[grpc.Channel] = []
        self._ended: list[threading.Event] = []
        lanes = list(session.lanes.values())
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

    def close(self, reason: str, grace_s: float) -> None:
        """Send what is queued for at most `grace_s` seconds, then end the session; safe to call again."""
        until_s = time.monotonic() + grace_s
        self._session.retire(reason)
        for ended in self._ended:
            ended.wait(max(0.0, until_s - time.monotonic()))
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
