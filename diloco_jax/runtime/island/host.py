"""One process of an island, which obeys its learner: staged copies, adoptions, whole states.

An island of one process has one `Host`. With several each has one, and all do the same in the same order, so that the
programs of their devices meet: the leader's is a `LeadingHost`, which tells the others (leader.py, follower.py).
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from diloco_jax.core.codec import Bytes
from diloco_jax.core.fragments import Fragment
from diloco_jax.protocol.messages import FragmentValue, GlobalFragment, Score
from diloco_jax.runtime.island.adoptions import Adoptions, Values
from diloco_jax.runtime.island.evaluation import Evaluation, failed_score
from diloco_jax.runtime.island.saved_states import Leaves, SavedStates, StateName
from diloco_jax.settings.resolved import ResolvedRun
from diloco_jax.training.exchange.outgoing import StagedFragment
from diloco_jax.training.exchanged import ExchangedState
from diloco_jax.training.whole_state.moving import MovingLayout, MovingState
from diloco_jax.training.whole_state.staging import StagedState
from diloco_jax.transport.group import commands

Ranges = Sequence[tuple[int, int]]
Told = Callable[[str], object]  # hears what is done, in words for people
Outcome = Callable[[], str | None]  # of a state that is written: the reason why it was not, "" if it was, None before

log = logging.getLogger(__name__)


class Host:
    """One process's devices, and what they have in flight. One thread at a time, where nothing else is said.

    Args:
        run: resolved for the model of `island`.
        island: that is exchanged, or this process's part of it.
        compile_step: compiles what its owner runs; None if nobody here can.
        evaluate: evaluates the global model; None if nobody here can.
        saves: this process's states on disk; without them it saves nothing.
    """

    def __init__(
        self,
        run: ResolvedRun,
        island: ExchangedState,
        compile_step: Callable[[], None] | None = None,
        evaluate: Evaluation | None = None,
        saves: SavedStates | None = None,
    ) -> None:
        self.island = island  # whose fragments and states leave and come in; its owner steps it
        self.run = run
        self.anchors: dict[int, Values] = {}  # the global values adopted last, by fragment
        self._compile_step = compile_step
        self._evaluate = evaluate
        self._adoptions = Adoptions(island, run.fragments, run.config.adopt)
        self.moving = MovingLayout(island.state_layout, run.config.wire.states)  # how moments travel to another island
        self.states: dict[int, StagedState] = {}  # copies that were queued, by name
        self._moving: dict[tuple[int, str], MovingState] = {}  # by receiver: each is at a leaf of its own
        self._saves = saves
        self._saving: tuple[int, Outcome] | None = None  # global step of what is being written, and its outcome
        self._complete = -1  # global step of the newest state that all hosts have on disk
        self._read: Leaves = {}  # what was read from disk, until it is taken over or not wanted any more

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        return self.run.fragments

    @property
    def evaluates(self) -> bool:
        return self._evaluate is not None

    def tell(self, command: commands.Command) -> None:
        """Let the other hosts do the same, before this one does it; an island of one process has none."""

    def warm_up(self, told: Told = lambda words: None) -> None:
        """Compile what the island runs, and say how much of it is done. Any thread."""
        exchange, steps = self.island.exchange, int(self._compile_step is not None)
        total = exchange.count(self.fragments) + steps

        def tell(done: int) -> None:
            told(f"compiling or loading programs, {done} of {total} are ready")

        tell(0)
        if self._compile_step is not None:
            self._compile_step()
        exchange.warm_up(self.fragments, lambda done: tell(done + steps))

    def warm_up_evaluation(self) -> None:
        """Compile the evaluation of the global model; one that cannot be compiled tells so when it is asked for."""
        try:
            if self._evaluate is not None:
                self._evaluate.warm_up()
        except Exception as error:
            log.warning(f"the evaluation could not be compiled: {error!r}")

    def connect(self, epoch: int, number: int) -> None:
        """Give every other host a link of its own to this epoch of the syncer; TransportError if one cannot have it."""

    def tell_batch(self, ranges: Ranges, ahead: Ranges) -> None:
        """Tell the other hosts which samples the next step reads, and the steps after it."""
        told = (tuple(commands.SampleRange(*each) for each in some) for some in (ranges, ahead))
        self.tell(commands.HostPutBatch(*told))

    def tell_step(self, clock: int) -> None:
        """Tell the other hosts to make a step, and at which global step it begins."""
        self.tell(commands.HostStep(clock))

    def stage(self, fragment_id: int, local_step: int) -> None:
        """Queue a copy of a fragment's update, as it is after the newest step."""
        self.tell(commands.HostStage(fragment_id, local_step))
        self._adoptions.stage(fragment_id, local_step)

    def unstage(self, fragment_id: int, local_step: int) -> None:
        self.tell(commands.HostUnstage(fragment_id, local_step))
        self._adoptions.unstage(fragment_id, local_step)

    def send(self, message: FragmentValue) -> StagedFragment:
        """Remember that a staged copy goes into a round, and return it: encode it, and send that."""
        return self._adoptions.send(message.fragment_id, message.global_step, message.local_step)

    def arrived(self, message: GlobalFragment, payload: Bytes) -> Callable[[], None]:
        """Hand a global fragment that came to the other hosts, which read and check it. Any one thread.

        The function that it returns waits until all have it, and raises ValueError if one of them cannot read it.
        """
        return lambda: None

    def supersede(self, message: GlobalFragment) -> None:
        """Forget older versions of the fragment that came: they will not be adopted."""

    def adopt(self, message: GlobalFragment, values: Values) -> None:
        """Replace a fragment by the global value that a message brought, between two steps."""
        self.anchors[message.fragment_id] = values
        self._adoptions.adopt(message.fragment_id, message.version, message.merged_round, values)

    def evaluate(self, global_step: int, *, final: bool) -> Score:
        """Evaluate the global values that were adopted last, between two steps. What goes wrong is in the answer."""
        began_s = time.monotonic()
        assert self._evaluate is not None, "nobody here can evaluate"
        try:
            score = self._evaluate(self.island.exchange.anchors(self.fragments), global_step, final)
        except Exception as error:
            score = failed_score(error)
        return score._replace(took_s=time.monotonic() - began_s)

    def stage_state(self, name: int) -> StagedState:
        """Queue a copy of everything but the parameters; it is kept under its name until `unstage_state`."""
        self.tell(commands.HostStageState(name))
        self.states[name] = staged = self.island.stage_moments()
        return staged

    def moving_state(self, name: int, receiver: str) -> MovingState:
        """Return a copy that was queued as it travels to one receiver."""
        if (name, receiver) not in self._moving:
            self._moving[name, receiver] = MovingState(self.moving, self.states[name].leaf)
        return self._moving[name, receiver]

    def unstage_state(self, name: int) -> None:
        """Forget a copy that nobody needs any more. Any thread."""
        self.tell(commands.HostUnstageState(name))
        del self.states[name]
        self._moving = {key: moving for key, moving in self._moving.items() if key[0] != name}

    def load_state(self, state: Bytes) -> None:
        """Take over another island's state but the parameters; ValueError if it is of another model or optimizer."""
        self.island.load_moments(self.moving.read(state))

    def saved(self) -> list[StateName]:
        """Return the names of the states that this process has on disk, newest first. Any thread."""
        return [] if self._saves is None else self._saves.names()

    def read(self, name: StateName) -> str:
        """Read this process's shards of a saved state; returns the reason why they cannot be used. Any thread."""
        assert self._saves is not None, "nothing is saved"
        try:
            self._read = self._saves.read(name)
            self.island.check_shards(self._read)
        except ValueError as error:
            self._read = {}
            return str(error)
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
        """Go on from the state that was read, of the parameters with these fragments, once all anchors are here."""
        leaves, self._read = self._read, {}
        self.island.load_shards(leaves)
        for fragment_id in sorted(self.anchors.keys() - set(fragments)):
            self.island.overwrite(self.fragments[fragment_id], self.anchors[fragment_id])

    def forget_saved(self) -> None:
        self._read = {}

    def save(self, name: StateName) -> bool:
        """Begin to write this state, as it is now, to disk on all hosts; False if one is still being written."""
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

    def _save_all(self, name: StateName, kept: int) -> Outcome:
        saving = self.save_own(name, kept)
        return lambda: saving.result() if saving.done() else None

    def save_own(self, name: StateName, kept: int) -> Future[str]:
        """Begin to write this process's shards; gives the reason why they could not be written."""
        assert self._saves is not None, "nothing is saved"
        return self._saves.save(self.island.stage_shards(), name, kept)

    def close(self) -> None:
        """Wait for what is being written to disk."""
        if self._saves is not None:
            self._saves.close()

    def end(self, status: int) -> None:
        """End the other processes with this exit status: the learner is done."""
