"""The arrival of a fragment's value: one pass decodes a step, adds it to the value before, and computes the digest.

The pass works on one leaf after the other, and computes a leaf's digest while the leaf is in the cache. Threads may
work on the leaves in any order. `codec.decode`, a sum and `layout.value_digest` give the same bits more slowly.
"""

from collections.abc import Sequence

import numpy as np
from numba import types

from diloco_jax.core import codec, kernels
from diloco_jax.core.codec import Bytes, Format
from diloco_jax.core.layout import Layout, combined, leaf_digest
from diloco_jax.core.outer import Flat
from diloco_jax.core.passes import KINDS, NewArray, Run, compile_once, fresh

_AT = types.UniTuple(types.int64, 2)
# Numba accepts writable arrays where it expects read-only ones.
_PAYLOAD, _BASE = types.Array(types.uint8, 1, "C", readonly=True), types.Array(types.float32, 1, "C", readonly=True)
_VALUE = types.Array(types.float32, 1, "C")
_SIGNATURE = (_PAYLOAD, types.int64, _AT, types.int64, _BASE, _VALUE)
_DAMAGES = {kernels.BAD_SCALE: codec.BAD_SCALE, kernels.BAD_CODES: codec.BAD_CODES}


class Arrival:
    """The decoding of one fragment's values.

    Args:
      layout: of the whole fragment.
      down: format of the steps.
      run: calls a function for every leaf; e.g. ThreadPoolExecutor.map.
      new: makes an uninitialised float32 array of the given number of elements.
    """

    def __init__(self, layout: Layout, down: Format, run: Run = map, new: NewArray = fresh) -> None:
        self.layout = layout
        self._down: Format = down
        self._places = layout.places(down)
        self._shapes = [piece.shape for piece in layout.pieces]
        self._run = run
        self._new = new
        # Compiling takes seconds, and a version that arrives must not wait for that.
        compile_once(kernels.arrive, _SIGNATURE)

    def whole(self, payload: Bytes) -> tuple[Flat, int]:
        """Read a value that travelled as float32; return it with its digest. ValueError as in `codec.decode`."""
        codec.check_size(payload, self._shapes, "float32")
        source, value = np.frombuffer(payload, np.float32), self._new(self.layout.size)

        def copy_leaf(number: int) -> int:
            here = self.layout.where(self.layout.leaves[number])
            np.copyto(value[here], source[here])
            return leaf_digest(value[here])

        return value, combined(list(self._run(copy_leaf, range(len(self.layout.leaves)))))

    def step(self, payload: Bytes, base: Flat) -> tuple[Flat, int]:
        """Add an encoded step to the value before, which stays unchanged; return the new value with its digest.

        Raises:
          ValueError: as in `codec.decode`.
        """
        codec.check_size(payload, self._shapes, self._down)
        source, value = np.frombuffer(payload, np.uint8), self._new(self.layout.size)
        kind = KINDS[self._down]

        def add_leaf(number: int) -> tuple[int, int]:
            leaf = self.layout.leaves[number]
            here, place = self.layout.where(leaf), self._places[leaf.piece]
            damage = kernels.arrive(source, kind, (place.scales, place.codes), leaf.start, base[here], value[here])
            return damage, leaf_digest(value[here])

        made = list(self._run(add_leaf, range(len(self.layout.leaves))))
        self._check([damage for damage, _ in made])
        return value, combined([digest for _, digest in made])

    def _check(self, damages: Sequence[int]) -> None:
        """Raise a ValueError for the first damaged slice, if there is one, given the damage of each leaf."""
        found = [(leaf.piece, each) for leaf, each in zip(self.layout.leaves, damages, strict=True) if each]
        if found:
            piece, damage = min(found)
            raise ValueError(f"{self.layout.pieces[piece].key!r}: {_DAMAGES[damage]}")
