"""Fragments: how a model is cut into P parts that are synchronised at different steps.

The plan is a pure function of the tensors' shapes and the settings: every learner and the syncer compute it alone and
compare fingerprints instead of exchanging it.

  * Every element of every tensor lies in exactly one fragment.
  * Balanced tensors (paper, App. C): the largest piece goes into the currently smallest fragment.
  * A tensor larger than a fair share, ceil(total / P), is first cut along one axis; otherwise a big embedding alone
    would set the peak bandwidth.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeVar

import jax
import numpy as np

Shape = tuple[int, ...]
ArrayT = TypeVar("ArrayT", np.ndarray, jax.Array)

WHOLE = -1  # the `axis` of a slice that is a whole tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentConfig:
    """How tensors larger than a fair share are cut."""

    split_axis: int = 0
    """Axis along which a tensor larger than a fair share is cut. Negative counts from the last axis; a tensor with
    fewer axes is cut along the nearest one it has. Prefer an axis that the mesh does not shard."""

    def axes(self, shapes: Mapping[str, Shape]) -> dict[str, int]:
        """Return the axis for each tensor, as `plan_fragments` takes it (scalars have none).

        Args:
          shapes: shape of every tensor, by path.
        """
        return {path: max(-len(s), min(self.split_axis, len(s) - 1)) for path, s in shapes.items() if s}


class Slice(NamedTuple):
    """A contiguous part of one tensor: the elements start..stop-1 along one axis, or all of it."""

    path: str
    axis: int  # WHOLE when the slice is the whole tensor
    start: int
    stop: int

    @property
    def key(self) -> str:
        """Name of this slice in a fragment's values: 'path', or 'path[axis:start:stop]'."""
        return self.path if self.axis == WHOLE else f"{self.path}[{self.axis}:{self.start}:{self.stop}]"


@dataclass(frozen=True)
class Fragment:
    """What is synchronised together.

    Attributes:
      fragment_id: position in the plan, 0..P-1.
      slices: ordered by (path, start).
      shapes: shape of each slice, in the same order.
      num_elements: in all slices together.
    """

    fragment_id: int
    slices: tuple[Slice, ...]
    shapes: tuple[Shape, ...]
    num_elements: int

    @property
    def keys_shapes(self) -> tuple[tuple[str, Shape], ...]:
        """(key, shape) of each slice, in order: the layout that `codec.decode` takes."""
        return tuple((piece.key, shape) for piece, shape in zip(self.slices, self.shapes, strict=True))


@dataclass(frozen=True)
class FragmentPlan:
    """The partition of a model.

    Attributes:
      fragments: by fragment_id.
      shapes: shape of every tensor, by path, sorted by path.
      fingerprint: equal exactly when shapes, settings and partition are equal (16 hexadecimal digits).
    """

    fragments: tuple[Fragment, ...]
    shapes: Mapping[str, Shape]
    fingerprint: str


def plan_fragments(
    shapes: Mapping[str, Shape], num_fragments: int, *, split_axis: Mapping[str, int] | None = None
) -> FragmentPlan:
    """Cut a model into `num_fragments` parts of nearly equal size.

    Pieces are taken in descending size, each into the currently smallest fragment (LPT; Graham 1969: the largest
    fragment is at most 4/3 of the best possible). The order of `shapes` does not matter.

    Args:
      shapes: shape of every tensor, by path.
      num_fragments: P, from 1 to the number of pieces into which the tensors can be cut.
      split_axis: by path, the axis along which a too large tensor may be cut (negative counts from the last);
        0 where not named.

    Raises:
      ValueError: no tensors, an empty tensor, P out of range, an unknown path or axis, or two equal keys.
    """
    shapes = {path: tuple(shapes[path]) for path in sorted(shapes)}
    axes = _checked_axes(shapes, split_axis or {})
    counts = _pieces_per_tensor(shapes, axes, num_fragments)
    pieces = [(piece, shape) for path in shapes for piece, shape in _cut(path, shapes[path], axes[path], counts[path])]
    if len({piece.key for piece, _ in pieces}) < len(pieces):
        raise ValueError("two slices have the same key; rename the parameter whose path looks like 'path[0:0:1]'")

    members: list[list[tuple[Slice, Shape]]] = [[] for _ in range(num_fragments)]
    smallest = [(0, fragment_id) for fragment_id in range(num_fragments)]  # a heap: ties go to the lowest id
    for piece, shape in sorted(pieces, key=lambda item: (-math.prod(item[1]), item[0])):
        size, fragment_id = smallest[0]
        members[fragment_id].append((piece, shape))
        heapq.heapreplace(smallest, (size + math.prod(shape), fragment_id))
    fragments = tuple(_fragment(fragment_id, content) for fragment_id, content in enumerate(members))
    return FragmentPlan(fragments, shapes, _fingerprint(shapes, axes, fragments))


def take(params: Mapping[str, ArrayT], fragment: Fragment) -> dict[str, ArrayT]:
    """Return the fragment's values, by key, in the order of its slices. Works under `jax.jit`.

    NumPy results are views of `params` (copy them before `params` is written); JAX results are arrays of their own,
    except whole tensors, which are the very arrays of `params`.

    Args:
      params: every tensor that the fragment touches, by path, in its full shape.
      fragment: of a plan made for these shapes.
    """
    values: dict[str, ArrayT] = {}
    for piece in fragment.slices:
        array = params[piece.path]
        if piece.axis == WHOLE:
            values[piece.key] = array
        elif isinstance(array, np.ndarray):
            values[piece.key] = array[_index(piece)]
        else:
            values[piece.key] = jax.lax.slice_in_dim(array, piece.start, piece.stop, axis=piece.axis)
    return values


def put(params: Mapping[str, ArrayT], fragment: Fragment, values: Mapping[str, ArrayT]) -> dict[str, ArrayT]:
    """Return `params` with the fragment's elements replaced. Works under `jax.jit`; changes none of its arguments.

    Values are cast to the dtype of the tensor that they enter. Tensors that the fragment does not touch are the
    same objects in the result, and a whole tensor of equal dtype is the very array given in `values`.

    Args:
      params: by path, in full shapes.
      fragment: of a plan made for these shapes.
      values: by key, as `take` returns them.

    Raises:
      ValueError: a value's shape is not its slice's shape.
    """
    result = dict(params)
    fresh: set[str] = set()  # NumPy tensors that were already copied here
    for piece, shape in zip(fragment.slices, fragment.shapes, strict=True):
        array, value = result[piece.path], values[piece.key]
        if value.shape != shape:
            raise ValueError(f"value of {piece.key!r} has shape {value.shape}, the plan needs {shape}")
        if isinstance(array, np.ndarray):
            if piece.axis == WHOLE:
                result[piece.path] = np.asarray(value, array.dtype)
                continue
            if piece.path not in fresh:
                result[piece.path] = array.copy()
                fresh.add(piece.path)
            result[piece.path][_index(piece)] = value
        elif piece.axis == WHOLE:
            result[piece.path] = value.astype(array.dtype)
        else:
            cast = value.astype(array.dtype)
            # Not array.at[...].set: a scatter, where one contiguous block is all that changes.
            result[piece.path] = jax.lax.dynamic_update_slice_in_dim(array, cast, piece.start, axis=piece.axis)
    return result


def _checked_axes(shapes: Mapping[str, Shape], split_axis: Mapping[str, int]) -> dict[str, int]:
    """Axis along which each tensor may be cut, non-negative; WHOLE for scalars."""
    if unknown := sorted(set(split_axis) - set(shapes)):
        raise ValueError(f"split_axis names {unknown[0]!r}, which is not a parameter; remove it or correct the path")
    axes = {}
    for path, shape in shapes.items():
        if math.prod(shape) == 0:
            raise ValueError(f"parameter {path!r} of shape {shape} has no elements; remove it from the model")
        axis = split_axis.get(path, 0)
        if path in split_axis and not -len(shape) <= axis < len(shape):
            raise ValueError(f"split_axis of {path!r} is {axis}, but its shape {shape} has {len(shape)} axes")
        axes[path] = axis % len(shape) if shape else WHOLE
    return axes


def _pieces_per_tensor(shapes: Mapping[str, Shape], axes: Mapping[str, int], num_fragments: int) -> dict[str, int]:
    """Into how many pieces each tensor is cut: none larger than a fair share, and at least P pieces in all."""
    limits = {path: shape[axes[path]] if shape else 1 for path, shape in shapes.items()}
    possible = sum(limits.values())
    if not 1 <= num_fragments <= possible:
        raise ValueError(
            f"num_fragments is {num_fragments}, but these {len(shapes)} tensors can be cut into 1 to {possible} "
            "fragments; lower num_fragments, or cut along a longer axis (split_axis)"
        )
    sizes = {path: math.prod(shape) for path, shape in shapes.items()}
    fair_share = math.ceil(sum(sizes.values()) / num_fragments)
    counts = {path: min(limits[path], math.ceil(sizes[path] / fair_share)) for path in shapes}

    # Rarely, too few pieces are left for P fragments (one huge and some tiny tensors): cut the largest once more.
    largest = [(-sizes[path] / counts[path], path) for path in shapes if counts[path] < limits[path]]
    heapq.heapify(largest)
    for _ in range(num_fragments - sum(counts.values())):
        _, path = heapq.heappop(largest)
        counts[path] += 1
        if counts[path] < limits[path]:
            heapq.heappush(largest, (-sizes[path] / counts[path], path))
    return counts


def _cut(path: str, shape: Shape, axis: int, count: int) -> list[tuple[Slice, Shape]]:
    """Cut one tensor into `count` pieces whose lengths along `axis` differ by at most one."""
    if count == 1:
        return [(Slice(path, WHOLE, 0, shape[0] if shape else 1), shape)]
    bounds = [i * shape[axis] // count for i in range(count + 1)]
    return [
        (Slice(path, axis, start, stop), (*shape[:axis], stop - start, *shape[axis + 1 :]))
        for start, stop in pairwise(bounds)
    ]


def _fragment(fragment_id: int, content: list[tuple[Slice, Shape]]) -> Fragment:
    ordered = sorted(content)
    return Fragment(
        fragment_id=fragment_id,
        slices=tuple(piece for piece, _ in ordered),
        shapes=tuple(shape for _, shape in ordered),
        num_elements=sum(math.prod(shape) for _, shape in ordered),
    )


def _fingerprint(shapes: Mapping[str, Shape], axes: Mapping[str, int], fragments: tuple[Fragment, ...]) -> str:
    # The slices are in it too, so that two versions of this file that would plan differently cannot agree.
    content = {"shapes": shapes, "axes": axes, "fragments": [fragment.slices for fragment in fragments]}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _index(piece: Slice) -> tuple[slice, ...]:
    return (*(slice(None),) * piece.axis, slice(piece.start, piece.stop))
