"""Encoded moments: exact, in bfloat16, or in blocks of int8; second moments never become smaller."""

import ml_dtypes
import numpy as np
import pytest

from diloco_jax.core import codec
from diloco_jax.training.whole_state.layout import StateLayout
from diloco_jax.training.whole_state.moving import MovingLayout, MovingState

N = 3 * codec.BLOCK + 5
RNG = np.random.default_rng(0)
SECOND = (10.0 ** RNG.uniform(-16, -2, N)).astype(np.float32)
SECOND[[3, 700]] = 0
STATE = {
    "params/w": np.ones(N, np.float32),
    "optimizer/count": np.asarray(7, np.int32),
    "optimizer/mu/w": RNG.standard_normal(N).astype(np.float32).reshape(-1, 1),
    "optimizer/nu/w": SECOND,
    "optimizer/half": np.asarray([1.5, -2, 3], ml_dtypes.bfloat16),
    "optimizer/none": np.zeros((0, 2), np.float32),
    "optimizer/untouched": np.zeros(300, np.float32),
    "optimizer/rate": np.asarray(0.1, np.float32),
    "other/mean": RNG.standard_normal(N).astype(np.float32),
}
FORMATS: tuple[codec.Format, ...] = ("float32", "bfloat16", "int8")


def arrived(format: codec.Format, part_bytes: int = 999) -> dict[str, np.ndarray]:
    layout = MovingLayout(StateLayout(STATE), format)
    moving = MovingState(layout, STATE.__getitem__)
    leaf = layout.read(b"".join(b"".join(moving.part(i, part_bytes)) for i in range(moving.count(part_bytes))))
    found = {name: leaf(name) for name in STATE if not name.startswith("params/")}
    for name, value in layout.rounded(STATE).items():
        np.testing.assert_array_equal(found.get(name, STATE[name]), value, err_msg="a replay rounds in the same way")
    return found


@pytest.mark.parametrize("format", FORMATS)
def test_leaves_other_than_arrays_of_moments_arrive_exactly(format: codec.Format) -> None:
    exact = ["optimizer/count", "optimizer/none", "optimizer/untouched", "optimizer/rate", "other/mean"]
    exact += ["optimizer/mu/w", "optimizer/nu/w"] if format == "float32" else []
    exact += ["optimizer/half"] if format != "int8" else []
    for name, value in arrived(format).items():
        assert (value.dtype, value.shape) == (STATE[name].dtype, STATE[name].shape)
        if name in exact:
            np.testing.assert_array_equal(value, STATE[name], err_msg=name)


def test_moments_arrive_rounded_to_bfloat16() -> None:
    found = arrived("bfloat16")
    for name in ("optimizer/mu/w", "optimizer/nu/w"):
        np.testing.assert_array_equal(found[name], STATE[name].astype(ml_dtypes.bfloat16).astype(np.float32))


def test_blocks_of_int8_are_near_and_second_moments_no_smaller() -> None:
    found = arrived("int8")
    for start in range(0, N, codec.BLOCK):
        first, block = STATE["optimizer/mu/w"][start : start + codec.BLOCK], slice(start, start + codec.BLOCK)
        assert np.max(np.abs(found["optimizer/mu/w"][block] - first)) <= np.max(np.abs(first)) / 253
        want, got = SECOND[block], found["optimizer/nu/w"][block]
        step = np.sqrt(want.max()) / 127
        assert np.all(got >= want * (1 - 1e-6)) and np.all(np.sqrt(got) <= np.sqrt(want) + 1.001 * step)
        np.testing.assert_array_equal(got == 0, want == 0)
    assert MovingLayout(StateLayout(STATE), "int8").bytes.num_bytes < 0.6 * StateLayout(STATE).num_bytes


def test_a_state_in_another_format_is_refused() -> None:
    layout = StateLayout(STATE)
    moving = MovingState(MovingLayout(layout, "int8"), STATE.__getitem__)
    with pytest.raises(ValueError, match="another model or optimizer"):
        MovingLayout(layout, "float32").read(b"".join(moving.part(0, 1 << 20)))
