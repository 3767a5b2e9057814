"""Embeddings that are looked up where they lie, against a plain look-up: values and gradients on every kind of mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax.training.models import lookup
from diloco_jax.training.models.losses import TABLE_AXES
from diloco_jax.training.sharding import MeshConfig, MeshLayout, make_mesh, use_layout

rng = np.random.default_rng(3)
TABLE = jnp.asarray(rng.normal(size=(32, 8)), jnp.float32)
TOKENS = jnp.asarray(rng.integers(0, 32, (8, 12)), jnp.int32)
WEIGHTS = jnp.asarray(rng.normal(size=(8, 12, 8)), jnp.float32)


@pytest.mark.parametrize(
    ("mesh", "slab"),
    [({"data": 2, "fsdp": 2, "tensor": 2}, 1 << 27), ({"fsdp": 2, "expert": 4}, 300), ({"data": 8}, 1 << 27)],
)
def test_rows_and_their_gradients_come_back(mesh: dict[str, int], slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "SLAB_BYTES", slab)
    layout = MeshLayout(make_mesh(MeshConfig(**mesh), jax.devices()))
    lies = layout.sharding(TABLE.shape, TABLE_AXES)

    def total(table: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        with use_layout(layout):
            rows = lookup.look_up(table, tokens, "float32")
        return jnp.sum(rows * WEIGHTS), rows

    table, tokens = jax.device_put(TABLE, lies), jax.device_put(TOKENS, layout.sharding(TOKENS.shape, ("batch", None)))
    program = jax.jit(jax.grad(total, has_aux=True), out_shardings=(lies, None)).lower(table, tokens).compile()
    gradient, rows = program(table, tokens)
    np.testing.assert_array_equal(rows, TABLE[TOKENS])
    want = np.zeros(TABLE.shape)
    np.add.at(want, np.asarray(TOKENS), np.asarray(WEIGHTS))
    np.testing.assert_allclose(gradient, want, atol=1e-5)
