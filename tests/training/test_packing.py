"""Packed gradients: every device packs what it holds, and unpacks the same."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from diloco_jax.training.sharding import MeshConfig, make_mesh
from diloco_jax.training.whole_state.packing import Packing

# Cut over one axis, over the other, over both, and whole on all devices.
TENSORS = {
    "a": ((4, 3), ("fsdp", None)),
    "b": ((2, 6), (None, "tensor")),
    "c": ((4, 4), ("fsdp", "tensor")),
    "d": ((5,), (None,)),
}
VALUES = {
    path: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 100 * number
    for number, (path, (shape, _)) in enumerate(TENSORS.items())
}


def make_packing(bucket: int) -> tuple[Packing, dict[str, jax.ShapeDtypeStruct]]:
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2), jax.devices()[:4])
    tensors = {
        path: jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, PartitionSpec(*axes)))
        for path, (shape, axes) in TENSORS.items()
    }
    return Packing(tensors, mesh, bucket), tensors


def test_small_tensors_share_buckets_in_their_order_up_to_the_limit() -> None:
    # A device has 6 numbers of a, 6 of b, 4 of c and 5 of d.
    for limit, shapes in {
        100: {"abcd": (84,)},
        12: {"ab": (48,), "cd": (36,)},
        9: {"a": (4, 3), "b": (2, 6), "cd": (36,)},
        5: {"a": (4, 3), "b": (2, 6), "c": (4, 4), "d": (5,)},
        4: {"a": (4, 3), "b": (2, 6), "d": (5,), "c": (4, 4)},
    }.items():
        assert {"".join(each.paths): each.shape for each in make_packing(limit)[0].buckets} == shapes


@pytest.mark.parametrize("bucket", [5, 9, 100])
def test_a_bucket_has_the_shards_of_each_device_and_gives_them_back(bucket: int) -> None:
    packing, tensors = make_packing(bucket)
    gradient = {path: jax.device_put(VALUES[path], leaf.sharding) for path, leaf in tensors.items()}
    packed = jax.jit(packing.pack)(gradient)
    for described, array in zip(packing.described, packed, strict=True):
        assert array.shape == described.shape and array.sharding.is_equivalent_to(described.sharding, array.ndim)
    for path, leaf in tensors.items():
        number, start = packing.starts[path]
        held = {shard.device: shard.data for shard in packed[number].addressable_shards}
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
            shard = VALUES[path][index].reshape(-1)
            np.testing.assert_array_equal(held[device].reshape(-1)[start : start + shard.size], shard)

    unpacked = jax.jit(packing.unpack)(packed)
    for path, value in VALUES.items():
        assert unpacked[path].sharding.is_equivalent_to(tensors[path].sharding, value.ndim)
        np.testing.assert_array_equal(unpacked[path], value)
