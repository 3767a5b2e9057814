"""One process of an island, which obeys its learner: staged copies, adoptions, whole states.

An island of one process has one `Host`. With several each has one, and all do the same in the same order, so that the
programs of their devices meet: the leader's is a `LeadingHost`, which tells the others (leader.py, follower.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from diloco_jax.core.codec import Bytes
from diloco_jax.core.fragments import Fragment, FragmentPlan
from diloco_jax.protocol.messages import FragmentValue, GlobalFragment, Score
from diloco_jax.runtime.island.adoptions import Adoptions, Values
from diloco_jax.runtime.island.evaluation import Evaluation, failed_score
from diloco_jax.settings.run import RunConfig
from diloco_jax.training.exchange.outgoing import StagedFragment
from diloco_jax.training.exchanged import ExchangedState
from diloco_jax.training.whole_state.staging import StagedState
from diloco_jax.transport.group import commands

State = Bytes | Mapping[str, np.ndarray]
Ranges = Sequence[tuple[int, int]]
SAVING = -1  # the copy of a state that goes to the disk; others are named by their local step

log = logging.getLogger(__name__)


class Host:
    """One process's devices, and what they have in flight. One thread at a time, where nothing else is said.

    Args:
        config: the run.
        island: that is exchanged, or this process's part of it.
        compile_step: compiles what its owner runs.
        evaluate: evaluates the global model; None if nobody here can.
    """

    def __init__(
        self,
        config: RunConfig,
        island: ExchangedState,
        compile_step: Callable[[], None] = lambda: None,
        evaluate: Evaluation | None = None,
    ) -> None:
        self.island = island  # whose fragments and states leave and come in; its owner steps it
        # how its model is cut
        self.plan: FragmentPlan = config.fragments.plan(island.shapes, island.kinds, config.protocol.num_fragments)
        self.anchors: dict[int, Values] = {}  # the global values adopted last, by fragment
        self.evaluates = evaluate is not None
        self._compile_step = compile_step
        self._evaluate = evaluate
        self._adoptions = Adoptions(island, self.plan.fragments, config.adopt)
        self._states: dict[int, StagedState] = {}

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        """Return the fragments of the plan."""
        return self.plan.fragments

    def tell(self, command: commands.Command) -> None:
        """Let the other hosts do the same, before this one does it; an island of one process has none."""

    def warm_up(self) -> None:
        """Compile what the island runs. Any thread."""
        self._compile_step()
        self.island.exchange.warm_up(self.fragments)

    def warm_up_evaluation(self) -> None:
        """Compile the evaluation of the global model; one that cannot be compiled tells so when it is asked for."""
        try:
            if self._evaluate is not None:
                self._evaluate.warm_up()
        except Exception as error:
            log.warning(f"the evaluation could not be compiled: {error!r}")

    def connect(self, epoch: int, number: int) -> None:
        """Give every other host a link to the syncer of its own, now that the learner has a new one.

        Args:
            epoch: newest life of the syncer that the learner has heard of.

        Raises:
            TransportError: a host cannot have one.
        """

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
        """Forget a copy that nobody will ask for."""
        self.tell(commands.HostUnstage(fragment_id, local_step))
        self._adoptions.unstage(fragment_id, local_step)

    def send(self, message: FragmentValue) -> StagedFragment:
        """Remember that a staged copy goes into a round, and return it: encode it, and send that."""
        return self._adoptions.send(message.fragment_id, message.global_step, message.local_step)

    def arrived(self, message: GlobalFragment, payload: Bytes) -> Callable[[], None]:
        """Hand a global fragment that came to the other hosts, which read and check it. Any one thread.

        Returns:
            A function that waits until all hosts have it; it raises ValueError if one of them cannot read it.
        """
        return lambda: None

    def supersede(self, message: GlobalFragment) -> None:
        """Forget older versions of the fragment that came: they will not be adopted."""

    def adopt(self, message: GlobalFragment, values: Values) -> None:
        """Replace a fragment by the global value that a message brought, between two steps."""
        self.anchors[message.fragment_id] = values
        self._adoptions.adopt(message.fragment_id, message.version, message.merged_round, values)

    def evaluate(self, global_step: int, *, final: bool) -> Score:
        """Evaluate the global values that were adopted last, between two steps; blocks.

        Returns:
            The answer as far as the devices know it. What went wrong is in it: training goes on.
        """
        began_s = time.monotonic()
        assert self._evaluate is not None, "nobody here can evaluate"
        try:
            score = self._evaluate(self.island.exchange.anchors(self.fragments), global_step, final)
        except Exception as error:
            score = failed_score(error)
        return score._replace(took_s=time.monotonic() - began_s)

    def stage_state(self, name: int) -> StagedState:
        """Queue a copy of the whole state; it is kept under its name until `unstage_state`."""
        self.tell(commands.HostStageState(name))
        self._states[name] = staged = self.island.stage_state()
        return staged

    def staged_state(self, name: int) -> StagedState:
        """Return a copy that was queued."""
        return self._states[name]

    def unstage_state(self, name: int) -> None:
        """Forget a copy that nobody needs any more. Any thread."""
        self.tell(commands.HostUnstageState(name))
        del self._states[name]

    def load_state(self, state: State, fragments: Iterable[int]) -> None:
        """Take over a whole state, as bytes or by leaf, and of its parameters these fragments.

        Raises:
            ValueError: it is not of this island's model and optimizer.
        """
        self.load_leaves(self.island.state_layout.read(state).__getitem__, fragments)

    def load_leaves(self, leaf: Callable[[str], np.ndarray], fragments: Iterable[int]) -> None:
        """Take over a state of this island's layout, leaf by leaf, and of its parameters these fragments."""
        self.island.load_leaves(leaf, [self.fragments[p] for p in fragments])

    def end(self, status: int) -> None:
        """End the other processes with this exit status: the learner is done."""
