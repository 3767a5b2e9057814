"""Models whose variables are not all parameters: they train, move to another island, and are evaluated rightly."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from diloco_jax.training.data.sample import Sample
from diloco_jax.training.island import Island
from diloco_jax.training.models.protocol import load_model
from diloco_jax.training.optimizers import OptimizerConfig
from diloco_jax.training.variables import Streams, draw_of, other_variables
from tests import natural_models
from tests.natural_models import Language
from tests.training.islands import MakeIsland, assert_same, state_of, train

pytestmark = pytest.mark.usefixtures("quick_compiler")

# Batch statistics alone (Normalised) are in other tests.
NATURAL = ("Recurrent", "Dropping", "FromLinen", "Everything")
# These models have no other state than random streams.
STATELESS = ("Recurrent", "Dropping")
HERE = __name__


def make(make_island: MakeIsland, name: str, where: str = natural_models.HERE, **how: Any) -> Island:
    optimizer = OptimizerConfig(warmup_steps=0, accumulate_steps=how.pop("accumulate_steps", 1))
    return make_island(module=f"{where}:{name}", optimizer=optimizer, **how)


learn = partial(train, learning_rate=3e-2)


def settle(island: Island, batches: list[Sample]) -> None:
    settled = island.blueprint.settled(island.state.params, island.state.other, batches)
    island.state = island.state._replace(other=settled)


def other(island: Island) -> dict[str, np.ndarray]:
    return {path: np.array(value) for path, value in island.state.other.items()}


@pytest.mark.parametrize("name", NATURAL)
def test_it_trains_and_a_copy_trains_on_alike(make_island: MakeIsland, batches: list[Sample], name: str) -> None:
    """A copied state is complete: the copy continues bit for bit, in a returning island or from the disk."""
    island = make(make_island, name)
    losses = learn(island, batches * 3)
    assert losses[-1] < 0.8 * losses[0]
    assert bool(island.state.other) == (name not in STATELESS)
    state = state_of(island)
    before = other(island)
    want = learn(island, batches[:4], start=100), island.parameters(), other(island)
    assert all((want[2][path] != value).any() for path, value in before.items()), "the forward pass changes it"
    assert island.blueprint.step._cache_size() == 1
    learn(island, batches[4:], start=7)
    island.load_state(state)
    assert learn(island, batches[:4], start=100) == want[0]
    assert_same(island.parameters(), want[1])
    assert_same(other(island), want[2])


@pytest.mark.parametrize("name", ["Everything"])
def test_devices_do_not_change_what_is_drawn(make_island: MakeIsland, batches: list[Sample], name: str) -> None:
    one, two = make(make_island, name), make(make_island, name, data=2)
    np.testing.assert_allclose(learn(one, batches[:3]), learn(two, batches[:3]), rtol=2e-4)
    for path, value in other(one).items():
        np.testing.assert_allclose(other(two)[path], value, atol=2e-4)


def test_a_step_draws_by_its_position_and_not_by_its_number(make_island: MakeIsland, batches: list[Sample]) -> None:
    island = make(make_island, "Dropping")
    state = state_of(island)
    losses = {}
    for name, position in {"first": 0, "again": 0, "other": 8, "far": 1 << 32}.items():
        island.load_state(state)
        losses[name] = island.wait(island.step(island.put_batch(batches[0]), 1e-2, position))["loss"]
    assert losses["first"] == losses["again"]
    assert len({losses["first"], losses["other"], losses["far"]}) == 3


@pytest.mark.parametrize("name", NATURAL[1:])
def test_an_evaluation_drops_nothing_and_uses_the_statistics(
    make_island: MakeIsland, batches: list[Sample], name: str
) -> None:
    island = make(make_island, name)
    learn(island, batches)
    before = other(island)

    @jax.jit
    def loss(values: dict[str, Any], tokens: Any) -> Any:
        model = load_model(f"{natural_models.HERE}:{name}", {"vocab_size": 16, "dim": 16}, 0)
        for path, value in values.items():
            variable = model
            for key in path.split("/"):
                variable = variable[key] if isinstance(variable, Mapping) else getattr(variable, key)
            variable.set_value(value)  # type: ignore[attr-defined]
        model.eval()
        return model.loss({"tokens": tokens})[0]  # type: ignore[operator]

    values = jax.device_get({**island.state.params, **island.state.other})
    want = float(loss(values, batches[1]["tokens"]))
    assert island.evaluate([batches[1]])["loss"] == pytest.approx(want, rel=1e-4)
    assert island.evaluate([batches[1]]) == island.evaluate([batches[1]])
    assert_same(other(island), before)


def test_statistics_settle_on_parameters_that_came_from_elsewhere(
    make_island: MakeIsland, batches: list[Sample]
) -> None:
    """An evaluator has parameters only; after some forward passes its statistics are those of the trained island."""
    island = make(make_island, "Normalised")
    learn(island, batches * 4)
    settle(island, batches * 8)
    want, parameters = other(island), island.parameters()
    fresh = make(make_island, "Normalised")
    fresh.load(parameters)
    assert not np.allclose(other(fresh)["norm/var"], want["norm/var"], rtol=0.2)
    settle(fresh, batches * 8)
    for path in ("norm/mean", "norm/var"):
        np.testing.assert_allclose(other(fresh)[path], want[path], rtol=1e-2, atol=1e-2)
    assert_same(fresh.parameters(), parameters)


def test_micro_batches_pass_the_state_on(make_island: MakeIsland, batches: list[Sample]) -> None:
    island = make(make_island, "Normalised", accumulate_steps=2)
    learn(island, batches[:3])
    assert int(other(island)["calls"]) == 6


def test_streams_differ_by_seed_position_part_and_layer() -> None:
    model = load_model(f"{natural_models.HERE}:Dropping", {"vocab_size": 16, "dim": 16}, 0)
    found = other_variables(model)[1]
    kinds = {path: jax.ShapeDtypeStruct(value.shape, value.dtype) for path, value in found.items()}
    seen = set()
    for seed in (0, 1):
        for position in (0, 1, 1 << 32):
            for part in (0, 1):
                for path, value in Streams(seed, kinds).at(jnp.asarray(draw_of(position)), part).items():
                    if path.endswith("key"):
                        seen.add(tuple(np.asarray(jax.random.key_data(value)).tolist()))
                    else:
                        assert int(value) == 0
    assert len(seen) == 2 * 3 * 2 * sum(path.endswith("key") for path in kinds)


def test_a_model_compiled_ahead_compiles_nothing(
    make_island: MakeIsland, batches: list[Sample], compilations: list[str]
) -> None:
    island = make(make_island, "Everything")
    island.warm_up(batches[0])
    learn(island, batches[:1])
    compilations.clear()
    learn(island, batches[1:])
    assert compilations == []


def test_a_module_without_such_variables_has_the_state_that_it_always_had(make_island: MakeIsland) -> None:
    island = make_island()
    assert island.state.other == {} and not island.blueprint.streams.kinds
    assert {leaf.name.partition("/")[0] for leaf in island.state_layout.leaves} == {"params", "optimizer"}


class Adding(Language):
    def between(self, x: Any) -> Any:
        self.late = nnx.BatchStat(jnp.zeros(()))
        return x


class Growing(Language):
    def __init__(self, vocab_size: int, dim: int, rngs: nnx.Rngs) -> None:
        super().__init__(vocab_size, dim, rngs)
        self.seen = nnx.Variable(jnp.zeros((1,)))

    def between(self, x: Any) -> Any:
        self.seen.set_value(jnp.zeros((2,)))
        return x


class Holding(Language):
    def __init__(self, vocab_size: int, dim: int, rngs: nnx.Rngs) -> None:
        super().__init__(vocab_size, dim, rngs)
        self.pair = nnx.Variable((jnp.zeros(()), jnp.zeros(())))


class Foreign(Language):
    def __init__(self, vocab_size: int, dim: int, rngs: nnx.Rngs) -> None:
        super().__init__(vocab_size, dim, rngs)
        self.rngs = nnx.Rngs(jax.random.key(0, impl="rbg"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Adding", "removed the variable 'late'; make all variables in from_config"),
        ("Growing", r"shape of variable 'seen' from \(1,\) to \(2,\)"),
        ("Holding", "variable 'pair' of the model holds a tuple"),
        ("Foreign", "random stream 'rngs/default/key' has keys of kind"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(
    make_island: MakeIsland, batches: list[Sample], name: str, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        learn(make(make_island, name, HERE), batches[:1])


def test_by_products_are_not_kept() -> None:
    model = load_model(f"{natural_models.HERE}:Normalised", {"vocab_size": 16, "dim": 16}, 0)
    assert other_variables(model)[0].keys() == {"norm/mean", "norm/var", "calls"}
