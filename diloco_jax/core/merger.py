"""One round's arithmetic: from encoded outer gradients to the next version, its encoded step, and the outer state.

    inspect   <v_i, v_j> of all learners, per leaf                    reads every payload once
    update    g = sum_m c_m v_m;  outer step;  x' = x + Q(step)       reads every payload once more, and the state

The coefficients c_m follow from the weights and, for radial-directional averaging, from the products alone: the length
of a weighted mean of directions is a quadratic form of them. So no mean is ever in memory, and no learner's values are.

Leaves may be worked on in any order, by any number of threads and processes: sums over leaves are exact (math.fsum).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Float64, UInt8, UInt64

from diloco_jax.core import kernels
from diloco_jax.core.codec import Format
from diloco_jax.core.layout import Layout, leaf_digest
from diloco_jax.core.merge import Method, coefficients
from diloco_jax.core.outer import Nesterov, Outer

Flat = Float32[np.ndarray, "_"]
Products = Float64[np.ndarray, "_ _"]
Run = Callable[[Callable[[int], Any], Iterable[int]], Iterable[Any]]  # the built-in map, or that of a thread pool

_KINDS: dict[Format, int] = {
    "float32": kernels.FLOAT32,
    "bfloat16": kernels.BFLOAT16,
    "int8": kernels.INT8,
    "int4": kernels.INT4,
}
_NOTHING = np.empty(0, np.float32)
FREE_MAX = 4  # arrays of one size that wait to be written again


class Values(NamedTuple):
    """What the learners sent: payloads of equal layout, and what is to be added to some of them.

    A value against an older version x_b is of the newest one, x, when x - x_b is added to it.
    """

    payloads: Sequence[UInt8[np.ndarray, "bytes"]]
    moved: Sequence[Flat | None]  # x - x_b, where x_b is not the newest


class State(NamedTuple):
    """A fragment's newest version, as far as a step changes it."""

    value: Flat
    outer: Mapping[str, np.ndarray]
    residual: Flat  # what the steps so far have left out by rounding; empty where nothing is rounded


class Update(NamedTuple):
    """What a round makes of a State."""

    state: State
    step: UInt8[np.ndarray, "bytes"]  # as it travels; empty for float32
    digests: list[int]  # of the leaves
    finite: bool  # the value and the outer state


class Merger:
    """The arithmetic of one layout.

    Args:
      layout: of the fragment, or of a shard's share of it.
      methods: how each piece is merged, in their order.
      outer: the outer optimizer.
      up: format of the learners' payloads.
      down: format of the step.
      run: works on leaves; e.g. ThreadPoolExecutor.map.
    """

    def __init__(
        self, layout: Layout, methods: Sequence[Method], outer: Outer, up: Format, down: Format, run: Run = map
    ) -> None:
        self.layout = layout
        self._methods = tuple(methods)
        self._outer = outer
        self._up, self._down = _KINDS[up], _KINDS[down]
        self._rounds = down != "float32"
        self._places_up, self._places_down = layout.places(up), layout.places(down)
        self.up_bytes = layout.payload_bytes(up)
        self.down_bytes = layout.payload_bytes(down) if self._rounds else 0
        self._run = run
        self.buffers = Buffers()

    def first(self, value: Flat) -> State:
        """The state before the first round."""
        residual = np.zeros(value.size, np.float32) if self._rounds else _NOTHING
        return State(value, self._outer.init(self.layout.views(value)), residual)

    def inspect(self, values: Values) -> list[Products]:
        """Products of all pairs of learners, per leaf. Those of a learner that is unusable are not finite."""
        sources = _sources(values)

        def leaf_products(number: int) -> Products:
            leaf = self.layout.leaves[number]
            products = np.zeros((len(values.payloads),) * 2)
            payloads, moved = sources.of(self.layout.where(leaf))
            place = self._places_up[leaf.piece]
            at, size = (place.scales, place.codes), leaf.stop - leaf.start
            kernels.gram(payloads, moved, self._up, at, leaf.start, size, products)
            return products

        return list(self._run(leaf_products, range(len(self.layout.leaves))))

    def update(
        self, values: Values, products: Sequence[Products], weights: Float64[np.ndarray, "m"], state: State
    ) -> Update:
        """Make the next version. Changes nothing that it is given.

        Args:
          values: of those who are merged.
          products: what `inspect` found of the same learners.
          weights: of the learners, with the sum 1.
          state: the newest version.
        """
        return self.apply(values, self.shares(products, weights), state)

    def shares(self, products: Sequence[Products], weights: Float64[np.ndarray, "m"]) -> list[Float32[np.ndarray, "m"]]:
        """The coefficients c_m of each piece. Of a cut slice all parts must be in this layout.

        Args:
          products: of each leaf.
          weights: of the learners, with the sum 1.
        """
        leaves: list[list[Products]] = [[] for _ in self.layout.pieces]
        for leaf, found in zip(self.layout.leaves, products, strict=True):
            leaves[leaf.piece].append(found)
        return [coefficients(_total(of), weights, how) for of, how in zip(leaves, self._methods, strict=True)]

    def apply(self, values: Values, shares: Sequence[Float32[np.ndarray, "m"]], state: State) -> Update:
        """Make the next version from known coefficients. Changes nothing that it is given.

        Args:
          values: of those who are merged.
          shares: the coefficients of each piece.
          state: the newest version.
        """
        size = self.layout.size
        value, step = self.buffers.take(size), np.empty(self.down_bytes, np.uint8)
        residual = self.buffers.take(size) if self._rounds else _NOTHING
        if isinstance(self._outer, Nesterov):
            trace = state.outer.get("trace", _NOTHING)
            fresh = self.buffers.take(size) if trace.size else _NOTHING
            outer: Mapping[str, np.ndarray] = {"trace": fresh} if trace.size else {}
            rate, momentum, fine = self._outer.rate, self._outer.momentum, True
            up, places = self._up, self._places_up
        else:
            views = self.layout.views(self._mean(values, shares)), state.outer, self.layout.views(state.value)
            moves, outer = self._outer.updates(*views)
            values, shares = Values((moves.view(np.uint8),), (None,)), [np.ones(1, np.float32)] * len(shares)
            trace = fresh = _NOTHING
            rate, momentum, fine = -1.0, 0.0, all(np.isfinite(leaf).all() for leaf in outer.values())
            up, places = kernels.FLOAT32, self.layout.places("float32")
        sources = _sources(values)

        def make_leaf(number: int) -> tuple[bool, int]:
            leaf, here = self.layout.leaves[number], self.layout.where(self.layout.leaves[number])
            place, out = places[leaf.piece], self._places_down[leaf.piece]
            finite = kernels.update(
                *sources.of(here), shares[leaf.piece], up, (place.scales, place.codes), leaf.start,
                state.value[here], _part(trace, here), _part(state.residual, here),
                np.float32(rate), np.float32(momentum), self._down, step, (out.scales, out.codes),
                value[here], _part(fresh, here), _part(residual, here),
            )  # fmt: skip
            return finite, leaf_digest(value[here])

        made = list(self._run(make_leaf, range(len(self.layout.leaves))))
        fine = fine and all(finite for finite, _ in made)
        return Update(State(value, outer, residual), step, [digest for _, digest in made], fine)

    def _mean(self, values: Values, shares: Sequence[Float32[np.ndarray, "m"]]) -> Flat:
        mean, sources = np.empty(self.layout.size, np.float32), _sources(values)

        def make_leaf(number: int) -> None:
            leaf = self.layout.leaves[number]
            place, here = self._places_up[leaf.piece], self.layout.where(leaf)
            at = (place.scales, place.codes)
            kernels.mean(*sources.of(here), shares[leaf.piece], self._up, at, leaf.start, mean[here])

        list(self._run(make_leaf, range(len(self.layout.leaves))))
        return mean


class Buffers:
    """Arrays that nobody uses any more, to be written again: fresh memory costs as much as the merge itself."""

    def __init__(self) -> None:
        self._free: dict[int, list[Flat]] = {}

    def take(self, size: int) -> Flat:
        """An array of this size with any content."""
        free = self._free.get(size)
        return free.pop() if free else np.empty(size, np.float32)

    def give(self, array: np.ndarray) -> None:
        """Nobody reads this array any more; one that cannot be written again is left to Python."""
        free = self._free.setdefault(array.size, [])
        if array.dtype == np.float32 and array.ndim == 1 and array.flags.writeable and len(free) < FREE_MAX:
            free.append(array)


def norms(products: Iterable[Products]) -> list[float]:
    """Each learner's norm over all leaves; NaN or infinite where it is not usable."""
    diagonals = [np.diagonal(each) for each in products]
    return [_root([float(d[m]) for d in diagonals]) for m in range(diagonals[0].size)] if diagonals else []


def subset(products: Iterable[Products], chosen: Sequence[int]) -> list[Products]:
    """The products of some of the learners."""
    return [each[np.ix_(chosen, chosen)] for each in products]


def _root(squares: Sequence[float]) -> float:
    if not all(math.isfinite(square) and square >= 0 for square in squares):
        return math.nan
    return math.sqrt(math.fsum(squares))


def _total(leaves: Sequence[Products]) -> Products:
    if len(leaves) == 1:
        return leaves[0]
    total = np.empty_like(leaves[0])
    for i, j in np.ndindex(*total.shape):
        total[i, j] = math.fsum(leaf[i, j] for leaf in leaves)
    return total


class _Sources(NamedTuple):
    """Addresses of what the learners sent; 0 for nothing to add."""

    payloads: UInt64[np.ndarray, "m"]
    moved: UInt64[np.ndarray, "m"]

    def of(self, leaf: slice) -> tuple[UInt64[np.ndarray, "m"], UInt64[np.ndarray, "m"]]:
        """The same for a leaf."""
        return self.payloads, np.where(self.moved > 0, self.moved + np.uint64(4 * leaf.start), np.uint64(0))


def _sources(values: Values) -> _Sources:
    moved = [0 if moved is None else moved.ctypes.data for moved in values.moved]
    return _Sources(
        np.array([payload.ctypes.data for payload in values.payloads], np.uint64), np.array(moved, np.uint64)
    )


def _part(flat: Flat, here: slice) -> Flat:
    return flat[here] if flat.size else flat
