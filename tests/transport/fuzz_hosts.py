"""Fuzz targets of what the hosts of an island say: parts of payloads, and commands."""

from __future__ import annotations

import contextlib

from diloco_jax.core.parts import cut_part, join_parts
from diloco_jax.protocol.messages import GlobalFragment
from diloco_jax.transport.group.commands import (
    HostAdopt,
    HostAnswer,
    HostArrival,
    HostLeaf,
    HostLoadState,
    HostMeet,
    HostPutBatch,
    HostStep,
    HostStop,
    SampleRange,
)
from tests.transport.ends import parts_of
from tests.transport.fuzz_inputs import PAYLOAD_BYTES_MAX, framed, unframed

PARTS = parts_of(bytes(range(66)))  # of two rows, and what is left of a third
VALUE = GlobalFragment(5, 1, 5, 1, 1 << 60, 90)
COMMANDS = (
    HostMeet(3, (("seed", "0"), ("mesh", "fsdp"))),
    HostPutBatch((SampleRange(0, 8), SampleRange(16, 24))),
    HostStep(0.5),
    HostArrival(7, VALUE),
    HostAdopt(7, VALUE),
    HostLeaf(8, -1, "params/w"),
    HostLoadState(9, (0, 1)),
    HostAnswer(9, "no"),
    HostStop(),
)


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


PARTS_SEEDS = (framed(*PARTS), framed(*PARTS[:2], b""))
