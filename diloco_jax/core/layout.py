"""Layouts: where each piece of a fragment is stored, in a flat array and in a payload.

A piece is one slice of a fragment, or the blocks of it that a host holds (held.py). The pieces follow each other in a
flat float32 array, in ascending order of their keys; that array is also the float32 payload. Work is divided into
leaves of at most 2^18 elements of one piece.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash
from jaxtyping import Float32, Shaped

from diloco_jax.core.codec import BLOCK, Format, block_bytes, element_bytes, is_integer, scale_bytes
from diloco_jax.core.fragments import Fragment

# Elements of a leaf: 1 MiB of float32.
LEAF = 1 << 18


class Piece(NamedTuple):
    """The elements of one slice that a layout has."""

    # Slice.key
    key: str
    # The slice's shape; one axis if the layout has only some of its blocks.
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)


class Leaf(NamedTuple):
    """Elements start..stop-1 of a flattened piece, the unit of work of one thread."""

    piece: int
    start: int
    stop: int


class Place(NamedTuple):
    """The place of a piece in a payload: offsets of its scales, of its codes and of its end, in bytes."""

    scales: int
    codes: int
    end: int


@dataclass(frozen=True)
class Layout:
    """Pieces in their order, and the offset of each in a flat array, in elements."""

    pieces: tuple[Piece, ...]
    offsets: tuple[int, ...]
    size: int
    leaves: tuple[Leaf, ...]

    def places(self, format: Format) -> tuple[Place, ...]:
        """Return the place of each piece in a payload."""
        found, offset = [], 0
        for piece in self.pieces:
            if is_integer(format):
                blocks = math.ceil(piece.size / BLOCK)
                codes = offset + blocks * scale_bytes(format)
                end = codes + blocks * block_bytes(format)
            else:
                codes, end = offset, offset + piece.size * element_bytes(format)
            found.append(Place(offset, codes, end))
            offset = end
        return tuple(found)

    def payload_bytes(self, format: Format) -> int:
        """Return the size of an encoded value."""
        return self.places(format)[-1].end if self.pieces else 0

    def where(self, leaf: Leaf) -> slice:
        """Return the range of a leaf in a flat array."""
        offset = self.offsets[leaf.piece]
        return slice(offset + leaf.start, offset + leaf.stop)

    def views(self, flat: Float32[np.ndarray, "n"]) -> dict[str, Float32[np.ndarray, "..."]]:
        """Return each piece by key, as a view of `flat` in its shape."""
        return {
            piece.key: flat[offset : offset + piece.size].reshape(piece.shape)
            for piece, offset in zip(self.pieces, self.offsets, strict=True)
        }

    def flat(self, values: Mapping[str, Shaped[np.ndarray, "..."]]) -> Float32[np.ndarray, "n"]:
        """Return a new flat array with the values of the slices, by key."""
        flat = np.empty(self.size, np.float32)
        for piece, offset in zip(self.pieces, self.offsets, strict=True):
            flat[offset : offset + piece.size] = values[piece.key].reshape(-1)
        return flat

    def leaf_digests(self, flat: Float32[np.ndarray, "n"]) -> list[int]:
        """Return the digest of each leaf of a flat array."""
        return [leaf_digest(flat[self.where(leaf)]) for leaf in self.leaves]


def make_layout(pieces: Iterable[Piece]) -> Layout:
    """Return the layout of pieces, which may come in any order."""
    ordered = tuple(sorted(pieces))
    offsets, leaves, offset = [], [], 0
    for number, piece in enumerate(ordered):
        offsets.append(offset)
        offset += piece.size
        leaves += [Leaf(number, start, min(start + LEAF, piece.size)) for start in range(0, piece.size, LEAF)]
    return Layout(ordered, tuple(offsets), offset, tuple(leaves))


def whole(fragment: Fragment) -> Layout:
    """Return the layout of a whole fragment."""
    return make_layout(Piece(*each) for each in fragment.keys_shapes)


def leaf_digest(values: Float32[np.ndarray, "n"]) -> int:
    """Return the XXH3 of a leaf's float32 bytes, in [0, 2^64)."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(values).view(np.uint8).data)


def combined(leaves: Sequence[int]) -> int:
    """Return the digest of a fragment's value, from those of its leaves in their order."""
    return xxhash.xxh3_64_intdigest(np.asarray(leaves, "<u8").tobytes())


def value_digest(values: Mapping[str, Float32[np.ndarray, "..."]]) -> int:
    """Return the digest of a fragment's value; different bits have equal digests with probability 2^-64."""
    return combined([leaf_digest(leaf) for leaf in _leaves(values)])


def _leaves(values: Mapping[str, Float32[np.ndarray, "..."]]) -> Iterator[Float32[np.ndarray, "n"]]:
    for key in sorted(values):
        flat = values[key].reshape(-1)
        for start in range(0, flat.size, LEAF):
            yield flat[start : start + LEAF]
