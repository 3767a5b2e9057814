"""Versions of fragments for the hosts of islands: each host gets the blocks that it has stated (core/held.py).

A statement is the payload of a HostBlocks: rows of seven little-endian int64. They are the number of a fragment, the
number of one of its slices in ascending order of their keys, 1 for blocks that the host gets from the syncer or 0 for
blocks that it holds, and then start, size, stride and count as in a table of blocks. A host of an island may get fewer
blocks than it holds, because its leader passes on those that several hosts hold; and the leader gets these.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from diloco_jax.core.codec import Bytes, Format
from diloco_jax.core.held import HeldBlocks, Table, check_table, everything, regrouped
from diloco_jax.core.layout import Layout
from diloco_jax.core.outer import Flat
from diloco_jax.transport.limits import STATEMENT_BYTES_MAX

COLUMNS = 7
# The most rows of one host.
ROWS_MAX = STATEMENT_BYTES_MAX // (8 * COLUMNS)
# Bytes of the statements that are kept after they were read. Hosts of equal islands make equal ones.
KEPT_BYTES_MAX = 8 * STATEMENT_BYTES_MAX


class HostCut(NamedTuple):
    """The blocks of one fragment that a host holds, and those that it gets from the syncer."""

    held: HeldBlocks
    got: HeldBlocks


def pack_blocks(cuts: Sequence[HostCut]) -> bytes:
    """Return a host's statement of its blocks of each fragment, as bytes.

    Raises:
      ValueError: the blocks take more rows than a syncer reads.
    """
    found = [np.empty((0, COLUMNS), np.int64)]
    for fragment_id, cut in enumerate(cuts):
        for got, blocks in enumerate(cut):
            for number, table in enumerate(blocks.tables):
                names = np.broadcast_to([fragment_id, number, got], (len(table), 3))
                found.append(np.concatenate([names, table], axis=1))
    rows = np.concatenate(found)
    if len(rows) > ROWS_MAX:
        raise ValueError(
            f"the blocks of this host take {len(rows)} rows, the limit is {ROWS_MAX}: shard tensors along their first "
            "axes"
        )
    return rows.astype("<i8").tobytes()


def read_blocks(raw: Bytes, layouts: Sequence[Layout]) -> tuple[HostCut, ...]:
    """Read the statement of a host, which comes from the network.

    Args:
      layouts: of the whole fragments.

    Raises:
      ValueError: the statement has too many rows, or a row does not describe blocks of this model.
    """
    if len(raw) % (8 * COLUMNS) or len(raw) > 8 * COLUMNS * ROWS_MAX:
        raise ValueError(
            f"{len(raw)} bytes are not the blocks of a host: at most {ROWS_MAX} rows of {8 * COLUMNS} bytes"
        )
    rows = np.frombuffer(raw, "<i8").reshape(-1, COLUMNS).astype(np.int64)
    names = rows[:, :3]
    pieces = np.array([len(layout.pieces) for layout in layouts])
    known = (names >= 0).all(axis=1) & (names[:, 0] < len(layouts)) & (names[:, 2] <= 1)
    known[known] &= names[known, 1] < pieces[names[known, 0]]
    if not known.all():
        wrong = names[int(np.argmin(known))].tolist()
        raise ValueError(f"the blocks of a host name fragment, slice and kind {wrong}: they are not of this model")
    order = (names[:, 0] * 2 + names[:, 2]) * pieces.max() + names[:, 1]
    if (np.diff(order) < 0).any():
        raise ValueError("the blocks of a host are not in order of fragment, kind and slice")
    return tuple(_cut(rows[names[:, 0] == number, 1:], layout) for number, layout in enumerate(layouts))


def _cut(rows: Int64[np.ndarray, "n 6"], layout: Layout) -> HostCut:
    found = []
    for got in range(2):
        tables: list[Table] = []
        for number, piece in enumerate(layout.pieces):
            table = rows[(rows[:, 0] == number) & (rows[:, 1] == got), 2:]
            check_table(table, piece)
            tables.append(table)
        found.append(HeldBlocks(layout, tuple(tables)))
    return HostCut(*found)


class Cuts:
    """The statements of hosts, each read once; `of` is for one thread.

    Args:
      layouts: of the whole fragments.
      down: format of the steps.
    """

    def __init__(self, layouts: Sequence[Layout], down: Format) -> None:
        self._down: Format = down
        self._wholes = [everything(layout) for layout in layouts]
        self._layouts = layouts
        # By statement, the one that was used last at the end.
        self._read: dict[bytes, tuple[HostCut, ...]] = {}
        self._kept_bytes = 0

    def of(self, fragment_id: int, blocks: bytes) -> HostCut:
        """Return what a host has stated of a fragment; ValueError as `read_blocks`."""
        found = self._read.pop(blocks, None)
        if found is None:
            found = read_blocks(blocks, self._layouts)
            self._kept_bytes += len(blocks)
        self._read[blocks] = found
        # A host may state other blocks on each of its sessions.
        while self._kept_bytes > KEPT_BYTES_MAX:
            oldest = next(iter(self._read))
            del self._read[oldest]
            self._kept_bytes -= len(oldest)
        return found[fragment_id]

    def version(self, fragment_id: int, payload: Bytes, value: Flat, *, is_whole: bool) -> "ModelVersion":
        """Return a version for learners.

        Args:
          payload: the step to this version, or with `is_whole` the value in float32.
          value: the value of this version.
        """
        return ModelVersion(self, fragment_id, payload, value, "float32" if is_whole else self._down)

    def whole(self, fragment_id: int) -> HeldBlocks:
        """Return all blocks of a fragment."""
        return self._wholes[fragment_id]


class ModelVersion:
    """A version of a fragment on its way to learners; `cut` is for one thread."""

    def __init__(self, cuts: Cuts, fragment_id: int, payload: Bytes, value: Flat, format: Format) -> None:
        self.payload = payload
        self._cuts = cuts
        self._fragment_id = fragment_id
        self._value = value
        self._format: Format = format
        # Statement -> digest; hosts of equal islands have equal ones. Payloads may be copies, so they are not kept.
        self._digests: dict[bytes, int] = {}

    @property
    def value_bytes(self) -> int:
        """Return the bytes of the value, which the version keeps in memory."""
        return self._value.nbytes

    def cut(self, blocks: bytes) -> tuple[int, Callable[[], list[memoryview]]]:
        """Return the digest of the blocks that a host holds, and a function that makes the payload with those it gets.

        The function does not hold the value, because it may wait long for a slow host.

        Args:
          blocks: the host's statement.

        Raises:
          ValueError: as `read_blocks`.
        """
        cut, whole = self._cuts.of(self._fragment_id, blocks), self._cuts.whole(self._fragment_id)
        if blocks not in self._digests:
            self._digests[blocks] = cut.held.digest(self._value)
        return self._digests[blocks], partial(regrouped, [(whole, self.payload)], cut.got, self._format)
