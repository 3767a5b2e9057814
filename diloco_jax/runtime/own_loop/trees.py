"""The user's arrays, and the same arrays in the form that an island exchanges: by path, on one mesh.

The exchange places every leaf on a separate mesh of the same devices, because its programs need a mesh even for one
device. Arrays that go back to the loop get the loop's name of their layout; otherwise the loop's programs would be
compiled again for another name of the same layout.
"""

from collections.abc import Mapping, MutableMapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array

from diloco_jax.core.kinds import Canonical, Kind, canonical_forms
from diloco_jax.runtime.own_loop.random_keys import key_types, with_keys, without_keys
from diloco_jax.training.exchange.exchange import Exchange
from diloco_jax.training.exchanged import ExchangedState, by_name
from diloco_jax.training.island_state import IslandState
from diloco_jax.training.sharding import LogicalAxes, put_array
from diloco_jax.training.state import TrainState
from diloco_jax.training.whole_state.layout import StateLayout

# The axis of a mesh of one device.
ONE_DEVICE = "device"
# What to do about a parameter without axis names beside stacks of layers.
NAME_THE_AXES = "name its axes in `axes` too, such as (None, None) if it is not a stack"


class LoopArrays(Protocol):
    """The arrays of a user's loop, wherever the loop keeps them."""

    # The canonical form of every parameter (core/kinds.py), its shape and its kind, by path.
    forms: dict[str, Canonical]
    shapes: dict[str, tuple[int, ...]]
    kinds: dict[str, Kind]
    # Devices of the island; those of all its processes.
    devices: list[jax.Device]

    @property
    def initial(self) -> Mapping[str, Any]:
        """Return the loop's initial parameters by path, as the loop stores them. Read it before `exchanged`."""

    @property
    def has_moments(self) -> bool:
        """Tell whether the loop gives other state than parameters, which is saved on the island."""

    def exchanged(self, wire: Any, rebase: bool) -> IslandState:
        """Return the exchanged state; arguments as for `Island`."""

    def tree(self, params: Mapping[str, Any]) -> Any:
        """Return parameters by path in the loop's own form."""

    def placed(self, values: Mapping[str, np.ndarray]) -> Any:
        """Return canonical CPU values by path in the loop's own form, types and layouts."""


class LoopTensors:
    """Names, canonical forms, types and layouts of a loop's parameters.

    Args:
        named: Parameters by path.
        axes: Logical names of the axes of parameters, by path, as in a Flax module ("vocab", "layers").

    Raises:
        ValueError: A leaf is not an array, was donated or is not a float, or the leaves are on different devices; or
            `axes` does not describe a parameter.
    """

    def __init__(self, named: Mapping[str, Array], axes: Mapping[str, LogicalAxes] | None = None) -> None:
        axes = axes or {}
        if unknown := sorted(set(axes) - set(named)):
            raise ValueError(f"axes names {unknown[0]!r}, which is not a parameter; they are {', '.join([*named][:8])}")
        for path, leaf in named.items():
            _check(f"params[{path!r}]", leaf)
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise ValueError(f"params[{path!r}] is {leaf.dtype}; only floats can be merged: leave it out of params")
        if not named:
            raise ValueError("params has no arrays; give the tree that the optimizer updates")
        self._stored = {path: tuple(leaf.shape) for path, leaf in sorted(named.items())}
        self.forms = canonical_forms(self._stored, axes, NAME_THE_AXES)
        self.shapes = {path: form.shape for path, form in self.forms.items()}
        self.kinds = {path: form.kind for path, form in self.forms.items()}
        self.dtypes = {path: leaf.dtype for path, leaf in named.items()}
        self.layouts = _layouts(named)
        mesh = next(iter(self.layouts.values())).mesh
        self.devices: list[jax.Device] = list(mesh.devices.flat)
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        # The layout of each parameter, under the loop's name.
        self._given: dict[str, Sharding] = {}

    def exchanged(
        self, params: MutableMapping[str, Array], opt_state: Any, layouts: Any, wire: Any, rebase: bool
    ) -> ExchangedState:
        """Return the exchanged state of parameters by path and other state with these layouts."""
        tensors = {
            path: jax.ShapeDtypeStruct(shape, self.dtypes[path], sharding=self.layouts[path])
            for path, shape in self._stored.items()
        }
        orders = {path: form.order for path, form in self.forms.items()}
        first: Any = TrainState(params, opt_state)  # type: ignore[arg-type]
        to: Any = TrainState(self.layouts, layouts)  # type: ignore[arg-type]
        exchange = Exchange(tensors, wire, rebase, orders)
        return ExchangedState(first, to, self.kinds, StateLayout(by_name(first)), exchange)

    def note(self, path: str, leaf: Array, who: str) -> None:
        """Check a parameter that the loop gives, and remember the loop's name of its layout."""
        _check(f"params[{path!r}]", leaf)
        if (leaf.dtype, leaf.shape) != (self.dtypes[path], self._stored[path]):
            raise ValueError(
                f"{who} got params[{path!r}] of {leaf.dtype} {leaf.shape}, join() {self.dtypes[path]} "
                f"{self._stored[path]}; a step keeps types and shapes"
            )
        if leaf.sharding is self._given.get(path):
            return
        if not leaf.sharding.is_equivalent_to(self.layouts[path], leaf.ndim):
            raise ValueError(
                f"params[{path!r}] is laid out as {leaf.sharding} now, but join() got it as {self.layouts[path]}: "
                "keep its layout (out_shardings of the step)"
            )
        self._given[path] = leaf.sharding

    def returned(self, path: str, leaf: Array) -> Array:
        """Return a parameter in the loop's layout, without a copy."""
        return _renamed(leaf, self._given[path])

    def placed(self, path: str, value: np.ndarray) -> Array:
        """Return a canonical CPU value as a parameter, in the loop's type and layout."""
        stored = self.forms[path].stored(value).astype(self.dtypes[path])
        return self.returned(path, put_array(stored, self.layouts[path]))

    def committed(self, leaf: Array) -> Array:
        """Return a leaf bound to the devices of the parameters, as the outputs of a step are.

        Otherwise the step would be compiled again for the inputs of the second step.
        """
        if leaf.sharding.device_set == self._everywhere.device_set:
            return jax.device_put(leaf, leaf.sharding)
        # The leaf is on the default device, such as a counter.
        return put_array(np.asarray(leaf), self._everywhere)


class LoopState:
    """Parameters and optimizer state that a user's loop passes at every call, with their layouts at `join`.

    Only the initial parameters are copied.

    Args:
        params: Any pytree of JAX arrays.
        opt_state: Any pytree of JAX arrays and random keys; None if it stays with the loop.
        axes: Logical names of the axes of parameters, by path.

    Raises:
        ValueError: As `LoopTensors`.
    """

    def __init__(self, params: Any, opt_state: Any = None, axes: Mapping[str, LogicalAxes] | None = None) -> None:
        leaves, treedef = jax.tree.flatten(params)
        self._treedef: Any = treedef
        self._paths = _paths(params)
        self._tensors = LoopTensors(dict(zip(self._paths, leaves, strict=True)), axes)
        self.shapes, self.kinds, self.devices = self._tensors.shapes, self._tensors.kinds, self._tensors.devices
        self.forms = self._tensors.forms
        self._opt_tree: Any = jax.tree.structure(opt_state)
        self._key_types = key_types(opt_state)
        # Whether the kinds of the leaves after a step were compared.
        self._compared = False
        self._has_keys = any(kind is not None for kind in self._key_types)
        opt_state = self._plain(opt_state)
        check_moments(opt_state)
        # Copies: adoption donates them, and the loop may have the same memory elsewhere, such as in an average.
        self._params = self._named([jnp.copy(leaf) for leaf in leaves], "join()")
        self._opt_state = jax.tree.map(self._tensors.committed, opt_state)

    @property
    def initial(self) -> Mapping[str, Array]:
        return self._params

    @property
    def has_moments(self) -> bool:
        return self._opt_tree.num_leaves > 0

    def exchanged(self, wire: Any, rebase: bool) -> ExchangedState:
        """Return the exchanged state, and give this object's arrays to it; arguments as for `Island`."""
        params, opt_state, self._params, self._opt_state = self._params, self._opt_state, {}, None
        layouts = jax.tree.map(lambda leaf: leaf.sharding, opt_state)
        return self._tensors.exchanged(params, opt_state, layouts, wire, rebase)

    def taken(self, params: Any, opt_state: Any, who: str) -> TrainState:
        """Return a loop's arrays by path; ValueError if the trees have changed, or an array was donated."""
        leaves, treedef = jax.tree.flatten(params)
        if treedef != self._treedef:
            raise ValueError(f"{who} got params of another structure than join() did: {treedef}, not {self._treedef}")
        if (found := jax.tree.structure(opt_state)) != self._opt_tree:
            words = "pass opt_state to both, or to none" if opt_state is None else f"{found}, not {self._opt_tree}"
            raise ValueError(f"{who} got an opt_state of another structure than join() did: {words}")
        if not self._compared:
            self._compared = True
            if key_types(opt_state) != self._key_types:
                raise ValueError(
                    f"{who} got other random keys in opt_state than join() did: keep their places and kinds"
                )
        return TrainState(self._named(leaves, who), self._plain(opt_state))

    def _plain(self, opt_state: Any) -> Any:
        return without_keys(opt_state) if self._has_keys else opt_state

    def moments(self, opt_state: Any) -> Any:
        """Return the state beside the parameters as the loop knows it: with its random keys."""
        return with_keys(opt_state, self._key_types) if self._has_keys else opt_state

    def tree(self, params: Mapping[str, Array]) -> Any:
        """Return parameters by path as the loop's tree, in the loop's layouts."""
        return jax.tree.unflatten(self._treedef, [self._tensors.returned(path, params[path]) for path in self._paths])

    def placed(self, values: Mapping[str, np.ndarray]) -> Any:
        """Return canonical CPU values by path as the loop's tree, in the loop's types and layouts."""
        leaves = [self._tensors.placed(path, values[path]) for path in self._paths]
        return jax.tree.unflatten(self._treedef, leaves)

    def _named(self, leaves: list[Array], who: str) -> dict[str, Array]:
        named = dict(zip(self._paths, leaves, strict=True))
        for path, leaf in named.items():
            self._tensors.note(path, leaf, who)
        return named


def check_moments(opt_state: Any) -> None:
    """Check that all leaves of a state are arrays; ValueError names the first one that is not."""
    for path, leaf in zip(_paths(opt_state), jax.tree.leaves(opt_state), strict=True):
        _check(f"opt_state[{path!r}]", leaf)


def _paths(tree: Any) -> list[str]:
    """Return a name for each leaf, in the order of the tree: its keys, joined by slashes."""
    found, _ = jax.tree_util.tree_flatten_with_path(tree)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in found]
    if twice := sorted({path for path in paths if paths.count(path) > 1} if len(set(paths)) < len(paths) else ()):
        raise ValueError(f"two leaves have the name {twice[0]!r}; rename a key that contains '/'")
    return paths


def _check(name: str, leaf: Any) -> None:
    if isinstance(leaf, np.ndarray | np.generic | float | int):
        what = "a NumPy array" if isinstance(leaf, np.ndarray) else f"a number of type {type(leaf).__name__}"
        raise ValueError(
            f"{name} is {what}, not a JAX array; convert it first (jnp.asarray), or leave it out of the tree if it is "
            "not trained"
        )
    if not isinstance(leaf, jax.Array):
        raise ValueError(f"{name} is a {type(leaf).__name__}, not a JAX array; take it out of the tree (partition it)")
    if leaf.is_deleted():
        raise ValueError(
            f"{name} was donated: its memory is another array's by now. Give what the step returned, not what went in; "
            "and continue with what after_step() returns"
        )
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise ValueError(f"{name} is a {leaf.dtype}; give jax.random.key_data of it")


def _layouts(leaves: Mapping[str, Array]) -> dict[str, NamedSharding]:
    """Return the layout of every leaf on one common mesh; ValueError if the leaves are on different meshes."""
    mesh: Mesh | None = None
    layouts: dict[str, NamedSharding] = {}
    for path, leaf in leaves.items():
        own, spec = _mesh_of(path, leaf.sharding)
        mesh = own if mesh is None else mesh
        if (own.axis_names, own.devices.tolist()) != (mesh.axis_names, mesh.devices.tolist()):
            raise ValueError(
                f"params[{path!r}] is on {own}, others on {mesh}: put all parameters on one mesh, "
                "replicated where they are not sharded"
            )
        layouts[path] = NamedSharding(mesh, spec)
    return layouts


def _mesh_of(path: str, sharding: Sharding) -> tuple[Mesh, PartitionSpec]:
    devices: Any = sharding.device_set
    device = next(iter(devices))
    if sharding.memory_kind not in (None, device.default_memory().kind):
        raise ValueError(f"params[{path!r}] is in memory of kind {sharding.memory_kind}; keep it on the devices")
    if isinstance(sharding, NamedSharding):
        assert isinstance(sharding.mesh, Mesh), "an array is on devices"
        # The types of the mesh's axes do not matter.
        return Mesh(sharding.mesh.devices, sharding.mesh.axis_names), sharding.spec
    if len(sharding.device_set) == 1:
        return Mesh(np.array(list(sharding.device_set)), (ONE_DEVICE,)), PartitionSpec()
    raise ValueError(f"params[{path!r}] is laid out as {sharding}; use a jax.sharding.NamedSharding")


def _renamed(array: Array, sharding: Sharding) -> Array:
    """Return the same memory under another name of the same layout."""
    if array.sharding is sharding:
        return array
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)
