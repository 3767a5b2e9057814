"""Typed random keys of JAX as plain arrays, which can be saved and sent, and back."""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec


def is_key(leaf: Any) -> bool:
    """Return whether a leaf is an array of typed random keys."""
    return isinstance(leaf, jax.Array) and bool(jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def key_types(tree: Any) -> list[Any]:
    """Return the implementation of random numbers of each leaf, in the order of the tree; None for other arrays."""
    return [jax.random.key_impl(leaf) if is_key(leaf) else None for leaf in jax.tree.leaves(tree)]


def without_keys(tree: Any) -> Any:
    """Return a tree with the data of random keys in their places."""
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if is_key(leaf) else leaf, tree)


def with_keys(tree: Any, types: list[Any]) -> Any:
    """Return a tree that `without_keys` gave, with its keys; `types` is what `key_types` says about the original."""
    leaves, treedef = jax.tree.flatten(tree)
    keyed = [leaf if kind is None else _keyed(leaf, kind) for leaf, kind in zip(leaves, types, strict=True)]
    return jax.tree.unflatten(treedef, keyed)


def _keyed(data: Any, kind: Any) -> Any:
    layout = getattr(data, "sharding", None)
    if isinstance(layout, NamedSharding):
        # In keys that JAX makes, the layout of the data names all axes. For another name a step is compiled again.
        axes = (*layout.spec, *[None] * (data.ndim - len(layout.spec)))
        data = jax.device_put(data, NamedSharding(layout.mesh, PartitionSpec(*axes)))
    return jax.random.wrap_key_data(data, impl=kind)
