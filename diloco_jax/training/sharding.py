"""Where arrays live on an island's mesh: a model names logical axes, one table maps them to mesh axes.

Mesh axes: `data` replicates parameters, `fsdp` shards both the batch and the parameters, `tensor` shards heads, the
MLP's width and the vocabulary. The model never names hardware, so any mesh runs any model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

MESH_AXES = ("data", "fsdp", "tensor")

LogicalAxes = tuple[str | None, ...]  # one name, or None for "not sharded", per dimension of an array

AXIS_RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "embed": ("fsdp",),
    "mlp": ("tensor",),
    "heads": ("tensor",),
    "vocab": ("tensor",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshConfig:
    """Shape of an island's mesh; the product must be the island's number of devices."""

    data: int = 1
    """Devices along the replicating axis (whole copies of the parameters); -1 = all devices that remain."""

    fsdp: int = 1
    """Devices that share one copy of the parameters and split the batch; -1 = all devices that remain."""

    tensor: int = 1
    """Devices that split heads, MLP width and vocabulary of one example; -1 = all devices that remain."""

    def __post_init__(self) -> None:
        sizes = {axis: getattr(self, axis) for axis in MESH_AXES}
        for axis, size in sizes.items():
            if size != -1 and size < 1:
                raise ValueError(f"mesh.{axis} is {size}; it must be at least 1, or -1 for the devices that remain")
        if list(sizes.values()).count(-1) > 1:
            raise ValueError(f"mesh {sizes} has more than one -1; only one axis can take the devices that remain")

    def sizes(self, num_devices: int) -> tuple[int, int, int]:
        """Sizes of (data, fsdp, tensor) on `num_devices` devices.

        Raises:
          ValueError: the fixed sizes do not fit the number of devices.
        """
        known = math.prod(size for size in (self.data, self.fsdp, self.tensor) if size != -1)
        fill = num_devices // known
        data, fsdp, tensor = (fill if size == -1 else size for size in (self.data, self.fsdp, self.tensor))
        if fill == 0 or data * fsdp * tensor != num_devices:
            raise ValueError(
                f"mesh data={self.data} fsdp={self.fsdp} tensor={self.tensor} does not fit {num_devices} devices; "
                "make the product equal to the number of devices, or give one axis -1"
            )
        return data, fsdp, tensor


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device]) -> Mesh:
    """Build the island's mesh over `devices`, axes `data`, `fsdp`, `tensor`."""
    # Auto, because the default of jax.make_mesh (Explicit) would demand sharding-aware code from every model.
    return jax.make_mesh(
        config.sizes(len(devices)), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES), devices=devices
    )


@dataclass(frozen=True, slots=True)
class Layout:
    """A mesh together with the table from logical axes to mesh axes."""

    mesh: Mesh
    rules: dict[str, tuple[str, ...]] = field(default_factory=lambda: dict(AXIS_RULES))

    def sharding(self, shape: Sequence[int], names: LogicalAxes) -> NamedSharding:
        """Sharding of an array: a dimension that its mesh axes do not divide, or with no rule, is replicated.

        Args:
          shape: the array's shape.
          names: one logical axis name or None per dimension.
        """
        if len(names) != len(shape):
            raise ValueError(f"logical axes {names} do not match shape {tuple(shape)}; give one name per dimension")
        used: set[str] = set()
        spec: list[tuple[str, ...] | None] = []
        for size, name in zip(shape, names, strict=True):
            axes = tuple(a for a in self.rules.get(name or "", ()) if self.mesh.shape[a] > 1 and a not in used)
            fits = bool(axes) and size % math.prod(self.mesh.shape[a] for a in axes) == 0
            spec.append(axes if fits else None)
            used.update(axes if fits else ())
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    @property
    def replicated(self) -> NamedSharding:
        """Every device holds the whole array."""
        return NamedSharding(self.mesh, PartitionSpec())


_layout: ContextVar[Layout | None] = ContextVar("layout", default=None)


@contextmanager
def use_layout(layout: Layout) -> Iterator[None]:
    """While a program is traced, let `constrain` pin activations to this layout."""
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
    pinned: Shaped[Array, "..."] = jax.lax.with_sharding_constraint(x, layout.sharding(x.shape, names))
    return pinned
