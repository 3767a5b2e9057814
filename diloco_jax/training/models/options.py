"""Sizes and choices of the built-in decoder: where the public families differ, and what costs memory or time."""

import math
from dataclasses import dataclass
from typing import Literal

from diloco_jax.training.models.attention import SPLASH_BLOCKS, Attention
from diloco_jax.training.models.layers import Remat
from diloco_jax.training.named import check_choices


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes and choices of the decoder; the defaults make about 1.0M parameters."""

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
    """Base in the layers that have a window, which then are not scaled; 0 = as in the others."""
    rope_scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    """Stretching of wavelengths for longer texts: none, linear (all of them), or llama3 or yarn (those that do not turn
    often enough within rope_length)."""
    rope_factor: float = 1.0
    """How many times longer the wavelengths are after scaling."""
    rope_length: int = 8192
    """Tokens of the texts before scaling, for llama3 and yarn."""
    rope_slow: float = 1.0
    """Turns within rope_length below which a wavelength is stretched in full."""
    rope_fast: float = 4.0
    """Turns within rope_length above which a wavelength stays; in between it is stretched in part."""
    window: int = 0
    """Tokens that a layer sees, the token itself counted; 0 = all before it."""
    global_every: int = 0
    """Each n-th layer sees all tokens, whatever the window (6: five with a window, then one without); 0 = none does."""
    attention_width: int = 0
    """Attention scores are divided by the square root of this; 0 = head_dim."""
    attention_cap: float = 0.0
    """Soft limit of attention scores, cap tanh(score / cap); 0 = none."""
    logit_cap: float = 0.0
    """Soft limit of the logits; 0 = none."""
    norms: Literal["pre", "post", "both"] = "pre"
    """Norms around attention and MLP: pre (of what goes in), post (of what comes out), or both."""
    norm_offset: bool = False
    """Norms multiply by 1 + scale, and scales begin at 0."""
    norm_epsilon: float = 1e-6
    """What norms add to the mean square."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """Norms of queries and keys: none, head (each head by itself), or full (all heads together)."""
    qkv_bias: bool = False
    """Add a bias to queries, keys and values."""
    embed_scale: bool = True
    """Multiply embeddings by the square root of dim."""
    tie_embeddings: bool = True
    """Compute logits with the embedding; else with a table of their own, `head`."""
    activation: Literal["gelu", "silu", "relu2"] = "gelu"
    """Gate of the MLP: gelu (Gemma), silu, or relu2 (squared relu, cheapest on CPU)."""
    attention: Attention = "einsum"
    """einsum (fastest on CPU), dot_product (jax.nn.dot_product_attention), or splash (Pallas kernel for TPUs, which
    keeps no length x length matrix; einsum where the devices are none)."""
    scan_layers: bool = False
    """Stack the blocks' parameters and scan over them: compiles in constant time, one tensor per kind of weight."""
    remat: Remat = "none"
    """What the backward pass computes again, from much to little: full (whole blocks), attention (all but attention
    itself), mlp (the MLP alone), minimal (no matrix product), offload (as minimal, but the MLP's part waits in the
    host's memory), none (nothing). Or a policy of jax.checkpoint_policies."""
    splash_block: int = 0
    """Tokens of a tile of the splash kernel, a power of two from 128 to 2048; 0 = tuned. Smaller ones that divide the
    sequence take its place."""
    lookup: Literal["gather", "exchange"] = "gather"
    """How embeddings are looked up where devices share the table: gather (each gathers it, and sums up its gradient),
    or exchange (each looks up the rows that it holds for all; for large vocabularies)."""
    loss_chunk: int = 0
    """Token ids whose logits exist at a time, a divisor of vocab_size; 0 = all. Saves memory if there are many."""
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
            raise ValueError("model.args.rope_scaling yarn goes with one base for all layers; set rope_theta_local 0")
        if self.splash_block and self.splash_block not in SPLASH_BLOCKS:
            raise ValueError(
                f"model.args.splash_block is {self.splash_block}; use one of {', '.join(map(str, SPLASH_BLOCKS))}, or 0"
            )
        if self.loss_chunk < 0 or (self.loss_chunk and self.vocab_size % self.loss_chunk):
            raise ValueError(
                f"model.args.loss_chunk is {self.loss_chunk}; it must divide vocab_size ({self.vocab_size}), or be 0"
            )

    def local(self, layer: int) -> bool:
        """Tell whether a layer, counted from 0, has the window."""
        return self.window > 0 and (self.global_every == 0 or (layer + 1) % self.global_every > 0)
