"""A decoder of images and text: where the text has a special token, the decoder reads soft tokens of a vision tower.

Shapes: B batch, T length, I images of a sample, N patches of an image, P numbers of a patch, M soft tokens of an image,
D model width. Batches are {"tokens": [B, T], "patches": uint8 [B, I, N, P], "patch_positions": int32 [B, I, N, 2]}, and
may have `segments`. Padding has the positions -1, and an absent image has only padding.

    soft = Tower(patches);   x = soft_k in the k-th place of `image_token`, E[tokens] sqrt(D) in all others

In a batch without `patches`, `image_token` is an ordinary id.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.core import FrozenDict, freeze
from jaxtyping import Array, Bool, Float, Int32

from diloco_jax.training.data.sample import PATCHES, POSITIONS
from diloco_jax.training.models.attention import Seeing, attend
from diloco_jax.training.models.block import Block, Places, places_of
from diloco_jax.training.models.decoder import Decoder, Inputs
from diloco_jax.training.models.options import DecoderConfig
from diloco_jax.training.models.protocol import config_from_args
from diloco_jax.training.models.tower import TowerConfig, VisionTower
from diloco_jax.training.sharding import constrain
from diloco_jax.training.state import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class SeeingConfig(DecoderConfig):
    """Sizes and options of the decoder with a vision tower; the special tokens are those of Gemma 4."""

    vocab_size: int = 262_144
    """Number of token ids; the special tokens are below it."""
    tower: Mapping[str, Any] = field(default_factory=FrozenDict)
    """Sizes and options of the vision tower, the fields of TowerConfig. Its scan_layers, remat and dtype are those of
    the decoder unless they are given."""
    image_token: int = 258_880
    """Id in the places of soft tokens; the loss does not count its predictions, and the model never writes it."""
    image_begin: int = 255_999
    """Id before the soft tokens of an image in a prompt."""
    image_end: int = 258_882
    """Id after the soft tokens of an image in a prompt."""
    pad_token: int = 0
    """Id whose per-layer embedding is used for soft tokens."""
    see_images: bool = False
    """A soft token also sees the later soft tokens of its image; an option of a kind of layers."""

    def __post_init__(self) -> None:
        # Options must be hashable, and a frozen mapping is. No option of the tower is a list, which would not be.
        object.__setattr__(self, "tower", freeze(dict(self.tower)))
        DecoderConfig.__post_init__(self)
        for name in ("image_token", "image_begin", "image_end", "pad_token"):
            if not 0 <= getattr(self, name) < self.vocab_size:
                raise ValueError(
                    f"model.args.{name} is {getattr(self, name)}; it must be at least 0, and below vocab_size "
                    f"({self.vocab_size})"
                )
        if (width := self.tower_config().text_dim) != self.dim:
            raise ValueError(
                f"model.args.tower.text_dim is {width}, but model.args.dim {self.dim}; remove text_dim, or correct it"
            )

    def tower_config(self) -> TowerConfig:
        """Return the configuration of the vision tower."""
        how = {"scan_layers": self.scan_layers, "remat": self.remat, "dtype": self.dtype}
        return config_from_args(TowerConfig, {"text_dim": self.dim, **how, **self.tower}, "model.args.tower")


class SeeingBlock(Block):
    """A layer of the decoder where the soft tokens of an image may see each other."""

    config: SeeingConfig

    def mix(
        self,
        q: Float[Array, "b t n h"],
        k: Float[Array, "b t k h"],
        v: Float[Array, "b t k h"],
        rules: Seeing,
        places: Places,
        sinks: Float[Array, " n"] | None,
    ) -> Float[Array, "b t n h"]:
        """Mix the values of the tokens that each token sees: earlier ones, and with `see_images` later soft tokens of
        its image.
        """
        images = places.images if self.config.see_images else None
        return attend(q, k, v, self.config.attention, rules, places.segments, sinks, images)


class SeeingDecoder(Decoder):
    """A decoder that reads images within its text."""

    config: SeeingConfig
    config_class = SeeingConfig
    block_class = SeeingBlock

    def __init__(self, config: SeeingConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs=rngs)
        self.tower = VisionTower(config.tower_config(), rngs=rngs)

    def weights(self, batch: Batch) -> Float[Array, "b t"]:
        """Return the weights of the predictions of tokens[:, 1:] in the loss: 0 for soft tokens."""
        weights = (batch["tokens"][:, 1:] != self.config.image_token).astype(jnp.float32)
        others = super().weights(batch)
        return weights if others is None else weights * others

    def inputs(self, batch: Batch, table: Float[Array, "v d"] | None = None) -> Inputs:
        """Return the input of the layers for the `tokens` of a batch and its images.

        A place of `image_token` gets NaN if the images have too few soft tokens.
        """
        if PATCHES not in batch:
            return super().inputs(batch, table)
        tokens = batch["tokens"]
        is_soft = tokens == self.config.image_token
        soft, images = self._soft_tokens(batch, is_soft)
        x = self.embedded(tokens, table)
        x = constrain(jnp.where(is_soft[..., None], soft.astype(x.dtype), x), "batch", None, None)
        vectors = self.layer_vectors(jnp.where(is_soft, self.config.pad_token, tokens), x)
        return Inputs(x, places_of(batch.get("segments"))._replace(images=images), vectors)

    def _soft_tokens(
        self, batch: Batch, is_soft: Bool[Array, "b t"]
    ) -> tuple[Float[Array, "b t d"], Int32[Array, "b t"]]:
        """Return the soft token of each place and the number of its image; at other places the number is 0, and the
        soft token means nothing.
        """
        patches, positions = batch[PATCHES], batch[POSITIONS]
        samples, count = patches.shape[:2]
        soft, real = self.tower(
            patches.reshape(samples * count, *patches.shape[2:]),
            positions.reshape(samples * count, *positions.shape[2:]),
        )
        length = soft.shape[1]
        soft, real = soft.reshape(samples, count * length, -1), real.reshape(samples, count * length)
        # Real soft tokens in front, in their order, and the padding behind them.
        order = jnp.argsort(~real, axis=1, stable=True)
        number = jnp.clip(jnp.cumsum(is_soft, axis=1, dtype=jnp.int32) - 1, 0)
        chosen = jnp.take_along_axis(order, number, axis=1, mode="clip")
        # An index beyond the soft tokens reads as NaN, so that a missing image is not overlooked.
        chosen = jnp.where(number < jnp.sum(real, axis=1, keepdims=True), chosen, count * length)
        found = jnp.take_along_axis(soft, chosen[..., None], axis=1, mode="fill", fill_value=jnp.nan)
        return found, jnp.where(is_soft, chosen // length + 1, 0).astype(jnp.int32)

    def drawable(self, logits: Float[Array, "b v"]) -> Float[Array, "b v"]:
        """Return the logits with -inf for `image_token`, because the model cannot write an image."""
        return jnp.where(jnp.arange(logits.shape[1])[None] == self.config.image_token, -jnp.inf, logits)
