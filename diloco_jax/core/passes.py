"""One round's arithmetic: it turns encoded outer gradients into the next version of a fragment.

    inspect   <v_i, v_j> of all learners, per leaf and unit           reads every payload once
    update    g = sum_m c_m v_m;  outer step;  x' = x + Q(step)       reads every payload once more, and the state

For more than `pairs_max` learners, `inspect` computes only the squares <v_i, v_i>, and `update` first reads the
payloads of radial-directional averaging for the length of the mean direction. So no time grows with the square of the
number of learners.

The next version is its value, the encoded step that leads to it, and the outer optimizer's state.

The coefficients c_m follow from the weights and the products alone. For radial-directional averaging, the length of a
weighted mean of directions is a quadratic form of the products (paper, D.2). So neither the mean nor a learner's
decoded values are ever in memory as a whole. A piece of a stack has coefficients for each of its units, which
are merged as separate tensors (merge.py).

Threads and processes may work on the leaves in any order, because sums over leaves are exact (math.fsum).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Float64, UInt8, UInt64
from numba import types

from diloco_jax.core import blocks, kernels
from diloco_jax.core.codec import Format
from diloco_jax.core.layout import LEAF, Layout, Leaf, leaf_digest
from diloco_jax.core.merge import PAIRS_MAX, Rule, coefficients, direction_factors
from diloco_jax.core.outer import NOTHING, Flat, Gradient, Outer

# A leaf's products [units, learners, learners], for each unit that the leaf has elements of.
Products = Float64[np.ndarray, "_ _ _"]
# Squared norms; not finite or negative where a learner's value is unusable.
Squares = Float64[np.ndarray, "learners leaves"]
# A piece's coefficients c_m [units, learners].
Coefficients = Float32[np.ndarray, "_ _"]
# Makes an uninitialised float32 array of the given number of elements.
NewArray = Callable[[int], Flat]
fresh: NewArray = partial(np.empty, dtype=np.float32)
# The built-in map, or the map of a thread pool.
Run = Callable[[Callable[[int], Any], Iterable[int]], Iterable[Any]]

# The constants of blocks.py.
KINDS: dict[Format, int] = {
    "float32": blocks.FLOAT32,
    "bfloat16": blocks.BFLOAT16,
    "int8": blocks.INT8,
    "int4": blocks.INT4,
    "int2": blocks.INT2,
    "ternary": blocks.TERNARY,
}
# The coefficients that leave a single value unchanged.
_ONE = np.ones((1, 1), np.float32)
# Numba compiles a function when it is called with new types. That takes seconds, and in this time learners train on
# while the syncer merges nothing. So each function is compiled for these types only, and other types are an error.
_ADDRESSES, _AT = types.Array(types.uint64, 1, "C"), types.UniTuple(types.int64, 2)
# Numba accepts a writable array here too.
_READ = types.Array(types.float32, 1, "C", readonly=True)
_WRITTEN, _STEP = types.Array(types.float32, 1, "C"), types.Array(types.uint8, 1, "C")
_PRODUCTS, _SHARES = types.Array(types.float64, 3, "C"), types.Array(types.float32, 2, "C", readonly=True)
_SQUARES = types.Array(types.float64, 1, "C")
_VALUES = (_ADDRESSES, _ADDRESSES)
# Format, offsets of the tensor in a payload, first element of the leaf in the tensor.
_LEAF = (types.int64, _AT, types.int64)
# Value, trace, residual.
_STATE, _NEXT = (_READ, _READ, _READ), (_WRITTEN, _WRITTEN, _WRITTEN)
_RATES = (types.float32, types.float32)
_SIGNATURES = (
    (kernels.gram, (*_VALUES, *_LEAF, types.int64, types.int64, _PRODUCTS)),
    (kernels.squares, (*_VALUES, *_LEAF, types.int64, types.int64, _PRODUCTS)),
    (kernels.squares_of_mean, (*_VALUES, _SHARES, types.int64, *_LEAF, types.int64, _SQUARES)),
    (kernels.update, (*_VALUES, _SHARES, types.int64, *_LEAF, *_STATE, *_RATES, types.int64, _STEP, _AT, *_NEXT)),
)


def prepare(stopped: Callable[[], bool] = lambda: False) -> None:
    """Compile every loop, or load it from the cache; further calls do nothing.

    Without a cache this took 20 s of one x86-64 core.

    Args:
      stopped: is called before each loop; if it returns True, the rest is left out.
    """
    for function, signature in _SIGNATURES:
        if stopped():
            return
        compile_once(function, signature)


def compile_once(function: Any, signature: tuple[Any, ...]) -> None:
    """Compile a loop for these types only, or load it from the cache; further calls do nothing."""
    if signature not in function.signatures:
        function.compile(signature)
        function.disable_compile()


class Values(NamedTuple):
    """The learners' values: payloads of equal layout, and for some of them an array to add.

    A learner measures its outer gradient from the version x_b that it adopted. If the newest version x is another one,
    adding x - x_b gives the outer gradient measured from x.
    """

    payloads: Sequence[UInt8[np.ndarray, "bytes"]]
    # x - x_b for each learner; None where x_b is the newest version.
    moved: Sequence[Flat | None]

    def addresses(self) -> "Addresses":
        """Return the addresses of the values. The caller keeps the arrays alive, and does not move them."""
        moved = [0 if each is None else each.ctypes.data for each in self.moved]
        return Addresses(np.array([each.ctypes.data for each in self.payloads], np.uint64), np.array(moved, np.uint64))


class Addresses(NamedTuple):
    """The addresses of values, which a pass reads once for all leaves."""

    payloads: UInt64[np.ndarray, "m"]
    # The arrays to add; 0 for a value without one.
    moved: UInt64[np.ndarray, "m"]

    def at(self, leaf: slice) -> "Addresses":
        """Return the addresses of the payloads, and of each array to add to this leaf."""
        if not self.moved.any():
            return self
        return Addresses(self.payloads, np.where(self.moved, self.moved + np.uint64(4 * leaf.start), np.uint64(0)))


def values_of(payloads: Sequence[UInt8[np.ndarray, "bytes"]]) -> Values:
    """Return values that are all measured from the newest version, so that nothing is added."""
    return Values(payloads, [None] * len(payloads))


class State(NamedTuple):
    """The part of a fragment's newest version that a step changes."""

    value: Flat
    # The outer optimizer's state.
    outer: Mapping[str, np.ndarray]
    # The sum of what rounding has left out of the steps so far; empty if steps are not rounded.
    residual: Flat


class Update(NamedTuple):
    """The result of a round: the next state and the encoded step to it."""

    state: State
    # The step's payload for the wire; empty for float32.
    step: UInt8[np.ndarray, "bytes"]
    # The digest of each leaf of the new value.
    digests: list[int]
    # Whether the value and the outer state are finite.
    finite: bool


class Merger:
    """The arithmetic of merges for one layout.

    Args:
      rules: the rule for merging each piece, in the order of the layout's pieces.
      up: format of the learners' payloads.
      down: format of the step.
      run: calls a function for every leaf; e.g. ThreadPoolExecutor.map.
      new: makes an uninitialised float32 array of the given number of elements.
      pairs_max: products of all pairs are computed for at most this many learners.
    """

    def __init__(
        self,
        layout: Layout,
        rules: Sequence[Rule],
        outer: Outer,
        up: Format,
        down: Format,
        run: Run = map,
        new: NewArray = fresh,
        pairs_max: int = PAIRS_MAX,
    ) -> None:
        self.layout = layout
        self.pairs_max = pairs_max
        self._rules = tuple(rules)
        self._outer = outer
        self._up, self._down = up, down
        self._rounds = down != "float32"
        self._places_up, self._places_down = layout.places(up), layout.places(down)
        self._units = [rule.unit for rule in self._rules]
        self.up_bytes = layout.payload_bytes(up)
        self.down_bytes = layout.payload_bytes(down) if self._rounds else 0
        self._run = run
        self._new = new
        # Compiling in the first round would keep the learners waiting for its merge.
        prepare()
        if layout.pieces:
            # An update with zeros makes the optimizer compile its code for these shapes.
            zeros = np.zeros(layout.size, np.float32)
            nothing = WeightedSum(layout, values_of([zeros.view(np.uint8)]), [_ONE] * len(self._units), run=run)
            outer.update(nothing, outer.init(layout.views(zeros)), layout.views(zeros))

    def first(self, value: Flat) -> State:
        """Return the state before the first round."""
        residual = np.zeros(value.size, np.float32) if self._rounds else NOTHING
        return State(value, self._outer.init(self.layout.views(value)), residual)

    def total(self, steps: Sequence[UInt8[np.ndarray, "bytes"]]) -> Flat:
        """Return the sum of encoded steps, added in their order."""
        ones = [np.ones((1, len(steps)), np.float32)] * len(self.layout.pieces)
        return WeightedSum(self.layout, values_of(steps), ones, None, self._down, self._run, self._new).flat()

    def inspect(self, values: Values) -> list[Products]:
        """Return the products of learners for each leaf; an unusable learner's own are not finite.

        The product of each learner with itself is always computed. Those of pairs are computed only if a merge of these
        learners reads them: for at most `pairs_max` learners, in pieces that are not averaged.
        """
        addresses = values.addresses()

        def leaf_products(number: int) -> Products:
            leaf = self.layout.leaves[number]
            rule, learners = self._rules[leaf.piece], len(values.payloads)
            unit, pairs = rule.unit, rule.method != "average" and learners <= self.pairs_max
            products = np.zeros((_num_units(leaf, unit), learners, learners))
            payloads, moved = addresses.at(self.layout.where(leaf))
            place = self._places_up[leaf.piece]
            at, size = (place.scales, place.codes), leaf.stop - leaf.start
            compute = kernels.gram if pairs else kernels.squares
            compute(payloads, moved, KINDS[self._up], at, leaf.start, size, unit, products)
            return products

        return list(self._run(leaf_products, range(len(self.layout.leaves))))

    def update(
        self, values: Values, products: Sequence[Products], weights: Float64[np.ndarray, "m"], state: State
    ) -> Update:
        """Make the next version from the learners' values; the arguments stay unchanged."""
        return self.apply(values, self.shares(values, products, weights), state)

    def shares(
        self, values: Values, products: Sequence[Products], weights: Float64[np.ndarray, "m"]
    ) -> list[Coefficients]:
        """Return the coefficients c_m of each unit of each piece."""
        totals = self._units_of(products, _total)
        squares: Sequence[Sequence[float | None]] = [[None] * len(of) for of in totals]
        if len(weights) > self.pairs_max:
            squares = self._squares(values, totals, weights)
        return [
            np.array(
                [coefficients(each, weights, rule.method, square) for each, square in zip(of, own, strict=True)],
                np.float32,
            )
            for of, own, rule in zip(totals, squares, self._rules, strict=True)
        ]

    def gram(self, products: Sequence[Products]) -> Float64[np.ndarray, "m m"] | None:
        """Return <v_i, v_j> for i <= j, over the pieces with products of pairs; None if there are none."""
        rules = [self._rules[leaf.piece] for leaf in self.layout.leaves]
        pairs = [each for each, rule in zip(products, rules, strict=True) if rule.method != "average"]
        if not pairs or pairs[0].shape[-1] > self.pairs_max:
            return None
        return np.sum([each.sum(axis=0) for each in pairs], axis=0)

    def _squares(
        self, values: Values, totals: Sequence[Sequence[np.ndarray]], weights: Float64[np.ndarray, "m"]
    ) -> list[list[float]]:
        """Return |sum_m w_m phi(v_m)|^2 of each unit of each piece; 0 in averaged pieces, which do not need it."""
        factors = [np.array([direction_factors(each, weights) for each in of], np.float32) for of in totals]
        addresses = values.addresses()

        def leaf_squares(number: int) -> Float64[np.ndarray, "units"]:
            leaf = self.layout.leaves[number]
            rule, place = self._rules[leaf.piece], self._places_up[leaf.piece]
            squares = np.zeros(_num_units(leaf, rule.unit))
            if rule.method != "average":
                at, size = (place.scales, place.codes), leaf.stop - leaf.start
                source = addresses.at(self.layout.where(leaf))
                kernels.squares_of_mean(
                    *source, factors[leaf.piece], rule.unit, KINDS[self._up], at, leaf.start, size, squares
                )
            return squares

        return self._units_of(list(self._run(leaf_squares, range(len(self.layout.leaves)))), math.fsum)

    def _units_of(self, found: Sequence[np.ndarray], total: Callable[[list[Any]], Any]) -> list[list[Any]]:
        """Return for each unit of each piece the total over the leaves that have elements of it."""
        units: list[dict[int, list[Any]]] = [{} for _ in self.layout.pieces]
        for leaf, of_leaf in zip(self.layout.leaves, found, strict=True):
            for number, each in enumerate(of_leaf, leaf.start // self._rules[leaf.piece].unit):
                units[leaf.piece].setdefault(number, []).append(each)
        return [[total(parts) for parts in of.values()] for of in units]

    def apply(self, values: Values, shares: Sequence[Coefficients], state: State) -> Update:
        """Make the next version from known coefficients; the arguments stay unchanged."""
        layout, size = self.layout, self.layout.size
        value, step = self._new(size), np.empty(self.down_bytes, np.uint8)
        residual = self._new(size) if self._rounds else NOTHING
        gradient = WeightedSum(layout, values, shares, self._units, self._up, self._run, self._new)
        moves, outer = self._outer.update(gradient, state.outer, layout.views(state.value))
        rates = np.float32(moves.rate), np.float32(moves.momentum)

        def make_leaf(number: int) -> tuple[bool, int]:
            here, out = layout.where(layout.leaves[number]), self._places_down[layout.leaves[number].piece]
            finite = kernels.update(
                *moves.gradient.leaf(number), state.value[here], _part(moves.trace, here), _part(state.residual, here),
                *rates, KINDS[self._down], step, (out.scales, out.codes),
                value[here], _part(moves.next_trace, here), _part(residual, here),
            )  # fmt: skip
            return finite, leaf_digest(value[here])

        made = list(self._run(make_leaf, range(len(layout.leaves))))
        fine = moves.finite and all(finite for finite, _ in made)
        return Update(State(value, outer, residual), step, [digest for _, digest in made], fine)


class WeightedSum:
    """The merged outer gradient, sum_m c_m v_m, which the kernels compute block by block as they use it.

    Args:
      shares: c_m for each unit of each piece.
      units: elements of a unit, for each piece; None if every piece is one unit.
    """

    def __init__(
        self,
        layout: Layout,
        values: Values,
        shares: Sequence[Coefficients],
        units: Sequence[int] | None = None,
        format: Format = "float32",
        run: Run = map,
        new: NewArray = fresh,
    ) -> None:
        self._layout = layout
        # The kernels read the memory of these arrays by address, so this reference keeps it alive.
        self._values = values
        self._addresses = values.addresses()
        self._shares = shares
        self._units = units or [layout.size] * len(shares)
        self._format = KINDS[format]
        self._places = layout.places(format)
        self._run = run
        self._new = new

    def leaf(self, number: int) -> tuple[Any, ...]:
        leaf = self._layout.leaves[number]
        piece, place = leaf.piece, self._places[leaf.piece]
        source, at = self._addresses.at(self._layout.where(leaf)), (place.scales, place.codes)
        return *source, self._shares[piece], self._units[piece], self._format, at, leaf.start

    def empty(self) -> Flat:
        return self._new(self._layout.size)

    def exactly(self, flat: Flat) -> Gradient:
        return WeightedSum(self._layout, values_of([flat.view(np.uint8)]), [_ONE] * len(self._shares))

    def views(self) -> dict[str, Float32[np.ndarray, "..."]]:
        return self._layout.views(self.flat())

    def flat(self) -> Flat:
        """Compute the gradient: one step of rate -1 from zero."""
        mean, zeros = self.empty(), np.zeros(LEAF, np.float32)

        def make_leaf(number: int) -> None:
            leaf = self._layout.leaves[number]
            kernels.update(
                *self.leaf(number), zeros[: leaf.stop - leaf.start], NOTHING, NOTHING,
                np.float32(-1), np.float32(0), blocks.FLOAT32, np.empty(0, np.uint8), (0, 0),
                mean[self._layout.where(leaf)], NOTHING, NOTHING,
            )  # fmt: skip

        list(self._run(make_leaf, range(len(self._layout.leaves))))
        return mean


def _num_units(leaf: Leaf, unit: int) -> int:
    return (leaf.stop - 1) // unit - leaf.start // unit + 1


def norms(squares: Squares) -> list[float]:
    """Return each learner's norm over all leaves; NaN for a learner whose value is unusable."""
    usable = (np.isfinite(squares) & (squares >= 0)).all(axis=1)
    return [math.sqrt(math.fsum(own)) if good else math.nan for own, good in zip(squares, usable, strict=True)]


def subset(products: Iterable[Products], chosen: Sequence[int]) -> list[Products]:
    """Return the products among the chosen learners."""
    return [each[:, chosen][:, :, chosen] for each in products]


def squares_of(products: Iterable[Products]) -> Squares:
    """Return each learner's squared norm in each leaf."""
    return np.stack([np.diagonal(each.sum(axis=0)) for each in products], axis=1)


def _total(leaves: Sequence[Float64[np.ndarray, "m m"]]) -> Float64[np.ndarray, "m m"]:
    if len(leaves) == 1:
        return leaves[0]
    total = np.zeros_like(leaves[0])
    # Most products are zero where no pairs were computed.
    for i, j in np.argwhere(np.any(leaves, axis=0)):
        total[i, j] = math.fsum(leaf[i, j] for leaf in leaves)
    return total


def _part(flat: Flat, here: slice) -> Flat:
    return flat[here] if flat.size else flat
