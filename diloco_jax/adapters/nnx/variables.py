"""Flax NNX Variables of a module or of a split state: by path, and their arrays.

A Variable holds one array of a model. `nnx.state` and `nnx.split` return states that share the Variables of a module,
and an update in place changes the array and keeps the Variable.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from flax import nnx
from jaxtyping import Array

from diloco_jax.runtime.own_loop.random_keys import key_types, with_keys, without_keys
from diloco_jax.training.models.protocol import path_of
from diloco_jax.training.sharding import LogicalAxes

# Keys of a Variable from the root: names of attributes, keys of dicts, positions in lists.
Keys = tuple[Any, ...]


def variables_of(root: Any) -> dict[Keys, nnx.Variable[Any]]:
    """Return the Variables of a module, an optimizer or a state, or of a tuple of them, without copies.

    Raises:
        ValueError: `root` is another object.
    """
    if isinstance(root, tuple):
        parts = enumerate(map(variables_of, root))
        return {(place, *keys): leaf for place, part in parts for keys, leaf in part.items()}
    if not isinstance(root, nnx.State | nnx.Pytree):
        raise ValueError(
            f"got a {type(root).__name__}; give an nnx.Module, an nnx.Optimizer, an nnx.State, or a function that "
            "returns one"
        )
    state = root if isinstance(root, nnx.State) else nnx.state(root)
    return {keys: leaf for keys, leaf in nnx.to_flat_state(state) if isinstance(leaf, nnx.Variable)}


def logical_axes(variable: nnx.Variable[Any]) -> LogicalAxes:
    """Return the logical names of a Variable's axes from its metadata; () if it has none."""
    names = variable.get_metadata().get("out_sharding")
    # A NamedSharding and its like have a PartitionSpec.
    names = getattr(names, "spec", names)
    count = getattr(variable.get_raw_value(), "ndim", 0)
    if not names or len(names) > count:
        return ()
    known = [name if isinstance(name, str) else None for name in names]
    return (*known, *[None] * (count - len(known)))


def stored(variable: nnx.Variable[Any]) -> Any:
    """Return a Variable's value as plain arrays: random keys as their data."""
    return without_keys(variable.get_raw_value())


def restore(variable: nnx.Variable[Any], value: Any) -> None:
    """Replace a Variable's value by one that `stored` returned."""
    variable.set_raw_value(with_keys(value, key_types(variable.get_raw_value())))


class VariableArrays(MutableMapping[str, Array]):
    """The arrays of chosen Variables, by path; an entry is read and written in the model itself.

    Each access follows the keys of one Variable from the root. So a loop may replace the root, and nothing is
    flattened.

    Args:
        root: Returns the module or the state that the loop trains now.
        keys: Keys of each Variable, by path.
    """

    def __init__(self, root: Callable[[], Any], keys: Mapping[str, Keys]) -> None:
        self._root = root
        self._keys = dict(keys)
        # The array that was written last, by path.
        self._written: dict[str, weakref.ref[Array]] = {}

    def __getitem__(self, path: str) -> Array:
        return self._variable(path).get_raw_value()

    def __setitem__(self, path: str, value: Array) -> None:
        self._variable(path).set_raw_value(value)
        self._written[path] = weakref.ref(value)

    def __delitem__(self, path: str) -> None:
        raise TypeError(f"parameter {path!r} belongs to the run; its array can be replaced, not removed")

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def changed(self) -> bool:
        """Tell whether the model has an array that was not written here."""
        return any(path not in self._written or self._written[path]() is not self[path] for path in self)

    def _variable(self, path: str) -> nnx.Variable[Any]:
        keys = self._keys[path]
        node = self._root()
        try:
            for key in keys:
                node = _child(node, key)
        except (AttributeError, LookupError, TypeError):
            node = None
        if not isinstance(node, nnx.Variable):
            raise ValueError(
                f"the model has no parameter {path!r} any more: a step may replace arrays, Variables and whole states, "
                "but must keep the structure that attach() got"
            )
        return node


def _child(node: Any, key: Any) -> Any:
    """Return the child of a module, a state, a dict or a list."""
    return node[key] if isinstance(key, int) or isinstance(node, Mapping) else getattr(node, key)


def by_path(found: Mapping[Keys, nnx.Variable[Any]]) -> dict[str, Keys]:
    """Return the keys of each Variable by path, sorted; ValueError if two Variables have one path."""
    paths: dict[str, Keys] = {}
    for keys in found:
        if (path := path_of(keys)) in paths:
            raise ValueError(f"two Variables have the path {path!r}; rename a key that is a number or contains '/'")
        paths[path] = keys
    return dict(sorted(paths.items()))
