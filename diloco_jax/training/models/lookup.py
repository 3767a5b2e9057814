"""Embeddings looked up where they lie: no device ever has the whole table, or the whole of its gradient.

The table's rows are shared out over devices that also share the batch. With V = 262,144 words of width 3840 gathering
it takes 2 GB on each device, and its gradient as much again, summed over all. Instead the token ids, which are small,
are gathered; each device looks up the rows that it has, zeros for the others; and a reduce-scatter gives each device
the rows of its own tokens. The gradient goes the same way back. Sequences are cut, so that what travels at a time is
small.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Float, Int32, Shaped

from diloco_jax.training.models.losses import TABLE_AXES
from diloco_jax.training.sharding import current_layout, gather

SLAB_BYTES = 1 << 27  # of rows that travel at a time, on each device


class _Ways(NamedTuple):
    """The layout of table and tokens, with axes of the mesh."""

    mesh: Mesh | AbstractMesh
    table: PartitionSpec
    tokens: PartitionSpec
    rows: int  # of the table on each device
    holders: tuple[str, ...]  # share out the table
    sharing: tuple[str, ...]  # of them, those that share out the batch too
    copies: tuple[str, ...]  # share out the batch, and have the same part of the table
    cuts: int  # of a sequence

    def here(self, ids: Int32[Array, "n c"]) -> Int32[Array, "n c"]:
        """Return the ids as rows of this device; of those that others have, the one behind its last."""
        own = ids - jax.lax.axis_index(self.holders) * self.rows
        return jnp.where((own >= 0) & (own < self.rows), own, self.rows)

    def all_of(self, x: Shaped[Array, "b ..."]) -> Shaped[Array, "n ..."]:
        """Join what the devices have that share out the table."""
        joined: Array = jax.lax.all_gather(x, self.sharing, axis=0, tiled=True) if self.sharing else x
        return joined

    def cut(self, x: Shaped[Array, "b t ..."]) -> Shaped[Array, "k b c ..."]:
        """Cut sequences into pieces."""
        return x.reshape(x.shape[0], self.cuts, -1, *x.shape[2:]).swapaxes(0, 1)


def look_up(table: Float[Array, "v d"], tokens: Int32[Array, "b t"], dtype: str) -> Float[Array, "b t d"]:
    """Return the rows of the tokens in this type; the table is as it is stored, with the logical axes TABLE_AXES."""
    layout = current_layout()
    spec = None if layout is None else layout.sharding(table.shape, TABLE_AXES).spec
    if layout is None or spec is None or not spec[0] or spec[1]:  # whole on each device, or rows in parts
        return jnp.take(gather(table.astype(dtype), *TABLE_AXES), tokens, axis=0)
    batch = layout.sharding(tokens.shape, ("batch", None))
    sizes, holders = layout.mesh.shape, (spec[0],) if isinstance(spec[0], str) else tuple(spec[0])
    split = tuple(axis for axis in layout.rules["batch"] if sizes[axis] > 1)
    sharing = tuple(axis for axis in split if axis in holders)
    there = batch.shard_shape(tokens.shape)[0] * math.prod(sizes[axis] for axis in sharing)
    slabs = there * tokens.shape[1] * table.shape[1] * jnp.dtype(dtype).itemsize / SLAB_BYTES
    cuts = next(
        n for n in range(1, tokens.shape[1] + 1) if n >= min(slabs, tokens.shape[1]) and not tokens.shape[1] % n
    )
    rows = table.shape[0] // math.prod(sizes[axis] for axis in holders)
    copies = tuple(axis for axis in split if axis not in holders)
    return _exchange(table, tokens, dtype, _Ways(layout.mesh, spec, batch.spec, rows, holders, sharing, copies, cuts))


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _exchange(
    table: Float[Array, "v d"], tokens: Int32[Array, "b t"], dtype: str, ways: _Ways
) -> Float[Array, "b t d"]:
    others = tuple(axis for axis in ways.holders if axis not in ways.sharing)

    def local(table: Array, tokens: Array) -> Array:
        def piece(ids: Array) -> Array:
            rows = ways.here(ways.all_of(ids))
            found = table.at[rows].get(mode="fill", fill_value=0).astype(dtype)  # all but one device add zeros
            if ways.sharing:
                found = jax.lax.psum_scatter(found, ways.sharing, scatter_dimension=0, tiled=True)
            return jax.lax.psum(found, others) if others else found

        pieces = jax.lax.map(piece, ways.cut(tokens))
        return pieces.swapaxes(0, 1).reshape(*tokens.shape, -1)

    result: Array = _spread(local, ways, (ways.table, ways.tokens), PartitionSpec(*ways.tokens, None))(table, tokens)
    return result


def _forward(table: Array, tokens: Array, dtype: str, ways: _Ways) -> tuple[Array, tuple[Array, Array]]:
    return _exchange(table, tokens, dtype, ways), (tokens, jnp.zeros((0,), table.dtype))


def _backward(
    dtype: str, ways: _Ways, kept: tuple[Array, Array], gradient: Float[Array, "b t d"]
) -> tuple[Array, None]:
    tokens, of_type = kept

    def local(tokens: Array, gradient: Array) -> Array:
        def add(total: Array, piece: tuple[Array, Array]) -> tuple[Array, None]:
            ids, part = map(ways.all_of, piece)
            return total.at[ways.here(ids)].add(part.astype(jnp.float32), mode="drop"), None

        zeros = jnp.zeros((ways.rows, gradient.shape[2]), jnp.float32)
        total = jax.lax.scan(add, zeros, (ways.cut(tokens), ways.cut(gradient)))[0]
        return jax.lax.psum(total, ways.copies) if ways.copies else total

    specs = (ways.tokens, PartitionSpec(*ways.tokens, None))
    total: Array = _spread(local, ways, specs, ways.table)(tokens, gradient)
    return total.astype(of_type.dtype), None


_exchange.defvjp(_forward, _backward)


def _spread(
    local: Callable[..., Array], ways: _Ways, into: tuple[PartitionSpec, ...], out: PartitionSpec
) -> Callable[..., Array]:
    return jax.shard_map(local, mesh=ways.mesh, in_specs=into, out_specs=out, check_vma=False)
