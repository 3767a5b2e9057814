"""The part of a state that goes to another island, in the precision that the run chose: all but the parameters.

    optimizer/...    float32: as they are; bfloat16; int8: blocks of 256 with a scale each, as in core/codec.py
    other/...        as they are, and so is whatever is no float, or a single number

Adam divides by the root of its second moments, so what rounding makes of them must be no smaller: a zero in place of
something small would make a step of any size. An array without negative numbers travels as its roots, which need half
the orders of magnitude, rounded up; what was zero stays zero.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Shaped, UInt8

from diloco_jax.core import codec
from diloco_jax.core.codec import Bytes, Format
from diloco_jax.training.whole_state.layout import StateLayout, StateLeaf

MOMENTS, PARAMETERS = "optimizer/", "params/"  # what names of leaves begin with
MAX_CODE, CHUNK = 127, 512  # of int8; blocks that are worked on at once
_FLAG_BYTES = 4  # before the scales of an array in blocks: 1 if it travels as its roots, else 0

Array = Shaped[np.ndarray, "..."]
Packed = UInt8[np.ndarray, "n"]


class MovingLayout:
    """The bytes of what travels: packed leaves, whose names say what they were; int4 is too coarse for moments."""

    def __init__(self, layout: StateLayout, format: Format) -> None:
        self._leaves = {}
        packed = {}
        for leaf in layout.leaves:
            if not leaf.name.startswith(PARAMETERS):
                how = _format_of(leaf, format)
                name = f"{leaf.name} {leaf.dtype} {list(leaf.shape)} {how or 'exact'}"
                self._leaves[leaf.name] = (name, leaf, how)
                packed[name] = np.broadcast_to(np.uint8(0), (_packed_bytes(leaf, how),))
        self.bytes = StateLayout(packed)  # of the packed leaves
        # name of a packed leaf -> of the leaf
        self.of_packed = {name: key for key, (name, _, _) in self._leaves.items()}

    def pack(self, name: str, array: Array) -> Packed:
        """Return a leaf as it travels."""
        how = self._leaves[name][2]
        if how is None:
            return _flat(array)
        values = array.astype(np.float32, copy=False)
        if not codec.is_integer(how):
            return _flat(codec.quantize_on_host(values, how)[0])
        as_roots = bool(np.all(values >= 0))
        codes, scales = _round_up(np.sqrt(values)) if as_roots else codec.quantize_on_host(values, how)
        return np.concatenate([_flat(np.asarray([as_roots], "<u4")), _flat(scales), _flat(codes)])

    def read(self, buffer: Bytes) -> Callable[[str], Array]:
        """Return what makes the leaves that these bytes hold, by name; ValueError if they are of another layout."""
        found = self.bytes.decode(buffer)
        return lambda name: self._unpack(name, found[self._leaves[name][0]])

    def rounded(self, state: Mapping[str, Array]) -> dict[str, Array]:
        """Return a state as it arrives, were it to travel; parameters stay."""
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
        values = codec.dequantize_on_host(codes, scales, size, how)
        if packed[:_FLAG_BYTES].any():  # its roots
            values *= values
        return values.astype(dtype, copy=False).reshape(leaf.shape)


class MovingState:
    """A state on its way to another island, by parts; holds one packed leaf. `leaf` waits for the leaf of a name."""

    def __init__(self, layout: MovingLayout, leaf: Callable[[str], Array]) -> None:
        self._layout = layout
        self._leaf = leaf
        self._packed: tuple[str, Packed] | None = None  # the newest: parts are asked for in their order

    def part(self, index: int, part_bytes: int) -> list[memoryview]:
        """Wait for what part `index` needs and return its bytes in pieces. All parts but the last have `part_bytes`."""
        assert 0 <= index < self.count(part_bytes), f"part {index} of {self.count(part_bytes)}"
        start, layout = index * part_bytes, self._layout.bytes
        return layout.slices(start, min(start + part_bytes, layout.num_bytes), self._pack)

    def count(self, part_bytes: int) -> int:
        """Return how many parts of this size there are."""
        return -(-self._layout.bytes.num_bytes // part_bytes)

    def _pack(self, packed: str) -> Packed:
        if self._packed is None or self._packed[0] != packed:
            name = self._layout.of_packed[packed]
            self._packed = (packed, self._layout.pack(name, self._leaf(name)))
        return self._packed[1]


def _format_of(leaf: StateLeaf, format: Format) -> Format | None:
    """Return how a leaf travels; None: as it is."""
    floats = np.issubdtype(np.dtype(leaf.dtype), np.floating) or leaf.dtype == "bfloat16"
    lossy = leaf.name.startswith(MOMENTS) and floats and math.prod(leaf.shape) > 1
    smaller = format != "float32" and (format != "bfloat16" or np.dtype(leaf.dtype).itemsize > 2)
    return format if lossy and smaller else None


def _packed_bytes(leaf: StateLeaf, how: Format | None) -> int:
    if how is None:
        return leaf.num_bytes
    return codec.encoded_size([leaf.shape], how) + (_FLAG_BYTES if codec.is_integer(how) else 0)


def _round_up(roots: Array) -> tuple[Array, Array]:
    """Quantise float32 of at least 0 to int8 blocks, so that nothing becomes smaller."""
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
