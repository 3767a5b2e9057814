"""The holder of NNX Variables: names, axes, arrays in place under each kind of step, and moments."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from diloco_jax.nnx import VariableHolder

PARAMETERS = ["blocks/0/bias", "blocks/0/kernel", "blocks/1/bias", "blocks/1/kernel", "norm/bias", "norm/scale"]
STATISTICS = ["norm/mean", "norm/var"]
X = jnp.arange(12.0).reshape(4, 3)


class Net(nnx.Module):
    """Two layers in a list, batch statistics and a random stream."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(3, momentum=0.5, rngs=rngs)
        self.drop = nnx.Dropout(0.25, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return self.drop(self.norm(x))


def made() -> tuple[Net, nnx.Optimizer[Any]]:
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)


def update(model: Net, optimizer: nnx.Optimizer[Any]) -> jax.Array:
    loss, gradient = nnx.value_and_grad(lambda m: jnp.mean((m(X) - 1) ** 2))(model)
    optimizer.update(model, gradient)
    return loss


def plain(model: Net, optimizer: nnx.Optimizer[Any]) -> Callable[[], Any]:
    step = nnx.jit(update)
    return lambda: step(model, optimizer)


def donating(model: Net, optimizer: nnx.Optimizer[Any]) -> Callable[[], Any]:
    step = nnx.jit(update, donate_argnums=(0, 1))
    return lambda: step(model, optimizer)


def cached(model: Net, optimizer: nnx.Optimizer[Any]) -> Callable[[], Any]:
    return nnx.cached_partial(nnx.jit(update, donate_argnums=(0, 1)), model, optimizer)


def host(arrays: Any) -> Any:
    return jax.tree.map(np.asarray, arrays)


@pytest.mark.parametrize("steps", [plain, donating, cached])
def test_entries_are_the_models_own_arrays_for_every_kind_of_step(steps: Callable[..., Callable[[], Any]]) -> None:
    model, optimizer = made()
    # Both steps are one program.
    model.drop.deterministic = True
    holder = VariableHolder(model, optimizer)
    step = steps(model, optimizer)
    step()
    assert list(holder.params) == PARAMETERS and len(holder.params) == len(PARAMETERS)
    for path, keys in (("blocks/1/kernel", model.blocks[1].kernel), ("norm/scale", model.norm.scale)):
        # The same object: no copy, nothing flattened.
        assert holder.params[path] is keys.get_raw_value()
    # With a bias of 100 the squared error is about 99^2 everywhere, so the next step must have read the written array.
    holder.params["norm/bias"] = jnp.full(3, 100.0)
    assert float(step()) > 9000
    # Adam's steps have the size of its rate at most.
    np.testing.assert_allclose(holder.params["norm/bias"], 99.9, atol=0.05)


def test_a_split_state_has_the_names_of_its_module_and_may_be_replaced_by_every_step() -> None:
    model, optimizer = made()
    graph, state = nnx.split((model, optimizer))
    holder = VariableHolder(lambda: state[0], lambda: state[1])
    assert list(holder.params) == list(VariableHolder(model, optimizer).params) == PARAMETERS

    @jax.jit
    def step(state: nnx.State) -> nnx.State:
        both = nnx.merge(graph, state)
        update(*both)
        return nnx.state(both)

    first = holder.params["norm/bias"]
    state = step(state)
    assert holder.params["norm/bias"] is state[0]["norm"]["bias"].get_raw_value()
    assert not np.array_equal(first, holder.params["norm/bias"])
    holder.params["norm/bias"] = jnp.full(3, 100.0)
    np.testing.assert_array_equal(state[0]["norm"]["bias"].get_raw_value(), [100.0] * 3)
    assert int(holder.moments()["optimizer"]["step"]) == 1
    assert holder.moments().keys() == VariableHolder(model, optimizer).moments().keys()


def test_moments_are_the_optimizer_the_statistics_and_the_random_streams_and_come_back() -> None:
    model, optimizer = made()
    holder = VariableHolder(model, optimizer)
    step = plain(model, optimizer)
    step()
    saved = host(holder.moments())
    assert list(saved["model"]) == ["drop/rngs/count", "drop/rngs/key", *STATISTICS]
    assert list(saved["optimizer"]) == [
        "opt_state/0/count",
        *[f"opt_state/0/{moment}/{path}" for moment in ("mu", "nu") for path in PARAMETERS],
        "step",
    ]
    # A key array is saved as its data, which every format can hold.
    assert saved["model"]["drop/rngs/key"].dtype == np.uint32 and saved["model"]["drop/rngs/count"] == 1
    params = dict(holder.params)
    following = float(step())
    # Another process: other initial values, then everything from the save.
    model = Net(nnx.Rngs(7))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    again = VariableHolder(model, optimizer)
    again.set_moments(jax.tree.map(jnp.asarray, saved))
    for path, value in params.items():
        again.params[path] = value
    # The same dropout, the same moments: the very same loss.
    assert float(nnx.jit(update)(model, optimizer)) == following
    assert jax.tree.structure(again.moments()) == jax.tree.structure(saved)


def test_statistics_can_travel_with_the_parameters_instead() -> None:
    model, optimizer = made()
    holder = VariableHolder(model, optimizer, average=nnx.BatchStat)
    assert list(holder.params) == sorted(PARAMETERS + STATISTICS)
    assert list(holder.moments()["model"]) == ["drop/rngs/count", "drop/rngs/key"]
    holder.params["norm/mean"] = jnp.full(3, 4.0)
    np.testing.assert_array_equal(model.norm.mean.get_value(), [4.0] * 3)


def test_only_adapters_travel_with_a_filter_for_lora() -> None:
    base = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    model = nnx.LoRA(4, 2, 4, base_module=base, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.LoRAParam)
    holder = VariableHolder(model, optimizer, filter=nnx.LoRAParam)
    assert list(holder.params) == ["lora_a", "lora_b"]
    assert not holder.moments()["model"]


def test_an_optimizer_that_has_the_model_gives_its_own_state_only() -> None:
    model, _ = made()
    both = nnx.ModelAndOptimizer(model, optax.sgd(0.1, momentum=0.9))
    names = VariableHolder(both.model, both).moments()["optimizer"]
    assert list(names) == [*[f"opt_state/0/trace/{path}" for path in PARAMETERS], "step"]


def test_axes_come_from_the_metadata_of_variables() -> None:
    class Named(nnx.Module):
        def __init__(self) -> None:
            named = {"eager_sharding": False}
            self.table = nnx.Param(jnp.zeros((7, 2)), out_sharding=("vocab", None), **named)
            self.stack = nnx.Param(jnp.zeros((2, 3, 4)), out_sharding=jax.sharding.PartitionSpec("layers"), **named)
            self.split = nnx.Param(jnp.zeros((3, 4)), out_sharding=(("fsdp", "tensor"), "mlp"), **named)
            rows = jax.sharding.NamedSharding(jax.make_mesh((1,), ("fsdp",)), jax.sharding.PartitionSpec("fsdp"))
            self.placed = nnx.Param(jnp.zeros((3, 4)), out_sharding=rows, **named)
            self.plain = nnx.Param(jnp.zeros((3, 4)))

    model = Named()
    expected = {"table": ("vocab", None), "stack": ("layers", None, None), "split": (None, "mlp")}
    expected["placed"] = ("fsdp", None)
    for found in (model, nnx.state(model)):
        assert dict(VariableHolder(found).axes) == expected


def test_a_stack_of_layers_is_named_where_vmap_has_put_it() -> None:
    named = nnx.with_partitioning(nnx.initializers.zeros_init(), (None, "mlp"), eager_sharding=False)
    for place, expected in ((0, ("layers", None, "mlp")), (1, (None, "layers", "mlp"))):

        @nnx.vmap(in_axes=0, out_axes=place, transform_metadata={nnx.PARTITION_NAME: "layers"})
        def stack(rngs: nnx.Rngs) -> nnx.Linear:
            return nnx.Linear(3, 4, kernel_init=named, rngs=rngs)

        holder = VariableHolder(stack(nnx.Rngs(0).split(2)))
        assert holder.axes == {"kernel": expected}


def test_what_cannot_be_held_is_refused_with_its_remedy() -> None:
    model, optimizer = made()
    with pytest.raises(ValueError, match="got a dict; give an"):
        VariableHolder({"w": jnp.ones(3)})
    with pytest.raises(ValueError, match=r"no Variable of the model fits filter=.*LoRAParam"):
        VariableHolder(model, optimizer, filter=nnx.LoRAParam)
    holder = VariableHolder(model, optimizer)
    # Another Variable in the same place is fine: the walk finds it.
    model.norm.bias = nnx.Param(jnp.full(3, 5.0))
    np.testing.assert_array_equal(holder.params["norm/bias"], [5.0] * 3)
    del model.norm.bias
    with pytest.raises(ValueError, match="no parameter 'norm/bias' any more"):
        holder.params["norm/bias"]
    with pytest.raises(TypeError, match="not removed"):
        del holder.params["norm/scale"]
