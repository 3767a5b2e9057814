"""The ways to compute attention give the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax.training.models.attention import Seeing, attend, splash
from diloco_jax.training.sharding import MeshConfig, MeshLayout, make_mesh, use_layout


def inputs(length: int, heads: int = 4, kv_heads: int = 2, width: int = 16) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(1)
    shapes = [(2, length, heads, width), (2, length, kv_heads, width), (2, length, kv_heads, width)]
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)


def with_gradients(attention: Callable[..., jax.Array], arrays: tuple[jax.Array, ...]) -> list[jax.Array]:
    """The result, and gradients of a sum whose terms all differ."""

    def total(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        result = attention(q, k, v)
        return jnp.sum(jnp.sin(result)), result

    gradients, result = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(*arrays)
    return [result, *gradients]


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_the_kernel_is_the_einsum_on_a_mesh(kv_heads: int) -> None:
    layout = MeshLayout(make_mesh(MeshConfig(fsdp=2, tensor=2), jax.devices()[:4]))
    arrays = inputs(128, kv_heads=kv_heads)

    def kernel(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        with use_layout(layout):
            return splash(q, k, v, Seeing(16), interpret=True)

    for got, want in zip(
        with_gradients(kernel, arrays),
        with_gradients(lambda q, k, v: attend(q, k, v, "einsum", Seeing(16)), arrays),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, atol=2e-5)


def test_splash_is_einsum_where_there_is_no_tpu() -> None:
    arrays = inputs(5)
    np.testing.assert_array_equal(attend(*arrays, "splash", Seeing(16)), attend(*arrays, "einsum", Seeing(16)))


def test_what_the_kernel_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="100 tokens are no multiple of 128"):
        splash(*inputs(100), Seeing(16))
    layout = MeshLayout(make_mesh(MeshConfig(tensor=4), jax.devices()[:4]))
    with use_layout(layout), pytest.raises(ValueError, match=r"make islands\.mesh\.tensor a divisor of num_kv_heads"):
        splash(*inputs(128), Seeing(16))
