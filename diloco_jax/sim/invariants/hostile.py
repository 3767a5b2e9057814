"""The checker of what a hostile learner can do to others: nothing."""

from math import sqrt

from diloco_jax.protocol.effects import Merge, Note, Send
from diloco_jax.protocol.messages import LearnerMessage
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
