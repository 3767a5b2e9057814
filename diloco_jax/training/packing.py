"""Gradients packed into a few flat arrays, so that a process fetches and puts few arrays instead of one per tensor.

The cost of a transfer beside its bytes, and of an argument of a program, is the same for a bias and for a matrix. A
bucket is one array of float32: of each device of the mesh, in its order, the shards of some tensors by ascending path,
each in C order. So a device packs and unpacks what it holds, without the others.
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
Packed = list[Float32[Array, "n"]]
# Elements of a device in a bucket of several tensors. A larger tensor is a bucket of its own, which costs no copy.
BUCKET = 1 << 24


class Bucket(NamedTuple):
    """The tensors of a bucket."""

    paths: tuple[str, ...]
    # The number of elements of each device.
    size: int


class Packing:
    """The buckets of the gradient of a model on a mesh.

    Args:
      tensors: shape and layout of every parameter.
      bucket: elements of a device in a bucket of several tensors, at most.
    """

    def __init__(
        self, tensors: Mapping[str, jax.ShapeDtypeStruct], mesh: Mesh | AbstractMesh, bucket: int = BUCKET
    ) -> None:
        self._mesh = mesh
        layouts = {path: leaf.sharding for path, leaf in sorted(tensors.items())}
        self._specs = {path: layout.spec for path, layout in layouts.items()}
        # The shapes of shards, which are the same on all devices.
        self._shards = {path: layout.shard_shape(tensors[path].shape) for path, layout in layouts.items()}
        self.buckets = _buckets({path: math.prod(shape) for path, shape in self._shards.items()}, bucket)
        # The layout of every bucket.
        self.layout = NamedSharding(mesh, PartitionSpec(mesh.axis_names))

    @property
    def described(self) -> list[jax.ShapeDtypeStruct]:
        """Return shapes and layouts of the buckets."""
        return [
            jax.ShapeDtypeStruct((self._mesh.size * bucket.size,), np.float32, sharding=self.layout)
            for bucket in self.buckets
        ]

    def pack(self, gradient: Params) -> Packed:
        """Return the buckets of a float32 gradient in the layout of the parameters; call this inside a program."""

        def local(shards: Params) -> Packed:
            return [jnp.concatenate([shards[path].reshape(-1) for path in each.paths]) for each in self.buckets]

        packed: Packed = self._on_each_device(local, self._specs, self._bucket_specs)(gradient)
        return packed

    def unpack(self, packed: Packed) -> Params:
        """Return the gradient of buckets, in the layout of the parameters; call this inside a program."""

        def local(rows: Packed) -> Params:
            shards: Params = {}
            for bucket, row in zip(self.buckets, rows, strict=True):
                ends = np.cumsum([math.prod(self._shards[path]) for path in bucket.paths])[:-1]
                for path, flat in zip(bucket.paths, jnp.split(row, ends), strict=True):
                    shards[path] = flat.reshape(self._shards[path])
            return shards

        gradient: Params = self._on_each_device(local, self._bucket_specs, self._specs)(packed)
        return gradient

    @property
    def starts(self) -> dict[str, tuple[int, int]]:
        """Return of each tensor the number of its bucket, and where its shard starts in a device's part of it."""
        found = {}
        for number, bucket in enumerate(self.buckets):
            start = 0
            for path in bucket.paths:
                found[path] = number, start
                start += math.prod(self._shards[path])
        return found

    @property
    def _bucket_specs(self) -> list[PartitionSpec]:
        return [self.layout.spec] * len(self.buckets)

    def _on_each_device(self, function: Callable[[Any], Any], given: Any, returned: Any) -> Callable[[Any], Any]:
        return jax.shard_map(function, mesh=self._mesh, in_specs=(given,), out_specs=returned, check_vma=False)


def _buckets(sizes: Mapping[str, int], limit: int) -> list[Bucket]:
    """Divide tensors of these sizes into buckets, in their order."""
    buckets: list[Bucket] = []
    for path, size in sizes.items():
        if buckets and buckets[-1].size + size <= limit:
            last = buckets.pop()
            buckets.append(Bucket((*last.paths, path), last.size + size))
        else:
            buckets.append(Bucket((path,), size))
    return buckets
