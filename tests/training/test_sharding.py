"""From logical axes to a mesh."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from diloco_jax.core import codec
from diloco_jax.core.fragments import FragmentConfig
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.exchange.windows import windows_of
from diloco_jax.training.models.config import ModelConfig
from diloco_jax.training.optimizers import OptimizerConfig
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


def test_a_gathered_weight_has_the_same_value_and_its_gradient_lies_like_the_weight() -> None:
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
