"""The pass over an arriving value against `codec.decode`, a sum and `value_digest` in NumPy, bit for bit."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from diloco_jax.core import codec
from diloco_jax.core.arrival import Arrival
from diloco_jax.core.codec import Bytes, Format
from diloco_jax.core.layout import LEAF, Layout, value_digest
from tests.core.merging import FORMATS, SHAPES, layout_of

INTEGERS: tuple[Format, ...] = ("int8", "int4", "int2", "ternary")
# Empty slices, a scalar, one element less and more than a block, whole leaves and a bit more.
ODD = {"none": (0, 7), "scalar": (), "a": (255,), "b": (3, 257), "c": (LEAF,), "d": (2 * LEAF + 300,), "e": (0,)}
SMALL = {"none": (0, 7), "a": (255,), "b": (3, 257), "d": (256,)}
# The arithmetic of NaN is not part of the contract, all other values are.
SPECIAL = np.array([0.0, -0.0, 1e-45, -1e-40, 3e38, -3e38, 1.0, np.inf], np.float32)


def drawn_step(layout: Layout, format: Format, seed: int) -> bytearray:
    """Any payload that a sender may write: all codes, scales of very different sizes, zeros among them."""
    rng = np.random.default_rng(seed)
    payload = rng.integers(0, 256, layout.payload_bytes(format), np.uint8)
    for place in layout.places(format):
        if codec.is_integer(format):
            scales = payload[place.scales : place.codes].view(codec.scale_type(format))
            scales[:] = np.exp2(rng.integers(-140, 20, scales.size)) * rng.integers(0, 3, scales.size)
        else:
            numbers = payload[place.codes : place.end].view(np.float32 if format == "float32" else ml_dtypes.bfloat16)
            numbers[:] = rng.standard_normal(numbers.size) * np.exp2(rng.integers(-140, 100, numbers.size))
            numbers[: min(4, numbers.size)] = SPECIAL[: min(4, numbers.size)]
        if format == "ternary":
            blocks = payload[place.codes : place.end].reshape(-1, 52)
            blocks[:, :48] %= 243
            blocks[:, 48:] %= 81
    return bytearray(payload.tobytes())


def drawn_base(layout: Layout, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    base = (rng.standard_normal(layout.size) * np.exp2(rng.integers(-130, 20, layout.size))).astype(np.float32)
    base[: min(layout.size, SPECIAL.size)] = SPECIAL[: layout.size]
    return base


def by_numpy(layout: Layout, payload: Bytes, format: Format, base: np.ndarray | None) -> tuple[bytes, int]:
    # Numbers beyond float32 become infinite in both ways.
    with np.errstate(over="ignore", invalid="ignore"):
        decoded = codec.decode(payload, [(piece.key, piece.shape) for piece in layout.pieces], format)
        if base is not None:
            decoded = {key: np.asarray(value + decoded[key]) for key, value in layout.views(base).items()}
    return layout.flat(decoded).tobytes(), value_digest(decoded)


def found(result: tuple[np.ndarray, int]) -> tuple[bytes, int]:
    return result[0].tobytes(), result[1]


def outcome(work: Callable[[], tuple[bytes, int]]) -> Any:
    try:
        return work()
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shapes", [SHAPES, ODD, {"only": (0,)}], ids=["usual", "odd", "empty"])
def test_a_step_gives_the_bits_and_the_digest_of_numpy(format: Format, shapes: Mapping[str, tuple[int, ...]]) -> None:
    layout = layout_of(shapes)
    base, payload = drawn_base(layout, 1), drawn_step(layout, format, 2)
    before = base.tobytes()
    arrival = Arrival(layout, format)
    for _ in range(2):
        value, digest = arrival.step(payload, base)
        assert (value.tobytes(), digest) == by_numpy(layout, payload, format, base)
        assert base.tobytes() == before, "the value before was changed"
        base, before = value, value.tobytes()


@pytest.mark.parametrize("format", FORMATS)
def test_payloads_of_any_kind_are_read_at_any_address(format: Format) -> None:
    layout = layout_of()
    base, payload = drawn_base(layout, 1), drawn_step(layout, format, 2)
    expected = by_numpy(layout, payload, format, base)
    for offset in (1, 2, 3):
        shifted = memoryview(bytes(offset) + bytes(payload))[offset:]
        assert found(Arrival(layout, format).step(shifted, base)) == expected


def test_a_whole_value_keeps_every_bit() -> None:
    layout = layout_of(ODD)
    payload = np.random.default_rng(0).integers(0, 256, 4 * layout.size, np.uint8).tobytes()
    assert np.isnan(np.frombuffer(payload, np.float32)).any()
    assert found(Arrival(layout, "int4").whole(payload)) == by_numpy(layout, payload, "float32", None)
    assert found(Arrival(layout, "int4").whole(memoryview(b"x" + payload)[1:]))[0] == payload


@pytest.mark.parametrize("format", FORMATS)
def test_neither_order_nor_threads_change_a_bit(format: Format) -> None:
    layout = layout_of(ODD)
    base, payload = drawn_base(layout, 1), drawn_step(layout, format, 2)

    def backwards(work: Callable[[int], Any], numbers: Iterable[int]) -> list[Any]:
        made = {number: work(number) for number in reversed([*numbers])}
        return [made[number] for number in sorted(made)]

    with ThreadPoolExecutor(4) as pool:
        expected = by_numpy(layout, payload, format, base)
        assert found(Arrival(layout, format, backwards).step(payload, base)) == expected
        assert found(Arrival(layout, format, pool.map).step(payload, base)) == expected
        raw = base.tobytes()
        assert found(Arrival(layout, format, pool.map).whole(raw)) == by_numpy(layout, raw, "float32", None)


@pytest.mark.parametrize("format", INTEGERS)
@pytest.mark.parametrize("scale", [np.nan, -np.nan, np.inf, -np.inf, -1.0, -1e-40, -0.0, 0.0, 3e38])
def test_scales_are_refused_as_by_the_codec(format: Format, scale: float) -> None:
    layout = layout_of(SMALL)
    base, arrival = drawn_base(layout, 1), Arrival(layout, format)
    width = codec.scale_bytes(format)
    damaged = np.asarray(scale, np.float32).astype(codec.scale_type(format)).tobytes()
    for place in layout.places(format):
        for at in {place.scales, place.codes - width} if place.codes > place.scales else ():
            payload = drawn_step(layout, format, 2)
            payload[at : at + width] = damaged
            expected = outcome(lambda payload=payload: by_numpy(layout, payload, format, base))
            usable = scale >= 0 and np.isfinite(np.frombuffer(damaged, codec.scale_type(format)).astype(np.float32)[0])
            assert isinstance(expected, tuple) == usable
            assert outcome(lambda payload=payload: found(arrival.step(payload, base))) == expected


@pytest.mark.parametrize(("at", "byte"), [(0, 242), (0, 243), (47, 255), (48, 80), (48, 81), (51, 255)])
def test_damaged_bytes_in_base_3_are_refused_as_by_the_codec(at: int, byte: int) -> None:
    layout = layout_of(SMALL)
    base, arrival = drawn_base(layout, 1), Arrival(layout, "ternary")
    for place in layout.places("ternary"):
        for block in {place.codes, place.end - 52} if place.end > place.codes else ():
            payload = drawn_step(layout, "ternary", 2)
            payload[block + at] = byte
            expected = outcome(lambda payload=payload: by_numpy(layout, payload, "ternary", base))
            assert isinstance(expected, str) == (byte > (242 if at < 48 else 80))
            assert outcome(lambda payload=payload: found(arrival.step(payload, base))) == expected


@pytest.mark.parametrize("format", INTEGERS)
def test_several_damages_give_the_error_of_the_codec(format: Format) -> None:
    """The first slice decides, and in one slice a scale before codes, in whatever leaf they are."""
    layout = layout_of(SMALL)
    base, arrival, rng = drawn_base(layout, 1), Arrival(layout, format), np.random.default_rng(3)
    told = set()
    for _ in range(60):
        payload = drawn_step(layout, format, 2)
        for at in rng.integers(0, len(payload), rng.integers(1, 40)):
            payload[at] = 255
        expected = outcome(lambda payload=payload: by_numpy(layout, payload, format, base))
        assert outcome(lambda payload=payload: found(arrival.step(payload, base))) == expected
        told.add(expected if isinstance(expected, str) else "")
    assert len(told) > 1
    layout = layout_of({"d": (LEAF + 300,)})
    payload, (place,), width = drawn_step(layout, format, 2), layout.places(format), codec.scale_bytes(format)
    payload[place.codes - width : place.codes] = b"\xff" * width
    payload[place.codes] = 255
    with pytest.raises(ValueError, match=r"'d': a scale is negative or not finite"):
        Arrival(layout, format).step(payload, drawn_base(layout, 1))


@pytest.mark.parametrize("format", FORMATS)
def test_a_wrong_size_gives_the_error_of_the_codec(format: Format) -> None:
    layout = layout_of()
    base, payload = drawn_base(layout, 1), bytes(drawn_step(layout, format, 2))
    for wrong in (payload[:-1], payload + b"\0", b""):
        expected = outcome(lambda wrong=wrong: by_numpy(layout, wrong, format, base))
        assert isinstance(expected, str)
        assert outcome(lambda wrong=wrong: found(Arrival(layout, format).step(wrong, base))) == expected
    short = base.tobytes()[:-4]
    expected = outcome(lambda: by_numpy(layout, short, "float32", None))
    assert outcome(lambda: found(Arrival(layout, format).whole(short))) == expected
