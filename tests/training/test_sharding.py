"""From logical axes to a mesh; a stack of layers is trained, merged and cut as its layers would be."""

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from diloco_jax.core import codec
from diloco_jax.core.codec import encode
from diloco_jax.core.fragments import FragmentConfig, put, take
from diloco_jax.core.kinds import Kind
from diloco_jax.core.layout import whole
from diloco_jax.core.merge import MergeConfig, Method, merge_rules
from diloco_jax.core.outer import OuterConfig, make_outer
from diloco_jax.core.passes import Merger, Values
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.exchange.windows import windows_of
from diloco_jax.training.models.config import ModelConfig
from diloco_jax.training.models.decoder import Decoder
from diloco_jax.training.models.options import DecoderConfig
from diloco_jax.training.optimizers import OptimizerConfig, OptimizerName, make_inner
from diloco_jax.training.sharding import MeshConfig, MeshLayout, constrain, gather, make_mesh, planned_mesh, use_layout


def layout(**sizes: int) -> MeshLayout:
    config = MeshConfig(**sizes)
    return MeshLayout(make_mesh(config, jax.devices()[: config.data * config.fsdp * config.expert * config.tensor]))


def test_the_remaining_devices_go_where_the_minus_one_is() -> None:
    assert MeshConfig(data=-1, fsdp=2).sizes(8) == (4, 2, 1, 1)
    assert MeshConfig(tensor=-1).sizes(1) == (1, 1, 1, 1)


@pytest.mark.parametrize(
    ("config", "message"),
    [({"data": 3}, "does not fit 8 devices"), ({"data": -1, "fsdp": 3}, "fit 8"), ({"data": 16, "tensor": -1}, "fit 8"),
     ({"data": 0}, "mesh.data is 0"), ({"fsdp": -2}, "mesh.fsdp is -2"), ({"data": -1, "fsdp": -1}, "more than one")],
)  # fmt: skip
def test_a_mesh_that_does_not_fit_is_refused(config: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MeshConfig(**config).sizes(8)


def test_names_become_mesh_axes_where_they_divide() -> None:
    two = layout(data=2, fsdp=2, tensor=2)
    assert two.sharding((8, 6), ("embed", "mlp")).spec == P(("fsdp",), ("tensor",))
    assert two.sharding((8, 7), ("embed", "mlp")).spec == P(("fsdp",), None)
    assert two.sharding((8, 8), ("batch", None)).spec == P(("data", "fsdp"), None)
    assert two.sharding((3, 8, 8), ("layers", "heads", "embed")).spec == P(None, ("tensor", "fsdp"), None)
    assert two.sharding((6, 8), ("vocab", "embed")).spec == P(("tensor",), ("fsdp",))
    with pytest.raises(ValueError, match="one name per dimension"):
        two.sharding((8, 8), ("embed",))


def test_rules_of_a_mesh_take_the_place_of_the_defaults() -> None:
    config = MeshConfig(data=2, fsdp=2, rules={"embed": ("data", "fsdp"), "mlp": ()})
    mine = MeshLayout(make_mesh(config, jax.devices()[:4]), config.all_rules())
    assert mine.sharding((8, 8), ("embed", "mlp")).spec == P(("data", "fsdp"), None)
    assert mine.sharding((8, 8), ("vocab", None)).spec == P(("fsdp",), None)
    assert mine.gathers and not layout(data=2, tensor=2).gathers
    with pytest.raises(ValueError, match=r"mesh\.rules\.embed names the mesh axis 'fdsp'; choose from data, fsdp"):
        MeshConfig(rules={"embed": ("fdsp",)})
    with pytest.raises(ValueError, match="each mesh axis once"):
        MeshConfig(rules={"embed": ("fsdp", "fsdp")})


def test_what_splits_the_batch_is_counted() -> None:
    own = MeshConfig(fsdp=4, rules={"batch": ("data",)})
    assert MeshLayout(planned_mesh(own, 4), own.all_rules()).batch_parts == 1
    assert layout(fsdp=2, expert=2, tensor=2).batch_parts == 4


def test_a_weight_is_gathered_along_what_splits_the_batch_but_experts_stay() -> None:
    two = layout(fsdp=2, expert=2, tensor=2)
    assert two.sharding((8, 8), ("embed", "mlp")).spec == P(("fsdp", "expert"), ("tensor",))
    assert two.gathered((8, 8), ("embed", "mlp")).spec == P(None, ("tensor",))
    assert two.gathered((8, 8), ("mlp", "embed")).spec == P(("tensor",), None)
    assert two.sharding((4, 8, 8), ("expert", "embed", "mlp")).spec == P(("expert",), ("fsdp",), ("tensor",))
    assert two.gathered((4, 8, 8), ("expert", "embed", "mlp")).spec == P(("expert",), None, ("tensor",))


def test_a_gathered_weight_has_the_same_value_and_its_gradient_is_sharded_like_the_weight() -> None:
    two = layout(fsdp=2, tensor=2)
    stored = two.sharding((4, 6), ("embed", "mlp"))
    weight = jax.device_put(jnp.arange(24.0).reshape(4, 6), stored)

    @jax.jit
    def step(weight):
        with use_layout(two):
            used = gather(weight, "embed", "mlp")
            return used, jax.grad(lambda w: jnp.sum(gather(w, "embed", "mlp") ** 2))(weight)

    used, gradient = step(weight)
    assert used.sharding.is_equivalent_to(two.gathered((4, 6), ("embed", "mlp")), 2)
    assert gradient.sharding.is_equivalent_to(stored, 2)
    np.testing.assert_array_equal(used, weight)
    np.testing.assert_array_equal(gradient, 2 * np.asarray(weight))


# Rows are shorter than a block of 256 elements: a shard of an eighth of each row would cut blocks.
WIDTHS = {"dim": 64, "num_heads": 8, "num_kv_heads": 8, "head_dim": 8, "mlp_dim": 128, "num_layers": 2}


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("module", ["decoder:Decoder", "moe:MoeDecoder"])
def test_every_shard_holds_whole_wire_blocks(module: str, scan_layers: bool) -> None:
    model = ModelConfig(module=f"diloco_jax.training.models.{module}", args={**WIDTHS, "scan_layers": scan_layers})
    blueprint = Blueprint(model, OptimizerConfig(), MeshConfig(fsdp=8), jax.devices(), seed=0)
    plan = FragmentConfig().plan(blueprint.shapes, blueprint.kinds, 6)
    for window in (w for fragment in plan.fragments for w in windows_of(fragment, blueprint.tensors)):
        assert window.block_dim is not None, window.part.key
        large = math.prod(window.tensor) >= 8 * codec.BLOCK
        assert not large or math.prod(window.sharding.shard_shape(window.tensor)) == math.prod(window.tensor) // 8
    old = MeshConfig(fsdp=8, rules={"mlp": ("tensor",), "heads": ("tensor",), "vocab": ("tensor",)})
    cut = Blueprint(model, OptimizerConfig(), old, jax.devices(), seed=0)
    windows = [w for fragment in plan.fragments for w in windows_of(fragment, cut.tensors)]
    assert any(window.block_dim is None for window in windows)


def test_constrain_pins_inside_an_island_and_does_nothing_outside() -> None:
    two = layout(fsdp=2)
    x = jnp.ones((4, 3))
    assert constrain(x, "batch", None) is x

    @jax.jit
    def pinned(x):
        with use_layout(two):
            return constrain(x, "batch", None)

    assert pinned(x).sharding.is_equivalent_to(two.sharding((4, 3), ("batch", None)), 2)


LAYERS, LEARNERS = 2, 4


SIZES = {"vocab_size": 32, "dim": 24, "num_layers": LAYERS, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4}


MOE = "diloco_jax.training.models.moe:MoeDecoder"


MODULES = (ModelConfig().module, MOE)


Arrays = dict[str, Any]


@cache
def describe(module: str, *, stacked: bool) -> Blueprint:
    args: dict[str, Any] = {**SIZES, "mlp_dim": 40, "scan_layers": stacked}
    if module == MOE:
        args |= {"num_experts": 2, "experts_per_token": 1}
    return Blueprint(ModelConfig(module=module, args=args), OptimizerConfig(), MeshConfig(), 1, seed=0)


def random_values(shapes: Mapping[str, tuple[int, ...]], seed: int) -> Arrays:
    """Layers and experts whose sizes differ a hundredfold, so that it matters whose norm is whose."""
    rng = np.random.default_rng(seed)
    found = {}
    for path, shape in sorted(shapes.items()):
        scale = 10.0 ** rng.uniform(-1, 1, shape[:-2] + (1,) * min(2, len(shape)))
        found[path] = (scale * rng.standard_normal(shape)).astype(np.float32)
    return found


def stack(values: Mapping[str, Any]) -> Arrays:
    """`blocks/0/x`, `blocks/1/x`, ... as `blocks/x`."""
    found: Arrays = {path: value for path, value in values.items() if not path.startswith("blocks/")}
    for path in values:
        if path.startswith("blocks/0/"):
            rest = path.removeprefix("blocks/0/")
            found[f"blocks/{rest}"] = np.stack([values[f"blocks/{i}/{rest}"] for i in range(LAYERS)])
    return found


@pytest.mark.parametrize("module", MODULES)
def test_a_stack_is_a_stack_of_what_its_layers_are(module: str) -> None:
    alone, stacked = describe(module, stacked=False), describe(module, stacked=True)
    for path, kind in alone.kinds.items():
        if path.startswith("blocks/"):
            expected = Kind(kind.form, kind.stack + 1)
            assert stacked.kinds["blocks/" + path.split("/", 2)[2]] == expected, path
        else:
            assert stacked.kinds[path] == kind, path
    assert stacked.kinds["blocks/norm_mlp/scale"] == Kind("vector", 1)
    assert stacked.kinds["embed/embedding"] == Kind("table")
    if module == MOE:
        assert stacked.kinds["blocks/router"] == Kind("matrix", 1)
        assert stacked.kinds["blocks/experts_up"] == Kind("matrix", 2)


def test_a_stack_of_delta_layers_has_vectors_and_matrices() -> None:
    args = {**SIZES, "scan_layers": True, "mixer": "delta"}
    kinds = Blueprint(ModelConfig(args=args), OptimizerConfig(), MeshConfig(), 1, seed=0).kinds
    prefix = "blocks/delta/"
    forms = {path.removeprefix(prefix): kind for path, kind in kinds.items() if path.startswith(prefix)}
    assert all(kind.stack == 1 for kind in forms.values())
    assert {path for path, kind in forms.items() if kind.form == "vector"} == {"a_log", "dt_bias", "norm/scale"}
    assert {path.split("/")[0] for path, kind in forms.items() if kind.form == "matrix"} == {
        "q", "k", "v", "z", "a", "b", "out", "conv_q", "conv_k", "conv_v"
    }  # fmt: skip


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_stack_is_updated_as_its_layers_are(name: OptimizerName) -> None:
    # The decoder with experts has all kinds of parameters.
    alone, stacked = describe(MOE, stacked=False), describe(MOE, stacked=True)
    config = OptimizerConfig(name=name, learning_rate=1e-2)

    def trained(blueprint: Blueprint, values: list[Arrays]) -> Arrays:
        tx = make_inner(config, jax.eval_shape(lambda: values[0]), kinds=blueprint.kinds)

        @jax.jit
        def step(params: Arrays, state: Any, gradient: Arrays) -> tuple[Arrays, Any]:
            updates, state = tx.update(gradient, state, params)
            return {path: value + 1e-2 * updates[path] for path, value in params.items()}, state

        params, state = values[0], jax.jit(tx.init)(values[0])
        for gradient in values[1:]:
            params, state = step(params, state, {path: gradient[path] for path in params})
        return {path: np.asarray(value) for path, value in params.items()}

    values = [random_values(alone.shapes, seed) for seed in range(4)]
    expected = stack(trained(alone, values))
    found = trained(stacked, [stack(value) for value in values])
    for path in expected:
        np.testing.assert_allclose(found[path], expected[path], rtol=2e-4, atol=2e-6, err_msg=path)


def merged(blueprint: Blueprint, values: list[Arrays], method: Method, num_fragments: int) -> Arrays:
    """Return the global values after a round; the learners sent all of these values but the first."""
    plan = FragmentConfig(split_axis=-1).plan(blueprint.shapes, blueprint.kinds, num_fragments)
    how = merge_rules(plan, MergeConfig(method=method))
    theta, weights = values[0], np.full(LEARNERS, 1 / LEARNERS)
    for fragment, rules in zip(plan.fragments, how, strict=True):
        layout = whole(fragment)
        merger = Merger(layout, [rules[p.key] for p in layout.pieces], make_outer(OuterConfig()), "float32", "float32")
        sent = [np.frombuffer(encode(take(value, fragment), "float32"), np.uint8) for value in values[1:]]
        update = Values(sent, [None] * LEARNERS)
        state = merger.first(layout.flat(take(theta, fragment)))
        made = merger.update(update, merger.inspect(update), weights, state).state.value
        theta = put(theta, fragment, layout.views(made))
    return theta


# No fragment of three, cut or not, is smaller than a tensor of a layer.
@pytest.mark.parametrize("num_fragments", [1, 3])
@pytest.mark.parametrize("method", ["rda", "average"])
@pytest.mark.parametrize("module", MODULES)
def test_a_stack_is_merged_as_its_layers_are(module: str, method: Method, num_fragments: int) -> None:
    alone, stacked = describe(module, stacked=False), describe(module, stacked=True)
    values = [random_values(alone.shapes, seed) for seed in range(LEARNERS + 1)]
    expected = stack(merged(alone, values, method, num_fragments))
    found = merged(stacked, [stack(value) for value in values], method, num_fragments)
    for path in expected:
        np.testing.assert_allclose(found[path], expected[path], rtol=1e-5, atol=1e-5, err_msg=path)
    if method == "rda":
        # Each expert has one direction and the mean norm.
        for expert in range(2 if module == MOE else 0):
            deltas = [value["blocks/1/experts_up"][expert] for value in values[1:]]
            step = (values[0]["blocks/1/experts_up"] - expected["blocks/experts_up"][1])[expert]
            norms = [float(np.linalg.norm(delta)) for delta in deltas]
            direction = sum(delta / norm for delta, norm in zip(deltas, norms, strict=True))
            mean = direction / np.linalg.norm(direction) * math.fsum(norms) / LEARNERS
            np.testing.assert_allclose(step, mean, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_what_decays_is_what_is_merged_by_direction(name: OptimizerName) -> None:
    """One rule for both: kernels of any number of axes do, vectors and tables do not, nor does what a path excepts."""
    kinds = {
        "conv": Kind("matrix"), "embed_in/kernel": Kind("matrix"), "head": Kind("matrix"), "router": Kind("matrix", 1),
        "scales": Kind("vector", 1), "tables": Kind("table"),
    }  # fmt: skip
    shapes = {"conv": (2, 2, 3), "embed_in/kernel": (2, 3), "head": (2, 3), "router": (2, 2, 3), "scales": (2, 3)}
    params = {path: jnp.ones(shapes.get(path, (2, 3))) for path in kinds}
    tx = make_inner(OptimizerConfig(name=name, weight_decay=0.5), params, kinds=kinds)
    update = jax.jit(lambda gradient: tx.update(gradient, tx.init(params), params)[0])
    updates = update({path: np.zeros(value.shape, np.float32) for path, value in params.items()})
    decaying = {path for path, update in updates.items() if np.abs(np.asarray(update)).max() > 0}
    assert decaying == {"conv", "head", "router"}
    plan = FragmentConfig().plan({path: tuple(value.shape) for path, value in params.items()}, kinds, 1)
    assert {key for key, rule in merge_rules(plan, MergeConfig())[0].items() if rule.method == "rda"} == decaying


class Unnamed(Decoder):
    """Decoder whose norms name no axes, as in a module of a user."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs=rngs)
        for module in (self.blocks, self.norm_final):
            for _, variable in nnx.to_flat_state(nnx.state(module, nnx.PathContains("scale"))):
                variable.set_metadata(out_sharding=None)


def test_a_stack_without_names_is_refused() -> None:
    module = f"{__name__}:Unnamed"
    assert describe(module, stacked=False).kinds["blocks/0/norm_mlp/scale"] == Kind("vector")
    with pytest.raises(ValueError, match=r"'blocks/norm_attention/scale' of shape \(2, 24\) names no axes.*2 layers"):
        describe(module, stacked=True)
