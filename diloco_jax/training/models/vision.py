"""A vision transformer that names what is on an image.

Shapes: B batch, H x W pixels of C channels, P x P pixels of a patch, N patches, D model width, K classes.

    x = patches W + positions;   x += Attention(Norm(x));   x += MLP(Norm(x));   logits = mean_n Norm(x) R

A batch is {"image": [B, H, W, C], "label": int32 [B]}; bytes 0..255 become -1..1, other types are taken as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Shaped

from diloco_jax.training.models.layers import Linear, Remat, checkpoint
from diloco_jax.training.models.losses import TABLE_AXES
from diloco_jax.training.models.protocol import Batch, Metrics, config_from_args
from diloco_jax.training.sharding import constrain, gather

Pool = Literal["mean", "token"]
Positions = Literal["sincos", "learned"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """Sizes and choices of the vision transformer; the defaults make about 0.8M parameters."""

    image_size: int = 32
    """Height and width of an image, pixels; a multiple of patch_size."""

    channels: int = 3
    """Numbers per pixel: 3 for colours, 1 for grey."""

    patch_size: int = 4
    """Height and width of a patch, pixels."""

    num_classes: int = 10
    """K: labels are 0 to K - 1."""

    dim: int = 128
    """Width of the residual stream; a multiple of num_heads, and of 4 for sincos positions."""

    num_layers: int = 4
    """Number of blocks."""

    num_heads: int = 4
    """Heads of attention, each dim / num_heads wide."""

    mlp_dim: int = 512
    """Width of the MLP."""

    positions: str = "sincos"
    """sincos (fixed waves over rows and columns) or learned."""

    pool: str = "mean"
    """Where the class is read: mean (of all patches) or token (one in front of them, which is learned)."""

    remat: str = "none"
    """What the backward pass computes again, as for the decoder."""

    dtype: str = "float32"
    """Type of activations and matrix products, float32 or bfloat16; parameters and the loss are always float32."""

    def __post_init__(self) -> None:
        for name in (
            "image_size",
            "channels",
            "patch_size",
            "num_classes",
            "dim",
            "num_layers",
            "num_heads",
            "mlp_dim",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"model.args.{name} is {getattr(self, name)}; it must be at least 1")
        if self.image_size % self.patch_size:
            raise ValueError(
                f"model.args.image_size is {self.image_size}; make it a multiple of patch_size ({self.patch_size})"
            )
        if self.dim % self.num_heads or (self.positions == "sincos" and self.dim % 4):
            raise ValueError(
                f"model.args.dim is {self.dim}; make it a multiple of num_heads ({self.num_heads}), and of 4 for "
                "positions sincos"
            )
        for name, choices in (
            ("positions", get_args(Positions)),
            ("pool", get_args(Pool)),
            ("remat", get_args(Remat)),
            ("dtype", ("float32", "bfloat16")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"model.args.{name} is '{getattr(self, name)}'; choose from {', '.join(choices)}")


class Patches(nnx.Module):
    """Patches of an image, each mapped to the width of a model."""

    def __init__(
        self, image_size: int, channels: int, patch_size: int, dim: int, dtype: str, *, rngs: nnx.Rngs
    ) -> None:
        self.shape = (image_size, image_size, channels)
        self.size, self.side = patch_size, image_size // patch_size
        self.count = self.side**2
        self.project = Linear(patch_size**2 * channels, dim, ("patch", "embed"), dtype, rngs=rngs)

    def __call__(self, image: Shaped[Array, "b h w c"]) -> Float[Array, "b n d"]:
        """Cut images into patches, row by row, and map each.

        Raises:
          ValueError: an image is of another size than the model's.
        """
        if image.shape[1:] != self.shape:
            raise ValueError(
                f"images are {' x '.join(map(str, image.shape[1:]))}, but the model's are "
                f"{' x '.join(map(str, self.shape))}; correct model.args.image_size and channels, or the images"
            )
        x = image.astype(self.project.dtype)
        x = x / 127.5 - 1 if image.dtype == jnp.uint8 else x
        x = x.reshape(-1, self.side, self.size, self.side, self.size, self.shape[2]).swapaxes(2, 3)
        return self.project(x.reshape(-1, self.count, self.size**2 * self.shape[2]))


def waves(side: int, dim: int) -> Float[Array, "n d"]:
    """Return positions of side x side patches: sines and cosines of the column, then those of the row."""
    frequency = 10_000.0 ** (-jnp.arange(dim // 4, dtype=jnp.float32) / max(1, dim // 4 - 1))
    row, column = jnp.divmod(jnp.arange(side**2), side)
    angles = [jnp.outer(at, frequency) for at in (column, row)]
    return jnp.concatenate([wave(angle) for angle in angles for wave in (jnp.sin, jnp.cos)], axis=1)


class VisionBlock(nnx.Module):
    """One layer: attention in which every patch sees all others, and an MLP."""

    def __init__(self, config: VisionConfig, *, rngs: nnx.Rngs) -> None:
        c = self.config = config
        self.norm_attention = nnx.LayerNorm(c.dim, dtype=c.dtype, rngs=rngs)
        self.q, self.k, self.v = (Linear(c.dim, c.dim, ("embed", "heads"), c.dtype, rngs=rngs) for _ in range(3))
        self.out = Linear(c.dim, c.dim, ("heads", "embed"), c.dtype, rngs=rngs)
        self.norm_mlp = nnx.LayerNorm(c.dim, dtype=c.dtype, rngs=rngs)
        self.up = Linear(c.dim, c.mlp_dim, ("embed", "mlp"), c.dtype, rngs=rngs)
        self.down = Linear(c.mlp_dim, c.dim, ("mlp", "embed"), c.dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        """Apply the layer to the residual stream."""
        y = self.norm_attention(x)
        q, k, v = (part(y).reshape(*y.shape[:2], self.config.num_heads, -1) for part in (self.q, self.k, self.v))
        mixed = jax.nn.dot_product_attention(q, k, v).reshape(x.shape)
        x = constrain(x + self.out(mixed), "batch", None, None)
        return constrain(x + self.down(jax.nn.gelu(self.up(self.norm_mlp(x)))), "batch", None, None)


class VisionTransformer(nnx.Module):
    """A classifier of images; implements `TrainableModel`."""

    def __init__(self, config: VisionConfig, *, rngs: nnx.Rngs) -> None:
        c = self.config = config
        self.patches = Patches(c.image_size, c.channels, c.patch_size, c.dim, c.dtype, rngs=rngs)
        if c.positions == "learned":
            init = nnx.with_partitioning(nnx.initializers.normal(0.02), TABLE_AXES)
            self.positions = nnx.Param(init(rngs.params(), (self.patches.count, c.dim)))
        if c.pool == "token":
            self.token = nnx.Param(jnp.zeros(c.dim))
        self.blocks = nnx.List(VisionBlock(c, rngs=rngs) for _ in range(c.num_layers))
        self.norm_final = nnx.LayerNorm(c.dim, dtype=c.dtype, rngs=rngs)
        self.head = Linear(c.dim, c.num_classes, ("embed", "vocab"), c.dtype, rngs=rngs)

    @classmethod
    def from_config(cls, args: Mapping[str, Any], *, rngs: nnx.Rngs) -> VisionTransformer:
        """Build from the fields of VisionConfig; an unknown or ill-typed one is a ValueError."""
        return cls(config_from_args(VisionConfig, args), rngs=rngs)

    def __call__(self, image: Shaped[Array, "b h w c"]) -> Float[Array, "b k"]:
        """Return the logits of all classes, float32."""
        c, x = self.config, self.patches(image)
        learned = c.positions == "learned"
        positions = gather(self.positions[...], *TABLE_AXES) if learned else waves(self.patches.side, c.dim)
        x += positions.astype(x.dtype)[None]
        if c.pool == "token":
            token = jnp.broadcast_to(self.token[...].astype(x.dtype), (len(x), 1, c.dim))
            x = jnp.concatenate([token, x], axis=1)
        x = constrain(x, "batch", None, None)
        for block in self.blocks:
            graphdef, layer = nnx.split(block)
            apply = checkpoint(lambda x, layer, of=graphdef: nnx.merge(of, layer)(x), c.remat, scanned=False)
            x = apply(x, layer)
        x = self.norm_final(x)
        return self.head(x[:, 0] if c.pool == "token" else x.mean(axis=1)).astype(jnp.float32)

    def loss(self, batch: Batch) -> tuple[Float[Array, ""], Metrics]:
        """Compute the mean cross-entropy in nats per image, and the share of images named rightly."""
        logits, labels = self(batch["image"]), batch["label"]
        right = jnp.argmax(logits, axis=-1) == labels
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return loss.mean(), {"accuracy": right.astype(jnp.float32).mean()}
