"""Fragments: how a model is cut into P parts that are synchronised at different steps (paper, App. C).

The plan is a pure function of the tensors' shapes, their kinds and the settings. So every learner and the syncer
compute it alone, and compare fingerprints instead of exchanging plans.

  * Every element of every tensor is in exactly one fragment.
  * Fragments are balanced tensor by tensor: the largest piece goes into the fragment that is smallest so far.
  * A tensor larger than a fair share, ceil(total / P), is first cut along one axis; otherwise a big embedding alone
    would set the peak bandwidth.
  * A stack is cut between its tensors, as if each were a separate parameter.
  * Pieces are as large as even fragments allow, because each piece has its own norm in the merge, and costs time.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from diloco_jax.core.kinds import Kind, kind_of

Shape = tuple[int, ...]
# Each entry has the paths of a group of tensors and the number of its fragments; no fragment has tensors of two groups.
Groups = Sequence[tuple[Collection[str], int]]

# The `axis` of a slice that is a whole tensor.
WHOLE = -1
# The search for even fragments stops at this ratio of the largest to the mean: more would need smaller pieces.
EVEN = 1.15
# The search cuts tensors into pieces of a fair share, then of a half, a third and so on, down to this part of a share.
FINEST = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentConfig:
    """Settings for tensors larger than a fair share, which are cut."""

    split_axis: int = 0
    """Axis along which a tensor larger than a fair share is cut. Negative counts from the last axis; a tensor with
    fewer axes is cut along the nearest axis that it has. Prefer an axis that the mesh does not shard. A stack of layers
    is cut between layers. If one layer alone is larger than a fair share, every layer is cut along this axis. Change it
    if diloco preflight names it, because fragments then cut an axis that the mesh shards. A run that resumes must keep
    it."""

    def plan(
        self, shapes: Mapping[str, Shape], kinds: Mapping[str, Kind], num_fragments: int, groups: Groups = ()
    ) -> FragmentPlan:
        """Cut a model into fragments along the configured axis; arguments as in `plan_fragments`."""
        axes = {}
        for path, shape in shapes.items():
            if own := len(shape) - kinds[path].stack:
                below = self.split_axis < 0
                axes[path] = max(-own, self.split_axis) if below else len(shape) - own + min(self.split_axis, own - 1)
        return plan_fragments(shapes, num_fragments, split_axis=axes, kinds=kinds, groups=groups)


class Slice(NamedTuple):
    """A contiguous part of one tensor: the elements start..stop-1 along one axis, or all of it."""

    path: str
    # WHOLE when the slice is the whole tensor.
    axis: int
    start: int
    stop: int

    @property
    def key(self) -> str:
        """Return this slice's name in a fragment's values: 'path', or 'path[axis:start:stop]'."""
        return self.path if self.axis == WHOLE else f"{self.path}[{self.axis}:{self.start}:{self.stop}]"

    @property
    def at(self) -> tuple[Any, ...]:
        """Return the index of this slice in its tensor; indexing gives an array even for a scalar tensor."""
        return (...,) if self.axis == WHOLE else (*(slice(None),) * self.axis, slice(self.start, self.stop))


def whole(path: str) -> Slice:
    """Return the slice for a whole tensor."""
    return Slice(path, WHOLE, 0, 0)


@dataclass(frozen=True)
class Fragment:
    """A part of the parameters that is synchronised together."""

    # Position in the plan, 0..P-1.
    fragment_id: int
    # Ordered by (path, start).
    slices: tuple[Slice, ...]
    # The shape of each slice, in the same order.
    shapes: tuple[Shape, ...]
    # The elements of all slices together.
    num_elements: int

    @property
    def keys_shapes(self) -> tuple[tuple[str, Shape], ...]:
        """Return (key, shape) of each slice in order, the layout that `codec.decode` takes."""
        return tuple((piece.key, shape) for piece, shape in zip(self.slices, self.shapes, strict=True))

    def check(self, values: Mapping[str, Any]) -> None:
        """Check that values have an array of the right shape for each slice; ValueError names one that differs."""
        for key, shape in self.keys_shapes:
            got = values[key].shape if key in values else None
            if got != tuple(shape):
                raise ValueError(
                    f"fragment {self.fragment_id}: '{key}' has shape {got}, expected {tuple(shape)}; "
                    "do both sides use the same model and fragment plan?"
                )


@dataclass(frozen=True)
class FragmentPlan:
    """The partition of a model into fragments."""

    # Ordered by fragment_id.
    fragments: tuple[Fragment, ...]
    # The shape of every tensor by path, sorted by path.
    shapes: Mapping[str, Shape]
    # The kind of every tensor, in the same order.
    kinds: Mapping[str, Kind]
    # 16 hexadecimal digits; equal exactly when shapes, kinds, settings and partition are equal.
    fingerprint: str
    # The number of fragments of each group; a group's fragments follow each other.
    counts: tuple[int, ...]


def plan_fragments(
    shapes: Mapping[str, Shape],
    num_fragments: int,
    *,
    split_axis: Mapping[str, int] | None = None,
    kinds: Mapping[str, Kind] | None = None,
    groups: Groups = (),
) -> FragmentPlan:
    """Cut a model into `num_fragments` parts of nearly equal size.

    A tensor without elements is in none of the fragments, because it has nothing to send.

    Pieces are dealt in descending size, each into the fragment that is smallest so far (LPT; Graham 1969: the largest
    fragment is at most 4/3 of the best possible). The first attempt has pieces of at most a fair share, and the next
    attempts of a half, a third and so on. They end when the largest fragment is at most `EVEN` times the mean. The
    order of `shapes` does not matter.

    Args:
      num_fragments: P, from 1 to the number of pieces that the tensors can be cut into.
      split_axis: by path, the axis along which a too large tensor may be cut; negative counts from the last axis. The
        tensor must have this axis. 0 for paths that are not listed.
      kinds: by path, the tensor's kind; for paths that are not listed, the kind that follows from the shape alone.
      groups: tensors that share no fragment with other groups, with the number of fragments of each group; by default
        one group of all tensors.

    Raises:
      ValueError: no tensors with elements, P out of range, or two equal keys.
    """
    shapes = {path: tuple(shapes[path]) for path in sorted(shapes)}
    kinds = {path: (kinds or {}).get(path, kind_of(shape)) for path, shape in shapes.items()}
    axes = {p: (split_axis or {}).get(p, 0) % len(shape) if shape else WHOLE for p, shape in shapes.items()}
    filled = {path: shape for path, shape in shapes.items() if math.prod(shape)}
    members = []
    for paths, count in groups or ((shapes, num_fragments),):
        if count or not groups:
            own = {path: shape for path, shape in filled.items() if path in paths}
            members += _even(own, kinds, axes, count, finer=bool(groups))
    fragments = tuple(_fragment(fragment_id, content) for fragment_id, content in enumerate(members))
    if len({piece.key for f in fragments for piece in f.slices}) < sum(len(f.slices) for f in fragments):
        raise ValueError("two slices have the same key; rename the parameter whose path looks like 'path[0:0:1]'")
    counts = tuple(count for _, count in groups) or (num_fragments,)
    return FragmentPlan(fragments, shapes, kinds, _fingerprint(shapes, kinds, axes, fragments), counts)


def _even(
    shapes: Mapping[str, Shape],
    kinds: Mapping[str, Kind],
    axes: Mapping[str, int],
    num_fragments: int,
    *,
    finer: bool,
) -> list[list[tuple[Slice, Shape]]]:
    """Cut tensors into fragments, with pieces as large as even fragments allow; every tensor has elements.

    Args:
      finer: tensors smaller than a share may be cut too, because a group may have only a few tensors of one size.
    """
    plans = []
    for parts in range(1, FINEST + 1):
        cuts = _cuts(shapes, kinds, axes, num_fragments, parts, finer=finer and parts > 1)
        members = _dealt([piece for path in shapes for piece in _cut(path, shapes[path], *cuts[path])], num_fragments)
        largest = max(sum(math.prod(shape) for _, shape in content) for content in members)
        plans.append((largest, parts, members))
        if largest * num_fragments <= EVEN * sum(map(math.prod, shapes.values())):
            break
    return min(plans, key=lambda plan: plan[:2])[2]


def take(params: Mapping[str, np.ndarray], fragment: Fragment) -> dict[str, np.ndarray]:
    """Return a fragment's values by key, as views of `params`, in the order of the fragment's slices."""
    return {piece.key: params[piece.path][piece.at] for piece in fragment.slices}


def put(
    params: Mapping[str, np.ndarray], fragment: Fragment, values: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return `params` with the fragment's elements replaced by `values`, cast to the dtype of each tensor.

    No argument is changed. Tensors that the fragment does not touch are the same objects in the result.

    Raises:
      ValueError: a value's shape is not its slice's shape.
    """
    result = dict(params)
    for path in {piece.path for piece in fragment.slices}:
        result[path] = params[path].copy()
    for piece, shape in zip(fragment.slices, fragment.shapes, strict=True):
        value = values[piece.key]
        if value.shape != shape:
            raise ValueError(f"value of {piece.key!r} has shape {value.shape}, the plan needs {shape}")
        result[piece.path][piece.at] = value
    return result


def _cuts(
    shapes: Mapping[str, Shape],
    kinds: Mapping[str, Kind],
    axes: Mapping[str, int],
    num_fragments: int,
    parts: int,
    *,
    finer: bool,
) -> dict[str, tuple[int, int]]:
    """Return for each tensor the axis of its cut and the number of its pieces; there are at least P pieces in all.

    Three kinds of tensors are cut: those larger than a share; with `finer`, those larger than the `parts`-th part of a
    share; and stacks, between their tensors unless one of these alone is larger than a share. Their pieces have at most
    the `parts`-th part of a share, if the axis is long enough.
    """
    sizes = {path: math.prod(shape) for path, shape in shapes.items()}
    share = max(1, math.ceil(sum(sizes.values()) / max(1, num_fragments)))
    cuts: dict[str, tuple[int, int]] = {}
    lengths: dict[str, int] = {}
    for path, shape in shapes.items():
        axis, length = axes[path], shape[axes[path]] if shape else 1
        between = kinds[path].stack > 0 and (sizes[path] <= share * shape[0] or length <= shape[0])
        if between:
            axis, length = 0, shape[0]
        wanted = math.ceil(sizes[path] * parts / share) if between or finer or sizes[path] > share else 1
        cuts[path], lengths[path] = (axis, max(1, min(length, wanted))), length
    if not 1 <= num_fragments <= sum(lengths.values()):
        raise ValueError(
            f"num_fragments is {num_fragments}, but these {len(shapes)} tensors can be cut into 1 to "
            f"{sum(lengths.values())} fragments; lower num_fragments, or cut along a longer axis (split_axis)"
        )

    # One huge tensor among tiny ones can leave fewer pieces than fragments; then the largest piece is cut once more.
    largest = [(-sizes[path] / count, path) for path, (_, count) in cuts.items() if count < lengths[path]]
    heapq.heapify(largest)
    for _ in range(num_fragments - sum(count for _, count in cuts.values())):
        _, path = heapq.heappop(largest)
        axis, count = cuts[path]
        cuts[path] = axis, count + 1
        if count + 1 < lengths[path]:
            heapq.heappush(largest, (-sizes[path] / (count + 1), path))
    return cuts


def _dealt(pieces: Sequence[tuple[Slice, Shape]], num_fragments: int) -> list[list[tuple[Slice, Shape]]]:
    """Deal out the pieces, the largest first, each into the smallest fragment."""
    members: list[list[tuple[Slice, Shape]]] = [[] for _ in range(num_fragments)]
    # A heap of (size, fragment_id), so that ties go to the lowest id.
    smallest = [(0, fragment_id) for fragment_id in range(num_fragments)]
    for piece, shape in sorted(pieces, key=lambda item: (-math.prod(item[1]), item[0])):
        size, fragment_id = smallest[0]
        members[fragment_id].append((piece, shape))
        heapq.heapreplace(smallest, (size + math.prod(shape), fragment_id))
    return members


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
    slices, shapes = zip(*sorted(content), strict=True)
    return Fragment(fragment_id, slices, shapes, sum(map(math.prod, shapes)))


def _fingerprint(
    shapes: Mapping[str, Shape], kinds: Mapping[str, Kind], axes: Mapping[str, int], fragments: tuple[Fragment, ...]
) -> str:
    # The slices are included, so that two versions of this file that plan differently cannot agree.
    content = {"shapes": shapes, "kinds": kinds, "axes": axes, "fragments": [fragment.slices for fragment in fragments]}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
