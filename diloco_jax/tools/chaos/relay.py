"""A TCP relay that misbehaves on command: what a bad network does to one island's connections, on loopback.

It stands between learners and the syncer and forwards bytes of which it understands nothing. One thread runs it;
every public method may be called from any other and returns when the fault is in place.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

from diloco_jax.tools.chaos.weather import RelayCounts, RelayedConnection, Way, Weather, end_tasks, reset_on_close
from diloco_jax.transport.link import split_address
from diloco_jax.transport.trust.security import is_loopback

Direction: TypeAlias = Literal["up", "down", "both"]
T = TypeVar("T")

CONNECTIONS_MAX = 256
DIAL_TIMEOUT_S = 5.0
CALL_TIMEOUT_S = 10.0


class Relay:
    """A listener on loopback that forwards every connection to a target; a context manager.

    `connection` in the methods is the number of one connection, 0 for the first that was accepted; None means all that
    are open and, for what lasts, all that will come. `direction` is "up" towards the target, "down", or "both".

    Args:
        target: host:port to forward to, on loopback, or a function that returns it, asked at every connection.
        address: where to listen.

    Raises:
        ValueError: an address is not one of loopback.
        OSError: the address cannot be listened on.
    """

    def __init__(self, target: str | Callable[[], str], address: str = "127.0.0.1:0") -> None:
        if not is_loopback(address):
            raise ValueError(f"a relay would listen on {address}; it is for tests, use an address of loopback")
        self._target = target
        self._counts = RelayCounts()
        self._weather = {"up": Weather(), "down": Weather()}
        self._refusing = False
        self._connections: dict[int, RelayedConnection] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._listener = socket.create_server(split_address(address))
        self._listener.setblocking(False)
        host, port = self._listener.getsockname()[:2]
        self.address = f"{host}:{port}"
        self._loop = asyncio.new_event_loop()
        self._main = self._loop.create_task(self._accept())
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all connections and stop listening; safe to call again."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._main.cancel)
            self._thread.join(CALL_TIMEOUT_S)

    # ---- faults ---------------------------------------------------------------------------------------------------

    def cut(self, how: Literal["rst", "fin"] = "rst", connection: int | None = None) -> int:
        """End connections at once; new ones are welcome. Returns how many were cut."""

        async def run() -> int:
            chosen = self._chosen(connection)
            for each in chosen:
                await each.cut(how)
            self._counts.cut += len(chosen)
            return len(chosen)

        return self._await(run())

    def refuse(self, on: bool) -> None:
        """Reset every new connection at once, until told otherwise."""

        self._refusing = on

    def change(self, direction: Direction = "both", connection: int | None = None, **changes: Any) -> None:
        """Change what lasts: the fields of `Weather` by name.

        Raises:
            ValueError: a value is out of range.
        """

        def run() -> None:
            for name in _names(direction):
                changed = replace(self._weather[name], **changes)
                if connection is None:
                    self._weather[name] = changed
            for way in self._ways(direction, connection):
                way.set(replace(way.weather, **changes))

        self._call(run)

    def heal(self) -> None:
        """Forward as if nothing had been; open connections stay open, ordered damage is called off."""
        self.change(hold=False, lose=False, delay_s=0.0, bytes_per_s=0.0)
        self.refuse(False)
        self.flip(1, times=0)
        self.repeat(0)

    def flip(
        self, every_bytes: int, times: int = 1, direction: Direction = "both", connection: int | None = None
    ) -> None:
        """Invert one byte in `every_bytes`, so many times, on each open connection and direction.

        Raises:
            ValueError: a number is out of range.
        """
        if every_bytes < 1 or times < 0:
            raise ValueError(f"flip of {times} bytes, one in {every_bytes}: use at least 0 and 1")
        self._call_ways(direction, connection, lambda way: way.flip(every_bytes, times))

    def repeat(self, size: int, direction: Direction = "both", connection: int | None = None) -> None:
        """Forward the next `size` bytes twice, on each open connection and direction.

        Raises:
            ValueError: the size is negative.
        """
        if size < 0:
            raise ValueError(f"repeat of {size} bytes: use at least 0")
        self._call_ways(direction, connection, lambda way: way.repeat(size))

    # ---- what it knows --------------------------------------------------------------------------------------------

    @property
    def counts(self) -> RelayCounts:
        """Counts of what was done so far."""
        return self._call(lambda: replace(self._counts))

    @property
    def open_connections(self) -> tuple[int, ...]:
        """Numbers of the connections that are open."""
        return self._call(lambda: tuple(self._connections))

    def _chosen(self, connection: int | None) -> list[RelayedConnection]:
        if connection is None:
            return list(self._connections.values())
        return [self._connections[connection]] if connection in self._connections else []

    def _ways(self, direction: Direction, connection: int | None) -> list[Way]:
        names = _names(direction)
        return [way for each in self._chosen(connection) for way in each.ways if way.name in names]

    # ---- its thread -----------------------------------------------------------------------------------------------

    def _call_ways(self, direction: Direction, connection: int | None, job: Callable[[Way], None]) -> None:
        def run() -> None:
            for way in self._ways(direction, connection):
                job(way)

        self._call(run)

    def _call(self, job: Callable[[], T]) -> T:
        """Call a function on the relay's thread and return its result."""

        async def run() -> T:
            return job()

        return self._await(run())

    def _await(self, job: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the relay's thread and return its result."""
        if not self._thread.is_alive():
            job.close()
            raise OSError(f"the relay at {self.address} is closed")
        return asyncio.run_coroutine_threadsafe(job, self._loop).result(CALL_TIMEOUT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._main)
        self._loop.close()

    async def _accept(self) -> None:
        try:
            while True:
                client, _ = await self._loop.sock_accept(self._listener)
                if self._refusing or len(self._serving) >= CONNECTIONS_MAX:
                    self._refuse(client)
                    continue
                number = self._counts.accepted
                self._counts.accepted += 1
                task = self._loop.create_task(self._serve(number, client))
                self._serving.add(task)
                task.add_done_callback(self._serving.discard)
                task.add_done_callback(partial(_close, client))
        finally:
            self._listener.close()
            await end_tasks(list(self._serving))

    def _refuse(self, client: socket.socket) -> None:
        self._counts.refused += 1
        reset_on_close(client)
        client.close()

    async def _serve(self, number: int, client: socket.socket) -> None:
        """Dial the target and forward until the connection is over."""
        client.setblocking(False)
        try:
            server = await self._dial()
        except (OSError, ValueError):  # ValueError: the target has no address yet; a timeout is an OSError
            self._counts.unanswered += 1
            self._refuse(client)
            return
        for each in (client, server):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ways = (Way(name, self._weather[name], self._counts) for name in ("up", "down"))
        connection = self._connections[number] = RelayedConnection(client, server, *ways)
        try:
            await connection.ended()
        finally:
            del self._connections[number]
            await connection.cut("rst")  # nothing is left to cut, unless the relay is being closed

    async def _dial(self) -> socket.socket:
        host, port = split_address(self._target() if callable(self._target) else self._target)
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        server = socket.socket(family, kind, protocol)
        server.setblocking(False)
        try:
            await asyncio.wait_for(self._loop.sock_connect(server, address), DIAL_TIMEOUT_S)
        except BaseException:
            server.close()
            raise
        return server


def _close(client: socket.socket, task: asyncio.Task[None]) -> None:
    del task
    client.close()


def _names(direction: Direction) -> tuple[str, ...]:
    return ("up", "down") if direction == "both" else (direction,)
