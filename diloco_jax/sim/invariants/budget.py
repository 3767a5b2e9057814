"""The checker of token budgets: which tokens count as merged, the end by them, and the schedule that follows them."""

from copy import deepcopy
from dataclasses import dataclass, field

from diloco_jax.protocol.effects import Drop, Finish, Note, SaveSnapshot
from diloco_jax.protocol.messages import FragmentValue, Hello, LearnerMessage
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.invariants.checker import Checker
from diloco_jax.sim.node import Effects, LearnerProcess

Incarnation = tuple[str, int]


@dataclass(slots=True)
class Counted:
    """The tokens of a run that rounds have merged, and who gave them."""

    tokens: int = 0
    # Learner -> its connected incarnation.
    present: dict[str, int] = field(default_factory=dict)
    # Number of each process's tokens that are merged.
    merged: dict[Incarnation, int] = field(default_factory=dict)

    def news(self, incarnation: Incarnation, told: int) -> int:
        """Return the unmerged tokens of a process up to these; 0 for a process that was replaced."""
        return max(0, told - self.merged.get(incarnation, 0)) if self.present[incarnation[0]] == incarnation[1] else 0


class BudgetHolds(Checker):
    """No token counts twice, the end is where they reach the budget, and no schedule is further than they are."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._budget, self._step_tokens = cluster.scenario.budget
        # in lockstep a learner counts on by itself
        self._reach = 2 * self.config.groups.gap_max + self.config.overlap_steps
        self._counted = Counted()
        # Global step of a snapshot -> the counts at that time.
        self._kept: dict[int, Counted] = {}
        # Round and learner -> its tokens up to the requested step.
        self._asked: dict[tuple[int, str], int] = {}
        # Round -> tokens of each value.
        self._values: dict[int, dict[Incarnation, int]] = {}
        self._clocks: dict[Incarnation, int] = {}
        # Tokens of each process after each of its steps.
        self._made: dict[Incarnation, list[int]] = {}

    def on_syncer_back(self, machine: Syncer, rewound_to: int, now_s: float) -> None:
        super().on_syncer_back(machine, rewound_to, now_s)
        if rewound_to >= 0 and not self.hostile:
            self._counted, self._values = deepcopy(self._kept[rewound_to]), {}

    def on_syncer(self, message: LearnerMessage | None, effects: Effects, now_s: float) -> None:
        if self.hostile:
            # It reports its own token count; hostile.py bounds how much of it counts.
            return
        machine = self.cluster.syncer
        dropped = {effect.peer for effect in effects if isinstance(effect, Drop) and effect.global_step < 0}
        if isinstance(message, FragmentValue) and message.learner_id not in dropped:
            self._values.setdefault(message.global_step, {})[message.learner_id, message.incarnation] = message.tokens
        if isinstance(message, Hello) and message.learner_id not in dropped:
            self._counted.present[message.learner_id] = message.incarnation
        for effect in effects:
            if isinstance(effect, Note) and effect.kind == "closed":
                self._close(effect)
            elif isinstance(effect, Note) and effect.kind == "merged":
                for incarnation, tokens in self._values.pop(effect.global_step).items():
                    if incarnation[0] in effect.members:
                        told = self._asked[effect.global_step, incarnation[0]]
                        self._counted.tokens += min(tokens, self._most(self._counted.news(incarnation, told)))
                        self._counted.merged[incarnation] = max(told, self._counted.merged.get(incarnation, 0))
            elif isinstance(effect, Finish):
                ahead = self.config.groups.gap_max if self.config.lockstep else 1
                done = machine.global_step + ahead > self.cluster.scenario.total_steps
                told_so = f"the run ends at global step {machine.global_step} with {self._counted.tokens} merged tokens"
                self.check(done or 0 < self._budget <= self._counted.tokens, f"{told_so}, not {self._budget}")
        theirs, ours = machine.progress.merged_tokens, self._counted.tokens
        self.check(theirs == ours, f"the syncer counts {theirs} merged tokens, merged are {ours}")
        self._kept |= {e.global_step: deepcopy(self._counted) for e in effects if isinstance(e, SaveSnapshot)}

    def _most(self, tokens: int) -> int:
        """Return the tokens that one value counts towards the budget, however long its learner was away."""
        return min(tokens, self.cluster.syncer.progress.value_tokens_max) if self._budget else tokens

    def _close(self, note: Note) -> None:
        # Tokens of the values that wait to be merged.
        due: dict[Incarnation, int] = {}
        for global_step in self._values.keys() & self.cluster.syncer.rounds.flying.keys():
            for incarnation in self._values[global_step]:
                news = self._counted.news(incarnation, self._asked[global_step, incarnation[0]])
                due[incarnation] = max(due.get(incarnation, 0), self._most(news))
        tokens = self._counted.tokens + sum(due.values())
        self.check(not self._budget or tokens < self._budget, f"round {note.global_step} closes with {tokens} tokens")
        # The number of the step decides, not the report.
        for name in note.members:
            made = self._made.get((name, self._counted.present[name]), [])
            step = self.cluster.syncer.membership.members[name].local_step
            self._asked[note.global_step, name] = made[step - 1] if step else 0

    def on_step(self, process: LearnerProcess, began: bool, now_s: float) -> None:
        if not began:
            made = self._made.setdefault(process.key, [])
            made.append((made[-1] if made else 0) + process.step.samples * self.cluster.scenario.sample_tokens)
        elif not self.hostile:
            clock, before = process.step.clock, self._clocks.get(process.key, 0)
            furthest = self._counted.tokens // self._step_tokens + self._reach
            self.check(clock >= before, f"the schedule of {process.name} goes back from step {before} to {clock}")
            follows = clock <= furthest if self._budget else clock == process.machine.global_step
            self.check(follows, f"{process.name} trains at step {clock} of the schedule, {furthest} is the furthest")
            self._clocks[process.key] = clock
