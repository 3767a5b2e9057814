"""The chunked loss and rows that are looked up where they lie, against plain ones: values and gradients, on meshes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax.training.models import vocabulary
from diloco_jax.training.models.layers import soft_limit
from diloco_jax.training.models.vocabulary import TABLE_AXES, chunked_cross_entropy, cross_entropy, logits_of, look_up
from diloco_jax.training.sharding import MeshConfig, MeshLayout, gather, make_mesh, use_layout

pytestmark = pytest.mark.usefixtures("quick_compiler")
rng = np.random.default_rng(3)
X = rng.normal(size=(4, 6, 8)).astype(np.float32)
TABLE = rng.normal(size=(32, 8)).astype(np.float32)
LABELS = rng.integers(0, 32, (4, 6)).astype(np.int32)
WEIGHTS = rng.integers(0, 2, (4, 6)).astype(np.float32)
TOKENS = rng.integers(0, 32, (8, 12)).astype(np.int32)
FACTORS = rng.normal(size=(8, 12, 8)).astype(np.float32)


def plain(x: jax.Array, table: jax.Array, cap: float = 0.0, weights: Any = None) -> jax.Array:
    return cross_entropy(soft_limit(logits_of(x, gather(table, *TABLE_AXES)), cap), jnp.asarray(LABELS), weights)


@functools.cache
def wanted(weighted: bool) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Three times the plain loss, and its gradients; with weights the logits are limited too."""

    @jax.jit
    def program(x: jax.Array, table: jax.Array) -> Any:
        loss = functools.partial(plain, cap=2.0, weights=jnp.asarray(WEIGHTS)) if weighted else plain
        return jax.value_and_grad(lambda x, table: 3 * loss(x, table), argnums=(0, 1))(x, table)

    found: tuple[jax.Array, tuple[jax.Array, ...]] = program(X, TABLE)
    return found


@pytest.mark.parametrize(
    ("mesh", "chunk", "weighted"),
    [({}, 4, False), ({}, 32, False), ({"fsdp": 2, "tensor": 2}, 4, False), ({"fsdp": 2, "tensor": 2}, 8, True)],
    ids=["one-4", "one-32", "four-4", "four-8-weighted"],
)
def test_chunks_change_neither_the_loss_nor_its_gradient(mesh: dict[str, int], chunk: int, weighted: bool) -> None:
    config = MeshConfig(**mesh)
    layout = MeshLayout(make_mesh(config, jax.devices()[: config.fsdp * config.tensor]))

    @jax.jit
    def chunked(x: jax.Array, table: jax.Array) -> Any:
        with use_layout(layout):
            how = {"cap": 2.0, "weights": jnp.asarray(WEIGHTS)} if weighted else {}
            loss = functools.partial(chunked_cross_entropy, labels=jnp.asarray(LABELS), chunk=chunk, **how)
            return jax.value_and_grad(lambda x, table: 3 * loss(x, table), argnums=(0, 1))(x, table)

    loss, gradients = chunked(X, jax.device_put(TABLE, layout.sharding(TABLE.shape, TABLE_AXES)))
    want, expected = wanted(weighted)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    for got, each in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(got, each, atol=1e-6)


def test_the_mean_is_over_what_has_a_weight() -> None:
    logits = X.astype(np.float64) @ TABLE.T
    nats = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, LABELS[..., None], -1)[..., 0]
    loss = jax.jit(lambda weights: plain(jnp.asarray(X), jnp.asarray(TABLE), 0.0, weights))
    np.testing.assert_allclose(loss(WEIGHTS), nats[WEIGHTS > 0].mean(), rtol=1e-6)
    assert float(loss(0 * WEIGHTS)) == 0


def test_large_logits_do_not_overflow() -> None:
    loss = jax.jit(lambda x, table: (chunked_cross_entropy(x, table, jnp.asarray(LABELS), 8), plain(x, table)))
    np.testing.assert_allclose(*loss(100 * X, 100 * TABLE), rtol=1e-5)


def test_chunks_that_do_not_fit_are_refused() -> None:
    arrays = [jnp.asarray(each) for each in (X, TABLE, LABELS)]
    with pytest.raises(ValueError, match=r"loss_chunk is 5; it must divide vocab_size \(32\)"):
        chunked_cross_entropy(*arrays, 5)
    layout = MeshLayout(make_mesh(MeshConfig(fsdp=8), jax.devices()))
    with use_layout(layout), pytest.raises(ValueError, match="multiple of 8, the number of parts"):
        chunked_cross_entropy(*arrays, 4)


@pytest.mark.parametrize(
    ("mesh", "slab"),
    [({"data": 2, "fsdp": 2, "tensor": 2}, 1 << 27), ({"fsdp": 2, "expert": 4}, 300), ({"data": 8}, 1 << 27)],
)
def test_rows_and_their_gradients_come_back(mesh: dict[str, int], slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "SLAB_BYTES", slab)
    layout = MeshLayout(make_mesh(MeshConfig(**mesh), jax.devices()))
    sharding = layout.sharding(TABLE.shape, TABLE_AXES)

    def total(table: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        with use_layout(layout):
            rows = look_up(table, tokens, "float32")
        return jnp.sum(rows * FACTORS), rows

    table, tokens = (
        jax.device_put(TABLE, sharding),
        jax.device_put(TOKENS, layout.sharding(TOKENS.shape, ("batch", None))),
    )
    program = jax.jit(jax.grad(total, has_aux=True), out_shardings=(sharding, None)).lower(table, tokens).compile()
    gradient, rows = program(table, tokens)
    np.testing.assert_array_equal(rows, TABLE[TOKENS])
    want = np.zeros(TABLE.shape)
    np.add.at(want, np.asarray(TOKENS), np.asarray(FACTORS))
    np.testing.assert_allclose(gradient, want, atol=1e-5)
