"""One shard's share of a model's values: what a merge computes, apart from what it decides (global_model.py).

All that is known of a fragment is one value that never changes, a FragmentState. `update` makes the next one, on any
thread; `publish` puts it in place. So who publishes, loads and captures on one thread sees the model change there only,
and what was captured stays as it was while the run goes on. Memory that no state shows any more is written again
(`Buffers`).

Of older versions the encoded steps between them are kept, not the values (docs/decisions/0040-syncer-memory.md).
"""

import mmap
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
from diloco_jax.core.shards import Shares, share
from diloco_jax.protocol.messages import NO_VERSION
from diloco_jax.settings.resolved import ResolvedRun
from diloco_jax.training.named import make_transformation

PATIENCE_S = 120.0  # for a disk from which nothing is heard
FREE_MAX = 4  # arrays that wait to be written again: those of a fragment, and one for a sum of steps
Bytes = bytes | memoryview


class HeldStates:
    """The states of a share's fragments at one moment, by number, for nobody to write to; any thread.

    What is replaced while a snapshot of it is written takes memory of its own. So a merge that would replace a fragment
    of a bounded capture waits until that is written; those that are due next are written first. A disk that is slower
    than the rounds thereby slows them down while it writes, and learners train on meanwhile. To give the snapshot up
    instead would leave a run whose disk is always slower without any. Only if nothing was let go of for PATIENCE_S it
    is given up: the run goes on.
    """

    def __init__(self, states: Mapping[int, State]) -> None:
        self._states = dict(states)
        self._changed = threading.Condition()
        self._given_up = False

    def read(self, fragment_id: int, value_only: bool = False) -> State:
        """Return a fragment's state, or a state of nothing but its value; ValueError if the capture was given up."""
        with self._changed:
            if self._given_up:
                raise ValueError(
                    f"rounds waited {PATIENCE_S:g} s for it and no fragment was written; the disk is too slow, or hangs"
                )
            state = self._states[fragment_id]
        return State(state.value, {}, NOTHING) if value_only else state

    def release(self, fragment_id: int | None = None) -> None:
        """Let go of a fragment that is not needed any more, or of all."""
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


class Buffers:
    """Arrays that nobody uses any more, to be written again: fresh memory costs as much as the merge itself.

    An array comes back by itself as soon as nobody refers to it or to a view of it. So whatever is captured, on its way
    to a learner or to a disk stays as it was, and nobody must say when it is not needed any more. The largest array has
    `size` elements.
    """

    def __init__(self, size: int) -> None:
        self._bytes = _whole_pages(4 * max(1, size))
        self._free: list[mmap.mmap] = []

    def take(self, size: int) -> Flat:
        """Return an array of this size with any content."""
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = self._free.pop() if self._free else mmap.mmap(-1, self._bytes, kind)
        used = _whole_pages(4 * size)
        if used < self._bytes and hasattr(mmap, "MADV_DONTNEED"):  # what a larger array left behind
            memory.madvise(mmap.MADV_DONTNEED, used, self._bytes - used)
        array = np.frombuffer(memory, np.float32, size)
        weakref.finalize(array, self._give, memory).atexit = False
        return array

    def _give(self, memory: mmap.mmap) -> None:
        if len(self._free) < FREE_MAX:
            self._free.append(memory)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class Setup(NamedTuple):
    """The settings that every process that computes must know."""

    shares: Shares
    outer: Outer
    up: Format
    down: Format
    anchor_history: int  # versions of a fragment against which a value can be read

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
        else:  # one leaf per slice, of which this shard has some, and counters, of which each has its own
            part = shares.parts[shard][fragment_id]
            names = self.outer.init(part.views(np.zeros(part.size, np.float32))) if part.pieces else {}
            outer = {name: np.array(state.outer[name]) for name in names}
        return State(shares.cut(fragment_id, shard, state.value), outer, residual)

    def join(self, fragment_id: int, parts: Mapping[int, State]) -> State:
        """Return the whole state of parts by shard; with one shard its own arrays."""
        value = self.shares.join(fragment_id, {shard: part.value for shard, part in parts.items()})
        residuals = {shard: part.residual for shard, part in parts.items() if part.residual.size}
        residual = self.shares.join(fragment_id, residuals) if residuals else np.empty(0, np.float32)
        outer: dict[str, np.ndarray] = {}
        for name in {name: 0 for part in parts.values() for name in part.outer}:
            found = {shard: part.outer[name] for shard, part in parts.items() if name in part.outer}
            cut = self.outer.elementwise
            outer[name] = self.shares.join(fragment_id, found) if cut else next(iter(found.values()))
        return State(value, outer, residual)


def make_shares(run: ResolvedRun) -> Shares:
    config = run.config
    return share(run.plan, config.merge, max(1, config.syncer.shards), cut=config.outer.elementwise)


def outer_of(config: OuterConfig, plan: FragmentPlan) -> Outer:
    """Return a run's outer optimizer, built-in or the user's own; ValueError if that cannot update these fragments."""
    if not config.module:
        return make_outer(config)
    shapes = dict(each for fragment in plan.fragments for each in fragment.keys_shapes)
    params = {key: jax.ShapeDtypeStruct(shape, np.float32) for key, shape in shapes.items()}
    return Optax(make_transformation("outer", config.module, config.args, params))


def make_setup(run: ResolvedRun) -> Setup:
    """Return the settings of the processes that merge. Raises as `outer_of`."""
    config = run.config
    outer = outer_of(config.outer, run.plan)
    return Setup(make_shares(run), outer, config.wire.up, config.wire.down, config.protocol.anchor_history)


class FragmentState(NamedTuple):
    """A shard's part of a fragment at one moment. Nothing in it is ever changed while somebody may see it."""

    version: int  # the newest
    state: State  # its value, with what the next step needs
    # by older version, oldest first: the encoded step from it to the next one; without steps its value
    older: Mapping[int, np.ndarray]


class ModelShare:
    """One shard's part of every fragment, which is never asked for a fragment of which it has nothing."""

    def __init__(self, setup: Setup, shard: int, threads: int = 1) -> None:
        self._setup = setup
        run = ThreadPoolExecutor(threads, "merge").map if threads > 1 else map
        self._mergers = []
        buffers = Buffers(max(layout.size for layout in setup.shares.parts[shard]))
        for layout, rules in zip(setup.shares.parts[shard], setup.shares.rules, strict=True):
            how = [rules[piece.key] for piece in layout.pieces]
            self._mergers.append(Merger(layout, how, setup.outer, setup.up, setup.down, run, buffers.take))
        self._bounded: Callable[[], HeldStates | None] = lambda: None  # the newest bounded capture, if anybody has it
        self._states: dict[int, FragmentState] = {}
        self._inspected: dict[int, tuple[Values, list[Products]]] = {}
        self._made: dict[int, FragmentState] = {}

    def inspect(self, fragment_id: int, parts: Sequence[Bytes], bases: Sequence[int]) -> Squares:
        """Measure the learners' values, and keep them for `update`.

        What others did since the version against which a value is, its base, counts in the merge, but not in its norm:
        it is no work of that learner.
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
        """Return what the newest version has moved since an older one."""
        first = state.older[base]
        if self._setup.down == "float32":
            return state.state.value - first
        return merger.total([step for version, step in state.older.items() if version >= base])

    def update(
        self, fragment_id: int, version: int, chosen: Sequence[int], weights: np.ndarray
    ) -> tuple[bool, list[int]]:
        """Make the fragment's next version; return whether it is finite, and the digests of its leaves.

        Waits while a snapshot that is being written holds what it replaces (HeldStates).

        Args:
            chosen: indices of the inspected values.
            weights: float64, one for each of the chosen, with the sum 1.
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
        count = max(self._setup.anchor_history - 1, int(steps))  # the newest step is sent, whatever is read
        older = [*before.older.items(), (before.version, left)]
        return FragmentState(version, update.state, dict(older[max(0, len(older) - count) :]))

    def forget(self, fragment_id: int) -> None:
        """Let go of what was inspected."""
        self._inspected.pop(fragment_id, None)

    def publish(self, fragment_id: int) -> None:
        """Put in place what the last update of the fragment made."""
        self._states[fragment_id] = self._made.pop(fragment_id)
        self.forget(fragment_id)

    def capture(self, bounded: bool = False) -> HeldStates:
        """Capture the share as it is now, for any thread; if bounded, whoever replaces a part waits for its release."""
        held = HeldStates({number: state.state for number, state in self._states.items()})
        if bounded:
            self._bounded = weakref.ref(held)
        return held

    def load(self, fragment_id: int, version: int, state: State) -> None:
        """Make these arrays, which nobody may write to any more, the newest and only version."""
        self._states[fragment_id] = FragmentState(version, state, {})

    def restore(self, fragment_id: int, version: int, flat: Flat) -> None:
        """Make this array the newest and only value; outer state stays, and what steps left out so far is lost."""
        before = self._states[fragment_id].state
        self.load(fragment_id, version, State(flat, before.outer, np.zeros_like(before.residual)))

    def payload(self, fragment_id: int, base: int) -> Bytes:
        """Return the newest version as it travels to learners: whole in float32, or the step from version `base`."""
        version, state, older = self._states[fragment_id]
        if base == NO_VERSION:
            return state.value.view(np.uint8).data.toreadonly()
        newest = next(reversed(older), NO_VERSION)
        assert base == newest, f"no step from version {base} of fragment {fragment_id} to {version}, but from {newest}"
        return older[base].data.toreadonly()
