"""The decoder against a NumPy forward pass written from the formulas, and what must hold for any decoder."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from diloco_jax.training.models.decoder import Decoder
from diloco_jax.training.models.moe import MoeConfig, MoeDecoder
from diloco_jax.training.models.options import DecoderConfig, periods_of
from diloco_jax.training.models.protocol import GraphDef, config_from_args, join_model
from tests.training.outlines import drawn, outline

pytestmark = pytest.mark.usefixtures("quick_compiler")

TINY = {"vocab_size": 11, "dim": 12, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "mlp_dim": 20}
# All tests read this shape, so that models of the same options share their programs.
TOKENS = np.random.default_rng(4).integers(0, 11, (2, 14)).astype(np.int32)


class Model(NamedTuple):
    """A model taken apart, so that programs take its parameters as arguments."""

    graphdef: GraphDef
    params: dict[str, np.ndarray]

    def joined(self) -> Any:
        return join_model(self.graphdef, jax.tree.map(jnp.asarray, self.params))


def build(**changes: object) -> Decoder:
    """Return a model with its initial parameters."""
    return Decoder.from_config({**TINY, **changes}, rngs=nnx.Rngs(0))


def config_of(options: Mapping[str, object]) -> DecoderConfig:
    return config_from_args(DecoderConfig, {**TINY, **options})


def randomised(**changes: object) -> Model:
    """Return a model with random parameters."""
    graphdef, params, _ = outline(lambda: build(**changes))
    return Model(graphdef, drawn(params, scale=0.0 if changes.get("norm_offset") else 1.0))


@partial(jax.jit, static_argnums=0)
def forward(graphdef: GraphDef, params: Mapping[str, Any], tokens: Any) -> jax.Array:
    return join_model(graphdef, params)(tokens)  # type: ignore[operator]


@partial(jax.jit, static_argnums=0)
def loss_and_gradients(graphdef: GraphDef, params: Mapping[str, Any], tokens: Any) -> Any:
    return jax.value_and_grad(lambda p: join_model(graphdef, p).loss({"tokens": tokens})[0])(params)  # type: ignore


def logits_of(model: Model, tokens: np.ndarray) -> np.ndarray:
    return np.asarray(forward(*model, tokens), np.float64)


def nats(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return what each next token costs, from the logits of all tokens."""
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -np.take_along_axis(log_p[:, :-1], tokens[:, 1:, None], -1)[..., 0]


def reference_logits(p: dict[str, np.ndarray], tokens: np.ndarray, c: DecoderConfig) -> np.ndarray:
    """Return logits computed in float64, for one example and one head at a time."""

    def norm(x, scale):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale

    # The complex rotation of (x[i], x[i + H/2]), where x is [T, H].
    def rope(x):
        half = x.shape[1] // 2
        turn = np.exp(1j * np.arange(len(x))[:, None] * c.rope_theta ** (-2 * np.arange(half) / x.shape[1]))
        z = (x[:, :half] + 1j * x[:, half:]) * turn
        return np.concatenate([z.real, z.imag], 1)

    def gelu(x):
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    out = []
    for sequence in tokens:
        x = p["embed/embedding"][sequence] * np.sqrt(c.dim)
        for layer in range(c.num_layers):
            w = {k.removeprefix(f"blocks/{layer}/"): v for k, v in p.items() if k.startswith(f"blocks/{layer}/")}
            y = norm(x, w["norm_attention/scale"])
            heads = []
            for n in range(c.num_heads):
                shared = n // (c.num_heads // c.num_kv_heads)
                q = rope((y @ w["q/kernel"])[:, n * c.head_dim : (n + 1) * c.head_dim])
                k = rope((y @ w["k/kernel"])[:, shared * c.head_dim : (shared + 1) * c.head_dim])
                v = (y @ w["v/kernel"])[:, shared * c.head_dim : (shared + 1) * c.head_dim]
                s = q @ k.T / np.sqrt(c.head_dim) + np.where(np.tri(len(x)) > 0, 0, -np.inf)
                e = np.exp(s - s.max(1, keepdims=True))
                heads.append(e / e.sum(1, keepdims=True) @ v)
            x = x + np.concatenate(heads, 1) @ w["out/kernel"]
            y = norm(x, w["norm_mlp/scale"])
            x = x + (gelu(y @ w["gate/kernel"]) * (y @ w["up/kernel"])) @ w["down/kernel"]
        out.append(norm(x, p["norm_final/scale"]) @ p["embed/embedding"].T)
    return np.stack(out)


@pytest.mark.parametrize("attention", ["einsum", "dot_product"])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_forward_is_the_numpy_reference(attention: str, num_layers: int) -> None:
    options = {"attention": attention, "num_layers": num_layers}
    model = randomised(**options)
    params = {path: value.astype(np.float64) for path, value in model.params.items()}
    np.testing.assert_allclose(
        logits_of(model, TOKENS), reference_logits(params, TOKENS, config_of(options)), atol=2e-5
    )


def test_loss_is_the_mean_cross_entropy_of_the_next_token() -> None:
    model = randomised()
    params = {path: value.astype(np.float64) for path, value in model.params.items()}
    want = nats(reference_logits(params, TOKENS, config_of({})), TOKENS).mean()
    assert float(loss_and_gradients(*model, TOKENS)[0]) == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("experts", [0, 4])
def test_the_future_does_not_reach_the_past(experts: int) -> None:
    model = randomised(num_layers=2)
    if experts:
        config = MoeConfig(**{**TINY, "num_layers": 2, "num_experts": experts, "capacity_factor": 0.5})
        graphdef, params, _ = outline(lambda: MoeDecoder(config, rngs=nnx.Rngs(0)))
        model = Model(graphdef, drawn(params))
    changed = TOKENS.copy()
    changed[:, 3] = (changed[:, 3] + 1) % 11
    before, after = logits_of(model, TOKENS), logits_of(model, changed)
    np.testing.assert_array_equal(before[:, :3], after[:, :3])
    assert np.abs(before[:, 3:] - after[:, 3:]).max(axis=-1).min() > 0


GEMMA = {"num_layers": 5, "norms": "both", "norm_offset": True, "qk_norm": "head", "window": 3, "global_every": 2,
         "attention_cap": 5.0, "rope_theta_local": 100.0, "rope_scaling": "linear", "rope_factor": 2.0}  # fmt: skip
OLMO = {"num_layers": 2, "norms": "post", "qk_norm": "full", "window": 4, "tie_embeddings": False, "qkv_bias": True}


# Layers that differ in window, head width, key heads and rope, whose global layers use their keys as values.
KINDS = {"num_layers": 7, "pattern": ["local", "local", "global"], "norms": "both", "qk_norm": "head",
         "value_norm": True, "layer_scale": True, "attention_width": 1.0,
         "kinds": {"local": {"window": 3},
                   "global": {"head_dim": 8, "num_kv_heads": 1, "keys_as_values": True, "rope_theta": 100.0,
                              "rope_scaling": "proportional", "rope_fraction": 0.25}}}  # fmt: skip
# Four layers with keys, then four that use the keys of these; and per-layer embeddings.
SHARED = {"num_layers": 8, "per_layer_dim": 4,
          "pattern": ["local", "global"] * 2 + ["local2", "global2"] * 2,
          "kinds": {"local": {"window": 3}, "global": {"head_dim": 8},
                    "local2": {"window": 3, "kv_from": "local", "mlp_dim": 24},
                    "global2": {"head_dim": 8, "kv_from": "global"}}}  # fmt: skip
# A layer without positions and without a mixture, then layers with sinks, gates, biases, and mixtures of two kinds. As
# in gpt-oss, one of them has clamped gates, and most gates reach the limit.
MIXED = {"num_layers": 5, "pattern": ["plain", "beside", "shared", "beside", "shared"], "norms": "both",
         "num_experts": 4, "routing": "dropless", "balance_coefficient": 0.0, "qkv_bias": True, "out_bias": True,
         "residual_scale": 0.5, "embed_multiplier": 3.0, "logit_scale": 0.25,
         "kinds": {"plain": {"rope_theta": 0.0, "num_experts": 0, "mlp_bias": True, "query_beta": 0.5,
                             "rope_length": 2},
                   "beside": {"dense_beside": True, "attention_sinks": True, "expert_dim": 8, "mixture_bias": True,
                              "activation": "silu", "glu_limit": 0.5, "rope_scaling": "yarn", "rope_factor": 8.0,
                              "rope_length": 4, "rope_truncate": False},
                   "shared": {"shared_dim": 6, "attention_gate": True, "rope_fraction": 0.34}}}  # fmt: skip
# Delta layers with a state, and gated attention over a part of each head, as in Qwen 3.5.
DELTA = {"num_layers": 4, "pattern": ["delta", "full"], "norm_offset": True, "qk_norm": "head",
         "kinds": {"delta": {"mixer": "delta", "delta_key_dim": 6, "delta_value_dim": 8},
                   "full": {"attention_gate": True, "rope_fraction": 0.34}}}  # fmt: skip
# Wavelengths that change where a text becomes longer than rope_length, which the tests do midway.
LONGROPE = {"num_layers": 2, "rope_scaling": "longrope", "rope_factor": 4.0, "rope_length": 8, "rope_fraction": 0.67,
            "rope_short": (1.0, 1.5), "rope_long": (2.0, 6.0)}  # fmt: skip
ALL = {"kinds": KINDS, "shared": SHARED, "mixed": MIXED}


def stacked(plain: Model, options: Mapping[str, object]) -> Model:
    """Return the model with the same parameters, in stacks."""
    graphdef, shapes, _ = outline(lambda: build(scan_layers=True, **options))
    stacks = config_of({"scan_layers": True, **options}).stacks()
    assert sorted(layer for stack in stacks for layer in stack.layers) == list(range(config_of(options).num_layers))
    found = {path: value for path, value in plain.params.items() if path in shapes}
    for stack in stacks:
        for path in [path for path in shapes if path.startswith(f"{stack.path}/")]:
            rest = path.removeprefix(f"{stack.path}/")
            of_layers = [plain.params[f"blocks/{layer}/{rest}"] for layer in stack.layers]
            found[path] = np.stack(of_layers) if stack.stacked else of_layers[0]
    return Model(graphdef, found)


def unstacked(values: Mapping[str, Any], options: Mapping[str, object]) -> dict[str, np.ndarray]:
    """Return values of stacks by the paths of single layers."""
    found = {path: np.asarray(value) for path, value in values.items() if not path.startswith("blocks")}
    for stack in config_of({"scan_layers": True, **options}).stacks():
        for path in [path for path in values if path.startswith(f"{stack.path}/")]:
            for number, layer in enumerate(stack.layers):
                value = np.asarray(values[path])
                found[path.replace(stack.path, f"blocks/{layer}", 1)] = value[number] if stack.stacked else value
    return found


@pytest.mark.parametrize(
    "options", [KINDS, SHARED, pytest.param(MIXED, marks=pytest.mark.slow)], ids=["kinds", "shared", "mixed"]
)
def test_scanned_layers_are_unrolled_ones_and_every_parameter_but_constants_has_its_gradient(
    options: dict[str, object],
) -> None:
    plain = randomised(**options)
    loss, found = loss_and_gradients(*stacked(plain, {**options, "remat": "full"}), TOKENS)
    assert float(loss) == pytest.approx(nats(logits_of(plain, TOKENS), TOKENS).mean(), rel=2e-6)
    gradients = unstacked(found, options)
    assert gradients.keys() == plain.params.keys()
    still = {path for path, gradient in gradients.items() if not np.abs(gradient).max()}
    assert still == {path for path in gradients if path.endswith("layer_scale")}
    # Along the gradient, the loss of unrolled layers rises by its norm. The step is small against the parameters.
    norm, step = math.sqrt(sum(float((value**2).sum()) for value in gradients.values())), 3e-5
    losses = []
    for sign in (1, -1):
        moved = {path: value + sign * step / norm * gradients[path] for path, value in plain.params.items()}
        losses.append(nats(logits_of(plain._replace(params=moved), TOKENS), TOKENS).mean())
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(norm, rel=0.02)


@pytest.mark.parametrize(
    ("kinds", "periods"),
    [
        ("LLLLG" * 3 + "llllg" * 4, [("LLLLG", 3), ("llllg", 4)]),
        ("LLLLLG" * 5 + "LLLL", [("LLLLLG", 5), ("L", 4)]),
        ("DMMMM", [("D", 1), ("M", 4)]),
        ("ABC", [("A", 1), ("B", 1), ("C", 1)]),
        ("GL" * 3 + "G", [("GL", 3), ("G", 1)]),
    ],
)
def test_layers_are_cut_into_few_periods(kinds: str, periods: list[tuple[str, int]]) -> None:
    assert [("".join(each.kinds), each.repeats) for each in periods_of(kinds)] == periods


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pattern": ["a"]}, "pattern and kinds need each other"),
        ({"kinds": {"a": {}}, "pattern": ["a"], "window": 3}, "replace window, global_every"),
        ({"kinds": {"a": {}}, "pattern": ["b"]}, "needs a mapping for 'b'; it has a"),
        ({"kinds": {"a": {"vocab_size": 3}}, "pattern": ["a"]}, "vocab_size, an option of the whole model"),
        ({"kinds": {"a": {"windw": 3}}, "pattern": ["a"]}, "kinds.a.windw is unknown"),
        ({"kinds": {"a": {"window": -3}}, "pattern": ["a"]}, r"window is -3.*\(in model.args.kinds.a\)"),
        ({"kinds": {"a": {}}, "pattern": ["a"] * 5, "num_layers": 4}, "names 5 layers, but num_layers is 4"),
        (
            {"kinds": {"a": {"kv_from": "b"}, "b": {}}, "pattern": ["a", "b"], "num_layers": 2},
            "no layer before layer 0 is of that kind",
        ),
        ({"kinds": {"a": {"kv_from": "a"}}, "pattern": ["a"]}, "no layer before layer 0"),
        (
            {"kinds": {"a": {"kv_from": "b", "head_dim": 64}, "b": {}}, "pattern": ["b", "a"], "num_layers": 2},
            "has num_heads . and head_dim 64, but keys of 'b' with num_kv_heads . and head_dim .*; make head_dim equal",
        ),
        (
            {
                "kinds": {"a": {"kv_from": "b", "num_heads": 3, "num_kv_heads": 3}, "b": {}},
                "pattern": ["b", "a"],
                "num_layers": 2,
            },
            "has num_heads 3 .* make head_dim equal, and num_heads a multiple of num_kv_heads",
        ),
        ({"kv_from": "a"}, "kv_from is 'a', which names a kind of layers, but there are no kinds"),
        ({"pattern": [["a"]], "kinds": {"a": {}}}, r"pattern\[0\] is \['a'\], a list; it must be a str"),
        ({"pattern": ["a", 1], "kinds": {"a": {}}}, r"pattern\[1\] is 1, a int; it must be a str"),
        ({"pattern": ["a"], "kinds": {"a": {"rope_short": ["x"]}}}, r"kinds.a.rope_short\[0\] is 'x', a str; it must"),
        ({"rope_theta": 10**400}, "rope_theta is a whole number too large for a float"),
        ({"pattern": ["a"], "kinds": {f"{n}": {} for n in range(10_001)}}, "has 10001 kinds; use at most 10000"),
        ({"window": 2**31}, r"window is 2147483648; it must be below 2\^31"),
        ({"num_experts": 10**12}, "num_experts is 1000000000000 in each of .* layers; use at most 1000000 in all"),
        ({"dense_beside": True}, "need a mixture"),
        ({"mixture_bias": True}, "mixture_bias need a mixture"),
        ({"glu_limit": 7.0}, "glu_limit needs activation silu, not gelu"),
        ({"glu_limit": -7.0, "activation": "silu"}, "glu_limit is -7.0; it must be at least 0"),
        ({"num_layers": 10**9}, "num_layers is 1000000000; use at most 10000"),
    ],
)
def test_impossible_kinds_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**changes)


@partial(jax.jit, static_argnums=0)
def packed(graphdef: GraphDef, params: Mapping[str, Any], tokens: Any, segments: Any) -> Any:
    model: Any = join_model(graphdef, params)
    return model(tokens, segments), *model.loss({"tokens": tokens, "segments": segments})


@pytest.mark.parametrize(
    ("options", "scan"),
    [(OLMO | {"loss_chunk": 11}, False), (GEMMA, True), (MIXED, True), (DELTA, True)],
    ids=["olmo", "gemma", "mixed", "delta"],
)
def test_texts_of_one_window_do_not_know_each_other(options: dict[str, object], scan: bool) -> None:
    model, segments = randomised(**options), np.array([[1] * 5 + [2] * 5 + [0] * 4], np.int32)
    logits, loss, metrics = packed(*(stacked(model, options) if scan else model), TOKENS[:1], segments)
    # Each text at the start of a row; later tokens of the row change nothing.
    alone = np.stack([TOKENS[0], np.roll(TOKENS[0], -5)])
    found = logits_of(model, alone)
    for row, start in enumerate((0, 5)):
        np.testing.assert_allclose(logits[0, start : start + 5], found[row, :5], atol=2e-5)
    want = nats(found[:, :5], alone[:, :5]).mean()
    assert (float(loss), float(metrics["weight"])) == (pytest.approx(want, rel=1e-5), 8)


def test_default_size_is_about_a_million() -> None:
    shapes = outline(lambda: Decoder(DecoderConfig(), rngs=nnx.Rngs(0))).params
    assert 0.9e6 < sum(v.size for v in shapes.values()) < 1.1e6


def test_bfloat16_computes_close_to_float32_and_keeps_float32_parameters() -> None:
    full = randomised(num_layers=2)
    graphdef, params, _ = outline(lambda: build(num_layers=2, dtype="bfloat16"))
    assert {value.dtype for value in params.values()} == {jnp.dtype("float32")}
    found, want = (nats(logits_of(each, TOKENS), TOKENS).mean() for each in (Model(graphdef, full.params), full))
    assert found == pytest.approx(want, rel=0.01)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_heads", 3, "multiple of num_kv_heads"),
        ("head_dim", 5, "even"),
        ("dim", 0, "at least 1"),
        ("activation", "tanh", "gelu, silu, relu2"),
        ("dtype", "float16", "float32, bfloat16"),
        ("norms", "none", "pre, post, both"),
        ("window", -1, "window is -1; it must be at least 0"),
        ("rope_slow", 4.0, "rope_slow 4.0 must be above 0 and below rope_fast 4.0"),
        ("rope_factor", 0.5, "rope_factor 0.5"),
        ("rope_scaling", "longrope", "rope_short has 0 factors"),
        ("rope_theta", math.nan, "rope_theta nan must be finite"),
        ("num_heads", 0, "at least 1"),
        ("experts_per_token", 5, r"use 1 to num_experts \(4\)"),
        ("capacity_factor", 0.0, "must be > 0"),
        ("routing", "all", "choose from capacity, dropless"),
        ("capacity_factor", math.inf, "capacity_factor inf must be > 0"),
        ("balance_coefficient", math.nan, "balance_coefficient nan at least 0"),
    ],
)
def test_impossible_sizes_are_refused(name: str, value: object, message: str) -> None:
    config = MoeConfig(**TINY, num_experts=4)
    # Under test the constructor checks types, and would refuse some of these values with another error.
    object.__setattr__(config, name, value)
    with pytest.raises(ValueError, match=message):
        config.__post_init__()


def test_a_too_long_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="seq_len_max 4"):
        jax.eval_shape(lambda: build(seq_len_max=4)(jnp.asarray(TOKENS)))


@partial(jax.jit, static_argnums=0)
def written(graphdef: GraphDef, params: Mapping[str, Any], prompt: Any, length: Any) -> jax.Array:
    model: Any = join_model(graphdef, params)
    how = {"context": len(prompt) + 9, "temperature": 0.0, "ids": 11}
    return model.generate(prompt, 9, jax.random.key(0), length=length, **how)


@pytest.mark.parametrize(
    ("options", "scan"),
    [
        (LONGROPE, False), (SHARED, True), (DELTA, True),
    ],
    ids=["longrope", "shared", "delta"],
)  # fmt: skip
def test_kept_keys_and_values_are_those_of_the_whole_text(options: dict[str, object], scan: bool) -> None:
    """Check it behind a padded prompt, whose padding is overwritten."""
    model, prompt = randomised(**options), TOKENS[0, :5]
    padded = np.append(prompt, np.int32([7, 7, 7]))
    tokens = np.append(prompt, written(*(stacked(model, options) if scan else model), padded, np.int32(5)))
    logits = logits_of(model, np.stack([tokens, TOKENS[1]]))[0]
    np.testing.assert_array_equal(logits[4:-1].argmax(axis=-1), tokens[5:])


def test_what_it_writes_is_what_its_logits_say() -> None:
    model, prompt, context = randomised(), np.array([3, 1, 4], np.int32), 4

    @partial(jax.jit, static_argnums=(0, 2))
    def program(temperature: float, seed: jax.Array, ids: int) -> jax.Array:
        options = {"context": context, "temperature": temperature, "ids": ids}
        return model.joined().generate(jnp.asarray(prompt), 6, jax.random.key(seed), **options)

    def written(temperature: float, seed: int = 0, ids: int = 11) -> list[int]:
        return np.asarray(program(temperature, seed, ids)).tolist()

    tokens = prompt.tolist()
    # Greedy decoding with one forward pass over at most one context for each token; later tokens change nothing.
    for _ in range(6):
        read = tokens[-context:]
        tokens.append(int(logits_of(model, np.array([read + [0] * (context - len(read))]))[0, len(read) - 1].argmax()))
    assert written(0.0) == tokens[3:]
    assert written(1e-4) == tokens[3:], "a cold draw is the likeliest token"
    assert written(50.0, ids=3) == written(50.0, ids=3) != written(50.0, seed=1, ids=3)
    assert max(written(50.0, ids=3)) < 3
