"""The global model: newest version and outer state of every fragment, and the merge that makes the next one.

The arithmetic between two decisions of the syncer machine: it decides who is merged with what weight, this computes
the result with `core`. It holds no rule of who or when. What is left out is decided in usable.py.

All that is known of a fragment is one value that never changes, a FragmentState. `merge` makes the next one, on any
thread; `publish` puts it in place. So a caller that publishes, restores and captures on one thread sees the model
change there only, and what it captured stays as it was while the run goes on. Arrays that no state can show any more
are written again.

A version comes about as the version before it plus what the encoded step says, exactly; so who has the one and gets
the other has the same bits as this model.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from diloco_jax.core import codec
from diloco_jax.core.fragments import FragmentPlan, put, take
from diloco_jax.core.layout import Layout, combined, whole
from diloco_jax.core.merge import MergeConfig, WeightScheme, merge_method, token_weights
from diloco_jax.core.merger import Merger, State, Update, Values, norms, subset
from diloco_jax.core.outer import Outer
from diloco_jax.protocol.effects import Merge, Part
from diloco_jax.protocol.messages import NO_VERSION
from diloco_jax.runtime.usable import RATES_KEPT, Candidate, choose

Arrays = dict[str, np.ndarray]


class FragmentState(NamedTuple):
    """A fragment at one moment. Nothing in it is ever changed while somebody may see it."""

    values: dict[int, np.ndarray]  # flat, by version, oldest first: the newest, and those that learners may refer to
    outer: Mapping[str, np.ndarray]  # state of the outer optimizer
    residual: np.ndarray  # what rounding has left out of the steps so far, flat
    rates: tuple[float, ...]  # norm per inner step of the values accepted last, oldest first
    digest: int  # of the newest value
    base: int = NO_VERSION  # the version from which `step` leads to the newest; none: only the whole value can be sent
    step: bytes | memoryview = b""

    @property
    def version(self) -> int:
        """The newest version."""
        return next(reversed(self.values))

    @property
    def value(self) -> np.ndarray:
        """The newest value, flat."""
        return self.values[self.version]


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
        wire_down: format of the steps; with float32 there are none, and whole values travel.
        anchor_history: versions of a fragment that are kept.
        threads: that a merge may use.
    """

    def __init__(
        self,
        plan: FragmentPlan,
        parameters: Mapping[str, np.ndarray],
        outer: Outer,
        *,
        merge: MergeConfig,
        weights: WeightScheme,
        wire_up: codec.Format,
        wire_down: codec.Format,
        anchor_history: int,
        threads: int = 1,
    ) -> None:
        self.plan = plan
        self._weights: WeightScheme = weights
        self._anchor_history = anchor_history
        self._outlier_factor = merge.outlier_factor
        self._parameters = {path: np.array(value, np.float32) for path, value in parameters.items()}
        self._pool = ThreadPoolExecutor(threads, "merge") if threads > 1 else None
        paths = {piece.key: piece.path for fragment in plan.fragments for piece in fragment.slices}
        self._mergers = []
        for fragment in plan.fragments:
            layout = whole(fragment)
            methods = [merge_method(paths[piece.key], piece.shape, merge) for piece in layout.pieces]
            run = self._pool.map if self._pool is not None else map
            self._mergers.append(Merger(layout, methods, outer, wire_up, wire_down, run))
        self._captured: dict[int, weakref.ref[np.ndarray]] = {}  # arrays that are not to be written again, by id
        self._states = [self._first(number) for number in range(len(plan.fragments))]

    def _first(self, fragment_id: int) -> FragmentState:
        layout = self.layout(fragment_id)
        slices = self._cut(self._parameters, fragment_id)
        state = self._mergers[fragment_id].first(layout.flat(slices))
        return FragmentState({0: state.value}, state.outer, state.residual, (), self._digest(fragment_id, state.value))

    def _cut(self, parameters: Mapping[str, np.ndarray], fragment_id: int) -> Arrays:
        return take(parameters, self.plan.fragments[fragment_id])

    def _digest(self, fragment_id: int, flat: np.ndarray) -> int:
        return combined(self.layout(fragment_id).leaf_digests(flat))

    def layout(self, fragment_id: int) -> Layout:
        """How a fragment lies in flat arrays and payloads."""
        return self._mergers[fragment_id].layout

    def step_bytes(self, fragment_id: int) -> int:
        """Size of an encoded step; 0 where whole values travel."""
        return self._mergers[fragment_id].down_bytes

    def value_bytes(self, fragment_id: int) -> int:
        """Size of a whole value as it travels."""
        return 4 * self.layout(fragment_id).size

    def payload(self, fragment_id: int, base: int = NO_VERSION) -> bytes | memoryview:
        """The newest version as it travels to learners: whole in float32, or the step from version `base`."""
        state = self._states[fragment_id]
        if base == NO_VERSION:
            return state.value.tobytes()  # a copy: the array may be written again before this is sent
        assert base == state.base, f"no step from version {base} of fragment {fragment_id}, but from {state.base}"
        return state.step

    @property
    def versions(self) -> list[int]:
        """The newest version of every fragment."""
        return [state.version for state in self._states]

    @property
    def digests(self) -> list[int]:
        """The digest of every fragment's newest version."""
        return [state.digest for state in self._states]

    def capture(self) -> tuple[FragmentState, ...]:
        """The model as it is now, which stays as it is."""
        for state in self._states:
            for array in _arrays(state):
                self._captured[id(array)] = weakref.ref(array)
        return tuple(self._states)

    def load(self, states: Sequence[FragmentState]) -> None:
        """Become what `capture` returned, or `unpacked`."""
        assert len(states) == len(self._states), f"{len(states)} fragments for a model of {len(self._states)}"
        self._states = list(states)

    def publish(self, merged: Merged) -> None:
        """Put a merge's result in place."""
        assert merged.state is not None, "a merge without a usable part has nothing to publish"
        before, self._states[merged.fragment_id] = self._states[merged.fragment_id], merged.state
        self._captured = {number: held for number, held in self._captured.items() if held() is not None}
        used = {id(array) for array in _arrays(merged.state)}
        for array in _arrays(before):
            if id(array) not in used and id(array) not in self._captured:
                self._mergers[merged.fragment_id].buffers.give(array)

    def restore(self, fragment_id: int, version: int, payload: bytes | memoryview) -> None:
        """Make a value that this syncer, or an earlier life of it, sent out the newest of its fragment.

        Outer state and medians stay as they are: nobody but the lost process had newer ones. What its steps had left
        out is lost.

        Args:
            fragment_id: the fragment.
            version: of the value.
            payload: its float32 encoding.

        Raises:
            ValueError: the payload is no value of this fragment.
        """
        flat = self._flat(fragment_id, payload)
        if flat is None:
            raise ValueError(f"{len(payload)} bytes are no value of fragment {fragment_id}")
        state = self._states[fragment_id]
        digest, residual = self._digest(fragment_id, flat), np.zeros_like(state.residual)
        self._states[fragment_id] = FragmentState({version: flat}, state.outer, residual, state.rates, digest)

    def fits(self, fragment_id: int, digest: int, payload: bytes | memoryview) -> bool:
        """Whether a payload can be a value of this fragment, and has the digest that it should have."""
        flat = self._flat(fragment_id, payload)
        return flat is not None and self._digest(fragment_id, flat) == digest

    def _flat(self, fragment_id: int, payload: bytes | memoryview) -> np.ndarray | None:
        if not 0 <= fragment_id < len(self._states) or len(payload) != self.value_bytes(fragment_id):
            return None
        return np.frombuffer(payload, "<f4").astype(np.float32)

    def slices(self, state: FragmentState, fragment_id: int) -> Arrays:
        """The newest value of a fragment as the arrays of its slices, by key, for nobody to write to."""
        return self.layout(fragment_id).views(state.value)

    def parameters(self, states: Sequence[FragmentState] | None = None) -> Arrays:
        """The whole model, newest version of every fragment, as new arrays by path.

        Args:
            states: a capture, which any thread may have assembled; None takes the model as it is.
        """
        return self._assembled([state.value for state in states or self._states], copy=True)

    def _assembled(self, flats: Sequence[np.ndarray], *, copy: bool) -> Arrays:
        parameters: Mapping[str, np.ndarray] = self._parameters
        for number, (fragment, flat) in enumerate(zip(self.plan.fragments, flats, strict=True)):
            parameters = put(parameters, fragment, self.layout(number).views(flat.copy() if copy else flat))
        return dict(parameters)

    # ---- merging --------------------------------------------------------------------------------------------------

    def merge(self, order: Merge, payloads: Mapping[str, bytes | memoryview]) -> Merged:
        """Compute one round: outer gradients, merge, outer update, step (paper, Alg. 2 and App. D.2). Changes nothing.

        Delta_m = Theta - theta_m, where the learner sent theta_base - theta_m against the version it held; if that is
        not the newest any more, Theta - theta_base is added.

        Args:
            order: the protocol's decision.
            payloads: encoded outer gradient of each part, by learner.
        """
        state, merger = self._states[order.fragment_id], self._mergers[order.fragment_id]
        left_out: dict[str, str] = {}
        parts = []
        for part in order.parts:
            if (size := len(payloads[part.learner_id])) == merger.up_bytes:
                parts.append(part)
            else:
                left_out[part.learner_id] = f"its value has {size} bytes, where {merger.up_bytes} are expected"
        values = self._values(state, parts, payloads)
        products = merger.inspect(values) if parts else []
        candidates = [Candidate(part, norm) for part, norm in zip(parts, norms(products), strict=True)]
        chosen = choose(candidates, state.rates, self._outlier_factor, left_out)
        while chosen:
            found = Values([values.payloads[i] for i in chosen], [values.moved[i] for i in chosen])
            tokens, steps = [parts[i].tokens for i in chosen], [parts[i].steps for i in chosen]
            weights = token_weights(tokens, steps, self._weights)
            now = State(state.value, state.outer, state.residual)
            update = merger.update(found, subset(products, chosen), weights, now)
            if update.finite:
                rates = [candidates[i].rate for i in chosen]
                return Merged(order.fragment_id, self._next(order, state, update, rates), left_out)
            # each part is finite, yet the result is not: the largest goes, and what is left is tried again
            worst = max(chosen, key=lambda i: (candidates[i].rate, parts[i].learner_id))
            left_out[parts[worst].learner_id] = "its value is so large that the result is not finite"
            chosen.remove(worst)
        return Merged(order.fragment_id, None, left_out)

    def _values(
        self, state: FragmentState, parts: Sequence[Part], payloads: Mapping[str, bytes | memoryview]
    ) -> Values:
        arrays = [np.frombuffer(payloads[part.learner_id], np.uint8) for part in parts]
        older = {p.base_version for p in parts} - {state.version}
        moved = {version: state.value - state.values[version] for version in older}
        return Values(arrays, [moved.get(part.base_version) for part in parts])

    def _next(self, order: Merge, state: FragmentState, update: Update, rates: Sequence[float]) -> FragmentState:
        kept = list(state.values.items())[1 - self._anchor_history :] if self._anchor_history > 1 else []
        values = dict([*kept, (order.global_step, update.state.value)])
        # a learner that did not move, at a learning rate of 0 for example, says nothing of what is usual
        known = (*state.rates, *(rate for rate in rates if rate > 0))[-RATES_KEPT:]
        step, made = update.step.data.toreadonly(), update.state
        base = state.version if step.nbytes else NO_VERSION
        return FragmentState(values, made.outer, made.residual, known, combined(update.digests), base, step)

    # ---- on disk --------------------------------------------------------------------------------------------------

    def packed(self, states: Sequence[FragmentState]) -> tuple[dict[str, Arrays], dict[str, Any]]:
        """A capture as named arrays (`parameters`, `outer`) and plain values; any thread may call it."""
        outer: Arrays = {}
        for fragment_id, state in enumerate(states):
            outer |= {f"{fragment_id}/{name}": np.asarray(leaf) for name, leaf in state.outer.items()}
            if state.residual.size:
                outer[f"{fragment_id}/residual"] = state.residual
        plain = {
            "versions": [state.version for state in states],
            "digests": [state.digest for state in states],
            "rates": [list(state.rates) for state in states],
        }
        return {"parameters": self.parameters(states), "outer": outer}, plain

    def unpacked(self, groups: Mapping[str, Arrays], plain: Mapping[str, Any]) -> list[FragmentState]:
        """The capture that `packed` described; older versions are gone, and so are steps.

        Raises:
            ValueError: these are not values of this model, or not the ones that were saved.
        """
        try:
            return [self._unpacked(number, groups, plain) for number in range(len(self._states))]
        except (KeyError, IndexError) as error:
            raise ValueError(f"it is of another model or another config: {error} is missing") from error

    def _unpacked(self, number: int, groups: Mapping[str, Arrays], plain: Mapping[str, Any]) -> FragmentState:
        flat = self.layout(number).flat(self._cut(groups["parameters"], number))
        digest = self._digest(number, flat)
        if digest != plain["digests"][number]:
            raise ValueError(f"its fragment {number} has another digest than it had when it was saved")
        template = self._mergers[number].first(flat)
        outer = {name: groups["outer"][f"{number}/{name}"] for name in template.outer}
        residual = groups["outer"][f"{number}/residual"] if template.residual.size else template.residual
        rates = tuple(plain["rates"][number])
        return FragmentState({plain["versions"][number]: flat}, outer, residual, rates, digest)


def _arrays(state: FragmentState) -> list[np.ndarray]:
    return [*state.values.values(), *state.outer.values(), state.residual]
