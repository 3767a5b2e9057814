"""Prompts read at once and texts continued token by token, against the whole text read at once."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from diloco_jax.training.models.block import Caches, cache_bytes
from tests.training.models.test_decoder import (
    DELTA,
    GEMMA,
    KINDS,
    MIXED,
    SHARED,
    TOKENS,
    logits_of,
    randomised,
    stacked,
)

pytestmark = pytest.mark.usefixtures("quick_compiler")

LLAMA = {"num_layers": 2, "activation": "silu", "tie_embeddings": False}
FAMILIES = {"llama": LLAMA, "gemma": GEMMA, "kinds": KINDS, "shared": SHARED, "mixed": MIXED, "delta": DELTA}
# One prompt is shorter than the windows.
LENGTHS = np.int32([5, 2])
STEPS = 9
SIZE = TOKENS.shape[1]


@partial(jax.jit, static_argnums=0)
def read(graphdef: Any, state: Any, prompts: Any, later: Any) -> tuple[jax.Array, jax.Array, Caches]:
    """Return the logits after the prompts, those after each later token [step, text, id], and the caches."""
    model = nnx.merge(graphdef, state)
    first, caches = model.prefill(prompts, jnp.asarray(LENGTHS), size=SIZE)

    def step(caches: Caches, tokens: jax.Array) -> tuple[Caches, jax.Array]:
        logits, caches = model.step(tokens, caches, size=SIZE)
        return caches, logits

    caches, logits = jax.lax.scan(step, caches, later)
    return first, logits, caches


@pytest.mark.parametrize("options", FAMILIES.values(), ids=FAMILIES)
def test_unequal_prompts_and_their_continuations_are_those_of_each_whole_text(options: dict[str, object]) -> None:
    """Whatever pads the prompts, and after the stacks of layers have been cut."""
    plain = randomised(**options)
    model = stacked(plain, options).joined()
    model.unstack()
    # Padding is never read; 3 and 7 tokens of it stand behind the prompts.
    prompts = np.where(np.arange(8)[None] < LENGTHS[:, None], TOKENS[:, :8], 7)
    later = np.stack([TOKENS[row, n : n + STEPS] for row, n in enumerate(LENGTHS)], axis=1)
    first, found, caches = read(*nnx.split(model), prompts, later)
    # Both programs add in another order.
    expected = logits_of(plain, TOKENS)
    for row, n in enumerate(LENGTHS):
        np.testing.assert_allclose(first[row], expected[row, n - 1], atol=3e-4)
        np.testing.assert_allclose(found[:, row], expected[row, n : n + STEPS], atol=3e-4)
    assert caches.column == 14 and caches.lengths.tolist() == [14, 11]
    if "delta" not in str(options.get("pattern")):
        assert cache_bytes(caches.layers) == computed_bytes(model.config)


def computed_bytes(c: Any) -> int:
    """Return the bytes of keys and values of two texts: of a window, or of the whole text, for layers with keys."""
    kinds = [c.of_kind(c.kind(layer)) for layer in range(c.num_layers)]
    return sum(2 * 2 * (o.window or SIZE) * o.num_kv_heads * o.head_dim * 4 for o in kinds if not o.kv_from)


def test_the_keys_of_a_narrow_layer_suffice_for_a_wider_one_that_uses_them() -> None:
    wide = {**SHARED["kinds"]["local2"], "window": 5}  # type: ignore[index]
    plain = randomised(**{**SHARED, "kinds": {**SHARED["kinds"], "local2": wide}})  # type: ignore[dict-item]
    model = plain.joined()
    caches = jax.eval_shape(lambda: model.prefill(jnp.asarray(TOKENS), jnp.asarray(LENGTHS), size=SIZE)[1])
    assert {cache.keys.shape[2] for cache in caches.layers if cache} == {5, SIZE}
