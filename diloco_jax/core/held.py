"""Held blocks: the part of a fragment that one host of an island holds, and its bytes in a payload.

A host holds what its devices hold of each slice, rounded to blocks of 256 elements: a block is the smallest part of a
payload that can be decoded alone. The blocks follow each other in ascending order, as if they were the whole slice. So
`HeldBlocks.layout` is an ordinary layout, and its arrays and payloads are those of a smaller fragment.

A table describes blocks of one slice by rows of start, size, stride and count: the blocks start..start+size-1, and the
same again after every `stride` blocks, `count` times. Rows ascend and do not overlap.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float32, Int64, UInt8

from diloco_jax.core.codec import BLOCK, Bytes, Format, block_bytes, element_bytes, is_integer, scale_bytes
from diloco_jax.core.host_bytes import Buffer, Runs, concat, pack_host_bytes, runs_of_box
from diloco_jax.core.layout import LEAF, Layout, Piece, Place, combined, leaf_digest, make_layout

# Numbers of blocks of one slice, ascending.
Blocks = Int64[np.ndarray, "_"]
Table = Int64[np.ndarray, "_ 4"]
# The place of a part of an array, along each of its axes.
Box = tuple[slice, ...]
BLOCK_BYTES = 4 * BLOCK


@dataclass(frozen=True, eq=False)
class HeldBlocks:
    """Some blocks of a fragment."""

    # The layout of the whole fragment.
    whole: Layout
    # For each piece of `whole`, its blocks.
    tables: tuple[Table, ...]

    @cached_property
    def layout(self) -> Layout:
        """Return the layout of arrays and payloads with these blocks only; its pieces have one axis."""
        sizes = [_elements(table, piece) for table, piece in zip(self.tables, self.whole.pieces, strict=True)]
        pairs = zip(self.whole.pieces, sizes, strict=True)
        return make_layout(Piece(piece.key, (size,)) for piece, size in pairs if size)

    def digest(self, flat: Float32[np.ndarray, "n"]) -> int:
        """Return the digest of these blocks of a whole flat array, as `layout.value_digest` of an array of them."""
        found = []
        for table, piece, offset in zip(self.tables, self.whole.pieces, self.whole.offsets, strict=True):
            raw = flat[offset : offset + piece.size].view(np.uint8)
            values = _rows_of(raw, BLOCK_BYTES, expanded(table)).view(np.float32)
            found += [leaf_digest(values[start : start + LEAF]) for start in range(0, values.size, LEAF)]
        return combined(found)

    def slices(self, flat: Float32[np.ndarray, "n"]) -> "dict[str, HeldSlice]":
        """Return the slices of an array with the layout `layout`, by key."""
        views = self.layout.views(flat)
        return {
            piece.key: HeldSlice(piece.shape, table, views.get(piece.key, flat[:0]))
            for piece, table in zip(self.whole.pieces, self.tables, strict=True)
        }

    def host_bytes(self, slices: "dict[str, HeldSlice]") -> list[Buffer]:
        """Return these blocks of a host's values as its part of the whole payload in float32 (host_bytes.py)."""
        runs, data = [], list[Buffer]()
        for table, piece, offset in zip(self.tables, self.whole.pieces, self.whole.offsets, strict=True):
            runs.append(Runs(_element_rows(table, piece.size) * [4, 4, 4, 1] + [4 * offset, 0, 0, 0]))
            data.append(slices[piece.key].take(expanded(table)).view(np.uint8).data)
        return pack_host_bytes(concat(*runs), data)


@dataclass(frozen=True, eq=False)
class HeldSlice:
    """The blocks of one slice that a host holds; an index within them gives an array."""

    shape: tuple[int, ...]
    table: Table
    # The elements of the blocks.
    values: Float32[np.ndarray, "n"]

    def take(self, blocks: Blocks) -> Float32[np.ndarray, "n"]:
        """Return the elements of some of the blocks."""
        places = _places(expanded(self.table), blocks)
        return _rows_of(self.values.view(np.uint8), BLOCK_BYTES, places).view(np.float32)

    def __getitem__(self, box: Box) -> Float32[np.ndarray, "..."]:
        """Return a box of the slice; ValueError if the host does not hold all of it."""
        if self.values.size == math.prod(self.shape):
            return self.values.reshape(self.shape)[box]
        bounds = [each.indices(size)[:2] for each, size in zip(box, self.shape, strict=True)]
        found = np.empty([stop - start for start, stop in bounds], np.float32)
        held, flat, at = expanded(self.table), found.reshape(-1), 0
        for start, size, stride, count in runs_of_box(0, self.shape, [slice(*each) for each in bounds], 1).table:
            starts = start + stride * np.arange(count)
            if size % BLOCK == start % BLOCK == stride % BLOCK == 0:
                blocks = (starts[:, None] // BLOCK + np.arange(size // BLOCK)).reshape(-1)
                rows = _rows_of(self.values.view(np.uint8), BLOCK_BYTES, _places(held, blocks)).view(np.float32)
            else:
                elements = (starts[:, None] + np.arange(size)).reshape(-1)
                rows = self.values[BLOCK * _places(held, elements // BLOCK) + elements % BLOCK]
            flat[at : at + rows.size] = rows
            at += rows.size
        return found

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> Float32[np.ndarray, "..."]:
        """Return the whole slice, with zeros where the host holds nothing."""
        del copy
        whole = np.zeros(math.prod(self.shape), np.float32)
        at = 0
        for start, size, stride, count in _element_rows(self.table, whole.size).tolist():
            for row in range(start, start + stride * count, stride):
                whole[row : row + size] = self.values[at : at + size]
                at += size
        return whole.reshape(self.shape).astype(dtype or np.float32, copy=False)


def everything(whole: Layout) -> HeldBlocks:
    """Return all blocks of a fragment."""
    return HeldBlocks(whole, tuple(table_of(np.arange(_count(piece))) for piece in whole.pieces))


def blocks_of_boxes(shape: Sequence[int], boxes: Iterable[Box]) -> Blocks:
    """Return the blocks of a slice that have an element of one of these boxes."""
    # The sum up to a block is the number of rows that reach into it.
    changes = np.zeros(math.ceil(math.prod(shape) / BLOCK) + 1, np.int64)
    for box in boxes:
        bounds = [slice(*each.indices(size)[:2]) for each, size in zip(box, shape, strict=True)]
        for start, size, stride, count in runs_of_box(0, shape, bounds, 1).table:
            starts = start + stride * np.arange(count)
            np.add.at(changes, starts // BLOCK, 1)
            np.add.at(changes, (starts + size - 1) // BLOCK + 1, -1)
    return np.flatnonzero(np.cumsum(changes[:-1]))


def table_of(blocks: Blocks) -> Table:
    """Describe blocks by as few rows as possible, from the first one on."""
    if not blocks.size:
        return np.empty((0, 4), np.int64)
    ends = np.append(np.flatnonzero(np.diff(blocks) != 1), blocks.size - 1)
    starts = blocks[np.append(0, ends[:-1] + 1)]
    sizes, strides = blocks[ends] - starts + 1, np.diff(starts)
    rows, at = list[tuple[int, int, int, int]](), 0
    while at < len(starts):
        # Ranges of one size at one distance are one row.
        same = (sizes[at + 1 :] == sizes[at]) & (strides[at:] == strides[at : at + 1])
        count = 1 + (int(np.argmin(same)) if not same.all() else same.size)
        stride = int(strides[at]) if count > 1 else int(sizes[at])
        rows.append((int(starts[at]), int(sizes[at]), stride, count))
        at += count
    return np.array(rows, np.int64)


def expanded(table: Table) -> Blocks:
    """Return the blocks that a table describes."""
    # Without a loop over rows, because a peer may state many of them, and each version expands them again.
    start, size, stride, count = table.T
    starts = np.repeat(start - stride * (np.cumsum(count) - count), count)
    starts += np.repeat(stride, count) * np.arange(starts.size)
    sizes = np.repeat(size, count)
    blocks = np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
    blocks += np.arange(blocks.size)
    return blocks


def check_table(table: Table, piece: Piece) -> None:
    """Check a table that a peer stated; ValueError names a row that does not describe blocks of this piece."""
    count = _count(piece)
    # Larger numbers could overflow the products below.
    sound = ((table >= 0) & (table <= count)).all(axis=1)
    start, size, stride, repeats = table.T
    sound &= (size > 0) & (repeats > 0) & (stride >= size)
    ends = start + (repeats - 1) * stride + size
    sound &= (ends <= count) & np.append(ends[:-1] <= start[1:], True)[: len(table)]
    if not sound.all():
        wrong = table[int(np.argmin(sound))].tolist()
        raise ValueError(f"start, size, stride, count {wrong} is not a row of the {count} blocks of {piece.key!r}")


def regrouped(sources: Sequence[tuple[HeldBlocks, Bytes]], target: HeldBlocks, format: Format) -> list[memoryview]:
    """Return the payload of some blocks, made of payloads that have them together; views where nothing is copied.

    Args:
      sources: blocks, and the payload with these blocks.

    Raises:
      ValueError: a payload has the wrong size, or no source has one of the blocks.
    """
    found = list[memoryview]()
    places = [_places_by_key(held, payload, format) for held, payload in sources]
    for number, piece in enumerate(target.whole.pieces):
        blocks = expanded(target.tables[number])
        if not blocks.size:
            continue
        having = [
            (expanded(held.tables[number]), np.frombuffer(payload, np.uint8), place[piece.key])
            for (held, payload), place in zip(sources, places, strict=True)
            if piece.key in place
        ]
        if is_integer(format):
            scales = [(own, raw[at.scales : at.codes]) for own, raw, at in having]
            found.append(_picked(scales, blocks, scale_bytes(format)))
            found.append(
                _picked([(own, raw[at.codes : at.end]) for own, raw, at in having], blocks, block_bytes(format))
            )
        else:
            data = [(own, raw[at.codes : at.end]) for own, raw, at in having]
            found.append(_picked(data, blocks, BLOCK * element_bytes(format)))
    return found


def one_buffer(pieces: Sequence[memoryview]) -> Bytes:
    """Return the pieces of a payload as one buffer, without a copy if there is only one."""
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _places_by_key(held: HeldBlocks, payload: Bytes, format: Format) -> dict[str, Place]:
    places, size = held.layout.places(format), memoryview(payload).nbytes
    if size != (expected := held.layout.payload_bytes(format)):
        raise ValueError(f"payload has {size} bytes, but its blocks in {format} take {expected}")
    return {piece.key: place for piece, place in zip(held.layout.pieces, places, strict=True)}


def _picked(sources: Sequence[tuple[Blocks, UInt8[np.ndarray, "_"]]], blocks: Blocks, unit: int) -> memoryview:
    """Return `unit` bytes of each block, from the first source that has it; the last block may have fewer."""
    if len(sources) == 1:
        own, raw = sources[0]
        return _rows_of(raw, unit, _places(own, blocks)).data
    whole = np.empty(blocks.size * unit, np.uint8)
    rows, missing, last = whole.reshape(-1, unit), np.ones(blocks.size, bool), unit
    for own, raw in sources:
        _, here, there = np.intersect1d(blocks, own, assume_unique=True, return_indices=True)
        picked = _rows_of(raw, unit, there)
        missing[here] = False
        if short := -picked.size % unit:
            last = unit - short
            rows[here[-1], :last] = picked[-last:]
            here, picked = here[:-1], picked[:-last]
        rows[here] = picked.reshape(-1, unit)
    if missing.any():
        raise ValueError(f"no source has block {blocks[int(np.argmax(missing))]}")
    return whole[: whole.size - unit + last].data


def _rows_of(raw: UInt8[np.ndarray, "n"], unit: int, places: Blocks) -> UInt8[np.ndarray, "m"]:
    """Return these rows of `unit` bytes of a flat array, as a view if they follow each other; the last may be short."""
    if not places.size:
        return raw[:0]
    first, last = int(places[0]), int(places[-1])
    if last - first == places.size - 1:
        return raw[first * unit : (last + 1) * unit]
    whole = raw.size // unit
    taken = np.take(raw[: whole * unit].reshape(-1, unit), places[places < whole], axis=0).reshape(-1)
    return np.concatenate([taken, raw[whole * unit :]]) if last == whole else taken


def _places(held: Blocks, wanted: Blocks) -> Blocks:
    """Return where in `held` each of the wanted blocks is; ValueError if one is missing."""
    places = np.searchsorted(held, wanted)
    if wanted.size and (not held.size or (held[np.minimum(places, held.size - 1)] != wanted).any()):
        raise ValueError("a block is not held here")
    return places


def _count(piece: Piece) -> int:
    return math.ceil(piece.size / BLOCK)


def _elements(table: Table, piece: Piece) -> int:
    return int(_element_rows(table, piece.size)[:, [1, 3]].prod(axis=1).sum())


def _element_rows(table: Table, size: int) -> Table:
    """Return a table in elements of a slice of `size` elements; the last block may have fewer than others."""
    rows = table * [BLOCK, BLOCK, BLOCK, 1]
    if not len(rows):
        return rows
    start, length, stride, count = rows[-1].tolist()
    last = start + (count - 1) * stride
    if last + length <= size:
        return rows
    ends = [[start, length, stride, count - 1]] if count > 1 else []
    return np.array([*rows[:-1].tolist(), *ends, [last, size - last, size - last, 1]], np.int64)
