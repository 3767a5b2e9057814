"""Parameters in bfloat16 and float16 meet a float32 global model: nothing moves by itself, and what moves arrives."""

from __future__ import annotations

from typing import get_args

import ml_dtypes
import numpy as np
import pytest

from diloco_jax.core import codec
from diloco_jax.core.codec import Format
from diloco_jax.core.merge import Method
from diloco_jax.settings.run import AdoptConfig
from diloco_jax.training.exchange.exchange import AdoptMode
from tests.runtime.island.rounds import Rounds, encoded

FORMATS, MODES, NARROW = get_args(Format), get_args(AdoptMode), ("bfloat16", "float16")
SHAPES = {"kernel": (40, 33), "bias": (7,), "scale": ()}


def initial(seed: int = 0) -> dict[str, np.ndarray]:
    """Values of many magnitudes, down to float16's subnormal ones; no dtype but float32 holds them."""
    rng = np.random.default_rng(seed)
    return {
        path: np.asarray(rng.standard_normal(shape) * 2.0 ** rng.integers(-24, 4, shape), np.float32)
        for path, shape in SHAPES.items()
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("up", FORMATS)
@pytest.mark.parametrize("dtype", [*NARROW, "float32"])
def test_without_training_there_is_no_outer_gradient(dtype: str, up: Format, mode: AdoptMode) -> None:
    rounds = Rounds(initial(), 2, dtype=dtype, up=up, how=AdoptConfig(mode=mode, alpha=0.7))
    island = rounds.islands[0]

    def gradient() -> dict[str, np.ndarray]:
        return codec.decode(encoded(island.send(0, rounds.round)), rounds.plan.fragments[0].keys_shapes, up)

    for _ in range(3):
        rounds.send()
        assert not any(value.any() for value in gradient().values())
        before = rounds.parameters()
        rounds.merge()
        assert rounds.step_norm(before) == 0
    for seed in range(1, 4 if mode != "blend" else 1):  # others have moved the model; blend keeps what it had before
        rounds.round += 1
        island.adoptions.adopt(0, rounds.round, -1, initial(seed))
        assert not any(value.any() for value in gradient().values())


def arrived(
    dtype: str,
    *,
    up: Format = "float32",
    down: Format = "float32",
    mode: AdoptMode = "overwrite",
    learners: int = 4,
    method: Method = "average",
    rounds: int = 200,
) -> float:
    """Return the share of sparse moves by one unit in the last place that reaches the global model."""
    rng = np.random.default_rng(3)
    start = {"kernel": (rng.standard_normal(4096) + 3 * np.sign(rng.standard_normal(4096))).astype(np.float32)}
    start["kernel"] = start["kernel"].astype(_dtype(dtype)).astype(np.float32)
    made = Rounds(start, learners, dtype=dtype, up=up, down=down, how=AdoptConfig(mode=mode), merge=method)
    moved = np.zeros(4096)
    up_or_down = np.where(rng.random(4096) < 0.5, -np.inf, np.inf).astype(_dtype(dtype))

    def train(number: int) -> None:
        nonlocal moved
        island = made.islands[number]
        values, chosen = island.values()["kernel"], rng.random(4096) < 0.01
        after = np.where(chosen, np.nextafter(values, up_or_down), values)
        moved += (after.astype(float) - values.astype(float)) / learners
        island.put({"kernel": after})

    for _ in range(rounds):
        for number in range(learners):
            train(number)
        made.send()
        if mode == "rebase":  # what is done meanwhile is kept, and goes with the next value
            for number in range(learners):
                train(number)
        made.merge()
    made.send()
    made.merge()
    came = made.parameters()["kernel"].astype(float) - start["kernel"]
    return float(came @ moved / (moved @ moved))


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("up", FORMATS)
@pytest.mark.parametrize("dtype", NARROW)
def test_sparse_moves_by_one_unit_in_the_last_place_arrive(dtype: str, up: Format, mode: AdoptMode) -> None:
    assert arrived(dtype, up=up, mode=mode, rounds=60) == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("down", ["bfloat16", "int8", "int4"])
def test_they_arrive_through_rounded_global_steps_too(down: Format) -> None:
    assert arrived("bfloat16", up="int4", down=down, rounds=60) == pytest.approx(1.0, abs=0.05)
