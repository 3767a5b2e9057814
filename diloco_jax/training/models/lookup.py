"""Embeddings looked up where they lie: no device ever has the whole table, or the whole of its gradient.

The table's rows are shared out over devices that also share the batch. With V = 262,144 words of width 3840 gathering
it takes 2 GB on each device, and its gradient as much again, summed over all. Instead the token ids, which are small,
are gathered; each device looks up the rows that it has, zeros for the others; and a reduce-scatter gives each device
the rows of its own tokens. The gradient goes the same way back. Sequences are cut, so that what travels at a time is
small.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from diloco_jax.training.models.losses import TABLE_AXES
from diloco_jax.training.sharding import current_layout, gather

SLAB_BYTES = 1 << 27  # of rows that travel at a time, on each device


def look_up(table: Float[Array, "v d"], tokens: Int32[Array, "b t"], dtype: str) -> Float[Array, "b t d"]:
    """Return the rows of the tokens in this type; the table is as it is stored, with the logical axes TABLE_AXES."""
    layout = current_layout()
    spec = PartitionSpec(None, None) if layout is None else layout.sharding(table.shape, TABLE_AXES).spec
    if layout is None or not spec[0] or spec[1]:  # whole on each device, or rows in parts
        return jnp.take(gather(table.astype(dtype), *TABLE_AXES), tokens, axis=0)
    batch = layout.sharding(tokens.shape, ("batch", None))
    sizes, holders = layout.mesh.shape, (spec[0],) if isinstance(spec[0], str) else tuple(spec[0])
    sharing = tuple(axis for axis in holders if axis in layout.rules["batch"])  # they have other tokens, too
    alike = tuple(axis for axis in holders if axis not in sharing)
    own, length = batch.shard_shape(tokens.shape)
    slab = own * math.prod(sizes[axis] for axis in sharing) * table.shape[1] * jnp.dtype(dtype).itemsize
    cuts = next(n for n in range(1, length + 1) if length % n == 0 and (slab * length / n <= SLAB_BYTES or n == length))

    def local(table: Array, tokens: Array) -> Array:
        def piece(ids: Array) -> Array:
            ids = jax.lax.all_gather(ids, sharing, axis=0, tiled=True) if sharing else ids
            rows = ids - jax.lax.axis_index(holders) * len(table)
            rows = jnp.where((rows >= 0) & (rows < len(table)), rows, len(table))  # behind the last: others have it
            found: Array = table.at[rows].get(mode="fill", fill_value=0).astype(dtype)
            if sharing:
                found = jax.lax.psum_scatter(found, sharing, scatter_dimension=0, tiled=True)
            return jax.lax.psum(found, alike) if alike else found

        pieces: Array = jax.lax.map(piece, tokens.reshape(len(tokens), cuts, -1).swapaxes(0, 1))
        return pieces.swapaxes(0, 1).reshape(*tokens.shape, -1)

    specs, out = (spec, batch.spec), PartitionSpec(*batch.spec, None)
    return jax.shard_map(local, mesh=layout.mesh, in_specs=specs, out_specs=out, check_vma=False)(table, tokens)
