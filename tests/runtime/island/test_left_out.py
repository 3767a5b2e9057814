"""A value that a round left out leaves no trace: not in the residual, not in the parameters, whatever it was."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest

from diloco_jax.core.codec import Format
from diloco_jax.settings.run import AdoptConfig
from diloco_jax.training.exchange.exchange import AdoptMode
from tests.runtime.island.rounds import IslandOf, Rounds

SHAPE = (64, 64)
SETTLE, AFTER = 10, 6


def move(island: IslandOf, rng: np.random.Generator, norm: float = 1.0) -> None:
    """Training: by a usual distance, or another one."""
    direction = rng.standard_normal(SHAPE).astype(np.float32)
    step = direction * np.float32(norm / np.linalg.norm(direction))
    island.put({"kernel": island.values()["kernel"] - step})


def rounds_after_a_bad_value(rounds: Rounds, size: float) -> tuple[list[float], list[set[str]]]:
    """Norms of the global steps, and who was left out; island 0 has one bad value in round SETTLE."""
    rng = np.random.default_rng(5)
    norms, left_out = [], []
    for number in range(SETTLE + AFTER):
        for island in rounds.islands:
            move(island, rng)
        if number == SETTLE:
            move(rounds.islands[0], rng, size)
        rounds.send()
        for island in rounds.islands:
            move(island, rng, 0.5)  # while the values travel
        before = rounds.parameters()
        left_out.append(set(rounds.merge().left_out))
        norms.append(rounds.step_norm(before))
    return norms, left_out


SIZES = (300.0, 8_000.0, 30_000.0, 1e12, math.inf, math.nan)
CASES = [(up, size, "overwrite") for up in get_args(Format) for size in SIZES]


@pytest.mark.parametrize(("up", "size", "mode"), [*CASES, ("int4", 30_000.0, "blend"), ("int4", 30_000.0, "rebase")])
def test_after_a_bad_value_the_next_steps_are_of_the_usual_size(up: Format, size: float, mode: AdoptMode) -> None:
    """Whatever the mode: the parameters that gave the value are replaced."""
    rounds = Rounds({"kernel": np.zeros(SHAPE, np.float32)}, up=up, how=AdoptConfig(mode=mode, alpha=0.75))
    norms, left_out = rounds_after_a_bad_value(rounds, size)
    usual = float(np.median(norms[0 if mode == "overwrite" else 3 : SETTLE]))
    assert left_out == [set()] * SETTLE + [{"0"}] + [set()] * (AFTER - 1), "one bad value, and left out once"
    assert max(norms[SETTLE:]) <= 1.2 * usual, [norm / usual for norm in norms]


def test_what_was_kept_back_of_the_values_before_it_is_not_lost() -> None:
    """Only the value that was left out is lost: all that was learnt before and after it arrives."""
    rounds = Rounds({"bias": np.zeros(500, np.float32)}, 1, up="int4")
    rng = np.random.default_rng(1)
    learnt, (island,) = np.zeros(500), rounds.islands
    for number in range(40):
        step = rng.standard_normal(500).astype(np.float32)
        island.put({"bias": island.values()["bias"] + step})
        learnt += step
        rounds.send()
        if number == 20:  # the round ends without it
            values = rounds.model.slices(rounds.model.capture(), 0)
            island.adoptions.adopt(0, rounds.round, rounds.merged_rounds[0][0], values)
            learnt -= step
            continue
        rounds.merge()
    kept = learnt - rounds.parameters()["bias"]
    assert np.abs(kept).max() < 0.5, "a rounding step of the last value is about 0.5"
