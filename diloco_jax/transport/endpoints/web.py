"""A web server with a limit of connections, for people's browsers and programs that fetch files."""

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from diloco_jax.transport.link import split_address
from diloco_jax.transport.session.calls import cannot_listen

# A connection that neither takes nor sends a byte for this time is closed.
IDLE_S = 20.0


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
