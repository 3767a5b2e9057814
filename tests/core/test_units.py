"""Each tensor of a stack is merged as it would be alone, wherever its elements lie in blocks, leaves and shards."""

from __future__ import annotations

import numpy as np
import optax
import pytest

from diloco_jax.core.codec import Format, decode
from diloco_jax.core.fragments import plan_fragments
from diloco_jax.core.kinds import Kind, kind_of
from diloco_jax.core.layout import LEAF
from diloco_jax.core.merge import MergeConfig, Rule
from diloco_jax.core.outer import Nesterov, Optax, Outer
from diloco_jax.core.passes import Merger, Values, norms, squares_of
from diloco_jax.core.shards import share
from tests.core.merging import FORMATS, layout_of, make_merger, payload_of, round_of

PLAIN = Nesterov(1.0, 0.0)
WEIGHTS = np.array([0.5, 0.3, 0.2])
STACKS = {  # several units in a block, units across blocks, as long as blocks, across leaves, and each longer than one
    "blocks": (20, 7, 9),
    "odd": (5, 30, 70),
    "even": (3, 4, 256),
    "leaves": (5, LEAF // 3, 1),
    "long": (2, LEAF + 100, 1),
}


def stacks(seed: int, name: str) -> np.ndarray:
    """Tensors of which each is many times as large as the one before, in another order for each learner."""
    rng = np.random.default_rng(seed)
    shape = STACKS[name]
    return (10.0 ** rng.permutation(shape[0])[:, None, None] ** 0.3 * rng.standard_normal(shape)).astype(np.float32)


@pytest.mark.parametrize("up", FORMATS)
@pytest.mark.parametrize("name", STACKS)
def test_units_are_merged_as_tensors_of_their_own(name: str, up: Format) -> None:
    shape, layout = STACKS[name], layout_of({"w": STACKS[name]})
    payloads = [payload_of({"w": stacks(m, name)}, up) for m in range(3)]
    moved = stacks(7, name).reshape(-1)
    merger = Merger(layout, [Rule("rda", shape[1] * shape[2])], PLAIN, up, "float32")
    values = Values(payloads, [None, moved, None])
    products = merger.inspect(values)
    made = merger.update(values, products, WEIGHTS, merger.first(np.zeros(layout.size, np.float32))).state.value
    gradients = [decode(payload.tobytes(), [("w", shape)], up)["w"] for payload in payloads]
    gradients[1] = gradients[1] + moved.reshape(shape)
    for number, unit in enumerate(made.reshape(shape)):
        alone = make_merger(layout_of({"w": shape[1:]}), "float32", "float32", PLAIN, "rda")
        sent = [payload_of({"w": gradient[number]}, "float32") for gradient in gradients]
        expected = round_of(alone, sent, WEIGHTS, alone.first(np.zeros(unit.size, np.float32))).state.value
        largest = np.abs(expected).max()
        np.testing.assert_allclose(unit.reshape(-1), expected, rtol=1e-5, atol=1e-6 * largest)
    np.testing.assert_allclose(
        norms(squares_of(products)), [np.linalg.norm(g.astype(np.float64)) for g in gradients], rtol=1e-6
    )


def test_an_optax_transformation_sees_the_mean_of_units() -> None:
    shape, layout = STACKS["odd"], layout_of({"w": STACKS["odd"]})
    payloads = [payload_of({"w": stacks(m, "odd")}, "int8") for m in range(3)]

    def made(outer: Outer) -> np.ndarray:
        merger = Merger(layout, [Rule("rda", shape[1] * shape[2])], outer, "int8", "float32")
        return round_of(merger, payloads, WEIGHTS, merger.first(np.zeros(layout.size, np.float32))).state.value

    np.testing.assert_array_equal(made(Optax(optax.sgd(1.0))), made(PLAIN))


def test_a_piece_has_a_unit_for_each_tensor_of_which_it_has_elements() -> None:
    shapes = {"experts": (4, 3, 5, 7), "kernel": (5, 7), "scales": (4, 7), "table": (9, 7)}
    kinds = {"experts": Kind("matrix", 2), "scales": Kind("vector", 1), "table": Kind("table")}
    rules = share(plan_fragments(shapes, 1, kinds=kinds), MergeConfig(average_paths=()), 1).rules[0]
    assert rules["experts"] == Rule("rda", 35)
    assert rules["kernel"] == Rule("rda", 35)
    assert rules["scales"] == Rule("average", 28) and rules["table"] == Rule("average", 63)
    cut = share(plan_fragments(shapes, 5, kinds=kinds), MergeConfig(), 2).rules
    units = {key.split("[")[0]: rule.unit for rules in cut for key, rule in rules.items() if rule.method == "rda"}
    assert units == {"experts": 35, "kernel": 35}


def test_names_say_what_a_tensor_is() -> None:
    assert kind_of(()) == kind_of((3,)) == Kind("vector")
    assert kind_of((3, 4)) == kind_of((3, 4, 5)) == Kind("matrix")
    assert kind_of((2, 3), ("layers", None)) == kind_of((2, 3), ("expert", "mlp")) == Kind("vector", 1)
    assert kind_of((2,), ("layers",)) == Kind("vector", 1)
    assert kind_of((2, 3, 4, 5), ("layers", "expert", "embed", "mlp")) == Kind("matrix", 2)
    assert kind_of((9, 4), ("vocab", "embed")) == Kind("table")
    assert kind_of((4, 9), ("embed", "vocab")) == kind_of((4, 2), ("embed", "expert")) == Kind("matrix")
