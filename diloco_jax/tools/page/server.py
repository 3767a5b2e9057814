"""The page of runs over HTTP: one file, server-sent events, logs, and the request that an island leaves.

The page itself contains nothing of a run. All other requests need the token, which is behind the # of the address.
Browsers never send that part.
"""

import hmac
import json
import os
import re
import secrets
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from diloco_jax.protocol.messages import SYNCER
from diloco_jax.runtime.records.files import LOGS
from diloco_jax.runtime.records.status import syncer_at
from diloco_jax.tools.page.board import Board
from diloco_jax.tools.page.feed import RunFeed
from diloco_jax.tools.page.page import compose_page
from diloco_jax.transport.endpoints.web import LimitedHandler, WebServer
from diloco_jax.transport.link import TransportConfig, split_address
from diloco_jax.transport.session.calls import ask_operator
from diloco_jax.transport.session.operator_requests import DRAIN, OperatorRequest
from diloco_jax.transport.trust.security import is_loopback

# Connections at the same time.
VIEWERS_MAX = 64
# Size of the end of a log that is sent.
LOG_BYTES = 64 << 10
BODY_MAX = 4096
JSON_TYPE, TEXT_TYPE = "application/json", "text/plain; charset=utf-8"


def read_token(path: Path) -> str:
    """Return the token in a file, which is created with one, for its owner only; ValueError if it holds no token."""
    if not path.exists():
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(18) + "\n")
    token = path.read_text(encoding="ascii", errors="replace").strip()
    if not re.fullmatch(r"[\w-]{16,128}", token, re.ASCII):
        raise ValueError(
            f"{path} holds no token of 16 to 128 letters, digits, - and _; remove it, or name another file"
        )
    return token


class PageServer(WebServer):
    """The server of the page of some runs; `url` is its address with the token.

    Args:
        address: host:port; port 0 lets the system choose one.
        transport: settings with the certificate for an address other than loopback.
        allow_plaintext: whether such an address may be served without encryption.

    Raises:
        ValueError: the address is not allowed without encryption, is taken, or is not an address of this machine.
    """

    request_queue_size = 32

    def __init__(
        self,
        feeds: Sequence[RunFeed],
        address: str,
        *,
        transport: TransportConfig | None = None,
        allow_plaintext: bool = False,
        token: str = "",
    ) -> None:
        # An address with a mistake is refused under the option's name.
        split_address(address, "--listen")
        encrypted = not is_loopback(address) and transport is not None and transport.encrypted
        if not (encrypted or is_loopback(address) or allow_plaintext):
            raise ValueError(
                f"{address} is not loopback, and the run has no certificates to encrypt the page with: make them with "
                "`diloco certs`, use an ssh tunnel, or --allow-plaintext in a network that you trust"
            )
        self.feeds = {str(number): feed for number, feed in enumerate(feeds)}
        page, self.policy = compose_page()
        self.page = page.encode()
        self.board = Board(feeds)
        self.token = token or secrets.token_urlsafe(18)
        super().__init__(address, PageHandler, setting="--listen", places=VIEWERS_MAX)
        if encrypted and transport is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            files = transport.tls_certificate, transport.tls_key
            context.load_cert_chain(*(each.replace("{name}", SYNCER) for each in files))
            # Handshakes happen in the thread of each connection, so that a slow one does not delay the others.
            self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.url = f"http{'s' if encrypted else ''}://{self.at}/#{self.token}"

    def server_close(self) -> None:
        """Stop listening, and end the reader of the folders."""
        super().server_close()
        self.board.close()


class PageHandler(LimitedHandler):
    """One request to the page."""

    server: PageServer
    server_version, sys_version = "diloco", ""

    def do_GET(self) -> None:
        """Answer with the page, a stream of events, the whole state, or the end of a log."""
        url = urlsplit(self.path)
        asked = {name: values[0] for name, values in parse_qs(url.query).items()}
        if url.path == "/":
            self._answer(200, self.server.page, "text/html; charset=utf-8")
            return
        answer = {"/events": self._events, "/state": self._state, "/log": self._log}.get(url.path)
        if answer is None:
            self._answer(404, b"there is no such page\n")
        elif self._known(asked.get("token", "")):
            answer(asked)

    def do_POST(self) -> None:
        """Ask the syncer to let an island leave. The token is in a header, which pages of other sites cannot send."""
        if self.path != "/drain":
            self._answer(404, b"there is no such page\n")
        elif self._known(self.headers.get("X-Token", "")):
            try:
                size = min(BODY_MAX, max(0, int(self.headers.get("Content-Length", "0"))))
                asked = json.loads(self.rfile.read(size))
                feed, learner = self.server.feeds[str(asked["run"])], str(asked["learner"])
            # A body of many brackets exceeds the depth of the parser.
            except (ValueError, LookupError, TypeError, RecursionError):
                self._answer(400, b'send {"run": NUMBER, "learner": NAME}\n')
                return
            try:
                known = feed.config.transport if feed.config is not None else TransportConfig()
                syncer = syncer_at(str(feed.folder), known, allow_plaintext=False)
                ok, message = ask_operator(syncer, OperatorRequest(DRAIN, learner))
            except (ValueError, OSError) as error:
                ok, message = False, str(error)
            self._answer(200 if ok else 409, json.dumps({"ok": ok, "message": message}).encode(), JSON_TYPE)

    def _known(self, token: str) -> bool:
        known = hmac.compare_digest(token.encode(), self.server.token.encode())
        if not known:
            self._answer(403, b"the token is missing or wrong: open the address that `diloco view` printed\n")
        return known

    def _answer(self, status: int, body: bytes, kind: str = TEXT_TYPE) -> None:
        self._begin(status, kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _begin(self, status: int, kind: str) -> None:
        self.send_response(status)
        headers = {"Content-Type": kind, "Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}
        headers |= {"X-Content-Type-Options": "nosniff", "Content-Security-Policy": self.server.policy}
        for name, value in headers.items():
            self.send_header(name, value)

    def _events(self, asked: dict[str, str]) -> None:
        self._begin(200, "text/event-stream")
        self.end_headers()
        for frame in self.server.board.watch():
            self.wfile.write(frame)

    def _state(self, asked: dict[str, str]) -> None:
        self._answer(200, json.dumps(self.server.board.state(), allow_nan=False).encode(), JSON_TYPE)

    def _log(self, asked: dict[str, str]) -> None:
        feed, name = self.server.feeds.get(asked.get("run", "")), asked.get("name", "")
        # Only names of the list are read, so that no path leads out of the folder.
        if feed is None or name not in feed.logs():
            self._answer(404, b"there is no such log here; an island's log is on the machine that runs it\n")
            return
        with (feed.folder / LOGS / f"{name}.log").open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - LOG_BYTES))
            tail = file.read(LOG_BYTES)
        self._answer(200, tail if size <= LOG_BYTES else tail.partition(b"\n")[2] or tail)

    def log_message(self, format: str, *args: Any) -> None:
        """Log no request, because its address has the token."""
