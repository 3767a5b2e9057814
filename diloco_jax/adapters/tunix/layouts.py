"""The arrays of a trainer in steady layouts: a compiled step of tunix chooses the layouts of its results itself.

An island exchanges each array in the layout that it had when the island joined. A write keeps the present layout of
the model, so that the trainer's step is not compiled again.
"""

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import jax
from jaxtyping import Array

from diloco_jax.adapters.nnx.holder import VariableHolder
from diloco_jax.training.sharding import LogicalAxes


class SteadyHolder:
    """The parameters and moments of a trainer, read in the layouts that they had at the start.

    Attributes:
        params: Exchanged arrays by path.
        axes: Logical names of axes by path.
    """

    def __init__(self, variables: VariableHolder) -> None:
        self._variables = variables
        self.params: MutableMapping[str, Array] = SteadyArrays(variables.params)
        self.axes: Mapping[str, LogicalAxes] = variables.axes
        self._moments: Any = None

    def moments(self) -> Any:
        """Return what stays on the island, in the layouts that `set_moments` got."""
        found = self._variables.moments()
        return found if self._moments is None else jax.tree.map(laid_out, found, self._moments)

    def set_moments(self, tree: Any) -> None:
        """Replace what stays on the island, and remember its layouts."""
        self._moments = jax.tree.map(lambda leaf: leaf.sharding, tree)
        self._variables.set_moments(tree)

    def check_trained(self) -> None:
        """Check after a step that the model changes; ValueError as VariableHolder raises it."""
        self._variables.check_trained()


class SteadyArrays(MutableMapping[str, Array]):
    """Arrays by path, read in the layouts of the start and written in the layouts of now."""

    def __init__(self, arrays: MutableMapping[str, Array]) -> None:
        self._arrays = arrays
        self._layouts = {path: leaf.sharding for path, leaf in arrays.items()}

    def __getitem__(self, path: str) -> Array:
        return laid_out(self._arrays[path], self._layouts[path])

    def __setitem__(self, path: str, value: Array) -> None:
        self._arrays[path] = laid_out(value, self._arrays[path].sharding)

    def __delitem__(self, path: str) -> None:
        del self._arrays[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def laid_out(leaf: Array, layout: jax.sharding.Sharding) -> Array:
    """Return an array in a layout; the array itself, if it has this layout."""
    if leaf.sharding == layout or leaf.sharding.is_equivalent_to(layout, leaf.ndim):
        return leaf
    return jax.device_put(leaf, layout)
