"""Fuzz targets of what the hosts of an island say: parts of payloads, and frames of the island's own network."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from diloco_jax.core.parts import concat, cut_part, join_parts, pack_part, runs_of_box
from diloco_jax.transport.group_wire import (
    HEARTBEAT,
    REASON_LENGTH_MAX,
    Connection,
    GroupConfig,
    GroupInbox,
    Outgoing,
)
from tests.transport.fuzz_inputs import PAYLOAD_BYTES_MAX, framed, unframed

WHOLE = bytes(range(60))


def host_parts() -> list[bytes]:
    """Three columns of a table, and the table's end with the last of them."""
    grid = np.frombuffer(WHOLE, np.uint8)[:54].reshape(6, 9)
    found = []
    for host in range(3):
        box, rest = (slice(None), slice(3 * host, 3 * host + 3)), WHOLE[54:] if host == 2 else b""
        runs = concat(runs_of_box(0, (6, 9), box, 1), runs_of_box(54, (len(rest),), (slice(None),), 1))
        found.append(b"".join(pack_part(runs, [grid[box].tobytes(), rest])))
    return found


def run_parts(data: bytes) -> None:
    """Parts of a payload: each byte of the data once in the whole, or refused; a part that is cut stays within it."""
    parts = list(unframed(data))
    with contextlib.suppress(ValueError):
        whole = join_parts(parts, PAYLOAD_BYTES_MAX)
        heads = [8 + 32 * int.from_bytes(part[:8], "little") for part in parts]
        data_bytes = b"".join(part[head:] for part, head in zip(parts, heads, strict=True))
        assert all(parts) or not whole
        assert not all(parts) or sorted(whole) == sorted(data_bytes)
    for part in parts:
        with contextlib.suppress(ValueError):
            cut = cut_part(part, [(0, 10), (20, 50)])
            assert sum(len(buffer) for buffer in cut[1:]) <= len(part)


class Arrived:
    """A socket of which these bytes came, then nothing."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def recv_into(self, view: memoryview) -> int:
        count = min(len(view), len(self.data))
        view[:count], self.data = self.data[:count], self.data[count:]
        return count


def run_group(data: bytes) -> None:
    """Frames between the hosts of an island."""
    connection = Connection(1, GroupConfig(payload_bytes_max=PAYLOAD_BYTES_MAX), GroupInbox())
    arrived: Any = Arrived(data)
    with contextlib.suppress(ValueError, EOFError, RecursionError):
        while True:
            item = connection._receive(arrived)
            assert isinstance(item.head, dict) and len(item.payload) <= PAYLOAD_BYTES_MAX
            assert len(item.reason) <= REASON_LENGTH_MAX


GROUP_FRAMES = (
    HEARTBEAT.prefix,
    Outgoing.of({"op": "x", "n": [1, 2.5, None]}, b"", GroupConfig()).prefix,
    Outgoing.of({}, WHOLE, GroupConfig()).prefix + WHOLE,
    Outgoing.goodbye("done").prefix,
)
GROUP_SEEDS = (b"".join(GROUP_FRAMES), *GROUP_FRAMES)
PARTS_SEEDS = (framed(*host_parts()), framed(*host_parts()[:2], b""))
