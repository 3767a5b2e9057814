"""The decoder of images and text: which place gets which soft token, what sees what, and what counts in the loss."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from diloco_jax.core.kinds import KNOWN, class_of
from diloco_jax.training.flops import model_flops
from diloco_jax.training.models.attention import Seeing, attend
from diloco_jax.training.models.config import SEEING_DECODER, ModelConfig
from diloco_jax.training.models.decoder import Decoder
from diloco_jax.training.models.protocol import join_model
from diloco_jax.training.models.seeing import SeeingDecoder
from diloco_jax.training.sharding import MeshConfig, MeshLayout, make_mesh, use_layout
from tests.training.outlines import Outline, drawn, outline

pytestmark = pytest.mark.usefixtures("quick_compiler")

IMAGE = 95
TOWER = {"dim": 16, "num_layers": 1, "num_heads": 2, "head_dim": 8, "mlp_dim": 24, "patch_size": 2, "positions": 16}
SIZES: dict[str, Any] = {
    "vocab_size": 96, "dim": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "mlp_dim": 24,
    "tower": TOWER, "image_token": IMAGE, "image_begin": 94, "image_end": 93,
}  # fmt: skip
# One layer with a window where an image sees itself, and one without either.
KINDS = {"pattern": ["local", "global"], "kinds": {"local": {"window": 4, "see_images": True}, "global": {}}}
PLAIN = {name: value for name, value in SIZES.items() if name != "tower" and not name.startswith("image")}
KINDS_OF_TEXT = {"pattern": ["local", "global"], "kinds": {"local": {"window": 4}, "global": {}}, "scan_layers": True}
# Columns and rows of patches: 6, 2 and 1 soft tokens. The second sample lacks its second image.
IMAGES = (((9, 6), (3, 6)), ((3, 3),))
TOKENS = np.random.default_rng(0).integers(0, 90, (2, 20)).astype(np.int32)
# The places of soft tokens in both samples, and the images that they belong to.
SOFT = np.zeros((2, 20), np.int32)
SOFT[0, 3:9], SOFT[0, 12:14], SOFT[1, 5] = 1, 2, 1
TOKENS[SOFT > 0] = IMAGE


def outline_of(**changes: Any) -> Outline:
    return outline(lambda: SeeingDecoder.from_config({**SIZES, **changes}, rngs=nnx.Rngs(0)))


def build(**changes: Any) -> Any:
    """A model far from its initial values."""
    graphdef, params, _ = outline_of(**changes)
    return join_model(graphdef, jax.tree.map(jnp.asarray, drawn(params, seed=7)))


def batch_of(tokens: np.ndarray = TOKENS) -> dict[str, np.ndarray]:
    """The tokens with their images; padding has random pixels, which nothing may read."""
    positions = np.full((2, 2, 63, 2), -1, np.int32)
    for sample, images in zip(positions, IMAGES, strict=True):
        for image, (columns, rows) in zip(sample, images, strict=False):
            image[: columns * rows] = [(x, y) for y in range(rows) for x in range(columns)]
    patches = np.random.default_rng(1).integers(0, 256, (2, 2, 63, 12), np.uint8)
    return {"tokens": tokens, "patches": patches, "patch_positions": positions}


def on_device(batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    return {name: jnp.asarray(value) for name, value in batch.items()}


@partial(jax.jit, static_argnums=0)
def applied(graphdef: Any, state: Any, arrays: dict[str, jax.Array]) -> jax.Array:
    found: jax.Array = nnx.merge(graphdef, state)(**arrays)
    return found


def logits_of(model: Any, batch: dict[str, np.ndarray]) -> np.ndarray:
    return np.asarray(applied(*nnx.split(model), on_device(batch)))


def test_each_place_gets_the_soft_token_of_its_number() -> None:
    model, batch = build(), on_device(batch_of())
    x, places, _ = jax.jit(lambda arrays: tuple(model.inputs(arrays)))(batch)
    np.testing.assert_array_equal(places.images, SOFT)
    tower = jax.jit(lambda p, at: model.tower(p, at)[0])
    # Each image alone in the tower.
    for sample, images in enumerate(IMAGES):
        for image, (columns, rows) in enumerate(images):
            alone = (batch[name][sample, image][None] for name in ("patches", "patch_positions"))
            soft = tower(*alone)[0, : columns * rows // 9]
            np.testing.assert_allclose(np.asarray(x)[sample, SOFT[sample] == image + 1], soft, atol=1e-5)
    text = SOFT == 0
    np.testing.assert_allclose(np.asarray(x)[text], 4 * np.asarray(model.embed.embedding[...])[TOKENS[text]], rtol=1e-6)


@pytest.mark.parametrize("see", [True, False])
def test_soft_tokens_see_later_ones_of_their_image_and_text_before_it_does_not(see: bool) -> None:
    # One layer, so that a change travels along one arrow only.
    model = build(num_layers=1, window=4, see_images=see)

    @jax.jit
    def changed(arrays: dict[str, jax.Array], place: int) -> jax.Array:
        # The tower mixes an image's patches, so the change is made behind it.
        x, places, vectors = model.inputs(arrays)
        both = [model.hidden(each, places, vectors)[0] for each in (x, x.at[0, place].add(1.0))]
        return jnp.max(jnp.abs(both[0] - both[1]), axis=-1) > 1e-4

    last_soft, text = (np.asarray(changed(on_device(batch_of()), place)) for place in (8, 10))
    # With a window of four, the place and the three behind it see the change; the image's earlier tokens only if they
    # see their whole image.
    assert np.flatnonzero(last_soft[0]).tolist() == [*(range(3, 8) if see else ()), 8, 9, 10, 11]
    assert np.flatnonzero(text[0]).tolist() == [10, 11, 12, 13] and not last_soft[1].any()


@pytest.mark.parametrize("method", ["einsum", "dot_product", "splash"])
@pytest.mark.parametrize(("window", "segments"), [(0, False), (3, False), (3, True)])
def test_attention_is_the_softmax_over_what_is_seen(method: str, window: int, segments: bool) -> None:
    rng = np.random.default_rng(3)
    q, k, v = (rng.normal(size=(1, 9, heads, 8)).astype(np.float32) for heads in (2, 1, 1))
    images = np.array([[0, 1, 1, 1, 1, 0, 2, 2, 0]])
    texts = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2]]) if segments else None
    arrays = [jnp.asarray(each) for each in (q, k, v)]
    ids = [None if each is None else jnp.asarray(each, jnp.int32) for each in (texts, images)]
    found = attend(*arrays, method, Seeing(8, 0.0, window), ids[0], None, ids[1])
    want = np.zeros((1, 9, 2, 8))
    for at in range(9):
        near = range(at - window + 1 if window else 0, 9)
        seen = [s for s in near if s >= 0 and (s <= at or images[0, s] == images[0, at] > 0)]
        seen = [s for s in seen if texts is None or texts[0, s] == texts[0, at]]
        scores = np.exp(q[0, at] @ k[0, seen, 0].T / np.sqrt(8))
        want[0, at] = scores / scores.sum(-1, keepdims=True) @ v[0, seen, 0]
    np.testing.assert_allclose(found, want, atol=1e-5)


def test_only_text_counts_in_the_loss() -> None:
    model, batch = build(**KINDS), batch_of()
    segments = np.ones_like(TOKENS)
    segments[0, 15:], segments[1, 10:] = 2, 0
    read = {**batch, "tokens": TOKENS[:, :-1], "segments": segments[:, :-1]}
    logits = logits_of(model, read)
    said = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nats = -np.take_along_axis(said, TOKENS[:, 1:, None], -1)[..., 0]
    counted = (SOFT[:, 1:] == 0) & (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    loss, metrics = jax.jit(lambda arrays: model.loss(arrays))(on_device({**batch, "segments": segments}))
    assert float(loss) == pytest.approx(nats[counted].mean(), rel=1e-5)
    assert float(metrics["weight"]) == counted.sum()
    # A text of a segment behind another one is alone.
    alone = logits_of(model, {"tokens": TOKENS[:1, 15:19]})
    np.testing.assert_allclose(logits[0, 15:], alone[0], atol=1e-4)


def test_a_place_without_a_soft_token_is_not_overlooked() -> None:
    model, tokens = build(), TOKENS.copy()
    tokens[1, 6] = IMAGE
    loss = jax.jit(lambda arrays: model.loss(arrays)[0])
    assert np.isnan(loss(on_device(batch_of(tokens)))) and np.isfinite(loss(on_device(batch_of())))
    # Without images, the token is one as all others.
    assert np.isfinite(loss({"tokens": jnp.asarray(tokens)}))


def test_it_writes_about_images_what_its_logits_say() -> None:
    model, batch = build(per_layer_dim=4, **KINDS), batch_of()
    arrays = {name: jnp.asarray(batch[name][:1]) for name in ("patches", "patch_positions")}

    how = {"temperature": 0.0, "context": 24, "ids": 96, "arrays": arrays}
    given = jnp.asarray([*TOKENS[0, :15], 0, 0, 0, 0, 0])
    write = jax.jit(lambda prompt, length: model.generate(prompt, 4, jax.random.key(0), length=length, **how))
    found = np.asarray(write(given, 15))
    # Later tokens do not change what the logits of earlier ones are, so one call gives those of all.
    whole = np.concatenate([TOKENS[:1, :15], found[None]], axis=1)
    said = logits_of(model, {**arrays, "tokens": whole})[0, 14:-1]
    np.testing.assert_array_equal(np.delete(said, IMAGE, axis=-1).argmax(-1), found)


# A stack of layers, and a tower with constants.
TRAINED = {**KINDS, "scan_layers": True, "tower": {**TOWER, "clipped": True, "standardize": True}}


def loss_and_gradients(params: dict[str, Any], batch: dict[str, Any]) -> Any:
    graphdef = outline_of(**TRAINED).graphdef
    return jax.value_and_grad(lambda p: join_model(graphdef, p).loss(batch)[0])(params)  # type: ignore[operator]


@cache
def on_one_device() -> Any:
    return jax.jit(loss_and_gradients)(drawn(outline_of(**TRAINED).params, seed=7), batch_of())


def test_every_parameter_but_constants_has_a_gradient() -> None:
    moved = {path: np.abs(gradient).max() > 0 for path, gradient in on_one_device()[1].items()}
    constants = ("bounds", "std_bias", "std_scale")
    assert {path for path in moved if not moved[path]} == {path for path in moved if path.endswith(constants)}
    names = outline(lambda: Decoder.from_config(PLAIN | KINDS_OF_TEXT, rngs=nnx.Rngs(0))).params.keys()
    assert {path for path in moved if not path.startswith("tower/")} == names


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_token": 96}, r"image_token is 96; it must be at least 0, and below vocab_size \(96\)"),
        ({"tower": {"text_dim": 8}}, r"tower.text_dim is 8, but model.args.dim 16; remove text_dim"),
        ({"tower": {"width": 8}}, r"model.args.tower.width is unknown"),
        ({**KINDS, "kinds": {"local": {"tower": {}}, "global": {}}}, r"kinds.local has tower, an option of the whole"),
    ],
)
def test_impossible_options_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        outline_of(**changes)


def test_a_mesh_computes_what_one_device_does() -> None:
    _, shapes, axes = outline_of(**TRAINED)
    params, (want, each) = drawn(shapes, seed=7), on_one_device()
    layout = MeshLayout(make_mesh(MeshConfig(fsdp=2, tensor=2), jax.devices()[:4]))
    shardings = {path: layout.sharding(value.shape, axes[path]) for path, value in params.items()}
    rows = {
        name: jax.device_put(value, layout.sharding(value.shape, ("batch", *[None] * (value.ndim - 1))))
        for name, value in batch_of().items()
    }

    def program(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> Any:
        with use_layout(layout):
            return loss_and_gradients(params, batch)

    found, got = jax.jit(program, out_shardings=(None, shardings))(jax.device_put(params, shardings), rows)
    assert float(found) == pytest.approx(float(want), rel=1e-5)
    for path, value in got.items():
        np.testing.assert_allclose(value, each[path], atol=2e-4, err_msg=path)
    kernel = params["tower/blocks/down/kernel"]
    assert np.prod(shardings["tower/blocks/down/kernel"].shard_shape(kernel.shape)) == kernel.size / 4


def test_flops_are_those_of_the_text_and_of_all_patches() -> None:
    model = ModelConfig(module=SEEING_DECODER, args={**SIZES, **KINDS})
    text = model_flops(ModelConfig(args=PLAIN | KINDS_OF_TEXT), {}, 3, 20).flops
    # Two soft tokens are 18 patches of 12 numbers. A layer of the tower has 4 x 16 x 16 + 3 x 16 x 24 weights.
    tower = 18 * (12 * 16 + 4 * 16 * 16 + 3 * 16 * 24) + 2 * 16 * 16
    assert model_flops(model, {}, 3, 20, 2).flops == text + 3 * 3 * (2 * tower + 4 * 18 * 18 * 16)
    assert model_flops(model, {}, 3, 20).flops == text


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("tower/blocks/0/q/kernel", "attention"),
        ("tower/blocks/0/gate/kernel", "mlp"),
        ("tower/blocks/0/norm_mlp/scale", "norm"),
        ("tower/embed_positions", "embedding"),
    ],
)
def test_tensors_of_the_tower_are_of_known_classes(path: str, kind: str) -> None:
    assert class_of(path, KNOWN) == kind
