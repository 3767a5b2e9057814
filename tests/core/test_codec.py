"""Codec: exact sizes and layout, the promised error, and the same bytes from the device and the host."""

import os
import shutil
import struct
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numba import types

from diloco_jax.core import codec, memory
from diloco_jax.core.codec import Format, decode, encode, encoded_size
from diloco_jax.core.memory import compiled
from tests.core.merging import SHAPES, code_ties, level_ties
from tests.drawn import examples

FORMATS = get_args(Format)
INTEGERS = ("int8", "int4", "int2", "ternary")

flats = hnp.arrays(np.float32, st.integers(1, 600), elements=st.floats(-(2.0**100), 2.0**100, width=32))


def block_absmax(x: np.ndarray) -> np.ndarray:
    """Return the largest magnitude in each element's block."""
    starts = range(0, x.size, 256)
    return np.concatenate([np.full(x[i : i + 256].size, np.abs(x[i : i + 256]).max()) for i in starts])


def block_level(x: np.ndarray) -> np.ndarray:
    """Return 1.5336 times the mean magnitude of the non-zero elements in each element's block."""
    blocks = [np.abs(x[i : i + 256].astype(np.float64)) for i in range(0, x.size, 256)]
    return np.concatenate([np.full(b.size, 1.5336 * b.sum() / max(1, (b >= 2.0**-126).sum())) for b in blocks])


def error_bound(x: np.ndarray, format: str) -> np.ndarray:
    """Return the bounds of the table in the codec's docstring, with room for rounding the scale."""
    if format == "float32":
        return np.zeros(x.shape)
    if format == "bfloat16":
        return np.abs(x).astype(np.float64) / 256 + 1.2e-38
    if format in ("int2", "ternary"):
        level = block_level(x)
        # The level of ternary has eight bits.
        rounding = level * 2**-8 if format == "ternary" else 0
        return np.maximum(level / 2, np.abs(x) - level) * 1.0001 + rounding + 1e-30
    return block_absmax(x).astype(np.float64) / {"int8": 254, "int4": 14}[format] * 1.0001 + 1e-30


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=examples(40))
@given(x=flats)
def test_rounding_error_is_bounded(format: Format, x: np.ndarray) -> None:
    decoded = decode(encode({"x": x}, format), [("x", x.shape)], format)["x"]
    error = np.abs(decoded.astype(np.float64) - x)
    assert decoded.dtype == np.float32
    assert (error <= error_bound(x, format)).all()
    assert not decoded[x == 0].any()


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=examples(25))
@given(
    st.dictionaries(st.text("abc/[:0]", min_size=1, max_size=4), hnp.array_shapes(max_dims=3, max_side=9)), st.data()
)
def test_size_is_exact_and_order_of_keys_is_free(format: Format, shapes: dict, data: st.DataObject) -> None:
    rng = np.random.default_rng(len(shapes))
    values = {key: rng.standard_normal(shape).astype(np.float32) for key, shape in shapes.items()}
    order = data.draw(st.permutations(list(shapes)))
    payload = encode(values, format)
    assert isinstance(payload, bytes) and len(payload) == encoded_size(shapes.values(), format)
    assert encode({key: values[key] for key in order}, format) == payload
    decoded = decode(payload, [(key, shapes[key]) for key in order], format)
    assert list(decoded) == order
    for key, value in values.items():
        assert decoded[key].shape == value.shape
        error = np.abs(decoded[key] - value).reshape(-1)
        assert (error <= error_bound(value.reshape(-1), format)).all()


@partial(jax.jit, static_argnames="format")
def quantize(tensors: list[np.ndarray], format: Format) -> list[tuple[jax.Array, jax.Array]]:
    """Round flat tensors like the programs of an island, in one program: each program takes a tenth of a second."""
    if format not in INTEGERS:
        return [(codec.round_elements(jnp, x, format), jnp.zeros((0,), jnp.float32)) for x in tensors]
    return [codec.quantize_blocks(jnp, codec.to_blocks(jnp, x), format) for x in tensors]


def check_bytes(tensors: list[np.ndarray], format: Format) -> None:
    """Check that devices and the host encode these tensors to the same bytes."""
    for x, (codes, scales) in zip(tensors, quantize(tensors, format), strict=True):
        encoded = codec.as_bytes(np.asarray(scales)).tobytes() + codec.as_bytes(np.asarray(codes)).tobytes()
        assert encoded == encode({"x": x}, format), f"{x.size} elements"


@pytest.mark.parametrize("format", FORMATS)
def test_device_and_host_give_identical_bytes(format: Format) -> None:
    tensors: list[list[np.ndarray]] = [[], [], []]
    for size in (1, 255, 256, 257, 1001):
        rng = np.random.default_rng(size)
        # From subnormal to large within each block and across blocks, with halves that must round to even.
        x = (rng.standard_normal(size) * 10.0 ** rng.integers(-44, 30, size)).astype(np.float32)
        x[::7] = rng.integers(-20, 20, x[::7].size) / 2
        blocks = np.arange(size) // 256
        tensors[0].append(x)
        tensors[1].append(np.where(blocks == 1, np.float32(1e-40), x))
        tensors[2].append(np.where(blocks == 0, x, 1e-31).astype(np.float32))
    for each in tensors:
        check_bytes(each, format)


def test_host_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).standard_normal(3001).astype(np.float32)
    whole = {format: encode({"x": x}, format) for format in FORMATS}
    monkeypatch.setattr(codec, "_CHUNK", 2)
    assert {format: encode({"x": x}, format) for format in FORMATS} == whole


def test_float32_and_bfloat16_layout() -> None:
    values = {"b": np.array([[2.0, -0.5]], np.float32), "a": np.array([1.0], np.float32)}
    assert encode(values, "float32") == struct.pack("<3f", 1.0, 2.0, -0.5)
    # These are the upper halves of the float32 patterns.
    bits = [0x3F80, 0x4000, 0xBF00]
    assert encode(values, "bfloat16") == struct.pack("<3H", *bits)


def test_bfloat16_flushes_subnormal_numbers_only() -> None:
    smallest = np.finfo(np.float32).smallest_normal
    assert encode({"x": np.array([smallest / 2, -1e-40, smallest], np.float32)}, "bfloat16") == bytes(4) + b"\x80\0"


def test_int8_layout() -> None:
    # The scale is 1, and halves round to even.
    x = np.array([127.0, -127.0, 2.5, 1.5, -0.4], np.float32)
    payload = encode({"x": x}, "int8")
    # Zeros fill the block.
    assert payload[4:] == struct.pack("5b", 127, -127, 2, 2, 0) + bytes(251)
    assert struct.unpack("<f", payload[:4])[0] == pytest.approx(1)


def test_int4_layout() -> None:
    x = np.zeros(260, np.float32)
    x[[0, 1, 2, 3, 128, 129, 131]] = [7.0, -7.0, 2.4, -1.2, 3.0, -3.4, 6.6]  # scale 1
    x[256:] = [14.0, -2.0, 3.2, 4.0]  # scale 2
    payload = encode({"x": x}, "int4")
    np.testing.assert_allclose(struct.unpack("<2f", payload[:8]), [1, 2])
    # Element j of a block in the low half of byte j, element j + 128 in the high half.
    assert payload[8 : 8 + 128] == bytes([0x37, 0xD9, 0x02, 0x7F]) + bytes(124)
    assert payload[8 + 128 :] == bytes([0x07, 0x0F, 0x02, 0x02]) + bytes(124)
    decoded = decode(payload, [("x", x.shape)], "int4")["x"]
    np.testing.assert_allclose(decoded[[0, 1, 2, 3, 128, 129, 131]], [7, -7, 2, -1, 3, -3, 7], rtol=1e-6)
    np.testing.assert_allclose(decoded[256:], [14, -2, 4, 4], rtol=1e-6)


def test_int2_layout() -> None:
    x = np.zeros(260, np.float32)
    # The mean magnitude of these is 1.
    x[[0, 64, 128, 192, 1, 65, 130]] = [1.0, -1.0, 1.0, -1.0, 0.5, 1.75, -0.75]
    # The mean leaves zeros out, so it is 8.
    x[256:] = [8.0, 0.0, -8.0, 0.0]
    payload = encode({"x": x}, "int2")
    np.testing.assert_allclose(struct.unpack("<2f", payload[:8]), [1.5336, 8 * 1.5336], rtol=1e-6)
    # Two bits of each of elements j, j + 64, j + 128 and j + 192 in byte j: 01 is 1, 11 is -1.
    assert payload[8 : 8 + 64] == bytes([0b11_01_11_01, 0b00_00_01_00, 0]) + bytes(61)
    assert payload[8 + 64 :] == bytes([0b01, 0, 0b11, 0]) + bytes(60)
    decoded = decode(payload, [("x", x.shape)], "int2")["x"]
    np.testing.assert_allclose(decoded[[0, 64, 1, 65, 130]], [1.5336, -1.5336, 0, 1.5336, 0], rtol=1e-6)


def ternary_block(x: list[float]) -> bytes:
    """Return the scale and the codes of one block in Python's numbers; sums of `x` must be exact."""
    sizes = [abs(value) for value in x if value]
    mean = np.float32(sum(sizes)) / np.float32(max(1, len(sizes)))
    scale = (mean * np.float32(1.5336 if mean >= 1e-30 else 0)).astype(ml_dtypes.bfloat16)
    codes = [max(-1, min(1, round(value / float(scale)))) if scale else 0 for value in x]
    codes += [0] * (256 - len(codes))
    places = [[codes[j + 52 * k] + 1 for k in range(5) if j + 52 * k < 256] for j in range(52)]
    return scale.tobytes() + bytes(sum(digit * 3**k for k, digit in enumerate(digits)) for digits in places)


def test_ternary_layout() -> None:
    x = [0.0] * 256
    # The mean magnitude is 1, and 1.5336 is nearest to 196 / 128 in eight bits.
    for at, value in {0: 1.0, 52: -1.0, 104: 1.0, 156: -1.0, 208: 1.0, 1: 0.75, 51: 1.25, 255: 1.0}.items():
        x[at] = value
    payload = encode({"x": np.array([*x, 8.0, 0.0, -8.0, 0.0], np.float32)}, "ternary")
    assert payload[:4] == struct.pack("<2H", 0x3FC4, 0x4144) and len(payload) == 2 * 54
    # A byte of zeros has the digits 11111 in base 3, and 1111 at the end. Element 1 rounds to zero.
    zeros, last = int("11111", 3), int("1111", 3)
    first = bytes([int("20202", 3), zeros, *[zeros] * 45, int("21111", 3), *[last] * 3, int("1112", 3)])
    assert payload[4 : 4 + 52] == first
    assert payload[4 + 52 :] == bytes([int("11112", 3), zeros, int("11110", 3), *[zeros] * 45, *[last] * 4])
    decoded = decode(payload, [("x", (260,))], "ternary")["x"]
    assert decoded[[0, 52, 104, 156, 208, 51, 255]].tolist() == [s * 1.53125 for s in (1, -1, 1, -1, 1, 1, 1)]
    assert decoded[256:].tolist() == [12.25, 0.0, -12.25, 0.0] and np.count_nonzero(decoded) == 9


@given(st.lists(st.integers(-40, 40), min_size=1, max_size=256), st.integers(-110, 90))
def test_ternary_blocks_are_those_of_a_few_lines(x: list[int], exponent: int) -> None:
    values = [value * 2.0**exponent for value in x]
    assert encode({"x": np.array(values, np.float32)}, "ternary") == ternary_block(values)


def test_scales_in_bfloat16_are_rounded_to_even_everywhere() -> None:
    means, levels = level_ties()
    scales = np.frombuffer(encode({"x": np.repeat(means, 256)}, "ternary"), ml_dtypes.bfloat16, len(means))
    assert scales.tobytes() == levels.astype(ml_dtypes.bfloat16).tobytes()
    ties = levels.view(np.uint32)[levels.view(np.uint32) & 0xFFFF == 0x8000]
    assert set((ties >> 16 & 1).tolist()) == {0, 1}, "ties round both ways"


def test_half_a_level_is_zero_and_a_little_more_is_not() -> None:
    rows, scales = code_ties()
    decoded = decode(encode({"x": rows}, "ternary"), [("x", rows.shape)], "ternary")["x"]
    same = decoded.max(axis=1) == scales
    assert same.sum() > 20, "the blocks have the scales that they were made for"
    assert not decoded[same, 0].any() and not decoded[same, 2].any() and (decoded[same, 1] == scales[same]).all()


@pytest.mark.parametrize("x", [np.repeat(level_ties()[0], 256), code_ties()[0].reshape(-1)], ids=["level", "code"])
def test_devices_round_ties_of_ternary_like_the_host(x: np.ndarray) -> None:
    check_bytes([x], "ternary")


@pytest.mark.parametrize("format", ["int2", "ternary"])
def test_three_levels_lose_a_fifth_of_a_normal_distribution(format: Format) -> None:
    x = np.random.default_rng(0).standard_normal(2**18).astype(np.float32)
    decoded = decode(encode({"x": x}, format), [("x", x.shape)], format)["x"]
    assert ((decoded - x) ** 2).mean() == pytest.approx(0.1902, abs=0.002)
    for level in (0.9, 1.1):
        # The codes stay, and the level changes.
        other = level * decoded
        assert ((other - x) ** 2).mean() > 0.195


def test_each_block_has_its_own_scale() -> None:
    x = np.concatenate([np.full(256, 1e-6), np.full(256, 1e6), np.zeros(256), np.full(3, 5.0)]).astype(np.float32)
    for format in ("int8", "int4"):
        np.testing.assert_allclose(decode(encode({"x": x}, format), [("x", x.shape)], format)["x"], x, rtol=1e-6)
    assert encoded_size([x.shape], "int4") == 4 * (4 + 128)
    assert encoded_size([x.shape], "int8") == 4 * (4 + 256)
    assert encoded_size([x.shape], "int2") == 4 * (4 + 64)
    assert encoded_size([x.shape], "ternary") == 4 * (2 + 52)
    assert encoded_size([(3, 5), ()], "bfloat16") == 32


@given(flats)
def test_encoding_twice_changes_nothing_more(x: np.ndarray) -> None:
    """Check that a decoded value of a float format is not rounded again when it is encoded again."""
    for format in ("float32", "bfloat16"):
        once = decode(encode({"x": x}, format), [("x", x.shape)], format)["x"]
        assert decode(encode({"x": once}, format), [("x", x.shape)], format)["x"].tobytes() == once.tobytes()


# The last one is NaN with all bits, which would overflow if it were rounded as a number.
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, np.uint32(0x7FFFFFFF).view(np.float32)])
@pytest.mark.parametrize("position", [0, 300])
def test_values_that_are_not_finite(bad: float, position: int) -> None:
    x = np.ones(301, np.float32)
    x[position] = bad
    for format in INTEGERS:
        with pytest.raises(ValueError, match="'x' holds NaN or infinity"):
            encode({"x": x}, format)
        assert not np.isfinite(quantize([x], format)[0][1]).all(), "the devices' scales tell it"
    for format in ("float32", "bfloat16"):
        np.testing.assert_array_equal(decode(encode({"x": x}, format), [("x", x.shape)], format)["x"], x)


@pytest.mark.parametrize("format", FORMATS)
def test_a_payload_of_another_length_is_refused(format: Format) -> None:
    payload = encode({"x": np.ones(10, np.float32)}, format)
    for wrong in (payload[:-1], payload + b"\0", b""):
        with pytest.raises(ValueError, match=f"payload has {len(wrong)} bytes.*take {len(payload)}"):
            decode(wrong, [("x", (10,))], format)


def test_an_impossible_scale_is_refused() -> None:
    payload = encode({"x": np.ones(10, np.float32)}, "int8")
    for scale in (float("nan"), float("inf"), -1.0):
        with pytest.raises(ValueError, match="'x': a scale"):
            decode(struct.pack("<f", scale) + payload[4:], [("x", (10,))], "int8")
    payload = encode({"x": np.ones(10, np.float32)}, "ternary")
    for word in (0x7FC0, 0x7F80, 0xBF80):
        with pytest.raises(ValueError, match="'x': a scale"):
            decode(struct.pack("<H", word) + payload[2:], [("x", (10,))], "ternary")


@pytest.mark.parametrize(("at", "most"), [(0, 242), (47, 242), (48, 80), (51, 80)])
def test_bytes_that_no_sender_writes_are_refused(at: int, most: int) -> None:
    payload = bytearray(encode({"x": np.ones(300, np.float32)}, "ternary"))
    at += 2 * 2 + 52
    payload[at] = most
    decode(payload, [("x", (300,))], "ternary")
    for byte in {most + 1, 243, 255}:
        payload[at] = byte
        with pytest.raises(ValueError, match="'x': a byte of codes is above 242"):
            decode(payload, [("x", (300,))], "ternary")


@pytest.mark.parametrize("format", FORMATS)
def test_decode_reads_any_buffer_and_owns_its_result(format: Format) -> None:
    x = np.arange(9, dtype=np.float32)
    padded = bytearray(b"?" + encode({"x": x}, format))
    payload = memoryview(padded)[1:]  # unaligned
    decoded = decode(payload, [("x", (3, 3))], format)["x"]
    copy = decoded.copy()
    padded[:] = bytes(len(padded))
    np.testing.assert_array_equal(decoded, copy)
    decoded += 1  # writable


def test_half_precision_input_is_widened() -> None:
    x = np.array([1.0, -3.0], ml_dtypes.bfloat16)
    assert encode({"x": x}, "float32") == struct.pack("<2f", 1.0, -3.0)


def test_a_digest_depends_on_the_bytes_and_not_on_how_they_are_cut() -> None:
    payload = encode({"x": np.arange(1000, dtype=np.float32)}, "float32")
    whole = codec.digest(payload)
    assert 0 <= whole < 2**64
    view = memoryview(payload)
    assert codec.digest(bytearray(payload)) == codec.digest([view[:7], view[7:7], payload[7:]]) == whole
    assert codec.digest(b"") == codec.digest([])
    for bit in (0, 8 * 2000 + 3, 8 * len(payload) - 1):
        damaged = bytearray(payload)
        damaged[bit // 8] ^= 1 << bit % 8
        assert codec.digest(damaged) != whole
    # Peers of other versions compute this digest.
    assert codec.digest(b"diloco") == 0x1D2DFBBEF25A4240


ROOT = Path(__file__).resolve().parent.parent.parent


# Every array ends where the readable memory ends, so a read or a write behind it kills the process.
AT_THE_END = """
import ctypes, itertools, mmap
import numpy as np
from diloco_jax.core import blocks, kernels
from tests.core.merging import FORMATS, SHAPES, layout_of, payload_of, random_values

KINDS = {name: getattr(blocks, name.upper()) for name in FORMATS}
protect = ctypes.CDLL(None, use_errno=True).mprotect
held = []

def at_the_end(array):
    pages = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    flat = np.frombuffer(memory, np.uint8)
    assert protect(ctypes.c_void_p(flat.ctypes.data + pages), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    held.append(memory)
    copy = flat[pages - array.nbytes : pages].view(array.dtype)
    copy[:] = array
    return copy

for up, (key, shape) in itertools.product(FORMATS, SHAPES.items()):
    print(up, key, flush=True)
    layout, size = layout_of({key: shape}), int(np.prod(shape))
    values = [random_values(seed, {key: shape}) for seed in range(6)]
    payloads = [at_the_end(payload_of(value, up)) for value in values[:2]]
    moved = at_the_end(layout.flat(values[2]))
    sources = np.array([p.ctypes.data for p in payloads], np.uint64), np.array([moved.ctypes.data, 0], np.uint64)
    place = layout.places(up)[0]
    at = (place.scales, place.codes)
    for moves in (sources[1], np.zeros(2, np.uint64)):
        kernels.gram(sources[0], moves, KINDS[up], at, 0, size, size, at_the_end(np.zeros(4)).reshape(1, 2, 2))
        parts = at_the_end(np.zeros(4 * -(-size // 35))).reshape(-1, 2, 2)
        kernels.gram(sources[0], moves, KINDS[up], at, 0, size, 35, parts)
        halves = at_the_end(np.full(2 * len(parts), 0.5, np.float32)).reshape(-1, 2)
        for down in FORMATS:
            out = layout.places(down)[0]
            step = at_the_end(np.zeros(layout.payload_bytes(down) if down != "float32" else 0, np.uint8))
            flats = [at_the_end(layout.flat(value)) for value in values[3:]]
            new = [at_the_end(np.zeros(size, np.float32)) for _ in range(3)]
            assert kernels.update(
                *(sources[0], moves), halves, 35, KINDS[up], at, 0, *flats, np.float32(0.7),
                np.float32(0.9), KINDS[down], step, (out.scales, out.codes), *new,
            )
            assert all(array.all() for array in new[:2]), "something was not written"
"""


@pytest.mark.skipif(sys.platform != "linux", reason="protects pages with mprotect of Linux")
def test_nothing_behind_an_array_is_touched() -> None:
    result = subprocess.run([sys.executable, "-c", AT_THE_END], cwd=ROOT, capture_output=True, text=True)
    reached = "".join(result.stdout.splitlines()[-1:])
    assert result.returncode == 0, f"exit status {result.returncode} at {reached}\n{result.stderr}"
    assert len(result.stdout.splitlines()) == len(FORMATS) * len(SHAPES)


# Other tests of this process have merged before, so this program runs in a new process.
MERGE = """
from numba.core import event
import jax
import numpy as np
import optax
from diloco_jax.core import blocks, kernels
from diloco_jax.core.merge import Rule
from diloco_jax.core.passes import Merger, State, Values
from diloco_jax.core.outer import Nesterov, Optax
from tests.core.merging import FORMATS, layout_of, payload_of, random_values

layout = layout_of()
rules = [Rule("rda", max(1, (piece.size) // 2)) for piece in layout.pieces]
mergers = [(up, Merger(layout, rules, Nesterov(0.7, 0.9), up, down)) for up in FORMATS for down in FORMATS]
# What optax compiles does not depend on formats.
mergers.append(("int4", Merger(layout, rules, Optax(optax.adam(0.1)), "int4", "int4")))
states = [merger.first(layout.flat(random_values(0))) for _, merger in mergers]
loops = [loop for module in (blocks, kernels) for loop in vars(module).values() if hasattr(loop, "overloads")]
prepared = [len(loop.overloads) for loop in loops]
compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
)
with event.install_recorder("numba:compile") as seen:
    for (up, merger), state in zip(mergers, states, strict=True):
        payloads = [payload_of(random_values(seed), up) for seed in (1, 2, 3)]
        moved = [None, layout.flat(random_values(4)), None]
        # Arrays from a pipe, and arrays that are being read elsewhere, cannot be written to.
        for frozen in (False, True):
            for array in (state.value, state.residual, *state.outer.values()) if frozen else ():
                # All states share one empty array.
                array.flags.writeable = array.size == 0
            values = Values(payloads, moved)
            merger.update(values, merger.inspect(values), np.full(3, 1 / 3), state)
assert not seen.buffer, f"{len(seen.buffer)} times compiled by Numba"
assert prepared == [len(loop.overloads) for loop in loops], "a loop was loaded from the cache"
assert not compiled, compiled
print("merged", len(mergers))
"""
# A loop that is compiled in a second. The others take ten.
ONE_LOOP = """
import numpy as np
from diloco_jax.core import blocks

scale = np.array([-1, 0, np.inf], np.float32)
print([blocks.usable(np.uint64(scale.ctypes.data), blocks.INT8, (0, 12), block) for block in range(3)])
"""


def output_of(program: str, root: Path = ROOT, **changes: str) -> str:
    """Return the output of a new process with the package below a folder."""
    environment = os.environ | {"PYTHONPATH": str(root)} | changes
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_a_first_merge_compiles_nothing() -> None:
    assert output_of(MERGE) == "merged 37"


INNER = """
from numba import njit

@njit(forceinline=True)
def inner():
    return {number}
"""
OUTER = """
from diloco_jax.core.memory import compiled
from loops.inner import inner

@compiled
def outer():
    return inner()
print(outer(), len(outer.stats.cache_hits))
"""


IMPORT = "import loops.outer"
# A process that is killed before it writes the code, after whatever it writes first.
KILLED = f"""
import os
from numba.core.caching import IndexDataCacheFile
IndexDataCacheFile._save_data = lambda *_: os._exit(9)
{IMPORT}
"""


def test_cached_code_is_not_used_after_a_change_of_what_is_inlined_into_it(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}", "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    (tmp_path / "loops").mkdir()
    (tmp_path / "loops" / "outer.py").write_text(OUTER)
    found = []
    # Numbers of different width, because Python takes bytecode of a source with the same second and size.
    for number, program in ((1, IMPORT), (1, IMPORT), (22, KILLED), (22, IMPORT)):
        (tmp_path / "loops" / "inner.py").write_text(INNER.format(number=number))
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
        assert ran.returncode == 9 * (program == KILLED), ran.stderr
        found.append(ran.stdout.split())
    assert found == [["1", "0"], ["1", "1"], [], ["22", "0"]]


def one_more(x: int) -> int:
    return x + 1


def test_damaged_code_and_a_full_disk_cost_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    # pytest loads its modules in another way.
    monkeypatch.setattr(memory, "_sources", lambda names: "")

    def hits() -> int:
        loop = compiled(one_more)
        loop.compile((types.int64,))
        assert loop(1) == 2
        return sum(loop.stats.cache_hits.values())

    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as full:
        full.setattr("numba.core.caching.IndexDataCacheFile._open_for_write", fail)
        assert (hits(), hits()) == (0, 0)
    assert (hits(), hits()) == (0, 1)
    (file,) = tmp_path.rglob("*.nb*")
    for damaged in (b"", file.read_bytes()[:-9]):
        file.write_bytes(damaged)
        assert (hits(), hits()) == (0, 1)


@pytest.fixture
def nowhere(tmp_path: Path) -> dict[str, Any]:
    """Return the arguments of a process whose package is in a folder of somebody else, for a user without a home."""
    package, blocked = tmp_path / "package", tmp_path / "blocked"
    for folder in ("diloco_jax", "tests"):
        shutil.copytree(ROOT / folder, package / folder, ignore=shutil.ignore_patterns("__pycache__"))
    blocked.write_text("a file in the place of a folder", encoding="utf-8")
    (package / "diloco_jax" / "core" / "__pycache__").write_text("", encoding="utf-8")
    caches = {name: str(blocked / "cache") for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
    return {"root": package, "HOME": str(blocked), **caches}


def test_loops_are_compiled_where_no_cache_can_be_written(nowhere: dict[str, Any]) -> None:
    assert output_of(ONE_LOOP, **nowhere) == "[False, True, True]"


@pytest.mark.long
def test_a_first_merge_compiles_nothing_where_no_cache_can_be_written(nowhere: dict[str, Any]) -> None:
    assert output_of(MERGE, **nowhere) == "merged 37"
