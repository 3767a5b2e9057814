"""A TCP relay on loopback that simulates a bad network for one island's connections.

It forwards bytes between a learner and the syncer without interpreting them. One thread runs it. Public methods of
`Relay` may be called from any other thread, and return when the fault is in place.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import Literal, TypeAlias, TypeVar

from diloco_jax.transport.link import split_address
from diloco_jax.transport.trust.security import is_loopback

Direction: TypeAlias = Literal["up", "down", "both"]
Stream: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]
T = TypeVar("T")

CONNECTIONS_MAX = 256
DIAL_TIMEOUT_S = 5.0
CALL_TIMEOUT_S = 10.0
# The time that a connection may keep sending after our FIN.
LINGER_S = 5.0
READ_BYTES_MAX = 1 << 16
# The most pieces that wait per connection and direction; with more the sender gets back-pressure.
PIECES_MAX = 64
# With a limited rate, a piece has the bytes of this time.
SLICE_S = 0.05


class Relay:
    """A listener on loopback that forwards every connection to a target.

    In the methods, `direction` is "up" (towards the target), "down" or "both".

    Args:
        target: host:port, or a function that returns it.
        address: the address to listen on.

    Raises:
        ValueError: the address is not on loopback.
    """

    def __init__(self, target: str | Callable[[], str], address: str = "127.0.0.1:0") -> None:
        if not is_loopback(address):
            raise ValueError(f"the relay's address is {address}; use an address on loopback, because it is for tests")
        self._target = target
        self._weather = {"up": Weather(), "down": Weather()}
        self._connections: set[RelayedConnection] = set()
        self._serving: set[asyncio.Task[None]] = set()
        listener = socket.create_server(split_address(address))
        host, port = listener.getsockname()[:2]
        self.address = f"{host}:{port}"
        self._closing = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(listener,), name="relay", daemon=True)
        self._thread.start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Reset all connections and stop listening; safe to call again."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(CALL_TIMEOUT_S)

    def cut(self, how: Literal["rst", "fin"] = "rst") -> int:
        """End the open connections at once and return their number; new connections are accepted."""

        def cut() -> int:
            chosen = list(self._connections)
            self._connections.clear()
            for each in chosen:
                each.cut(how)
            return len(chosen)

        return self._call(cut)

    def change(
        self, direction: Direction = "both", *, hold: bool = False, delay_s: float = 0.0, bytes_per_s: float = 0.0
    ) -> None:
        """Set the lasting treatment of open and future connections.

        Args:
            hold: forward nothing, like a black hole; everything arrives after its end.
            delay_s: delay of every byte.
            bytes_per_s: limit of one connection's rate; 0 for none.
        """

        def change() -> None:
            for name in _names(direction):
                self._weather[name].change(hold, delay_s, bytes_per_s)

        self._call(change)

    def forwarded_bytes(self, way: str) -> int:
        """Return the number of bytes that have been forwarded "up" or "down"."""
        return self._weather[way].forwarded_bytes

    def heal(self) -> None:
        """Return to normal forwarding and cancel ordered damage; open connections stay open."""
        self.change()
        self.damage()

    def damage(self, direction: Direction = "both", *, flip_after: int = 0, repeat: int = 0) -> None:
        """Damage the next bytes of each open connection once; this replaces earlier orders.

        Args:
            flip_after: invert the byte with this number, counted from 1; 0 for none.
            repeat: forward this number of bytes twice.
        """

        def damage() -> None:
            for way in (each.ways[name] for each in self._connections for name in _names(direction)):
                way.until_flip, way.repeat_bytes = flip_after, repeat

        self._call(damage)

    def _call(self, job: Callable[[], T]) -> T:
        """Call a function on the relay's thread, and return its result."""
        if not self._thread.is_alive():
            raise OSError(f"the relay at {self.address} is closed")

        async def run() -> T:
            return job()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(CALL_TIMEOUT_S)

    def _run(self, listener: socket.socket) -> None:
        self._loop.run_until_complete(self._listen(listener))
        self._loop.close()

    async def _listen(self, listener: socket.socket) -> None:
        async with await asyncio.start_server(self._accept, sock=listener):
            await self._closing.wait()
            for task in self._serving:
                task.cancel()
            await asyncio.gather(*self._serving, return_exceptions=True)

    def _accept(self, *client: *Stream) -> None:
        task = self._loop.create_task(self._serve(client))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, client: Stream) -> None:
        """Connect to the target and forward until the connection ends."""
        try:
            if len(self._serving) > CONNECTIONS_MAX:
                raise OSError("too many connections")
            host, port = split_address(self._target() if callable(self._target) else self._target)
            server = await asyncio.wait_for(asyncio.open_connection(host, port), DIAL_TIMEOUT_S)
        # A target without an address raises ValueError.
        except (OSError, ValueError):
            _reset(client[1])
            return
        connection = RelayedConnection(client, server, self._weather)
        self._connections.add(connection)
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)


class Weather:
    """The lasting treatment of bytes in one direction, on all connections."""

    def __init__(self) -> None:
        self.passable = asyncio.Event()
        self.passable.set()
        self.delay_s = 0.0
        self.bytes_per_s = 0.0
        self.forwarded_bytes = 0

    def change(self, hold: bool, delay_s: float, bytes_per_s: float) -> None:
        self.delay_s, self.bytes_per_s = delay_s, bytes_per_s
        if hold:
            self.passable.clear()
        else:
            self.passable.set()


class Way:
    """One direction of one connection: a bounded queue between a task that reads and one that writes."""

    def __init__(self, weather: Weather) -> None:
        self._weather = weather
        # (due time, bytes); b"" is the end of the stream.
        self._queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(PIECES_MAX)
        # The number of bytes up to the one to invert; 0 for none.
        self.until_flip = 0
        self.repeat_bytes = 0

    async def read(self, source: asyncio.StreamReader) -> None:
        """Fill the queue until the stream ends."""
        data = b"?"
        while data:
            data = await source.read(READ_BYTES_MAX)
            due_s = asyncio.get_running_loop().time() + self._weather.delay_s
            await self._queue.put((due_s, self._damaged(data)))

    async def write(self, sink: asyncio.StreamWriter) -> None:
        """Empty the queue at the rate of the weather until the stream ends."""
        weather = self._weather
        while True:
            due_s, data = await self._queue.get()
            await asyncio.sleep(due_s - asyncio.get_running_loop().time())
            await weather.passable.wait()
            if not data:
                sink.write_eof()
                return
            while data:
                await weather.passable.wait()
                rate = weather.bytes_per_s
                size = min(len(data), max(1, int(rate * SLICE_S))) if rate else len(data)
                sink.write(data[:size])
                await sink.drain()
                weather.forwarded_bytes += size
                data = data[size:]
                await asyncio.sleep(size / rate if rate else 0)

    def _damaged(self, data: bytes) -> bytes:
        damaged = bytearray(data)
        if 0 < self.until_flip <= len(damaged):
            damaged[self.until_flip - 1] ^= 0xFF
        self.until_flip = max(0, self.until_flip - len(damaged))
        twice = damaged[: self.repeat_bytes]
        self.repeat_bytes -= len(twice)
        return bytes(twice + damaged)


class RelayedConnection:
    """A client's connection, and the relay's connection to the target for it."""

    def __init__(self, client: Stream, server: Stream, weather: dict[str, Weather]) -> None:
        self.ways = {name: Way(each) for name, each in weather.items()}
        self._ends = (client, server)
        # Whether we have sent FIN to both sides.
        self._parting = False
        self._forwarding = asyncio.create_task(self._forward())

    async def _forward(self) -> None:
        """Forward bytes in both directions until both streams end or one breaks."""
        (from_client, to_client), (from_server, to_server) = self._ends
        up, down = self.ways["up"], self.ways["down"]
        async with asyncio.TaskGroup() as group:
            for job in (up.read(from_client), up.write(to_server), down.read(from_server), down.write(to_client)):
                group.create_task(job)

    async def run(self) -> None:
        """Forward until the connection ends, then close both sides; if a stream broke, reset both."""
        whole = False
        try:
            (trouble,) = await asyncio.gather(self._forwarding, return_exceptions=True)
            whole = trouble is None
            if self._parting:
                await self._drain()
        finally:
            for _, writer in self._ends:
                if whole or self._parting:
                    writer.close()
                else:
                    # A reset shows both sides that the stream broke and did not finish.
                    _reset(writer)
            # If this task was cancelled, the forwarding task was too, and must end first.
            await asyncio.gather(self._forwarding, return_exceptions=True)

    def cut(self, how: Literal["rst", "fin"]) -> None:
        """End the connection with a reset, or with a FIN to both sides; later bytes are dropped."""
        self._parting = how == "fin"
        for _, writer in self._ends:
            if self._parting:
                with contextlib.suppress(OSError):
                    writer.write_eof()
            else:
                _reset(writer)
        self._forwarding.cancel()

    async def _drain(self) -> None:
        """Read and drop bytes until both sides send FIN too, for at most LINGER_S."""

        async def drain(reader: asyncio.StreamReader) -> None:
            with contextlib.suppress(OSError):
                while await reader.read(READ_BYTES_MAX):
                    pass

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                await asyncio.gather(*(drain(reader) for reader, _ in self._ends))


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with a reset instead of a FIN."""
    with contextlib.suppress(OSError):
        # Lingering is on, for 0 seconds.
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


def _names(direction: Direction) -> tuple[Literal["up", "down"], ...]:
    return ("up", "down") if direction == "both" else (direction,)
