"""A web server for strangers: a request that trickles ends in time, however few places there are."""

import socket
import time
from collections.abc import Iterator
from threading import Thread

import pytest

from diloco_jax.transport.endpoints import web
from diloco_jax.transport.endpoints.web import LimitedHandler, WebServer
from tests.limits import HANGS_S

pytestmark = pytest.mark.net
BYTES_MAX = 200


class Echo(LimitedHandler):
    """A handler that answers with the body of a request."""

    def do_POST(self) -> None:
        """Answer with the body."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def server() -> Iterator[WebServer]:
    with WebServer("127.0.0.1:0", Echo, setting="--test", places=1) as made:
        Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


def bytes_until_the_end(server: WebServer, before: bytes) -> int:
    """Send the start of a request, then byte after byte; return how many the server took before it ended."""
    with socket.create_connection(("127.0.0.1", server.server_port), HANGS_S) as stream:
        stream.sendall(before)
        stream.settimeout(0.05)
        for number in range(BYTES_MAX):
            try:
                if stream.recv(1) == b"":
                    return number
            except TimeoutError:
                stream.sendall(b"x")
            except OSError:
                return number
    return BYTES_MAX


@pytest.mark.parametrize(
    "before", [b"GET /", b"GET / HTTP/1.1\r\nHost: ", b"POST / HTTP/1.0\r\nContent-Length: 9999\r\n\r\n"]
)
def test_a_request_that_trickles_loses_its_place(
    server: WebServer, before: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "IDLE_S", 0.5)
    assert bytes_until_the_end(server, before) < BYTES_MAX
    monkeypatch.undo()
    answer = b""
    for _ in range(100):
        with socket.create_connection(("127.0.0.1", server.server_port), HANGS_S) as stream:
            stream.sendall(b"POST / HTTP/1.0\r\nContent-Length: 3\r\n\r\nabc")
            answer = b"".join(iter(lambda: _received(stream), b""))
            if answer.endswith(b"\r\n\r\nabc"):
                return
        # The thread of the first connection may not have ended yet.
        time.sleep(0.02)
    raise AssertionError(f"the only place is still taken: {answer!r}")


def _received(stream: socket.socket) -> bytes:
    try:
        return stream.recv(1 << 16)
    except ConnectionError:
        return b""
