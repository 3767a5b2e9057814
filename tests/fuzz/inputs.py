"""Inputs of fuzz targets: several frames as one input, and mutations of good inputs."""

import random
from collections.abc import Iterator

import numpy as np

from diloco_jax.core.host_bytes import concat, pack_host_bytes, runs_of_box

PAYLOAD_BYTES_MAX = 1000


def framed(*frames: bytes) -> bytes:
    """Several frames as one input."""
    return b"".join(len(frame).to_bytes(2, "little") + frame for frame in frames)


def unframed(data: bytes) -> Iterator[bytes]:
    """Split an input into frames; a length that is too large takes the remaining bytes."""
    while len(data) >= 2:
        size = int.from_bytes(data[:2], "little")
        yield data[2 : 2 + size]
        data = data[2 + size :]


def mutate(number: random.Random, seeds: tuple[bytes, ...], length_max: int = 4096) -> bytes:
    """One input: a seed changed in a few places, two seeds crossed, or noise."""
    kind = number.random()
    if kind < 0.05:
        return number.randbytes(number.randint(0, 200))
    data = bytearray(number.choice(seeds))
    if kind < 0.2:
        other = number.choice(seeds)
        data[number.randint(0, len(data)) :] = other[number.randint(0, len(other)) :]
    for _ in range(number.choice((1, 1, 2, 3, 8))):
        position = number.randint(0, len(data))
        change = number.randrange(7)
        if change == 0 and data:
            data[position % len(data)] = number.randrange(256)
        elif change == 1 and data:
            data[position % len(data)] ^= 1 << number.randrange(8)
        elif change == 2:
            del data[position : position + number.randint(1, 8)]
        elif change == 3:
            data[position:position] = number.randbytes(number.randint(1, 8))
        elif change == 4:
            data[position:position] = data[position : position + number.randint(1, 32)]
        elif change == 5:
            del data[position:]
        else:
            data[position : position + 4] = number.choice(EXTREMES)
    return bytes(data[:length_max])


EXTREMES = (
    b"\xff\xff\xff\xff",
    bytes(4),
    b"\x80\x80\x80\x80",
    b"\xff\xff\xff\x7f",
    b"99999",
    b"-1",
    b"NaN",
    b"[]",
    b"{}",
)


def parts_of(whole: bytes, hosts: int = 3) -> list[bytes]:
    """The parts of a payload that hosts have: equal columns of a table, and what is left for the last of them."""
    rows, width = len(whole) // 30, 30 // hosts
    grid = np.frombuffer(whole, np.uint8)[: rows * 30].reshape(rows, 30)
    found = []
    for host in range(hosts):
        box = slice(None), slice(host * width, (host + 1) * width)
        rest = whole[rows * 30 :] if host == hosts - 1 else b""
        tail = runs_of_box(rows * 30, (len(rest),), (slice(None),), 1)
        runs = concat(runs_of_box(0, (rows, 30), box, 1), tail)
        found.append(b"".join(pack_host_bytes(runs, [grid[box].tobytes(), rest])))
    return found
