"""Held blocks: what hosts hold of a fragment, cut from whole payloads and put together again."""

import numpy as np
import pytest

from diloco_jax.core import codec
from diloco_jax.core.codec import BLOCK, Format
from diloco_jax.core.fragments import plan_fragments
from diloco_jax.core.held import (
    HeldBlocks,
    blocks_of_boxes,
    check_table,
    everything,
    expanded,
    one_buffer,
    regrouped,
    table_of,
)
from diloco_jax.core.host_bytes import join_host_bytes
from diloco_jax.core.layout import value_digest, whole

FRAGMENT = plan_fragments({"a": (12, 4, 320), "b": (7, 11), "c": (1,), "d": (2048, 600)}, 1).fragments[0]
LAYOUT = whole(FRAGMENT)
FORMATS: tuple[Format, ...] = ("float32", "bfloat16", "int8", "int4", "int2", "ternary")


def drawn(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {key: rng.standard_normal(shape).astype(np.float32) for key, shape in FRAGMENT.keys_shapes}


def columns(shape: tuple[int, ...], host: int, hosts: int) -> tuple[slice, ...]:
    """The host's share of the last axis."""
    at = [shape[-1] * each // hosts for each in (host, host + 1)]
    return (*(slice(0, size) for size in shape[:-1]), slice(*at))


def held_by(host: int, hosts: int = 3) -> HeldBlocks:
    boxes = [columns(piece.shape, host, hosts) for piece in LAYOUT.pieces]
    pairs = zip(LAYOUT.pieces, boxes, strict=True)
    return HeldBlocks(LAYOUT, tuple(table_of(blocks_of_boxes(piece.shape, [box])) for piece, box in pairs))


def touched(shape: tuple[int, ...], box: tuple[slice, ...]) -> list[int]:
    """The blocks with an element of the box, one element after the other."""
    numbers = np.arange(np.prod(shape)).reshape(shape)
    return sorted({int(each) // BLOCK for each in numbers[box].reshape(-1)})


@pytest.mark.parametrize("host", range(3))
def test_blocks_are_those_with_an_element_of_the_box(host: int) -> None:
    for number, piece in enumerate(LAYOUT.pieces):
        assert expanded(held_by(host).tables[number]).tolist() == touched(piece.shape, columns(piece.shape, host, 3))


@pytest.mark.parametrize("seed", range(20))
def test_a_table_describes_the_blocks_that_it_was_made_from(seed: int) -> None:
    rng = np.random.default_rng(seed)
    blocks = np.flatnonzero(rng.random(200) < rng.random())
    table = table_of(blocks)
    assert expanded(table).tolist() == blocks.tolist()
    assert len(table_of(3 + 7 * np.arange(50))) == 1
    check_table(table, LAYOUT.pieces[-1])


@pytest.mark.parametrize("seed", range(10))
def test_a_table_of_any_rows_is_expanded_in_their_order(seed: int) -> None:
    rng, rows, start = np.random.default_rng(seed), [], 0
    for _ in range(int(rng.integers(0, 12))):
        size, count = map(int, rng.integers(1, 5, 2))
        stride, start = size + int(rng.integers(0, 4)), start + int(rng.integers(0, 4))
        rows.append((start, size, stride, count))
        start += (count - 1) * stride + size
    blocks = [at + each * stride + n for at, size, stride, count in rows for each in range(count) for n in range(size)]
    found = expanded(np.array(rows, np.int64).reshape(-1, 4))
    assert found.dtype == np.int64 and found.tolist() == blocks


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("host", range(3))
def test_a_cut_decodes_to_the_elements_of_its_blocks(format: Format, host: int) -> None:
    held, values = held_by(host), drawn()
    payload = codec.encode(values, format)
    decoded = codec.decode(payload, FRAGMENT.keys_shapes, format)
    cut = one_buffer(regrouped([(everything(LAYOUT), payload)], held, format))
    assert len(cut) == held.layout.payload_bytes(format) < len(payload)
    found = codec.decode(cut, [(piece.key, piece.shape) for piece in held.layout.pieces], format)
    expected = {}
    for number, piece in enumerate(LAYOUT.pieces):
        blocks = expanded(held.tables[number]).tolist()
        flat = decoded[piece.key].reshape(-1)
        if blocks:
            expected[piece.key] = np.concatenate([flat[BLOCK * at : BLOCK * at + BLOCK] for at in blocks])
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(found[key], value)
    flat = LAYOUT.flat(decoded)
    assert held.digest(flat) == value_digest(expected)
    mine = held.slices(held.layout.flat(found))
    for piece in LAYOUT.pieces:
        box = columns(piece.shape, host, 3)
        np.testing.assert_array_equal(mine[piece.key][box], decoded[piece.key][box])
        np.testing.assert_array_equal(np.asarray(mine[piece.key])[box], decoded[piece.key][box])


@pytest.mark.parametrize("format", FORMATS)
def test_cuts_give_other_cuts_and_the_whole_again(format: Format) -> None:
    payload = codec.encode(drawn(), format)
    cuts = [
        (held, one_buffer(regrouped([(everything(LAYOUT), payload)], held, format))) for held in map(held_by, range(3))
    ]
    assert one_buffer(regrouped(cuts, everything(LAYOUT), format)) == payload
    for held, cut in cuts:
        assert one_buffer(regrouped(cuts[::-1], held, format)) == cut
    with pytest.raises(ValueError, match="no source has block"):
        regrouped(cuts[:2], everything(LAYOUT), format)
    with pytest.raises(ValueError, match="bytes, but its blocks in"):
        regrouped([(cuts[0][0], cuts[0][1][1:])], cuts[0][0], format)


def test_parts_of_a_value_are_joined_to_the_whole() -> None:
    values, parts, taken = drawn(), [], [np.empty(0, np.int64)] * len(LAYOUT.pieces)
    for host in range(3):
        held = held_by(host)
        cut = regrouped([(everything(LAYOUT), codec.encode(values, "float32"))], held, "float32")
        own = [np.setdiff1d(expanded(table), before) for table, before in zip(held.tables, taken, strict=True)]
        taken = [np.union1d(before, each) for before, each in zip(taken, own, strict=True)]
        owned = HeldBlocks(LAYOUT, tuple(map(table_of, own)))
        parts.append(b"".join(owned.host_bytes(held.slices(np.frombuffer(one_buffer(cut), np.float32)))))
    assert bytes(join_host_bytes(parts, 1 << 30)) == codec.encode(values, "float32")


@pytest.mark.parametrize(
    "row", [(0, 0, 1, 1), (0, 1, 1, 0), (-1, 1, 1, 1), (0, 2, 1, 2), (4800, 1, 1, 1), (0, 1, 1 << 62, 9), (3, 1, 1, 1)]
)
def test_a_row_that_describes_no_blocks_of_the_slice_is_refused(row: tuple[int, ...]) -> None:
    piece = LAYOUT.pieces[-1]
    assert piece.size == 4800 * BLOCK
    check_table(np.array([(0, 4, 4, 1), (4, 2, 2, 1)]), piece)
    with pytest.raises(ValueError, match="is not a row of the 4800 blocks of 'd'"):
        check_table(np.array([row, (3, 1, 1, 1)] if row[0] == 3 else [row]), piece)


def test_a_part_of_a_slice_that_is_not_held_is_refused() -> None:
    held = held_by(0)
    mine = held.slices(np.zeros(held.layout.size, np.float32))
    with pytest.raises(ValueError, match="not held here"):
        mine["d"][:, 400:600]
