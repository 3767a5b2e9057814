"""The inner step against the same arithmetic written out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from diloco_jax.training.models.protocol import GraphDef, Params, load_model, split_model
from diloco_jax.training.optimizers import OptimizerConfig, make_inner
from diloco_jax.training.train_step import TrainState, make_train_step, model_loss

ARGS = {"vocab_size": 8, "dim": 4, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 2, "mlp_dim": 4}


def decoder() -> tuple[GraphDef, Params]:
    return split_model(load_model("diloco_jax.training.models.decoder:Decoder", ARGS, 0))


def test_a_step_follows_the_negative_gradient_and_reports_its_norm() -> None:
    graphdef, params = decoder()
    tx = optax.sgd(1.0)
    batch = {"tokens": jnp.asarray([[1, 2, 3, 4, 5]], jnp.int32)}
    step = jax.jit(make_train_step(graphdef, tx))
    loss_of = jax.jit(lambda p: model_loss(graphdef, p, batch)[0])
    state, metrics = step(TrainState(params, tx.init(params)), batch, jnp.float32(0.125))
    gradient = {path: (np.asarray(params[path]) - np.asarray(state.params[path])) / 0.125 for path in params}
    norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-3)
    assert float(metrics["loss"]) == pytest.approx(float(loss_of(params)))
    path, nudge = "blocks/0/up/kernel", 1e-2
    for index in ((0, 0), (3, 2)):
        losses = [float(loss_of({**params, path: params[path].at[index].add(sign * nudge)})) for sign in (1, -1)]
        assert gradient[path][index] == pytest.approx((losses[0] - losses[1]) / (2 * nudge), abs=2e-3)


@pytest.mark.parametrize("count", [2, 4])
def test_micro_batches_make_the_step_of_the_whole_batch(count: int) -> None:
    graphdef, params = decoder()
    tx = optax.adam(1.0)
    rng = np.random.default_rng(0)
    batch = {"tokens": jnp.asarray(rng.integers(0, 8, (8, 6)), jnp.int32)}
    found = []
    for accumulate_steps in (1, count):
        step = jax.jit(make_train_step(graphdef, tx, accumulate_steps))
        found.append(step(TrainState(params, tx.init(params)), batch, jnp.float32(0.1)))
    with pytest.raises(ValueError, match="make the batch size a multiple of 3"):
        make_train_step(graphdef, tx, 3)(TrainState(params, tx.init(params)), batch, jnp.float32(0.1))
    (whole, whole_metrics), (parts, parts_metrics) = found
    for path in params:  # moments, not parameters: adam's first step is the gradient's sign
        np.testing.assert_allclose(parts.opt_state[0].mu[path], whole.opt_state[0].mu[path], atol=1e-7)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(parts_metrics[name], whole_metrics[name], rtol=1e-5)


@pytest.mark.parametrize("inner", ["adamw", "muon"])
@pytest.mark.parametrize("accumulate_steps", [1, 2])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_parameters_and_their_moments_stay_narrow(dtype: str, accumulate_steps: int, inner: str) -> None:
    """A program that is compiled for one type cannot be called with another."""
    graphdef, params = decoder()
    narrow = {path: jax.ShapeDtypeStruct(value.shape, dtype) for path, value in params.items()}
    tx = make_inner(OptimizerConfig(name=inner), narrow)
    state = TrainState(narrow, jax.eval_shape(tx.init, narrow))  # type: ignore[arg-type]
    batch = {"tokens": jax.ShapeDtypeStruct((4, 6), jnp.int32)}
    step = make_train_step(graphdef, tx, accumulate_steps)
    after, _ = jax.eval_shape(step, state, batch, jax.ShapeDtypeStruct((), jnp.float32))
    assert jax.tree.map(lambda leaf: leaf.dtype, after) == jax.tree.map(lambda leaf: leaf.dtype, state)
