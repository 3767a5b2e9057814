"""Layouts against what the codec writes, digests, and parts of payloads: which bytes they have, cut and joined."""

import itertools
import math
from typing import NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from diloco_jax.core import host_bytes as parts_module
from diloco_jax.core.codec import Format, encode, encoded_size
from diloco_jax.core.host_bytes import (
    RUNS_MAX,
    Runs,
    concat,
    join_host_bytes,
    pack_host_bytes,
    runs_of_box,
)
from diloco_jax.core.layout import LEAF, Leaf, Piece, combined, make_layout, value_digest
from tests.core.merging import FORMATS, SHAPES, layout_of, random_values


@pytest.mark.parametrize("format", FORMATS)
def test_places_are_where_the_codec_writes(format: Format) -> None:
    layout, values = layout_of(), random_values(0)
    places, payload = layout.places(format), encode(values, format)
    assert layout.payload_bytes(format) == len(payload) == encoded_size(list(SHAPES.values()), format)
    for piece, place in zip(layout.pieces, places, strict=True):
        alone = encode({piece.key: values[piece.key]}, format)
        assert payload[place.scales : place.end] == alone
        scale = {"int8": 4, "int4": 4, "int2": 4, "ternary": 2}.get(format, 0)
        scales = -(-piece.size // 256) * scale
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


def test_the_order_of_pieces_does_not_matter() -> None:
    pieces = [Piece("b", (3,)), Piece("a", (2, LEAF))]
    layout = make_layout(pieces)
    assert layout == make_layout(reversed(pieces))
    assert [piece.key for piece in layout.pieces] == ["a", "b"]
    assert layout.offsets == (0, 2 * LEAF) and layout.size == 2 * LEAF + 3


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


LIMIT = 1 << 20


def places(runs: Runs) -> list[int]:
    """Every byte's place in the whole, one by one."""
    return [
        start + row * stride + byte
        for start, size, stride, count in runs.table.tolist()
        for row in range(count)
        for byte in range(size)
    ]


def part_of(runs: Runs, whole: bytes) -> bytes:
    return b"".join(pack_host_bytes(runs, [bytes(whole[place] for place in places(runs))]))


def entries(*rows: tuple[int, int, int, int], data: bytes = b"") -> bytes:
    return np.array([len(rows), *itertools.chain(*rows)], "<i8").tobytes() + data


class Box(NamedTuple):
    """Part of one array on one host."""

    host: int
    offset: int
    shape: list[int]
    box: tuple[slice, ...]
    item: int


@st.composite
def dealt_boxes(draw: st.DrawFn) -> list[Box]:
    """Arrays one after the other in a payload, each cut into boxes that are dealt out to some hosts."""
    hosts, offset, found = draw(st.integers(1, 3)), 0, []
    for _ in range(draw(st.integers(1, 2))):
        shape = draw(st.lists(st.integers(1, 5), max_size=4))
        item = draw(st.integers(1, 3))
        edges = [sorted({0, extent, *draw(st.lists(st.integers(0, extent), max_size=2))}) for extent in shape]
        for box in itertools.product(*(list(itertools.starmap(slice, itertools.pairwise(each))) for each in edges)):
            found.append(Box(draw(st.integers(0, hosts - 1)), offset, shape, box, item))
        offset += math.prod(shape) * item
    return found


def dealt(boxes: list[Box]) -> tuple[list[Runs], bytes]:
    """The part of the payload that each host has, and the payload."""
    held: list[list[Runs]] = [[] for _ in range(1 + max(each.host for each in boxes))]
    for host, *box in boxes:
        held[host].append(runs_of_box(*box))
    size = boxes[-1].offset + math.prod(boxes[-1].shape) * boxes[-1].item
    return [concat(*each) for each in held], bytes(i * 7 % 251 for i in range(size))


@given(st.lists(st.integers(1, 5), max_size=4), st.integers(1, 3), st.integers(0, 9), st.data())
def test_box_has_the_bytes_that_indexing_has(shape: list[int], item: int, offset: int, data: st.DataObject) -> None:
    box = []
    for extent in shape:
        start = data.draw(st.integers(0, extent))
        box.append(slice(start, data.draw(st.integers(start, extent))))
    whole = np.arange(math.prod(shape) * item).reshape(*shape, item) + offset
    runs = runs_of_box(offset, shape, box, item)
    assert places(runs) == whole[tuple(box)].reshape(-1).tolist()
    assert runs.num_bytes == len(places(runs))


@given(dealt_boxes(), st.data())
def test_parts_join_to_the_payload_in_any_order(boxes: list[Box], data: st.DataObject) -> None:
    runs, whole = dealt(boxes)
    found = data.draw(st.permutations([part_of(each, whole) for each in runs]))
    assert join_host_bytes(found, len(whole)) == whole


@given(dealt_boxes(), st.integers(0, 2), st.integers(-1, 1), st.data())
def test_changed_head_is_refused_or_joins_to_other_places(
    boxes: list[Box], column: int, change: int, data: st.DataObject
) -> None:
    """Whatever a head says, what comes out has every byte of the data once, where the entries say that it is."""
    runs, whole = dealt(boxes)
    tables = [each.table.copy() for each in runs]
    table = data.draw(st.sampled_from(tables))
    if len(table):
        table[data.draw(st.integers(0, len(table) - 1)), column] += change
    found = [
        entries(*table.tolist(), data=part_of(each, whole)[8 + 32 * len(table) :])
        for each, table in zip(runs, tables, strict=True)
    ]
    covered = sorted(place for table in tables for place in places(Runs(table)))
    try:
        joined = join_host_bytes(found, len(whole))
    except ValueError:
        assert [table.tolist() for table in tables] != [each.table.tolist() for each in runs]
        return
    assert covered == list(range(len(whole))) and sorted(joined) == sorted(whole)


def test_rows_of_a_table_are_one_entry() -> None:
    runs = runs_of_box(100, (5000, 64), (slice(None), slice(16, 32)), 4)
    assert runs.table.tolist() == [[164, 64, 256, 5000]]
    layers = runs_of_box(0, (12, 5000, 64), (slice(0, 6), slice(None), slice(16, 32)), 4)
    assert layers.table.tolist() == [[64, 64, 256, 30000]]
    assert runs_of_box(0, (12, 50, 64), (slice(6, 12), slice(None), slice(None)), 4).table.tolist() == [
        [6 * 50 * 256, 6 * 50 * 256, 6 * 50 * 256, 1]
    ]


def test_data_is_not_copied() -> None:
    data = np.arange(64, dtype=np.uint8)
    part = pack_host_bytes(runs_of_box(0, (2, 64), (slice(0, 1), slice(None)), 1), [data.data])
    data[10] = 200
    assert bytes(part[1])[10] == 200


def test_empty_part_makes_the_whole_empty_and_a_host_without_bytes_does_not() -> None:
    whole, nothing = part_of(runs_of_box(0, (3,), (slice(None),), 1), b"abc"), entries()
    assert join_host_bytes([whole, nothing], 3) == b"abc"
    assert join_host_bytes([whole, b""], 3) == join_host_bytes([[], whole], 3) == b""
    assert join_host_bytes([nothing, nothing], 3) == b""


BIG = 1 << 62
WRONG = {
    "no head": (b"1234567", "do not start with a head"),
    "head cut off": (entries((0, 1, 1, 1))[:-1], "do not start with a head"),
    "more entries than allowed": (
        entries((0, 1, 1, 1), data=b"a").replace(b"\x01", b"\xff", 3),
        "do not start with a head",
    ),
    "negative number of entries": (np.int64(-1).tobytes(), "do not start with a head"),
    "negative start": (entries((-1, 1, 1, 1), data=b"a"), "is not an entry"),
    "no bytes": (entries((0, 0, 1, 1)), "is not an entry"),
    "no rows": (entries((0, 1, 1, 0)), "is not an entry"),
    "rows that overlap": (entries((0, 2, 1, 2), data=b"abcd"), "is not an entry"),
    "numbers that wrap around": (entries((0, 2, BIG, 4), data=b"abcdefgh"), "is not an entry"),
    "behind the end": (entries((0, 1, 50, 3), data=b"abc"), "is not an entry"),
    "data too short": (entries((0, 4, 4, 1), data=b"abc"), "have 4 bytes, its data 3"),
    "data too long": (entries((0, 4, 4, 1), data=b"abcde"), "have 4 bytes, its data 5"),
    "a gap": (entries((0, 1, 1, 1), (2, 1, 1, 1), data=b"ab"), "some are missing"),
    "twice": (entries((0, 2, 2, 1), (1, 2, 2, 1), data=b"abcd"), "not byte 3, and some bytes twice"),
}


@pytest.mark.parametrize("name", WRONG)
def test_nonsense_is_refused(name: str) -> None:
    part, words = WRONG[name]
    with pytest.raises(ValueError, match=words):
        join_host_bytes([part], 100)


def test_more_than_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    part = entries((0, 60, 60, 1), data=bytes(60))
    with pytest.raises(ValueError, match="have 120 bytes in 2 entries, the limits are 100"):
        join_host_bytes([part, part], 100)
    monkeypatch.setattr(parts_module, "JOINED_RUNS_MAX", 1)
    with pytest.raises(ValueError, match="in 2 entries"):
        join_host_bytes([part, part], 200)


def test_own_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=rf"takes {RUNS_MAX + 1} entries, the limit is {RUNS_MAX}: shard its tensors"):
        # This selection is one entry.
        runs_of_box(0, (RUNS_MAX + 1, 2, 2), (slice(None), slice(0, 2), slice(0, 1)), 1)
        runs_of_box(0, (RUNS_MAX + 1, 3, 2), (slice(None), slice(0, 2), slice(0, 1)), 1)
    with pytest.raises(ValueError, match="is not within an array of shape"):
        runs_of_box(0, (3,), (slice(0, 4),), 1)
    with pytest.raises(ValueError, match="have 2 bytes, but its runs 3"):
        pack_host_bytes(runs_of_box(0, (3,), (slice(0, 3),), 1), [b"ab"])
