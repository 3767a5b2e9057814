"""The part of S3 that the transport uses, in memory and in this process: a server for tests that need no real one."""

import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit
from xml.sax.saxutils import escape, unescape

from tests.transport.bucket.faulty import object_of


class TinyServer:
    """A server on loopback with one bucket.

    Attributes:
        address: http://HOST:PORT.
        objects: What the bucket holds.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(server: TinyServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def serve(self) -> None:
            method, key = object_of(self.command, self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            with server.lock:
                status, found = self._do(method, key, body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(found)))
            self.send_header("ETag", '"-"')
            self.send_header("Last-Modified", "Mon, 30 Nov 2026 00:00:00 GMT")
            if status == 206:
                self.send_header("Content-Range", self._range)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(found)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = serve

        def _do(self, method: str, key: str, body: bytes) -> tuple[int, bytes]:
            """Return the status and the body of the answer."""
            objects = server.objects
            if method == "PUT":
                if self.headers.get("If-None-Match") == "*" and key in objects:
                    return 412, b"<Error><Code>PreconditionFailed</Code></Error>"
                objects[key] = body
                return 200, b""
            if method == "DELETE":
                objects.pop(key, None)
                return 204, b""
            if method == "POST":
                found = re.findall("<Key>(.*?)</Key>", body.decode())
                for name in found:
                    objects.pop(unescape(name), None)
                deleted = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in found)
                return 200, f"<DeleteResult>{deleted}</DeleteResult>".encode()
            if method == "LIST":
                return 200, self._list(key)
            if key not in objects:
                return 404, b"<Error><Code>NoSuchKey</Code></Error>"
            return self._read(objects[key])

        def _read(self, content: bytes) -> tuple[int, bytes]:
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if asked is None:
                return 200, content
            start, last = int(asked[1]), min(int(asked[2]), len(content) - 1)
            self._range = f"bytes {start}-{last}/{len(content)}"
            return 206, content[start : last + 1]

        def _list(self, prefix: str) -> bytes:
            after = parse_qs(urlsplit(self.path).query).get("start-after", [""])[0]
            found = "".join(
                f"<Contents><Key>{escape(key)}</Key><LastModified>2026-11-30T00:00:00Z</LastModified>"
                f"<Size>{len(content)}</Size></Contents>"
                for key, content in sorted(server.objects.items())
                if key.startswith(prefix) and key > after
            )
            return f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>".encode()

    return Handler
