"""The checker of token budgets: which tokens count as merged, the end by them, and the schedule that follows them."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field

from diloco_jax.protocol.effects import Drop, Finish, Note, SaveSnapshot
from diloco_jax.protocol.messages import FragmentValue, Hello, LearnerMessage
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.sim.checks.checker import Checker
from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.node import Effects, LearnerProcess


@dataclass(slots=True)
class Counted:
    """The tokens of a run, learner by learner, as far as rounds have merged them."""

    tokens: int = 0
    present: dict[str, int] = field(default_factory=dict)  # learner -> incarnation
    merged: dict[tuple[str, int], int] = field(default_factory=dict)  # life -> up to which of its tokens


class BudgetHolds(Checker):
    """A run ends with the round that brings the merged tokens to the budget, and no schedule is further than they are.

    No token counts twice. What a learner has trained on it knows from the number of its step, not from its report.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._budget, self._step_tokens = cluster.scenario.budget
        self._reach = (
            2 * self.config.sync_every + self.config.overlap_steps
        )  # in lockstep a learner counts on by itself
        self._counted = Counted()
        self._kept: dict[int, Counted] = {}  # global step of a snapshot -> what was counted then
        self._asked: dict[tuple[int, str], int] = {}  # round and learner -> its tokens up to the step asked for
        self._values: dict[tuple[int, str], FragmentValue] = {}
        self._clocks: dict[tuple[str, int], int] = {}

    def on_syncer_back(self, machine: Syncer, rewound_to: int, now_s: float) -> None:
        super().on_syncer_back(machine, rewound_to, now_s)
        if rewound_to >= 0:
            self._counted = deepcopy(self._kept[rewound_to])
            self._values.clear()

    def on_syncer(self, given: LearnerMessage | None, effects: Effects, now_s: float) -> None:
        machine, names = self.cluster.syncer, {effect.peer for effect in effects if isinstance(effect, Drop)}
        if isinstance(given, FragmentValue) and given.learner_id not in names:
            self._values[given.global_step, given.learner_id] = given
        if isinstance(given, Hello) and given.learner_id not in names:
            self._counted.present[given.learner_id] = given.incarnation
        for effect in effects:
            if isinstance(effect, Note) and effect.kind == "closed" and effect.fragment_id >= 0:
                self._close(effect)
            elif isinstance(effect, Note) and effect.kind == "merged":
                self._merge(effect)
            elif isinstance(effect, Finish):
                ahead = self.config.sync_every if self.config.lockstep else 1  # to the next round
                done = machine.global_step + ahead > self.cluster.scenario.total_steps
                told = f"the run ends at global step {machine.global_step} with {self._counted.tokens} merged tokens"
                self.check(done or 0 < self._budget <= self._counted.tokens, f"{told}, not {self._budget}")
        theirs, ours = machine.progress.merged_tokens, self._counted.tokens
        self.check(theirs == ours, f"the syncer counts {theirs} merged tokens, merged are {ours}")
        self._kept |= {e.global_step: deepcopy(self._counted) for e in effects if isinstance(e, SaveSnapshot)}

    def _close(self, note: Note) -> None:
        here = {life: told for life, told in self._arrived().items() if told > self._counted.merged.get(life, 0)}
        due = self._counted.tokens + sum(told - self._counted.merged.get(life, 0) for life, told in here.items())
        self.check(not self._budget or due < self._budget, f"round {note.global_step} closes with {due} tokens")
        for name in note.members:
            node, member = self.cluster.nodes[name], self.cluster.syncer.membership.members[name]
            step_tokens = node.step_samples * self.cluster.scenario.sample_tokens
            self._asked[note.global_step, name] = member.local_step * step_tokens

    def _arrived(self) -> dict[tuple[str, int], int]:
        """Return, for present lives, up to which of their tokens the values reach that wait to be merged."""
        reached: dict[tuple[str, int], int] = {}
        for (global_step, name), value in self._values.items():
            life = (name, value.incarnation)
            if global_step in self.cluster.syncer.rounds.flying and self._counted.present[name] == value.incarnation:
                reached[life] = max(reached.get(life, 0), self._asked[global_step, name])
        return reached

    def _merge(self, note: Note) -> None:
        for name in note.members:
            value, told = self._values.pop((note.global_step, name)), self._asked[note.global_step, name]
            life, counted = (name, value.incarnation), self._counted
            if counted.present[name] == value.incarnation and told > counted.merged.get(life, 0):
                counted.tokens += min(value.tokens, told - counted.merged.get(life, 0))
                counted.merged[life] = told

    def on_step(self, process: LearnerProcess, began: bool, now_s: float) -> None:
        if not began:
            return
        clock, name = process.step.clock, process.name
        before = self._clocks.get(process.key, 0)
        self.check(clock >= before, f"the schedule of {name} goes back from step {before} to {clock}")
        self._clocks[process.key] = clock
        if not self._budget:
            self.check(
                clock == process.machine.global_step, f"the schedule of {name} leaves the global step for {clock}"
            )
            return
        due = self._counted.tokens // self._step_tokens + self._reach
        self.check(clock <= due, f"{name} trains at step {clock} of the schedule, {due} is the furthest")
