"""The port where a slice listens for the slices with higher numbers."""

import contextlib
import logging
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable

from diloco_jax.transport.link import TransportError
from diloco_jax.transport.session import calls
from diloco_jax.transport.session.front import NO_CERTIFICATE, REFUSED_S, bind_all
from diloco_jax.transport.session.refusals import REFUSALS
from diloco_jax.transport.trust.security import BulkContexts

# Connections that have not shown yet who they are; a further one ends the oldest of them.
STRANGERS_MAX = 64

log = logging.getLogger(__name__)


class SlicePort:
    """A listener with one thread that accepts, and one for each connection.

    Args:
        serve: Takes a connection's socket, and a function to call once the caller is admitted; it closes the socket.

    Raises:
        ValueError: This is not an address with a port.
        ConnectionError: This machine cannot listen on the address now: another start may, once its name is known or an
            earlier process has ended.
    """

    def __init__(
        self,
        address: str,
        contexts: BulkContexts,
        serve: Callable[[socket.socket, Callable[[], None]], None],
    ) -> None:
        self._address = address
        self._contexts = contexts
        self._serve = serve
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, None] = {}
        self._threads: set[threading.Thread] = set()
        self._closing = False
        try:
            self._listeners = bind_all(address)
        except OSError as error:
            raise ConnectionError(str(calls.cannot_listen(address, error, "the slice's address"))) from None
        # A byte on this pair wakes the thread that accepts.
        self._wakes, self._wake = socket.socketpair()
        self._thread = threading.Thread(target=self._accept, name="diloco-slices-port", daemon=True)
        self._thread.start()

    def close(self) -> list[threading.Thread]:
        """Stop listening and end what is not admitted; return the threads of the other connections."""
        with self._lock:
            self._closing = True
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")
        self._thread.join(calls.GREETING_S)
        with self._lock:
            for stream in self._strangers:
                _cut(stream)
            return list(self._threads)

    def _accept(self) -> None:
        poll = select.poll()
        for each in (*self._listeners, self._wakes):
            poll.register(each, select.POLLIN)
        by_number = {each.fileno(): each for each in self._listeners}
        while not self._closing:
            for number, _ in poll.poll():
                if number in by_number:
                    self._accept_one(by_number[number])
        for each in (*self._listeners, self._wakes, self._wake):
            each.close()

    def _accept_one(self, listener: socket.socket) -> None:
        try:
            stream, (host, *_) = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # There are no descriptors left, or the caller has gone already.
            log.warning(f"cannot accept a connection at {self._address}: {error}")
            time.sleep(REFUSED_S)
            return
        try:
            stream.setblocking(True)
            context = self._contexts.current()
            if context is not None:
                stream = context.wrap_socket(stream, server_side=True, do_handshake_on_connect=False)
        except (OSError, ValueError):
            stream.close()
            return
        thread = threading.Thread(target=self._greet, args=(stream, str(host)), name="diloco-slices-guest", daemon=True)
        with self._lock:
            if len(self._strangers) >= STRANGERS_MAX:
                _cut(next(iter(self._strangers)))
            self._strangers[stream] = None
            self._threads.add(thread)
        thread.start()

    def _greet(self, stream: socket.socket, host: str) -> None:
        def admitted() -> None:
            with self._lock:
                self._strangers.pop(stream, None)

        try:
            self._serve(stream, admitted)
        except ssl.SSLError:
            REFUSALS.tell(host, NO_CERTIFICATE)
        except (TransportError, ValueError) as error:
            REFUSALS.tell(host, str(error))
        # A caller that only connects, to find out whether the port is open, has not been refused.
        except (OSError, EOFError) as error:
            log.debug(f"a connection of {host} came to nothing: {error}")
        finally:
            admitted()
            with self._lock:
                self._threads.discard(threading.current_thread())


def _cut(stream: socket.socket) -> None:
    # The method of ssl would drop the state of TLS, which the other thread may be using.
    with contextlib.suppress(OSError):
        socket.socket.shutdown(stream, socket.SHUT_RDWR)
