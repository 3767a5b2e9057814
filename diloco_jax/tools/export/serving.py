"""Followed models over HTTP: the description of the newest one, and the files of those that are kept.

    GET /                              model_version.json of the newest model, with its `folder` and `files`
    GET /step-00000120/FILE            a file of a model that is kept

No password is asked. So the address is loopback unless a person allows more.
"""

import contextlib
import ipaddress
import json
import os
import shutil
import socket
import threading
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from diloco_jax.tools.export.kept import NEWEST, PREFIX, VERSION_FILE
from diloco_jax.transport.endpoints.web import LimitedHandler, WebServer
from diloco_jax.transport.link import split_address
from diloco_jax.transport.trust.security import is_loopback

# Connections at the same time.
CALLERS_MAX = 16


class ModelServer(WebServer):
    """The server of the models in one folder; `url` is its address.

    Args:
        address: host:port; port 0 lets the system choose one.
        allow_plaintext: whether an address other than loopback may be served, without encryption and password.

    Raises:
        ValueError: the address is not allowed, is taken, or is not an address of this machine.
    """

    def __init__(self, out: Path, address: str, *, allow_plaintext: bool) -> None:
        # An address with a mistake is refused under the option's name.
        split_address(address, "--serve")
        if not (is_loopback(address) or allow_plaintext):
            raise ValueError(
                f"--serve {address} is not loopback, and anyone who reaches it can read the model: use an ssh tunnel "
                "to 127.0.0.1, or --allow-plaintext in a network that you trust"
            )
        self.out = out.resolve()
        super().__init__(address, _Request, setting="--serve", places=CALLERS_MAX)
        self.url = f"http://{self.at}/"
        own = split_address(address)[0].lower(), socket.gethostname().lower(), socket.getfqdn().lower()
        self._names = {"", "localhost", *own}

    def serves(self, host: str) -> bool:
        """Return whether a request's Host header names this server, "" if the caller sent none.

        A name that someone else may point at this address is not accepted. Addresses are, because nobody can.
        """
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return name in self._names or is_address(name)

    def __enter__(self) -> "ModelServer":
        threading.Thread(target=self.serve_forever, name="diloco-serve-model", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


def is_address(name: str) -> bool:
    """Return whether a host is written as an address, and not as a name."""
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


class _Request(LimitedHandler):
    """One request."""

    server: ModelServer
    server_version, sys_version = "diloco", ""

    def do_GET(self) -> None:
        """Answer with the description of the newest model, or with a file."""
        if not self.server.serves(self.headers.get("Host", "")):
            # A page of another site may resolve its own name to this address.
            self._answer(
                421, b"this server has another name; use the address that `diloco follow` printed\n", "text/plain"
            )
            return
        try:
            asked = unquote(urlsplit(self.path).path).strip("/")
            if not asked:
                self._describe()
            else:
                self._send_file(asked)
        # The model may be removed while it is read.
        except (OSError, ValueError):
            self._answer(404, b"there is no such file; GET / lists those of the newest model\n", "text/plain")

    def _describe(self) -> None:
        folder = (self.server.out / NEWEST).resolve(strict=True)
        told = json.loads((folder / VERSION_FILE).read_text(encoding="utf-8"))
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        told |= {"folder": folder.name, "files": {str(path.relative_to(folder)): path.stat().st_size for path in files}}
        self._answer(200, json.dumps(told).encode() + b"\n", "application/json")

    def _send_file(self, asked: str) -> None:
        path = (self.server.out / asked).resolve(strict=True)
        inside = path.relative_to(self.server.out)
        if not str(inside).startswith(PREFIX) or not path.is_file():
            raise ValueError(asked)
        with path.open("rb") as file:
            self._head(200, os.fstat(file.fileno()).st_size, "application/octet-stream")
            # An answer after a part of the file would be taken for the rest of it.
            with contextlib.suppress(OSError):
                shutil.copyfileobj(file, self.wfile, 1 << 20)

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self._head(status, len(body), kind)
        self.wfile.write(body)

    def _head(self, status: int, size: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(size))
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""
