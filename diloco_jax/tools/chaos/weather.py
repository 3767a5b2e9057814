"""One connection through the relay: two bounded streams of bytes, and what bad weather does to them (relay.py).

Everything here runs on the relay's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import deque
from dataclasses import dataclass
from typing import Literal

READ_BYTES_MAX = 1 << 16
BUFFER_BYTES_MAX = 1 << 20  # per connection and direction; beyond it the sender feels the fault as back-pressure
LINGER_S = 5.0  # how long a connection that got a FIN from us may go on talking
SLICE_S = 0.05  # a limited rate is paid out in pieces of so many seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """The treatment of bytes in one direction of a connection, until it is changed again."""

    hold: bool = False
    """Forward nothing and lose nothing: a black hole. Once it ends, everything arrives."""
    lose: bool = False
    """Throw bytes away as if they had been forwarded."""
    delay_s: float = 0.0
    """Seconds that every byte is late."""
    bytes_per_s: float = 0.0
    """Most bytes that pass in a second; 0 is no limit."""

    def __post_init__(self) -> None:
        if not 0 <= self.delay_s <= 3600:
            raise ValueError(f"delay_s is {self.delay_s}; use 0 to 3600 seconds")
        if not self.bytes_per_s >= 0:
            raise ValueError(f"bytes_per_s is {self.bytes_per_s}; use a rate, or 0 for no limit")


@dataclass(slots=True)
class RelayCounts:
    """Counts of what a relay has done so far."""

    accepted: int = 0
    refused: int = 0  # connections that were reset at once
    unanswered: int = 0  # of them: because the target did not answer
    cut: int = 0
    up_bytes: int = 0  # forwarded towards the target
    down_bytes: int = 0
    lost_bytes: int = 0
    flipped_bytes: int = 0
    duplicated_bytes: int = 0


class Way:
    """One direction of one connection: a bounded buffer between a task that reads and one that writes."""

    def __init__(self, name: str, weather: Weather, counts: RelayCounts) -> None:
        self.name = name
        self._weather = weather
        self._counts = counts
        self._changed = asyncio.Event()
        self._buffer: deque[tuple[float, bytes]] = deque()  # when it is due; b"" is the end of the stream
        self._buffered_bytes = 0
        self._flip_every, self._flips, self._until_flip = 0, 0, 0
        self._repeat_bytes = 0

    @property
    def weather(self) -> Weather:
        return self._weather

    def set(self, weather: Weather) -> None:
        self._weather = weather
        self._changed.set()

    def flip(self, every_bytes: int, times: int) -> None:
        self._flip_every, self._flips, self._until_flip = every_bytes, times, every_bytes

    def repeat(self, size: int) -> None:
        self._repeat_bytes = size

    async def read(self, source: socket.socket) -> None:
        """Fill the buffer until the stream ends."""
        loop = asyncio.get_running_loop()
        while True:
            while self._buffered_bytes >= BUFFER_BYTES_MAX:
                await self._wait(None)
            data = await loop.sock_recv(source, READ_BYTES_MAX)
            if data and self._weather.lose:
                self._counts.lost_bytes += len(data)
                continue
            if data:
                data = self._damaged(data)
            self._buffer.append((loop.time() + self._weather.delay_s, data))
            self._buffered_bytes += len(data)
            self._changed.set()
            if not data:
                return

    async def write(self, sink: socket.socket) -> None:
        """Empty the buffer, as fast as the weather allows, until the stream ends."""
        loop = asyncio.get_running_loop()
        while True:
            if self._weather.hold or not self._buffer:
                await self._wait(None)
                continue
            due_s, data = self._buffer[0]
            if due_s > loop.time():
                await self._wait(due_s - loop.time())
                continue
            if not data:
                sink.shutdown(socket.SHUT_WR)
                return
            rate = self._weather.bytes_per_s
            size = min(len(data), max(1, int(rate * SLICE_S))) if rate else len(data)
            await loop.sock_sendall(sink, data[:size])
            self._count(size)
            self._buffer[0] = (due_s, data[size:])
            if size == len(data):
                self._buffer.popleft()
            if rate:
                await asyncio.sleep(size / rate)

    async def _wait(self, timeout_s: float | None) -> None:
        """Wait for a change of buffer or weather; in vain for at most `timeout_s`."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)

    def _count(self, size: int) -> None:
        if self.name == "up":
            self._counts.up_bytes += size
        else:
            self._counts.down_bytes += size
        self._buffered_bytes -= size
        self._changed.set()  # there is room again

    def _damaged(self, data: bytes) -> bytes:
        damaged = bytearray(data)
        while self._flips and self._until_flip <= len(damaged):
            at = self._until_flip - 1
            damaged[at] ^= 0xFF
            self._counts.flipped_bytes += 1
            self._flips -= 1
            self._until_flip += self._flip_every
        if self._flips:
            self._until_flip -= len(damaged)
        if self._repeat_bytes:
            twice = damaged[: self._repeat_bytes]
            damaged[:0] = twice
            self._repeat_bytes -= len(twice)
            self._counts.duplicated_bytes += len(twice)
        return bytes(damaged)


class RelayedConnection:
    """A client's connection and ours to the target.

    A callback closes them: a task that is cancelled before its first step never reaches its `finally`.
    """

    def __init__(self, client: socket.socket, server: socket.socket, up: Way, down: Way) -> None:
        self.ways = (up, down)
        self._ends = (client, server)
        self._parting = False  # both sides got a FIN from us
        self._task = asyncio.create_task(self._forward())
        self._task.add_done_callback(lambda _: self._close())

    async def _forward(self) -> None:
        """Carry bytes both ways until both streams ended, or one broke."""
        up, down = self.ways
        client, server = self._ends
        jobs = (up.read(client), up.write(server), down.read(server), down.write(client))
        tasks = [asyncio.create_task(job) for job in jobs]
        try:
            await asyncio.gather(*tasks)
        except OSError:
            if not self._parting:
                self._reset()  # neither side may take a broken stream for a finished one
        except asyncio.CancelledError:
            if not self._parting:
                raise
        finally:
            await end_tasks(tasks)
        if self._parting:
            await self._drain()

    async def _drain(self) -> None:
        """Listen until the others say FIN too, for a while."""

        async def drain(end: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while await asyncio.get_running_loop().sock_recv(end, READ_BYTES_MAX):
                    pass

        tasks = [asyncio.create_task(drain(end)) for end in self._ends]
        try:
            await asyncio.wait(tasks, timeout=LINGER_S)
        finally:
            await end_tasks(tasks)

    async def cut(self, how: Literal["rst", "fin"]) -> None:
        """End it: with a reset, or with a FIN to both sides, after which what they say is thrown away."""
        self._parting = how == "fin"
        if self._parting:
            for end in self._ends:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_WR)
            self._task.cancel()
        else:
            self._reset()
            await end_tasks([self._task])

    async def ended(self) -> None:
        """Wait until nothing is left of it."""
        await asyncio.wait([self._task])

    def _reset(self) -> None:
        for end in self._ends:
            reset_on_close(end)

    def _close(self) -> None:
        for end in self._ends:
            end.close()


async def end_tasks(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel and wait until they are over."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def reset_on_close(end: socket.socket) -> None:
    """Let `close` send a reset instead of a FIN."""
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # on, for 0 seconds
