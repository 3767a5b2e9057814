"""The checkers of learners that nobody wants: hostile ones do no harm, and banned ones take no part."""

from math import sqrt

from diloco_jax.protocol.effects import Drop, Merge, Note, Send
from diloco_jax.protocol.messages import Expel, Hello, LearnerMessage, Refuse, Welcome
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.invariants.checker import Checker
from diloco_jax.sim.node import Effects

# Largest number in a message, except for digests.
CARRIED_MAX = 1 << 62


class HostileIsHarmless(Checker):
    """For any message of a learner, the syncer sends only valid messages, and no impossible counter shows in a merge.

    Rounds of the other learners close meanwhile, and the run ends at its last step.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        most = max(node.step_samples for node in cluster.nodes.values())
        # A weight is tokens^2 / steps, and the limit is one of weights.
        self._step_tokens_max = sqrt(self.config.tokens_per_step_factor_max) * most * cluster.scenario.sample_tokens

    def on_syncer(self, message: LearnerMessage | None, effects: Effects, now_s: float) -> None:
        if not self.hostile:
            return
        for effect in effects:
            if isinstance(effect, Send):
                fields = zip(effect.message._fields, effect.message, strict=True)
                numbers = [value for name, value in fields if isinstance(value, int) and name != "digest"]
                sendable = all(-CARRIED_MAX <= number <= CARRIED_MAX for number in numbers)
                self.check(sendable, f"{message} led to what cannot be sent: {effect.message}")
            elif isinstance(effect, Merge):
                self._merge(effect)
            elif isinstance(effect, Note) and effect.kind == "finished":
                machine = self.cluster.syncer
                steps, tokens = machine.progress.total_steps, machine.progress.budget.tokens
                step = self.cluster.scenario.config.turns.next_due(machine.global_step)
                ended = step > steps or 0 < tokens <= machine.progress.merged_tokens
                self.check(ended, f"the run ends at global step {machine.global_step} of {steps}")
        machine = self.cluster.syncer
        self.check(max(machine.versions) <= machine.global_step <= machine.progress.total_steps, f"{machine.versions}")

    def _merge(self, merge: Merge) -> None:
        honest = [each for each in merge.contributions if each.learner_id not in self.hostile]
        for part in merge.contributions:
            member = self.cluster.syncer.membership.members[part.learner_id]
            steps = member.local_step
            this = self.cluster.syncer.rounds.flying.get(merge.global_step)
            current = this is not None and part.learner_id not in this.former
            self.check(not current or part.steps <= steps, f"{part} of a learner that has made {steps} steps at most")
            if honest:
                most = self._step_tokens_max * part.steps
                self.check(part.tokens <= most, f"{part} has more than {most} tokens beside {honest}")


class BansHold(Checker):
    """From its ban until it is admitted, a learner gets no answer but refusals, and no merge gets a value of it.

    A ban outlives every process of the syncer, and rewinds. LeasesAccount checks that no data is lost.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._banned: set[str] = set()
        self._connected: set[str] = set()

    def on_syncer_back(self, machine: Syncer, rewound_to: int, now_s: float) -> None:
        super().on_syncer_back(machine, rewound_to, now_s)
        self._connected.clear()

    def on_syncer(self, message: LearnerMessage | None, effects: Effects, now_s: float) -> None:
        if message is not None and message.learner_id in self._banned:
            allowed = (Drop, Send) if isinstance(message, Hello) else (Drop,)
            led = [each for each in effects if not isinstance(each, allowed)]
            self.check(not led, f"{message} of a banned learner led to {led}")
        for effect in effects:
            if isinstance(effect, Note):
                self._note(effect, effects)
            elif isinstance(effect, Merge):
                names = self._banned & {each.learner_id for each in effect.contributions}
                self.check(not names, f"round {effect.global_step} merges {sorted(names)}, who are banned")
            elif isinstance(effect, Send) and effect.peer in self._banned:
                told = isinstance(effect.message, Expel | Refuse)
                self.check(told, f"{effect.peer} is banned, but gets {effect.message}")
            elif isinstance(effect, Send) and isinstance(effect.message, Welcome):
                self._connected.add(effect.peer)

    def _note(self, note: Note, effects: Effects) -> None:
        if note.kind in ("left", "disconnected"):
            self._connected.discard(note.members[0])
        elif note.kind == "admitted":
            self._banned.discard(note.members[0])
        elif note.kind == "banned":
            (name,) = note.members
            self._banned.add(name)
            expelled = any(isinstance(e, Send) and e.peer == name and isinstance(e.message, Expel) for e in effects)
            self.check(expelled or name not in self._connected, f"{name} is banned and connected, but not expelled")
