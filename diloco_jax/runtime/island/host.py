"""One process of an island, which obeys its learner: staged copies, adoptions, whole states.

An island of one process has one `Host`. On an island of several processes each has one, and all do the same in the same
order, because their devices run one program together. The leader has a `LeadingHost`, which sends every command to the
other hosts first (leader.py, follower.py).
"""

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np

from diloco_jax.core import codec
from diloco_jax.core.codec import Bytes
from diloco_jax.core.fragments import Fragment
from diloco_jax.core.layout import whole
from diloco_jax.protocol.messages import (
    NO_VERSION,
    SCORES_MAX,
    WITHOUT,
    AnchorValue,
    FragmentValue,
    GlobalFragment,
    Metric,
    Score,
)
from diloco_jax.runtime.island.adoptions import Adoptions, ArrivedValue, GlobalValues, Values
from diloco_jax.runtime.island.blocks import IslandBlocks
from diloco_jax.runtime.island.evaluation import Change, Evaluation, failed_score
from diloco_jax.runtime.island.loader_state import Loader, bounded, restored
from diloco_jax.runtime.island.saved_states import Leaves, OwnStates, StateName
from diloco_jax.settings.resolved import ResolvedRun
from diloco_jax.training.exchange.exchange import PlacedValue
from diloco_jax.training.island_state import IslandState, StagedUpdate
from diloco_jax.training.whole_state.finite import check_finite
from diloco_jax.training.whole_state.moving import MovingLayout, MovingState
from diloco_jax.training.whole_state.staging import StagedState
from diloco_jax.transport import commands
from diloco_jax.transport.link import Payload

# Values that may wait on the devices for their adoption. The islands of a run make one version for each global step,
# and a slow island's step takes as long as a few of them.
PLACED_MAX = 2
Ranges = Sequence[tuple[int, int]]
# A built-in step reports under this name how long it waited for samples.
DATA_WAIT = "data_wait_s"
# Gets progress in words for people.
Report = Callable[[str], object]
# Returns None while a state is being written, then "" if it was saved, else the error.
SaveResult = Callable[[], str | None]

log = logging.getLogger(__name__)


def _finite_leaf(staged: StagedState, name: str) -> Any:
    """Wait for a leaf of a state that travels; UnusableState if no other island may get it."""
    array = staged.leaf(name)
    check_finite(name, array)
    return array


class Host:
    """The devices of one process, with their copies and states in flight.

    One thread at a time may call a method, except for those marked "any thread".

    Args:
        run: The run, resolved for the model of `island`.
        island: The exchanged state, or this process's part of it.
        compile_step: Compiles the owner's inner step; None if this process cannot.
        evaluate: Evaluates the global model; None if this process cannot.
        saves: This process's states on disk; None to save nothing.
        blocks: The blocks of every fragment that this process holds; None if it is the island's only one.
    """

    def __init__(
        self,
        run: ResolvedRun,
        island: IslandState,
        compile_step: Callable[[], None] | None = None,
        evaluate: Evaluation | None = None,
        saves: OwnStates | None = None,
        blocks: IslandBlocks | None = None,
    ) -> None:
        self.blocks = blocks
        # Fragments and states of this island leave and enter; its owner steps it.
        self.island = island
        self.run = run
        self.anchors: dict[int, Values] = {}  # fragment -> anchor
        self._compile_step = compile_step
        self._evaluate = evaluate
        self._adoptions = Adoptions(island, run.fragments, run.config.adopt)
        # The values that wait on the devices. They leave when they are adopted, and when nothing refers to them.
        self._placed: weakref.WeakSet[PlacedValue] = weakref.WeakSet()
        # The layout of moments on their way to another island.
        self.moving = MovingLayout(island.state_layout, run.config.wire.states)
        self.states: dict[int, StagedState] = {}  # queued, by name
        # Each receiver is at another leaf.
        self._moving: dict[tuple[int, str], MovingState] = {}
        self._saves = saves
        # (global step of the state that is being written, its result)
        self._saving: tuple[int, SaveResult] | None = None
        # The global step of the newest state that all hosts have on disk.
        self._complete = -1
        # The leaves that were read from disk, until they are restored or not needed.
        self._read: Leaves = {}
        # The loader of this process's own data, if it has one; its state is saved with the shards.
        self.loader: Loader | None = None
        # The loader's state that was read with the leaves, and the name of that state.
        self._read_loader: tuple[StateName, bytes | None] | None = None

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        return self.run.fragments

    @property
    def evaluates(self) -> bool:
        return self._evaluate is not None

    @property
    def judges(self) -> bool:
        """Tell whether an evaluation may include a change, which needs whole values."""
        return self._evaluate is not None and self.blocks is None

    def global_values(self) -> GlobalValues:
        """Return an empty book of the values that arrive at this process."""
        held = None if self.blocks is None else self.blocks.held
        return GlobalValues(self.fragments, self.run.config.wire.down, held)

    def tell(self, command: commands.Command) -> None:
        """Send a command to the other hosts, before this host obeys it; an island of one process has none."""

    def warm_up(self, report: Report = lambda words: None) -> None:
        """Compile the island's programs, and report the progress; any thread."""
        island, steps = self.island, int(self._compile_step is not None)
        total = island.count_programs(self.fragments) + steps

        def tell(done: int, current: str) -> None:
            report(f"compiling or loading programs, {done} of {total} are ready" + f", now: {current}" * bool(current))

        if self._compile_step is not None:
            # The step comes first, because it usually takes the longest.
            tell(0, "the training step")
            self._compile_step()
        island.warm_up_exchange(self.fragments, lambda done, current: tell(done + steps, current))

    def warm_up_evaluation(self) -> None:
        """Compile the evaluation of the global model; if that fails, the first evaluation reports the error."""
        try:
            if self._evaluate is not None:
                self._evaluate.warm_up()
        except Exception as error:
            log.warning(f"the evaluation could not be compiled: {error!r}")

    def connect(self, epoch: int, number: int) -> None:
        """Let every other host open a link to this epoch of the syncer; TransportError if one cannot."""

    def tell_batch(self, ranges: Ranges, ahead: Ranges) -> None:
        """Send the samples of the next step, and known samples of later steps, to the other hosts."""
        told = (tuple(commands.SampleRange(*each) for each in some) for some in (ranges, ahead))
        self.tell(commands.HostPutBatch(*told))

    def tell_step(self, clock: int) -> None:
        """Let the other hosts make a step that starts at the global step `clock`."""
        self.tell(commands.HostStep(clock))

    def stage(self, fragment_id: int, local_step: int) -> None:
        """Queue a copy of a fragment's update, as it is after the newest step."""
        self.tell(commands.HostStage(fragment_id, local_step))
        staged = self.island.stage(self.fragments[fragment_id])
        self._adoptions.staged[fragment_id, local_step] = staged

    def unstage(self, fragment_id: int, local_step: int) -> None:
        """Forget a copy that nobody will request."""
        self.tell(commands.HostUnstage(fragment_id, local_step))
        # Ctrl-C may have ended the island between the machine's decision and the copy.
        self._adoptions.staged.pop((fragment_id, local_step), None)

    def take_for_round(self, message: FragmentValue) -> StagedUpdate:
        """Mark a staged copy as used by the message's round, and return it; the caller encodes and sends it."""
        return self._adoptions.take_for_round(message.fragment_id, message.global_step, message.local_step)

    def take_anchor(self, message: AnchorValue) -> Callable[[], Payload]:
        """Return a function that encodes this process's bytes of the value that was adopted last, for the syncer."""
        anchor, blocks = self.anchors[message.fragment_id], self.blocks
        if blocks is None:
            return lambda: codec.encode(anchor, "float32")
        return lambda: blocks.got[message.fragment_id].host_bytes(anchor)

    def format_of(self, message: GlobalFragment) -> codec.Format:
        """Return the format of the payload of a global fragment."""
        return "float32" if message.base == NO_VERSION else self.run.config.wire.down

    def complete(self, message: GlobalFragment, payload: Bytes, alive: Callable[[], bool]) -> Bytes:
        """Return all blocks that this host holds of a version that arrived; any one thread.

        Passes blocks on to other hosts that hold them too, and waits for blocks from other hosts.

        Args:
            alive: As for `wait_for_others`.

        Raises:
            ValueError: The payload is damaged, or another host cannot read its payload.
            LinkClosed: As `wait_for_others`.
        """
        return payload

    def wait_for_others(self, message: GlobalFragment, alive: Callable[[], bool]) -> None:
        """Wait until all hosts have read and checked an arrived value; any one thread.

        Args:
            alive: Tells whether the link to the syncer is still open; its end is the end of the links of all hosts.

        Raises:
            ValueError: A host cannot read it.
            LinkClosed: The link is over, so the value may not come to all hosts.
        """

    def handled(self) -> None:
        """Let other hosts read on: an arrived version was read, or is not wanted."""

    def supersede(self, message: GlobalFragment) -> None:
        """Let other hosts forget older versions of the arrived fragment, because they will not be adopted."""

    def place(self, fragment_id: int, value: ArrivedValue) -> None:
        """Start to copy a value that arrived to the devices; any one thread.

        Nothing happens if PLACED_MAX values wait there: further ones are copied when they are adopted.
        """
        if len(self._placed) < PLACED_MAX:
            value.placed = self.island.place(self.fragments[fragment_id], value.values)
            if value.placed is not None:
                self._placed.add(value.placed)

    def adopt(self, message: GlobalFragment, value: ArrivedValue) -> None:
        """Adopt the global value of a message between two steps."""
        self.anchors[message.fragment_id] = value.values
        self._adoptions.adopt(message.fragment_id, message.version, message.merged_round, value.take())

    def evaluate(self, global_step: int, *, final: bool, change: Change | None = None) -> Score:
        """Evaluate the global values that were adopted last, between two steps; the score holds an error's reason.

        Args:
            final: Whether this is the model at the end of the run.
            change: Is added to one of the values for a second evaluation, whose loss is the score WITHOUT.
        """
        began_s = time.monotonic()
        assert self._evaluate is not None, "nobody here can evaluate"
        try:
            score = self._evaluate(self.island.anchors(self.fragments), global_step, final)
        except Exception as error:
            score = failed_score(error)
        if change is not None and not score.reason:
            score = self._with_change(score, self._evaluate, change)
        return score._replace(took_s=time.monotonic() - began_s)

    def _with_change(self, score: Score, evaluate: Evaluation, change: Change) -> Score:
        """Return a score with the loss of the model with a change; a failure costs only this loss."""
        try:
            loss = evaluate.loss(self._changed(change))
        except Exception as error:
            log.warning(f"the change of a contribution could not be evaluated: {error!r}", exc_info=error)
            return score
        return score._replace(scores=(*score.scores[: SCORES_MAX - 1], Metric(WITHOUT, loss)))

    def _changed(self, change: Change) -> Any:
        """Return the parameters of the global model with a change; ValueError if it does not fit."""
        if not 0 <= change.fragment_id < len(self.fragments):
            raise ValueError(f"a change is of fragment {change.fragment_id}, and there are {len(self.fragments)}")
        layout = whole(self.fragments[change.fragment_id])
        if len(change.payload) != 4 * layout.size:
            raise ValueError(f"a change has {len(change.payload)} bytes, where {4 * layout.size} are expected")
        added = layout.views(np.frombuffer(change.payload, "<f4"))
        values = {key: value + added[key] for key, value in self.anchors[change.fragment_id].items()}
        return self.island.anchors(self.fragments, {change.fragment_id: values})

    def stage_state(self, name: int) -> StagedState:
        """Queue a copy of everything except the parameters, kept under its name until `unstage_state`."""
        self.tell(commands.HostStageState(name))
        self.states[name] = staged = self.island.stage_moments()
        return staged

    def moving_state(self, name: int, receiver: str) -> MovingState:
        """Return a queued copy in the form that travels to one receiver."""
        if (name, receiver) not in self._moving:
            self._moving[name, receiver] = MovingState(self.moving, partial(_finite_leaf, self.states[name]))
        return self._moving[name, receiver]

    def unstage_state(self, name: int) -> None:
        """Forget a queued copy; any thread."""
        self.tell(commands.HostUnstageState(name))
        del self.states[name]
        self._moving = {key: moving for key, moving in self._moving.items() if key[0] != name}

    def load_state(self, state: Bytes) -> None:
        """Load another island's state except the parameters; ValueError if it cannot be used."""
        self.island.load_moments(self.received(state))

    def received(self, state: Bytes) -> Callable[[str], Any]:
        """Return a function from a leaf's name to its array; ValueError if the state is foreign or not finite."""
        leaf = self.moving.read(state)
        for name in self.moving.names:
            check_finite(name, leaf(name))
        return leaf

    def saved(self) -> list[StateName]:
        """Return the names of the states that this process has on disk, newest first; any thread."""
        return [] if self._saves is None else self._saves.names()

    def read(self, name: StateName) -> str:
        """Read this process's shards of a saved state; return why they cannot be used, "" if they can; any thread."""
        assert self._saves is not None, "nothing is saved"
        try:
            self._read, loader = self._saves.read(name)
            self.island.check_shards(self._read)
            for leaf, found in self._read.items():
                for piece in found.pieces:
                    check_finite(leaf, piece)
        except ValueError as error:
            self._read = {}
            return str(error)
        self._read_loader = (name, loader)
        return ""

    def find_saved(self) -> StateName | None:
        """Read the newest state that all hosts can use, and return its name."""
        for name in self._common():
            reason = self._read_all(name)
            if not reason:
                self._complete = name.global_step
                return name
            log.warning(f"the saved state of global step {name.global_step} cannot be used: {reason}")
        return None

    def _common(self) -> list[StateName]:
        return self.saved()

    def _read_all(self, name: StateName) -> str:
        return self.read(name)

    def restore(self, fragments: Iterable[int]) -> None:
        """Continue from the state that was read, with these fragments of the parameters; the others are the anchors."""
        leaves, self._read = self._read, {}
        self.island.load_shards(leaves)
        for fragment_id in sorted(self.anchors.keys() - set(fragments)):
            self.island.overwrite(self.fragments[fragment_id], self.anchors[fragment_id])

    def resume_loader(self, name: StateName | None) -> bool:
        """Continue the loader from the state with this name, which was read; return False without such a state.

        Raises:
            ValueError: the loader refuses its state, or has none that can be saved.
        """
        found, self._read_loader = self._read_loader, None
        if self.loader is None:
            return False
        state = found[1] if name is not None and found is not None and found[0] == name else None
        if name is not None and state is not None:
            restored(self.loader, state, name.global_step)
        # A state that cannot be saved is reported before the first step.
        bounded(self.loader)
        return state is not None

    def disregard_saved(self) -> None:
        """Let the next save replace the state that was found, because it is of another run."""
        self._complete = NO_VERSION

    def forget_saved(self) -> None:
        """Free the state that was read from disk."""
        self._read = {}

    def save(self, name: StateName) -> bool:
        """Start to write the present state to disk on all hosts; False if another one is still being written."""
        if self._saves is None:
            return False
        if self._saving is not None:
            global_step, outcome = self._saving
            if (reason := outcome()) is None:
                return False
            if not reason:
                self._complete = global_step
        self._saving = (name.global_step, self._save_all(name, self._complete))
        return True

    def _save_all(self, name: StateName, kept: int) -> SaveResult:
        saving = self.save_own(name, kept)
        return lambda: saving.result() if saving.done() else None

    def save_own(self, name: StateName, kept: int) -> Future[str]:
        """Start to write this process's shards; the future holds the error, "" if they were written."""
        assert self._saves is not None, "nothing is saved"
        try:
            loader = None if self.loader is None else bounded(self.loader)
        # Libraries of loaders raise many kinds of errors.
        except Exception as error:
            reason = f"the loader has no state to save: {error!r}"
            log.warning(f"the state of global step {name.global_step} was not saved: {reason}; training continues")
            failed: Future[str] = Future()
            failed.set_result(reason)
            return failed
        return self._saves.save(self.island.stage_shards(), name, kept, loader)

    def close(self) -> None:
        """Wait until the last state is written to disk."""
        if self._saves is not None:
            self._saves.close()

    def end(self, status: int) -> None:
        """End the other processes with this exit status, because the learner has ended."""
