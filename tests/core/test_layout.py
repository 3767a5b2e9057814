"""Layouts against what the codec writes, and digests of values."""

from __future__ import annotations

import numpy as np
import pytest

from diloco_jax.core.codec import Format, encode, encoded_size
from diloco_jax.core.fragments import plan_fragments, take
from diloco_jax.core.layout import LEAF, Leaf, Piece, combined, make_layout, value_digest, whole
from tests.core.merging import FORMATS, SHAPES, layout_of, random_values


@pytest.mark.parametrize("format", FORMATS)
def test_places_are_where_the_codec_writes(format: Format) -> None:
    layout, values = layout_of(), random_values(0)
    places, payload = layout.places(format), encode(values, format)
    assert layout.payload_bytes(format) == len(payload) == encoded_size(list(SHAPES.values()), format)
    for piece, place in zip(layout.pieces, places, strict=True):
        alone = encode({piece.key: values[piece.key]}, format)
        assert payload[place.scales : place.end] == alone
        scales = -(-(piece.stop - piece.start) // 256) * 4 if format in ("int8", "int4") else 0
        assert place.codes - place.scales == scales


def test_a_flat_array_is_the_float32_payload() -> None:
    layout, values = layout_of(), random_values(0)
    flat = layout.flat(values)
    assert flat.tobytes() == encode(values, "float32")
    views = layout.views(flat)
    assert list(views) == sorted(SHAPES)
    for key, value in values.items():
        np.testing.assert_array_equal(views[key], value)
        assert np.shares_memory(views[key], flat)


def test_leaves_cover_every_element_once() -> None:
    layout = layout_of({"a": (LEAF + 1,), "b": (5, 2), "c": (LEAF,)})
    assert layout.leaves == (Leaf(0, 0, LEAF), Leaf(0, LEAF, LEAF + 1), Leaf(1, 0, 10), Leaf(2, 0, LEAF))
    covered = np.concatenate([np.arange(layout.size)[layout.where(leaf)] for leaf in layout.leaves])
    np.testing.assert_array_equal(covered, np.arange(layout.size))


def test_parts_of_a_slice_hold_its_range() -> None:
    values = {"a": np.arange(2 * LEAF, dtype=np.float32).reshape(2, LEAF)}
    layout = make_layout([Piece("a", LEAF, 2 * LEAF, (LEAF,))])
    np.testing.assert_array_equal(layout.flat(values), values["a"][1])
    assert list(layout.views(layout.flat(values))) == [f"a@{LEAF}"]
    assert [piece.name for piece in layout_of({"a": (4,)}).pieces] == ["a"]


def test_the_order_of_pieces_does_not_matter() -> None:
    pieces = [Piece("b", 0, 3, (3,)), Piece("a", LEAF, LEAF + 2, (2,)), Piece("a", 0, LEAF, (LEAF,))]
    layout = make_layout(pieces)
    assert layout == make_layout(reversed(pieces))
    assert [(piece.key, piece.start) for piece in layout.pieces] == [("a", 0), ("a", LEAF), ("b", 0)]
    assert layout.offsets == (0, LEAF, LEAF + 2) and layout.size == LEAF + 5


def test_a_whole_fragment_has_all_its_slices() -> None:
    values = random_values(0)
    for fragment in plan_fragments(SHAPES, 2).fragments:
        layout = whole(fragment)
        assert [piece.key for piece in layout.pieces] == sorted(key for key, _ in fragment.keys_shapes)
        assert layout.flat(take(values, fragment)).size == fragment.num_elements


def test_a_digest_tells_every_bit_and_every_name_apart() -> None:
    values = random_values(0)
    digest = value_digest(values)
    assert digest == value_digest(dict(reversed(values.items()))), "it depends on the order of the mapping"
    for key, value in values.items():
        changed = value.copy()
        changed.reshape(-1).view(np.uint32)[-1] ^= 1
        assert value_digest(values | {key: changed}) != digest
    zeros = {"a": np.zeros(3, np.float32)}
    assert value_digest(zeros) != value_digest({"a": -zeros["a"]}), "0 and -0 have different bits"


def test_a_digest_is_that_of_its_leaves() -> None:
    shapes = {"a": (LEAF + 1,), "b": (3, 2)}
    layout, values = layout_of(shapes), random_values(0, shapes)
    leaves = layout.leaf_digests(layout.flat(values))
    assert len(leaves) == len(layout.leaves) == 3
    assert value_digest(values) == combined(leaves) != combined(leaves[::-1])


def test_digests_stay_what_they_are() -> None:
    """Learners of another version compare with them, and checkpoints hold them."""
    values = {"a": np.arange(LEAF + 3, dtype=np.float32), "b": np.ones((2, 2), np.float32)}
    assert value_digest(values) == 11277835079477003975
