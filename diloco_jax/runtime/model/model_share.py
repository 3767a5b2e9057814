"""One shard's share of a model's values: the computation of a merge; global_model.py has its decisions.

The state of a fragment is one immutable FragmentState. `update` makes the next one on any thread, and `publish` puts it
in place. So the model changes only on the thread that publishes, loads and captures, and a capture stays as it was
while the run continues. Memory that no state uses any more is used again (`Buffers`).

The share keeps the encoded steps between older versions instead of their values
(docs/decisions/0040-syncer-memory.md).
"""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import numpy as np

from diloco_jax.core.codec import Format
from diloco_jax.core.fragments import FragmentPlan
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
from diloco_jax.core.shards import Shares
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
    """The states of a share's fragments at one moment, by number, which never change; any thread.

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
    """The settings that every computing process needs."""

    shares: Shares
    outer: Outer
    up: Format
    down: Format
    # A value's base may be this many versions of its fragment old.
    anchor_history: int

    def first(self, fragment_id: int, flat: Flat) -> State:
        """Return the state of a whole fragment before its first round."""
        residual = np.zeros(flat.size if self.down != "float32" else 0, np.float32)
        return State(flat, self.outer.init(self.shares.wholes[fragment_id].views(flat)), residual)

    def cut(self, fragment_id: int, shard: int, state: State) -> State:
        """Return the shard's part of a whole state: new arrays, but of one shard the same ones."""
        shares = self.shares
        if shares.count == 1:
            return state
        residual = shares.cut(fragment_id, shard, state.residual) if state.residual.size else state.residual
        if self.outer.elementwise:
            outer = {name: shares.cut(fragment_id, shard, flat) for name, flat in state.outer.items()}
        else:
            # The state has one leaf per slice, and this shard has some of the slices. Each shard has its own counters.
            part = shares.parts[shard][fragment_id]
            names = self.outer.init(part.views(np.zeros(part.size, np.float32))) if part.pieces else {}
            outer = {name: np.array(state.outer[name]) for name in names}
        return State(shares.cut(fragment_id, shard, state.value), outer, residual)

    def join(self, fragment_id: int, parts: Mapping[int, State]) -> State:
        """Join the parts of a state by shard; with one shard the result shares its arrays."""
        value = self.shares.join(fragment_id, {shard: part.value for shard, part in parts.items()})
        residuals = {shard: part.residual for shard, part in parts.items() if part.residual.size}
        residual = self.shares.join(fragment_id, residuals) if residuals else np.empty(0, np.float32)
        outer: dict[str, np.ndarray] = {}
        for name in {name: 0 for part in parts.values() for name in part.outer}:
            found = {shard: part.outer[name] for shard, part in parts.items() if name in part.outer}
            cut = self.outer.elementwise
            outer[name] = self.shares.join(fragment_id, found) if cut else next(iter(found.values()))
        return State(value, outer, residual)


def outer_of(config: OuterConfig, plan: FragmentPlan) -> Outer:
    """Return a run's outer optimizer, built-in or the user's; ValueError if it cannot update these fragments."""
    if not config.module:
        return make_outer(config)
    shapes = dict(each for fragment in plan.fragments for each in fragment.keys_shapes)
    params = {key: jax.ShapeDtypeStruct(shape, np.float32) for key, shape in shapes.items()}
    return Optax(make_transformation("outer", config.module, config.args, params))


def make_setup(run: ResolvedRun) -> Setup:
    """Return the settings of a run's computing processes; raises as `outer_of`."""
    config = run.config
    outer = outer_of(config.outer, run.plan)
    return Setup(run.shares(), outer, config.wire.up, config.wire.down, config.protocol.anchor_history)


class FragmentState(NamedTuple):
    """A shard's part of a fragment at one moment; it never changes while there is a reference to it."""

    version: int  # newest version
    # The value, with what the next step needs.
    state: State
    # Older version, oldest first -> the encoded step from it to the next one; without steps, its value.
    older: Mapping[int, np.ndarray]


class ModelShare:
    """One shard's part of every fragment; callers use only fragments that the shard holds."""

    def __init__(self, setup: Setup, shard: int, threads: int = 1) -> None:
        self._setup = setup
        run = ThreadPoolExecutor(threads, "merge").map if threads > 1 else map
        self._mergers = []
        buffers = Buffers(max(layout.size for layout in setup.shares.parts[shard]), FREE_MAX)
        for layout, rules in zip(setup.shares.parts[shard], setup.shares.rules, strict=True):
            how = [rules[piece.key] for piece in layout.pieces]
            self._mergers.append(Merger(layout, how, setup.outer, setup.up, setup.down, run, buffers.take))
        # The newest bounded capture, while it exists.
        self._bounded: Callable[[], HeldStates | None] = lambda: None
        self._states: dict[int, FragmentState] = {}
        self._inspected: dict[int, tuple[Values, list[Products]]] = {}
        self._made: dict[int, FragmentState] = {}

    def inspect(self, fragment_id: int, parts: Sequence[Bytes], bases: Sequence[int]) -> Squares:
        """Return the squared norms of the learners' values, and keep the values for `update`.

        The global change since a value's base counts in the merge. It does not count in the value's norm, because it is
        the work of other learners.
        """
        merger, state = self._mergers[fragment_id], self._states[fragment_id]
        moved = {version: self._moved(merger, state, version) for version in set(bases) - {state.version}}
        arrays = [np.frombuffer(payload, np.uint8) for payload in parts]
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
        if self._setup.down == "float32":
            return state.state.value - first
        return merger.total([step for version, step in state.older.items() if version >= base])

    def update(
        self, fragment_id: int, version: int, chosen: Sequence[int], weights: np.ndarray
    ) -> tuple[bool, list[int]]:
        """Make the fragment's next version; return whether it is finite, and the digests of its leaves.

        It waits while a snapshot that is being written holds the replaced state (HeldStates).

        Args:
            chosen: Indices of the inspected values.
            weights: float64, one per chosen value, with the sum 1.
        """
        merger, before = self._mergers[fragment_id], self._states[fragment_id]
        if (held := self._bounded()) is not None:
            held.admit(fragment_id)
        values, products = self._inspected[fragment_id]
        found = Values([values.payloads[i] for i in chosen], [values.moved[i] for i in chosen])
        update = merger.update(found, subset(products, chosen), weights, before.state)
        self._made[fragment_id] = self._next(version, before, update)
        return update.finite, update.digests

    def _next(self, version: int, before: FragmentState, update: Update) -> FragmentState:
        steps = self._setup.down != "float32"
        left = update.step if steps else before.state.value
        # The newest step is always kept, because it is sent.
        count = max(self._setup.anchor_history - 1, int(steps))
        older = [*before.older.items(), (before.version, left)]
        return FragmentState(version, update.state, dict(older[max(0, len(older) - count) :]))

    def forget(self, fragment_id: int) -> None:
        """Free the inspected values."""
        self._inspected.pop(fragment_id, None)

    def publish(self, fragment_id: int) -> None:
        """Make the result of the fragment's last update its newest version."""
        self._states[fragment_id] = self._made.pop(fragment_id)
        self.forget(fragment_id)

    def capture(self, bounded: bool = False) -> HeldStates:
        """Capture the present states, for any thread; a merge waits for the release of a bounded capture's fragment."""
        held = HeldStates({number: state.state for number, state in self._states.items()})
        if bounded:
            self._bounded = weakref.ref(held)
        return held

    def load(self, fragment_id: int, version: int, state: State) -> None:
        """Make these arrays the newest and only version; the caller must not change them afterwards."""
        self._states[fragment_id] = FragmentState(version, state, {})

    def restore(self, fragment_id: int, version: int, flat: Flat) -> None:
        """Make this array the newest and only value; outer state stays, and the residual of steps is lost."""
        before = self._states[fragment_id].state
        self.load(fragment_id, version, State(flat, before.outer, np.zeros_like(before.residual)))

    def payload(self, fragment_id: int, base: int) -> Bytes:
        """Return the newest version's payload for learners: whole in float32, or the step from version `base`."""
        version, state, older = self._states[fragment_id]
        if base == NO_VERSION:
            return state.value.view(np.uint8).data.toreadonly()
        newest = next(reversed(older), NO_VERSION)
        assert base == newest, f"no step from version {base} of fragment {fragment_id} to {version}, but from {newest}"
        return older[base].data.toreadonly()
