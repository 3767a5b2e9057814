"""Checkers of learners that train."""

from collections import defaultdict
from dataclasses import dataclass

from diloco_jax.protocol.effects import (
    Adopt,
    AdoptState,
    Drop,
    EvaluateModel,
    Finish,
    Send,
    Stage,
    Unstage,
    UnstageState,
)
from diloco_jax.protocol.learner.machine import Learner
from diloco_jax.protocol.messages import (
    Advance,
    AnchorRequest,
    FragmentValue,
    GlobalFragment,
    Hello,
    PullRequest,
    StatePull,
    StepReport,
    SyncerMessage,
    Welcome,
)
from diloco_jax.protocol.watch.sample_book import Incarnation
from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.fault import Fault
from diloco_jax.sim.invariants.checker import Checker
from diloco_jax.sim.node import Effects, LearnerProcess

# Largest number of copies of one fragment, see protocol/learner/stager.py.
STAGED_COPIES_MAX = 3
# A new leader may lack the last step of the leader before it, and the step that was being made.
STEPS_LOST_MAX = 1
# Sums of floating-point times differ by less than this, in seconds.
ROUNDING_S = 1e-6


class NeverWaits(Checker):
    """Outside lockstep and without `wait_steps` a learner that has begun to train is always in a step, without gaps.

    Whatever happens meanwhile: the syncer is dead, leases are used up, another learner takes its state over. It stops
    for an evaluation of the global model alone. WaitsBounded has the rule for runs with `wait_steps`.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._ended: dict[tuple[str, int], float] = {}
        self._may_wait = self.config.lockstep or self.config.wait_steps > 0

    def on_step(self, process: LearnerProcess, began: bool, now_s: float) -> None:
        key = process.key
        if not began:
            self._ended[key] = now_s
        elif not self._may_wait:
            waited_s = now_s - self._ended.get(key, now_s)
            self.check(waited_s == 0, f"{process.name} waited {waited_s} s between two steps")

    def on_learner(
        self, process: LearnerProcess, message: SyncerMessage | None, effects: Effects, now_s: float
    ) -> None:
        if any(isinstance(effect, EvaluateModel) for effect in effects):
            self._ended.pop(process.key, None)

    def on_state(self, process: LearnerProcess, effect: AdoptState, ok: bool, now_s: float) -> None:
        self.check(process.key not in self._ended, f"{process.name} has trained, but does {effect}")

    def on_settled(self, process: LearnerProcess, now_s: float) -> None:
        if not (self._may_wait or process.step.runs):
            began = process.key in self._ended
            self.check(not began, f"{process.name} has trained, but does not step")


@dataclass(slots=True)
class _Book:
    """The past of one process: its steps, and the rounds that it has seen."""

    began_s: float = 0.0
    # End of its last step; None before the first one, and after it was asked to evaluate.
    ended_s: float | None = None
    steps: int = 0
    longest_s: float = 0.0
    # The newest round that a message has shown as over, and the newest one that is over or has requested a value.
    over: int = 0
    known: int = 0
    # The round that was open at the end of the last step, and the last round that the process waited for.
    open_round: int = 0
    waited_round: int = 0
    waits: bool = False


class WaitsBounded(Checker):
    """A learner waits at most `wait_steps` of its steps, once for a round, while that is open.

    It waits only while it has a link, and only for a round whose fragment is due.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._books: dict[tuple[str, int], _Book] = defaultdict(_Book)
        self._turns = self.config.turns
        self._watches = self.config.wait_steps > 0

    def on_learner(
        self, process: LearnerProcess, message: SyncerMessage | None, effects: Effects, now_s: float
    ) -> None:
        if not self._watches:
            return
        book = self._books[process.key]
        if isinstance(message, GlobalFragment):
            book.over = max(book.over, message.version)
            book.known = max(book.known, message.version, message.global_step)
        elif isinstance(message, Advance | Welcome):
            book.over = max(book.over, message.global_step)
            book.known = max(book.known, message.global_step)
        elif isinstance(message, PullRequest):
            book.known = max(book.known, message.global_step)
        if any(isinstance(effect, EvaluateModel) for effect in effects):
            book.ended_s = None

    def on_step(self, process: LearnerProcess, began: bool, now_s: float) -> None:
        if not self._watches:
            return
        book = self._books[process.key]
        if began:
            self._check_length(process, book, now_s)
            book.began_s, book.waits = now_s, False
            return
        # The first step may compile, so it is not a measure of the others.
        book.steps += 1
        if book.steps > 1:
            book.longest_s = max(book.longest_s, now_s - book.began_s)
        book.ended_s, book.open_round = now_s, book.known + 1

    def _check_length(self, process: LearnerProcess, book: _Book, now_s: float) -> None:
        if book.ended_s is None:
            return
        limit_s = self.config.wait_steps * book.longest_s
        # A paused process cannot start a step.
        until_s = max(book.ended_s + limit_s, process.paused_s) + ROUNDING_S
        waited_s = now_s - book.ended_s
        self.check(now_s <= until_s, f"{process.name} waited {waited_s:.3f} s between two steps, limit {limit_s:.3f} s")

    def on_settled(self, process: LearnerProcess, now_s: float) -> None:
        if not self._watches or process.step.runs:
            return
        book = self._books[process.key]
        if book.ended_s is None:
            return
        self._check_length(process, book, now_s)
        name, number = process.name, book.open_round
        self.check(process.link is not None, f"{name} waits without a link")
        self.check(self._turns.due(number) >= 0, f"{name} waits for round {number}, where no fragment is due")
        self.check(book.over < number, f"{name} waits for round {number}, which is over")
        if not book.waits:
            self.check(book.waited_round < number, f"{name} waits again for round {number}")
            book.waits, book.waited_round = True, number


class StepsUndisturbed(Checker):
    """While a step runs a machine gets only what its header allows, and nothing changes that the step depends on."""

    ANSWERED = (PullRequest, AnchorRequest, StatePull)
    # All other effects change the training state or belong to a recovery.
    DONE = (Send, Drop, Unstage, UnstageState, Finish)

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._began: dict[tuple[str, int], tuple[object, ...]] = {}

    def on_learner(
        self, process: LearnerProcess, message: SyncerMessage | None, effects: Effects, now_s: float
    ) -> None:
        if process.step.runs:
            allowed = message is None or isinstance(message, self.ANSWERED)
            self.check(allowed, f"{process.name} is given {message} while a step runs")
            for effect in effects:
                self.check(isinstance(effect, self.DONE), f"{process.name} does {effect} while a step runs")

    def on_step(self, process: LearnerProcess, began: bool, now_s: float) -> None:
        key, now = process.key, _depended_on(process.machine)
        if began:
            self._began[key] = now
        else:
            before = self._began.pop(key)
            self.check(now == before, f"{process.name} began a step with {before}, and ends it with {now}")


def _depended_on(machine: Learner) -> tuple[object, ...]:
    counters = (machine.local_step, machine.tokens, machine.samples, machine.global_step)
    return (machine.state, *counters, machine.adopted, tuple(machine.digests))


class FreshLearnersKeepQuiet(Checker):
    """A learner neither steps, reports nor contributes before it holds a global value of every fragment."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._held: dict[tuple[str, int], set[int]] = defaultdict(set)

    def on_learner(
        self, process: LearnerProcess, message: SyncerMessage | None, effects: Effects, now_s: float
    ) -> None:
        held = self._held[process.key]
        for effect in effects:
            if isinstance(effect, Adopt):
                held.add(effect.fragment_id)
            elif isinstance(effect, Send) and isinstance(effect.message, StepReport | FragmentValue):
                self._check_held(process.name, held, f"sends {type(effect.message).__name__}")

    def on_step(self, process: LearnerProcess, began: bool, now_s: float) -> None:
        self._check_held(process.name, self._held[process.key], "steps")

    def _check_held(self, name: str, held: set[int], does: str) -> None:
        count = self.config.num_fragments
        self.check(len(held) == count, f"{name} {does}, but holds {len(held)} of {count} fragments")


class CopiesBounded(Checker):
    """Staged copies are few, each is freed once, and a value is sent only from a copy that is there."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._staged: dict[tuple[str, int], dict[int, list[int]]] = defaultdict(dict)

    def on_learner(
        self, process: LearnerProcess, message: SyncerMessage | None, effects: Effects, now_s: float
    ) -> None:
        source, staged = process.name, self._staged[process.key]
        for effect in effects:
            if isinstance(effect, Stage):
                steps = staged.setdefault(effect.fragment_id, [])
                self.check(not steps or effect.local_step > steps[-1], f"{source} stages again: {effect}")
                steps.append(effect.local_step)
            elif isinstance(effect, Unstage):
                steps = staged.get(effect.fragment_id, [])
                self.check(effect.local_step in steps, f"{source} frees what it does not hold: {effect}")
                steps.remove(effect.local_step)
                if not steps:
                    del staged[effect.fragment_id]
            elif isinstance(effect, Send) and isinstance(effect.message, FragmentValue):
                value = effect.message
                steps = staged.get(value.fragment_id, [])
                self.check(value.local_step in steps, f"{source} sends {value}, but holds copies of steps {steps}")
        most = max(map(len, staged.values()), default=0)
        self.check(most <= STAGED_COPIES_MAX, f"{source} holds {most} copies of one fragment")
        # Copies for the next rounds, and copies that were requested before they were staged.
        limit = 2 * max(1, self.config.overlap_steps)
        self.check(len(staged) <= limit, f"{source} holds copies of {len(staged)} fragments, limit {limit}")


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
