"""Vision models against a NumPy forward pass written from the formulas."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax.training.flops import model_flops
from diloco_jax.training.models.config import ModelConfig
from diloco_jax.training.models.protocol import join_model, load_model, split_model

pytestmark = pytest.mark.usefixtures("quick_compiler")

VISION = "diloco_jax.training.models.vision"
TINY = {"vocab_size": 5, "dim": 8, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "mlp_dim": 12}
TINY |= {"image_size": 4, "channels": 2, "patch_size": 2}
IMAGES = np.random.default_rng(0).integers(0, 256, (3, 4, 4, 2), np.uint8)
LABELS = np.array([0, 4, 2], np.int32)
TEXTS = np.array([[1, 2, 3, 0], [4, 0, 0, 0], [2, 2, 1, 4]], np.int32)


def randomised(name: str) -> tuple[Any, dict[str, np.ndarray]]:
    """A model with every parameter, also the norms' scales, away from its special initial value; the parameters."""
    graphdef, params = split_model(load_model(f"{VISION}:{name}", TINY, 0))
    rng = np.random.default_rng(5)
    moved = {p: np.float32(v + 0.3 * rng.normal(size=v.shape)) for p, v in params.items()}
    return join_model(graphdef, {p: jnp.asarray(v) for p, v in moved.items()}), moved


def patches_of(p: dict[str, np.ndarray], image: np.ndarray) -> np.ndarray:
    x = image / 127.5 - 1
    return np.stack([x[i : i + 2, j : j + 2].ravel() for i in (0, 2) for j in (0, 2)]) @ p["project/kernel"]


def logits_of(p: dict[str, np.ndarray], x: np.ndarray, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """What comes out of the layers, and the table, for one example; one head at a time, float64."""

    def norm(x, scale):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale

    def rope(x):
        z = (x[:, :2] + 1j * x[:, 2:]) * np.exp(1j * np.arange(len(x))[:, None] * 10_000.0 ** -np.array([0, 0.5]))
        return np.concatenate([z.real, z.imag], 1)

    def gelu(x):
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    for layer in range(2):
        w = {k.removeprefix(f"blocks/{layer}/"): v for k, v in p.items() if k.startswith(f"blocks/{layer}/")}
        y = norm(x, w["norm_attention/scale"])
        k, v = rope(y @ w["k/kernel"]), y @ w["v/kernel"]
        heads = []
        for head in range(2):
            scores = np.exp(rope(y @ w["q/kernel"][:, 4 * head : 4 * head + 4]) @ k.T / 2)
            scores = np.tril(scores) if causal else scores
            heads.append(scores / scores.sum(1, keepdims=True) @ v)
        x = x + np.concatenate(heads, 1) @ w["out/kernel"]
        y = norm(x, w["norm_mlp/scale"])
        x = x + (gelu(y @ w["gate/kernel"]) * (y @ w["up/kernel"])) @ w["down/kernel"]
    return norm(x, p["norm_final/scale"]), p["embed/embedding"]


def nats(logits: np.ndarray, label: int) -> float:
    return float(np.log(np.exp(logits).sum()) - logits[label])


def loss_of(model: Any, **batch: np.ndarray) -> tuple[float, dict[str, float]]:
    loss, metrics = jax.jit(lambda b: model.loss(b))({name: jnp.asarray(value) for name, value in batch.items()})
    return float(loss), {name: float(value) for name, value in metrics.items()}


def test_classes_are_those_of_the_formulas() -> None:
    model, p = randomised("VisionTransformer")
    expected = []
    for image in IMAGES:
        x, table = logits_of(p, patches_of(p, image) + p["positions"], causal=False)
        expected.append(x.mean(0) @ table.T)
    loss, metrics = loss_of(model, image=IMAGES, label=LABELS)
    assert loss == pytest.approx(np.mean([nats(row, at) for row, at in zip(expected, LABELS, strict=True)]), rel=1e-4)
    right = np.argmax(expected, axis=1)
    assert metrics == {"accuracy": pytest.approx(np.mean(right == LABELS))}
    assert loss_of(model, image=IMAGES, label=np.int32(right))[1] == {"accuracy": 1.0}
    assert np.isnan(loss_of(model, image=IMAGES, label=LABELS + 1)[0]), "a label that the model does not know"


def test_texts_are_predicted_from_all_patches_and_what_is_before() -> None:
    model, p = randomised("ImageTextDecoder")
    expected, counted = [], np.array([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]], np.int32)
    for image, text in zip(IMAGES, TEXTS, strict=True):
        tokens = p["embed/embedding"][text[:-1]] * np.sqrt(8)
        x, table = logits_of(p, np.concatenate([patches_of(p, image), tokens]), causal=True)
        expected.append([nats(row, at) for row, at in zip(x[3:] @ table.T, text, strict=True)])
    assert loss_of(model, image=IMAGES, tokens=TEXTS) == (pytest.approx(np.mean(expected), rel=1e-4), {"weight": 12.0})
    masked = loss_of(model, image=IMAGES, tokens=TEXTS, segments=counted)
    assert masked == (pytest.approx(np.sum(expected * counted) / 10, rel=1e-4), {"weight": 10.0})


def test_bad_images_are_refused() -> None:
    with pytest.raises(ValueError, match=r"image_size 4, channels 2 and patch_size 3"):
        load_model(f"{VISION}:VisionTransformer", {**TINY, "patch_size": 3}, 0)
    model = load_model(f"{VISION}:VisionTransformer", TINY, 0)
    with pytest.raises(ValueError, match=r"images are 4 x 4 x 1, but the model's are 4 x 4 x 2"):
        loss_of(model, image=IMAGES[..., :1], label=LABELS)


def test_flops_are_those_of_the_patches() -> None:
    args = {**TINY, "num_kv_heads": 2, "mlp_dim": 10}  # a layer has 4 x 8 x 8 + 3 x 8 x 10 weights
    config = ModelConfig(module=f"{VISION}:ImageTextDecoder", args=args)
    weights, attention = 2 * (4 * 64 + 240) + 5 * 8, 2 * 2 * 10 * 8
    assert model_flops(config, {}, 3, 6).flops == 3 * 3 * (6 + 4) * (2 * weights + attention)
