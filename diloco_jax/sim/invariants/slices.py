"""The checker of islands that lose slices and get them back."""

from collections import defaultdict

from diloco_jax.protocol.effects import AdoptState, Send
from diloco_jax.protocol.messages import Hello, SyncerMessage
from diloco_jax.protocol.watch.sample_book import Incarnation
from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.fault import Fault
from diloco_jax.sim.invariants.checker import Checker
from diloco_jax.sim.node import Effects, LearnerProcess

# A new leader may lack the last step of the leader before it, and the step that was being made.
STEPS_LOST_MAX = 1


class SlicesLoseLittle(Checker):
    """A lost slice costs its island no step, and a lost leader at most one, besides the step that was being made.

    Every step has the parts of all slices; where the batch shrinks, of those that were there when its samples were
    drawn. A new leader is the next incarnation of its learner, and its state is of the newest steps of the one before.
    LeasesAccount has the fates of samples.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        # Steps that each process has ended.
        self._steps: dict[Incarnation, int] = defaultdict(int)
        # Samples that steps may have: drawn with the slices of now, or one step ahead.
        self._drawn: dict[Incarnation, list[int]] = defaultdict(list)
        # Learner -> incarnation and steps of its process when a fault took slices, but not the leading one.
        self._survives: dict[str, tuple[int, int]] = {}
        self._greeted: dict[str, int] = defaultdict(int)

    def on_fault(self, fault: Fault, now_s: float) -> None:
        # Any other fault, at the same time too, may end the process.
        self._survives.clear()
        if fault.kind != "slice" or fault.leads:
            return
        for name in fault.learners:
            if (process := self.cluster.nodes[name].process) is not None and process.step.runs:
                self._survives[name] = process.incarnation, self._steps[process.key]

    def on_learner(
        self, process: LearnerProcess, message: SyncerMessage | None, effects: Effects, now_s: float
    ) -> None:
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, Hello):
                before, now = self._greeted[process.name], effect.message.incarnation
                self.check(now >= before, f"{process.name} greets as incarnation {now} after {before}")
                self._greeted[process.name] = now

    def on_step(self, process: LearnerProcess, began: bool, now_s: float) -> None:
        node, key = process.node, process.key
        if began:
            part = node.step_samples // node.slices
            there = part * (node.slices - node.missing) if node.shrinks else node.step_samples
            # This step may have been drawn before slices were lost or came back.
            fits = [there, *self._drawn[key][-1:]] if self.cluster.scenario.reads_ahead else [there]
            samples = process.step.samples
            self.check(samples in fits, f"a step of {process.name} has {samples} samples, expected {fits}")
            self._drawn[key].append(there)
            return
        self._steps[key] += 1
        expected = self._survives.pop(process.name, None)
        made = process.incarnation, self._steps[key] - 1
        self.check(expected in (None, made), f"{process.name} lost a slice at {expected}, and ends a step at {made}")

    def on_state(self, process: LearnerProcess, effect: AdoptState, ok: bool, now_s: float) -> None:
        kept = process.node.kept
        if effect.donor or kept is None:
            return
        steps, name = self._steps[process.name, kept.incarnation], process.name
        # Several leaders may be lost before one of them has made a step.
        between = [self._steps[name, number] for number in range(kept.incarnation + 1, process.incarnation)]
        self.check(not any(between), f"{name} continues from incarnation {kept.incarnation}, and later ones made steps")
        lost = steps - kept.local_step
        self.check(0 <= lost <= STEPS_LOST_MAX, f"{name} continues from step {kept.local_step} of {steps}")
