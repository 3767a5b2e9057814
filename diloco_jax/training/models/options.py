"""Options of the built-in decoder: the differences between public families, and trade-offs of memory and time.

A model's layers may be of several kinds: `pattern` names each layer's kind, and `kinds` has the options that a kind
changes. `DecoderConfig.of_kind` returns the options of one kind, and each layer is built from them alone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from flax.core import FrozenDict, freeze

from diloco_jax.training.models.attention import SPLASH_BLOCKS, Attention
from diloco_jax.training.models.layers import Remat
from diloco_jax.training.models.protocol import typed_args
from diloco_jax.training.named import check_choices

# The kinds of layers that `window` and `global_every` describe.
LOCAL, GLOBAL = "local", "global"
# Options of the whole model, which a kind of layers cannot change.
WHOLE = {
    "vocab_size", "dim", "num_layers", "pattern", "kinds", "seq_len_max", "rope_theta_local", "global_every",
    "logit_cap", "logit_scale", "embed_scale", "embed_multiplier", "tie_embeddings", "per_layer_dim", "per_layer_vocab",
    "scan_layers", "remat", "lookup", "loss_chunk", "dtype", "tower", "image_token", "image_begin", "image_end",
    "pad_token",
}  # fmt: skip
LAYERS_MAX = 10_000
# Experts of all layers together. Some public files have several tensors for each.
EXPERTS_MAX = 1_000_000
# The longest period of a pattern of layers that is looked for.
PERIOD_MAX = 16


class Stack(NamedTuple):
    """Layers that are stored together: one layer, or the layers at the same position in all repetitions of a period."""

    # The first keys of the parameters' paths: `blocks`, or `blocks/3`.
    path: str
    # The numbers of the layers.
    layers: range
    # Whether the parameters have a leading axis that counts the layers.
    stacked: bool


class Period(NamedTuple):
    """Successive layers: kinds of layers that are repeated in this order."""

    kinds: tuple[str, ...]
    repeats: int


def periods_of(kinds: Sequence[str]) -> list[Period]:
    """Cut a model's layers into repeated periods, so that few different layers are compiled.

    At each layer, the function chooses the period whose repetitions cover most layers, and among equals the shortest
    one. A layer that no period repeats is a period with one repetition.
    """
    found, at = list[Period](), 0
    while at < len(kinds):
        best = Period((kinds[at],), 1)
        for length in range(1, min(PERIOD_MAX, (len(kinds) - at) // 2) + 1):
            unit, repeats = tuple(kinds[at : at + length]), 1
            while tuple(kinds[at + repeats * length : at + (repeats + 1) * length]) == unit:
                repeats += 1
            if repeats > 1 and length * repeats > len(best.kinds) * best.repeats:
                best = Period(unit, repeats)
        found.append(best)
        at += len(best.kinds) * best.repeats
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes and options of the decoder; the defaults give about 1.0M parameters."""

    vocab_size: int = 256
    """Number of token ids (256 = bytes)."""
    dim: int = 128
    """Width of the residual stream."""
    num_layers: int = 4
    """Number of blocks."""
    pattern: tuple[str, ...] = ()
    """The kind of each layer, a name in `kinds`; a shorter list is repeated ([local, local, global]). Empty: all layers
    are alike, except for `window` and `global_every`."""
    kinds: Mapping[str, Any] = field(default_factory=FrozenDict)
    """For each kind of layers, the options that it changes, such as {local: {window: 512}}."""
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
    """Base of the rotary wavelengths; a larger base reaches further; 0 = no positions."""
    rope_theta_local: float = 0.0
    """Base in the layers with a window, whose wavelengths are then not scaled; 0 = the same as in other layers."""
    rope_fraction: float = 1.0
    """Share of a head that is rotated; the rest of the head has no positions."""
    rope_scaling: Literal["none", "linear", "llama3", "yarn", "longrope", "proportional"] = "none"
    """Scaling of wavelengths for longer texts: none, linear (all wavelengths), llama3 or yarn (only wavelengths with
    few turns within rope_length), longrope (a factor for each wavelength), or proportional (no scaling; if only
    rope_fraction of a head is rotated, the wavelengths are those of a whole head)."""
    rope_factor: float = 1.0
    """Factor of the scaled wavelengths; with longrope it decides only the default of rope_attention."""
    rope_length: int = 8192
    """Longest text before scaling, tokens, for llama3, yarn and longrope."""
    rope_short: tuple[float, ...] = ()
    """With longrope, the factor of each wavelength in sequences of at most rope_length tokens."""
    rope_long: tuple[float, ...] = ()
    """With longrope, the factors in longer sequences; the length includes padding and all documents of a sequence."""
    rope_slow: float = 1.0
    """With llama3 and yarn, a wavelength with fewer turns than this within rope_length is scaled in full."""
    rope_fast: float = 4.0
    """With llama3 and yarn, a wavelength with more turns than this is not scaled; in between it is scaled in part."""
    rope_truncate: bool = True
    """With yarn, round the indices of the first and the last wavelength that are scaled in part."""
    rope_attention: float = 0.0
    """With yarn and longrope, the factor of queries and keys; 0 = the default, which is 1 + 0.1 ln(rope_factor) with
    yarn and sqrt(1 + ln(rope_factor) / ln(rope_length)) with longrope."""
    query_beta: float = 0.0
    """Multiply queries at position p by 1 + query_beta ln(1 + floor(p / rope_length)); 0 = no factor."""
    window: int = 0
    """Number of tokens that a token sees in a layer, itself included; 0 = itself and all earlier tokens."""
    global_every: int = 0
    """Every n-th layer has no window (6: five layers with a window, then one without); 0 = all layers have it."""
    attention_width: float = 0.0
    """Attention scores are divided by the square root of this; 0 = head_dim."""
    attention_cap: float = 0.0
    """Soft limit of attention scores, cap tanh(score / cap); 0 = none."""
    attention_sinks: bool = False
    """Each query head has a trained score, which takes a share of the softmax but adds no value (gpt-oss)."""
    attention_gate: bool = False
    """Multiply the result of attention by the sigmoid of a gate, which `q` computes beside the queries."""
    keys_as_values: bool = False
    """Values are the keys before their norm and rotation, and there is no `v`."""
    value_norm: bool = False
    """Divide the values of each head by their root mean square."""
    kv_from: str = ""
    """Name of a kind: a layer uses the keys and values of the latest earlier layer of that kind, and has no `k` and
    `v`; empty = it computes its own."""
    logit_cap: float = 0.0
    """Soft limit of the logits; 0 = none."""
    logit_scale: float = 1.0
    """Factor of the logits, before their soft limit."""
    norms: Literal["pre", "post", "both"] = "pre"
    """Norms of attention and MLP: pre (of their input), post (of their output), or both."""
    norm_offset: bool = False
    """Norms multiply by 1 + scale, with initial scales of 0."""
    norm_epsilon: float = 1e-6
    """Number that norms add to the mean square."""
    mixer: Literal["attention", "delta"] = "attention"
    """How a layer mixes tokens: attention, or delta (gated DeltaNet, which keeps a state of fixed size instead of keys
    and values)."""
    delta_key_heads: int = 2
    """Heads of queries and keys of a delta layer."""
    delta_value_heads: int = 4
    """Heads of values of a delta layer, each with its own state; a multiple of delta_key_heads."""
    delta_key_dim: int = 32
    """Width of one query or key head of a delta layer."""
    delta_value_dim: int = 32
    """Width of one value head of a delta layer."""
    delta_conv: int = 4
    """Tokens that the convolution of a delta layer sees, the token itself included."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """Norms of queries and keys: none, head (each head by itself), or full (all heads together)."""
    qkv_bias: bool = False
    """Add a bias to queries, keys and values."""
    out_bias: bool = False
    """Add a bias to the output of attention."""
    mlp_bias: bool = False
    """Add biases in the MLP."""
    residual_scale: float = 1.0
    """Factor of what attention and MLP add to the residual stream."""
    layer_scale: bool = False
    """Multiply the residual stream by a constant at the end of a layer. The constant is 1 in a new model, and is never
    trained."""
    embed_scale: bool = True
    """Multiply embeddings by the square root of dim."""
    embed_multiplier: float = 1.0
    """A further factor of embeddings."""
    per_layer_dim: int = 0
    """Width of per-layer embeddings, which give each token another vector in each layer; 0 = none."""
    per_layer_vocab: int = 0
    """Rows of the table of per-layer embeddings; 0 = vocab_size."""
    tie_embeddings: bool = True
    """Compute logits with the embedding; otherwise with a separate table, `head`."""
    activation: Literal["gelu", "silu", "relu2"] = "gelu"
    """Gate of the MLP: gelu (Gemma), silu, or relu2 (squared relu, cheapest on CPU)."""
    glu_limit: float = 0.0
    """Compute g sigmoid(1.702 g) (u + 1) from the gate g and the other factor u of an MLP or an expert, as in gpt-oss;
    g is cut to at most this limit, and u to plus or minus this limit; needs silu; 0 = no limit, and silu(g) u."""
    num_experts: int = 0
    """Experts of a mixture, which replaces the MLP; a multiple of the mesh axis `expert`; 0 = an MLP."""
    experts_per_token: int = 2
    """Experts that compute each token."""
    expert_dim: int = 0
    """Width of one expert; 0 = mlp_dim."""
    dense_beside: bool = False
    """Both the MLP and the mixture compute every token, each with separate norms; the router reads the residual stream
    (Gemma 4 26B-A4B)."""
    shared_dim: int = 0
    """Width of an expert that computes every token, weighted by a sigmoid; 0 = none."""
    normalize_weights: bool = True
    """Divide the weights of a token's experts by their sum, which gives a softmax over these experts alone; otherwise
    the weights are the router's probabilities."""
    mixture_bias: bool = False
    """Add biases in the router and in the experts."""
    routing: Literal["capacity", "dropless"] = "capacity"
    """capacity: an expert has slots, and tokens without a free slot are dropped; dropless: an expert computes all its
    tokens (not with the mesh axis `expert`)."""
    capacity_factor: float = 1.25
    """Slots of an expert as a multiple of its fair share of a sequence's choices; with num_experts / experts_per_token
    no choice is ever dropped."""
    balance_coefficient: float = 0.01
    """Weight of the load-balancing term in the gradient; the reported loss is the cross-entropy alone."""
    attention: Attention = "einsum"
    """einsum (fastest on CPU), dot_product (jax.nn.dot_product_attention), or splash (Pallas kernel for TPUs, which
    keeps no length x length matrix; on other devices it is computed as einsum)."""
    scan_layers: bool = False
    """Stack the blocks' parameters and scan over them: compile time does not grow with the number of layers. A weight
    is one tensor for all layers, or for all layers at one position of the pattern."""
    remat: Remat = "none"
    """Computations that the backward pass repeats, from many to few: full (whole blocks), attention (all but attention
    itself), mlp (only the MLP), minimal (no matrix product), offload (like minimal, but the MLP's results wait in CPU
    memory), none (nothing). Or dots_saveable or dots_with_no_batch_dims_saveable, of jax.checkpoint_policies."""
    splash_block: int = 0
    """Tokens of a tile of the splash kernel, a power of two from 128 to 2048; 0 = a tuned size. If it does not divide
    the sequence, a smaller tile is used."""
    lookup: Literal["gather", "exchange"] = "gather"
    """Look-up of embeddings when devices share the table: gather (each device gathers the table and sums its gradient),
    or exchange (each device looks up its rows for all devices; for large vocabularies)."""
    loss_chunk: int = 0
    """Number of token ids whose logits are in memory at a time, a divisor of vocab_size; 0 = all. A small number saves
    memory with large vocabularies."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of activations and matrix products, float32 or bfloat16; parameters and the loss are always float32."""

    def __post_init__(self) -> None:
        check_choices("model.args", self)
        # A module's options are part of the key of its compiled programs, so they must be hashable.
        object.__setattr__(self, "pattern", tuple(self.pattern))
        object.__setattr__(self, "kinds", freeze(_tuples(self.kinds)))
        self._check_sizes()
        self._check_rope()
        self._check_mixture()
        if self.splash_block and self.splash_block not in SPLASH_BLOCKS:
            raise ValueError(
                f"model.args.splash_block is {self.splash_block}; use one of {', '.join(map(str, SPLASH_BLOCKS))}, or 0"
            )
        if self.loss_chunk < 0 or (self.loss_chunk and self.vocab_size % self.loss_chunk):
            raise ValueError(
                f"model.args.loss_chunk is {self.loss_chunk}; it must divide vocab_size ({self.vocab_size}), or be 0"
            )
        if self.pattern or self.kinds:
            self._check_kinds()

    def _check_sizes(self) -> None:
        for name in ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.args.{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_layers > LAYERS_MAX:
            raise ValueError(f"model.args.num_layers is {self.num_layers}; use at most {LAYERS_MAX}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.args.num_heads is {self.num_heads}; make it a multiple of num_kv_heads ({self.num_kv_heads})"
            )
        for name in ("delta_key_heads", "delta_value_heads", "delta_key_dim", "delta_value_dim", "delta_conv"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.args.{name} is {getattr(self, name)}; it must be at least 1")
        if self.delta_value_heads % self.delta_key_heads:
            raise ValueError(
                f"model.args.delta_value_heads is {self.delta_value_heads}; make it a multiple of delta_key_heads "
                f"({self.delta_key_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"model.args.head_dim is {self.head_dim}; it must be even")
        if self.seq_len_max < 1 or not 0 <= self.rope_theta < math.inf:
            raise ValueError(
                f"model.args: seq_len_max {self.seq_len_max} and rope_theta {self.rope_theta} must be finite, "
                "seq_len_max at least 1, and rope_theta at least 0"
            )
        for name in (
            "window", "global_every", "attention_width", "attention_cap", "logit_cap", "rope_theta_local", "query_beta",
            "rope_attention", "per_layer_dim", "per_layer_vocab", "num_experts", "expert_dim", "shared_dim",
            "glu_limit",
        ):  # fmt: skip
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"model.args.{name} is {getattr(self, name)}; it must be at least 0, and finite")
        for name in ("window", "global_every", "rope_length", "seq_len_max"):
            # Devices compute with whole numbers of 32 bits.
            if getattr(self, name) >= 2**31:
                raise ValueError(f"model.args.{name} is {getattr(self, name)}; it must be below 2^31")
        for name in ("residual_scale", "logit_scale", "embed_multiplier"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"model.args.{name} is {getattr(self, name)}; it must be finite")
        if not (0 < self.norm_epsilon < 1 and 1 <= self.rope_factor < math.inf and self.rope_length > 0):
            raise ValueError(
                f"model.args: norm_epsilon {self.norm_epsilon} must be in (0, 1), rope_factor {self.rope_factor} and "
                f"rope_length {self.rope_length} at least 1"
            )

    def _check_rope(self) -> None:
        if not 0 < self.rope_slow < self.rope_fast < math.inf:
            raise ValueError(
                f"model.args.rope_slow {self.rope_slow} must be above 0 and below rope_fast {self.rope_fast}"
            )
        if not 0 < self.rope_fraction <= 1 or int(self.head_dim * self.rope_fraction) % 2:
            raise ValueError(
                f"model.args.rope_fraction is {self.rope_fraction}; it must be in (0, 1], and rotate an even number of "
                f"the {self.head_dim} numbers of a head"
            )
        if self.rope_scaling != "longrope":
            return
        pairs = int(self.head_dim * self.rope_fraction) // 2
        for name in ("rope_short", "rope_long"):
            factors = getattr(self, name)
            if len(factors) != pairs or not all(0 < factor < math.inf for factor in factors):
                raise ValueError(
                    f"model.args.{name} has {len(factors)} factors; longrope needs {pairs}, one for each rotated pair "
                    "of a head, finite and above 0"
                )
        if self.rope_length < 2:
            raise ValueError(f"model.args.rope_length is {self.rope_length}; longrope needs at least 2")

    def _check_mixture(self) -> None:
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"model.args.experts_per_token is {self.experts_per_token}; use 1 to num_experts ({self.num_experts})"
            )
        if self.num_experts * self.num_layers > EXPERTS_MAX:
            raise ValueError(
                f"model.args.num_experts is {self.num_experts} in each of {self.num_layers} layers; use at most "
                f"{EXPERTS_MAX} in all layers together"
            )
        if not (0 < self.capacity_factor < math.inf and 0 <= self.balance_coefficient < math.inf):
            raise ValueError(
                f"model.args.capacity_factor {self.capacity_factor} must be > 0, and balance_coefficient "
                f"{self.balance_coefficient} at least 0, both finite"
            )
        if (self.dense_beside or self.shared_dim or self.mixture_bias) and not self.num_experts:
            raise ValueError(
                "model.args.dense_beside, shared_dim and mixture_bias need a mixture; set num_experts, or remove them"
            )
        if self.glu_limit and self.activation != "silu":
            raise ValueError(f"model.args.glu_limit needs activation silu, not {self.activation}; set one or the other")
        if self.dense_beside and self.norms != "both":
            raise ValueError(f"model.args.dense_beside needs norms both, not {self.norms}")

    def _check_kinds(self) -> None:
        if self.window or self.global_every or self.rope_theta_local or not (self.pattern and self.kinds):
            raise ValueError(
                "model.args.pattern and kinds need each other, and replace window, global_every and rope_theta_local; "
                "give both, and set the window within a kind"
            )
        if len(self.pattern) > self.num_layers:
            raise ValueError(
                f"model.args.pattern names {len(self.pattern)} layers, but num_layers is {self.num_layers}; shorten it"
            )
        if len(self.kinds) > LAYERS_MAX:
            raise ValueError(f"model.args.kinds has {len(self.kinds)} kinds; use at most {LAYERS_MAX}")
        for name in (*self.pattern, *self.kinds):
            if not isinstance(name, str):
                raise ValueError(
                    f"model.args.pattern and kinds have {name!r:.80}, a {type(name).__name__}, as the name of a kind; "
                    "use a text (in YAML with quotes, if it reads as a number or as true or false)"
                )
            if name not in self.kinds or not isinstance(options := self.kinds[name], Mapping):
                raise ValueError(f"model.args.kinds needs a mapping for '{name}'; it has {', '.join(self.kinds)}")
            if wrong := sorted(WHOLE & {*options}):
                raise ValueError(
                    f"model.args.kinds.{name} has {wrong[0]}, an option of the whole model; move it to model.args"
                )
        options = {name: self.of_kind(name) for name in self.kinds}
        earlier = set[str]()
        for layer in range(self.num_layers):
            c = options[kind := self.kind(layer)]
            if c.kv_from:
                self._check_source(layer, c, {name: options[name] for name in earlier})
            elif c.mixer == "attention":
                earlier.add(kind)

    def _check_source(self, layer: int, c: "DecoderConfig", earlier: Mapping[str, "DecoderConfig"]) -> None:
        """Refuse a layer that cannot use the keys and values of the layer that it names.

        Args:
          layer: its number.
          c: its options.
          earlier: the options of the kinds before it that have keys, by their names.
        """
        kind, source = self.kind(layer), earlier.get(c.kv_from)
        if source is None:
            raise ValueError(
                f"model.args.kinds.{kind}.kv_from is '{c.kv_from}', but no layer before layer {layer} is of that kind "
                f"and has keys; use one of {', '.join(sorted(earlier)) or 'the kinds'}"
            )
        if c.head_dim != source.head_dim or c.num_heads % source.num_kv_heads:
            raise ValueError(
                f"model.args.kinds.{kind} has num_heads {c.num_heads} and head_dim {c.head_dim}, but keys of "
                f"'{c.kv_from}' with num_kv_heads {source.num_kv_heads} and head_dim {source.head_dim}; make head_dim "
                "equal, and num_heads a multiple of num_kv_heads"
            )

    def kind(self, layer: int) -> str:
        """Return the kind of a layer, counted from 0."""
        if self.pattern:
            return self.pattern[layer % len(self.pattern)]
        if not self.window:
            return GLOBAL
        return LOCAL if self.global_every == 0 or (layer + 1) % self.global_every else GLOBAL

    def of_kind(self, name: str) -> "DecoderConfig":
        """Return the options of a model whose layers are all of this kind.

        Raises:
          ValueError: an option of the kind is unknown, or its value is impossible.
        """
        if not self.pattern:
            options: dict[str, Any] = {"window": self.window if name == LOCAL else 0}
            if name == LOCAL and self.rope_theta_local:
                options |= {"rope_theta": self.rope_theta_local, "rope_scaling": "none"}
            return replace(self, global_every=0, rope_theta_local=0.0, **options)
        options = typed_args(type(self), self.kinds[name], f"model.args.kinds.{name}")
        try:
            return replace(self, pattern=(), kinds={}, **options)
        except ValueError as error:
            raise ValueError(f"{error} (in model.args.kinds.{name})") from None

    def periods(self) -> list[Period]:
        """Return the layers as the decoder applies them: each period of several repetitions is a scan."""
        kinds = [self.kind(layer) for layer in range(self.num_layers)]
        if self.scan_layers:
            # One layer alone is a scan too, so that its parameters have the same form as those of more layers.
            return periods_of(kinds) if len({*kinds}) > 1 else [Period((kinds[0],), len(kinds))]
        return [Period((kind,), 1) for kind in kinds]

    def stacks(self) -> list[Stack]:
        """Return how the blocks' parameters are stored, in the order of the decoder's blocks."""
        periods, found, at = self.periods(), list[Stack](), 0
        if self.scan_layers and len(periods) == 1 == len(periods[0].kinds):
            return [Stack("blocks", range(self.num_layers), stacked=True)]
        for kinds, repeats in periods:
            end = at + len(kinds) * repeats
            for first in range(at, at + len(kinds)):
                layers = range(first, end, len(kinds))
                found.append(Stack(f"blocks/{len(found)}", layers, stacked=repeats > 1))
            at = end
        return found

    def capacity(self, length: int) -> int:
        """Return the number of slots of an expert for a sequence of `length` tokens."""
        return min(length, math.ceil(self.capacity_factor * self.experts_per_token * length / self.num_experts))


def _tuples(value: Any) -> Any:
    """Return the value with lists as tuples, and mappings as dicts."""
    if isinstance(value, Mapping):
        return {key: _tuples(each) for key, each in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
