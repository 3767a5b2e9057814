"""Gated DeltaNet (arXiv 2412.06464): a layer that mixes tokens through a state of fixed size, instead of attention.

Shapes: B batch, T length, D model width, K key heads, N value heads (N / K of them read one key head), H key width,
V value width, C tokens of a chunk, W taps of the convolution.

The recurrence. A head keeps a matrix S [H, V] that maps keys to values. For each token it forgets a part of S, looks up
what S returns for the key k, and corrects S toward the value v:

    S_t = a_t S_(t-1) + k_t u_t^T,    u_t = b_t (v_t - a_t S_(t-1)^T k_t),    o_t = S_t^T q_t

Linear attention would write u = v. The delta rule writes the difference between v and what S already returns, so that
a key's new value replaces its old one. b in (0, 1) is the rate of this correction, and a in (0, 1), the gate, is the
share of the state that remains. Keys have length 1, so no correction overshoots.

The chunked form. Computed token after token, the recurrence is T small steps. Within a chunk of C tokens that starts
from S_0, let g_i = log a_1 + ... + log a_i. Unrolled, the state is a sum over the corrections of the chunk:

    S_i = e^(g_i) S_0 + sum_(j <= i) e^(g_i - g_j) k_j u_j^T

With this sum, the definition of u becomes a linear system for the C rows of U. All other terms are matrix products:

    (I + A) U = diag(b) (V - diag(e^g) K S_0),     A_ij = b_i e^(g_i - g_j) k_i.k_j  for j < i, else 0
    O = diag(e^g) Q S_0 + P U,                     P_ij = e^(g_i - g_j) q_i.k_j      for j <= i, else 0
    S_C = e^(g_C) S_0 + sum_j e^(g_C - g_j) k_j u_j^T

I + A is triangular with ones on its diagonal (the paper's UT transform), so its inverse is cheap and exact. A scan over
the chunks carries S. A text that starts within the chunk sees neither S_0 nor earlier texts: for its tokens, e^(g_i)
and the e^(g_i - g_j) of earlier texts are 0.

The layer. q, k and v each pass a causal convolution over the last W tokens, one for each channel. Then k and q get
length 1. The layer computes a and b from the token. The result is normalised in each head and multiplied by silu(z).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32

from diloco_jax.training.models.layers import Linear, keep, make_norm
from diloco_jax.training.models.options import DecoderConfig
from diloco_jax.training.sharding import constrain, gather

CHUNK = 64  # power of two
CONVOLUTION_AXES = ("heads", None, None)


class DeltaCache(NamedTuple):
    """The state of a text's earlier tokens, and the latest W - 1 inputs of the convolutions of q, k and v."""

    inputs: tuple[Float[Array, "b w _"], ...]
    state: Float[Array, "b n h v"]


def texts_of(segments: Int32[Array, "b t"]) -> Int32[Array, "b t"]:
    """Return the number of each token's text, from 0; a text starts where the segment changes to another one than 0."""
    starts = (segments[:, 1:] != segments[:, :-1]) & (segments[:, 1:] != 0)
    return jnp.cumsum(jnp.pad(starts, ((0, 0), (1, 0))), axis=1, dtype=jnp.int32)


def delta_step(
    q: Float[Array, "b k h"],
    k: Float[Array, "b k h"],
    v: Float[Array, "b n v"],
    log_decay: Float[Array, "b n"],
    beta: Float[Array, "b n"],
    state: Float[Array, "b n h v"],
) -> tuple[Float[Array, "b n v"], Float[Array, "b n h v"]]:
    """Apply the gated delta rule to one token; the arguments are those of `delta_rule` without the axis of time."""
    q, k, v = _prepared(q, k, v)
    state = jnp.exp(log_decay)[..., None, None] * state
    u = beta[..., None] * (v - jnp.einsum("bnhv,bnh->bnv", state, k))
    state = state + k[..., :, None] * u[..., None, :]
    return jnp.einsum("bnhv,bnh->bnv", state, q), state


def delta_rule(
    q: Float[Array, "b t k h"],
    k: Float[Array, "b t k h"],
    v: Float[Array, "b t n v"],
    log_decay: Float[Array, "b t n"],
    beta: Float[Array, "b t n"],
    state: Float[Array, "b n h v"],
    texts: Int32[Array, "b t"],
) -> tuple[Float[Array, "b t n v"], Float[Array, "b n h v"]]:
    """Apply the gated delta rule to all tokens; return the float32 results and the state after the last token.

    Args:
      q, k: queries and keys of any length; the function gives keys the length 1, and queries the length 1 / sqrt(H).
      v: values; value head i reads key head i // (N / K).
      log_decay: log a, float32, at most 0.
      beta: b, float32.
      state: the state before the first token, float32.
      texts: the number of each token's text, ascending; only tokens of text 0 see `state`.
    """

    # Padding at the end belongs to the last text and has b = 0 and log a = 0, so it leaves the state as it is.
    def cut(x: Array, mode: str = "constant") -> Array:
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % CHUNK), *((0, 0),) * (x.ndim - 2)), mode=mode)
        x = x.reshape(x.shape[0], -1, CHUNK, *x.shape[2:]).swapaxes(0, 1)
        return x.swapaxes(2, 3) if x.ndim > 3 else x

    chunks = (*map(cut, (q, k, v, log_decay, beta)), cut(texts, "edge"))
    # The backward pass recomputes each chunk, so only the inputs and one state for each chunk are kept.
    body = jax.checkpoint(_chunk, prevent_cse=False)
    (state, _), out = jax.lax.scan(body, (state, jnp.zeros_like(texts[:, 0])), chunks)
    # From [chunks, B, N, C, V] to [B, T, N, V].
    out = out.transpose(1, 0, 3, 2, 4).reshape(v.shape[0], -1, *v.shape[2:])
    return out[:, : v.shape[1]], state


def _chunk(carry: tuple[Array, Array], chunk: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
    """Apply the chunked form; the carry is S_0 and the text of the token before the chunk."""
    state, last = carry
    q, k, v, log_decay, beta, texts = chunk
    q, k, v = _prepared(q, k, v)
    total = jnp.cumsum(log_decay, axis=-1)
    seen = jnp.tril(texts[:, :, None] == texts[:, None, :])[:, None]
    # Masked before the exponential, because above the diagonal it would overflow.
    decay = jnp.exp(jnp.where(seen, total[..., :, None] - total[..., None, :], -jnp.inf))
    carried = jnp.where((texts == last[:, None])[:, None], jnp.exp(total), 0.0)[..., None]
    system = jnp.tril(beta[..., None] * decay * (k @ k.mT), -1)
    u = _inverse(system) @ (beta[..., None] * (v - carried * (k @ state)))
    out = carried * (q @ state) + (decay * (q @ k.mT)) @ u
    state = carried[..., -1:, :] * state + (decay[..., -1, :, None] * k).mT @ u
    return (constrain(state, "batch", "heads", None, None), texts[:, -1]), out


def _prepared(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """Return q, k and v in float32, q and k with their lengths and one head for each value head; axis 1 is heads."""
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    q, k = (x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    q, k = (jnp.repeat(x, v.shape[1] // k.shape[1], axis=1) for x in (q * q.shape[-1] ** -0.5, k))
    return q, k, v


def _inverse(lower: Float[Array, "*b c c"]) -> Float[Array, "*b c c"]:
    """Return (I + A)^-1 of strictly lower triangular matrices A, whose size is a power of two.

    The inverse of [[X, 0], [Z, Y]] is [[X^-1, 0], [-Y^-1 Z X^-1, Y^-1]]. Unlike the product of I + (-A)^(2^i), this is
    accurate for repeated keys: there the powers of A grow to 10^18, but the inverse does not.
    """
    size = lower.shape[-1]
    if size == 1:
        return jnp.ones_like(lower)
    half = size // 2
    both = _inverse(jnp.stack([lower[..., :half, :half], lower[..., half:, half:]]))
    # On accelerators the default precision of a product is that of bfloat16, and errors of an inverse accumulate.
    with jax.default_matmul_precision("highest"):
        corner = -(both[1] @ lower[..., half:, :half] @ both[0])
    above = jnp.concatenate([both[0], jnp.zeros_like(corner)], axis=-1)
    return jnp.concatenate([above, jnp.concatenate([corner, both[1]], axis=-1)], axis=-2)


class Convolution(nnx.Module):
    """A causal convolution over time, each channel by itself, followed by silu."""

    def __init__(self, channels: int, width: int, dtype: str, *, rngs: nnx.Rngs) -> None:
        # With three axes, as in public files, Muon does not take it for a linear map.
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(in_axis=2, out_axis=0), CONVOLUTION_AXES)
        self.kernel = nnx.Param(init(rngs.params(), (channels, 1, width)))
        self.dtype = dtype

    def __call__(self, inputs: Float[Array, "b s c"], texts: Int32[Array, "b t"]) -> Float[Array, "b t c"]:
        """Convolve S = W - 1 + T inputs; the first W - 1 precede the T tokens. A token sees only its text."""
        kernel = gather(self.kernel[...], *CONVOLUTION_AXES).astype(jnp.float32)
        length, width = texts.shape[1], kernel.shape[2]
        numbers = jnp.pad(texts, ((0, 0), (width - 1, 0)))
        total = jnp.zeros((), jnp.float32)
        for tap in range(width):
            same = numbers[:, tap : tap + length] == texts
            total = total + jnp.where(same[..., None], inputs[:, tap : tap + length], 0) * kernel[None, None, :, 0, tap]
        return jax.nn.silu(total).astype(self.dtype)


def empty_state(c: DecoderConfig, batch: int) -> DeltaCache:
    """Return the cache of a layer before the first token."""
    state = jnp.zeros((batch, c.delta_value_heads, c.delta_key_dim, c.delta_value_dim), jnp.float32)
    keys, values = c.delta_key_heads * c.delta_key_dim, c.delta_value_heads * c.delta_value_dim
    q, k, v = (jnp.zeros((batch, c.delta_conv - 1, width), c.dtype) for width in (keys, keys, values))
    return DeltaCache((q, k, v), constrain(state, "batch", "heads", None, None))


class GatedDelta(nnx.Module):
    """Gated DeltaNet in place of attention; Qwen 3.5 has it in three of four layers."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        c = self.config = config
        keys, values = c.delta_key_heads * c.delta_key_dim, c.delta_value_heads * c.delta_value_dim
        # Queries, keys and values are separate parameters, because no mesh splits a joint one into whole heads.
        self.q = Linear(c.dim, keys, ("embed", "heads"), c.dtype, rngs=rngs)
        self.k = Linear(c.dim, keys, ("embed", "heads"), c.dtype, rngs=rngs)
        self.v = Linear(c.dim, values, ("embed", "heads"), c.dtype, rngs=rngs)
        self.z = Linear(c.dim, values, ("embed", "heads"), c.dtype, rngs=rngs)
        # One number for each head is too little to split.
        self.a = Linear(c.dim, c.delta_value_heads, ("embed", None), c.dtype, rngs=rngs)
        self.b = Linear(c.dim, c.delta_value_heads, ("embed", None), c.dtype, rngs=rngs)
        self.conv_q = Convolution(keys, c.delta_conv, c.dtype, rngs=rngs)
        self.conv_k = Convolution(keys, c.delta_conv, c.dtype, rngs=rngs)
        self.conv_v = Convolution(values, c.delta_conv, c.dtype, rngs=rngs)
        self.a_log = nnx.Param(nnx.with_partitioning(_rates, (None,))(rngs.params(), (c.delta_value_heads,)))
        self.dt_bias = nnx.Param(nnx.with_partitioning(_steps, (None,))(rngs.params(), (c.delta_value_heads,)))
        self.norm = make_norm(c.delta_value_dim, c.norm_epsilon, "float32", offset=False, rngs=rngs)
        self.out = Linear(values, c.dim, ("heads", "embed"), c.dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "b t d"], segments: Int32[Array, "b t"] | None = None, cache: DeltaCache | None = None
    ) -> tuple[Float[Array, "b t d"], DeltaCache | None]:
        """Apply the layer to the normalised stream; return the result, and the cache after the last token (or None).

        Args:
          segments: a token sees only tokens of its segment. Tokens of segment 0 are padding before or after the texts;
            they change no state, and their results mean nothing. None: all tokens belong to one text.
          cache: the state after earlier tokens of the first text, which the new tokens continue; None: return no cache.
        """
        c = self.config
        segments = jnp.ones(x.shape[:2], jnp.int32) if segments is None else segments
        texts, real = texts_of(segments), segments != 0
        before = empty_state(c, len(x)) if cache is None else cache
        linears, convolutions = (self.q, self.k, self.v), (self.conv_q, self.conv_k, self.conv_v)
        inputs = tuple(
            jnp.concatenate([old, keep(linear(x), "qkv")], axis=1)
            for old, linear in zip(before.inputs, linears, strict=True)
        )
        heads = (c.delta_key_heads, c.delta_key_heads, c.delta_value_heads)
        q, k, v = (
            constrain(convolve(part, texts).reshape(*x.shape[:2], count, -1), "batch", None, "heads", None)
            for part, convolve, count in zip(inputs, convolutions, heads, strict=True)
        )
        log_decay, beta = self._gates(x, real)
        if x.shape[1] == 1:
            q, k, v, log_decay, beta = (part[:, 0] for part in (q, k, v, log_decay, beta))
            mixed, state = delta_step(q, k, v, log_decay, beta, before.state)
            mixed = mixed[:, None]
        else:
            mixed, state = delta_rule(q, k, v, log_decay, beta, before.state, texts)
        z = self.z(x).reshape(mixed.shape).astype(jnp.float32)
        mixed = keep((self.norm(mixed) * jax.nn.silu(z)).astype(c.dtype), "attention")
        y = keep(self.out(mixed.reshape(*x.shape[:2], -1)), "out")
        return y, None if cache is None else DeltaCache(_latest(inputs, texts, real), state)

    def _gates(self, x: Float[Array, "b t d"], real: Bool[Array, "b t"]) -> tuple[Array, Array]:
        """Return log a = -exp(a_log) softplus(a(x) + dt_bias) and b = sigmoid(b(x)), both [B, T, N]; 0 in padding."""
        step = jax.nn.softplus(self.a(x).astype(jnp.float32) + self.dt_bias[...][None, None])
        log_decay = -jnp.exp(self.a_log[...])[None, None] * step
        beta = jax.nn.sigmoid(self.b(x).astype(jnp.float32))
        log_decay, beta = (jnp.where(real[..., None], gate, 0.0) for gate in (log_decay, beta))
        return constrain(log_decay, "batch", None, "heads"), constrain(beta, "batch", None, "heads")


def _latest(inputs: tuple[Array, ...], texts: Int32[Array, "b t"], real: Bool[Array, "b t"]) -> tuple[Array, ...]:
    """Return the inputs of the latest W - 1 tokens up to the last real one, with 0 for those of earlier texts."""
    width = inputs[0].shape[1] - real.shape[1]
    end = jnp.max(jnp.where(real, jnp.arange(1, real.shape[1] + 1)[None], 0), axis=1)
    places = end[:, None] + jnp.arange(width)[None]
    same = jnp.take_along_axis(jnp.pad(texts, ((0, 0), (width, 0))), places, axis=1) == texts[:, -1:]
    return tuple(jnp.where(same[..., None], jnp.take_along_axis(x, places[..., None], axis=1), 0) for x in inputs)


def _rates(key: Array, shape: tuple[int, ...], dtype: str = "float32") -> Array:
    """Draw log A, where A is uniform; at first a token keeps about exp(-A dt) of the state."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 0.01, 16.0))


def _steps(key: Array, shape: tuple[int, ...], dtype: str = "float32") -> Array:
    """Draw the inverse softplus of time steps dt from 0.001 to 0.1, whose logarithm is uniform."""
    step = 10 ** jax.random.uniform(key, shape, dtype, -3.0, -1.0)
    return step + jnp.log(-jnp.expm1(-step))
