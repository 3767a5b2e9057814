"""Vision models compared with the decoder; each patch is one word of the decoder."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax.settings.run import RunConfig
from diloco_jax.training.flops import model_flops
from diloco_jax.training.models import block
from diloco_jax.training.models.attention import attend_to
from diloco_jax.training.models.config import ModelConfig
from diloco_jax.training.models.protocol import join_model, load_model
from tests.training.outlines import drawn, outline

pytestmark = pytest.mark.usefixtures("quick_compiler")

VISION = "diloco_jax.training.models.vision"
SIZES = {"dim": 8, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "mlp_dim": 12}
TINY = {**SIZES, "vocab_size": 5, "image_size": 4, "channels": 2, "patch_size": 2}
IMAGES = np.random.default_rng(0).integers(0, 256, (3, 4, 4, 2), np.uint8)
TEXTS = np.array([[1, 2, 3, 0], [4, 0, 0, 0], [2, 2, 1, 4]], np.int32)


def model_and_reference(name: str) -> tuple[Any, np.ndarray]:
    """A model far from its initial values, and the decoder's logits of all patches and TEXTS but their last token."""
    graphdef, shapes, _ = outline(lambda: load_model(f"{VISION}:{name}", TINY, 0))
    p = drawn(shapes)
    like, named, _ = outline(lambda: load_model(ModelConfig().module, {**SIZES, "vocab_size": 9}, 0))
    program, logits = jax.jit(lambda own, tokens: join_model(like, own)(tokens)), []
    for image, text in zip(IMAGES / 127.5 - 1, TEXTS, strict=True):
        cut = [image[i : i + 2, j : j + 2].ravel() for i in (0, 2) for j in (0, 2)]
        words = (np.stack(cut) @ p["project/kernel"] + p.get("positions", 0)) / np.sqrt(8)
        own = {path: p[path] for path in named} | {"embed/embedding": np.concatenate([p["embed/embedding"], words])}
        tokens = [5, 6, 7, 8, *(text[:-1] if "Text" in name else ())]
        logits.append(np.asarray(program(own, jnp.asarray([tokens]))[0, :, :5]))
    return join_model(graphdef, jax.tree.map(jnp.asarray, p)), np.stack(logits)


def nats(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, labels[..., None], -1)[..., 0]


def loss_of(model: Any, **batch: np.ndarray) -> tuple[float, dict[str, float]]:
    loss, metrics = jax.jit(lambda b: model.loss(b))({name: jnp.asarray(value) for name, value in batch.items()})
    return float(loss), {name: float(value) for name, value in metrics.items()}


def test_classes_are_read_where_all_patches_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = jnp.ones((1, 4, 4), bool)
    monkeypatch.setattr(block, "attend", lambda q, k, v, _, rules, *__: attend_to(q, k, v, everything, rules))
    model, each = model_and_reference("VisionTransformer")
    logits, labels = each.mean(1), np.array([0, 4, 2], np.int32)
    loss, metrics = loss_of(model, image=IMAGES, label=labels)
    assert loss == pytest.approx(nats(logits, labels).mean(), rel=1e-4)
    assert metrics == {"accuracy": pytest.approx(np.mean(logits.argmax(1) == labels))}
    assert loss_of(model, image=IMAGES, label=np.int32(logits.argmax(1)))[1] == {"accuracy": 1.0}
    for unknown in (labels + 1, labels - 100, -np.ones_like(labels)):
        assert np.isnan(loss_of(model, image=IMAGES, label=unknown)[0]), "a label that the model does not know"
    with pytest.raises(ValueError, match=r"images are 4 x 4 x 1, but the model needs 4 x 4 x 2"):
        loss_of(model, image=IMAGES[..., :1], label=labels)


def test_texts_are_predicted_from_all_patches_and_what_is_before() -> None:
    model, logits = model_and_reference("ImageTextDecoder")
    expected, counted = nats(logits[:, 3:], TEXTS), np.array([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]], np.int32)
    assert loss_of(model, image=IMAGES, tokens=TEXTS) == (pytest.approx(expected.mean(), rel=1e-4), {"weight": 12.0})
    masked = loss_of(model, image=IMAGES, tokens=TEXTS, segments=counted)
    assert masked == (pytest.approx((expected * counted).sum() / 10, rel=1e-4), {"weight": 10.0})
    written = np.asarray(jax.jit(lambda image: model.caption(image, 3))(IMAGES))
    tries = np.array([[[*written[0, :2], last]] for last in range(5)], np.int32)
    best = jax.jit(jax.vmap(lambda tokens: model.loss({"image": jnp.asarray(IMAGES[:1]), "tokens": tokens})[0]))(tries)
    assert written[0, 0] == logits[0, 3].argmax() and written[0, 2] == np.argmin(best)


def test_flops_are_those_of_the_patches_and_bad_sizes_are_refused() -> None:
    # A layer has 4 x 8 x 8 + 3 x 8 x 10 weights.
    args = {**TINY, "num_kv_heads": 2, "mlp_dim": 10}
    weights, attention = 2 * (4 * 64 + 240) + 5 * 8, 2 * 2 * 10 * 8
    flops = model_flops(ModelConfig(module=f"{VISION}:ImageTextDecoder", args=args), {}, 3, 6).flops
    assert flops == 3 * 3 * (6 + 4) * (2 * weights + attention)
    # The model reads no tokens.
    RunConfig(model=ModelConfig(module=f"{VISION}:VisionTransformer", args=TINY))
    with pytest.raises(ValueError, match=r"vocab_size is 5, but the data has ids below 256"):
        RunConfig(model=ModelConfig(module=f"{VISION}:ImageTextDecoder", args=TINY))
    with pytest.raises(ValueError, match=r"image_size 4, channels 2 and patch_size 3"):
        outline(lambda: load_model(f"{VISION}:VisionTransformer", {**TINY, "patch_size": 3}, 0))
