"""The state that one island sends to another, everything but the parameters, in the format that the run chose.

    optimizer/...    float32: unchanged; bfloat16; or int8: blocks of 256 with a scale each, as in core/codec.py
    other/...        unchanged, like every array of integers and every single number

Adam divides by the square root of its second moments. Rounding must not make these smaller, because a zero in place of
a small moment would make a step of any size. So an array without negative numbers travels as its square roots, rounded
up. Roots need half the orders of magnitude. Zero stays zero.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Shaped, UInt8

from diloco_jax.core import codec
from diloco_jax.core.codec import Bytes, Format
from diloco_jax.training.whole_state.layout import StateLayout, StateLeaf

# The prefixes of the names of leaves.
MOMENTS, PARAMETERS = "optimizer/", "params/"
# The largest code of int8, and the number of blocks that are encoded at once.
MAX_CODE, CHUNK = 127, 512
# A flag precedes the scales of an array in blocks: 1 if the array travels as its square roots, otherwise 0.
_FLAG_BYTES = 4

Array = Shaped[np.ndarray, "..."]
Packed = UInt8[np.ndarray, "n"]


class MovingLayout:
    """The byte layout of a state that travels: packed leaves, whose names have dtype, shape and format."""

    def __init__(self, layout: StateLayout, format: Format) -> None:
        self._leaves = {}
        packed = {}
        for leaf in layout.leaves:
            if not leaf.name.startswith(PARAMETERS):
                how = _format_of(leaf, format)
                name = f"{leaf.name} {leaf.dtype} {list(leaf.shape)} {how or 'exact'}"
                self._leaves[leaf.name] = (name, leaf, how)
                packed[name] = np.broadcast_to(np.uint8(0), (_packed_bytes(leaf, how),))
        # The layout of the packed leaves.
        self.bytes = StateLayout(packed)
        # From the name of a packed leaf to the name of the leaf.
        self.of_packed = {name: key for key, (name, _, _) in self._leaves.items()}

    def pack(self, name: str, array: Array) -> Packed:
        """Encode a leaf for its way to another island."""
        how = self._leaves[name][2]
        if how is None:
            return _flat(array)
        values = array.astype(np.float32, copy=False)
        if not codec.is_integer(how):
            return _flat(codec.quantize_on_cpu(values, how)[0])
        as_roots = bool(np.all(values >= 0))
        codes, scales = _round_up(np.sqrt(values)) if as_roots else codec.quantize_on_cpu(values, how)
        return np.concatenate([_flat(np.asarray([as_roots], "<u4")), _flat(scales), _flat(codes)])

    def read(self, buffer: Bytes) -> Callable[[str], Array]:
        """Return a function from a leaf's name to its array; ValueError if the bytes have another layout."""
        found = self.bytes.decode(buffer)
        return lambda name: self._unpack(name, found[self._leaves[name][0]])

    @property
    def names(self) -> list[str]:
        """Return the names of the leaves that travel."""
        return list(self._leaves)

    def rounded(self, state: Mapping[str, Array]) -> dict[str, Array]:
        """Return a state rounded as if it had travelled; parameters stay exact."""
        return {key: self._unpack(key, self.pack(key, v)) if key in self._leaves else v for key, v in state.items()}

    def _unpack(self, name: str, packed: Packed) -> Array:
        _, leaf, how = self._leaves[name]
        dtype: Any = np.dtype(leaf.dtype)
        if how is None:
            return np.frombuffer(packed, dtype).reshape(leaf.shape)
        if not codec.is_integer(how):
            return codec.decode(packed.data, [("", leaf.shape)], how)[""].astype(dtype)
        size = math.prod(leaf.shape)
        count = -(-size // codec.BLOCK)
        scales = np.frombuffer(packed, "<f4", count, _FLAG_BYTES)
        codes = np.frombuffer(packed, np.int8, count * codec.BLOCK, _FLAG_BYTES + 4 * count).reshape(count, codec.BLOCK)
        values = codec.dequantize_on_cpu(codes, scales, size, how)
        if packed[:_FLAG_BYTES].any():
            # The array travelled as its square roots.
            values *= values
        return values.astype(dtype, copy=False).reshape(leaf.shape)


class MovingState:
    """A state on its way to another island, in parts; it holds one packed leaf at a time.

    Args:
      leaf: waits for the leaf of a name and returns it.
    """

    def __init__(self, layout: MovingLayout, leaf: Callable[[str], Array]) -> None:
        self._layout = layout
        self._leaf = leaf
        # Only the newest packed leaf is kept, because parts are requested in their order.
        self._packed: tuple[str, Packed] | None = None

    def part(self, index: int, part_bytes: int) -> list[memoryview]:
        """Wait for the leaves of part `index`, return its bytes in pieces; all but the last have `part_bytes`."""
        assert 0 <= index < self.count(part_bytes), f"part {index} of {self.count(part_bytes)}"
        start, layout = index * part_bytes, self._layout.bytes
        return layout.slices(start, min(start + part_bytes, layout.num_bytes), self._pack)

    def count(self, part_bytes: int) -> int:
        """Return the number of parts of this size."""
        return -(-self._layout.bytes.num_bytes // part_bytes)

    def _pack(self, packed: str) -> Packed:
        if self._packed is None or self._packed[0] != packed:
            name = self._layout.of_packed[packed]
            self._packed = (packed, self._layout.pack(name, self._leaf(name)))
        return self._packed[1]


def _format_of(leaf: StateLeaf, format: Format) -> Format | None:
    """Return the format that a leaf travels in; None if it travels unchanged."""
    floats = np.issubdtype(np.dtype(leaf.dtype), np.floating) or leaf.dtype == "bfloat16"
    lossy = leaf.name.startswith(MOMENTS) and floats and math.prod(leaf.shape) > 1
    smaller = format != "float32" and (format != "bfloat16" or np.dtype(leaf.dtype).itemsize > 2)
    return format if lossy and smaller else None


def _packed_bytes(leaf: StateLeaf, how: Format | None) -> int:
    if how is None:
        return leaf.num_bytes
    return codec.encoded_size([leaf.shape], how) + (_FLAG_BYTES if codec.is_integer(how) else 0)


def _round_up(roots: Array) -> tuple[Array, Array]:
    """Quantise float32 values of at least 0 to int8 blocks, rounded up."""
    blocks = codec.to_blocks(np, roots.reshape(-1))
    scales = blocks.max(axis=1, initial=0) / np.float32(MAX_CODE)
    codes = np.empty(blocks.shape, np.int8)
    for start in range(0, len(blocks), CHUNK):
        part = slice(start, start + CHUNK)
        divisors = np.where(scales[part] > 0, scales[part], np.float32(np.inf))[:, None]
        codes[part] = np.minimum(np.ceil(blocks[part] / divisors), MAX_CODE)
    return codes, scales


def _flat(array: Array) -> Packed:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
