"""The rule of exclusion on values of models: it measures what learners moved, and keeps its history with the model.

tests/protocol/test_exclusion.py has the rule itself, on small numbers.
"""

import math
from collections.abc import Callable, Iterable

import numpy as np
import pytest

from diloco_jax.core import codec
from diloco_jax.core.fragments import put, take
from diloco_jax.protocol.effects import Contribution, Merge
from diloco_jax.protocol.exclusion import RATES_MIN
from diloco_jax.runtime.model.global_model import GlobalModel
from tests.runtime.model.honest import AdamW, Sent, bursts, make_model, merge
from tests.runtime.models import go_on, saved

SIZE = 64
EMBED, KERNEL = "embed", "kernel"


def two_fragments(embed: float = 0.1) -> GlobalModel:
    """An embedding, fragment 0, and a kernel of as many parameters, fragment 1, of length 0.8."""
    return make_model({EMBED: np.full((8, 8), embed, np.float32), KERNEL: np.full((8, 8), 0.1, np.float32)}, 2)


def one_fragment(value: float = 0.1) -> GlobalModel:
    """A kernel."""
    return make_model({KERNEL: np.full((8, 8), value, np.float32)}, 1)


def sent(model: GlobalModel, norm: float, steps: int = 24, base: int | None = None, fragment_id: int = 0) -> Sent:
    """A value of this norm, the same in every parameter."""
    ((key, shape),) = model.plan.fragments[fragment_id].keys_shapes
    value = np.full(shape, norm / math.sqrt(SIZE), np.float32)
    return Sent({key: value}, steps, model.versions[fragment_id] if base is None else base)


def settle(model: GlobalModel, norm: float, rounds: int = RATES_MIN, fragment_id: int = 0, number: int = 1) -> int:
    """Rounds of one learner whose values have this norm after 24 steps; returns the next round's number."""
    for step in range(number, number + rounds):
        assert not merge(model, step, fragment_id, {"a": sent(model, norm, fragment_id=fragment_id)}).excluded
    return number + rounds


def lasting(model: GlobalModel, number: int, norms: Iterable[float], names: str = "a", steady: str = "") -> list[bool]:
    """Tell of each round whether learner `a` is left out.

    Args:
        model: whose fragment 0 it is.
        norms: of what learners add in the 24 steps of each round; what was not merged is in their next value.
        steady: one that sends a norm of 0.024 all the time.
    """
    found, held, steps = [], 0.0, 0
    for n, norm in enumerate(norms):
        held, steps = held + norm, steps + 24
        values = {name: sent(model, held, steps) for name in names}
        values |= {name: sent(model, 0.024) for name in steady}
        merged = merge(model, number + n, 0, values)
        found.append("a" in merged.excluded)
        if merged.state is not None:
            held, steps = 0.0, 0
    return found


def test_rows_that_rested_move_again() -> None:
    """Weight decay alone moved them by 1e-6; then their tokens come by, and they move as the kernel does."""
    model = two_fragments()
    number = settle(model, 0.24, fragment_id=1)
    number = settle(model, 24e-6, rounds=32, number=number)
    assert lasting(model, number, [0.24]) == [False]


def test_a_fragment_that_begins_at_zero_may_move() -> None:
    model = two_fragments(embed=0.0)
    number = settle(model, 0.024, fragment_id=1)
    number = settle(model, 1e-9, number=number)
    assert lasting(model, number, [0.024]) == [False]


def test_a_fragment_that_begins_at_zero_has_the_models_length() -> None:
    """A move of less than a thousandth of that is harmless, though nothing else is known."""
    model = two_fragments(embed=0.0)
    number = settle(model, 24e-9)
    assert lasting(model, number, [24 * 0.9e-3 * math.sqrt(SIZE) * 0.1 / math.sqrt(2)]) == [False]


def test_a_late_learner_answers_for_its_own_steps() -> None:
    """Others went far since the version that it holds; it made one step."""
    model = make_model({KERNEL: np.full((8, 8), 0.1, np.float32)}, 1)
    number = settle(model, 0.024)
    for step in range(number, number + 2):
        merge(model, step, 0, {"a": sent(model, 2.0)})
    damaged = sent(model, 2.4, steps=1, base=number - 1)
    assert merge(model, number + 2, 0, {"c": damaged}).excluded.keys() == {"c"}
    late = sent(model, 0.001, steps=1, base=number - 1)
    merged = merge(model, number + 3, 0, {"b": late})
    assert not merged.excluded and merged.state is not None
    assert merged.state.history.rates[-1] == pytest.approx(0.001)


# Each change of the rule that any of the first six seeds notices is noticed by one of these.
@pytest.mark.parametrize(("seed", "dense"), [(0, True), (1, True), (1, False), (2, False), (4, False)])
def test_sparse_embeddings_are_merged(seed: int, dense: bool) -> None:
    """AdamW on rows that rest for hundreds of steps, beside a dense kernel or alone."""
    rng = np.random.default_rng(seed)
    rows = int(rng.choice([64, 128, 256]))
    parameters = {EMBED: rng.normal(0, 0.02, (rows, 16)).astype(np.float32)}
    if dense:
        parameters[KERNEL] = rng.normal(0, 0.02, (32, 32)).astype(np.float32)
    model, fragments = make_model(parameters, len(parameters)), len(parameters)
    decay, b2 = float(rng.choice([0, 0.01, 0.1])), float(rng.choice([0.95, 0.99, 0.999]))
    learner, tokens = AdamW(parameters, rng, rng.uniform(1e-3, 3e-3), b2, decay), bursts(rng, rows)
    anchors = [model.slices(model.capture(), fragment_id) for fragment_id in range(fragments)]
    steps, in_a_row, excluded = [0] * fragments, [0] * fragments, 0
    for number in range(1, 100 * fragments + 1):
        fragment_id = number % fragments
        for _ in range(24 // fragments):
            learner.step(next(tokens))
            steps = [count + 1 for count in steps]
        local = take(learner.parameters, model.plan.fragments[fragment_id])
        values = {key: anchor - local[key] for key, anchor in anchors[fragment_id].items()}
        merged = merge(model, number, fragment_id, {"a": Sent(values, steps[fragment_id], model.versions[fragment_id])})
        in_a_row[fragment_id] = in_a_row[fragment_id] + 1 if merged.excluded else 0
        excluded += len(merged.excluded)
        assert max(in_a_row) <= 2, f"left out of rounds up to {number}"
        if merged.state is not None:
            anchors[fragment_id], steps[fragment_id] = model.slices(model.capture(), fragment_id), 0
            learner.parameters = dict(put(learner.parameters, model.plan.fragments[fragment_id], anchors[fragment_id]))
    assert excluded <= (0 if dense else 4)


def test_single_huge_values_are_left_out_and_one_is_one_strike() -> None:
    """Every fifth value is damaged, each otherwise; the values between are merged."""
    model, rng = one_fragment(), np.random.default_rng(5)
    wild: Callable[[], float] = lambda: 0.024 * 10 ** rng.uniform(2.5, 30)  # noqa: E731
    norms = [wild() if n % 5 == 2 else 0.024 for n in range(50)]
    assert lasting(model, settle(model, 0.024), norms, "a", "b") == [n % 5 == 2 for n in range(50)]


def test_what_is_known_survives_a_snapshot_bit_for_bit() -> None:
    model, other = two_fragments(), two_fragments()
    number = settle(model, 0.24, fragment_id=1)
    number = settle(model, 0.0024, number=number)
    assert lasting(model, number, [0.7 * 100, 0.7 * 100]) == [True, True]
    arrays, plain = saved(model)
    assert plain.keys() == {"versions", "digests", "rates", "peaks", "odd", "elsewhere"}, "as older releases saved them"
    assert plain["odd"][0][0] == ["a", number - 1, 24, pytest.approx(70.0), pytest.approx(70.0 / 24), True, False]
    go_on(other, (arrays, plain))
    assert other.capture().marks == tuple(mark._replace(base=-1) for mark in model.capture().marks)
    for one in (model, other):
        merged = merge(one, number + 2, 0, {"a": sent(one, 3 * 70.0, 72)})
        assert not merged.excluded, "the third round"
    assert model.capture().marks[0] == other.capture().marks[0]


def test_a_replay_excludes_the_same_learners_as_the_run() -> None:
    """A replay takes the run's decision, because a value that was damaged on its way is whole in a replay."""
    model, again = one_fragment(), one_fragment()
    for number in range(1, 20):
        values = {name: sent(model, 0.024 * (1 + n)) for n, name in enumerate("ab")}
        damaged = {**values, "a": sent(model, 240.0)} if number % 10 == 9 else values
        merged = merge(model, number, 0, damaged)
        assert merged.excluded.keys() == ({"a"} if number % 10 == 9 else set())
        parts = tuple(Contribution(name, number, 24, 64 * 24, one.base, 4) for name, one in values.items())
        payloads = {name: codec.encode(one.values, "float32") for name, one in values.items()}
        repeated = again.merge(Merge(number, 0, parts), payloads, merged.excluded)
        again.publish(repeated)
        assert repeated.excluded.keys() == merged.excluded.keys() and again.digests == model.digests
        assert again.capture().marks[0].history.rates == model.capture().marks[0].history.rates


def test_a_tape_brings_back_the_histories_of_all_fragments() -> None:
    model, again = two_fragments(), two_fragments()
    for number in range(1, 3 * RATES_MIN):
        fragment_id, norm = number % 2, 2400.0 if number == 2 * RATES_MIN else 0.024 * (1 + number % 3)
        values = {"a": sent(model, norm, fragment_id=fragment_id), "b": sent(model, 0.03, fragment_id=fragment_id)}
        merged = merge(model, number, fragment_id, values)
        assert bool(merged.excluded) == (number == 2 * RATES_MIN)
        parts = [Contribution(name, number, one.steps, 64 * one.steps, one.base, 4) for name, one in values.items()]
        again.recall(fragment_id, merged.evidence, parts)
        assert again.histories == model.histories
    assert all(len(history.rates) >= RATES_MIN and history.elsewhere for history in again.histories)
    assert model.histories[0].outliers and again.versions == [0, 0]
