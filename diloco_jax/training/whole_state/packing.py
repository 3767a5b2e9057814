"""Gradients with their small tensors packed, so that a process fetches and puts few arrays instead of one per tensor.

The cost of a transfer beside its bytes, and of an argument of a program, is the same for a bias and for a matrix. A
bucket is a large tensor as it is, or a flat array of small ones: of each device of the mesh, in its order, the shards
of these tensors, each in C order. So a device packs and unpacks what it holds, without the others.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float32

from diloco_jax.training.state import Params

# The buckets of a gradient.
Packed = list[Float32[Array, "..."]]
# Elements of a device in a bucket of several tensors. The copy of 4 MiB costs more than the call for it.
BUCKET = 1 << 20


class PackedTensors(NamedTuple):
    """The tensors of a bucket, and the array that has them."""

    paths: tuple[str, ...]
    shape: tuple[int, ...]
    sharding: NamedSharding

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Return the shape of what one device holds."""
        return self.sharding.shard_shape(self.shape)


class Packing:
    """The buckets of the gradient of a model on a mesh.

    Args:
      tensors: shape and layout of every parameter.
      bucket: elements of a device in a bucket of several tensors, at most.
    """

    def __init__(
        self, tensors: Mapping[str, jax.ShapeDtypeStruct], mesh: Mesh | AbstractMesh, bucket: int = BUCKET
    ) -> None:
        # The shapes of shards, which are the same on all devices.
        self._shards = {path: leaf.sharding.shard_shape(leaf.shape) for path, leaf in sorted(tensors.items())}
        self._specs = {path: leaf.sharding.spec for path, leaf in tensors.items()}
        self._mesh = mesh
        flat = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self.buckets: list[PackedTensors] = []
        for paths in _together({path: math.prod(shape) for path, shape in self._shards.items()}, bucket):
            if len(paths) == 1:
                leaf = tensors[paths[0]]
                self.buckets.append(PackedTensors(paths, tuple(leaf.shape), leaf.sharding))
            else:
                size = sum(math.prod(self._shards[path]) for path in paths)
                self.buckets.append(PackedTensors(paths, (mesh.size * size,), flat))

    @property
    def layouts(self) -> list[NamedSharding]:
        """Return the layouts of the buckets."""
        return [bucket.sharding for bucket in self.buckets]

    @property
    def described(self) -> list[jax.ShapeDtypeStruct]:
        """Return shapes and layouts of the buckets."""
        return [jax.ShapeDtypeStruct(each.shape, np.float32, sharding=each.sharding) for each in self.buckets]

    @property
    def starts(self) -> dict[str, tuple[int, int]]:
        """Return of each tensor the number of its bucket, and the position of its shard in a device's part of it."""
        found = {}
        for number, bucket in enumerate(self.buckets):
            start = 0
            for path in bucket.paths:
                found[path] = number, start
                start += math.prod(self._shards[path])
        return found

    def pack(self, gradient: Params) -> Packed:
        """Return the buckets of a float32 gradient in the layout of the parameters; call this inside a program."""

        def join(*shards: Array) -> Array:
            return jnp.concatenate([shard.reshape(-1) for shard in shards])

        packed = []
        for bucket in self.buckets:
            tensors = [gradient[path] for path in bucket.paths]
            specs = tuple(self._specs[path] for path in bucket.paths)
            alone = len(tensors) == 1
            packed.append(tensors[0] if alone else self._on_each_device(join, specs, bucket.sharding.spec)(*tensors))
        return packed

    def unpack(self, packed: Packed) -> Params:
        """Return the gradient of buckets, in the layout of the parameters; call this inside a program."""
        gradient: Params = {}
        for bucket, array in zip(self.buckets, packed, strict=True):
            shapes = [self._shards[path] for path in bucket.paths]

            def cut(flat: Array, shapes: list[tuple[int, ...]] = shapes) -> tuple[Array, ...]:
                pieces = jnp.split(flat, np.cumsum([math.prod(shape) for shape in shapes])[:-1])
                return tuple(piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True))

            specs = tuple(self._specs[path] for path in bucket.paths)
            alone = len(shapes) == 1
            tensors = (array,) if alone else self._on_each_device(cut, (bucket.sharding.spec,), specs)(array)
            gradient.update(zip(bucket.paths, tensors, strict=True))
        return gradient

    def _on_each_device(self, function: Callable[..., Any], given: Any, returned: Any) -> Callable[..., Any]:
        return jax.shard_map(function, mesh=self._mesh, in_specs=given, out_specs=returned, check_vma=False)


def _together(sizes: Mapping[str, int], limit: int) -> list[tuple[str, ...]]:
    """Divide tensors of these sizes, in their order, into groups of at most `limit` elements; larger ones are alone."""
    alone = [(path,) for path, size in sizes.items() if size > limit]
    groups: list[tuple[str, ...]] = []
    room = 0
    for path, size in sizes.items():
        if size > limit:
            continue
        if not groups or size > room:
            groups.append(())
            room = limit
        groups[-1] += (path,)
        room -= size
    return alone + groups
