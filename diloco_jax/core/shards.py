"""Shares of merge shards: the elements of every fragment that each shard merges, and their places in a payload.

Only averaged slices may be cut, at multiples of a leaf. Tensors with another method stay whole, because their
coefficients need the norm of the whole tensor. So one shard computes every leaf and every norm, exactly as a single
process would: any number of shards gives the same bits.

Learners and syncer compute the shares from the plan and the settings, so shares never travel.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress

import numpy as np
from jaxtyping import Float32

from diloco_jax.core.codec import BLOCK, Format, block_bytes, element_bytes, is_integer, scale_bytes
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.core.layout import LEAF, Layout, Piece, combined, make_layout, whole
from diloco_jax.core.merge import MergeConfig, Rule, merge_rule

Flat = Float32[np.ndarray, "_"]
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Shares:
    """The assignment of a model's elements to merge shards."""

    # The layout of each whole fragment.
    wholes: tuple[Layout, ...]
    # By shard, the layout of its part of each fragment; without pieces if the shard has nothing of the fragment.
    parts: tuple[tuple[Layout, ...], ...]
    # For each fragment, the rule for merging each slice, by key.
    rules: tuple[Mapping[str, Rule], ...]

    @property
    def count(self) -> int:
        """Return the number of shards."""
        return len(self.parts)

    def holders(self, fragment_id: int) -> tuple[int, ...]:
        """Return the shards that have a part of this fragment."""
        return self._holders[fragment_id]

    @cached_property
    def _holders(self) -> list[tuple[int, ...]]:
        having = [[bool(part.pieces) for part in parts] for parts in self.parts]
        return [tuple(compress(range(self.count), column)) for column in zip(*having, strict=True)]

    def ranges(self, fragment_id: int, shard: int, format: Format) -> list[tuple[int, int]]:
        """Return the ranges start..stop-1 of the whole payload, in bytes, that the shard's payload consists of."""
        layout = self.wholes[fragment_id]
        places = {piece.key: place for piece, place in zip(layout.pieces, layout.places(format), strict=True)}
        part = self.parts[shard][fragment_id]
        found: list[tuple[int, int]] = []
        for piece, own in zip(part.pieces, part.places(format), strict=True):
            place, first = places[piece.key], piece.start // BLOCK
            if is_integer(format):
                scales, codes = place.scales + first * scale_bytes(format), place.codes + first * block_bytes(format)
            else:
                scales = codes = place.codes + piece.start * element_bytes(format)
            append_range(found, scales, scales + own.codes - own.scales)
            append_range(found, codes, codes + own.end - own.codes)
        return found

    def cut(self, fragment_id: int, shard: int, flat: Flat) -> Flat:
        """Return the shard's part of a whole flat array, as a new array."""
        ranges = self.ranges(fragment_id, shard, "float32")
        return np.concatenate([flat[start // 4 : stop // 4] for start, stop in ranges] or [flat[:0]])

    def join(self, fragment_id: int, parts: Mapping[int, Flat]) -> Flat:
        """Join the shards' parts to the whole flat array; with one shard, return its array without a copy."""
        if self.count == 1:
            return parts[0]
        flat = np.empty(self.wholes[fragment_id].size, np.float32)
        for shard in self.holders(fragment_id):
            fill(flat.view(np.uint8).data, self.ranges(fragment_id, shard, "float32"), parts[shard].view(np.uint8).data)
        return flat

    def digest(self, fragment_id: int, leaves: Mapping[int, Sequence[int]]) -> int:
        """Return the digest of a fragment's value from the digests of the leaves, by shard."""
        found = []
        for shard in self.holders(fragment_id):
            part = self.parts[shard][fragment_id]
            for leaf, digest in zip(part.leaves, leaves[shard], strict=True):
                piece = part.pieces[leaf.piece]
                found.append((piece.key, piece.start + leaf.start, digest))
        return combined([digest for _, _, digest in sorted(found)])


def share(plan: FragmentPlan, merge: MergeConfig, count: int, *, cut: bool = True) -> Shares:
    """Assign a model's elements to shards, so that all have about equally much of every fragment.

    Tensors that stay whole are assigned first, in descending size, each to the shard that has least of the fragment so
    far. Then averaged slices fill the shards up to equal shares.

    Args:
      cut: whether averaged slices may be cut; False if the outer optimizer must see whole tensors.

    Raises:
      ValueError: count is below 1.
    """
    if count < 1:
        raise ValueError(f"the number of merge shards is {count}; use at least 1")
    totals = [0] * count
    wholes, rules = [], []
    parts: list[list[Layout]] = [[] for _ in range(count)]
    for fragment in plan.fragments:
        layout, paths = whole(fragment), {piece.key: piece.path for piece in fragment.slices}
        how = {}
        for piece in layout.pieces:
            path = paths[piece.key]
            how[piece.key] = merge_rule(path, piece.shape, plan.kinds[path], merge)
        for shard, pieces in enumerate(_deal(layout, how, totals, cut)):
            parts[shard].append(make_layout(pieces))
            totals[shard] += parts[shard][-1].size
        wholes.append(layout)
        rules.append(how)
    return Shares(tuple(wholes), tuple(tuple(each) for each in parts), tuple(rules))


def split(payload: Buffer | Sequence[Buffer], ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
    """Return views of ranges of a payload, bytes start..stop-1; the payload may come in pieces."""
    pieces, ends = [], [0]
    for piece in [payload] if isinstance(payload, Buffer) else payload:
        pieces.append(memoryview(piece).cast("B"))
        ends.append(ends[-1] + pieces[-1].nbytes)
    views = []
    for start, stop in ranges:
        at = bisect_right(ends, start) - 1
        while start < stop:
            views.append(pieces[at][start - ends[at] : stop - ends[at]])
            start, at = ends[at + 1], at + 1
    return views


def append_range(ranges: list[tuple[int, int]], start: int, stop: int) -> None:
    """Append start..stop-1 unless it is empty, and extend the last range if it ends at `start`."""
    if ranges and ranges[-1][1] == start:
        ranges[-1] = (ranges[-1][0], stop)
    elif start < stop:
        ranges.append((start, stop))


def fill(whole: memoryview, ranges: Sequence[tuple[int, int]], part: Buffer) -> None:
    """Write the bytes of `part` to their ranges of a whole payload; the sizes must agree."""
    source, offset = memoryview(part), 0
    for start, stop in ranges:
        whole[start:stop] = source[offset : offset + stop - start]
        offset += stop - start


def _deal(layout: Layout, rules: Mapping[str, Rule], totals: Sequence[int], cut: bool) -> list[list[Piece]]:
    """Return the pieces of each shard; if two are equally loaded, the one with the smaller total gets the next."""
    count = len(totals)
    if count == 1:
        return [list(layout.pieces)]
    loads, target = [0] * count, math.ceil(layout.size / count)
    ranges: dict[tuple[str, int], list[tuple[int, int]]] = {}

    def cuttable(piece: Piece) -> bool:
        return cut and rules[piece.key].method == "average"

    for piece in sorted(layout.pieces, key=lambda piece: (cuttable(piece), -piece.stop, piece.key)):
        start = 0
        while start < piece.stop:
            shard = min(range(count), key=lambda each: (loads[each], totals[each], each))
            room = max(1, (target - loads[shard]) // LEAF) * LEAF if cuttable(piece) else piece.stop
            stop = min(piece.stop, start + room)
            append_range(ranges.setdefault((piece.key, shard), []), start, stop)
            loads[shard] += stop - start
            start = stop
    shapes = {piece.key: piece.shape for piece in layout.pieces}
    dealt: list[list[Piece]] = [[] for _ in range(count)]
    for (key, shard), own in ranges.items():
        for start, stop in own:
            is_whole = stop - start == math.prod(shapes[key])
            dealt[shard].append(Piece(key, start, stop, shapes[key] if is_whole else (stop - start,)))
    return dealt
