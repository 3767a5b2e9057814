"""The values of a global model: the computation of a merge; global_model.py has its decisions.

The state of a fragment is one immutable FragmentState. `update` makes the next one on any thread, and `publish` puts it
in place. So the model changes only on the thread that publishes, loads and captures, and a capture stays as it was
while the run continues. Memory that no state uses any more is used again (`Buffers`).

It keeps the encoded steps between older versions instead of their values
(docs/decisions/0040-syncer-memory.md).
"""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float64

from diloco_jax.core.codec import Format
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.core.layout import Layout, combined, whole
from diloco_jax.core.merge import PAIRS_MAX, Rule, merge_rules
from diloco_jax.core.outer import NOTHING, Optax, Outer, OuterConfig, make_outer
from diloco_jax.core.passes import (
    Flat,
    Merger,
    Products,
    Squares,
    State,
    Update,
    Values,
    squares_of,
    subset,
    values_of,
)
from diloco_jax.protocol.exclusion import RateHistory
from diloco_jax.protocol.messages import NO_VERSION
from diloco_jax.runtime.model.buffers import Buffers
from diloco_jax.settings.resolved import ResolvedRun
from diloco_jax.training.named import make_transformation

# A disk that writes nothing for this long is given up.
PATIENCE_S = 120.0
# Free arrays that are kept: those of a fragment, and one for a sum of steps.
FREE_MAX = 4
Bytes = bytes | memoryview


class HeldStates:
    """The states of all fragments at one moment, by number, which never change; any thread.

    A fragment that a merge replaces while its snapshot is being written takes additional memory. So a merge that would
    replace a fragment of a bounded capture waits until that fragment is written; fragments that are due next are
    written first. Thus a disk that is slower than the rounds slows them down while it writes, and learners continue to
    train. Giving up the snapshot instead would leave a run on a slow disk without any. A snapshot is given up only if
    no fragment was released for PATIENCE_S; then the run continues.
    """

    def __init__(self, states: Mapping[int, State]) -> None:
        self._states = dict(states)
        self._changed = threading.Condition()
        self._given_up = False

    def read(self, fragment_id: int, value_only: bool = False) -> State:
        """Return a fragment's state, or only its value; ValueError if the capture was given up."""
        with self._changed:
            if self._given_up:
                raise ValueError(
                    f"rounds waited {PATIENCE_S:g} s for it and no fragment was written; the disk is too slow, or hangs"
                )
            state = self._states[fragment_id]
        return State(state.value, {}, NOTHING) if value_only else state

    def release(self, fragment_id: int | None = None) -> None:
        """Release a fragment after its last use, or all fragments."""
        with self._changed:
            for number in [*self._states] if fragment_id is None else [fragment_id]:
                self._states.pop(number, None)
            self._changed.notify_all()

    def admit(self, fragment_id: int) -> None:
        """Wait until a fragment may be replaced."""
        with self._changed:
            while fragment_id in self._states:
                if not self._changed.wait(PATIENCE_S):
                    self._given_up = True
                    self._states.clear()


class Setup(NamedTuple):
    """The settings of the computation."""

    # By fragment: its layout, and the rule for merging each slice, by key.
    layouts: tuple[Layout, ...]
    rules: tuple[Mapping[str, Rule], ...]
    outer: Outer
    up: Format
    down: Format
    # A value's base may be this many versions of its fragment old.
    anchor_history: int
    # A merge computes the products of all pairs for at most this many learners.
    pairs_max: int = PAIRS_MAX

    def first(self, fragment_id: int, flat: Flat) -> State:
        """Return the state of a fragment before its first round."""
        residual = np.zeros(flat.size if self.down != "float32" else 0, np.float32)
        return State(flat, self.outer.init(self.layouts[fragment_id].views(flat)), residual)


class Mark(NamedTuple):
    """Notes on a fragment's newest version: everything that is known without its values."""

    version: int
    digest: int
    history: RateHistory
    # The newest step starts at this version; NO_VERSION if only the whole value can be sent.
    base: int = NO_VERSION


@dataclass(frozen=True, slots=True)
class Capture:
    """A model at one moment, which never changes; any thread may read it."""

    # By fragment.
    marks: tuple[Mark, ...]
    _states: HeldStates

    def state(self, fragment_id: int, *, value_only: bool = False) -> State:
        """Return a fragment's state, or with `value_only` only its value; the caller must not change it."""
        return self._states.read(fragment_id, value_only)

    def value(self, fragment_id: int) -> Flat:
        return self.state(fragment_id, value_only=True).value

    def release(self, fragment_id: int | None = None) -> None:
        """Free a fragment, or all fragments, after the last read."""
        self._states.release(fragment_id)


def outer_of(config: OuterConfig, plan: FragmentPlan) -> Outer:
    """Return a run's outer optimizer, built-in or the user's; ValueError if it cannot update these fragments."""
    if not config.module:
        return make_outer(config)
    shapes = dict(each for fragment in plan.fragments for each in fragment.keys_shapes)
    params = {key: jax.ShapeDtypeStruct(shape, np.float32) for key, shape in shapes.items()}
    return Optax(make_transformation("outer", config.module, config.args, params))


def make_setup(run: ResolvedRun) -> Setup:
    """Return the settings of a run's computation; raises as `outer_of`."""
    config, layouts = run.config, tuple(map(whole, run.fragments))
    rules, outer = merge_rules(run.plan, config.merge), outer_of(config.outer, run.plan)
    wire, history = config.wire, config.protocol.anchor_history
    return Setup(layouts, rules, outer, wire.up, wire.down, history, config.merge.pairs_max)


class FragmentState(NamedTuple):
    """A fragment at one moment; it never changes while there is a reference to it."""

    version: int  # newest version
    # The value, with what the next step needs.
    state: State
    # Older version, oldest first -> the encoded step from it to the next one; without steps, its value.
    older: Mapping[int, np.ndarray]


class Arithmetic:
    """The computations on a whole model; each merge uses `threads` threads."""

    def __init__(self, setup: Setup, threads: int = 1) -> None:
        self.setup = setup
        run = ThreadPoolExecutor(threads, "merge").map if threads > 1 else map
        self._mergers = []
        buffers = Buffers(max(layout.size for layout in setup.layouts), FREE_MAX)
        for layout, rules in zip(setup.layouts, setup.rules, strict=True):
            how = [rules[piece.key] for piece in layout.pieces]
            formats = setup.up, setup.down
            self._mergers.append(Merger(layout, how, setup.outer, *formats, run, buffers.take, setup.pairs_max))
        # The newest bounded capture, while it exists.
        self._bounded: Callable[[], HeldStates | None] = lambda: None
        self._states: dict[int, FragmentState] = {}
        self._inspected: dict[int, tuple[Values, list[Products]]] = {}
        # The values of the last update and their products.
        self._merged: dict[int, tuple[Values, list[Products]]] = {}
        self._made: dict[int, FragmentState] = {}

    def unusable(self, fragment_id: int, value: Bytes) -> str:
        """Return why this cannot be a value of the fragment; "" if it can."""
        size = self.setup.layouts[fragment_id].payload_bytes(self.setup.up)
        return "" if len(value) == size else f"its value has {len(value)} bytes, where {size} are expected"

    def inspect(self, fragment_id: int, payloads: Sequence[Bytes], bases: Sequence[int]) -> Squares:
        """Return the squared norms of the learners' values, and keep the values for `update`.

        The global change since a value's base counts in the merge. It does not count in the value's norm, because it is
        the work of other learners.
        """
        merger, state = self._mergers[fragment_id], self._states[fragment_id]
        moved = {version: self._moved(merger, state, version) for version in set(bases) - {state.version}}
        arrays = [np.frombuffer(payload, np.uint8) for payload in payloads]
        values = Values(arrays, [moved.get(base) for base in bases])
        products = merger.inspect(values)
        self._inspected[fragment_id] = values, products
        found = squares_of(products)
        if late := [i for i, gap in enumerate(values.moved) if gap is not None]:
            of_late = squares_of(merger.inspect(values_of([arrays[i] for i in late])))
            found[late] = np.where(np.isfinite(found[late]), of_late, found[late])
        return found

    def _moved(self, merger: Merger, state: FragmentState, base: int) -> Flat:
        """Return the change from an older version to the newest one."""
        first = state.older[base]
        if self.setup.down == "float32":
            return state.state.value - first
        return merger.total([step for version, step in state.older.items() if version >= base])

    def update(self, fragment_id: int, version: int, chosen: Sequence[int], weights: np.ndarray) -> tuple[bool, int]:
        """Make the fragment's next version; return whether it is finite, and its digest.

        It waits while a snapshot that is being written holds the replaced state (HeldStates).

        Args:
            chosen: Indices of the inspected values.
            weights: float64, one per chosen value, with the sum 1.
        """
        if (held := self._bounded()) is not None:
            held.admit(fragment_id)
        self._merged[fragment_id], update = self._updated(fragment_id, chosen, weights)
        self._made[fragment_id] = self._next(version, self._states[fragment_id], update)
        return update.finite, combined(update.digests)

    def change_with(self, fragment_id: int, chosen: Sequence[int], weights: np.ndarray) -> Flat | None:
        """Return by how much the version that `update` made would differ with these values; None if not finite.

        Args:
            chosen: as for `update`.
            weights: as for `update`.
        """
        _, update = self._updated(fragment_id, chosen, weights)
        return update.state.value - self._made[fragment_id].state.value if update.finite else None

    def _updated(
        self, fragment_id: int, chosen: Sequence[int], weights: np.ndarray
    ) -> tuple[tuple[Values, list[Products]], Update]:
        """Return the chosen values with their products, and the result of a round that merges them."""
        merger = self._mergers[fragment_id]
        values, products = self._inspected[fragment_id]
        found = Values([values.payloads[i] for i in chosen], [values.moved[i] for i in chosen])
        if len(values.payloads) > merger.pairs_max >= len(chosen):
            # Values were excluded, so the others are few enough for products of pairs, which `inspect` did not compute.
            products = merger.inspect(found)
        else:
            products = subset(products, chosen)
        return (found, products), merger.update(found, products, weights, self._states[fragment_id].state)

    def gram(self, fragment_id: int) -> Float64[np.ndarray, "m m"] | None:
        """Return <v_i, v_j> for i <= j of the last update's values, over the tensors that are not averaged.

        The products of a value that was measured from an older version are NaN: they contain the work of other learners
        since then. The result is None if no products of pairs were computed.
        """
        values, products = self._merged[fragment_id]
        found = self._mergers[fragment_id].gram(products)
        late = [i for i, moved in enumerate(values.moved) if moved is not None]
        if found is not None and late:
            found[late], found[:, late] = np.nan, np.nan
        return found

    def _next(self, version: int, before: FragmentState, update: Update) -> FragmentState:
        steps = self.setup.down != "float32"
        left = update.step if steps else before.state.value
        # The newest step is always kept, because it is sent.
        count = max(self.setup.anchor_history - 1, int(steps))
        older = [*before.older.items(), (before.version, left)]
        return FragmentState(version, update.state, dict(older[max(0, len(older) - count) :]))

    def forget(self, fragment_id: int) -> None:
        """Free the inspected values."""
        self._inspected.pop(fragment_id, None)
        self._merged.pop(fragment_id, None)

    def publish(self, fragment_id: int) -> None:
        """Make the result of the fragment's last update its newest version."""
        self._states[fragment_id] = self._made.pop(fragment_id)
        self.forget(fragment_id)

    def capture(self, marks: Sequence[Mark], bounded: bool = False) -> Capture:
        """Capture the present states, for any thread; a merge waits for the release of a bounded capture's fragment."""
        held = HeldStates({number: state.state for number, state in self._states.items()})
        if bounded:
            self._bounded = weakref.ref(held)
        return Capture(tuple(marks), held)

    def load(self, fragment_id: int, version: int, state: State) -> None:
        """Make these arrays the newest and only version; the caller must not change them afterwards."""
        self._states[fragment_id] = FragmentState(version, state, {})

    def restore(self, fragment_id: int, version: int, flat: Flat) -> None:
        """Make this array the newest and only value; outer state stays, and the residual of steps is lost."""
        before = self._states[fragment_id].state
        self.load(fragment_id, version, State(flat, before.outer, np.zeros_like(before.residual)))

    def payload(self, fragment_id: int, base: int = NO_VERSION) -> Bytes:
        """Return the newest version's payload for learners: whole in float32, or the step from version `base`."""
        version, state, older = self._states[fragment_id]
        if base == NO_VERSION:
            return state.value.view(np.uint8).data.toreadonly()
        newest = next(reversed(older), NO_VERSION)
        assert base == newest, f"no step from version {base} of fragment {fragment_id} to {version}, but from {newest}"
        return older[base].data.toreadonly()
