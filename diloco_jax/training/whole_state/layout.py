"""The layout of an island's whole state as bytes: parameters, inner optimizer state and other state.

    magic (8 bytes) | length of the description (4, little-endian) | description, JSON | the leaves' bytes

The description lists name, dtype and shape of every leaf in ascending order of the names. The leaves follow in that
order, unsharded, little-endian, without padding. Islands of one run may differ in mesh and devices but not in this
layout. So a reader need not trust the description: it must equal the reader's own byte for byte.
"""

import json
import math
import sys
from bisect import bisect_right
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Shaped

from diloco_jax.core.codec import Bytes, as_bytes

# Arrays by the names of their leaves.
StateArrays = dict[str, Shaped[np.ndarray, "..."]]

_MAGIC = b"diloco\0\1"
_LENGTH_BYTES = 4
_DESCRIPTION_BYTES_MAX = 1 << 26

assert sys.byteorder == "little", "states are copied from memory, so memory must be little-endian"


class StateLeaf(NamedTuple):
    """One array of the state."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class StateLayout:
    """The byte layout of an island's state, built from anything with `dtype` and `shape` for each leaf."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self.leaves = tuple(
            StateLeaf(n, np.dtype(arrays[n].dtype).name, tuple(arrays[n].shape)) for n in sorted(arrays)
        )
        self.by_name = {leaf.name: leaf for leaf in self.leaves}
        description = json.dumps(self.leaves, separators=(",", ":")).encode()
        self.header = _MAGIC + len(description).to_bytes(_LENGTH_BYTES, "little") + description
        ends = accumulate((leaf.num_bytes for leaf in self.leaves), initial=len(self.header))
        # The offset of every leaf, and the end of the last one.
        self._starts = list(ends)
        self.num_bytes = self._starts[-1]

    def read(self, state: Bytes | Mapping[str, Shaped[np.ndarray, "..."]]) -> Mapping[str, Shaped[np.ndarray, "..."]]:
        """Return the arrays of a state that is given as bytes or by name; ValueError names a difference in layout."""
        if isinstance(state, bytes | bytearray | memoryview):
            return self.decode(state)
        found = [StateLeaf(name, state[name].dtype.name, state[name].shape) for name in sorted(state)]
        if found != list(self.leaves):
            raise ValueError(self._difference(found))
        return state

    def decode(self, buffer: Bytes) -> StateArrays:
        """Return the arrays in `buffer`, as views of it; ValueError names a difference in layout."""
        view = memoryview(buffer).cast("B")
        if view[: len(self.header)] != self.header:
            raise ValueError(self._difference(_described(view)))
        if view.nbytes != self.num_bytes:
            raise ValueError(f"the state has {view.nbytes} bytes instead of {self.num_bytes}; ask for it again")
        state = {}
        for leaf, start in zip(self.leaves, self._starts, strict=False):
            flat = np.frombuffer(view, np.dtype(leaf.dtype), math.prod(leaf.shape), start)
            state[leaf.name] = flat.reshape(leaf.shape)
        return state

    def slices(self, start: int, stop: int, array: Callable[[str], Shaped[np.ndarray, "..."]]) -> list[memoryview]:
        """Return bytes [start, stop) of the state, in pieces that share the arrays' memory.

        `array` returns the leaf of a name; it is called only for leaves in the range.
        """
        assert 0 <= start < stop <= self.num_bytes
        pieces = [memoryview(self.header)[start:stop]] if start < len(self.header) else []
        index = max(0, bisect_right(self._starts, start) - 1)
        while index < len(self.leaves) and self._starts[index] < stop:
            low, high = max(start, self._starts[index]), min(stop, self._starts[index + 1])
            if low < high:
                offset = self._starts[index]
                pieces.append(as_bytes(array(self.leaves[index].name))[low - offset : high - offset])
            index += 1
        return pieces

    def _difference(self, found: list[StateLeaf]) -> str:
        mine, theirs = self.by_name, {leaf.name: leaf for leaf in found}
        for name in sorted(mine.keys() | theirs.keys()):
            here, there = mine.get(name), theirs.get(name)
            if here is None or there is None:
                which = "has not" if there is None else "alone has"
                return f"the state is of another model or optimizer: it {which} '{name}'; use the same config"
            if here != there:
                return (
                    f"the state is of another model or optimizer: '{name}' is {there.dtype} {there.shape} there, "
                    f"{here.dtype} {here.shape} here; use the same config"
                )
        return "the state's description is written in another way; use the same version of diloco-jax"


def _described(view: memoryview) -> list[StateLeaf]:
    """Return the leaves in the description of a foreign state, for an error message."""
    begin = len(_MAGIC) + _LENGTH_BYTES
    length = int.from_bytes(view[len(_MAGIC) : begin], "little")
    if view[: len(_MAGIC)] != _MAGIC or not 0 < length <= min(_DESCRIPTION_BYTES_MAX, view.nbytes - begin):
        raise ValueError(f"these {view.nbytes} bytes are not an island's state of this version of diloco-jax")
    try:
        rows = json.loads(bytes(view[begin : begin + length]))
        return [StateLeaf(str(name), str(dtype), tuple(int(n) for n in shape)) for name, dtype, shape in rows]
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"the state's description cannot be read ({error}); ask for it again") from None
