"""Vision models against a NumPy forward pass written from the formulas."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax.training.models.protocol import join_model, load_model, split_model

pytestmark = pytest.mark.usefixtures("quick_compiler")

TINY = {"image_size": 4, "channels": 2, "patch_size": 2, "num_classes": 3, "dim": 8, "num_layers": 2, "num_heads": 2}
IMAGES = np.random.default_rng(0).integers(0, 256, (5, 4, 4, 2), np.uint8)
VIT = "diloco_jax.training.models.vision:VisionTransformer"
LABELS = np.array([0, 2, 1, 1, 0], np.int32)


def randomised(model: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """The same model with every parameter away from its special initial value, and these parameters."""
    graphdef, params = split_model(model)
    rng = np.random.default_rng(5)
    moved = {p: np.float32(v + 0.3 * rng.normal(size=v.shape)) for p, v in params.items()}
    return join_model(graphdef, {p: jnp.asarray(v) for p, v in moved.items()}), moved


def patches_of(image: np.ndarray) -> np.ndarray:
    x = image / 127.5 - 1
    return np.stack([x[i : i + 2, j : j + 2].reshape(-1) for i in (0, 2) for j in (0, 2)])


def reference_logits(p: dict[str, np.ndarray], image: np.ndarray, pool: str) -> np.ndarray:
    """One image at a time, one head at a time, float64."""

    def norm(x, name):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
        return x * p[f"{name}/scale"] + p[f"{name}/bias"]

    def gelu(x):
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    x = patches_of(image) @ p["patches/project/kernel"]
    if "positions" in p:
        x = x + p["positions"]
    else:
        turns = [(at, math.exp(-math.log(10_000) * i)) for at in range(2) for i in range(2)]
        wave = {at: [at * speed for of, speed in turns if of == at] for at in range(2)}
        x = x + [[f(a) for at in (n % 2, n // 2) for f in (math.sin, math.cos) for a in wave[at]] for n in range(4)]
    if pool == "token":
        x = np.concatenate([p["token"][None], x])
    for layer in range(2):
        w = {k.removeprefix(f"blocks/{layer}/"): v for k, v in p.items() if k.startswith(f"blocks/{layer}/")}
        y = norm(x, f"blocks/{layer}/norm_attention")
        heads = []
        for h in (slice(0, 4), slice(4, 8)):
            q, k, v = (y @ w[f"{name}/kernel"][:, h] for name in "qkv")
            scores = np.exp(q @ k.T / 2)
            heads.append(scores / scores.sum(1, keepdims=True) @ v)
        x = x + np.concatenate(heads, 1) @ w["out/kernel"]
        x = x + gelu(norm(x, f"blocks/{layer}/norm_mlp") @ w["up/kernel"]) @ w["down/kernel"]
    x = norm(x, "norm_final")
    return (x[0] if pool == "token" else x.mean(0)) @ p["head/kernel"]


@pytest.mark.parametrize(("positions", "pool"), [("sincos", "mean"), ("learned", "token")])
def test_classes_are_those_of_the_formulas(positions: str, pool: str) -> None:
    args = {**TINY, "mlp_dim": 12, "positions": positions, "pool": pool}
    model, params = randomised(load_model(VIT, args, 0))
    expected = np.stack([reference_logits(params, image, pool) for image in IMAGES])
    np.testing.assert_allclose(model(jnp.asarray(IMAGES)), expected, rtol=1e-4, atol=1e-4)
    loss, metrics = model.loss({"image": jnp.asarray(IMAGES), "label": jnp.asarray(LABELS)})
    likely = np.exp(expected) / np.exp(expected).sum(1, keepdims=True)
    assert float(loss) == pytest.approx(-np.log(likely[range(5), LABELS]).mean(), rel=1e-5)
    assert float(metrics["accuracy"]) == pytest.approx(np.mean(expected.argmax(1) == LABELS))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"patch_size": 3}, "image_size is 4; make it a multiple of patch_size"),
        ({"dim": 6}, "dim is 6"),
        ({"pool": "max"}, "pool is 'max'; choose from mean, token"),
    ],
)
def test_bad_sizes_are_refused(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_model(VIT, {**TINY, **args}, 0)


def test_images_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="images are 4 x 4 x 1, but the model's are 4 x 4 x 2"):
        load_model(VIT, TINY, 0)(jnp.asarray(IMAGES[..., :1]))
