"""The exchanged state of an island: it gives out and takes in fragments and whole states between two inner steps.

    staged = state.exchange.stage(state.state.params, fragment)    queued behind the newest step; the host does not wait
    staged.encode()                                                in any thread: the bytes of anchor - local
    placed = state.place(fragment, values)                         in any thread: copies a value to the devices
    state.adopt(fragment, placed, sent=staged)                     between two steps
    state.stage_state(), state.load_state(saved)                   the same for everything, optimizer included

The built-in `Island`, or a training loop that the user writes, stores the result of each step in `state`. All functions
must be called from one thread, except `warm_up`, `place` and the methods of staged objects. Parameters are a flat dict
{path: array}, because a step with a tree of modules costs ten times as much CPU time. Every program runs under
a transfer guard, so only the functions of this module move data between host and devices.

Fragments, `shapes`, `parameters` and `load` have the axes of canonical tensors (core/kinds.py). `state` and whole
states have the axes of the loop's own tensors.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Shaped

from diloco_jax.core.codec import Bytes
from diloco_jax.core.fragments import Fragment, Slice, take
from diloco_jax.core.kinds import Kind, with_order
from diloco_jax.training.exchange.exchange import NOTHING_INSTEAD, AdoptMode, CpuValues, Exchange, Instead, PlacedValue
from diloco_jax.training.exchange.outgoing import StagedFragment
from diloco_jax.training.sharding import put_array
from diloco_jax.training.state import Params, TrainState
from diloco_jax.training.whole_state.layout import StateLayout
from diloco_jax.training.whole_state.moving import MOMENTS, PARAMETERS
from diloco_jax.training.whole_state.staging import (
    PartialLeaf,
    Shard,
    StagedShards,
    StagedState,
    check_fits,
    own_shards,
    stage_leaves,
    stage_shards,
)

# The prefixes of the names of a state's leaves.
PARAMS, OPTIMIZER, OTHER = PARAMETERS, MOMENTS, "other/"


@dataclass(frozen=True)
class Deferred:
    """An optimizer's state that its owner keeps, and returns as a pytree of arrays when a copy of it is due."""

    get: Callable[[], Any]


@dataclass(eq=False)
class ExchangedState:
    """A training state whose parameters are exchanged with other islands."""

    # The state after the newest step. Its parameters are a mutable mapping, which changes in place; its optimizer's
    # state may be `Deferred`.
    state: TrainState
    # A TrainState with the layout of each leaf of `state` on the devices.
    layouts: Any
    # The kind of every parameter, by path.
    kinds: Mapping[str, Kind]
    # The layout of a whole state's bytes.
    state_layout: StateLayout
    # The programs that exchange fragments.
    exchange: Exchange

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every canonical parameter, by path."""
        params = self.state.params
        return {path: tuple(params[path].shape[axis] for axis in self.exchange.orders[path]) for path in params}

    def count_programs(self, fragments: Iterable[Fragment]) -> int:
        """Return the number of programs that fragments need; a shared program counts once."""
        return self.exchange.count(fragments)

    def warm_up_exchange(
        self, fragments: Iterable[Fragment], told: Callable[[int, str], object] = lambda done, current: None
    ) -> None:
        """Compile the programs of fragments; any thread may call this at any time."""
        self.exchange.warm_up(fragments, told)

    def stage(self, fragment: Fragment) -> StagedFragment:
        """Queue a copy of a fragment's update, as it is after the newest step; return at once."""
        return self.exchange.stage(self.state.params, fragment)

    def anchors(self, fragments: Iterable[Fragment], instead: Instead = NOTHING_INSTEAD) -> Params:
        """Return the global model on the devices; arguments as for `IslandState.anchors`."""
        return self.exchange.anchors(fragments, instead)

    def place(self, fragment: Fragment, values: CpuValues) -> PlacedValue:
        """Start to copy a merged fragment to the devices, for `adopt`; any thread.

        Args:
          values: the merged fragment, {slice key: float32 array}.

        Raises:
          ValueError: the values have other names or shapes.
        """
        return self.exchange.place(fragment, values)

    def adopt(
        self,
        fragment: Fragment,
        values: CpuValues | PlacedValue,
        *,
        mode: AdoptMode = "overwrite",
        alpha: float = 0.0,
        sent: StagedFragment | None = None,
    ) -> None:
        """Adopt a merged fragment between two steps.

            overwrite   local = new
            blend       local = alpha local + (1 - alpha) new
            rebase      local = new + (local - local when sent)      keeps the steps made while the fragment travelled

        Args:
          values: the merged fragment, {slice key: float32 array}, or the result of `place`.
          alpha: share of the local values, in [0, 1]; only for blend.
          sent: this island's staged copy, if it was merged into the fragment; its residual becomes the fragment's.
            Rebase needs it.

        Raises:
          ValueError: the values have other names or shapes, or `sent` is missing for rebase.
        """
        self.state.params.update(self.exchange.adopt(self.state.params, fragment, values, mode, alpha, sent))

    def stage_state(self) -> StagedState:
        """Queue a copy of parameters, optimizer's state and other state to CPU memory; return at once."""
        with jax.transfer_guard("disallow"):
            return stage_leaves(by_name(self.state), self.state_layout)

    def stage_moments(self) -> StagedState:
        """Queue a copy of everything but the parameters to CPU memory, for another island; return at once."""
        with jax.transfer_guard("disallow"):
            arrays = {name: array for name, array in by_name(self.state).items() if not name.startswith(PARAMS)}
            return stage_leaves(arrays, self.state_layout)

    def stage_shards(self) -> StagedShards:
        """Queue copies of all shards on this process's devices to CPU memory; return at once."""
        with jax.transfer_guard("disallow"):
            return stage_shards(by_name(self.state))

    def shards(self) -> list[Shard]:
        """Return the shards of the whole state on this process's devices, in the order of `stage_shards`."""
        return list(own_shards(by_name(self.state)))

    def check_shards(self, leaves: Mapping[str, PartialLeaf]) -> None:
        """Check that saved shards have everything that `load_shards` needs; ValueError names the difference."""
        check_fits(leaves, by_name(self.layouts), self.state_layout.by_name)

    def load_shards(self, leaves: Mapping[str, PartialLeaf]) -> None:
        """Load the whole state exactly, from the shards that an earlier process on the same devices saved."""
        self.load_moments(leaves.__getitem__)
        for path, to in self.layouts.params.items():
            self.state.params[path] = put_array(leaves[PARAMS + path], to)

    def overwrite(self, fragment: Fragment, values: CpuValues) -> None:
        """Replace a fragment of the parameters; anchor and residual stay as they are."""
        self.state.params.update(self.exchange.overwrite(self.state.params, fragment, values))

    def load_state(
        self, state: Bytes | Mapping[str, Shaped[np.ndarray, "..."]], fragments: Iterable[Fragment] | None = None
    ) -> None:
        """Load the optimizer's state, other state and parameters of an island with the same model, on any mesh.

        Args:
          state: the result of a `StagedState`, as bytes or as {leaf name: array}.
          fragments: the fragments of the parameters to load; all parameters by default.

        Raises:
          ValueError: names, dtypes, shapes or sizes differ from this island's; the island is unchanged then.
        """
        leaves = self.state_layout.read(state)
        self.load_moments(leaves.__getitem__)
        for fragment in [self._whole()] if fragments is None else fragments:
            paths, orders = {part.path for part in fragment.slices}, self.exchange.orders
            params = {path: with_order(leaves[PARAMS + path], orders[path]) for path in paths}
            self.overwrite(fragment, take(params, fragment))

    def load_moments(self, leaf: Callable[[str], Any]) -> None:
        """Load everything but the parameters; `leaf` returns the array of a name."""
        # The old state is freed first, because a device may not have room for two. No error may occur after this.
        self.state = self.state._replace(opt_state=None, other={})
        layouts = self.layouts
        moments = [put_array(leaf(name), to) for name, to in by_name(layouts).items() if name.startswith(OPTIMIZER)]
        opt_state = jax.tree.unflatten(jax.tree.structure(layouts.opt_state), moments)
        other = {path: put_array(leaf(OTHER + path), to) for path, to in layouts.other.items()}
        self.state = self.state._replace(opt_state=opt_state, other=other)

    def parameters(self) -> CpuValues:
        """Return CPU copies of all canonical parameters {path: float32 array}; block until the running step is done.

        This works only on an island of one process.
        """
        orders, stored = self.exchange.orders, jax.device_get(dict(self.state.params))
        return {path: np.array(with_order(stored[path], orders[path]), np.float32, order="C") for path in stored}

    def load(self, params: Mapping[str, Float[np.ndarray, "..."]]) -> None:
        """Replace all parameters by canonical ones, but not the optimizer's state; ValueError if they do not fit."""
        if unknown := sorted(set(params) - set(self.shapes)):
            raise ValueError(f"parameters {unknown[:3]} are not in the model; were they saved from another one?")
        self.overwrite(self._whole(), dict(params))

    def _whole(self) -> Fragment:
        shapes = {path: shape for path, shape in self.shapes.items() if math.prod(shape)}
        slices = tuple(Slice(path, -1, 0, shape[0] if shape else 0) for path, shape in shapes.items())
        return Fragment(-1, slices, tuple(shapes.values()), sum(math.prod(shape) for shape in shapes.values()))


def by_name(state: TrainState) -> dict[str, Any]:
    """Return the leaves of a state by the names that files and other islands use, in the order of the tree."""
    moments: Any = state.opt_state
    leaves, _ = jax.tree_util.tree_flatten_with_path(moments.get() if isinstance(moments, Deferred) else moments)
    named = {OPTIMIZER + jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    assert len(named) == len(leaves), "two leaves of the optimizer's state have one name"
    other = {OTHER + path: value for path, value in state.other.items()}
    return {**{PARAMS + path: value for path, value in state.params.items()}, **named, **other}
