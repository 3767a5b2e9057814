"""What one contribution did in a merge: the version without it, from a model that never got it."""

import numpy as np
import pytest

from diloco_jax.core import codec
from diloco_jax.core.outer import OuterConfig
from tests.runtime.models import LEAFY, LEAFY_PLAN, drawn, gradient, leafy_payload, make_model, merge, model_of, order

NAMES = "abc"


def test_the_change_leads_to_the_version_of_a_model_that_lacks_the_contribution() -> None:
    model, other = make_model(), make_model()
    for step in (1, 2, 3):
        payloads = {name: gradient(model, 0, 10 * step + n, 1.0 + n) for n, name in enumerate(NAMES)}
        merged = model.merge(order(model, step, 0, NAMES), payloads, without="b")
        assert merged.subtracted is not None and merged.subtracted[:2] == ("b", 0)
        # Both start from the same version and the same outer state.
        other.load(model.capture())
        merge(other, step, {name: payloads[name] for name in "ac"})
        model.publish(merged)
        value, without = (each.capture().value(0) for each in (model, other))
        np.testing.assert_array_equal(merged.subtracted.change, without - value)
        assert np.abs(merged.subtracted.change).max() > 1e-6


@pytest.mark.parametrize("up", ["float32", "int4"])
def test_to_ask_changes_no_bit(up: codec.Format) -> None:
    asked, unasked = (model_of(LEAFY_PLAN, drawn(LEAFY), OuterConfig(), up=up, down="int4") for _ in range(2))
    for step in (1, 2, 3):
        payloads = {name: leafy_payload(0, 10 * step + n, up) for n, name in enumerate(NAMES)}
        outcomes = []
        for model, without in ((asked, "c"), (unasked, "")):
            outcomes.append(model.merge(order(model, step, 0, NAMES), payloads, without=without))
            model.publish(outcomes[-1])
        assert outcomes[0].state == outcomes[1].state and outcomes[1].subtracted is None
        assert outcomes[0].drift == outcomes[1].drift
    assert asked.payload(0) == unasked.payload(0) and asked.payload(0, 2) == unasked.payload(0, 2)


def test_nothing_is_subtracted_from_one_contribution_or_if_it_was_excluded() -> None:
    model = make_model()
    alone = model.merge(order(model, 1, 0, "a"), {"a": gradient(model, 0, 1)}, without="a")
    assert alone.state is not None and alone.subtracted is None
    payloads = {"a": gradient(model, 0, 1), "b": gradient(model, 0, 2), "c": gradient(model, 0, 3, float("nan"))}
    excluded = model.merge(order(model, 1, 0, NAMES), payloads, without="c")
    assert [*excluded.excluded] == ["c"] and excluded.subtracted is None
