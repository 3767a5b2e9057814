"""A web server with limits of connections and time, for browsers, scrapers and programs that fetch files."""

import io
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from diloco_jax.transport.link import split_address
from diloco_jax.transport.session.calls import cannot_listen

# A caller has this long to send its request, and to take each piece of the answer.
IDLE_S = 20.0


class _TimedRequest(io.RawIOBase):
    """The bytes of one request; TimeoutError if they are not complete in time, however many have come."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._until_s = time.monotonic() + IDLE_S

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the request is not complete")
        self._connection.settimeout(left_s)
        try:
            return self._connection.recv_into(buffer)
        finally:
            self._connection.settimeout(IDLE_S)


class LimitedHandler(BaseHTTPRequestHandler):
    """A handler of one request, which must arrive whole within IDLE_S."""

    # Of each piece of an answer.
    timeout = IDLE_S

    def setup(self) -> None:
        """Replace the reader, whose limit is per piece: a caller that trickles would keep its place forever."""
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_TimedRequest(self.connection))


class WebServer(ThreadingHTTPServer):
    """An HTTP server that gives each connection a thread; `at` is its address as host:port.

    Args:
        address: host:port; port 0 lets the system choose one.
        setting: name of the option with the address, for errors.
        places: the most connections at the same time; further ones are closed.

    Raises:
        ValueError: the address is taken, or is not an address of this machine.
    """

    daemon_threads = True

    def __init__(self, address: str, handler: type[BaseHTTPRequestHandler], *, setting: str, places: int) -> None:
        host, port = split_address(address, setting)
        self._places = threading.BoundedSemaphore(places)
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), handler)
        except OSError as error:
            raise cannot_listen(address, str(error.strerror), setting) from None
        self.at = f"{f'[{host}]' if ':' in host else host}:{self.server_port}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give the connection a thread, or close it if there are too many."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing, because callers may leave at any time."""
