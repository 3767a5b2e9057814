"""Lanes equal the algorithm of docs/examples/one_page.py, and their further rules follow their formulas."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _lanes import Method, Numbers, layer_products, merge, outer_step, train
from flax import nnx

from diloco_jax.training.models.protocol import split_model
from docs.examples import one_page

STEPS, LEARNERS, RATE, VOCAB, LENGTH = 12, 2, 0.1, 16, 8


class Bigram(nnx.Module):
    """A model with the logits embed[x] @ kernel + bias."""

    def __init__(self) -> None:
        draw = jax.random.split(jax.random.key(0))
        self.embed = nnx.Param(jax.random.normal(draw[0], (VOCAB, 4)))
        self.kernel = nnx.Param(0.3 * jax.random.normal(draw[1], (4, VOCAB)))
        self.bias = nnx.Param(jnp.zeros(VOCAB))

    @classmethod
    def from_config(cls, args: Any, *, rngs: nnx.Rngs) -> Bigram:
        return cls()

    def loss(self, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        params = {name: getattr(self, name)[...] for name in ("embed", "kernel", "bias")}
        return bigram_loss(params, batch["tokens"]), {}


class Linear(nnx.Module):
    """A model whose gradient of x is the mean of the tokens for every x."""

    def __init__(self) -> None:
        self.x = nnx.Param(jnp.zeros(1))

    @classmethod
    def from_config(cls, args: Any, *, rngs: nnx.Rngs) -> Linear:
        return cls()

    def loss(self, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        return self.x[...].sum() * batch["tokens"].astype(jnp.float32).mean(), {}


def bigram_loss(params: one_page.Params, tokens: jax.Array) -> jax.Array:
    logits = params["embed"][tokens[:, :-1]] @ params["kernel"] + params["bias"][None, None]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def numbers(period: int, tau: int, tensors: int, **changes: Any) -> Numbers:
    due = np.zeros((STEPS, tensors), bool)
    due[period - 1 :: period] = True
    adopts = np.zeros_like(due)
    adopts[tau:] = due[: STEPS - tau]
    none = np.zeros((STEPS, LEARNERS), bool)
    plain = Numbers(
        np.full(STEPS, RATE, np.float32), due, adopts, none, *map(np.float32, (0, 1, 0)), np.int32(1), np.float32(0)
    )
    return plain._replace(**changes)


@pytest.mark.parametrize("tau", [0, 2])
@pytest.mark.parametrize("outer", ["sgd", "nesterov"])
def test_lanes_equal_one_page(tau: int, outer: str) -> None:
    graphdef, theta = split_model(Bigram())
    samples = np.random.default_rng(1).integers(0, VOCAB, (STEPS, 3 * LEARNERS, LENGTH + 1), np.uint8)
    rate, momentum = (1.0, 0.0) if outer == "sgd" else (0.6, 0.5)
    found, *_ = train(
        theta, jnp.asarray(samples), numbers(3, tau, 3, outer_rate=np.float32(rate), momentum=np.float32(momentum)),
        graphdef=graphdef, make_inner=lambda params: optax.sgd(1.0), method=Method(LEARNERS, outer=outer), heads=1,
    )  # fmt: skip
    settings = one_page.Settings(3, 1, tau, LEARNERS, optax.sgd(rate, momentum=momentum or None, nesterov=True))
    batches = jnp.asarray(samples, jnp.int32).reshape(STEPS, LEARNERS, 3, LENGTH + 1)
    here = np.ones((STEPS, LEARNERS), bool)
    wanted = one_page.train(bigram_loss, theta, optax.sgd(RATE), batches, here, settings)
    for path in theta:
        np.testing.assert_allclose(found[path], wanted[path], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(("ref", "kept"), [("theta", 0.0), ("theta", 0.5), ("sent", 1.0), ("foreseen", 1.0)])
def test_adoption_follows_its_formula(ref: str, kept: float) -> None:
    graphdef, theta = split_model(Linear())
    samples = np.zeros((STEPS, LEARNERS, 2), np.uint8)
    samples[:, 0], samples[:, 1] = 1, 3
    found, _, mean, _ = train(
        theta, jnp.asarray(samples), numbers(4, 2, 1, kept=np.float32(kept)), graphdef=graphdef,
        make_inner=lambda params: optax.sgd(1.0), method=Method(LEARNERS, ref=ref), heads=1,
    )  # fmt: skip
    x, local, gradient, sent, others = 0.0, np.zeros(2), np.array([1.0, 3.0]), np.zeros(2), np.zeros(2)
    for step in range(1, STEPS + 1):
        local = local - RATE * gradient
        if step % 4 == 0:
            delta, sent = x - local, local
            if ref == "foreseen":
                sent = local = x - (delta / 2 + others)
                others = delta.mean() - delta / 2
            x = x - delta.mean()
        if step % 4 == 2 and step > 4:
            local = x + kept * (local - (x if ref == "theta" else sent))
    assert found["x"][0] == pytest.approx(x, rel=1e-5)
    assert mean["x"][0] == pytest.approx(local.mean(), rel=1e-5)


def rda(vectors: np.ndarray) -> np.ndarray:
    flat = vectors.reshape(len(vectors), -1).astype(np.float64)
    norms = np.linalg.norm(flat, axis=1)
    direction = (flat / norms[:, None]).mean(0)
    return (norms.mean() * direction / np.linalg.norm(direction)).reshape(vectors.shape[1:])


def test_units_have_separate_norms_and_directions() -> None:
    deltas = np.random.default_rng(0).normal(size=(3, 4, 6)).astype(np.float32)

    def merged(path: str, unit: str) -> np.ndarray:
        return np.asarray(merge(path, jnp.asarray(deltas), Method(3, unit=unit), 2))

    def close(found: np.ndarray, wanted: np.ndarray) -> None:
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-6)

    close(merged("blocks/0/up/kernel", "tensor"), rda(deltas))
    close(merged("blocks/0/up/kernel", "head"), rda(deltas))
    close(merged("blocks/0/up/kernel", "row"), np.stack([rda(deltas[:, i]) for i in range(4)]))
    close(merged("blocks/0/up/kernel", "column"), np.stack([rda(deltas[:, :, i]) for i in range(6)], axis=1))
    close(merged("blocks/0/q/kernel", "head"), np.hstack([rda(deltas[:, :, :3]), rda(deltas[:, :, 3:])]))
    close(merged("blocks/0/out/kernel", "head"), np.vstack([rda(deltas[:, :2]), rda(deltas[:, 2:])]))
    close(merged("embed/embedding", "row"), deltas.mean(0))
    other = np.random.default_rng(1).normal(size=(3, 5)).astype(np.float32).reshape(3, 5, 1)
    shares = layer_products({"blocks/0/a": jnp.asarray(deltas), "blocks/0/b": jnp.asarray(other)})
    joined = rda(np.concatenate([deltas.reshape(3, -1), other.reshape(3, -1)], axis=1))
    close(np.tensordot(np.asarray(shares["blocks/0/a"]), deltas, 1).ravel(), joined[:24])
    close(np.tensordot(np.asarray(shares["blocks/0/b"]), other, 1).ravel(), joined[24:])


def test_outer_optimizers_with_a_memory_of_n_turns() -> None:
    gradients, n, rate, mu = [1.0, -2.0, 4.0, 8.0], 2, 0.5, 0.5
    settings = numbers(1, 0, 1, outer_rate=np.float32(rate), momentum=np.float32(mu), every=np.int32(n))

    def steps_of(outer: str) -> list[float]:
        trace = bank = jnp.zeros(())
        found = []
        for turn, gradient in enumerate(gradients):
            args = (jnp.float32(gradient), trace, bank, jnp.int32(turn), settings, Method(outer=outer))
            step, trace, bank = outer_step(*args)
            found.append(float(step))
        return found

    # t = mean of two gradients in every second turn: -0.5, then 0.5 * -0.5 + 6
    assert steps_of("delayed") == pytest.approx([-0.5, 1.0 + 0.125, -2.0, -4.0 - 0.25 * 5.75])
    # t = 1, -1.5 | 4, 10
    assert steps_of("restart") == pytest.approx([-0.75, 1.375, -3.0, -6.5])
