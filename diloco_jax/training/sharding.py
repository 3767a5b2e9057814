"""Sharding on an island's mesh: a model names logical axes, and one table maps these to mesh axes.

  data    replicates parameters and shards the batch
  fsdp    shards the batch and the parameters
  expert  shards the batch and the experts of a mixture
  tensor  shards heads, the MLP's width and the vocabulary

The model never names hardware, so any mesh can run any model.
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

# For each dimension of an array a name, or None for "not sharded".
LogicalAxes = tuple[str | None, ...]
# From a logical axis to the mesh axes that shard it.
Rules = Mapping[str, tuple[str, ...]]

# Dimensions get mesh axes from left to right, and a mesh axis is used once per array. So fsdp shards the first
# dimension of every matrix: D of [D, F], F of [F, D], V of [V, D]. This matters for wire blocks of 256 consecutive
# elements of a flattened tensor. A shard of whole rows has whole blocks. A shard of a few columns has not, so that no
# device could encode it. Parameters that do not belong to an expert are sharded over both fsdp and `expert`.
AXIS_RULES: Rules = {
    "batch": ("data", "fsdp", "expert"),
    # The batch while its tokens are at their experts.
    "expert_batch": ("data", "fsdp"),
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
    """Devices along the replicating axis (whole copies of the parameters); -1 = all devices that remain. Raise it to
    use more devices if the model fits on each of them; gradients are summed over these devices."""
    fsdp: int = 1
    """Devices that share one copy of the parameters and split the batch; -1 = all devices that remain. Raise it if the
    model does not fit on one device; these devices then exchange weights in every layer."""
    expert: int = 1
    """Devices that share the experts of a mixture, and work like fsdp for other parameters; -1 = all devices that
    remain. Raise it if a device cannot hold all experts; tokens then travel between devices."""
    tensor: int = 1
    """Devices that split heads, MLP width and vocabulary of one example; -1 = all devices that remain. Raise it if fsdp
    alone does not save enough memory; these devices then exchange activations in every layer."""
    rules: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Mesh axes by logical axis, such as {embed: [data, fsdp]}; other axes keep their rule of AXIS_RULES. Set it to
    shard an axis over further devices, which saves memory, or over fewer, which saves communication. A device that
    holds only parts of rows may be unable to encode its share of a fragment."""

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
        """Return the sizes of (data, fsdp, expert, tensor); ValueError if they do not fit the number of devices."""
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
        """Return the default rules, overridden by the rules of this mesh."""
        return {**AXIS_RULES, **self.rules}


def planned_mesh(config: MeshConfig, num_devices: int) -> AbstractMesh:
    """Return an island's mesh without devices, which is enough for layouts but cannot run programs."""
    return AbstractMesh(config.sizes(num_devices), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device]) -> Mesh:
    """Build the island's mesh over `devices`, with the axes MESH_AXES."""
    # Unlike jax.make_mesh, this lets an axis take a part of a dimension of the slice, such as 4 of v6e:8x8.
    placed = create_device_mesh(config.sizes(len(devices)), devices, allow_split_physical_axes=True)
    # The default axis type (Explicit) would demand sharding-aware code from every model.
    return Mesh(placed, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


@dataclass(frozen=True, slots=True)
class MeshLayout:
    """A mesh together with the table from logical axes to mesh axes."""

    mesh: Mesh | AbstractMesh
    rules: Rules = field(default_factory=lambda: dict(AXIS_RULES))

    def sharding(self, shape: Sequence[int], names: LogicalAxes) -> NamedSharding:
        """Return the sharding of an array, with one logical axis name or None per dimension.

        A dimension without a rule is replicated. A dimension that its mesh axes do not divide is sharded over the first
        of them that divide it, if any.
        """
        return self._deal_out(shape, names, set())

    def gathered(self, shape: Sequence[int], names: LogicalAxes) -> NamedSharding:
        """Return the sharding of a weight while a layer computes with it: whole along the axes that split the batch.

        Experts of a mixture are not gathered, because tokens are sent to them.
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
        """Return whether weights may be sharded over axes that split the batch, so that layers must gather them."""
        batch = {axis for axis in self.rules["batch"] if self.mesh.shape[axis] > 1}
        others = (axes for name, axes in self.rules.items() if name not in ("batch", "expert_batch", "expert"))
        return any(batch & set(axes) for axes in others)

    @property
    def platform(self) -> str:
        """Return the platform of the mesh's devices, such as "cpu" or "tpu"."""
        assert isinstance(self.mesh, Mesh), "a mesh without devices has no platform"
        return str(self.mesh.devices.flat[0].platform)


_layout: ContextVar[MeshLayout | None] = ContextVar("layout", default=None)


def current_layout() -> MeshLayout | None:
    """Return the layout of the island whose program is being traced; None outside a program."""
    return _layout.get()


@contextmanager
def use_layout(layout: MeshLayout) -> Iterator[None]:
    """Make `constrain` and `gather` use this layout while a program is traced."""
    token = _layout.set(layout)
    try:
        yield
    finally:
        _layout.reset(token)


def constrain(x: Shaped[Array, "..."], *names: str | None) -> Shaped[Array, "..."]:
    """Constrain an activation to its logical axes; without a layout in use, return it unchanged.

    Without this the compiler may shard activations along `embed` instead of gathering the weights of one layer.
    """
    layout = _layout.get()
    if layout is None:
        return x
    return jax.lax.with_sharding_constraint(x, layout.sharding(x.shape, names))


def gather(weight: Shaped[Array, "..."], *names: str | None) -> Shaped[Array, "..."]:
    """Gather a weight for a layer (`MeshLayout.gathered`); the gradient has the layout of the stored weight.

    Cast a weight before gathering it, so that bfloat16 travels instead of float32. Without a layout in use, the weight
    is returned unchanged.
    """
    layout = _layout.get()
    if layout is None:
        return weight
    stored, whole = layout.sharding(weight.shape, names), layout.gathered(weight.shape, names)
    return weight if stored == whole else _move(weight, stored, whole)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _move(x: Shaped[Array, "..."], stored: NamedSharding, wanted: NamedSharding) -> Shaped[Array, "..."]:
    return jax.lax.with_sharding_constraint(x, wanted)


# JAX gives the gradient the same constraint as the value. So every device would compute the whole gradient's sum;
# this rule constrains the gradient to the stored shards instead.
_move.defvjp(
    lambda x, stored, wanted: (_move(x, stored, wanted), None),
    lambda stored, wanted, _, gradient: (jax.lax.with_sharding_constraint(gradient, stored),),
)


def rows_here(sharding: Sharding, size: int) -> Sequence[int]:
    """Return the rows of 0..size-1 that the devices of this process hold, in ascending order."""
    held = sharding.addressable_devices_indices_map((size,)).values()
    return sorted({row for index in held if index for row in range(*index[0].indices(size))})


def put_rows(value: Shaped[np.ndarray, "n ..."], sharding: Sharding, size: int) -> Shaped[Array, "b ..."]:
    """Copy an array of `size` rows to the devices; `value` has only the rows that `rows_here` returns."""
    if sharding.is_fully_addressable:
        return put_array(value, sharding)
    # This transfer is intended, but JAX's guard takes it for an implicit one.
    with jax.transfer_guard("allow"):
        return jax.make_array_from_process_local_data(sharding, np.array(value), (size, *value.shape[1:]))


def put_array(value: Any, sharding: Sharding) -> Shaped[Array, "..."]:
    """Copy a whole array to the devices; return at once, and the caller may change `value` afterwards.

    Args:
      value: a NumPy array, the same on every process; or an object with its `shape` that can be indexed by the parts on
        this process's devices.
    """
    # On CPU device_put keeps reading NumPy's memory, even with may_alias=False, and steps write to it; hence the copy.
    if sharding.is_fully_addressable:
        return jax.device_put(np.array(value), sharding)
    # device_put is not used here, because it compares the values of all processes, which is a collective. The transfer
    # is intended, but JAX's guard takes it for an implicit one.
    with jax.transfer_guard("allow"):
        return jax.make_array_from_callback(value.shape, sharding, lambda index: np.array(value[index]))
