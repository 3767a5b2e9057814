"""From logical axes to a mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from diloco_jax.training.sharding import Layout, MeshConfig, constrain, make_mesh, use_layout


def layout(**sizes: int) -> Layout:
    config = MeshConfig(**sizes)
    return Layout(make_mesh(config, jax.devices()[: config.data * config.fsdp * config.expert * config.tensor]))


def test_the_remaining_devices_go_where_the_minus_one_is() -> None:
    assert MeshConfig(data=-1, fsdp=2).sizes(8) == (4, 2, 1, 1)
    assert MeshConfig(tensor=-1).sizes(1) == (1, 1, 1, 1)


@pytest.mark.parametrize("config", [{"data": 3}, {"data": -1, "fsdp": 3}, {"data": 16, "tensor": -1}])
def test_a_mesh_that_does_not_fit_is_refused(config: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="does not fit 8 devices"):
        MeshConfig(**config).sizes(8)


@pytest.mark.parametrize("config", [{"data": 0}, {"fsdp": -2}, {"data": -1, "fsdp": -1}])
def test_impossible_sizes_are_refused(config: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="mesh"):
        MeshConfig(**config)


def test_names_become_mesh_axes_where_they_divide() -> None:
    two = layout(data=2, fsdp=2, tensor=2)
    assert two.sharding((8, 6), ("embed", "mlp")).spec == P(("fsdp",), ("tensor",))
    assert two.sharding((8, 7), ("embed", "mlp")).spec == P(("fsdp",), None)
    assert two.sharding((8, 8), ("batch", None)).spec == P(("data", "fsdp"), None)
    assert two.sharding((3, 8, 8), ("layers", "heads", "embed")).spec == P(None, ("tensor", "fsdp"), None)
    assert two.sharding((6, 8), ("vocab", "embed")).spec == P(("tensor",), ("fsdp",))
    with pytest.raises(ValueError, match="one name per dimension"):
        two.sharding((8, 8), ("embed",))


def test_constrain_pins_inside_an_island_and_does_nothing_outside() -> None:
    two = layout(fsdp=2)
    x = jnp.ones((4, 3))
    assert constrain(x, "batch", None) is x

    @jax.jit
    def pinned(x):
        with use_layout(two):
            return constrain(x, "batch", None)

    assert pinned(x).sharding.is_equivalent_to(two.sharding((4, 3), ("batch", None)), 2)
