"""Every element has one shard, shards have equal work, and the hosts' bytes join to the same payload."""

import itertools
import math

import numpy as np
import pytest

from diloco_jax.core import codec
from diloco_jax.core.fragments import FragmentPlan, plan_fragments, take
from diloco_jax.core.layout import LEAF, value_digest
from diloco_jax.core.merge import MergeConfig
from diloco_jax.core.shards import fill, share, split

SHAPES = {
    "embed": (1 << 12, 257),
    "unembed": (1000, 300),
    "norm": (300,),
    **{f"layer_{n}/{name}": (300, width) for n in range(6) for name, width in (("in", 900), ("out", 450), ("gate", 7))},
}
FORMATS: tuple[codec.Format, ...] = ("float32", "bfloat16", "int8", "int4", "int2", "ternary")


def plan() -> FragmentPlan:
    return plan_fragments(SHAPES, 3)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_every_element_has_one_shard(count: int) -> None:
    shares = share(plan(), MergeConfig(), count)
    for fragment_id, layout in enumerate(shares.wholes):
        seen = np.zeros(layout.size, np.int32)
        places = {piece.key: offset for piece, offset in zip(layout.pieces, layout.offsets, strict=True)}
        for shard in range(count):
            for piece in shares.parts[shard][fragment_id].pieces:
                seen[places[piece.key] + piece.start : places[piece.key] + piece.stop] += 1
        assert (seen == 1).all()


@pytest.mark.parametrize("count", [2, 3, 4])
def test_fragments_are_balanced_and_only_averaged_slices_are_cut(count: int) -> None:
    shares = share(plan(), MergeConfig(), count)
    cuts = 0
    for fragment_id, layout in enumerate(shares.wholes):
        sizes = [shares.parts[shard][fragment_id].size for shard in range(count)]
        assert max(sizes) - min(sizes) <= LEAF
        slices = {piece.key: piece for piece in layout.pieces}
        for shard in range(count):
            for piece in shares.parts[shard][fragment_id].pieces:
                assert piece.start % LEAF == 0
                if piece != slices[piece.key]:
                    cuts += 1
                    assert piece.shape == (piece.stop - piece.start,)
                    assert shares.rules[fragment_id][piece.key].method == "average"
    assert cuts > 0, "this model has a slice that must be cut"


def test_what_a_shard_has_of_one_slice_is_in_as_few_pieces_as_can_be() -> None:
    shares = share(plan(), MergeConfig(), 3)
    for parts in shares.parts:
        for layout in parts:
            ends = {(piece.key, piece.stop) for piece in layout.pieces}
            assert not any((piece.key, piece.start) in ends for piece in layout.pieces)


def test_an_optimizer_of_whole_tensors_gets_whole_slices() -> None:
    shares = share(plan(), MergeConfig(method="average"), 4, cut=False)
    for fragment_id, layout in enumerate(shares.wholes):
        dealt = [piece for parts in shares.parts for piece in parts[fragment_id].pieces]
        assert sorted(dealt) == list(layout.pieces)


def test_a_small_fragment_has_shards_without_a_part() -> None:
    shares = share(plan_fragments({"a": (4, 4), "b": (3, 3), "c": (5,)}, 1), MergeConfig(), 4)
    assert len(shares.holders(0)) == 3
    assert [parts[0].size for parts in shares.parts].count(0) == 1


def test_a_count_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="use at least 1"):
        share(plan(), MergeConfig(), 0)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("pieces", [1, 5])
def test_a_payload_is_the_same_after_it_was_split_and_joined(format: codec.Format, pieces: int) -> None:
    rng = np.random.default_rng(3)
    shares = share(plan(), MergeConfig(), 3)
    for fragment_id, layout in enumerate(shares.wholes):
        values = layout.views(rng.normal(size=layout.size).astype(np.float32))
        payload = codec.encode(values, format)
        edges = [len(payload) * n // pieces for n in range(pieces + 1)]
        buffers = [payload[a:b] for a, b in itertools.pairwise(edges)]
        joined = bytearray(len(payload))
        for shard in shares.holders(fragment_id):
            ranges = shares.ranges(fragment_id, shard, format)
            views = split(buffers, ranges)
            part = shares.parts[shard][fragment_id]
            assert sum(view.nbytes for view in views) == part.payload_bytes(format)
            if pieces == 1:
                own = part.views(part.flat(values)).values()
                encoded = b"".join(codec.encode({"piece": piece}, format) for piece in own)
                assert b"".join(views) == encoded, "as if the shard had encoded it"
            fill(memoryview(joined), ranges, b"".join(views))
        assert joined == payload


def test_values_and_digests_come_together_again() -> None:
    rng = np.random.default_rng(4)
    parameters = {path: rng.normal(size=shape).astype(np.float32) for path, shape in SHAPES.items()}
    shares = share(plan(), MergeConfig(), 4)
    for fragment_id, fragment in enumerate(plan().fragments):
        values = take(parameters, fragment)
        flat = shares.wholes[fragment_id].flat(values)
        parts = {shard: shares.cut(fragment_id, shard, flat) for shard in range(4)}
        assert np.array_equal(shares.join(fragment_id, parts), flat)
        leaves = {shard: shares.parts[shard][fragment_id].leaf_digests(parts[shard]) for shard in range(4)}
        assert shares.digest(fragment_id, leaves) == value_digest(values)


def test_a_split_payload_is_not_copied() -> None:
    payload = bytearray(range(100))
    views = split(payload, [(10, 20), (90, 100)])
    payload[10] = 255
    assert views[0][0] == 255 and [view.nbytes for view in views] == [10, 10]
    assert math.prod(view.nbytes for view in split([payload[:15], payload[15:]], [(10, 20)])) == 25
