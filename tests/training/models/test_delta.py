"""Gated DeltaNet against transformers, against its recurrence in NumPy, and what must hold for packed texts and meshes.

The layer's weights are random, its sizes are odd: three value heads for each key head, and key and value widths that
differ.
"""

import re
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from diloco_jax.training.models.delta import GatedDelta, delta_rule, delta_step, empty_state, texts_of
from diloco_jax.training.models.options import DecoderConfig
from diloco_jax.training.models.protocol import GraphDef, join_model
from diloco_jax.training.sharding import LogicalAxes, MeshConfig, MeshLayout, make_mesh, use_layout
from tests.training.outlines import drawn, outline

pytestmark = pytest.mark.usefixtures("quick_compiler")

DIM, KEY_HEADS, HEADS, WIDTH, VALUE_WIDTH = 24, 2, 6, 8, 12
SIZES = {
    "dim": DIM, "delta_key_heads": KEY_HEADS, "delta_value_heads": HEADS, "delta_key_dim": WIDTH,
    "delta_value_dim": VALUE_WIDTH,
}  # fmt: skip
KEYS, VALUES = KEY_HEADS * WIDTH, HEADS * VALUE_WIDTH


class Layer(NamedTuple):
    """A layer taken apart, so that its programs take parameters as arguments and are shared between tests."""

    graphdef: GraphDef
    params: dict[str, np.ndarray]
    axes: dict[str, LogicalAxes]
    config: DecoderConfig


def build(**changes: Any) -> Layer:
    """The layer with random parameters, and with weights that make outputs large."""
    config = DecoderConfig(**{**SIZES, **changes})
    graphdef, shapes, axes = outline(lambda: GatedDelta(config, rngs=nnx.Rngs(0)))
    params = drawn(shapes)
    # Otherwise logarithms of decays reach -60, and the rounding of their sums would hide other errors.
    params["a/kernel"] = np.float32(0.3) * params["a/kernel"]
    return Layer(graphdef, params, axes, config)


def check_close(got: Any, want: Any) -> None:
    """Check that results differ by float32 rounding, which depends on the size of all results."""
    assert np.abs(got - want).max() <= 3e-5 * np.std(want)


def stream(length: int, batch: int = 2, dim: int = DIM) -> np.ndarray:
    return np.random.default_rng(length).normal(size=(batch, length, dim)).astype(np.float32)


@partial(jax.jit, static_argnums=0)
def applied(graphdef: GraphDef, params: Any, x: Any, segments: Any, cache: Any) -> Any:
    return join_model(graphdef, params)(x, segments, cache)  # type: ignore[operator]


def run(layer: Layer, x: Any, segments: Any = None, cache: Any = None) -> Any:
    """The layer's result and cache, compiled."""
    return applied(*layer[:2], x, None if segments is None else np.asarray(segments, np.int32), cache)


def rule_inputs(length: int, batch: int = 2) -> list[np.ndarray]:
    """Random q, k, v, log decay, beta and state of the pure functions; decays from almost 1 to about e^-20."""
    rng = np.random.default_rng(length + 1)
    q, k = rng.normal(size=(2, batch, length, KEY_HEADS, WIDTH))
    v = rng.normal(size=(batch, length, HEADS, VALUE_WIDTH))
    log_decay = -np.exp(rng.uniform(-7, 3, (batch, length, HEADS)))
    beta = rng.uniform(size=(batch, length, HEADS))
    state = rng.normal(size=(batch, HEADS, WIDTH, VALUE_WIDTH))
    return [np.float32(x) for x in (q, k, v, log_decay, beta, state)]


def recurrence(q: Any, k: Any, v: Any, log_decay: Any, beta: Any, state: Any) -> tuple[np.ndarray, np.ndarray]:
    """One head's results and last state in float64, from the formula with the matrix I - b k k^T."""
    out = []
    for q_t, k_t, v_t, g, b in zip(*(np.float64(x) for x in (q, k, v, log_decay, beta)), strict=True):
        k_t = k_t / np.linalg.norm(k_t)
        state = np.exp(g) * (np.eye(WIDTH) - b * np.outer(k_t, k_t)) @ state + b * np.outer(k_t, v_t)
        out.append(state.T @ q_t / np.linalg.norm(q_t) / np.sqrt(WIDTH))
    return np.array(out), state


def plain(q: Any, k: Any, v: Any, log_decay: Any, beta: Any, state: Any) -> tuple[jax.Array, jax.Array]:
    """The results and the last state by `delta_step`, token by token."""

    def one(state: Any, token: Any) -> tuple[Any, Any]:
        out, state = delta_step(*token, state)
        return state, out

    state, out = jax.lax.scan(one, state, tuple(x.swapaxes(0, 1) for x in (q, k, v, log_decay, beta)))
    return out.swapaxes(0, 1), state


@pytest.mark.parametrize("length", [1, 64, 200])
def test_the_chunked_form_is_the_recurrence_in_numpy(length: int) -> None:
    given = rule_inputs(length)
    check_recurrence(given, jax.jit(delta_rule)(*given, np.zeros((2, length), np.int32)))


def test_the_form_for_one_token_is_the_recurrence_in_numpy() -> None:
    given = rule_inputs(65)
    check_recurrence(given, jax.jit(plain)(*given))


def check_recurrence(given: list[np.ndarray], found: tuple[jax.Array, jax.Array]) -> None:
    for b, n in np.ndindex(2, HEADS):
        q, k = (x[b, :, n // (HEADS // KEY_HEADS)] for x in given[:2])
        out, state = recurrence(q, k, *(x[b, :, n] for x in given[2:5]), given[5][b, n])
        np.testing.assert_allclose(found[0][b, :, n], out, atol=3e-5)
        np.testing.assert_allclose(found[1][b, n], state, atol=3e-5)


def test_equal_keys_cost_no_accuracy() -> None:
    # With equal keys, beta of 1 and no decay, each result is the latest value; powers of the system would overflow.
    q = jnp.broadcast_to(jnp.asarray(rule_inputs(1)[0][:, :1, :1]), (2, 128, 1, WIDTH))
    v = jnp.asarray(np.random.default_rng(0).normal(size=(2, 128, 1, VALUE_WIDTH)), jnp.float32)
    zeros = jnp.zeros((2, 128, 1))
    state = jnp.zeros((2, 1, WIDTH, VALUE_WIDTH))
    out, _ = jax.jit(delta_rule)(q, q, v, zeros, zeros + 1, state, jnp.zeros((2, 128), jnp.int32))
    np.testing.assert_allclose(out * np.sqrt(WIDTH), v, atol=1e-4)


def test_gradients_are_those_of_the_recurrence() -> None:
    arrays = [jnp.asarray(x) for x in rule_inputs(150)]
    rng = np.random.default_rng(1)
    weights = [jnp.asarray(rng.normal(size=x.shape), jnp.float32) for x in (arrays[2], arrays[5])]

    def gradients(rule: Any) -> Any:
        def total(*arrays: Any) -> Any:
            return sum(jnp.sum(w * x) for w, x in zip(weights, rule(*arrays), strict=True))

        return jax.jit(jax.grad(total, argnums=range(6)))(*arrays)

    numbers = jnp.zeros((2, 150), jnp.int32)
    for got, want in zip(gradients(lambda *a: delta_rule(*a, numbers)), gradients(plain), strict=True):
        assert np.isfinite(got).all() and np.linalg.norm(want) > 0.1
        assert np.linalg.norm(got - want) <= 1e-4 * np.linalg.norm(want)


def theirs_of(layer: Layer, model: str) -> Any:
    """The layer of transformers with the same parameters."""
    import torch
    from transformers import Qwen3_5TextConfig, Qwen3NextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    config_class, net_class = {
        "qwen3_5": (Qwen3_5TextConfig, Qwen3_5GatedDeltaNet), "qwen3_next": (Qwen3NextConfig, Qwen3NextGatedDeltaNet)
    }[model]  # fmt: skip
    net = net_class(
        config_class(
            hidden_size=DIM, linear_num_key_heads=KEY_HEADS, linear_num_value_heads=HEADS, linear_key_head_dim=WIDTH,
            linear_value_head_dim=VALUE_WIDTH, linear_conv_kernel_dim=4, num_hidden_layers=1,
            layer_types=["linear_attention"],
        ),
        0,
    )  # fmt: skip
    p = layer.params
    rows = {name: p[f"{name}/kernel"].T for name in ("q", "k", "v", "z", "b", "a")}
    tensors = {
        "A_log": p["a_log"], "dt_bias": p["dt_bias"], "norm.weight": p["norm/scale"],
        "out_proj.weight": p["out/kernel"].T,
        "conv1d.weight": np.concatenate([p[f"conv_{name}/kernel"] for name in "qkv"]),
    }  # fmt: skip
    if model == "qwen3_5":
        tensors["in_proj_qkv.weight"] = np.concatenate([rows[name] for name in "qkv"])
        tensors.update({f"in_proj_{name}.weight": rows[name] for name in "zba"})
    else:
        # The rows of a key head are together: its query, its key, its value heads, and their z.
        for joint in ("qkvz", "ba"):
            parts = [rows[name].reshape(KEY_HEADS, -1, DIM) for name in joint]
            tensors[f"in_proj_{joint}.weight"] = np.concatenate(parts, axis=1).reshape(-1, DIM)
    net.load_state_dict({name: torch.tensor(value) for name, value in tensors.items()})
    return net.eval()


@pytest.mark.extra("parity")
@pytest.mark.parametrize("model", ["qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("length", [1, 65])
def test_the_layer_is_that_of_transformers(length: int, model: str) -> None:
    layer, x = build(), stream(length)
    net = theirs_of(layer, model)
    import torch

    with torch.no_grad():
        want = net(torch.tensor(x)).numpy()
    assert want.std() > 0.3
    assert np.abs(run(layer, x)[0] - want).max() <= 2e-5 * want.std()


SEGMENTS = [[3] * 2 + [1] * 70 + [2] * 1 + [3] * 90 + [0] * 7, [0] * 5 + [4] * 64 + [0] * 3 + [4] * 98]


def test_packed_texts_are_those_of_each_text_alone() -> None:
    layer, x = build(), stream(170)
    packed, _ = run(layer, x, SEGMENTS)
    assert np.isfinite(packed).all()
    cuts = [(0, 0, 2), (0, 2, 72), (0, 72, 73), (0, 73, 163), (1, 5, 69), (1, 72, 170)]
    # Each text at the start of a row; later tokens of the row change nothing.
    alone, _ = run(layer, np.stack([np.roll(x[row], -start, axis=0) for row, start, _ in cuts]))
    for number, (row, start, end) in enumerate(cuts):
        check_close(packed[row, start:end], alone[number, : end - start])


def test_no_gradient_crosses_a_border() -> None:
    layer, x = build(), stream(170)
    segments = jnp.asarray(SEGMENTS, jnp.int32)

    def total(x: Any) -> Any:
        return jnp.sum(jnp.sin(applied(*layer[:2], x, segments, None)[0][0, 73:163]))

    found = jax.jit(jax.grad(total))(x)
    assert np.isfinite(found).all() and np.abs(found[0, 73:163]).max(axis=-1).min() > 0
    # Gradients of the sums of log decays cancel only to rounding within a chunk.
    others = np.array(found)
    others[0, 73:163] = 0
    assert np.abs(others).max() <= 1e-6 * np.abs(found).max()


def test_texts_are_counted_and_padding_continues_them() -> None:
    numbers = texts_of(jnp.asarray([[5, 5, 2, 0, 0, 2, 2, 7], [0, 0, 1, 1, 0, 0, 0, 0]], jnp.int32))
    np.testing.assert_array_equal(numbers, [[0, 0, 1, 1, 1, 2, 2, 3], [0, 0, 1, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize(("prompt", "padding"), [(1, 66), (2, 0), (65, 2)])
def test_generation_with_a_cache_is_the_whole_sequence(prompt: int, padding: int) -> None:
    # Some programs are those of other cases: 67 tokens, one token, and 69 tokens, which are two chunks.
    layer, x = build(), stream(139)
    whole, _ = run(layer, x)
    padded = np.concatenate([x[:, :prompt], stream(padding)], axis=1)
    segments = [[1] * prompt + [0] * padding] * 2
    out, cache = run(layer, padded, segments if padding else None, empty_state(layer.config, 2))
    check_close(out[:, :prompt], whole[:, :prompt])
    for t in range(prompt, prompt + 5):
        out, cache = run(layer, x[:, t : t + 1], None, cache)
        check_close(out[:, 0], whole[:, t])
    # A padding token changes nothing, and further tokens may also be read together.
    _, cache = run(layer, stream(1), [[0]] * 2, cache)
    rest = slice(prompt + 5, prompt + 74)
    out, _ = run(layer, x[:, rest], None, cache)
    check_close(out, whole[:, rest])


@pytest.mark.parametrize("length", [1, 2, 3, 40])
def test_the_last_of_several_texts_continues_with_the_cache(length: int) -> None:
    layer, x = build(), stream(50)
    # The last text follows another text and padding in one row, and only padding in the other; then padding.
    segments = np.zeros((2, 46), int)
    segments[0, :2], segments[:, 4 : 4 + length] = 1, 2
    _, cache = run(layer, x[:, :46], segments, empty_state(layer.config, 2))
    out, _ = run(layer, x[:, 46:], None, cache)
    # The text and what continues it, and then anything, to make all cases equally long.
    whole, _ = run(layer, np.concatenate([x[:, 4 : 4 + length], x[:, 46:], x[:, : 40 - length]], axis=1))
    check_close(out, whole[:, length : length + 4])


def test_bfloat16_computes_about_the_same() -> None:
    x, segments = stream(67), np.ones((2, 67))
    want, cache = run(build(), x, segments, empty_state(build().config, 2))
    layer = build(dtype="bfloat16")
    got, small = run(layer, jnp.asarray(x, jnp.bfloat16), segments, empty_state(layer.config, 2))
    assert got.dtype == small.inputs[0].dtype == jnp.bfloat16 and small.state.dtype == jnp.float32
    assert np.std(got.astype(jnp.float32) - want) < 0.02 * want.std()
    assert np.std(small.state - cache.state) < 0.02 * np.std(cache.state)


def test_initial_states_last_from_one_token_to_thousands() -> None:
    @jax.jit
    def initial() -> tuple[jax.Array, jax.Array]:
        with nnx.use_eager_sharding(False):
            layer = GatedDelta(DecoderConfig(dim=8, delta_value_heads=256), rngs=nnx.Rngs(0))
        return layer.a_log[...], layer.dt_bias[...]

    a_log, dt_bias = initial()
    decay = np.exp(-np.exp(a_log) * np.logaddexp(0, dt_bias))
    assert decay.min() > np.exp(-1.6) and decay.max() < 1 and np.mean(decay > 0.99) > 0.02


MESH_SIZES = {"dim": 32, "delta_key_heads": 2, "delta_value_heads": 6, "delta_key_dim": 8, "delta_value_dim": 16}


@cache
def on_one_device() -> tuple[Layer, list[np.ndarray], Any, Any]:
    """A layer, its input, and what one device makes of it: the results and the gradients."""
    layer = build(**MESH_SIZES)
    batch = [stream(100, batch=4, dim=32), np.sort(np.random.default_rng(2).integers(1, 4, (4, 100)), axis=1)]
    batch[1] = batch[1].astype(np.int32)
    (_, results), gradients = jax.jit(partial(total_and_gradients, layer.graphdef))(layer.params, *batch)
    return layer, batch, results, gradients


def total_and_gradients(graphdef: GraphDef, params: Any, x: Any, segments: Any) -> Any:
    def total(params: Any, x: Any) -> Any:
        out, _ = join_model(graphdef, params)(x, segments)  # type: ignore[operator]
        return jnp.sum(jnp.sin(out)), out

    return jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(params, x)


@pytest.mark.parametrize("mesh", [{"fsdp": 2, "tensor": 2}, {"data": 2, "tensor": 2}, {"fsdp": 4}])
def test_a_mesh_computes_what_one_device_does(mesh: dict[str, int]) -> None:
    layer, given, want, gradients = on_one_device()
    layout = MeshLayout(make_mesh(MeshConfig(**mesh), jax.devices()[:4]))
    placed = {p: jax.device_put(v, layout.sharding(v.shape, layer.axes[p])) for p, v in layer.params.items()}
    batch = [jax.device_put(v, layout.sharding(v.shape, ("batch", *(None,) * (v.ndim - 1)))) for v in given]
    with use_layout(layout):
        compute: Any = lambda p, *b: join_model(layer.graphdef, p)(*b)[0]  # type: ignore  # noqa: E731
        program = jax.jit(compute).lower(placed, *batch).compile()
        # Sums in another order; how far they differ depends on the processor.
        np.testing.assert_allclose(program(placed, *batch), want, atol=5e-6 * float(np.abs(want).max()))
        if len(mesh) == 2 and "fsdp" in mesh:
            _, found = jax.jit(partial(total_and_gradients, layer.graphdef))(placed, *batch)
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(gradients), strict=True):
                np.testing.assert_allclose(a, b, atol=2e-4 * float(np.abs(b).max()))
    # The state and the activations of heads stay where they are: what travels is weights and the sum over `out`.
    moved = re.findall(
        r" = \(?\w+\[([\d,]*)\]\S* (all-gather|all-reduce|all-to-all|collective-permute)", program.as_text() or ""
    )
    assert [kind for _, kind in moved if kind != "all-gather"] == ["all-reduce"] * ("tensor" in mesh)
    assert ("fsdp" in mesh) == any(kind == "all-gather" for _, kind in moved)
    assert all(shape.count(",") < 2 or shape.endswith(",1,4") for shape, kind in moved if kind == "all-gather")
