"""The vision tower by itself: padding, constants, gradients, and stacked layers.

tests/training/convert/test_tower.py holds it against transformers, and test_seeing.py trains it on a mesh.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from diloco_jax.core.kinds import kind_of
from diloco_jax.training.data.images import cut_image
from diloco_jax.training.models.protocol import join_model
from diloco_jax.training.models.tower import TowerConfig, VisionTower, apply_axial_rope
from diloco_jax.training.optimizers import OptimizerConfig, make_inner
from tests.training.outlines import drawn, outline

pytestmark = pytest.mark.usefixtures("quick_compiler")

SIZES = {
    "dim": 16, "num_layers": 2, "num_heads": 4, "head_dim": 8, "mlp_dim": 24, "text_dim": 20, "positions": 24,
    "clipped": True, "standardize": True,
}  # fmt: skip
CONSTANTS = ("bounds", "std_bias", "std_scale")
Params = dict[str, Any]


def tower(**changes: Any) -> tuple[Any, Params, dict[str, Any]]:
    """Structure, parameters far from their initial values, and axes of a tiny tower."""
    graphdef, shapes, axes = outline(lambda: VisionTower(TowerConfig(**{**SIZES, **changes}), rngs=nnx.Rngs(0)))
    params = drawn(shapes, seed=3, std_scale=1.0)
    return graphdef, params, axes


@cache
def images() -> tuple[jax.Array, jax.Array]:
    """Patches and positions of three images of several shapes, and of one place without an image."""
    rng = np.random.default_rng(4)
    cut = [cut_image(rng.integers(0, 256, (*size, 3), np.uint8), 4) for size in ((96, 96), (40, 200), (99, 60))]
    pixels, positions = (
        np.stack([image[i] for image in cut] + [like])
        for i, like in enumerate((np.zeros_like(cut[0].pixels), np.full_like(cut[0].positions, -1)))
    )
    return jnp.asarray(pixels), jnp.asarray(positions)


Forward = Callable[[jax.Array, jax.Array], tuple[np.ndarray, np.ndarray]]


def forward(graphdef: Any, params: Params) -> Forward:
    """The program that returns the embeddings of all soft tokens, and which are real."""
    program = jax.jit(lambda p, *given: join_model(graphdef, p)(*given))  # type: ignore[operator]

    def run(pixels: jax.Array, positions: jax.Array) -> tuple[np.ndarray, np.ndarray]:
        found, real = program(params, pixels, positions)
        return np.asarray(found), np.asarray(real)

    return run


def gradients(graphdef: Any, pixels: jax.Array, positions: jax.Array) -> Any:
    """The program that returns the sum of unequal functions of the real embeddings, and its gradients."""

    def total(params: Params) -> jax.Array:
        found, real = join_model(graphdef, params)(pixels, positions)  # type: ignore[operator]
        return jnp.sum(jnp.where(real[..., None], jnp.sin(found + jnp.arange(20.0)[None, None]), 0))

    return jax.value_and_grad(total)


@cache
def single_gradients() -> tuple[Any, Params]:
    """Return that sum and its gradients for the tower of single layers."""
    graphdef, params, _ = tower()
    found: tuple[Any, Params] = jax.jit(gradients(graphdef, *images()))(params)
    return found


@cache
def stacked_gradients() -> tuple[Any, Params]:
    """Return the same for stacked layers, with rematerialisation."""
    graphdef, like, _ = tower(scan_layers=True, remat="minimal")
    params = {path: joined(tower()[1], path) for path in like}
    found: tuple[Any, Params] = jax.jit(gradients(graphdef, *images()))(params)
    return found


def test_soft_tokens_depend_on_their_image_alone() -> None:
    """Neither padding, its pixels, nor other images change them; pixels may be given as floats."""
    graphdef, params, _ = tower()
    embed, (pixels, positions) = forward(graphdef, params), images()
    found, real = embed(pixels, positions)
    assert real.sum(1).tolist() == [4, 4, 2, 0] and np.isfinite(found).all() and found[real].std() > 0.5
    padding = positions[..., :1] < 0
    others, _ = embed(jnp.where(padding, 99, pixels).astype(jnp.uint8), positions)
    np.testing.assert_array_equal(others[real], found[real])
    for i in range(3):
        alone, _ = embed(*(jnp.stack(4 * [array[i]]) for array in (pixels, positions)))
        np.testing.assert_allclose(alone[3], found[i], atol=1e-5)
    # An image is its patches with their positions, in any order, with padding anywhere.
    order = np.random.default_rng(5).permutation(pixels.shape[1])
    mixed, still = embed(pixels[:, order], positions[:, order])
    np.testing.assert_allclose(mixed[real], found[real], atol=1e-5)
    np.testing.assert_array_equal(still, real)
    floats, _ = embed(jnp.float32(pixels) / 255, positions)
    np.testing.assert_allclose(floats[real], found[real], atol=1e-6)


def test_attention_depends_on_differences_of_columns_and_of_rows() -> None:
    rng = np.random.default_rng(6)
    q, k = (rng.normal(size=(1, 5, 2, 12)).astype(np.float32) for _ in range(2))
    positions = rng.integers(0, 30, (1, 5, 2)).astype(np.int32)

    rope = jax.jit(lambda x, positions: apply_axial_rope(x, positions, 100.0))

    def scores(by: tuple[int, int]) -> np.ndarray:
        moved = positions + np.asarray(by, np.int32)
        return np.einsum("bnhw,bmhw->bhnm", *(rope(x, moved) for x in (q, k)))

    np.testing.assert_allclose(scores((7, 3)), scores((0, 0)), atol=1e-4)
    # Numbers 1 and 4 of a head of 12 are a pair that turns by the second frequency, 100^(-1/3), times the column.
    angle = 100 ** (-1 / 3) * float(positions[0, 2, 0])
    turned = np.asarray(rope(q, positions))[0, 2, 1]
    first, second = q[0, 2, 1, 1], q[0, 2, 1, 4]
    assert float(turned[1]) == pytest.approx(float(first * np.cos(angle) - second * np.sin(angle)), abs=1e-4)
    assert float(turned[4]) == pytest.approx(float(second * np.cos(angle) + first * np.sin(angle)), abs=1e-4)


def joined(params: Params, path: str) -> np.ndarray:
    """The parameter of a stacked tower, from those of its single layers."""
    single = (params[path.replace("s/", f"s/{i}/", 1)] for i in (0, 1))
    return np.asarray(params[path]) if path in params else np.stack([*single])


@pytest.mark.slow
def test_stacked_layers_are_the_single_ones() -> None:
    axes = tower(scan_layers=True)[2]
    assert all((axes[path][0] == "layers") == path.startswith("blocks") for path in axes)
    (want, single), (found, stack) = single_gradients(), stacked_gradients()
    assert float(found) == pytest.approx(float(want), rel=1e-5)
    for path, value in stack.items():
        np.testing.assert_allclose(value, joined(single, path), atol=2e-4, err_msg=path)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_constants_never_change_and_all_weights_learn(name: Literal["adamw", "muon"]) -> None:
    _, params, axes = tower(scan_layers=True)
    changed = stacked_gradients()[1]
    assert all(np.isfinite(value).all() for value in changed.values())
    kinds = {path: kind_of(value.shape, axes[path]) for path, value in params.items()}
    params = jax.tree.map(jnp.asarray, params)
    tx = make_inner(OptimizerConfig(name=name), params, kinds=kinds)
    update = jax.jit(lambda p: optax.apply_updates(p, tx.update(changed, tx.init(p), p)[0]))
    after = update(params)
    constant = {path for path in params if path.endswith(CONSTANTS)}
    assert len(constant) == 7 + 2
    assert {path for path in params if np.array_equal(after[path], params[path])} == constant


def test_wrong_sizes_are_refused() -> None:
    for name, value in (("head_dim", 6), ("head_dim", 0), ("pool", 0), ("positions", -1)):
        with pytest.raises(ValueError, match=rf"model\.args\.tower\.{name} is {value}"):
            TowerConfig(**{name: value})
    graphdef, params, _ = tower()
    pixels, positions = images()
    with pytest.raises(ValueError, match=r"padded to 35 patches, but a soft token has 3 x 3; pad to a multiple of 9"):
        forward(graphdef, params)(pixels[:, 1:], positions[:, 1:])
