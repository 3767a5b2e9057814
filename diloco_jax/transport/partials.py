"""Payloads that a lost connection cut, kept for a while so that the next session sends only the missing bytes.

The sender identifies a payload by its size and a checksum of samples of its bytes, because a checksum of all bytes
would cost each payload a pass over memory. Neither side trusts that: the sender announces the checksum of all bytes of
a payload that it continues, and the receiver checks it before it delivers the payload.
"""

import math
import threading
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from diloco_jax.core.codec import Checksum
from diloco_jax.transport.proto import diloco_pb2 as pb

# A payload up to this size is sent again as a whole.
RESUME_BYTES_MIN = 1 << 20
PARTIALS_MAX = 16
# A partial payload keeps its largest ranges; smaller ones are sent again.
RANGES_KEPT = 16
HOLDINGS_BYTES_MAX = 4096

# Bytes of one sample, and number of samples that identify a payload.
SAMPLE_BYTES, SAMPLES = 1 << 12, 64

# (checksum of samples of the payload, its size in bytes)
Key: TypeAlias = tuple[int, int]


def key_of(parts: Sequence[memoryview]) -> int:
    """Return the checksum of samples of a payload of more than RESUME_BYTES_MIN bytes, however it is divided."""
    step, start = sum(part.nbytes for part in parts) // SAMPLES, 0
    checksum = Checksum()
    for part in parts:
        stop = start + part.nbytes
        for at in range(start // step * step, stop, step):
            checksum.update(part[max(at - start, 0) : max(at + SAMPLE_BYTES - start, 0)])
        start = stop
    return checksum.intdigest()


class Ranges:
    """The bytes of a payload that have arrived, as ascending ranges that do not touch."""

    def __init__(self, pairs: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self.filled = 0  # bytes in ranges
        for start, stop in pairs:
            self.add(start, stop)

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._stops, strict=True)

    def touches(self, start: int, stop: int) -> bool:
        """Tell whether a range touches an existing one, so that both would become one."""
        at = bisect_right(self._starts, start)
        return (at > 0 and self._stops[at - 1] == start) or (at < len(self) and self._starts[at] == stop)

    def add(self, start: int, stop: int) -> None:
        """Add a range; ValueError if it is empty, or overlaps an existing one."""
        at = bisect_right(self._starts, start)
        if start >= stop or (at > 0 and self._stops[at - 1] > start) or (at < len(self) and self._starts[at] < stop):
            raise ValueError(f"bytes {start} to {stop} are empty or there already")
        self.filled += stop - start
        if at < len(self) and self._starts[at] == stop:
            stop = self._stops[at]
            del self._starts[at], self._stops[at]
        if at > 0 and self._stops[at - 1] == start:
            self._stops[at - 1] = stop
        else:
            self._starts.insert(at, start)
            self._stops.insert(at, stop)

    def holes(self, size: int) -> list[tuple[int, int]]:
        """Return the missing ranges of a payload of `size` bytes."""
        edges = [0, *(edge for pair in self for edge in pair), size]
        return [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]


class Partial(NamedTuple):
    """A payload with some of its bytes."""

    key: Key
    buffer: np.ndarray
    ranges: Ranges


class Partials:
    """Incomplete payloads of one peer, over all sessions of this process; any thread may call the methods.

    Args:
        bytes_max: Limit for the full sizes of all payloads together; the oldest make room.
        keep_s: Seconds that a partial payload is kept after it was cut.
    """

    def __init__(self, bytes_max: int, keep_s: float) -> None:
        self._bytes_max = bytes_max
        self._keep_s = keep_s
        self._lock = threading.Lock()
        # Key -> (expiry on the monotonic clock, payload), oldest first.
        self._kept: dict[Key, tuple[float, Partial]] = {}
        # The timer runs while a payload is kept.
        self._timer: threading.Timer | None = None

    def put(self, partials: Sequence[Partial]) -> None:
        """Keep the incomplete payloads of a session that ended."""
        for partial in partials:
            if partial.key[1] > self._bytes_max:
                continue
            largest = sorted(partial.ranges, key=lambda pair: pair[0] - pair[1])[:RANGES_KEPT]
            small = partial._replace(ranges=Ranges(sorted(largest)))
            with self._lock:
                self._kept.pop(partial.key, None)
                self._kept[partial.key] = (time.monotonic() + self._keep_s, small)
                while len(self._kept) > PARTIALS_MAX or sum(size for _, size in self._kept) > self._bytes_max:
                    del self._kept[next(iter(self._kept))]
        self._expire()

    def claim(self, key: Key) -> Partial | None:
        """Remove and return an incomplete payload; None if it is unknown."""
        with self._lock:
            _, partial = self._kept.pop(key, (0.0, None))
            return partial

    def announce(self) -> pb.Holdings:
        """List the kept ranges for the peer, and state that digested chunks are allowed.

        Each is announced with half of its remaining time, because the peer's answer takes time to arrive.
        """
        now_s = time.monotonic()
        holdings = pb.Holdings(digests=True)
        with self._lock:
            for key, (until_s, partial) in self._kept.items():
                starts, stops = zip(*partial.ranges, strict=True)
                valid_s = (until_s - now_s) / 2
                holdings.partials.add(key=key[0], payload_bytes=key[1], start=starts, stop=stops, valid_s=valid_s)
        return holdings

    @property
    def held_bytes(self) -> int:
        """Return the full size of all kept payloads, in bytes."""
        with self._lock:
            return sum(size for _, size in self._kept)

    def forget(self) -> None:
        """Drop all payloads."""
        with self._lock:
            self._kept.clear()

    def _expire(self) -> None:
        """Drop payloads that have expired, and start a timer for the next expiry."""
        now_s = time.monotonic()
        with self._lock:
            self._kept = {key: each for key, each in self._kept.items() if each[0] > now_s}
            if threading.current_thread() is self._timer:
                self._timer = None
            if self._kept and self._timer is None:
                oldest_s, _ = next(iter(self._kept.values()))
                self._timer = threading.Timer(oldest_s - now_s, self._expire)
                self._timer.name, self._timer.daemon = "diloco-forget-partials", True
                self._timer.start()


class PeerHoldings:
    """Ranges of payloads that the peer says it holds; each is used once.

    Attributes:
        digests: Whether the peer takes digested chunks (wire.py).
    """

    def __init__(self, holdings: pb.Holdings | None = None) -> None:
        """Check the peer's list; ValueError if it exceeds the limits, or contradicts itself."""
        self._ranges: dict[Key, tuple[float, Ranges]] = {}  # (expiry, ranges)
        self.digests = holdings is not None and holdings.digests
        if holdings is None:
            return
        if len(holdings.partials) > PARTIALS_MAX:
            raise ValueError(f"{len(holdings.partials)} partial payloads, the limit is {PARTIALS_MAX}")
        for each in holdings.partials:
            starts, stops = tuple(each.start), tuple(each.stop)
            if len(starts) != len(stops) or not 1 <= len(starts) <= RANGES_KEPT or max(stops) > each.payload_bytes:
                raise ValueError(f"a partial payload of {each.payload_bytes} bytes has ranges {starts}, {stops}")
            if not math.isfinite(each.valid_s):
                raise ValueError(f"a partial payload is kept for {each.valid_s} s, no duration")
            until_s = time.monotonic() + each.valid_s
            self._ranges[each.key, each.payload_bytes] = (until_s, Ranges(zip(starts, stops, strict=True)))

    def claim(self, key: Key) -> Ranges | None:
        """Return the ranges of a payload that the peer holds, once; None if there are none."""
        until_s, ranges = self._ranges.pop(key, (0.0, None))
        return ranges if time.monotonic() < until_s else None
