"""One open connection to another slice: its queue, the thread that writes and the thread that reads."""

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from diloco_jax.protocol.texts import REASON_LENGTH_MAX, clean
from diloco_jax.transport.connection import Connection
from diloco_jax.transport.slices.frames import NOTHING, FrameReader, Vocabulary, send_frame
from diloco_jax.transport.wire import Goodbye, WireError

# A side that has nothing to send for this long sends a beat.
BEAT_S = 0.5
# An ended connection has this long to bring its reason to the other side.
LINGER_S = 1.0
# Before the reason that the other side gave.
ENDED = "ended the connection: "
# What a message takes in memory beside its fields and its payload, at most about.
MESSAGE_BYTES = 1 << 10
_WASTE_BYTES = 1 << 18

log = logging.getLogger(__name__)


class SlicePeer:
    """An admitted connection to another slice.

    Args:
        number: Number of the other slice.
        session: Random number of its process.
        attempt: Number of the connection among those of that process.
        vocabulary: The messages of both sides, with Goodbye.
        queue_bytes_max: Limit of what waits behind the message that is being sent.
    """

    def __init__(
        self,
        connection: Connection,
        number: int,
        session: int,
        attempt: int,
        vocabulary: Vocabulary,
        queue_bytes_max: int,
    ) -> None:
        self.slice = number
        self.session = session
        self.attempt = attempt
        # Set while the owner has so much to receive that nothing more is read.
        self.paused = False
        self._connection = connection
        self._vocabulary = vocabulary
        self._queue_bytes_max = queue_bytes_max
        self._changed = threading.Condition()
        self._waiting: deque[tuple[bytes, memoryview]] = deque()
        self._waiting_bytes = 0
        # The reason for the other side, once the connection ends.
        self._goodbye: str | None = None
        self._cut = threading.Timer(0.0, connection.cut)

    @property
    def heard_s(self) -> float:
        """Return when the last byte arrived, on the monotonic clock."""
        return self._connection.heard_s

    @property
    def ends(self) -> bool:
        """Tell whether the connection ends, so that nothing more is sent or received."""
        return self._goodbye is not None

    @property
    def waiting_bytes(self) -> int:
        """Return what waits behind the message that is being sent."""
        return self._waiting_bytes

    def put(self, head: bytes, payload: memoryview) -> bool:
        """Queue a frame; False if the queue is full. An empty queue takes a frame of any size."""
        size = len(head) + payload.nbytes + MESSAGE_BYTES
        with self._changed:
            if self.ends:
                return True
            if self._waiting and self._waiting_bytes + size > self._queue_bytes_max:
                return False
            self._waiting.append((head, payload))
            self._waiting_bytes += size
            self._changed.notify()
        return True

    def end(self, reason: str, *, flushes: bool = False, linger_s: float = LINGER_S) -> None:
        """Send the reason and end the connection, at the latest after `linger_s` seconds; never blocks.

        Args:
            flushes: Whether to send first what is queued.
        """
        with self._changed:
            if self.ends:
                return
            self._goodbye = clean(reason, REASON_LENGTH_MAX)
            if not flushes:
                self._waiting.clear()
            # The writer or the reader may be waiting for a slice that stands still.
            self._cut = threading.Timer(linger_s, self._connection.cut)
            self._cut.name, self._cut.daemon = f"diloco-cut-slice-{self.slice}", True
            self._cut.start()
            self._changed.notify()

    def run(self, on_message: Callable[[Any, memoryview], None], on_end: Callable[[str], None]) -> None:
        """Start the writer, read until the connection ends, and free it.

        Args:
            on_message: Takes a message and its payload.
            on_end: Takes the reason of the end, before anyone can notice that the connection is free.
        """
        writer = threading.Thread(target=self._write, name=f"diloco-write-slice-{self.slice}", daemon=True)
        writer.start()
        threading.current_thread().name = f"diloco-read-slice-{self.slice}"
        try:
            reason = self._read(on_message)
        except EOFError:
            reason = "the connection was lost: the other side closed it without a reason"
        except WireError as error:
            reason = f"it sent what cannot be used: {error}"
            log.warning(f"slice {self.slice} {reason.removeprefix('it ')}")
        # A reader that ended silently would leave a connection that never ends.
        except Exception as error:
            reason = f"the connection was lost: {error}"
        on_end(reason)
        self.end(reason)
        # With unread bytes the end would be a reset, which may overtake the reason.
        self._drain()
        writer.join()
        self._cut.cancel()
        self._connection.close()

    def _read(self, on_message: Callable[[Any, memoryview], None]) -> str:
        """Read frames until the connection ends; return why."""
        reader = FrameReader(self._connection)
        while not self.ends:
            head, payload = reader.read()
            if not head:
                if payload.nbytes:
                    raise WireError("a payload without a message")
                continue
            message = self._vocabulary.unpack(head)
            if isinstance(message, Goodbye):
                return f"slice {self.slice} {ENDED}{clean(message.reason, REASON_LENGTH_MAX)}"
            on_message(message, payload)
            # This frees the payload while the reader waits for the next one.
            del message, payload
        return self._goodbye or ""

    def _drain(self) -> None:
        waste = memoryview(bytearray(_WASTE_BYTES))
        with contextlib.suppress(OSError, EOFError):
            while True:
                self._connection.fill(waste)

    def _write(self) -> None:
        try:
            while (frame := self._take()) is not None:
                send_frame(self._connection, *frame)
                # This frees the payload while the writer waits for the next one.
                del frame
            send_frame(self._connection, self._vocabulary.pack(Goodbye(self._goodbye or "")))
            self._connection.finish()
        # A writer that ended silently would leave a connection that never ends.
        except Exception as error:
            self.end(f"the connection was lost: {error}")

    def _take(self) -> tuple[bytes, memoryview] | None:
        """Return the next frame, a beat if there is none for BEAT_S, or None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self.ends, BEAT_S)
            if self._waiting:
                head, payload = self._waiting.popleft()
                self._waiting_bytes -= len(head) + payload.nbytes + MESSAGE_BYTES
                return head, payload
            return None if self.ends else (b"", NOTHING)
