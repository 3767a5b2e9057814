"""One connection between two hosts of an island: frames, a queue out, an inbox, heartbeats, and how it ends.

A thread writes what is queued, and a heartbeat when there is nothing; another one reads. Both end with the connection.
A frame is the kind, two lengths, a JSON object and a payload.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from diloco_jax.transport.link import Buffer, Payload

HEAD_BYTES_MAX = 1 << 20
REASON_LENGTH_MAX = 4000
_PIECE_BYTES = 1 << 20  # of a payload that is written at once
_FRAME = struct.Struct("<BIQ")  # kind, bytes of the head, bytes of the payload
_HEARTBEAT, _MESSAGE, _GOODBYE = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """How the hosts of an island talk to each other; the same on all of them."""

    payload_bytes_max: int = 1 << 30
    """Largest payload in bytes, sent or received; a larger one is refused before memory is taken for it."""
    queue_messages_max: int = 1024
    """Messages that may wait for one host, and of one host for the driver. Of those that are to be sent, one more means
    that the host is lost; of those received, that its connection is not read."""
    queue_bytes_max: int = 2 << 30
    """The same for the bytes of their payloads."""
    heartbeat_s: float = 1.0
    """Seconds without anything to send after which a heartbeat is."""
    silence_s: float = 20.0
    """Seconds without a byte from a host, or without its taking one, after which it is lost."""
    connect_timeout_s: float = 60.0
    """Seconds for which a host tries to reach its leader."""

    def __post_init__(self) -> None:
        for name in ("heartbeat_s", "silence_s", "connect_timeout_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"group {name} is {value}: use a number of seconds above 0")
        for name in ("payload_bytes_max", "queue_messages_max", "queue_bytes_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"group {name} is {getattr(self, name)}: use at least 1")
        if self.silence_s <= self.heartbeat_s:
            raise ValueError(
                f"group silence_s is {self.silence_s}, not above heartbeat_s {self.heartbeat_s}: use several of them"
            )


class GroupItem(NamedTuple):
    """What `receive` returns.

    Attributes:
        kind: "joined": the host is there now (the leader's side only). "message": it said something. "left": it closed
            its side. "lost": its connection broke, it was silent, or it did not take what it was sent. After "left" and
            "lost" nothing more comes of it.
        host: which one; 0 on the side of a member.
        head: of a message.
        payload: of a message.
        reason: why it left or was lost.
    """

    kind: Literal["joined", "message", "left", "lost"]
    host: int
    head: Mapping[str, Any] = {}
    payload: memoryview = memoryview(b"")
    reason: str = ""


class Outgoing(NamedTuple):
    """A frame: lengths and head, then the payload."""

    prefix: bytes
    payload: tuple[memoryview, ...] = ()

    @property
    def size(self) -> int:
        """Of the payload, in bytes."""
        return sum(piece.nbytes for piece in self.payload)

    @classmethod
    def of(cls, head: Mapping[str, Any], payload: Payload, config: GroupConfig) -> Outgoing:
        """The frame of a message.

        Raises:
            ValueError: JSON cannot say the head, or it or the payload is too large.
        """
        try:
            raw = json.dumps(head).encode()
        except TypeError as error:
            raise ValueError(f"the head of a message cannot be sent: {error}") from None
        buffers = (payload,) if isinstance(payload, Buffer) else payload
        views = tuple(memoryview(buffer).cast("B") for buffer in buffers if len(buffer))
        size = sum(view.nbytes for view in views)
        if len(raw) > HEAD_BYTES_MAX or size > config.payload_bytes_max:
            raise ValueError(
                f"a message has a head of {len(raw)} bytes and a payload of {size}, the limits are {HEAD_BYTES_MAX} "
                f"and {config.payload_bytes_max}: send it in parts, or raise payload_bytes_max on all hosts"
            )
        return cls(_FRAME.pack(_MESSAGE, len(raw), size) + raw, views)

    @classmethod
    def goodbye(cls, reason: str) -> Outgoing:
        """The last frame of a side."""
        raw = json.dumps({"reason": reason[:REASON_LENGTH_MAX]}).encode()
        return cls(_FRAME.pack(_GOODBYE, len(raw), 0) + raw)


HEARTBEAT = Outgoing(_FRAME.pack(_HEARTBEAT, 0, 0))


class GroupInbox:
    """Items of all connections of one driver, in order of arrival."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.waiting: deque[tuple[Connection, GroupItem]] = deque()

    def get(self, timeout_s: float) -> GroupItem | None:
        """Take the oldest item, or None after `timeout_s` seconds."""
        with self.changed:
            self.changed.wait_for(lambda: self.waiting, timeout=max(0.0, timeout_s))
            if not self.waiting:
                return None
            connection, item = self.waiting.popleft()
            if item.kind == "message":
                connection.unread -= 1
                connection.unread_bytes -= item.payload.nbytes
                self.changed.notify_all()
            return item


class Connection:
    """The connection to one other host, from before it is there until it is over.

    Args:
        host: the other one.
        config: of the group.
        inbox: where what it says goes.
    """

    def __init__(self, host: int, config: GroupConfig, inbox: GroupInbox) -> None:
        self.host = host
        self.unread = 0  # messages of it in the inbox, whose lock is held for these two
        self.unread_bytes = 0
        self._config = config
        self._inbox = inbox
        self._changed = threading.Condition()
        self._queue: deque[Outgoing] = deque()
        self._queued_bytes = 0
        self._goodbye = ""  # what to say when all is written
        self._over = False
        self._socket: socket.socket | None = None
        self._ended = threading.Event()  # both threads are done, or never began

    @property
    def fresh(self) -> bool:
        """Whether it never had a socket, and may have one."""
        return self._socket is None and not self._over and not self._goodbye

    def start(self, connection: socket.socket, announce: bool = False) -> bool:
        """Take over a connected socket; False if there was one before, or this side is over.

        Args:
            connection: of which nothing is read or written by anybody else any more.
            announce: whether the driver gets a "joined" before all else.
        """
        with self._changed:
            if not self.fresh:
                return False
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(self._config.silence_s)
            self._socket = connection
            if announce:  # under the lock: its loss must come after it
                self._deliver(GroupItem("joined", self.host))
        writer = threading.Thread(target=self._write, args=(connection,), name=f"diloco-group-out-{self.host}")
        reader = threading.Thread(target=self._read, args=(connection, writer), name=f"diloco-group-in-{self.host}")
        for thread in (writer, reader):
            thread.daemon = True
            thread.start()
        return True

    def send(self, item: Outgoing) -> None:
        """Queue a frame; never blocks. Does nothing if the connection is over; ends it if there is no room."""
        with self._changed:
            if self._over or self._goodbye:
                return
            full = len(self._queue) >= self._config.queue_messages_max
            if not full and (not self._queue or self._queued_bytes + item.size <= self._config.queue_bytes_max):
                self._queue.append(item)
                self._queued_bytes += item.size
                self._changed.notify_all()
                return
        self._end("lost", f"{len(self._queue)} messages wait for it: it does not take what it is sent")

    def retire(self, reason: str) -> None:
        """Say goodbye after what is queued, and deliver nothing more."""
        with self._changed:
            self._goodbye = self._goodbye or reason
            self._changed.notify_all()
        with self._inbox.changed:
            self._inbox.changed.notify_all()

    def wait_over(self, until_s: float) -> None:
        """Wait until the other side has ended too, or the monotonic clock shows `until_s`; then it is over."""
        if self._socket is not None:
            self._ended.wait(max(0.0, until_s - time.monotonic()))
        self._end("left", self._goodbye)

    def _end(self, kind: Literal["left", "lost"], reason: str) -> None:
        with self._changed:
            if self._over:
                return
            self._over = True
            self._queue.clear()
            self._changed.notify_all()
        if not self._goodbye:
            self._deliver(GroupItem(kind, self.host, reason=reason))
        with self._inbox.changed:
            self._inbox.changed.notify_all()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes both threads

    def _deliver(self, item: GroupItem) -> None:
        with self._inbox.changed:
            self._inbox.waiting.append((self, item))
            self._inbox.changed.notify_all()

    # ---- out --------------------------------------------------------------------------------------------------------

    def _next(self) -> Outgoing | None:
        """What to write now; None at the end."""
        with self._changed:
            if not (self._queue or self._goodbye or self._over):
                self._changed.wait(self._config.heartbeat_s)
            if self._over:
                return None
            if self._queue:
                item = self._queue.popleft()
                self._queued_bytes -= item.size
                return item
            return None if self._goodbye else HEARTBEAT

    def _write(self, connection: socket.socket) -> None:
        try:
            while (item := self._next()) is not None:
                _send(connection, item)
                del item  # do not keep the payload while waiting for the next one
            if self._goodbye:
                _send(connection, Outgoing.goodbye(self._goodbye))
                connection.shutdown(socket.SHUT_WR)
        except TimeoutError:
            self._end("lost", f"it took nothing for {self._config.silence_s:g} s")
        except OSError as error:
            self._end("lost", f"its connection broke: {error}")

    # ---- in ---------------------------------------------------------------------------------------------------------

    def _read(self, connection: socket.socket, writer: threading.Thread) -> None:
        try:
            while (item := self._receive(connection)).kind == "message":
                self._put(item)
                del item
            self._end("left", item.reason)
        except TimeoutError:
            self._end("lost", f"nothing came from it for {self._config.silence_s:g} s")
        except (OSError, EOFError) as error:
            self._end("lost", f"its connection broke: {error}")
        except (ValueError, RecursionError) as error:
            self._end("lost", f"it sent what cannot be used: {error}")
        finally:
            writer.join()
            connection.close()
            self._ended.set()

    def _receive(self, connection: socket.socket) -> GroupItem:
        """The next message, or the goodbye.

        Raises:
            ValueError: it is no frame, or one that is too large.
        """
        kind, head_bytes, payload_bytes = _HEARTBEAT, 0, 0
        while kind == _HEARTBEAT and not head_bytes and not payload_bytes:
            kind, head_bytes, payload_bytes = _FRAME.unpack(receive_exactly(connection, _FRAME.size))
        if kind not in (_MESSAGE, _GOODBYE):
            raise ValueError(f"a frame of kind {kind}")
        if head_bytes > HEAD_BYTES_MAX or payload_bytes > self._config.payload_bytes_max:
            raise ValueError(
                f"a head of {head_bytes} bytes and a payload of {payload_bytes}, the limits are {HEAD_BYTES_MAX} and "
                f"{self._config.payload_bytes_max}: raise payload_bytes_max on all hosts"
            )
        head = json.loads(bytes(receive_exactly(connection, head_bytes)))
        if not isinstance(head, dict):
            raise ValueError(f"a head that is no JSON object but a {type(head).__name__}")
        if kind == _GOODBYE:
            return GroupItem("left", self.host, reason=str(head.get("reason"))[:REASON_LENGTH_MAX])
        return GroupItem("message", self.host, head, receive_exactly(connection, payload_bytes).toreadonly())

    def _put(self, item: GroupItem) -> None:
        """Deliver a message; waits for room, and drops it if nobody wants it any more."""
        config, size = self._config, item.payload.nbytes

        def ready() -> bool:
            fits = not self.unread or self.unread_bytes + size <= config.queue_bytes_max
            return self._over or bool(self._goodbye) or (self.unread < config.queue_messages_max and fits)

        with self._inbox.changed:
            self._inbox.changed.wait_for(ready)
            if not self._over and not self._goodbye:
                self.unread += 1
                self.unread_bytes += size
                self._deliver(item)


def receive_exactly(connection: socket.socket, size: int) -> memoryview:
    """So many bytes of a connection.

    Raises:
        EOFError: it ended before.
    """
    view = memoryview(bytearray(size))
    done = 0
    while done < size:
        count = connection.recv_into(view[done:])
        if not count:
            raise EOFError("the other side ended it without a goodbye")
        done += count
    return view


def _send(connection: socket.socket, item: Outgoing) -> None:
    """Write a frame in pieces, for the timeout of a socket is that of one call."""
    connection.sendall(item.prefix)
    for view in item.payload:
        for start in range(0, view.nbytes, _PIECE_BYTES):
            connection.sendall(view[start : start + _PIECE_BYTES])
