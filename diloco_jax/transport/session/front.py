"""The one public port of a listener: it takes connections, and tells gRPC's from bulk connections by their first bytes.

gRPC in Python takes no connection that somebody else accepted. So gRPC listens on a separate loopback port, and this
module forwards its connections there as they are, encrypted or not: TLS, certificates and pings are between gRPC and
the caller. Only control messages, which are small, take this way. A bulk connection is handed over as a socket.

Without TLS a bulk connection starts with stripe.GREETING. With TLS its first message offers BULK_PROTOCOL. This module
only looks at the bytes; they stay for their reader.
"""

import asyncio
import contextlib
import errno
import logging
import socket
import threading
from collections.abc import Callable
from functools import partial

from diloco_jax.transport.link import TransportConfig, split_address
from diloco_jax.transport.session import calls
from diloco_jax.transport.session.refusals import REFUSALS
from diloco_jax.transport.session.stripe import GREETING
from diloco_jax.transport.trust.security import BULK_PROTOCOL, PROBE_PROTOCOL

PIECE_BYTES = 1 << 16
# TLS announces a message of at most this size, with its head.
LOOK_BYTES_MAX = 5 + (1 << 14)
# A connection that one side ended has this long to end.
LINGER_S = 5.0
# The wait between two looks at a message that is not complete doubles from the first number to the second.
PAUSE_S, PAUSE_MAX_S = 0.02, 1.28
# The wait after a failure to accept.
REFUSED_S = 0.2
# Connections of one host that have not shown yet what they are for. A further one ends the oldest of them.
UNSORTED_MAX = 64
CLOSE_S = 5.0
# A connection that gRPC ends within this time, before any call, could not agree with it on TLS and HTTP/2.
DISAGREES_S = 5.0
_FILES = "transport.tls_ca, tls_certificate and tls_key to the files that `diloco certs` made for"
PLAIN = f"it does not speak TLS, which this syncer requires: set its {_FILES} its name"
NO_CERTIFICATE = (
    f"it has no valid certificate of this run's authority, or does not trust the syncer's: set its {_FILES} its name"
)
TLS = f"it speaks TLS, and this syncer does not: set the syncer's {_FILES} the syncer, or remove the caller's"
_OFFER = bytes((len(BULK_PROTOCOL),)) + BULK_PROTOCOL.encode()
_PROBE = bytes((len(PROBE_PROTOCOL),)) + PROBE_PROTOCOL.encode()
# TLS calls it handshake.
_HANDSHAKE = 0x16

log = logging.getLogger(__name__)


class Front:
    """The public port; one thread runs it.

    Args:
        inner: host:port of gRPC's own listener.
        on_bulk: Serves a bulk connection on a new thread, and closes the socket.

    Attributes:
        address: Address for learners, with the real port.

    Raises:
        ValueError: This machine cannot listen on `config.address`.
    """

    def __init__(self, config: TransportConfig, inner: str, on_bulk: Callable[[socket.socket], None]) -> None:
        self._inner = split_address(inner)
        self._on_bulk = on_bulk
        self._encrypted = config.encrypted
        # Whether gRPC ends its connections because the run ends.
        self.ends = False
        self._connections_max = config.connections_max
        # Threads that serve bulk connections.
        self._serving: set[threading.Thread] = set()
        self._tasks: set[asyncio.Task[bool]] = set()
        # Those whose connections have not shown yet what they are for, by host, oldest first.
        self._unsorted: dict[str, dict[asyncio.Task[bool], None]] = {}
        try:
            self._listeners = bind_all(config.address)
        except OSError as error:
            raise calls.cannot_listen(config.address, error) from None
        port = self._listeners[0].getsockname()[1]
        self.address = f"{config.address.rpartition(':')[0]}:{port}"
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=f"diloco-front-{port}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and end the connections of gRPC; safe to call again."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        accepting = [asyncio.create_task(self._accept(listener)) for listener in self._listeners]
        await self._closing.wait()
        for task in (*accepting, *self._tasks):
            task.cancel()
        await asyncio.gather(*accepting, *self._tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        refused = False
        while True:
            # The loop's own accept would lose a connection that comes while it is cancelled.
            await self._readable(listener)
            try:
                stream, (host, *_) = listener.accept()
                stream.setblocking(False)
            except BlockingIOError:
                continue
            except OSError as error:
                # There are no descriptors left, or the caller has gone already. One line is enough for each time.
                if not refused:
                    log.warning(f"cannot accept a connection at {self.address}: {error}")
                refused = True
                await asyncio.sleep(REFUSED_S)
                continue
            refused = False
            if len(self._tasks) + len(self._serving) >= 2 * self._connections_max:
                stream.close()
                continue
            task = asyncio.create_task(self._sort(stream, host))
            self._tasks.add(task)
            task.add_done_callback(partial(self._sorted, stream, host))
            unsorted = self._unsorted.setdefault(host, {})
            unsorted[task] = None
            if len(unsorted) > UNSORTED_MAX:
                oldest = next(iter(unsorted))
                self._forget(oldest, host)
                oldest.cancel()

    def _forget(self, task: asyncio.Task[bool] | None, host: str) -> None:
        """Count a connection no longer as one that has not shown what it is for."""
        unsorted = self._unsorted.get(host, {})
        if task is not None:
            unsorted.pop(task, None)
        if not unsorted:
            self._unsorted.pop(host, None)

    def _sorted(self, stream: socket.socket, host: str, task: asyncio.Task[bool]) -> None:
        """Close a connection, unless a thread has it now."""
        self._tasks.discard(task)
        self._forget(task, host)
        if task.cancelled() or task.exception() is not None or not task.result():
            stream.close()

    async def _sort(self, stream: socket.socket, host: str) -> bool:
        """Find out what a connection is for, and serve it; return whether a thread has it now."""
        with contextlib.suppress(OSError):
            async with asyncio.timeout(calls.GREETING_S):
                bulk = await self._is_bulk(stream)
            self._forget(asyncio.current_task(), host)
            if bulk:
                return self._hand_over(stream)
            # A caller that only finds out whether the port is open, or speaks TLS, has not been refused.
            seen = stream.recv(LOOK_BYTES_MAX, socket.MSG_PEEK)
            tls = seen[:1] == bytes((_HANDSHAKE,))
            if seen and self._encrypted != tls and not (tls and _PROBE in seen):
                REFUSALS.tell(_host_of(stream), PLAIN if self._encrypted else TLS)
            await self._forward(stream)
        return False

    def _hand_over(self, stream: socket.socket) -> bool:
        self._serving = {each for each in self._serving if each.is_alive()}
        if len(self._serving) >= self._connections_max:
            REFUSALS.tell(
                _host_of(stream), f"a bulk connection too many: transport.connections_max is {self._connections_max}"
            )
            return False
        thread = threading.Thread(target=self._on_bulk, args=(stream,), name="diloco-read-bulk", daemon=True)
        self._serving.add(thread)
        thread.start()
        return True

    async def _is_bulk(self, stream: socket.socket) -> bool:
        """Look at the first bytes until they show what the connection is for."""
        pause_s = PAUSE_S
        while True:
            await self._readable(stream)
            seen = stream.recv(LOOK_BYTES_MAX, socket.MSG_PEEK)
            verdict = is_bulk(seen, encrypted=self._encrypted)
            if verdict is not None:
                return verdict
            # An incomplete message stays readable, so only a pause keeps this thread from looking all the time.
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    async def _readable(self, stream: socket.socket) -> None:
        came = asyncio.Event()
        self._loop.add_reader(stream, came.set)
        try:
            await came.wait()
        finally:
            self._loop.remove_reader(stream)

    async def _forward(self, stream: socket.socket) -> None:
        """Forward bytes between a caller and gRPC until both have ended the connection, or one is lost."""
        with socket.socket(type=socket.SOCK_STREAM) as inner:
            inner.setblocking(False)
            await self._loop.sock_connect(inner, self._inner)
            began_s, name = self._loop.time(), _name_of(inner)
            for each in (inner, stream):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            REFUSALS.forwards(name, _host_of(stream))
            ways = [asyncio.create_task(self._pump(a, b)) for a, b in ((stream, inner), (inner, stream))]
            try:
                done, left = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                brief = self._loop.time() < began_s + DISAGREES_S and not self.ends
                # With what a caller has sent unread, gRPC's end is a reset.
                by_grpc = ways[1] in done and ways[0] not in done
                if self._encrypted and brief and by_grpc and not REFUSALS.ended(name):
                    REFUSALS.tell(_host_of(stream), NO_CERTIFICATE)
                if left and not any(way.exception() for way in done):
                    await asyncio.wait(left, timeout=LINGER_S)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
                REFUSALS.ended(name)

    async def _pump(self, source: socket.socket, target: socket.socket) -> None:
        while unsent := await self._pump_until_full(source, target):
            await self._loop.sock_sendall(target, unsent)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    async def _pump_until_full(self, source: socket.socket, target: socket.socket) -> bytes:
        """Forward bytes while the target takes all of them; return those that it did not take, b"" at the end."""
        unsent: asyncio.Future[bytes] = self._loop.create_future()

        # Every control message comes through here, so one callback stays registered and no coroutine wakes up.
        def forward() -> None:
            if unsent.done():
                return
            piece, sent = b"", 0
            try:
                piece = source.recv(PIECE_BYTES)
                sent = target.send(piece) if piece else 0
            except BlockingIOError:
                # Without a piece it was the source that had nothing.
                if not piece:
                    return
            except OSError as error:
                unsent.set_exception(error)
                return
            if sent < len(piece) or not piece:
                unsent.set_result(piece[sent:])

        self._loop.add_reader(source, forward)
        try:
            return await unsent
        finally:
            self._loop.remove_reader(source)


def _name_of(stream: socket.socket) -> str:
    """Return the local address of a connection, as gRPC writes it."""
    host, port, *_ = stream.getsockname()
    return f"ipv4:{host}:{port}"


def _host_of(stream: socket.socket) -> str:
    """Return the host of a caller."""
    return str(stream.getpeername()[0])


def is_bulk(seen: bytes, *, encrypted: bool) -> bool | None:
    """Tell whether a connection that starts with these bytes is a bulk connection; None: more of them are needed."""
    if not encrypted:
        if seen.startswith(GREETING):
            return True
        return None if seen and GREETING.startswith(seen) else False
    # A record of TLS has a type, two bytes of version and two bytes of length.
    if seen[:1] != bytes((_HANDSHAKE,)):
        return False
    if len(seen) < 5:
        return None
    size = min(5 + int.from_bytes(seen[3:5], "big"), LOOK_BYTES_MAX)
    return _OFFER in seen[:size] if len(seen) >= size else None


def bind_all(address: str) -> list[socket.socket]:
    """Return sockets that listen on all addresses of a host, at one port; OSError if none can."""
    host, port = split_address(address)
    sockets: list[socket.socket] = []
    refused: OSError | None = None
    for family, kind, protocol, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        made = socket.socket(family, kind, protocol)
        try:
            made.setblocking(False)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                # "[::]" takes callers with IPv4 addresses too.
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
            made.bind((where[0], port, *where[2:]))
            made.listen(128)
        except OSError as error:
            made.close()
            # A machine without IPv6 has names with such addresses, but somebody else's port is a fault.
            if error.errno == errno.EADDRINUSE:
                for each in sockets:
                    each.close()
                raise
            refused = error
            continue
        sockets.append(made)
        port = made.getsockname()[1]
    if not sockets:
        raise refused or OSError(f"{host} has no address")
    return sockets
