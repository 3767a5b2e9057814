"""The syncer's numbers: global fragments, their recent versions, outer state, and the merge that makes new ones.

The protocol decides who is merged (Merge); this file computes the result with `core`. It holds no rule of who or when.

All that is known of a fragment is one value that never changes, a FragmentState. `merge` makes the next one, on any
thread; `publish` puts it in place. So a caller that publishes, restores and captures on one thread sees the model
change there only, and what it captured stays as it was while the run goes on.

What a learner sends is left out of the merge if it cannot be decoded, holds NaN or infinity, or is wildly large. Large
is judged by norm per inner step, against the median of the last accepted values of the fragment, or against the median
of this round if that is larger and there are enough parts: a change that concerns everybody, such as the end of a long
warm-up, must not expel everybody. Medians are part of the state, so a replay leaves out whom the run left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from diloco_jax.core import codec
from diloco_jax.core.fragments import Fragment, FragmentPlan, put, take
from diloco_jax.core.merge import MergeConfig, WeightScheme, merge_fragment, merge_method, token_weights
from diloco_jax.core.outer import OuterOptimizer
from diloco_jax.protocol.effects import Merge, Part

Values = dict[str, np.ndarray]

RATES_KEPT = 32  # accepted values whose norm per step is remembered, by fragment
RATES_MIN = 8  # with fewer, the fragment's past says nothing yet
PARTS_MIN = 3  # with fewer in a round, one bad part could be the median
_CHUNK = 1 << 16  # elements whose squares are held at a time


class FragmentState(NamedTuple):
    """A fragment at one moment. Nothing in it is ever changed."""

    values: dict[int, Values]  # by version, oldest first: the newest, and those that learners may refer to
    outer: Any  # state of the outer optimizer
    rates: tuple[float, ...]  # norm per inner step of the values accepted last, oldest first
    payload: bytes  # the newest value as it travels: float32, so that anchors are equal bit for bit
    digest: int  # of the payload

    @property
    def version(self) -> int:
        """The newest version."""
        return next(reversed(self.values))


class Merged(NamedTuple):
    """What a merge came to."""

    fragment_id: int
    state: FragmentState | None  # None: no part was usable, the fragment stays as it is
    left_out: dict[str, str]  # learner -> why its part was not used


class GlobalModel:
    """Global value of every fragment, with the versions that learners may still refer to.

    Args:
        plan: the partition of the model.
        parameters: initial values by path, float32, unsharded.
        outer: the outer optimizer; its state is kept per fragment.
        merge: which tensors are merged how, and what is left out.
        weights: a learner's weight in a merge.
        wire_up: format of the learners' outer gradients.
        anchor_history: versions of a fragment that are kept.
    """

    def __init__(
        self,
        plan: FragmentPlan,
        parameters: Mapping[str, np.ndarray],
        outer: OuterOptimizer,
        *,
        merge: MergeConfig,
        weights: WeightScheme,
        wire_up: codec.Format,
        anchor_history: int,
    ) -> None:
        self.plan = plan
        self._outer = outer
        self._weights: WeightScheme = weights
        self._wire_up: codec.Format = wire_up
        self._anchor_history = anchor_history
        self._outlier_factor = merge.outlier_factor
        self._parameters = {path: np.array(value, np.float32) for path, value in parameters.items()}
        self._methods = [
            {piece.key: merge_method(piece.path, shape, merge) for piece, shape in zip(f.slices, f.shapes, strict=True)}
            for f in plan.fragments
        ]
        self._states = [self._first(take(self._parameters, fragment)) for fragment in plan.fragments]

    def _first(self, value: Values) -> FragmentState:
        payload = codec.encode(value, "float32")
        return FragmentState({0: value}, self._outer.init(value), (), payload, codec.digest(payload))

    def payload(self, fragment_id: int) -> bytes:
        """The newest version as it travels to learners."""
        return self._states[fragment_id].payload

    @property
    def versions(self) -> list[int]:
        """The newest version of every fragment."""
        return [state.version for state in self._states]

    @property
    def digests(self) -> list[int]:
        """The digest of every fragment's newest version."""
        return [state.digest for state in self._states]

    def capture(self) -> tuple[FragmentState, ...]:
        """The model as it is now; costs nothing, and stays as it is."""
        return tuple(self._states)

    def load(self, states: Sequence[FragmentState]) -> None:
        """Become what `capture` returned, or `unpacked`."""
        assert len(states) == len(self._states), f"{len(states)} fragments for a model of {len(self._states)}"
        self._states = list(states)

    def publish(self, merged: Merged) -> None:
        """Put a merge's result in place."""
        assert merged.state is not None, "a merge without a usable part has nothing to publish"
        self._states[merged.fragment_id] = merged.state

    def restore(self, fragment_id: int, version: int, payload: bytes | memoryview) -> None:
        """Make a value that this syncer, or an earlier life of it, sent out the newest of its fragment.

        Outer state and medians stay as they are: nobody but the lost process had newer ones.

        Args:
            fragment_id: the fragment.
            version: of the value.
            payload: its float32 encoding.

        Raises:
            ValueError: the payload is no value of this fragment.
        """
        value = codec.decode(payload, self.plan.fragments[fragment_id].keys_shapes, "float32")
        data = bytes(payload)
        state = self._states[fragment_id]
        self._states[fragment_id] = state._replace(values={version: value}, payload=data, digest=codec.digest(data))

    def fits(self, fragment_id: int, digest: int, payload: bytes | memoryview) -> bool:
        """Whether a payload can be a value of this fragment, and has the digest that it should have."""
        if not 0 <= fragment_id < len(self._states) or len(payload) != len(self._states[fragment_id].payload):
            return False
        return codec.digest(payload) == digest

    def parameters(self, states: Sequence[FragmentState] | None = None) -> Values:
        """The whole model, newest version of every fragment, as new arrays by path.

        Args:
            states: a capture, which any thread may have assembled; None takes the model as it is.
        """
        parameters: Mapping[str, np.ndarray] = self._parameters
        for fragment, state in zip(self.plan.fragments, states or self._states, strict=True):
            parameters = put(parameters, fragment, state.values[state.version])
        return dict(parameters)

    # ---- merging --------------------------------------------------------------------------------------------------

    def merge(self, order: Merge, payloads: Mapping[str, bytes | memoryview]) -> Merged:
        """Compute one round: outer gradients, merge, outer update (paper, Alg. 2 and App. D.2). Changes nothing.

        Delta_m = Theta - theta_m, where the learner sent theta_base - theta_m against the version it held; if that is
        not the newest any more, Theta - theta_base is added.

        Args:
            order: the protocol's decision.
            payloads: encoded outer gradient of each part, by learner.
        """
        state = self._states[order.fragment_id]
        left_out: dict[str, str] = {}
        usable = self._usable(order, payloads, state, left_out)
        while usable:
            with np.errstate(over="ignore", invalid="ignore"):  # looked for in the result
                value, outer = self._step(order.fragment_id, state, usable)
            if _all_finite(value) and _all_finite(outer):
                return Merged(order.fragment_id, self._next(order, state, value, outer, usable), left_out)
            # each part is finite, yet the result is not: the largest goes, and what is left is tried again
            worst = max(usable, key=lambda item: (item[2], item[0].learner_id))
            left_out[worst[0].learner_id] = "its value is so large that the result is not finite"
            usable.remove(worst)
        return Merged(order.fragment_id, None, left_out)

    def _usable(
        self,
        order: Merge,
        payloads: Mapping[str, bytes | memoryview],
        state: FragmentState,
        left_out: dict[str, str],
    ) -> list[tuple[Part, Values, float]]:
        """The parts that may be merged, with outer gradient and norm per inner step; the others go to `left_out`."""
        fragment = self.plan.fragments[order.fragment_id]
        decoded = []
        for part in order.parts:
            try:
                gradient = codec.decode(payloads[part.learner_id], fragment.keys_shapes, self._wire_up)
            except ValueError as error:
                left_out[part.learner_id] = f"its value cannot be decoded: {error}"
                continue
            if not _all_finite(gradient):
                left_out[part.learner_id] = "NaN or infinity in its value"
                continue
            decoded.append((part, gradient, _norm(gradient) / part.steps))
        limit, usual = self._limit(state.rates, [rate for _, _, rate in decoded])
        usable = []
        for part, gradient, rate in decoded:
            if rate > limit:
                left_out[part.learner_id] = (
                    f"its value has norm {rate:.3g} per inner step, where {usual:.3g} is usual "
                    f"(merge.outlier_factor {self._outlier_factor:g})"
                )
            else:
                usable.append((part, gradient, rate))
        return usable

    def _limit(self, rates: Sequence[float], now: Sequence[float]) -> tuple[float, float]:
        """The largest norm per inner step that is credible, and what is usual."""
        medians = [_median(rates)] if len(rates) >= RATES_MIN else []
        moving = [rate for rate in now if rate > 0]
        medians += [_median(moving)] if len(moving) >= PARTS_MIN else []
        if not medians or not self._outlier_factor:
            return math.inf, 0.0
        return self._outlier_factor * max(medians), max(medians)

    def _step(
        self, fragment_id: int, state: FragmentState, usable: Sequence[tuple[Part, Values, float]]
    ) -> tuple[Values, Any]:
        """New value and outer state."""
        newest = state.values[state.version]
        gradients = []
        for part, gradient, _ in usable:
            base = state.values[part.base_version]
            moved = base is not newest
            gradients.append({k: (newest[k] - base[k]) + v for k, v in gradient.items()} if moved else gradient)
        tokens, steps = [part.tokens for part, _, _ in usable], [part.steps for part, _, _ in usable]
        merged = merge_fragment(gradients, token_weights(tokens, steps, self._weights), self._methods[fragment_id])
        return self._outer.step(newest, merged, state.outer)

    def _next(
        self,
        order: Merge,
        state: FragmentState,
        value: Values,
        outer: Any,
        usable: Sequence[tuple[Part, Values, float]],
    ) -> FragmentState:
        kept = list(state.values.items())[1 - self._anchor_history :] if self._anchor_history > 1 else []
        # a learner that did not move, at a learning rate of 0 for example, says nothing of what is usual
        rates = (*state.rates, *(rate for _, _, rate in usable if rate > 0))[-RATES_KEPT:]
        payload = codec.encode(value, "float32")
        return FragmentState(dict([*kept, (order.global_step, value)]), outer, rates, payload, codec.digest(payload))

    # ---- on disk --------------------------------------------------------------------------------------------------

    def packed(self, states: Sequence[FragmentState]) -> tuple[dict[str, Values], dict[str, Any]]:
        """A capture as named arrays (`parameters`, `outer`) and plain values; any thread may call it."""
        outer = {}
        for fragment_id, state in enumerate(states):
            for path, leaf in jax.tree_util.tree_leaves_with_path(state.outer):
                outer[f"{fragment_id}{jax.tree_util.keystr(path)}"] = np.asarray(leaf)
        plain = {
            "versions": [state.version for state in states],
            "digests": [state.digest for state in states],
            "rates": [list(state.rates) for state in states],
        }
        return {"parameters": self.parameters(states), "outer": outer}, plain

    def unpacked(self, groups: Mapping[str, Values], plain: Mapping[str, Any]) -> list[FragmentState]:
        """The capture that `packed` described; older versions are gone.

        Raises:
            ValueError: these are not values of this model, or not the ones that were saved.
        """
        try:
            return [self._unpacked(fragment, groups, plain) for fragment in self.plan.fragments]
        except (KeyError, IndexError) as error:
            raise ValueError(f"it is of another model or another config: {error} is missing") from error

    def _unpacked(self, fragment: Fragment, groups: Mapping[str, Values], plain: Mapping[str, Any]) -> FragmentState:
        number = fragment.fragment_id
        value = take(groups["parameters"], fragment)
        payload = codec.encode(value, "float32")
        if codec.digest(payload) != plain["digests"][number]:
            raise ValueError(f"its fragment {number} has another digest than it had when it was saved")
        template = self._outer.init(value)
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(template)]
        leaves = [groups["outer"][f"{number}{jax.tree_util.keystr(path)}"] for path in paths]
        outer = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(template), leaves)
        rates = tuple(plain["rates"][number])
        return FragmentState({plain["versions"][number]: value}, outer, rates, payload, plain["digests"][number])


def _median(values: Sequence[float]) -> float:
    """The lower median: one of the values, so no rounding."""
    return sorted(values)[(len(values) - 1) // 2]


def _all_finite(tree: Any) -> bool:
    return all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(tree))


def _norm(values: Values) -> float:
    """Euclidean norm of all tensors together, summed in a fixed order."""
    sums = []
    for value in values.values():
        flat = value.reshape(-1)
        for start in range(0, flat.size, _CHUNK):
            part = flat[start : start + _CHUNK].astype(np.float64)
            sums.append(float(np.add.reduce(part * part)))
    return math.sqrt(math.fsum(sums))
