"""Options of the built-in decoder: the differences between public families, and trade-offs of memory and time."""

import math
from dataclasses import dataclass
from typing import Literal

from diloco_jax.training.models.attention import SPLASH_BLOCKS, Attention
from diloco_jax.training.models.layers import Remat
from diloco_jax.training.named import check_choices


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes and options of the decoder; the defaults give about 1.0M parameters."""

    vocab_size: int = 256
    """Number of token ids (256 = bytes)."""
    dim: int = 128
    """Width of the residual stream."""
    num_layers: int = 4
    """Number of blocks."""
    num_heads: int = 4
    """Query heads; a multiple of num_kv_heads."""
    num_kv_heads: int = 2
    """Key and value heads; 1 = multi-query, num_heads = ordinary attention."""
    head_dim: int = 32
    """Width of one head; even, because rotary embedding turns pairs."""
    mlp_dim: int = 512
    """Width of the gated MLP."""
    seq_len_max: int = 2048
    """Longest sequence, tokens; a longer batch is an error."""
    rope_theta: float = 10_000.0
    """Base of the rotary wavelengths; larger reaches further."""
    rope_theta_local: float = 0.0
    """Base in the layers with a window, which are not scaled then; 0 = the same as in other layers."""
    rope_scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    """Scaling of wavelengths for longer texts: none, linear (all wavelengths), llama3 or yarn (only wavelengths with
    few turns within rope_length)."""
    rope_factor: float = 1.0
    """Factor of the wavelengths' scaling."""
    rope_length: int = 8192
    """Length in tokens of the texts before scaling, for llama3 and yarn."""
    rope_slow: float = 1.0
    """Turns within rope_length below which a wavelength is stretched in full."""
    rope_fast: float = 4.0
    """Turns within rope_length above which a wavelength stays; in between it is stretched in part."""
    window: int = 0
    """Number of tokens that a token sees in a layer, itself included; 0 = all earlier tokens."""
    global_every: int = 0
    """Every n-th layer has no window (6: five layers with a window, then one without); 0 = all layers have it."""
    attention_width: int = 0
    """Attention scores are divided by the square root of this; 0 = head_dim."""
    attention_cap: float = 0.0
    """Soft limit of attention scores, cap tanh(score / cap); 0 = none."""
    logit_cap: float = 0.0
    """Soft limit of the logits; 0 = none."""
    norms: Literal["pre", "post", "both"] = "pre"
    """Norms of attention and MLP: pre (of their input), post (of their output), or both."""
    norm_offset: bool = False
    """Norms multiply by 1 + scale, with initial scales of 0."""
    norm_epsilon: float = 1e-6
    """Number that norms add to the mean square."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """Norms of queries and keys: none, head (each head by itself), or full (all heads together)."""
    qkv_bias: bool = False
    """Add a bias to queries, keys and values."""
    embed_scale: bool = True
    """Multiply embeddings by the square root of dim."""
    tie_embeddings: bool = True
    """Compute logits with the embedding; otherwise with a separate table, `head`."""
    activation: Literal["gelu", "silu", "relu2"] = "gelu"
    """Gate of the MLP: gelu (Gemma), silu, or relu2 (squared relu, cheapest on CPU)."""
    attention: Attention = "einsum"
    """einsum (fastest on CPU), dot_product (jax.nn.dot_product_attention), or splash (Pallas kernel for TPUs, which
    keeps no length x length matrix; on other devices it is computed as einsum)."""
    scan_layers: bool = False
    """Stack the blocks' parameters and scan over them: compiles in constant time, one tensor per kind of weight."""
    remat: Remat = "none"
    """Computations that the backward pass repeats, from many to few: full (whole blocks), attention (all but attention
    itself), mlp (only the MLP), minimal (no matrix product), offload (like minimal, but the MLP's results wait in host
    memory), none (nothing). Or a policy of jax.checkpoint_policies."""
    splash_block: int = 0
    """Tokens of a tile of the splash kernel, a power of two from 128 to 2048; 0 = tuned. If it does not divide the
    sequence, a smaller one is used."""
    lookup: Literal["gather", "exchange"] = "gather"
    """Look-up of embeddings when devices share the table: gather (each device gathers the table and sums its gradient),
    or exchange (each device looks up its rows for all devices; for large vocabularies)."""
    loss_chunk: int = 0
    """Number of token ids whose logits exist at a time, a divisor of vocab_size; 0 = all. Saves memory with large
    vocabularies."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of activations and matrix products, float32 or bfloat16; parameters and the loss are always float32."""

    def __post_init__(self) -> None:
        check_choices("model.args", self)
        for name in ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.args.{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.args.num_heads is {self.num_heads}; make it a multiple of num_kv_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"model.args.head_dim is {self.head_dim}; it must be even")
        if self.seq_len_max < 1 or not 0 < self.rope_theta < math.inf:
            raise ValueError(
                f"model.args: seq_len_max {self.seq_len_max} and rope_theta {self.rope_theta} must be finite and > 0"
            )
        for name in ("window", "global_every", "attention_width", "attention_cap", "logit_cap", "rope_theta_local"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"model.args.{name} is {getattr(self, name)}; it must be at least 0, and finite")
        if not (0 < self.norm_epsilon < 1 and 1 <= self.rope_factor < math.inf and self.rope_length > 0):
            raise ValueError(
                f"model.args: norm_epsilon {self.norm_epsilon} must be in (0, 1), rope_factor {self.rope_factor} and "
                f"rope_length {self.rope_length} at least 1"
            )
        if not 0 < self.rope_slow < self.rope_fast < math.inf:
            raise ValueError(
                f"model.args.rope_slow {self.rope_slow} must be above 0 and below rope_fast {self.rope_fast}"
            )
        if self.rope_scaling == "yarn" and self.rope_theta_local:
            raise ValueError("model.args.rope_scaling yarn needs one base for all layers; set rope_theta_local to 0")
        if self.splash_block and self.splash_block not in SPLASH_BLOCKS:
            raise ValueError(
                f"model.args.splash_block is {self.splash_block}; use one of {', '.join(map(str, SPLASH_BLOCKS))}, or 0"
            )
        if self.loss_chunk < 0 or (self.loss_chunk and self.vocab_size % self.loss_chunk):
            raise ValueError(
                f"model.args.loss_chunk is {self.loss_chunk}; it must divide vocab_size ({self.vocab_size}), or be 0"
            )

    def local(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, has the window."""
        return self.window > 0 and (self.global_every == 0 or (layer + 1) % self.global_every > 0)
