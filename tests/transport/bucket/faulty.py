"""An HTTP relay between a client and the server of an object store, which injects faults.

It reads whole requests and answers, so it knows names of objects: it can hide an object, delete it, or put a foreign
one in its place. A schedule decides on every request. It is a function, and `drawn` makes one from a seed. A decision
depends on the request alone and on how often it was made. So it does not depend on the order of threads.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

Kind = Literal[
    # Refused without an effect: 503 Slow Down, 500.
    "slow_down",
    "failure",
    # The connection breaks: before the request is whole, after it had its effect, and within the answer's body.
    "cut_request",
    "lost_answer",
    "cut_answer",
    # The answer comes `seconds` later.
    "late",
    # Before the request, its object disappears from answers and listings for `seconds`, is deleted, or is replaced.
    "hidden",
    "deleted",
    "foreign",
]
# Faults of an object, which has to be read.
OF_OBJECTS = ("hidden", "deleted", "foreign")
READS = ("GET", "HEAD")
FOREIGN = b"these bytes are of nobody in this run"
# Headers that belong to one connection.
OF_CONNECTION = ("connection", "keep-alive", "transfer-encoding", "content-length", "host", "te", "upgrade")
UPSTREAM_TIMEOUT_S = 60.0


class StoreRequest(NamedTuple):
    """A request as the store's owner counts it."""

    # PUT, GET, HEAD, DELETE, LIST, or POST (an upload in pieces, or a deletion of many).
    method: str
    # Name of the object below its bucket, or the prefix of a listing.
    key: str
    # 1 for the first request with this method and key.
    number: int = 1


class Fault(NamedTuple):
    """What becomes of one request."""

    kind: Kind
    seconds: float = 0.0


Schedule = Callable[[StoreRequest], Fault | None]


def drawn(seed: int, rates: Mapping[Kind, float], seconds: float = 0.1) -> Schedule:
    """Return a schedule with faults at random requests.

    Args:
        rates: Share of requests with each kind of fault; their sum is at most 1.
        seconds: The mean time of faults that have one.
    """
    if sum(rates.values()) > 1:
        raise ValueError(f"the rates are {dict(rates)}: their sum may be at most 1")

    def fault(request: StoreRequest) -> Fault | None:
        draw = random.Random(f"{seed} {request.method} {request.key} {request.number}")
        at = draw.random()
        for kind, rate in rates.items():
            if at < rate:
                return Fault(kind, draw.expovariate(1 / seconds))
            at -= rate
        return None

    return fault


def nth(fault: Fault, method: str, key: str, number: int = 1) -> Schedule:
    """Return a schedule with one fault, at the number-th request with this method and key."""
    return lambda request: fault if request == (method, key, number) else None


class Message(NamedTuple):
    """A request, or with the status as method the answer to it."""

    method: str
    # Path with query; "" in an answer.
    target: str
    headers: dict[str, str]
    body: bytes


class Dialect:
    """What the relay changes where there is no fault: nothing, because clients and server have one dialect."""

    def request(self, message: Message) -> Message:
        return message

    def answer(self, request: Message, answer: Message) -> Message:
        return answer


class StoreRelay:
    """A listener on loopback that forwards every request to a server, or to the fault that its schedule has.

    Args:
        target: http://HOST:PORT of the server.
        serial: Let only one conditional write at a time through, for a server that checks and writes in two steps.

    Attributes:
        address: http://HOST:PORT of the relay.
        schedule: Decides on every request; it may be replaced at any time.
        counts: Requests by method, faults included.
        faults: Faults by kind.
    """

    def __init__(
        self, target: str, schedule: Schedule = lambda _: None, dialect: Dialect | None = None, *, serial: bool = False
    ) -> None:
        self.target = urlsplit(target).netloc
        self.schedule = schedule
        self.dialect = Dialect() if dialect is None else dialect
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self._writing = threading.Lock() if serial else contextlib.nullcontext()
        self._numbers: Counter[tuple[str, str]] = Counter()
        # Key -> when it is visible again, on the monotonic clock.
        self._hidden: dict[str, float] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def __enter__(self) -> StoreRelay:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening; answers that wait are dropped."""
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def decide(self, method: str, key: str) -> tuple[StoreRequest, Fault | None]:
        """Count a request, and return what its schedule has for it."""
        with self._lock:
            self._numbers[method, key] += 1
            self.counts[method] += 1
            request = StoreRequest(method, key, self._numbers[method, key])
            fault = self.schedule(request)
            if fault is not None and fault.kind in OF_OBJECTS and method not in READS:
                fault = None
            if fault is not None:
                self.faults[fault.kind] += 1
                if fault.kind == "hidden":
                    self._hidden[key] = time.monotonic() + fault.seconds
            return request, fault

    def turn(self, message: Message) -> contextlib.AbstractContextManager[object]:
        """Return what to hold while the server handles a request."""
        conditional = any(name.lower() == "if-none-match" for name in message.headers)
        return self._writing if message.method == "PUT" and conditional else contextlib.nullcontext()

    def hidden(self) -> list[str]:
        """Return the names that are hidden now."""
        with self._lock:
            return [key for key, until_s in self._hidden.items() if time.monotonic() < until_s]


def object_of(method: str, target: str) -> tuple[str, str]:
    """Return a request's method, with LIST for a listing, and the object's name below its bucket."""
    parts = urlsplit(target)
    _, _, key = parts.path.removeprefix("/").partition("/")
    query = parse_qs(parts.query)
    if method == "GET" and not key:
        return "LIST", query.get("prefix", [""])[0]
    return method, unquote(key)


class Handler(BaseHTTPRequestHandler):
    """One connection of a client, with one to the server."""

    relay: StoreRelay

    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self._upstream = http.client.HTTPConnection(self.relay.target, timeout=UPSTREAM_TIMEOUT_S)

    def finish(self) -> None:
        self._upstream.close()
        super().finish()

    def log_message(self, *_: object) -> None:
        pass

    def serve(self) -> None:
        """Forward a request, with its fault."""
        request, fault = self.relay.decide(*object_of(self.command, self.path))
        kind = "" if fault is None else fault.kind
        size = int(self.headers.get("Content-Length", "0"))
        body = self.rfile.read(size // 2 if kind == "cut_request" else size)
        if kind == "cut_request":
            self._reset()
            return
        if kind in ("slow_down", "failure"):
            self._refuse(kind)
            return
        headers = {name: value for name, value in self.headers.items() if name.lower() not in OF_CONNECTION}
        if kind == "deleted":
            self._forward(Message("DELETE", self._plain(), {}, b""))
        elif kind == "foreign":
            self._forward(Message("PUT", self._plain(), {}, FOREIGN))
        answer = self._forward(Message(self.command, self.path, headers, body))
        hidden = self.relay.hidden()
        if request.key in hidden and request.method in READS:
            answer = Message("404", "", {}, b"<Error><Code>NoSuchKey</Code></Error>")
        elif request.method == "LIST":
            answer = without(answer, hidden)
        if fault is not None and kind == "late":
            self.relay.closing.wait(fault.seconds)
        if kind == "lost_answer" or self.relay.closing.is_set():
            self._reset()
            return
        self._answer(answer, cut=kind == "cut_answer")

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = serve

    def _plain(self) -> str:
        return urlsplit(self.path).path

    def _forward(self, message: Message) -> Message:
        there = self.relay.dialect.request(message)
        try:
            # A length of zero is said, too, because a server may wait for a body otherwise.
            length = {"Content-Length": str(len(there.body))} if there.method in ("PUT", "POST") else {}
            with self.relay.turn(message):
                self._upstream.request(there.method, there.target, there.body or None, there.headers | length)
                found = self._upstream.getresponse()
                answer = Message(str(found.status), "", dict(found.getheaders()), found.read())
        except (OSError, http.client.HTTPException) as error:
            self._upstream.close()
            return Message("502", "", {}, repr(error).encode())
        return self.relay.dialect.answer(message, answer)

    def _refuse(self, kind: str) -> None:
        status, code = ("503", "SlowDown") if kind == "slow_down" else ("500", "InternalError")
        self._answer(Message(status, "", {}, f"<Error><Code>{code}</Code></Error>".encode()))

    def _answer(self, answer: Message, *, cut: bool = False) -> None:
        length = next((value for name, value in answer.headers.items() if name.lower() == "content-length"), "0")
        self.send_response(int(answer.method))
        for name, value in answer.headers.items():
            if name.lower() not in OF_CONNECTION:
                self.send_header(name, value)
        reads_size = self.command == "HEAD" and answer.method == "200"
        self.send_header("Content-Length", length if reads_size else str(len(answer.body)))
        self.end_headers()
        if cut:
            self.wfile.write(answer.body[: len(answer.body) // 2])
            self._reset()
        elif self.command != "HEAD":
            self.wfile.write(answer.body)

    def _reset(self) -> None:
        """End the connection with a reset, so that the client cannot take it for the end of an answer."""
        self.close_connection = True
        # Lingering is on, for 0 seconds.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(self.connection.detach())


def _handler(relay: StoreRelay) -> type[BaseHTTPRequestHandler]:
    return type("RelayHandler", (Handler,), {"relay": relay})


def without(listing: Message, keys: list[str]) -> Message:
    """Return a listing without these names."""
    body = listing.body
    for key in keys:
        name = re.escape(escape(key).encode())
        body = re.sub(rb"<Contents>(?:(?!</Contents>).)*<Key>" + name + rb"</Key>.*?</Contents>", b"", body, flags=re.S)
    return listing._replace(body=body)


class JsonUploads(Dialect):
    """Uploads in Google's XML dialect as uploads of its JSON dialect, because fake-gcs-server has no others.

    The server decides on a condition. Here it only changes its place, from a header to the query.
    """

    def request(self, message: Message) -> Message:
        bucket, _, key = urlsplit(message.target).path.removeprefix("/").partition("/")
        if message.method != "PUT" or not key:
            return message
        found = {name.lower(): value for name, value in message.headers.items()}
        generation = found.get("x-goog-if-generation-match")
        condition = "" if generation is None else f"&ifGenerationMatch={generation}"
        boundary = "0f1e2d3c4b5a69788796a5b4c3d2e1f0"
        while boundary.encode() in message.body:
            boundary += "0"
        name = json.dumps({"name": unquote(key)})
        head = (
            f"--{boundary}\r\nContent-Type: application/json\r\n\r\n{name}\r\n"
            f"--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
        )
        return Message(
            "POST",
            f"/upload/storage/v1/b/{bucket}/o?uploadType=multipart{condition}",
            {"Content-Type": f"multipart/related; boundary={boundary}"},
            head.encode() + message.body + f"\r\n--{boundary}--\r\n".encode(),
        )

    def answer(self, request: Message, answer: Message) -> Message:
        if request.method != "PUT" or answer.method != "200":
            return answer
        found = json.loads(answer.body)
        headers = {"ETag": f'"{found["etag"]}"', "x-goog-generation": found["generation"]}
        return Message("200", "", headers, b"")
