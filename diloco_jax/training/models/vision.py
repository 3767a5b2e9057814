"""The decoder on images: a vision transformer that classifies an image, and a decoder that writes text about it.

Shapes: B batch, H x W pixels of C channels, P x P pixels of a patch, N patches, D model width. Patches pass through the
layers like tokens, row by row from the upper left:

    classes   x = Layers(patches W + positions), where all patches see each other;   logits = mean_n x E^T
    texts     x = Layers([patches W, E[tokens]]);   each token is predicted from all patches and the tokens before it

Pixels of type uint8 are scaled to -1..1; other types are used unchanged.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int32, Shaped

from diloco_jax.training.models.attention import Seeing
from diloco_jax.training.models.block import Block, Places
from diloco_jax.training.models.decoder import Decoder
from diloco_jax.training.models.layers import Linear
from diloco_jax.training.models.options import DecoderConfig
from diloco_jax.training.models.vocabulary import TABLE_AXES
from diloco_jax.training.sharding import constrain, gather
from diloco_jax.training.state import Batch, Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig(DecoderConfig):
    """Sizes and options of models of images; vocab_size is the number of classes of a VisionTransformer.

    Patches count in seq_len_max too.
    """

    image_size: int = 32
    """Height and width of an image, pixels; a multiple of patch_size."""
    channels: int = 3
    """Numbers per pixel: 3 for colours, 1 for grey."""
    patch_size: int = 4
    """Height and width of a patch, pixels."""

    def __post_init__(self) -> None:
        DecoderConfig.__post_init__(self)
        size, channels, patch = self.image_size, self.channels, self.patch_size
        if min(size, channels, patch) < 1 or size % patch:
            raise ValueError(
                f"model.args: image_size {size}, channels {channels} and patch_size {patch} must be at least 1, and "
                "image_size a multiple of patch_size"
            )

    @property
    def patches(self) -> int:
        """Return the number of patches, N."""
        return (self.image_size // self.patch_size) ** 2


class ImageTextDecoder(Decoder):
    """A decoder that sees an image before the text; batches are {"image": [B, H, W, C], "tokens": [B, T]}."""

    config: VisionConfig
    config_class = VisionConfig

    def __init__(self, config: VisionConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs=rngs)
        c, size = config, config.patch_size**2 * config.channels
        with nnx.use_eager_sharding(False):
            self.project = Linear(size, c.dim, ("patch", "embed"), c.dtype, rngs=rngs)

    def patches(self, image: Shaped[Array, "b h w c"]) -> Float[Array, "b n d"]:
        """Cut images into patches, and map each to the width of the model."""
        c = self.config
        if image.shape[1:] != (pixels := (c.image_size, c.image_size, c.channels)):
            have, want = (" x ".join(map(str, shape)) for shape in (image.shape[1:], pixels))
            raise ValueError(
                f"images are {have}, but the model needs {want}; correct model.args.image_size or channels"
            )
        x = image.astype(c.dtype)
        x = x / 127.5 - 1 if image.dtype == jnp.uint8 else x
        side = c.image_size // c.patch_size
        x = x.reshape(-1, side, c.patch_size, side, c.patch_size, c.channels).swapaxes(2, 3)
        return constrain(self.project(x.reshape(len(x), c.patches, -1)), "batch", None, None)

    def loss(self, batch: Batch) -> tuple[Float[Array, ""], Metrics]:
        """Return the mean cross-entropy in nats per token of the text, its first token included, and layers' metrics.

        With `segments` in the batch, tokens of segment 0 do not count. The metric `weight` is the number of tokens that
        count.
        """
        tokens = batch["tokens"]
        weights = (batch.get("segments", jnp.ones_like(tokens)) != 0).astype(jnp.float32)
        x, metrics = self._read(self.patches(batch["image"]), tokens[:, :-1])
        return self.mean_loss(x, tokens, weights=weights), {**metrics, "weight": jnp.sum(weights)}

    def caption(self, image: Shaped[Array, "b h w c"], count: int) -> Int32[Array, "b count"]:
        """Write `count` tokens about each image, always the likeliest next one."""
        patches = self.patches(image)

        def add(at: int | Array, tokens: Array) -> Array:
            # Later tokens, still zeros, do not change the prediction, because attention is causal.
            x = jax.lax.dynamic_slice_in_dim(self._read(patches, tokens)[0], at, 1, axis=1)
            return tokens.at[:, at].set(jnp.argmax(self._logits(x, None)[:, 0], axis=-1).astype(tokens.dtype))

        return jax.lax.fori_loop(0, count, add, jnp.zeros((len(image), count), jnp.int32))

    def _read(self, patches: Float[Array, "b n d"], tokens: Int32[Array, "b t"]) -> tuple[Array, Metrics]:
        """Return the outputs that predict each token and the token after the last one."""
        x, metrics = self.hidden(jnp.concatenate([patches, self.embedded(tokens)], axis=1))
        return x[:, self.config.patches - 1 :], metrics


class VisionBlock(Block):
    """A layer of the decoder where all patches see each other."""

    def mix(
        self,
        q: Float[Array, "b t n h"],
        k: Float[Array, "b t k h"],
        v: Float[Array, "b t k h"],
        rules: Seeing,
        places: Places,
        sinks: Float[Array, " n"] | None,
    ) -> Float[Array, "b t n h"]:
        """Mix the values of all patches."""
        return jax.nn.dot_product_attention(q, k, v)


class VisionTransformer(ImageTextDecoder):
    """A classifier of images; batches are {"image": [B, H, W, C], "label": [B]}."""

    block_class = VisionBlock

    def __init__(self, config: VisionConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs=rngs)
        init = nnx.with_partitioning(nnx.initializers.normal(0.02), TABLE_AXES)
        with nnx.use_eager_sharding(False):
            self.positions = nnx.Param(init(rngs.params(), (config.patches, config.dim)))

    def loss(self, batch: Batch) -> tuple[Float[Array, ""], Metrics]:
        """Return the mean cross-entropy in nats per image, and `accuracy`, the share of images classified correctly."""
        x = self.patches(batch["image"])
        x, metrics = self.hidden(x + gather(self.positions[...].astype(x.dtype), *TABLE_AXES)[None])
        logits, labels = self._logits(x.mean(axis=1, keepdims=True), None)[:, 0], batch["label"]
        # A label of -1 would count as the last class. It becomes an unknown label, which gives NaN as the loss.
        labels = jnp.where(labels < 0, logits.shape[-1], labels)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return loss.mean(), {**metrics, "accuracy": jnp.mean(jnp.argmax(logits, axis=-1) == labels)}
