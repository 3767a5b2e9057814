"""The global model: the newest version of every fragment, and the merge that makes the next one.

It is placed between the syncer machine, which decides which learners a round asks, and an Arithmetic, which computes.
`protocol/exclusion.py` decides from norms alone which values are excluded, so no array need be in this process.

The model changes only on the thread that publishes, restores and captures. A capture stays as it was while the run
continues.

A version equals the previous version plus the decoded step, exactly. So a learner with the previous version that
receives the step has the same bits as this model.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from diloco_jax.core.drift import Drift, drift_of
from diloco_jax.core.fragments import FragmentPlan, Slice, whole
from diloco_jax.core.layout import Layout, combined
from diloco_jax.core.merge import MergeConfig, WeightScheme, corpus_weights, token_weights
from diloco_jax.core.passes import Flat, State, norms
from diloco_jax.protocol.effects import Contribution, Merge
from diloco_jax.protocol.exclusion import (
    Decision,
    Evidence,
    MeasuredValue,
    Outlier,
    RateHistory,
    anchor_problem,
    decide,
    evidence_of,
    exclude_largest,
    next_history,
    recall,
    usual_elsewhere,
)
from diloco_jax.protocol.messages import NO_VERSION
from diloco_jax.runtime.model.arithmetic import Arithmetic, Bytes, Capture, Mark
from diloco_jax.runtime.model.cuts import Cuts, ModelVersion
from diloco_jax.runtime.records.checkpoint import PARAMETERS, SavedPart
from diloco_jax.settings.resolved import ResolvedRun

Arrays = dict[str, np.ndarray]
Parameters = Iterable[tuple[str, np.ndarray]]  # path, value
BLOCK = 1 << 20  # elements
OUTER = "outer"  # snapshot group
# Key of a snapshot -> field of each fragment's mark, and of its history.
PLAIN_MARKS = {"versions": "version", "digests": "digest"}
PLAIN_HISTORIES = {"rates": "rates", "peaks": "peaks", "odd": "outliers", "elsewhere": "elsewhere"}


class Subtracted(NamedTuple):
    """The effect of one contribution in a merge."""

    learner_id: str
    fragment_id: int
    # The change that the new value would have without it, float32.
    change: Flat


class Merged(NamedTuple):
    """The outcome of a merge."""

    fragment_id: int
    # None if every value was excluded: then the fragment stays as it is.
    state: Mark | None
    # Learner -> why its value was excluded.
    excluded: dict[str, str]
    # The fragment's next history.
    history: RateHistory
    evidence: Evidence
    # By merged learner; empty if fewer than two were merged.
    drift: Mapping[str, Drift] = MappingProxyType({})
    # None if nobody asked for it, or the learner was not merged together with others.
    subtracted: Subtracted | None = None


class GlobalModel:
    """Newest version of every fragment, with the versions that learners may still refer to.

    Args:
        parameters: Paths and initial values, float32, unsharded; each value is freed before the next one is drawn.
        arithmetic: Holds the values; its present ones are replaced by the initial ones.
        merge: limits and shares of a merge.
    """

    def __init__(
        self,
        plan: FragmentPlan,
        parameters: Parameters,
        arithmetic: Arithmetic,
        weights: WeightScheme,
        merge: MergeConfig,
    ) -> None:
        self.plan = plan
        self.setup = arithmetic.setup
        self._arithmetic = arithmetic
        self._weights: WeightScheme = weights
        self._merge = merge
        self._cuts = Cuts(self.setup.layouts, self.setup.down)
        self._marks: list[Mark] = []
        self._lengths: list[float] = []
        self.begin(parameters)

    def begin(self, parameters: Parameters) -> None:
        """Start from initial values, which become the fragments and are not kept otherwise."""
        flats = self._flats(parameters)
        sizes, squares, self._marks = [flat.size for flat in flats], [], []
        flats.reverse()
        for number in range(len(sizes)):
            flat, layout = flats.pop(), self.layout(number)
            self._arithmetic.load(number, 0, self.setup.first(number, flat))
            self._marks.append(Mark(0, self._digest(number, flat), RateHistory()))
            # The lengths come from the initial values, so that every process and every replay has the same.
            leaves = (flat[layout.where(leaf)].astype(float) for leaf in layout.leaves)
            squares.append(math.fsum(float(np.add.reduce(leaf**2)) for leaf in leaves))
        mean = math.fsum(squares) / max(1, sum(sizes))
        self._lengths = [math.sqrt(max(own, size * mean)) for own, size in zip(squares, sizes, strict=True)]

    def _flats(self, parameters: Parameters) -> list[np.ndarray]:
        """Return the value of each fragment."""
        flats, targets = [], dict[str, list[tuple[Slice, np.ndarray]]]()
        for number, fragment in enumerate(self.plan.fragments):
            flats.append(np.empty(self.layout(number).size, np.float32))
            views = self.layout(number).views(flats[-1])
            for piece in fragment.slices:
                targets.setdefault(piece.path, []).append((piece, views[piece.key]))
        for path, value in parameters:
            if value.shape != self.plan.shapes[path]:
                raise ValueError(f"parameter '{path}' has shape {value.shape}, the plan needs {self.plan.shapes[path]}")
            for piece, view in targets.pop(path, ()):
                view[...] = value[piece.at]
            # This frees the value before the next one is made.
            del value
        if targets:
            raise ValueError(f"there are no initial values of parameter '{next(iter(targets))}'")
        return flats

    def _digest(self, fragment_id: int, flat: np.ndarray) -> int:
        return combined(self.layout(fragment_id).leaf_digests(flat))

    def layout(self, fragment_id: int) -> Layout:
        """Return the layout of a fragment in flat arrays and payloads."""
        return self.setup.layouts[fragment_id]

    def delta_bytes(self, fragment_id: int) -> int:
        """Return the size of an encoded step in bytes; 0 if whole values travel."""
        return self.layout(fragment_id).payload_bytes(self.setup.down) if self.setup.down != "float32" else 0

    def value_bytes(self, fragment_id: int) -> int:
        """Return the size of a whole value's payload in bytes."""
        return 4 * self.layout(fragment_id).size

    def payload(self, fragment_id: int, base: int = NO_VERSION) -> Bytes:
        """Return the newest version's payload for learners: whole in float32, or the step from version `base`."""
        return self._arithmetic.payload(fragment_id, base)

    def version(self, fragment_id: int, base: int = NO_VERSION) -> ModelVersion:
        """Return the newest version for learners: whole in float32, or the step from version `base`."""
        payload, value = self.payload(fragment_id, base), self.capture().value(fragment_id)
        return self._cuts.version(fragment_id, payload, value, is_whole=base == NO_VERSION)

    @property
    def versions(self) -> list[int]:
        return [mark.version for mark in self._marks]

    @property
    def digests(self) -> list[int]:
        return [mark.digest for mark in self._marks]

    def capture(self, bounded: bool = False) -> Capture:
        """Capture the present model; if bounded, a merge waits before it replaces a held fragment."""
        return self._arithmetic.capture(self._marks, bounded)

    def load(self, capture: Capture) -> None:
        """Load the model of a capture; older versions and their steps are dropped."""
        for number, mark in enumerate(capture.marks):
            self._load(number, mark, capture.state(number))

    def _load(self, number: int, mark: Mark, state: State) -> None:
        self._arithmetic.load(number, mark.version, state)
        self._marks[number] = mark._replace(base=NO_VERSION)

    def publish(self, merged: Merged) -> None:
        """Put a merge's result in place; if every value was excluded, only the fragment's history changes."""
        if merged.state is not None:
            self._arithmetic.publish(merged.fragment_id)
        mark = merged.state or self._marks[merged.fragment_id]
        elsewhere = usual_elsewhere(self.histories, self._sizes, merged.fragment_id)
        self._marks[merged.fragment_id] = mark._replace(history=merged.history._replace(elsewhere=elsewhere))

    @property
    def _sizes(self) -> list[int]:
        return [self.layout(number).size for number in range(len(self._marks))]

    @property
    def histories(self) -> list[RateHistory]:
        """The rate history of each fragment."""
        return [mark.history for mark in self._marks]

    @histories.setter
    def histories(self, histories: Sequence[RateHistory]) -> None:
        self._marks = [mark._replace(history=history) for mark, history in zip(self._marks, histories, strict=True)]

    def recall(self, fragment_id: int, evidence: Evidence, contributions: Sequence[Contribution]) -> None:
        """Put a recorded round into its fragment's history; the values stay as they are."""
        history = recall(self.histories, self._sizes, fragment_id, evidence, contributions)
        self._marks[fragment_id] = self._marks[fragment_id]._replace(history=history)

    def restore(self, fragment_id: int, version: int, payload: Bytes) -> None:
        """Make a value that this syncer or an earlier epoch of it sent the newest version of its fragment.

        The outer state stays as it is, because only the lost process had a newer one. The residual of its steps is
        lost. The history of rates follows the tape, which `recall` repeats.

        Raises:
            ValueError: The payload is not a float32 encoding of this fragment.
        """
        flat = self._flat(fragment_id, payload)
        if flat is None:
            raise ValueError(f"{len(payload)} bytes are not a value of fragment {fragment_id}")
        self._arithmetic.restore(fragment_id, version, flat.copy())
        mark = self._marks[fragment_id]
        self._marks[fragment_id] = mark._replace(
            version=version, digest=self._digest(fragment_id, flat), base=NO_VERSION
        )

    def fits(self, fragment_id: int, digest: int, payload: Bytes) -> bool:
        """Tell whether a payload can be a value of this fragment, and has this digest."""
        flat = self._flat(fragment_id, payload)
        return flat is not None and self._digest(fragment_id, flat) == digest

    def anchor_problem(self, fragment_id: int, version: int, payload: Bytes) -> str:
        """Return why a payload that fits cannot be a newer version of this fragment; "" if it can."""
        flat, mark = self._flat(fragment_id, payload), self._marks[fragment_id]
        assert flat is not None, "a payload that does not fit"
        capture = self.capture()
        try:
            distance = _distance(flat, capture.value(fragment_id))
        finally:
            capture.release()
        length = self._lengths[fragment_id]
        return anchor_problem(distance, version - mark.version, mark.history, length, self._merge.outlier_factor)

    def _flat(self, fragment_id: int, payload: Bytes) -> np.ndarray | None:
        if not 0 <= fragment_id < len(self._marks) or len(payload) != self.value_bytes(fragment_id):
            return None
        return np.frombuffer(payload, "<f4")

    def slices(self, capture: Capture, fragment_id: int) -> Arrays:
        """Return a fragment's value as arrays of its slices, by key; the caller must not change them."""
        return self.layout(fragment_id).views(capture.value(fragment_id))

    def parameters(self, capture: Capture | None = None) -> Arrays:
        """Return the whole model of a capture, or as it is, as new arrays by path."""
        moment = capture or self.capture()
        parameters = {path: np.zeros(shape, np.float32) for path, shape in self.plan.shapes.items()}
        for number, fragment in enumerate(self.plan.fragments):
            views = self.layout(number).views(moment.value(number))
            for piece in fragment.slices:
                parameters[piece.path][piece.at] = views[piece.key]
        return parameters

    def merge(
        self, order: Merge, payloads: Mapping[str, Any], decided: Collection[str] | None = None, without: str = ""
    ) -> Merged:
        """Compute one round: outer gradients, merge, outer update, step (paper, Alg. 2 and App. D.2). Changes nothing.

        Delta_m = Theta - theta_m, where the learner sent theta_base - theta_m against the version it held; if that is
        not the newest any more, Theta - theta_base is added.

        Args:
            payloads: encoded outer gradient of each part, by learner; or what the arithmetic knows it by.
            decided: whom the run left out, which a replay repeats; None to decide now.
            without: a learner whose part in the new value is to be returned too; "" for none.
        """
        fragment_id, mark, arithmetic = order.fragment_id, self._marks[order.fragment_id], self._arithmetic
        unusable = {p.learner_id: arithmetic.unusable(fragment_id, payloads[p.learner_id]) for p in order.contributions}
        excluded = {name: reason for name, reason in unusable.items() if reason}
        excluded |= {name: "the run left it out" for name in decided or ()}
        parts = [each for each in order.contributions if each.learner_id not in excluded]
        values = self._measure(fragment_id, parts, payloads)
        length, factor = self._lengths[fragment_id], self._merge.outlier_factor if decided is None else 0.0
        decision = decide(values, mark.history, length, factor)
        digest, overflows = self._update(order, values, decision), 0
        while digest is None and decision.merged:
            decision, overflows = exclude_largest(decision, values), overflows + 1
            digest = self._update(order, values, decision)
        excluded |= decision.excluded
        history = next_history(mark.history, decision, values)
        evidence = evidence_of(values, mark.history, length, factor, overflows, excluded)
        if digest is None:
            arithmetic.forget(fragment_id)
            return Merged(fragment_id, None, excluded, history, evidence)
        base = mark.version if self.delta_bytes(fragment_id) else NO_VERSION
        drift = self._drift(fragment_id, [values[i] for i in decision.merged])
        new = Mark(order.global_step, digest, history, base)
        subtracted = self._subtract(fragment_id, values, decision, without) if without else None
        return Merged(fragment_id, new, excluded, history, evidence, drift, subtracted)

    def _subtract(
        self, fragment_id: int, values: Sequence[MeasuredValue], decision: Decision, name: str
    ) -> Subtracted | None:
        others = [i for i in decision.merged if values[i].contribution.learner_id != name]
        if not 0 < len(others) < len(decision.merged):
            return None
        weights = self._weights_of([values[i] for i in others])
        change = self._arithmetic.change_with(fragment_id, others, weights)
        return None if change is None else Subtracted(name, fragment_id, change)

    def _measure(
        self, fragment_id: int, parts: Sequence[Contribution], payloads: Mapping[str, Any]
    ) -> list[MeasuredValue]:
        """Return the learners' parts with the norms of their values, which the arithmetic keeps for `_update`."""
        if not parts:
            return []
        values, bases = [payloads[part.learner_id] for part in parts], [part.base_version for part in parts]
        squares = self._arithmetic.inspect(fragment_id, values, bases)
        return [MeasuredValue(part, norm) for part, norm in zip(parts, norms(squares), strict=True)]

    def _update(self, order: Merge, values: Sequence[MeasuredValue], decision: Decision) -> int | None:
        """Compute the next version; returns its digest, None if it is not finite or no value is merged."""
        if not decision.merged:
            return None
        weights = self._weights_of([values[i] for i in decision.merged])
        finite, digest = self._arithmetic.update(order.fragment_id, order.global_step, list(decision.merged), weights)
        return digest if finite else None

    def _weights_of(self, merged: Sequence[MeasuredValue]) -> np.ndarray:
        parts, merge = [value.contribution for value in merged], self._merge
        weights = token_weights([part.tokens for part in parts], [part.steps for part in parts], self._weights)
        return corpus_weights(weights, [part.corpus for part in parts], merge.shares, merge.share_max)

    def _drift(self, fragment_id: int, merged: Sequence[MeasuredValue]) -> dict[str, Drift]:
        """Return the drift of each value of the last update; nothing that is merged or recorded depends on it."""
        norms, weights = [value.norm for value in merged], self._weights_of(merged)
        found = drift_of(norms, weights, self._arithmetic.gram(fragment_id))
        return dict(zip((value.contribution.learner_id for value in merged), found, strict=False))

    def pieces(self, capture: Capture, *, value_only: bool = False) -> Iterator[SavedPart]:
        """Yield the content of a capture's snapshot, fragment by fragment, and free each; any thread may call it.

        The oldest version comes first: rounds replace fragments in this order.
        """
        for number in sorted(range(len(capture.marks)), key=lambda each: capture.marks[each].version):
            state = capture.state(number, value_only=value_only)
            views = self.layout(number).views(state.value)
            for where in self.plan.fragments[number].slices:
                yield SavedPart(PARAMETERS, where, self.plan.shapes[where.path], views[where.key])
            kept = {f"{number}/{name}": np.asarray(leaf) for name, leaf in state.outer.items()}
            if state.residual.size:
                kept[f"{number}/residual"] = state.residual
            for name in list(kept):
                yield SavedPart(OUTER, whole(name), kept[name].shape, kept.pop(name))
            del state, views
            capture.release(number)
        for path, shape in self.plan.shapes.items():
            if not math.prod(shape):
                yield SavedPart(PARAMETERS, whole(path), shape, np.zeros(shape, np.float32))

    def plain(self, capture: Capture) -> dict[str, Any]:
        """Return the plain values in a capture's snapshot, beside its arrays."""
        marks, histories = capture.marks, [mark.history for mark in capture.marks]
        plain = {key: [getattr(mark, name) for mark in marks] for key, name in PLAIN_MARKS.items()}
        return plain | {key: [getattr(each, name) for each in histories] for key, name in PLAIN_HISTORIES.items()}

    def load_saved(self, read: Callable[[str, Slice], np.ndarray], plain: Mapping[str, Any]) -> None:
        """Load a snapshot, fragment by fragment; older versions and their steps are dropped.

        ValueError if `read` gives other values than those that were saved; some may be here by then.
        """
        for number, fragment in enumerate(self.plan.fragments):
            flat = np.empty(self.layout(number).size, np.float32)
            views = self.layout(number).views(flat)
            for where in fragment.slices:
                views[where.key][...] = read(PARAMETERS, where)
            digest = self._digest(number, flat)
            if digest != plain["digests"][number]:
                raise ValueError(f"its fragment {number} has another digest than it had when it was saved")
            template = self.setup.first(number, flat)
            outer = {name: read(OUTER, whole(f"{number}/{name}")) for name in template.outer}
            residual = read(OUTER, whole(f"{number}/residual")) if template.residual.size else template.residual
            outliers = tuple(Outlier(*each) for each in plain["odd"][number])
            rates, peaks = tuple(plain["rates"][number]), tuple(plain["peaks"][number])
            history = RateHistory(rates, peaks, outliers, plain["elsewhere"][number])
            mark = Mark(plain["versions"][number], digest, history)
            self._load(number, mark, State(flat, outer, residual))


def _distance(first: np.ndarray, second: np.ndarray) -> float:
    """Return the norm of the difference of two flat values, in blocks, since fragments may be large."""
    squares = []
    for at in range(0, first.size, BLOCK):
        difference = first[at : at + BLOCK].astype(float) - second[at : at + BLOCK]
        squares.append(float(np.add.reduce(difference**2)))
    total = sum(squares)
    return math.sqrt(total) if math.isfinite(total) else math.inf


def make_model(run: ResolvedRun, parameters: Parameters, arithmetic: Arithmetic) -> GlobalModel:
    return GlobalModel(run.plan, parameters, arithmetic, run.config.weights, run.config.merge)
