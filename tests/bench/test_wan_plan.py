"""Needs of a link, against the codec and against rounds reckoned step by step."""

from __future__ import annotations

import pytest
from lab.expected import BITS, StepBytes, decoupled_bytes, ring_bytes, round_rate, sustained_rate

from diloco_jax.core.codec import Format, encoded_size


@pytest.mark.parametrize("format", BITS)
def test_bits_of_an_element_are_those_of_the_codec(format: Format) -> None:
    elements = 256 * 1000
    assert encoded_size([(elements,)], format) == elements * BITS[format] / 8


def test_a_fragment_travels_each_way_in_a_step() -> None:
    assert decoupled_bytes(24 * 256, 24, "int4", "float32") == StepBytes(132, 1024)


def test_a_ring_of_four_moves_three_halves_of_the_gradient_each_way() -> None:
    assert ring_bytes(1000, 4) == StepBytes(3000, 3000)


def test_at_the_round_rate_a_round_just_fits() -> None:
    step, step_s, overlap_steps, round_trip_s = StepBytes(1000, 1500), 0.1, 2, 0.06
    rate = round_rate(step, step_s, overlap_steps, round_trip_s)
    wait_s, pull_s, broadcast_s = step_s / 2, round_trip_s + 8000 / rate, round_trip_s / 2 + 12000 / rate
    assert wait_s + pull_s + broadcast_s == pytest.approx(overlap_steps * step_s)


def test_patience_does_not_make_up_for_a_link_that_cannot_carry_the_steps() -> None:
    step = StepBytes(1000, 3000)
    assert round_rate(step, 0.1, overlap_steps=50) == sustained_rate(step, 0.1) == 240_000


def test_a_round_trip_longer_than_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match=r"raise overlap_steps"):
        round_rate(StepBytes(1, 1), 0.1, overlap_steps=2, round_trip_s=0.1)
