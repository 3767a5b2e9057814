"""The vision tower of Gemma 4, which computes soft tokens for a language model from images of any shape.

Shapes: B images, N patches of P x P pixels, K x K patches per soft token, M = N / K^2 soft tokens, D width. The
position of a patch is its column and row in the image; padding has the position (-1, -1).

    x = 2 (patches - 1/2) W + columns[column] + rows[row]
    x += RMSNorm(Attention(RMSNorm(x)));   x += RMSNorm(MLP(RMSNorm(x)))
    soft = sqrt(D) mean(x of K x K patches);   embeddings = RMSNorm((soft - bias) scale) W_text

All patches of an image see each other. Constants of public models, such as `bias` and `scale` above, are parameters
without gradients: they are exchanged and saved like weights, and never change.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32, Shaped

from diloco_jax.training.models.layers import Linear, Remat, checkpoint, keep, make_norm
from diloco_jax.training.models.options import LAYERS_MAX
from diloco_jax.training.models.rotary import apply_rope
from diloco_jax.training.named import check_choices
from diloco_jax.training.sharding import constrain, gather

POSITION_AXES = (None, "vocab", "embed")
# Bounds of a new clipped map. They are finite, because the difference of two infinite parameters is not a number.
UNBOUNDED = 2.0**30


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerConfig:
    """Sizes and options of the vision tower; the defaults are those of Gemma 4 E2B."""

    dim: int = 768
    """Width of the residual stream."""
    num_layers: int = 16
    """Number of blocks."""
    num_heads: int = 12
    """Heads of queries, keys and values."""
    head_dim: int = 64
    """Width of one head; a multiple of 4, because column and row each rotate the pairs of one half."""
    mlp_dim: int = 3072
    """Width of the gated MLP."""
    text_dim: int = 1536
    """Width of the language model."""
    patch_size: int = 16
    """Height and width of a patch, pixels."""
    pool: int = 3
    """Height and width of a soft token, patches."""
    positions: int = 10240
    """Number of columns, and of rows, that have an embedding; a patch beyond them gives NaN."""
    rope_theta: float = 100.0
    """Base of the rotary wavelengths of columns and rows."""
    norm_epsilon: float = 1e-6
    """Number that norms add to the mean square."""
    clipped: bool = False
    """Clip inputs and outputs of all linear maps in the blocks to constant bounds."""
    standardize: bool = False
    """Subtract a constant bias from soft tokens, and multiply them by a constant scale."""
    scan_layers: bool = False
    """Stack the blocks' parameters and scan over them."""
    remat: Remat = "none"
    """Computations that the backward pass repeats, as in DecoderConfig."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of activations and matrix products; parameters, pooling and standardization are always float32."""

    def __post_init__(self) -> None:
        check_choices("model.args.tower", self)
        for name in ("dim", "num_layers", "num_heads", "mlp_dim", "text_dim", "patch_size", "pool", "positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.args.tower.{name} is {getattr(self, name)}; it must be at least 1")
        if self.head_dim < 4 or self.head_dim % 4:
            raise ValueError(f"model.args.tower.head_dim is {self.head_dim}; it must be a multiple of 4")
        if self.num_layers > LAYERS_MAX:
            raise ValueError(f"model.args.tower.num_layers is {self.num_layers}; use at most {LAYERS_MAX}")
        if not (0 < self.norm_epsilon < 1 and 0 < self.rope_theta < math.inf):
            raise ValueError(
                f"model.args.tower: norm_epsilon {self.norm_epsilon} must be in (0, 1), and rope_theta "
                f"{self.rope_theta} above 0 and finite"
            )


def _constant(shape: tuple[int, ...], init: nnx.Initializer, rngs: nnx.Rngs) -> nnx.Param:
    return nnx.Param(nnx.with_partitioning(init, (None,))(rngs.params(), shape))


class ClippedLinear(Linear):
    """A linear map whose input and output are clipped to constant bounds.

    The four bounds are the lower and upper bound of the input, then those of the output.
    """

    def __init__(self, n_in: int, n_out: int, names: tuple[str, str], dtype: str, *, rngs: nnx.Rngs) -> None:
        super().__init__(n_in, n_out, names, dtype, rngs=rngs)
        self.bounds = _constant((4,), lambda *_: UNBOUNDED * jnp.array([-1.0, 1.0, -1.0, 1.0]), rngs)

    def __call__(self, x: Float[Array, "*b i"]) -> Float[Array, "*b o"]:
        bounds = jax.lax.stop_gradient(self.bounds[...]).astype(self.dtype)
        return jnp.clip(super().__call__(jnp.clip(x, bounds[0], bounds[1])), bounds[2], bounds[3])


class TowerBlock(nnx.Module):
    """One layer: attention among all patches and gated MLP, each between two norms and added to the residual stream."""

    def __init__(self, config: TowerConfig, *, rngs: nnx.Rngs) -> None:
        c = self.config = config
        width = c.num_heads * c.head_dim
        norm = partial(make_norm, epsilon=c.norm_epsilon, dtype=c.dtype, offset=False, rngs=rngs)
        linear = partial(ClippedLinear if c.clipped else Linear, dtype=c.dtype, rngs=rngs)
        self.norm_attention = norm(c.dim)
        self.q = linear(c.dim, width, ("embed", "heads"))
        self.k = linear(c.dim, width, ("embed", "heads"))
        self.v = linear(c.dim, width, ("embed", "heads"))
        self.out = linear(width, c.dim, ("heads", "embed"))
        self.norm_q = norm(c.head_dim)
        self.norm_k = norm(c.head_dim)
        self.norm_v = _plain_norm(c, c.head_dim, rngs)
        self.norm_attention_out = norm(c.dim)
        self.norm_mlp = norm(c.dim)
        self.gate = linear(c.dim, c.mlp_dim, ("embed", "mlp"))
        self.up = linear(c.dim, c.mlp_dim, ("embed", "mlp"))
        self.down = linear(c.mlp_dim, c.dim, ("mlp", "embed"))
        self.norm_mlp_out = norm(c.dim)

    def __call__(
        self, x: Float[Array, "b n d"], positions: Int32[Array, "b n 2"], real: Bool[Array, "b n"]
    ) -> Float[Array, "b n d"]:
        """Apply the layer to the residual stream."""
        y = self._attention(self.norm_attention(x), positions, real)
        x = constrain(x + self.norm_attention_out(keep(self.out(y), "out")), "batch", None, None)
        y = self.norm_mlp(x)
        gate, up = keep(self.gate(y), "gated"), keep(self.up(y), "gated")
        y = keep(self.down(jax.nn.gelu(gate) * up), "out")
        return constrain(x + self.norm_mlp_out(y), "batch", None, None)

    def _attention(
        self, y: Float[Array, "b n d"], positions: Int32[Array, "b n 2"], real: Bool[Array, "b n"]
    ) -> Float[Array, "b n w"]:
        c = self.config
        q, k, v = (
            keep(linear(y), "qkv").reshape(*y.shape[:2], c.num_heads, c.head_dim) for linear in (self.q, self.k, self.v)
        )
        q, k = (apply_axial_rope(x, positions, c.rope_theta) for x in (self.norm_q(q), self.norm_k(k)))
        mixed = jax.nn.dot_product_attention(q, k, self.norm_v(v), mask=real[:, None, None, :], scale=1.0)
        return keep(mixed, "attention").reshape(*y.shape[:2], -1)


def _plain_norm(c: TowerConfig, width: int, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(width, epsilon=c.norm_epsilon, dtype=c.dtype, use_scale=False, rngs=rngs)


def apply_axial_rope(
    x: Float[Array, "b n h w"], positions: Int32[Array, "b n 2"], theta: float
) -> Float[Array, "b n h w"]:
    """Rotate the first half of each head by the patch's column, and the second half by its row."""
    pairs = x.shape[-1] // 4
    frequency = theta ** (-jnp.arange(pairs, dtype=jnp.float32) / pairs)
    halves = zip(jnp.split(x, 2, axis=-1), (positions[..., 0], positions[..., 1]), strict=True)
    return jnp.concatenate([apply_rope(half, frequency, place) for half, place in halves], axis=-1)


class VisionTower(nnx.Module):
    """The vision tower, with the linear map to the width of the language model."""

    def __init__(self, config: TowerConfig, *, rngs: nnx.Rngs) -> None:
        c = self.config = config
        # Axis names must not require a mesh here, because the island places the parameters later.
        with nnx.use_eager_sharding(False):
            self.project = Linear(3 * c.patch_size**2, c.dim, ("patch", "embed"), c.dtype, rngs=rngs)
            init = nnx.with_partitioning(nnx.initializers.normal(0.02), POSITION_AXES)
            # `embed` in its name keeps it from weight decay and muon, like other tables.
            self.embed_positions = nnx.Param(init(rngs.params(), (2, c.positions, c.dim)))
            self.blocks: TowerBlock | nnx.List[TowerBlock] = (
                self._stacked_blocks(rngs)
                if c.scan_layers
                else nnx.List(TowerBlock(c, rngs=rngs) for _ in range(c.num_layers))
            )
            if c.standardize:
                self.std_bias = _constant((c.dim,), nnx.initializers.zeros_init(), rngs)
                self.std_scale = _constant((c.dim,), nnx.initializers.ones_init(), rngs)
            self.norm_text = _plain_norm(c, c.dim, rngs)
            self.to_text = Linear(c.dim, c.text_dim, ("embed", "text"), c.dtype, rngs=rngs)

    def _stacked_blocks(self, rngs: nnx.Rngs) -> TowerBlock:
        """Return all blocks as one module, whose parameters have a leading `layers` axis."""

        @nnx.split_rngs(splits=self.config.num_layers)
        @nnx.scan(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
        def create(layer_rngs: nnx.Rngs) -> TowerBlock:
            return TowerBlock(self.config, rngs=layer_rngs)

        return create(rngs)

    def __call__(
        self, patches: Shaped[Array, "b n p"], positions: Int32[Array, "b n 2"]
    ) -> tuple[Float[Array, "b m t"], Bool[Array, "b m"]]:
        """Return the soft tokens, row by row, and whether each belongs to the image or is padding.

        Args:
          patches: pixels of each patch, row by row, channels last: uint8, or floats from 0 to 1.
          positions: column and row of each patch; -1 for padding. Each image has all patches of a rectangle whose sides
            are multiples of `pool`.

        Raises:
          ValueError: the number of patches is not a multiple of pool^2.
        """
        c = self.config
        if patches.shape[1] % c.pool**2:
            raise ValueError(
                f"images are padded to {patches.shape[1]} patches, but a soft token has {c.pool} x {c.pool}; pad to a "
                f"multiple of {c.pool**2}"
            )
        real = positions[..., 0] >= 0
        x = self._layers(self._embedded(patches, positions), positions, real)
        soft, found = self._pooled(x, positions, real)
        if c.standardize:
            bias, scale = (jax.lax.stop_gradient(x[...])[None, None] for x in (self.std_bias, self.std_scale))
            soft = (soft - bias) * scale
        return constrain(self.to_text(self.norm_text(soft.astype(c.dtype))), "batch", None, None), found

    def _embedded(self, patches: Shaped[Array, "b n p"], positions: Int32[Array, "b n 2"]) -> Float[Array, "b n d"]:
        c = self.config
        pixels = patches / jnp.float32(255) if patches.dtype == jnp.uint8 else patches
        table = gather(self.embed_positions[...].astype(c.dtype), *POSITION_AXES)
        # Padding gets the embedding of the last column and row. No patch sees it, and no soft token has a part of it.
        columns, rows = (jnp.take(table[axis], positions[..., axis], axis=0) for axis in (0, 1))
        return constrain(self.project((2 * pixels - 1).astype(c.dtype)) + columns + rows, "batch", None, None)

    def _layers(
        self, x: Float[Array, "b n d"], positions: Int32[Array, "b n 2"], real: Bool[Array, "b n"]
    ) -> Float[Array, "b n d"]:
        c = self.config

        def function(block: TowerBlock) -> tuple[Callable[[Array, Any], Array], Any]:
            graphdef, params = nnx.split(block)
            return checkpoint(
                lambda x, params: nnx.merge(graphdef, params)(x, positions, real), c.remat, scanned=c.scan_layers
            ), params

        if isinstance(self.blocks, TowerBlock):
            one, stacked = function(self.blocks)
            return jax.lax.scan(lambda x, layer: (one(x, layer), None), x, stacked)[0]
        for one, params in map(function, self.blocks):
            x = one(x, params)
        return x

    def _pooled(
        self, x: Float[Array, "b n d"], positions: Int32[Array, "b n 2"], real: Bool[Array, "b n"]
    ) -> tuple[Float[Array, "b m d"], Bool[Array, "b m"]]:
        """Return sqrt(D) times the float32 means of K x K patches, and whether each mean has patches."""
        k, length = self.config.pool, x.shape[1] // self.config.pool**2
        cells = positions // k
        wide = (jnp.max(positions[..., 0], axis=1, keepdims=True) + 1) // k
        # A soft token beyond the last one has no place in `shares`, so padding has a share in none.
        soft = jnp.where(real, cells[..., 0] + wide * cells[..., 1], length)
        shares = jax.nn.one_hot(soft, length, dtype=jnp.float32)
        pooled = jnp.einsum("bnm,bnd->bmd", shares, x.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
        return pooled * (self.config.dim**0.5 / k**2), jnp.any(shares > 0, axis=1)
