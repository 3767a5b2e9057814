"""One round's arithmetic against NumPy: bit for bit where it promises bits."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import optax
import pytest

from diloco_jax.core.codec import Format, decode
from diloco_jax.core.layout import LEAF, Layout, combined, value_digest
from diloco_jax.core.merge import Method
from diloco_jax.core.outer import Nesterov, Optax
from diloco_jax.core.passes import Merger, Values, norms, squares_of, subset, values_of
from tests.core.merging import (
    FORMATS,
    NESTEROV,
    SHAPES,
    bits,
    code_ties,
    layout_of,
    level_ties,
    make_merger,
    payload_of,
    random_values,
    reference,
    round_of,
    rules_of,
)

WEIGHTS = np.array([0.5, 0.3, 0.2])
BIG = {"big": (2 * LEAF + 777,), "matrix": (LEAF + 256,), "tiny": (3,)}


@pytest.mark.parametrize("up", FORMATS)
@pytest.mark.parametrize("down", FORMATS)
def test_three_rounds_are_those_of_numpy(up: Format, down: Format) -> None:
    layout = layout_of()
    merger = make_merger(layout, up, down)
    state = merger.first(layout.flat(random_values(0)))
    for turn in range(3):
        payloads = [payload_of(random_values(10 * turn + m + 1), up) for m in range(3)]
        expected, step = reference(layout, payloads, WEIGHTS, state, up, down)
        before = bits(state)
        update = round_of(merger, payloads, WEIGHTS, state)
        assert bits(state) == before, "the old state was changed"
        assert state.residual.size == (layout.size if down != "float32" else 0)
        assert update.finite
        assert update.step.tobytes() == step
        assert bits(update.state) == bits(expected)
        assert combined(update.digests) == value_digest(layout.views(update.state.value))
        state = update.state


@pytest.mark.parametrize(("down", "most"), [("int4", 1 / 7), ("ternary", 2.0)])
def test_what_is_rounded_away_comes_later(down: Format, most: float) -> None:
    layout = layout_of({"x": (256,)})
    merger = make_merger(layout, "float32", down, Nesterov(1.0, 0.0))
    gradient = np.linspace(-1, 1, 256, dtype=np.float32)
    payload, state = payload_of({"x": gradient}, "float32"), merger.first(np.zeros(256, np.float32))
    for _ in range(20):
        state = round_of(merger, [payload], np.ones(1), state).state
        assert not state.outer
    np.testing.assert_allclose(state.value + state.residual, -20 * gradient, atol=1e-4)
    assert np.abs(state.residual).max() <= most


@pytest.mark.parametrize("up", FORMATS)
def test_products_are_those_of_decoded_values(up: Format) -> None:
    layout = layout_of()
    payloads = [payload_of(random_values(m), up) for m in range(4)]
    found = make_merger(layout, up, "int4", method="rda").inspect(values_of(payloads))
    decoded = [decode(p.tobytes(), [(q.key, q.shape) for q in layout.pieces], up) for p in payloads]
    for leaf, products in zip(layout.leaves, found, strict=True):
        rows = np.stack([d[layout.pieces[leaf.piece].key].reshape(-1).astype(np.float64) for d in decoded])
        np.testing.assert_allclose(products, [np.triu(rows @ rows.T)], rtol=1e-6, atol=1e-6)
    flat = [np.concatenate([v.reshape(-1) for v in d.values()]).astype(np.float64) for d in decoded]
    np.testing.assert_allclose(norms(squares_of(found)), [np.linalg.norm(v) for v in flat], rtol=1e-6)


@pytest.mark.parametrize("up", FORMATS)
def test_without_pairs_the_squares_have_the_same_bits(up: Format) -> None:
    layout = layout_of()
    values = values_of([payload_of(random_values(m), up) for m in range(4)])
    pairs = make_merger(layout, up, "int4", method="rda").inspect(values)
    fewest = Merger(layout, rules_of(layout, *["rda"] * 4), NESTEROV, up, "int4", pairs_max=3).inspect(values)
    averaged = make_merger(layout, up, "int4", method="average").inspect(values)
    for found, *others in zip(pairs, fewest, averaged, strict=True):
        for other in others:
            np.testing.assert_array_equal(other, [np.diag(np.diagonal(each)) for each in found])


def backwards(function: Callable[[int], Any], numbers: Iterable[int]) -> Iterable[Any]:
    return reversed([function(number) for number in reversed(list(numbers))])


@pytest.mark.parametrize("up", ["int4", "bfloat16"])
def test_neither_order_nor_threads_change_a_bit(up: Format) -> None:
    whole = layout_of(BIG)
    payloads = [payload_of(random_values(m, BIG), up) for m in range(2)]
    moved = whole.flat(random_values(7, BIG))
    values, weights = Values(payloads, [None, moved]), np.array([0.25, 0.75])
    start = whole.flat(random_values(9, BIG))
    methods: list[Method] = ["rda", "average", "average"]

    def round_with(run: Any) -> tuple[list[bytes], int, list[bytes]]:
        merger = Merger(whole, rules_of(whole, *methods), NESTEROV, up, "int4", run)
        products = merger.inspect(values)
        update = merger.update(values, products, weights, merger.first(start))
        return [*bits(update.state), update.step.tobytes()], combined(update.digests), [p.tobytes() for p in products]

    expected = round_with(map)
    assert round_with(backwards) == expected
    for threads in (1, 2, 4):
        with ThreadPoolExecutor(threads) as pool:
            assert round_with(pool.map) == expected


@pytest.mark.parametrize("up", FORMATS)
def test_a_value_against_an_older_version_is_decoded_and_moved(up: Format) -> None:
    layout = layout_of()
    payload, moved = payload_of(random_values(1), up), layout.flat(random_values(2))
    decoded = layout.flat(decode(payload.tobytes(), [(p.key, p.shape) for p in layout.pieces], up))
    plain, merger = make_merger(layout, "float32", "int4"), make_merger(layout, up, "int4")
    other = payload_of(random_values(3), up)
    values = Values([payload, other], [moved, None])
    same = values_of([(decoded + moved).view(np.uint8), layout.flat(random_values(3)).view(np.uint8)])
    mine, theirs = merger.inspect(values), plain.inspect(same)
    assert [found[:, 0, 0].tolist() for found in mine] == [found[:, 0, 0].tolist() for found in theirs]
    state = merger.first(layout.flat(random_values(4)))
    one = Values([payload], [moved])
    made = merger.update(one, subset(mine, [0]), np.ones(1), state)
    want = plain.update(values_of(same.payloads[:1]), subset(theirs, [0]), np.ones(1), state)
    assert bits(made.state) == bits(want.state) and made.step.tobytes() == want.step.tobytes()


BAD = [(up, what) for up in ("int8", "int4", "int2", "ternary") for what in (np.nan, np.inf, -1.0)]
BAD += [(up, what) for up in ("float32", "bfloat16") for what in (np.nan, np.inf, -np.inf)]


@pytest.mark.parametrize(("up", "what"), BAD)
@pytest.mark.parametrize("with_moved", [False, True])
def test_a_damaged_value_spoils_nothing_but_itself(up: Format, what: float, with_moved: bool) -> None:
    layout = layout_of()
    payloads = [payload_of(random_values(m), up).copy() for m in range(3)]
    place = layout.places(up)[3]  # its second block
    if up == "ternary":
        payloads[1][place.scales + 2 : place.codes].view(ml_dtypes.bfloat16)[:] = what
    elif up in ("int8", "int4", "int2"):
        payloads[1][place.scales + 4 : place.codes].view(np.float32)[:] = what
    else:
        word = np.float32(what).tobytes()
        payloads[1][place.end - (4 if up == "float32" else 2) : place.end] = np.frombuffer(word, np.uint8)[
            0 if up == "float32" else 2 :
        ]
    assert_spoils_itself(layout, payloads, up, with_moved)


@pytest.mark.parametrize(("at", "byte"), [(0, 243), (47, 255), (48, 81), (51, 255)])
@pytest.mark.parametrize("with_moved", [False, True])
def test_damaged_bytes_in_base_3_spoil_nothing_but_their_value(at: int, byte: int, with_moved: bool) -> None:
    layout = layout_of()
    payloads = [payload_of(random_values(m), "ternary").copy() for m in range(3)]
    payloads[1][layout.places("ternary")[3].codes + 52 + at] = byte
    assert_spoils_itself(layout, payloads, "ternary", with_moved)


@pytest.mark.parametrize("up", ["int8", "int4", "int2", "ternary"])
def test_a_merge_refuses_the_payloads_that_the_decoder_refuses(up: Format) -> None:
    """Flip bits, overwrite eight bytes, or draw the whole payload, and compare both judgements."""
    layout, generator = layout_of(), np.random.default_rng(7)
    keys_shapes = [(piece.key, piece.shape) for piece in layout.pieces]
    merger, sound = make_merger(layout, up, "int4"), payload_of(random_values(1), up)
    moved, others = layout.flat(random_values(8)), [payload_of(random_values(m), up) for m in (0, 2)]
    refused = 0
    for turn in range(90):
        payload = generator.integers(0, 256, sound.size, np.uint8) if turn % 3 == 0 else sound.copy()
        at = generator.integers(0, sound.size)
        if turn % 3 == 1:
            payload[at] ^= np.uint8(1 << generator.integers(0, 8))
        elif turn % 3 == 2:
            payload[at : at + 8] = generator.integers(0, 256, len(payload[at : at + 8]), np.uint8)
        try:
            decode(payload.tobytes(), keys_shapes, up)
            usable = True
        except ValueError:
            usable = False
        refused += not usable
        values = Values([others[0], payload, others[1]], [None, moved if turn % 2 else None, None])
        assert np.isfinite(norms(squares_of(merger.inspect(values)))).tolist() == [True, usable, True], turn
    assert 30 <= refused < 90


def assert_spoils_itself(layout: Layout, payloads: list[np.ndarray], up: Format, with_moved: bool) -> None:
    """Check that the second of three payloads is unusable, and that the others' products do not depend on it."""
    moved = [None, None, layout.flat(random_values(8)) if with_moved else None]
    merger = make_merger(layout, up, "int4")
    products = merger.inspect(Values(payloads, moved))
    alone = merger.inspect(Values(payloads[::2], moved[::2]))
    assert np.isfinite(norms(squares_of(products))).tolist() == [True, False, True]
    assert [p.tobytes() for p in subset(products, [0, 2])] == [p.tobytes() for p in alone]


@pytest.mark.parametrize("down", FORMATS)
@pytest.mark.parametrize(
    "outer", [NESTEROV, Nesterov(0.7, 0.0), Optax(optax.adam(0.1))], ids=["nesterov", "sgd", "adam"]
)
def test_a_result_that_is_not_finite_says_so(down: Format, outer: Any) -> None:
    layout = layout_of({"x": (300,)})
    merger = make_merger(layout, "float32", down, outer)
    state = merger.first(np.zeros(300, np.float32))
    # The last one is NaN with all bits, which would overflow if it were rounded as a number.
    for huge in (3e38, -3e38, np.nan, np.uint32(0x7FFFFFFF).view(np.float32)):
        gradient = np.zeros(300, np.float32)
        gradient[299] = huge
        values = values_of([gradient.view(np.uint8)] * 2)
        # The sum of both gradients is beyond float32.
        shares = [np.ones((1, 2), np.float32)]
        assert not merger.apply(values, shares, state).finite
        assert merger.apply(values_of([np.zeros(1200, np.uint8)]), [np.ones((1, 1), np.float32)], state).finite


@pytest.mark.parametrize("size", [1, 127, 128, 255, 256, 257, 1000])
@pytest.mark.parametrize("count", [1, 2, 33])
def test_any_size_and_any_number_of_learners(size: int, count: int) -> None:
    shapes = {"x": (size,)}
    layout = layout_of(shapes)
    merger = make_merger(layout, "int4", "int8")
    payloads = [payload_of(random_values(m, shapes), "int4") for m in range(count)]
    state, weights = merger.first(layout.flat(random_values(99, shapes))), np.full(count, 1 / count)
    expected, step = reference(layout, payloads, weights, state, "int4", "int8")
    update = round_of(merger, payloads, weights, state)
    assert bits(update.state) == bits(expected) and update.step.tobytes() == step


@pytest.mark.parametrize("up", FORMATS)
def test_payloads_at_odd_addresses_are_read_and_their_neighbours_are_not(up: Format) -> None:
    layout = layout_of()
    merger = make_merger(layout, up, "int4")
    payload, state = payload_of(random_values(1), up), merger.first(layout.flat(random_values(0)))

    def run(at: np.ndarray) -> list[Any]:
        products = merger.inspect(values_of([at]))
        update = merger.update(values_of([at]), products, np.ones(1), state)
        return [*bits(update.state), update.step.tobytes(), [p.tobytes() for p in products]]

    expected = run(payload)
    for offset in (1, 2, 3, 61):
        # The bytes around the payload are NaN, or large codes with a scale of NaN.
        around = np.full(payload.size + 2048 + offset, 0xFF, np.uint8)
        around[offset : offset + payload.size] = payload
        assert run(around[offset : offset + payload.size]) == expected


def test_results_are_written_where_they_belong() -> None:
    layout, guard = layout_of(), np.float32(12345)
    merger = make_merger(layout, "int4", "int4")
    state = merger.first(layout.flat(random_values(0)))
    arounds: list[np.ndarray] = []

    def take(size: int) -> np.ndarray:
        arounds.append(np.full(size + 600, guard, np.float32))
        return arounds[-1][301 : 301 + size]

    merger._new = take
    made = round_of(merger, [payload_of(random_values(1), "int4")], np.ones(1), state).state
    assert all(any(np.shares_memory(array, a) for a in arounds) for array in (made.value, made.residual))
    for around in arounds:
        assert (around[:301] == guard).all() and (around[301 + layout.size :] == guard).all()
        assert not (around[301 : 301 + layout.size] == guard).any()


@pytest.mark.parametrize("down", ["float32", "int4"])
def test_an_optax_transformation_sees_the_mean(down: Format) -> None:
    layout = layout_of()
    tx = optax.adam(0.1)
    merger = make_merger(layout, "float32", down, Optax(tx))
    start = random_values(0)
    state = merger.first(layout.flat(start))
    expected, tree = layout.flat(start), tx.init(start)
    for turn in range(3):
        gradients = [random_values(10 * turn + m + 1) for m in range(3)]
        mean = {k: sum(w * g[k] for w, g in zip(WEIGHTS.astype(np.float32), gradients, strict=True)) for k in SHAPES}
        moves, tree = tx.update(mean, tree)
        expected = expected + layout.flat({key: np.asarray(move) for key, move in moves.items()})
        before = bits(state)
        update = round_of(merger, [payload_of(gradient, "float32") for gradient in gradients], WEIGHTS, state)
        assert bits(state) == before and update.finite
        state = update.state
        reached = state.value + state.residual if state.residual.size else state.value
        np.testing.assert_allclose(reached, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("down", FORMATS)
def test_small_numbers_ties_and_zeros_are_encoded_as_by_the_codec(down: Format) -> None:
    shapes = {"x": (6, 256)}
    layout = layout_of(shapes)
    merger = make_merger(layout, "float32", down)
    gradient = np.zeros(shapes["x"], np.float32)
    # Integer codes turn this row into a block of zeros.
    gradient[1] = 1e-31
    # These values are subnormal, on both sides of zero.
    gradient[2, ::2] = np.linspace(-1e-38, 1e-38, 128)
    # These values are half-way between two codes, after a division.
    gradient[3] = np.arange(-128, 128) / 2
    gradient[4] = np.linspace(-1e30, 1e30, 256)
    gradient[5] = -np.float32(0)
    payload = payload_of({"x": gradient}, "float32")
    state = merger.first(layout.flat(random_values(1, shapes)))
    expected, step = reference(layout, [payload], np.ones(1), state, "float32", down)
    update = round_of(merger, [payload], np.ones(1), state)
    assert bits(update.state) == bits(expected) and update.step.tobytes() == step


def test_an_outer_state_that_is_not_finite_says_so() -> None:
    layout = layout_of({"x": (300,)})
    merger = make_merger(layout, "float32", "int4", Optax(optax.adam(0.1)))
    state = merger.first(np.zeros(300, np.float32))
    # The square of this value is beyond float32.
    gradient = np.full(300, 1e25, np.float32)
    update = merger.apply(values_of([gradient.view(np.uint8)]), [np.ones((1, 1), np.float32)], state)
    assert np.isfinite(update.state.value).all() and not update.finite


@pytest.mark.parametrize(("down", "most"), [("int4", 7), ("int8", 127)])
def test_halves_between_two_codes_are_rounded_as_by_the_codec(down: Format, most: int) -> None:
    rng = np.random.default_rng(0)
    rows = []
    for absmax in rng.uniform(0.1, 10, 64).astype(np.float32):
        scale = absmax * np.float32(1 / most)
        row = (rng.integers(-most, most, 256) + np.float32(0.5)).astype(np.float32) * scale
        row[0] = absmax
        rows.append(row)
    gradient = {"x": np.stack(rows)}
    layout = layout_of({"x": (64, 256)})
    merger = make_merger(layout, "float32", down, Nesterov(1.0, 0.0))
    state = merger.first(np.zeros(layout.size, np.float32))
    step = round_of(merger, [payload_of(gradient, "float32")], np.ones(1), state).step
    assert step.tobytes() == payload_of({"x": -gradient["x"]}, down).tobytes()


@pytest.mark.parametrize(
    "rows", [np.repeat(level_ties()[0], 256).reshape(-1, 256), code_ties()[0]], ids=["level", "code"]
)
def test_ties_of_ternary_are_rounded_as_by_the_codec(rows: np.ndarray) -> None:
    layout = layout_of({"x": rows.shape})
    merger = make_merger(layout, "float32", "ternary", Nesterov(1.0, 0.0))
    state = merger.first(np.zeros(layout.size, np.float32))
    step = round_of(merger, [payload_of({"x": rows}, "float32")], np.ones(1), state).step
    assert step.tobytes() == payload_of({"x": -rows}, "ternary").tobytes()
