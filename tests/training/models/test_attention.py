"""The ways to compute attention give the same numbers."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax.training.models import attention as attending
from diloco_jax.training.models.attention import Seeing, attend, splash
from diloco_jax.training.sharding import MeshConfig, MeshLayout, make_mesh, use_layout

pytestmark = pytest.mark.usefixtures("quick_compiler")


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


SEGMENTS = np.sort(np.random.default_rng(2).integers(0, 4, (2, 128)), axis=1).astype(np.int32)


@pytest.mark.parametrize(("kv_heads", "rules", "segments"), [(1, Seeing(16), None), (2, Seeing(9, 2.0, 21), SEGMENTS)])
def test_the_kernel_is_the_einsum_on_a_mesh(kv_heads: int, rules: Seeing, segments: np.ndarray | None) -> None:
    ids = None if segments is None else jnp.asarray(segments)
    layout = MeshLayout(make_mesh(MeshConfig(fsdp=2, tensor=2), jax.devices()[:4]))
    arrays = inputs(128, kv_heads=kv_heads)

    def kernel(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        with use_layout(layout):
            return splash(q, k, v, rules, ids, interpret=True)

    def einsum(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend(q, k, v, "einsum", rules, ids)

    for got, want in zip(with_gradients(kernel, arrays), with_gradients(einsum, arrays), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.parametrize("method", ["einsum", "dot_product"])
@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("segments", [None, [1, 1, 1, 1, 2, 2, 2, 0, 0]])
def test_each_query_sees_what_it_may(method: str, cap: float, window: int, segments: list[int] | None) -> None:
    q, k, v = (np.asarray(x, np.float64)[:1] for x in inputs(9, heads=2, kv_heads=1, width=4))
    scores = np.einsum("btnh,bsoh->bnts", q, k) / 5
    scores = cap * np.tanh(scores / cap) if cap else scores
    t, s = np.indices((9, 9))
    ids = np.array(segments or [1] * 9)
    seen = (s <= t) & (t - s < (window or 9)) & (ids[t] == ids[s])
    weights = np.exp(scores) * seen
    want = np.einsum("bnts,bsoh->btnh", weights / weights.sum(-1, keepdims=True), v)
    given = None if segments is None else jnp.asarray([segments], jnp.int32)
    arrays = (jnp.asarray(x, jnp.float32) for x in (q, k, v))
    np.testing.assert_allclose(attend(*arrays, method, Seeing(25, cap, window), given), want, atol=1e-5)


def test_splash_is_einsum_where_there_is_no_tpu_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    arrays = inputs(5)
    attending._warn_of_einsum.cache_clear()
    attend(*arrays, "splash", Seeing(16))
    np.testing.assert_array_equal(attend(*arrays, "splash", Seeing(16)), attend(*arrays, "einsum", Seeing(16)))
    assert len(caplog.messages) == 1 and "length x length" in caplog.messages[0]


def test_what_the_kernel_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="100 tokens are not a multiple of 128"):
        splash(*inputs(100), Seeing(16))
    layout = MeshLayout(make_mesh(MeshConfig(tensor=4), jax.devices()[:4]))
    with use_layout(layout), pytest.raises(ValueError, match=r"make islands\.mesh\.tensor a divisor of num_kv_heads"):
        splash(*inputs(128), Seeing(16))
