"""A part of a payload: the bytes that one host of an island has, and their places in the whole payload.

A part is a head and data. The head is a little-endian int64 `n` and n entries of four int64: start, size, stride,
count. An entry describes the next `count * size` bytes of data. They are rows of `size` bytes; row k belongs at
`start + k * stride` of the whole payload. So a device's rows of a tensor are one entry, whatever their number.

A part with no bytes, not even a head, means that the host cannot send its value. Then the whole payload is empty too.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from jaxtyping import Int64

# The most entries of one part, and of all parts of one payload.
RUNS_MAX = 65_536
JOINED_RUNS_MAX = 1 << 20
_COUNT_BYTES = 8
_ENTRY_BYTES = 32
# With this limit of addresses, sums over all entries stay within int64.
_ADDRESS_MAX = 1 << 46

Buffer = bytes | bytearray | memoryview
HostBytes = Buffer | Sequence[Buffer]


@dataclass(frozen=True, eq=False)
class Runs:
    """Places in the whole payload of a part's bytes, in the order of the part's data."""

    # Start, size, stride and count of each entry; all but the count in bytes. The rows of an entry are not empty and do
    # not overlap.
    table: Int64[np.ndarray, "n 4"]

    @property
    def num_bytes(self) -> int:
        """Return the size of the part's data."""
        return int((self.table[:, 1] * self.table[:, 3]).sum())


def runs_of_box(offset: int, grid_shape: Sequence[int], box: Sequence[slice], item_bytes: int) -> Runs:
    """Return the places of a box of an array in a payload, in the order of the box's own C-contiguous bytes.

    Args:
      offset: first byte of the array in the payload; the array is C-contiguous.
      grid_shape: shape of the array, in items.
      box: for each dimension the items start..stop-1, within the array.
      item_bytes: size of an item.

    Raises:
      ValueError: the box is not within the array, or takes more than RUNS_MAX entries.
    """
    pairs = list(zip(box, grid_shape, strict=False))
    sizes = [(each.start or 0, extent if each.stop is None else each.stop) for each, extent in pairs]
    fits = all(0 <= start <= stop <= extent for (start, stop), (_, extent) in zip(sizes, pairs, strict=True))
    if len(box) != len(grid_shape) or not fits or any(each.step not in (None, 1) for each in box):
        raise ValueError(f"box {tuple(box)} is not within an array of shape {tuple(grid_shape)}; use its own indices")
    if any(start == stop for start, stop in sizes):
        return _runs(np.empty((0, 4), np.int64))
    # `size` is the length of a contiguous row, and `pitch` the distance between two indices of the dimension, in bytes.
    size = pitch = item_bytes
    # (count, stride) of repeated rows, innermost first.
    levels: list[tuple[int, int]] = []
    for (start, stop), extent in zip(reversed(sizes), reversed(grid_shape), strict=True):
        offset += start * pitch
        length = stop - start
        if not levels and size == pitch:
            size = length * pitch
        elif levels and math.prod(levels[-1]) == pitch:
            # The box has the whole inner dimension, so its rows continue with the same stride.
            levels[-1] = (levels[-1][0] * length, levels[-1][1])
        elif length > 1:
            levels.append((length, pitch))
        pitch *= extent
    count, stride = levels[0] if levels else (1, size)
    outer = levels[:0:-1]
    _check_count(math.prod(length for length, _ in outer))
    starts = np.full((), offset, np.int64)
    for length, step in outer:
        starts = starts[..., None] + np.arange(length, dtype=np.int64) * step
    table = np.empty((starts.size, 4), np.int64)
    table[:, 0] = starts.reshape(-1)
    table[:, 1:] = size, stride, count
    return _runs(table)


def concat(*runs: Runs) -> Runs:
    """Join runs in their order; ValueError if they have more than RUNS_MAX entries together."""
    _check_count(sum(len(each.table) for each in runs))
    return Runs(np.concatenate([np.empty((0, 4), np.int64), *(each.table for each in runs)]))


def pack_host_bytes(runs: Runs, buffers: Sequence[Buffer]) -> list[Buffer]:
    """Return a part in pieces: its head, then the buffers with the data of the runs, which are not copied.

    Raises:
      ValueError: the size of the data is not that of the runs.
    """
    size = sum(memoryview(buffer).nbytes for buffer in buffers)
    if size != runs.num_bytes:
        raise ValueError(f"the data of a part have {size} bytes, but its runs {runs.num_bytes}; both must agree")
    head = np.int64(len(runs.table)).astype("<i8").tobytes() + runs.table.astype("<i8").tobytes()
    return [head, *buffers]


def join_host_bytes(parts: Sequence[HostBytes], size_max: int) -> memoryview:
    """Join the parts of all hosts to the whole payload; empty if one of them is empty.

    The parts come from the network, so everything in them is checked.

    Args:
      size_max: limit of the whole payload, in bytes.

    Raises:
      ValueError: a part cannot be read, or the parts do not have every byte of a payload exactly once.
    """
    all_pieces = [_pieces(part) for part in parts]
    if not all(all_pieces):
        return memoryview(b"")
    tables, sources = [], []
    for number, pieces in enumerate(all_pieces):
        try:
            runs, head_bytes = _read(pieces, min(size_max, _ADDRESS_MAX))
        except ValueError as error:
            raise ValueError(f"part {number}: {error}") from None
        joined = pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))
        tables.append(runs.table)
        sources.append(np.frombuffer(joined, np.uint8, offset=head_bytes))
    entries, size = sum(len(table) for table in tables), sum(source.size for source in sources)
    if entries > JOINED_RUNS_MAX or size > size_max:
        raise ValueError(
            f"{len(parts)} parts have {size} bytes in {entries} entries, the limits are {size_max} and "
            f"{JOINED_RUNS_MAX}: use more fragments"
        )
    if not size:
        return memoryview(b"")
    _check_cover(np.concatenate(tables), size)
    whole = np.empty(size, np.uint8)
    for table, source in zip(tables, sources, strict=True):
        at = 0
        for start, row, stride, count in table.tolist():
            _rows(whole, start, row, stride, count)[...] = source[at : at + row * count].reshape(count, row)
            at += row * count
    return whole.data.toreadonly()


def _runs(table: Int64[np.ndarray, "n 4"]) -> Runs:
    """Return runs in a normal form: rows without gaps become one row, and the stride of a single row is its size."""
    dense = table[:, 1] == table[:, 2]
    table[dense, 1] *= table[dense, 3]
    table[dense, 3] = 1
    single = table[:, 3] == 1
    table[single, 2] = table[single, 1]
    return Runs(table)


def _check_count(entries: int) -> None:
    if entries > RUNS_MAX:
        raise ValueError(
            f"a host's part of a fragment takes {entries} entries, the limit is {RUNS_MAX}: shard its tensors over "
            "fewer dimensions, or use more fragments"
        )


def _pieces(part: HostBytes) -> list[memoryview]:
    """Return flat views of the buffers that are not empty."""
    buffers = [part] if isinstance(part, Buffer) else part
    views = [memoryview(buffer) for buffer in buffers]
    return [view.cast("B") for view in views if view.nbytes]


def _read(pieces: Sequence[memoryview], size_max: int) -> tuple[Runs, int]:
    """Read a part of a payload of at most `size_max` bytes; return its runs, and the offset of its data."""
    size = sum(piece.nbytes for piece in pieces)
    entries = int(np.frombuffer(_bytes(pieces, 0, _COUNT_BYTES), "<i8")[0]) if size >= _COUNT_BYTES else -1
    head_bytes = _COUNT_BYTES + _ENTRY_BYTES * entries
    if not 0 <= entries <= RUNS_MAX or head_bytes > size:
        raise ValueError(f"its {size} bytes do not start with a head of at most {RUNS_MAX} entries")
    table = np.frombuffer(_bytes(pieces, _COUNT_BYTES, head_bytes), "<i8").astype(np.int64).reshape(entries, 4)
    start, row, stride, count = table.T
    # This check comes first, because sums of larger numbers could overflow.
    small = ((table >= 0) & (table <= size_max)).all(axis=1)
    sound = small & (row > 0) & (count > 0) & ((stride >= row) | (count == 1))
    sound[sound] &= (count[sound] - 1) <= (size_max - start[sound] - row[sound]) // np.maximum(stride[sound], 1)
    if not sound.all():
        wrong = table[int(np.argmin(sound))].tolist()
        raise ValueError(f"start, size, stride, count {wrong} is not an entry of a payload of at most {size_max} bytes")
    runs = _runs(table)
    if head_bytes + runs.num_bytes != size:
        raise ValueError(f"its entries have {runs.num_bytes} bytes, its data {size - head_bytes}")
    return runs, head_bytes


def _bytes(pieces: Sequence[memoryview], start: int, stop: int) -> bytes:
    """Return the bytes start..stop-1 of the pieces together."""
    ends = list(accumulate((piece.nbytes for piece in pieces), initial=0))
    views, at = [], bisect_right(ends, start) - 1
    while start < stop:
        views.append(pieces[at][start - ends[at] : stop - ends[at]])
        start, at = ends[at + 1], at + 1
    return b"".join(views)


def _check_cover(table: Int64[np.ndarray, "n 4"], size: int) -> None:
    """Check that entries cover each byte of 0..size-1; since they have `size` bytes, they cover each once."""
    last = table[:, 0] + (table[:, 3] - 1) * table[:, 2] + table[:, 1]
    if (last > size).any():
        raise ValueError(f"the parts have {size} bytes, but one has byte {int(last.max()) - 1}: some are missing")
    # One mark stands for as many bytes as divide all entries, so that this check costs little beside the copy.
    unit = int(np.gcd.reduce(table[:, :3], axis=None))
    marks = np.zeros(size // unit, bool)
    for start, row, stride, count in table.tolist():
        _rows(marks, start // unit, row // unit, stride // unit, count)[...] = True
    if not marks.all():
        missing = int(np.argmin(marks)) * unit
        raise ValueError(f"the parts have {size} bytes, but not byte {missing}, and some bytes twice")


def _rows(whole: np.ndarray, start: int, row: int, stride: int, count: int) -> np.ndarray:
    """Return rows of a flat array as a view [count, row]; the caller has checked that they are within the array."""
    return np.lib.stride_tricks.as_strided(whole[start:], (count, row), (stride * whole.itemsize, whole.itemsize))
