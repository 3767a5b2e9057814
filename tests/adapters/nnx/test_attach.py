"""The global model as a copy, evaluation with it, its file, the check that the loop trains it, and sharded arrays."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import diloco_jax.nnx
from diloco_jax.adapters.nnx.attach import _of_model, filled
from diloco_jax.adapters.nnx.holder import UNCHANGED_STEPS_MAX, VariableHolder
from diloco_jax.core.fragments import FragmentConfig
from diloco_jax.runtime.own_loop.attached import HeldArrays
from tests.adapters.nnx.test_holder import X, made


def test_the_global_model_is_a_copy_with_the_runs_parameters_and_this_islands_other_variables() -> None:
    model, _ = made()
    whole = filled(model, {"norm/scale": jnp.full(3, 7.0)})
    np.testing.assert_array_equal(whole.norm.scale[...], [7.0] * 3)
    np.testing.assert_array_equal(model.norm.scale[...], [1.0] * 3)
    assert whole.norm.mean.get_raw_value() is model.norm.mean.get_raw_value()
    # Its modes and statistics are its own.
    whole.eval()
    assert not model.drop.deterministic
    whole.norm.mean[...] = jnp.ones(3)
    np.testing.assert_array_equal(model.norm.mean[...], [0.0] * 3)
    state = filled(nnx.state(model), {"norm/scale": jnp.full(3, 7.0)})
    assert isinstance(state, nnx.State)
    np.testing.assert_array_equal(state["norm"]["scale"][...], [7.0] * 3)


def test_an_evaluation_gets_the_global_model_of_a_loop_that_replaces_its_own() -> None:
    model, _ = made()
    state = nnx.state(model)
    evaluate = _of_model(lambda given: {"loss": given["norm"]["scale"][...].sum()}, VariableHolder(lambda: state))
    state = jax.tree.map(lambda leaf: leaf, state)
    assert float(evaluate({"norm/scale": jnp.full(3, 2.0)})["loss"]) == 6.0


def test_orbax_saves_and_restores_the_global_model(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    model, _ = made()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", nnx.state(filled(model, {"norm/scale": jnp.full(3, 7.0)})))
    with ocp.StandardCheckpointer() as checkpointer:
        nnx.update(model, checkpointer.restore(tmp_path / "model", nnx.state(model)))
    np.testing.assert_array_equal(model.norm.scale[...], [7.0] * 3)


def test_a_loop_that_trains_another_model_is_told_after_a_few_steps() -> None:
    model, optimizer = made()
    graph, state = nnx.split((model, optimizer))

    @jax.jit
    def pure(state: nnx.State) -> nnx.State:
        both = nnx.merge(graph, state)
        gradient = nnx.grad(lambda m: jnp.mean((m(X) - 1) ** 2))(both[0])
        both[1].update(both[0], gradient)
        return nnx.state(both)

    def write_all(holder: VariableHolder) -> VariableHolder:
        """What the island does before the first step."""
        for path, value in holder.params.items():
            holder.params[path] = jnp.copy(value)
        return holder

    wrong = write_all(VariableHolder(state[0]))
    state = pure(state)
    for _ in range(UNCHANGED_STEPS_MAX - 1):
        wrong.check_trained()
    with pytest.raises(ValueError, match=r"8 steps have changed no parameter .* lambda: state\.model"):
        wrong.check_trained()
    right = write_all(VariableHolder(lambda: state[0]))
    state = pure(state)
    right.check_trained()
    # Later steps may leave all arrays as they are.
    write_all(right)
    for _ in range(UNCHANGED_STEPS_MAX):
        right.check_trained()


def test_other_objects_return_with_the_optimizer() -> None:
    model, optimizer = made()
    average = nnx.EMA(nnx.state(model, nnx.Param), 0.5)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    holder = VariableHolder(model, (optimizer, average, metrics))
    metrics.update(loss=jnp.float32(6.0))
    names = holder.moments()["optimizer"]
    assert {"0/step", "2/loss/total", "2/loss/count"} < names.keys()
    assert sum(path.startswith("1/") and path.endswith("norm/scale") for path in names) == 1
    saved = jax.tree.map(np.asarray, holder.moments())
    metrics.reset()
    holder.set_moments(jax.tree.map(jnp.asarray, saved))
    assert float(metrics.compute()["loss"]) == 6.0


def test_arrays_over_two_devices_keep_their_layouts_and_the_step_its_program() -> None:
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    whole = NamedSharding(mesh, PartitionSpec())
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    for root in (model, optimizer):
        state = nnx.state(root)
        nnx.update(root, jax.device_put(state, jax.tree.map(lambda leaf: rows if leaf.ndim == 2 else whole, state)))
    holder = VariableHolder(model, optimizer)
    arrays = HeldArrays(holder)
    island = arrays.exchanged("float32", False)

    @nnx.jit(donate_argnums=(0, 1))
    def step(model: nnx.Linear, optimizer: nnx.Optimizer[Any], x: jax.Array) -> jax.Array:
        loss, gradient = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
        optimizer.update(model, gradient)
        return loss

    x = jax.device_put(jnp.ones((2, 4)), whole)
    step(model, optimizer, x)
    for fragment in FragmentConfig().plan(arrays.shapes, arrays.kinds, 2).fragments:
        island.adopt(fragment, {key: np.full(shape, 3.0, np.float32) for key, shape in fragment.keys_shapes})
        island.exchange.stage(island.state.params, fragment).encode()
    assert model.kernel.get_raw_value().sharding == rows
    np.testing.assert_array_equal(model.kernel[...], np.full((4, 3), 3.0))
    # Every output is 4 * 3 + 3.
    assert float(step(model, optimizer, x)) == 225.0
    assert step.jitted_fn._cache_size() == 1


def test_bad_arguments_are_refused_before_anything_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = made()
    with pytest.raises(ValueError, match="samples_per_step is 0"):
        diloco_jax.nnx.attach(model, optimizer, samples_per_step=0, tokens_per_step=1)
    monkeypatch.delenv("DILOCO_SYNCER", raising=False)
    sizes: Any = {"samples_per_step": 1, "tokens_per_step": 1}
    with pytest.raises(ValueError, match="syncer=, or DILOCO_SYNCER"):
        diloco_jax.nnx.attach(model, optimizer, **sizes)
    model.blocks[0].kernel = nnx.Param(jnp.zeros((3, 3), jnp.int32))
    with pytest.raises(ValueError, match=r"params\['blocks/0/kernel'\] is int32; only floats"):
        diloco_jax.nnx.attach(model, optimizer, **sizes)
