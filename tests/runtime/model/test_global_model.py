"""The model changes only when its owner publishes, and no learner's value can make it worse than useless."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest

from diloco_jax.core.layout import value_digest
from diloco_jax.core.outer import OuterConfig
from diloco_jax.runtime.model.global_model import GlobalModel
from diloco_jax.runtime.model.usable import RATES_KEPT, RATES_MIN
from tests.runtime.models import FRAGMENTS, OWN, gradient, make_model, merge, order


def settle(model: GlobalModel, rounds: int = RATES_MIN, norm: float = 1.0, fragment_id: int = 0) -> int:
    """Rounds of one learner whose values have this norm per step; returns the next global step."""
    for step in range(1, rounds + 1):
        assert merge(model, step, {"a": gradient(model, fragment_id, step, norm)}, fragment_id).state is not None
    return rounds + 1


def test_a_merge_changes_nothing_until_it_is_published() -> None:
    model = make_model()
    before, payload, digests = model.parameters(), model.payload(0), model.digests
    merged = model.merge(order(model, 1, 0, "a"), {"a": gradient(model, 0, 1)})
    assert model.payload(0) == payload and model.digests == digests and model.versions == [0, 0]
    assert all(np.array_equal(before[path], value) for path, value in model.parameters().items())
    model.publish(merged)
    assert merged.state is not None and merged.left_out == {}
    assert model.versions == [1, 0] and model.payload(0) != payload
    assert model.digests[0] == value_digest(model.slices(model.capture(), 0)) == merged.state.digest
    assert model.digests[1] == digests[1]


def test_a_capture_stays_as_it_was_and_can_be_gone_back_to() -> None:
    model = make_model()
    step = settle(model, 3)
    capture, payloads = model.capture(), [model.payload(p) for p in range(FRAGMENTS)]
    first = [merge(model, step + n, {"a": gradient(model, n % 2, 50 + n)}, n % 2) for n in range(4)]
    assert model.payload(0) != payloads[0]
    after = [model.payload(p) for p in range(FRAGMENTS)]
    model.load(capture)
    assert [model.payload(p) for p in range(FRAGMENTS)] == payloads
    again = [merge(model, step + n, {"a": gradient(model, n % 2, 50 + n)}, n % 2) for n in range(4)]
    assert [model.payload(p) for p in range(FRAGMENTS)] == after, "the outer state went back as well"
    assert [m.state.digest for m in first if m.state] == [m.state.digest for m in again if m.state]


@pytest.mark.parametrize(
    "outer", [OuterConfig(), OuterConfig(momentum=0.9), OuterConfig(optimizer="adam"), OuterConfig(module=OWN)]
)
def test_what_is_packed_goes_on_bit_for_bit(outer: OuterConfig) -> None:
    model, other = make_model(outer), make_model(outer)
    step = settle(model, RATES_MIN)
    groups, plain = model.packed(model.capture())
    other.load(other.unpacked(groups, plain))
    assert other.versions == model.versions and other.digests == model.digests
    wild = {"a": gradient(model, 0, 1, norm=500.0)}
    assert merge(model, step, wild).left_out.keys() == merge(other, step, wild).left_out.keys() == {"a"}, "medians too"
    for one in (model, other):
        merge(one, step + 1, {"a": gradient(model, 0, 2), "b": gradient(model, 0, 3)})
    assert other.payload(0) == model.payload(0)


def test_values_of_another_model_are_refused() -> None:
    model = make_model()
    groups, plain = model.packed(model.capture())
    wrong = dict(groups["parameters"])
    wrong["embed"] = wrong["embed"] + 1
    with pytest.raises(ValueError, match="another digest"):
        model.unpacked({**groups, "parameters": wrong}, plain)
    with pytest.raises(ValueError, match="another model"):
        model.unpacked({**groups, "parameters": {"embed": wrong["embed"]}}, plain)


def test_a_restored_value_replaces_the_newest_and_keeps_the_outer_state() -> None:
    model, ahead, before = make_model(), make_model(), make_model()
    settle(model, 2)
    settle(ahead, 4)
    settle(before, 2)
    assert model.fits(0, ahead.digests[0], ahead.payload(0))
    model.restore(0, 4, ahead.payload(0))
    assert model.versions == [4, 0] and model.digests == ahead.digests and model.payload(0) == ahead.payload(0)
    assert model.capture().marks[0].rates == before.capture().marks[0].rates
    kept, was = model.capture().moment.state(0), before.capture().moment.state(0)
    pairs = zip(jax.tree.leaves(kept.outer), jax.tree.leaves(was.outer), strict=True)
    assert all(np.array_equal(ours, theirs) for ours, theirs in pairs)


def test_a_damaged_value_does_not_fit() -> None:
    model = make_model()
    payload, digest = model.payload(0), model.digests[0]
    flipped = bytes([payload[0] ^ 1]) + payload[1:]
    assert model.fits(0, digest, payload)
    assert not model.fits(0, digest, flipped)
    assert not model.fits(0, digest, payload[:-1]) and not model.fits(0, digest, payload + b"\0")
    assert not model.fits(FRAGMENTS, digest, payload) and not model.fits(-1, digest, payload)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_left_out_and_named(poison: float) -> None:
    model, clean = make_model(), make_model()
    bad = np.frombuffer(gradient(model, 0, 9), np.float32).copy()
    bad[3] = poison
    merged = merge(model, 1, {"a": gradient(model, 0, 1), "b": bad.tobytes()})
    merge(clean, 1, {"a": gradient(model, 0, 1)})
    assert merged.left_out.keys() == {"b"} and "NaN or infinity" in merged.left_out["b"]
    assert model.payload(0) == clean.payload(0)


def test_a_value_that_cannot_be_decoded_is_left_out() -> None:
    merged = merge(make_model(), 1, {"a": gradient(make_model(), 0, 1), "b": b"", "c": b"x" * 7})
    assert merged.left_out.keys() == {"b", "c"}


def test_without_a_usable_part_there_is_nothing_to_publish() -> None:
    model = make_model()
    merged = merge(model, 1, {"a": b"", "b": b"1"})
    assert merged.state is None and merged.left_out.keys() == {"a", "b"}
    assert model.versions == [0, 0]


def test_a_wildly_large_value_is_left_out_once_the_usual_size_is_known() -> None:
    model = make_model()
    step = settle(model)
    assert merge(model, step, {"a": gradient(model, 0, 1, norm=90.0)}).state is not None
    before = model.payload(0)
    merged = merge(model, step + 1, {"a": gradient(model, 0, 2, norm=110.0)})
    assert merged.state is None and "is usual (merge.outlier_factor 100)" in merged.left_out["a"]
    assert model.payload(0) == before
    steps = merge(model, step + 2, {"a": gradient(model, 0, 2, norm=110.0)}, steps=2)
    assert steps.state is not None, "the limit is per inner step"


def test_the_past_of_one_fragment_says_nothing_of_another() -> None:
    model = make_model()
    step = settle(model)
    assert merge(model, step, {"a": gradient(model, 1, 2, norm=1e4)}, fragment_id=1).state is not None


def test_no_limit_when_it_is_off_or_the_past_is_short() -> None:
    off = make_model(outlier_factor=0.0)
    step = settle(off)
    assert merge(off, step, {"a": gradient(off, 0, 2, norm=1e6)}).state is not None
    short = make_model()
    step = settle(short, RATES_MIN - 1)
    assert merge(short, step, {"a": gradient(short, 0, 2, norm=1e4)}).state is not None


def test_one_of_three_is_judged_by_the_others_from_the_first_round_on() -> None:
    model = make_model()
    payloads = {"a": gradient(model, 0, 1), "b": gradient(model, 0, 2), "c": gradient(model, 0, 3, norm=300.0)}
    merged = merge(model, 1, payloads)
    assert merged.left_out.keys() == {"c"} and merged.state is not None


def test_a_change_that_concerns_everybody_leaves_nobody_out() -> None:
    """The end of a warm-up: all values are suddenly far above what was usual."""
    model = make_model()
    step = settle(model, norm=1e-3)
    loud = {name: gradient(model, 0, 20 + n, norm=1.0 + n / 10) for n, name in enumerate("abc")}
    assert merge(model, step, loud).left_out == {}


def test_values_that_do_not_move_set_no_standard() -> None:
    """A learning rate of 0 in the first steps: norm 0 is not what is usual."""
    model = make_model()
    step = settle(model, norm=0.0)
    assert model.capture().marks[0].rates == ()
    assert merge(model, step, {name: gradient(model, 0, n) for n, name in enumerate("abc")}).left_out == {}


def test_what_is_small_against_the_fragment_is_never_wildly_large() -> None:
    """Rows of an embedding rest until their token comes by; that is no damage, however unusual."""
    model = make_model()
    step = settle(model, norm=1e-9)
    norm = math.sqrt(sum(float((value**2).sum()) for value in model.slices(model.capture(), 0).values()))
    assert merge(model, step, {"a": gradient(model, 0, 1, norm=0.9e-3 * norm)}).left_out == {}
    assert merge(model, step + 1, {"a": gradient(model, 0, 2, norm=0.2 * norm)}).left_out.keys() == {"a"}


def test_the_past_is_bounded() -> None:
    model = make_model()
    settle(model, RATES_KEPT + 5)
    assert len(model.capture().marks[0].rates) == RATES_KEPT


def test_finite_values_that_overflow_together_never_reach_the_model() -> None:
    model, clean = make_model(outlier_factor=0.0), make_model(outlier_factor=0.0)
    good = gradient(model, 0, 1)
    huge = np.full(len(good) // 4, 3e38, np.float32).tobytes()
    merged = merge(model, 1, {"a": good, "b": huge, "c": gradient(model, 0, 3)})
    merge(clean, 1, {"a": good, "c": gradient(model, 0, 3)})
    assert merged.left_out.keys() == {"b"} and "not finite" in merged.left_out["b"]
    assert model.payload(0) == clean.payload(0)
    assert all(np.isfinite(value).all() for value in model.parameters().values())
