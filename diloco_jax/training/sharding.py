"""Sharding on an island's mesh: a model names logical axes, one table maps them to mesh axes.

Mesh axes: `data` replicates parameters, `fsdp` shards both the batch and the parameters, `expert` shards the batch and
the experts of a mixture, `tensor` shards heads, the MLP's width and the vocabulary. The model never names hardware, so
any mesh runs any model.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Shaped

MESH_AXES = ("data", "fsdp", "expert", "tensor")

LogicalAxes = tuple[str | None, ...]  # one name, or None for "not sharded", per dimension of an array
Rules = Mapping[str, tuple[str, ...]]  # logical axis -> the mesh axes that share it

# Dimensions get mesh axes from left to right, and a mesh axis is used once per array. So fsdp shards the first
# dimension of every matrix: D of [D, F], F of [F, D], V of [V, D]. Wire blocks are 256 consecutive elements of a
# flattened tensor: a shard of whole rows holds whole blocks; one of a few columns does not, and could not be encoded on
# a device. What is no expert's own lies over fsdp and `expert` alike.
AXIS_RULES: Rules = {
    "batch": ("data", "fsdp", "expert"),
    "expert_batch": ("data", "fsdp"),  # of tokens on their way through the experts
    "expert": ("expert",),
    "embed": ("fsdp", "expert"),
    "mlp": ("tensor", "fsdp", "expert"),
    "heads": ("tensor", "fsdp", "expert"),
    "vocab": ("tensor", "fsdp", "expert"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshConfig:
    """Shape of an island's mesh; the product must be the island's number of devices."""

    data: int = 1
    """Devices along the replicating axis (whole copies of the parameters); -1 = all devices that remain. Low: 1, no
    copies. High: each device has the whole model, and gradients are summed over all."""
    fsdp: int = 1
    """Devices that share one copy of the parameters and split the batch; -1 = all devices that remain. Low: 1, whole
    copies. High: little memory per device, much traffic among them."""
    expert: int = 1
    """Devices that share the experts of a mixture, and work like fsdp on all else; -1 = all devices that remain. Low:
    1, all experts everywhere. High: few experts per device, tokens travel."""
    tensor: int = 1
    """Devices that split heads, MLP width and vocabulary of one example; -1 = all devices that remain. Low: 1, not
    split. High: little memory per device, traffic in every layer."""
    rules: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Mesh axes by logical axis, such as {embed: [data, fsdp]}; what is not named is as in AXIS_RULES."""

    def __post_init__(self) -> None:
        sizes = self._axes()
        for axis, size in sizes.items():
            if size != -1 and size < 1:
                raise ValueError(f"mesh.{axis} is {size}; it must be at least 1, or -1 for the devices that remain")
        if list(sizes.values()).count(-1) > 1:
            raise ValueError(f"mesh {sizes} has more than one -1; only one axis can take the devices that remain")
        for name, axes in self.rules.items():
            if unknown := sorted(set(axes) - set(MESH_AXES)):
                raise ValueError(
                    f"mesh.rules.{name} names the mesh axis '{unknown[0]}'; choose from {', '.join(MESH_AXES)}"
                )
            if len(set(axes)) < len(axes):
                raise ValueError(f"mesh.rules.{name} is {list(axes)}; name each mesh axis once")

    def _axes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in MESH_AXES}

    def sizes(self, num_devices: int) -> tuple[int, int, int, int]:
        """Return the sizes of (data, fsdp, expert, tensor); ValueError if the fixed ones do not fit so many devices."""
        given = self._axes()
        fill = num_devices // math.prod(size for size in given.values() if size != -1)
        data, fsdp, expert, tensor = (fill if size == -1 else size for size in given.values())
        if fill == 0 or data * fsdp * expert * tensor != num_devices:
            axes = " ".join(f"{axis}={size}" for axis, size in given.items())
            devices = f"{num_devices} device{'s' * (num_devices != 1)}"
            raise ValueError(
                f"mesh {axes} does not fit {devices}; make the product equal to the number of devices, or give one "
                "axis -1"
            )
        return data, fsdp, expert, tensor

    def all_rules(self) -> Rules:
        """Return the default rules with those of this mesh in their place."""
        return {**AXIS_RULES, **self.rules}


def planned_mesh(config: MeshConfig, num_devices: int) -> AbstractMesh:
    """Return the shape of an island's mesh without its devices: enough for layouts, but nothing can run on it."""
    return AbstractMesh(config.sizes(num_devices), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device]) -> Mesh:
    """Build the island's mesh over `devices`, with the axes MESH_AXES."""
    # Unlike jax.make_mesh: an axis may take part of a dimension of the slice, such as 4 of v6e:8x8.
    placed = create_device_mesh(config.sizes(len(devices)), devices, allow_split_physical_axes=True)
    # Auto, because the default (Explicit) would demand sharding-aware code from every model.
    return Mesh(placed, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


@dataclass(frozen=True, slots=True)
class MeshLayout:
    """A mesh together with the table from logical axes to mesh axes."""

    mesh: Mesh | AbstractMesh
    rules: Rules = field(default_factory=lambda: dict(AXIS_RULES))

    def sharding(self, shape: Sequence[int], names: LogicalAxes) -> NamedSharding:
        """Return the sharding of an array, with one logical axis name or None per dimension.

        A dimension without a rule is replicated, as is one that its mesh axes do not divide, unless the first ones of
        them do.
        """
        return self._deal_out(shape, names, set())

    def gathered(self, shape: Sequence[int], names: LogicalAxes) -> NamedSharding:
        """Return the sharding of a weight while a layer computes with it: whole along the axes that split the batch.

        The experts of a mixture stay where they are: tokens go to them.
        """
        batch = set(self.rules["batch"]) - (set(self.rules["expert"]) if "expert" in names else set())
        return self._deal_out(shape, names, batch)

    def _deal_out(self, shape: Sequence[int], names: LogicalAxes, without: set[str]) -> NamedSharding:
        if len(names) != len(shape):
            raise ValueError(f"logical axes {names} do not match shape {tuple(shape)}; give one name per dimension")
        used: set[str] = set()
        spec: list[tuple[str, ...] | None] = []
        for size, name in zip(shape, names, strict=True):
            axes: tuple[str, ...] = ()
            for axis in self.rules.get(name or "", ()):
                if self.mesh.shape[axis] == 1 or axis in used:
                    continue
                if size % (self.mesh.shape[axis] * math.prod(self.mesh.shape[a] for a in axes)):
                    break
                axes = (*axes, axis)
            used.update(axes)
            spec.append(tuple(axis for axis in axes if axis not in without) or None)
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch_parts(self) -> int:
        """Return the number of parts into which the devices split a batch."""
        return math.prod(self.mesh.shape[axis] for axis in self.rules["batch"])

    @property
    def gathers(self) -> bool:
        """Return whether weights may be spread over axes that split the batch, so that layers must gather them."""
        batch = {axis for axis in self.rules["batch"] if self.mesh.shape[axis] > 1}
        others = (axes for name, axes in self.rules.items() if name not in ("batch", "expert_batch", "expert"))
        return any(batch & set(axes) for axes in others)

    @property
    def platform(self) -> str:
        """Return the platform of the mesh's devices: "cpu", "tpu", ..."""
        assert isinstance(self.mesh, Mesh), "asked of a mesh without devices"
        return str(self.mesh.devices.flat[0].platform)


_layout: ContextVar[MeshLayout | None] = ContextVar("layout", default=None)


def current_layout() -> MeshLayout | None:
    """Return the layout of the island whose program is being traced, None outside of one."""
    return _layout.get()


@contextmanager
def use_layout(layout: MeshLayout) -> Iterator[None]:
    """While a program is traced, let `constrain` and `gather` know this layout."""
    token = _layout.set(layout)
    try:
        yield
    finally:
        _layout.reset(token)


def constrain(x: Shaped[Array, "..."], *names: str | None) -> Shaped[Array, "..."]:
    """Pin an activation to its logical axes; outside of an island (no layout in use) nothing happens.

    Without it the compiler may shard activations along `embed` instead of gathering the weights of one layer.
    """
    layout = _layout.get()
    if layout is None:
        return x
    return jax.lax.with_sharding_constraint(x, layout.sharding(x.shape, names))


def gather(weight: Shaped[Array, "..."], *names: str | None) -> Shaped[Array, "..."]:
    """Return the weight as a layer computes with it (`MeshLayout.gathered`); its gradient returns to the stored shards.

    Cast a weight before it is gathered: then bfloat16 travels, not float32. Outside of an island nothing happens.
    """
    layout = _layout.get()
    if layout is None:
        return weight
    stored, whole = layout.sharding(weight.shape, names), layout.gathered(weight.shape, names)
    return weight if stored == whole else _move(weight, stored, whole)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _move(x: Shaped[Array, "..."], stored: NamedSharding, wanted: NamedSharding) -> Shaped[Array, "..."]:
    return jax.lax.with_sharding_constraint(x, wanted)


# The gradient of a constraint is the same constraint: it would make every device sum up the whole gradient.
_move.defvjp(
    lambda x, stored, wanted: (_move(x, stored, wanted), None),
    lambda stored, wanted, _, gradient: (jax.lax.with_sharding_constraint(gradient, stored),),
)


def rows_here(sharding: Sharding, size: int) -> Sequence[int]:
    """Return which of so many rows the devices of this process hold, in their order."""
    held = sharding.addressable_devices_indices_map((size,)).values()
    return sorted({row for index in held if index for row in range(*index[0].indices(size))})


def put_rows(value: Shaped[np.ndarray, "n ..."], sharding: Sharding, size: int) -> Shaped[Array, "b ..."]:
    """Copy an array of `size` rows to the devices, of which each process gives those that `rows_here` names."""
    if sharding.is_fully_addressable:
        return put_array(value, sharding)
    with jax.transfer_guard("allow"):  # a transfer that was asked for, which JAX does not see
        return jax.make_array_from_process_local_data(sharding, np.array(value), (size, *value.shape[1:]))


def put_array(value: Any, sharding: Sharding) -> Shaped[Array, "..."]:
    """Copy a whole array, the same on every process, to the devices; returns at once, it may be written to then.

    Args:
      value: a NumPy array, or what has its `shape` and the parts that this process's devices hold.
    """
    # Copies of our own: on CPU device_put goes on reading NumPy's memory, may_alias=False or not; steps write to it.
    if sharding.is_fully_addressable:
        return jax.device_put(np.array(value), sharding)
    # device_put would compare the values of all processes, which is a collective.
    with jax.transfer_guard("allow"):  # a transfer that was asked for, which JAX does not see
        return jax.make_array_from_callback(value.shape, sharding, lambda index: np.array(value[index]))
