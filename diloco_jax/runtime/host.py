"""What one process of an island does when its learner says so: steps, staged copies, adoptions, whole states.

An island of one process has one `Host`. With several each has one, and all do the same in the same order, so that the
programs of their devices meet: the leader's is a `LeadingHost`, which tells the others (host_leader.py, follower.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import numpy as np

from diloco_jax.core.codec import Bytes
from diloco_jax.core.fragments import Fragment, FragmentPlan, plan_fragments
from diloco_jax.protocol.messages import FragmentValue, GlobalFragment
from diloco_jax.runtime.global_values import Values
from diloco_jax.runtime.settings import AdoptConfig, RunConfig
from diloco_jax.training.data import SampleOrder, load_source
from diloco_jax.training.island import Island, StepHandle
from diloco_jax.training.outgoing import StagedFragment
from diloco_jax.training.staging import StagedState

State = Bytes | Mapping[str, np.ndarray]
Ranges = Sequence[tuple[int, int]]
SAVING = -1  # the copy of a state that goes to the disk; others are named by their local step


class Host:
    """One process's devices, and what they have in flight. One thread at a time, where nothing else is said.

    Attributes:
        island: that trains, or this process's part of it.
        plan: how its model is cut.
        anchors: the global values adopted last, by fragment.

    Args:
        config: the run.
        learner_id: name of the island.
        devices: of the island; all that JAX sees if not given.
    """

    def __init__(self, config: RunConfig, learner_id: str, devices: Sequence[jax.Device] | None = None) -> None:
        own = config.island(learner_id)
        self._order = SampleOrder(
            load_source(config.data, config.train.seq_len), config.data.shuffle_seed + config.seed
        )
        self.island = Island(
            config.model,
            config.optimizer,
            own.mesh,
            seed=config.seed,
            devices=devices,
            wire=config.wire.up,
            rebase=config.adopt.mode == "rebase",
        )
        shapes = self.island.shapes
        self.plan: FragmentPlan = plan_fragments(
            shapes, config.protocol.num_fragments, split_axis=config.fragments.axes(shapes)
        )
        self.batch_shape = (own.batch_size, config.train.seq_len + 1)
        self.anchors: dict[int, Values] = {}
        self._how: AdoptConfig = config.adopt
        self._staged: dict[tuple[int, int], StagedFragment] = {}
        self._sent: dict[int, tuple[int, StagedFragment]] = {}  # fragment -> (round, what was sent)
        self._states: dict[int, StagedState] = {}

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        """Of the plan."""
        return self.plan.fragments

    # ---- before training ------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Compile what the island runs. Any thread."""
        self.island.warm_up(self.batch_shape, self.fragments)

    def connect(self, epoch: int, number: int) -> None:
        """The learner has a new link to the syncer; give every other host its own.

        Args:
            epoch: newest life of the syncer that the learner has heard of.
            number: of the learner's link.

        Raises:
            TransportError: a host cannot have one.
        """

    # ---- steps ----------------------------------------------------------------------------------------------------

    def put_batch(self, ranges: Ranges) -> None:
        """Copy the samples of the next step to the devices; returns at once."""
        self._batch = self.island.put_batch(self._order.batch(ranges))

    def step(self, rate: float) -> StepHandle:
        """Dispatch one inner step on the batch that was put last; returns at once."""
        return self.island.step(self._batch, rate)

    # ---- fragments ------------------------------------------------------------------------------------------------

    def stage(self, fragment_id: int, local_step: int) -> None:
        """Queue a copy of a fragment's update, as it is after the newest step."""
        self._staged[fragment_id, local_step] = self.island.stage(self.fragments[fragment_id])

    def unstage(self, fragment_id: int, local_step: int) -> None:
        """Nobody will ask for this copy."""
        del self._staged[fragment_id, local_step]

    def send(self, message: FragmentValue) -> StagedFragment:
        """Remember that a staged copy goes into a round, and return it: encode it, and send that."""
        staged = self._staged[message.fragment_id, message.local_step]
        self._sent[message.fragment_id] = (message.global_step, staged)
        return staged

    def arrived(self, message: GlobalFragment, payload: Bytes) -> Callable[[], None]:
        """A global fragment came; other hosts get it, read it and check it. Any one thread.

        Returns:
            A function that waits until all hosts have it; it raises ValueError if one of them cannot read it.
        """
        return lambda: None

    def supersede(self, message: GlobalFragment) -> None:
        """Older versions of the fragment that came will not be adopted."""

    def adopt(self, message: GlobalFragment, values: Values) -> None:
        """Replace a fragment by the global value that a message brought, between two steps."""
        fragment_id, version = message.fragment_id, message.version
        sent_round, sent = self._sent.pop(fragment_id, (0, None))
        if sent_round != version:
            sent = None  # made without a value of ours: it has nothing of what is in flight, and of what was kept back
        first = fragment_id not in self.anchors
        self.anchors[fragment_id] = values
        mode = "overwrite" if first or (self._how.mode == "rebase" and sent is None) else self._how.mode
        self.island.adopt(self.fragments[fragment_id], values, mode=mode, alpha=self._how.alpha, sent=sent)

    # ---- whole states ---------------------------------------------------------------------------------------------

    def stage_state(self, name: int) -> StagedState:
        """Queue a copy of the whole state; it is kept under its name until `unstage_state`."""
        self._states[name] = staged = self.island.stage_state()
        return staged

    def staged_state(self, name: int) -> StagedState:
        """A copy that was queued."""
        return self._states[name]

    def unstage_state(self, name: int) -> None:
        """Nobody needs this copy any more. Any thread."""
        del self._states[name]

    def load_state(self, state: State, fragments: Iterable[int], *, checked: bool = False) -> None:
        """Take over a whole state, and of its parameters these fragments.

        Args:
            state: as bytes, or by leaf.
            fragments: their numbers.
            checked: whether it is known to be of this island's layout; then leaves are looked up one after the other.

        Raises:
            ValueError: it is not of this island's model and optimizer.
        """
        self.island.load_state(state, [self.fragments[p] for p in fragments], checked=checked)

    def end(self, status: int) -> None:
        """The learner is done; the other processes end with this exit status."""
