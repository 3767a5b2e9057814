"""The connections of one slice with the other slices of its island, which come and go at any time.

If slices have several hosts, each host has its own connections: with the hosts of its number in the other slices.

Every pair of slices has one TCP connection. The slice with the higher number dials the other one, again and again, so a
slice that was lost returns without anyone's help. What a slice sends is data: a wrong frame ends its connection and
nothing else.
"""

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from diloco_jax.transport.connection import Connection
from diloco_jax.transport.link import Buffer, TransportConfig, TransportError, split_address
from diloco_jax.transport.session import calls
from diloco_jax.transport.session.sessions import Refused
from diloco_jax.transport.slices.admission import RELEASE_STAMP, Admission, SliceGreeting, encoded
from diloco_jax.transport.slices.frames import NOTHING, Vocabulary, payload_view
from diloco_jax.transport.slices.peer import MESSAGE_BYTES, SlicePeer
from diloco_jax.transport.slices.port import SlicePort
from diloco_jax.transport.trust.security import BulkContexts, Gate, credentials, is_loopback, island_host
from diloco_jax.transport.wire import Goodbye

# The wait between two attempts to reach a slice doubles from the first number to the second.
AGAIN_S, AGAIN_MAX_S = 0.1, 2.0
SLICES_MAX = 64
QUEUE_BYTES_MAX = 1 << 30
# Threads that end late, because the system keeps them in a call, are left behind after this time.
JOIN_S = 1.0

log = logging.getLogger(__name__)


class SliceJoined(NamedTuple):
    """A slice connected; its messages follow."""


class Item(NamedTuple):
    """Message of another slice, or the start or the end of its connection."""

    slice: int
    # Random number of the other slice's process.
    session: int
    # SliceJoined at the start, None at the end.
    message: Any
    payload: memoryview = NOTHING
    # Why the connection ended.
    reason: str = ""

    @property
    def num_bytes(self) -> int:
        """Return the bytes that count for an item; the fields of a message are small beside its payload."""
        return self.payload.nbytes + MESSAGE_BYTES


class SliceLinks:
    """The connections of this slice.

    Args:
        config: Settings of the run's transport; certificates and token protect these connections too.
        own: Number of this slice.
        addresses: host:port where each slice listens, by number.
        messages: NamedTuple classes that slices send each other; the same on all slices (frames.Vocabulary).
        queue_bytes_max: Limit in bytes of what waits for one slice behind the message that is being sent, and of what
            was received from one slice and is not taken. A slice that lets more wait loses its connection; beyond the
            second limit nothing more is read from that slice.
        settings: Digest of what all slices must have in common.
        host: Number of this host in its slice.
        session: Random number of this start of the slice, the same on all of its hosts; None draws one.

    Attributes:
        session: Random number of this start of the slice.
        queue_bytes_max: The limit.

    Raises:
        ValueError: Number or addresses cannot be used, an address is not loopback while plaintext was not allowed, or
            certificate, key or token cannot be used.
        ConnectionError: This machine cannot listen on its address now.
    """

    def __init__(
        self,
        config: TransportConfig,
        run_id: str,
        learner_id: str,
        own: int,
        addresses: Sequence[str],
        messages: Sequence[type],
        queue_bytes_max: int = QUEUE_BYTES_MAX,
        settings: str = "",
        host: int = 0,
        session: int | None = None,
    ) -> None:
        _check_places(own, addresses)
        exposed = next((each for each in addresses if not is_loopback(each)), addresses[own])
        config = replace(config, address=exposed)
        name = island_host(learner_id)
        token = credentials(config, learner_id, server=name).token
        calls.keep_freed_memory()
        self.session = secrets.randbits(62) if session is None else session
        self._own = own
        self._addresses = tuple(addresses)
        self._vocabulary = Vocabulary((Goodbye, *messages))
        self.queue_bytes_max = queue_bytes_max
        ours = SliceGreeting(
            run_id, learner_id, own, len(addresses), host, RELEASE_STAMP, settings, self.session, own, 0, encoded(token)
        )
        gate = Gate(encrypted=config.encrypted, token=token)
        self._admission = Admission(config=config, ours=ours, gate=gate)
        # Guards everything below; notified when an item arrives or is taken.
        self._changed = threading.Condition()
        self._open: dict[int, SlicePeer] = {}
        self._items: deque[Item] = deque()
        # Bytes of the items that wait, by slice.
        self._item_bytes: Counter[int] = Counter()
        self._closing = threading.Event()
        self._port = SlicePort(addresses[own], BulkContexts(config, learner_id, name), self._serve)
        self._dialling = [
            threading.Thread(target=self._dial, args=(other,), name=f"diloco-dial-slice-{other}", daemon=True)
            for other in range(own)
        ]
        for thread in self._dialling:
            thread.start()

    @property
    def connected(self) -> dict[int, int]:
        """Return the session of each slice that is connected."""
        with self._changed:
            return {number: peer.session for number, peer in sorted(self._open.items())}

    def silent_s(self, number: int) -> float:
        """Return the seconds since the last byte of a slice arrived; 0 if it is not connected.

        The end of a connection is among the items. A slice whose messages wait here unread, beyond the limit, is not
        silent.
        """
        with self._changed:
            peer = self._open.get(number)
        return 0.0 if peer is None or peer.paused else time.monotonic() - peer.heard_s

    def listens(self, number: int, timeout_s: float) -> bool:
        """Return False as soon as no process listens at a slice's address, True if one does for `timeout_s` seconds."""
        return self._admission.listens(self._addresses[number], timeout_s)

    def send(self, to: int, message: Any, payload: Buffer | np.ndarray = b"") -> bool:
        """Queue a message; never blocks, and any thread may call it.

        Args:
            payload: Shared, not copied: the caller must not change it afterwards.

        Returns:
            False if the slice is not connected, or has just lost its connection because its queue is full.

        Raises:
            ValueError: Message or payload can never be sent, or there is no such other slice.
        """
        if to == self._own or not 0 <= to < len(self._addresses):
            raise ValueError(f"there is no other slice {to}: this is slice {self._own} of {len(self._addresses)}")
        with self._changed:
            peer = self._open.get(to)
        head, view = self._vocabulary.pack(message), payload_view(payload)
        if peer is None:
            return False
        if peer.put(head, view):
            return not peer.ends
        self._end(peer, f"too slow: more than {self.queue_bytes_max} bytes wait for slice {to}")
        return False

    def waiting_bytes(self, to: int) -> int:
        """Return the bytes that wait for a slice behind the message that is being sent; 0 if it is not connected."""
        with self._changed:
            peer = self._open.get(to)
        return 0 if peer is None else peer.waiting_bytes

    def receive(self, timeout_s: float) -> Item | None:
        """Return the next item of any slice, in the order of each slice, or None after `timeout_s` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._items, timeout_s):
                return None
            item = self._items.popleft()
            self._item_bytes[item.slice] -= item.num_bytes
            self._changed.notify_all()
            return item

    def put(self, message: Any) -> None:
        """Put a message of this process among the items, as one of slice `own`; any thread."""
        with self._changed:
            self._put(Item(self._own, self.session, message))

    def drop(self, number: int, reason: str) -> None:
        """End the connection with a slice, which may return with a new one; nothing happens without a connection."""
        with self._changed:
            peer = self._open.get(number)
        if peer is not None:
            self._end(peer, f"dropped: {reason}")

    def close(self, grace_s: float = 5.0) -> None:
        """Send what is queued for at most `grace_s` seconds, then end all connections; safe to call again."""
        self._closing.set()
        with self._changed:
            peers = list(self._open.values())
        for peer in peers:
            self._end(peer, "the slice closed", flushes=True, linger_s=grace_s)
        threads = [*self._port.close(), *self._dialling]
        until_s = time.monotonic() + grace_s + JOIN_S
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _end(self, peer: SlicePeer, reason: str, **how: Any) -> None:
        self._note_end(peer, reason)
        peer.end(reason, **how)

    def _note_end(self, peer: SlicePeer, reason: str) -> None:
        """Put the end of a connection among the items, unless it is there already."""
        with self._changed:
            if self._open.get(peer.slice) is peer:
                del self._open[peer.slice]
                self._put(Item(peer.slice, peer.session, None, reason=reason))

    def _put(self, item: Item) -> None:
        self._items.append(item)
        self._item_bytes[item.slice] += item.num_bytes
        self._changed.notify_all()

    def _join(self, peer: SlicePeer) -> None:
        """Make this the connection with its slice, in place of an earlier one; Refused if it cannot be."""
        with self._changed:
            if self._closing.is_set():
                raise Refused("this slice closes")
            if self._item_bytes[peer.slice] > self.queue_bytes_max:
                raise Refused("this slice has not taken the messages of earlier connections")
            before = self._open.get(peer.slice)
            if before is not None and before.session == peer.session and before.attempt > peer.attempt:
                raise Refused("a later connection of this slice is open")
            if before is not None:
                self._end(before, "replaced by a newer connection of this slice")
            self._open[peer.slice] = peer
            self._put(Item(peer.slice, peer.session, SliceJoined()))

    def _run(self, peer: SlicePeer) -> None:
        """Receive from a slice until its connection ends."""

        def on_message(message: Any, payload: memoryview) -> None:
            item = Item(peer.slice, peer.session, message, payload)
            with self._changed:
                peer.paused = True
                self._changed.wait_for(
                    lambda: (
                        self._open.get(peer.slice) is not peer or self._item_bytes[peer.slice] <= self.queue_bytes_max
                    )
                )
                peer.paused = False
                if self._open.get(peer.slice) is peer:
                    self._put(item)

        peer.run(on_message, lambda reason: self._note_end(peer, reason))

    def _peer(self, connection: Connection, greeting: SliceGreeting, attempt: int) -> SlicePeer:
        return SlicePeer(connection, greeting.slice, greeting.session, attempt, self._vocabulary, self.queue_bytes_max)

    def _serve(self, stream: socket.socket, admitted: Callable[[], None]) -> None:
        """Serve one caller; this thread becomes the reader of its connection."""
        connection, greeting = self._admission.admit(stream)
        peer = self._peer(connection, greeting, greeting.attempt)
        try:
            self._join(peer)
        except Refused as error:
            self._admission.refuse(connection, str(error))
            raise
        # The writer starts after the answer, so the answer comes before every message. The reader notices a failure.
        with contextlib.suppress(OSError):
            self._admission.answer(connection)
        admitted()
        self._run(peer)

    def _dial(self, number: int) -> None:
        """Keep the connection with a slice of a lower number; this thread is its reader."""
        attempt, pause_s, told = 0, 0.0, ""
        while not self._closing.wait(pause_s):
            attempt, began_s = attempt + 1, time.monotonic()
            try:
                connection, greeting = self._admission.dial(number, self._addresses[number], attempt)
                peer = self._peer(connection, greeting, attempt)
                try:
                    self._join(peer)
                except Refused as error:
                    self._admission.refuse(connection, str(error))
                    raise
            except (OSError, EOFError, ValueError) as error:
                # One line for each reason is enough, however often it is tried.
                if str(error) != told and not self._closing.is_set():
                    told = str(error)
                    level = logging.WARNING if isinstance(error, TransportError | ValueError) else logging.INFO
                    log.log(level, f"slice {number} at {self._addresses[number]} cannot be reached: {told}")
            else:
                told = ""
                self._run(peer)
            held = time.monotonic() >= began_s + AGAIN_MAX_S and not told
            pause_s = AGAIN_S if held else min(max(AGAIN_S, 2 * pause_s), AGAIN_MAX_S)


def _check_places(own: int, addresses: Sequence[str]) -> None:
    if not 1 <= len(addresses) <= SLICES_MAX:
        raise ValueError(f"an island of {len(addresses)} slices: use 1 to {SLICES_MAX}")
    if not 0 <= own < len(addresses):
        raise ValueError(f"slice {own} of an island of {len(addresses)}: use 0 to {len(addresses) - 1}")
    for address in addresses:
        _, port = split_address(address, "a slice's address")
        if not port:
            raise ValueError(f"a slice's address is {address}: the other slices need a port above 0")
    if len(set(addresses)) < len(addresses):
        raise ValueError(f"two slices have one address among {', '.join(addresses)}: give each its own")
