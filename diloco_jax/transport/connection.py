"""One TCP connection for payloads, with or without TLS.

Bytes leave from the caller's views and arrive in the caller's memory; nothing is joined or copied here. All waits and
all work of the system and of TLS happen without the interpreter's lock.
"""

import contextlib
import select
import socket
import ssl
import time
from collections.abc import Sequence
from threading import Lock

# Linux sends at most 1024 buffers per call.
BUFFERS_MAX = 512


class Connection:
    """A connected socket that one thread may read while another thread writes.

    Args:
        stream: The socket; with TLS after its handshake.
        silence_s: Seconds without a byte from the peer that end a read.
    """

    def __init__(self, stream: socket.socket, silence_s: float) -> None:
        # A thread that waits inside OpenSSL would keep the other thread from the connection.
        stream.setblocking(False)
        with contextlib.suppress(OSError):
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.encrypted = isinstance(stream, ssl.SSLSocket)
        # Bytes that the last `fill` has filled.
        self.arrived = 0
        # When the last bytes arrived, on the monotonic clock.
        self.heard_s = time.monotonic()
        self._stream = stream
        self._silence_s = silence_s
        # OpenSSL's state of a connection is for one thread at a time; a plain socket needs no turns.
        self._turn = Lock() if self.encrypted else contextlib.nullcontext()

    def send(self, parts: Sequence[memoryview]) -> None:
        """Send all bytes of the views; OSError if the connection is lost. A peer that does not read makes it wait."""
        left, event = self._send_some(parts)
        while left:
            self._wait(event)
            left, event = self._send_some(left)

    def send_at_once(self, parts: Sequence[memoryview]) -> list[memoryview]:
        """Send what the connection takes without a wait, and return the rest; OSError if the connection is lost."""
        return self._send_some(parts)[0]

    def _send_some(self, parts: Sequence[memoryview]) -> tuple[list[memoryview], int]:
        """Send until the connection takes no more; return the rest, and the event that it waits for."""
        left = [part for part in parts if part.nbytes]
        if self.encrypted:
            return self._send_encrypted(left)
        try:
            while left:
                left = _behind(left, self._stream.sendmsg(left[:BUFFERS_MAX]))
        except BlockingIOError:
            pass
        return left, select.POLLOUT

    def _send_encrypted(self, parts: list[memoryview]) -> tuple[list[memoryview], int]:
        stream, turn = self._stream, self._turn
        for at, part in enumerate(parts):
            # OpenSSL takes one record of 16 KiB per call, so this loop runs often under the interpreter's lock.
            while part.nbytes:
                try:
                    with turn:
                        sent = stream.send(part)
                except ssl.SSLWantWriteError:
                    return [part, *parts[at + 1 :]], select.POLLOUT
                except ssl.SSLWantReadError:
                    return [part, *parts[at + 1 :]], select.POLLIN
                part = part[sent:]
        return [], select.POLLOUT

    def fill(self, view: memoryview, until_s: float | None = None) -> None:
        """Fill the view with the peer's next bytes.

        Args:
            until_s: Time on the monotonic clock when it must be full; by default only silence ends the wait.

        Raises:
            EOFError: The peer ended the connection.
            OSError: The connection is lost, or the peer was silent for too long.
        """
        self.arrived = 0
        stream, turn = self._stream, self._turn
        while view.nbytes:
            try:
                with turn:
                    size = stream.recv_into(view)
            except (BlockingIOError, ssl.SSLWantReadError):
                self._wait(select.POLLIN, self._silence_s if until_s is None else until_s - time.monotonic())
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT, self._silence_s)
            else:
                if not size:
                    raise EOFError("the other side closed it")
                self.arrived += size
                self.heard_s = time.monotonic()
                view = view[size:]

    def _wait(self, event: int, seconds: float | None = None) -> None:
        poll = select.poll()
        poll.register(self._stream, event)
        if not poll.poll(None if seconds is None else 1000 * max(0.0, seconds)):
            raise TimeoutError(f"nothing came for {self._silence_s:g} s")

    def finish(self) -> None:
        """Tell the peer that no more bytes follow."""
        self._shut(socket.SHUT_WR)

    def stop_reading(self) -> None:
        """End a read, once the bytes that arrived before are read; any thread may call it."""
        self._shut(socket.SHUT_RD)

    def cut(self) -> None:
        """End reads and writes at once; any thread may call it."""
        self._shut(socket.SHUT_RDWR)

    def _shut(self, how: int) -> None:
        # The method of ssl would drop the state of TLS, which the other thread may be using.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._stream, how)

    def close(self) -> None:
        """Free the descriptor; no thread may use the connection any more."""
        self._stream.close()


def _behind(parts: list[memoryview], sent: int) -> list[memoryview]:
    """Return what follows the first `sent` bytes of the views."""
    for at, part in enumerate(parts):
        if sent < part.nbytes:
            return [part[sent:], *parts[at + 1 :]]
        sent -= part.nbytes
    return []
