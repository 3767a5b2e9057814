"""The chunked loss and rows that are looked up where they lie, against plain ones: values and gradients, on meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax.training.models import vocabulary
from diloco_jax.training.models.layers import soft_limit
from diloco_jax.training.models.vocabulary import TABLE_AXES, chunked_cross_entropy, cross_entropy, logits_of, look_up
from diloco_jax.training.sharding import MeshConfig, MeshLayout, gather, make_mesh, use_layout

rng = np.random.default_rng(3)
X = jnp.asarray(rng.normal(size=(4, 6, 8)), jnp.float32)
TABLE = jnp.asarray(rng.normal(size=(32, 8)), jnp.float32)
LABELS = jnp.asarray(rng.integers(0, 32, (4, 6)), jnp.int32)
WEIGHTS = jnp.asarray(rng.integers(0, 2, (4, 6)), jnp.float32)
TOKENS = jnp.asarray(rng.integers(0, 32, (8, 12)), jnp.int32)
FACTORS = jnp.asarray(rng.normal(size=(8, 12, 8)), jnp.float32)


def plain(x: jax.Array, table: jax.Array, cap: float = 0.0, weights: jax.Array | None = None) -> jax.Array:
    return cross_entropy(soft_limit(logits_of(x, gather(table, *TABLE_AXES)), cap), LABELS, weights)


@pytest.mark.parametrize(("chunk", "cap", "weights"), [(4, 0.0, None), (8, 2.0, WEIGHTS), (32, 0.0, None)])
@pytest.mark.parametrize("mesh", [{}, {"fsdp": 2, "tensor": 2}], ids=["one", "four"])
def test_chunks_change_neither_the_loss_nor_its_gradient(
    mesh: dict[str, int], chunk: int, cap: float, weights: jax.Array | None
) -> None:
    config = MeshConfig(**mesh)
    layout = MeshLayout(make_mesh(config, jax.devices()[: config.fsdp * config.tensor]))

    @jax.jit
    def chunked(x, table):
        with use_layout(layout):
            loss = functools.partial(chunked_cross_entropy, labels=LABELS, chunk=chunk, cap=cap, weights=weights)
            return jax.value_and_grad(lambda x, table: 3 * loss(x, table), argnums=(0, 1))(x, table)

    loss, gradients = chunked(X, jax.device_put(TABLE, layout.sharding(TABLE.shape, TABLE_AXES)))
    want, wanted = jax.value_and_grad(lambda x, table: 3 * plain(x, table, cap, weights), argnums=(0, 1))(X, TABLE)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    for got, expected in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-6)


def test_the_mean_is_over_what_has_a_weight() -> None:
    each = [float(cross_entropy(logits_of(X[b : b + 1, t : t + 1], TABLE), LABELS[b : b + 1, t : t + 1]))
            for b in range(4) for t in range(6) if WEIGHTS[b, t]]  # fmt: skip
    np.testing.assert_allclose(plain(X, TABLE, 0.0, WEIGHTS), np.mean(each), rtol=1e-6)
    assert float(plain(X, TABLE, 0.0, 0 * WEIGHTS)) == 0


def test_large_logits_do_not_overflow() -> None:
    loss = chunked_cross_entropy(100 * X, 100 * TABLE, LABELS, 8)
    np.testing.assert_allclose(loss, plain(100 * X, 100 * TABLE), rtol=1e-5)


def test_chunks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"loss_chunk is 5; it must divide vocab_size \(32\)"):
        chunked_cross_entropy(X, TABLE, LABELS, 5)
    layout = MeshLayout(make_mesh(MeshConfig(fsdp=8), jax.devices()))
    with use_layout(layout), pytest.raises(ValueError, match="multiple of 8, the number of parts"):
        chunked_cross_entropy(X, TABLE, LABELS, 4)


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
