"""The checker of states that travel from one learner to another."""

from collections import defaultdict
from typing import NamedTuple

from diloco_jax.protocol.effects import AdoptState, Finish, Send, StageState, UnstageState
from diloco_jax.protocol.messages import Advance, GlobalFragment, StateRequest, Stop, SyncerMessage, Welcome
from diloco_jax.protocol.watch.sample_book import Incarnation
from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.holdings import Value, digest_of
from diloco_jax.sim.invariants.checker import Checker
from diloco_jax.sim.node import Effects, LearnerProcess

# Largest number of copies of a donor, see protocol/learner/recovery.py.
STATES_MAX = 2


class Staged(NamedTuple):
    """A whole state, when it was copied."""

    # Newest global step that its learner knew.
    clock: int
    anchors: dict[int, Value]


class RecoveryIsWhole(Checker):
    """A state is taken over whole and before the first step, is of one moment of one donor, and is not too old.

    The donor had heard of everything that its receiver had, keeps few copies, and frees each.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        # Newest global step that each process knows.
        self._heard: dict[Incarnation, int] = defaultdict(int)
        # The clock when a state was chosen.
        self._decided: dict[Incarnation, int] = {}
        # Global step of the first welcome.
        self._welcomed: dict[Incarnation, int] = {}
        # Receiver -> clock of its newest attempt.
        self._asked: dict[Incarnation, int] = {}
        # Local step -> copy, including freed copies.
        self._staged: dict[Incarnation, dict[int, Staged]] = defaultdict(dict)
        self._held: dict[Incarnation, set[int]] = defaultdict(set)

    def on_learner(
        self, process: LearnerProcess, message: SyncerMessage | None, effects: Effects, now_s: float
    ) -> None:
        incarnation, name = process.key, process.name
        if isinstance(message, Welcome):
            self._welcomed.setdefault(incarnation, message.global_step)
        if isinstance(message, Welcome | GlobalFragment | Advance | Stop):
            self._heard[incarnation] = max(self._heard[incarnation], message.global_step)
        for effect in effects:
            if isinstance(effect, Send):
                if isinstance(effect.message, StateRequest) and not effect.message.donor:
                    self._asked[incarnation] = effect.message.clock
            elif isinstance(effect, AdoptState):
                self._decided[incarnation] = self._clock(process)
            elif isinstance(effect, StageState):
                self._stage(process, effect.local_step)
            elif isinstance(effect, UnstageState):
                self.check(
                    effect.local_step in self._held[incarnation], f"{name} frees what it does not hold: {effect}"
                )
                self._held[incarnation].remove(effect.local_step)
            elif isinstance(effect, Finish):
                self.check(not self._held[incarnation], f"{name} ends with copies of steps {self._held[incarnation]}")

    def _clock(self, process: LearnerProcess) -> int:
        # In lockstep a learner counts its own steps.
        lockstep = self.config.lockstep
        return process.machine.global_step if lockstep else self._heard[process.key]

    def _stage(self, process: LearnerProcess, local_step: int) -> None:
        name, held, now = process.name, self._held[process.key], process.machine.local_step
        self._staged[process.key][local_step] = Staged(self._clock(process), dict(process.holdings.anchors))
        held.add(local_step)
        self.check(now == local_step, f"{name} copies step {local_step} at {now}")
        self.check(len(held) <= STATES_MAX, f"{name} holds copies of steps {held}")

    def on_state(self, process: LearnerProcess, effect: AdoptState, ok: bool, now_s: float) -> None:
        if not effect.donor:
            self._check_own(process, effect)
            return
        name, parts = process.name, process.holdings.kept
        counts = {part.parts for part in parts.values()}
        donors = {(part.learner_id, part.incarnation, part.local_step) for part in parts.values()}
        self.check(counts == {len(parts)}, f"{name} takes over parts {sorted(parts)} of {sorted(counts)}")
        self.check(len(donors) == 1, f"{name} takes over a state of {sorted(donors)}")
        ((donor, incarnation, local_step),) = donors
        self.check((donor, local_step) == (effect.donor, effect.donor_step), f"{name} has parts of {donors}: {effect}")
        if donor in self.hostile:
            # It may send any state of the right form.
            return
        for number, part in parts.items():
            digest = digest_of(donor, incarnation, local_step, number)
            self.check(part.digest == digest, f"{name} takes over part {number} as {part}")
        staged = self._staged[donor, incarnation][local_step]
        asked = self._asked[process.key]
        took = self._decided[process.key] - asked
        self.check(staged.clock >= asked, f"{name} asked with clock {asked}, {donor} had heard of {staged.clock}")
        limit = self.config.transfer_steps_max
        self.check(took <= limit, f"{name} took {took} global steps to get a state, limit {limit}")
        self._check_fragments(process, effect, staged.anchors)

    def _check_own(self, process: LearnerProcess, effect: AdoptState) -> None:
        name, saved, limit = process.name, process.node.own, self.config.own_state_age_max
        assert saved is not None, f"{name} takes over its own state, and has none"
        saved_step = saved.described.global_step
        age = abs(saved_step - self._welcomed[process.key])
        self.check(saved_step == effect.donor_step, f"{name} has saved step {saved_step}, but does {effect}")
        self.check(age <= limit, f"{name} takes over its state of {age} global steps ago, limit {limit}")
        self._check_fragments(process, effect, saved.anchors)

    def _check_fragments(self, process: LearnerProcess, effect: AdoptState, anchors: dict[int, Value]) -> None:
        name = process.name
        for fragment_id in effect.fragments:
            theirs, ours = anchors[fragment_id], process.holdings.anchors[fragment_id]
            self.check(
                theirs == ours,
                f"{name} holds {ours} of fragment {fragment_id}, and takes parameters that are based on {theirs}",
            )
