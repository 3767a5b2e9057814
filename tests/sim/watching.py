"""Simulated runs under every checker, and an observer that records them."""

from collections import Counter, defaultdict

from diloco_jax.protocol.effects import Adopt, Merge, Note, Send
from diloco_jax.protocol.messages import NO_VERSION, FragmentValue, GlobalFragment, Hello, LearnerMessage, SyncerMessage
from diloco_jax.sim.invariants.verdict import Verdict, judge
from diloco_jax.sim.node import Effects, LearnerProcess, Observer
from diloco_jax.sim.scenario import Scenario


class Watch(Observer):
    """Records the steps and adoptions of learners, and the merges, notes and sent versions of the syncer.

    Attributes:
        began, ended: learner -> times of its steps.
        adopted: process of a learner -> fragments and versions.
        read_s: version and learner -> time when the learner had decoded it.
        values: number of values that reached the syncer.
        whole, steps: receiver -> number of versions that were sent as a whole, and as a step.
    """

    def __init__(self) -> None:
        self.began: dict[str, list[float]] = defaultdict(list)
        self.ended: dict[str, list[float]] = defaultdict(list)
        self.merges: list[tuple[float, Merge]] = []
        self.adopted: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
        self.read_s: dict[tuple[int, str], float] = {}
        self.notes: list[tuple[float, Note]] = []
        self.values = 0
        self.greetings: Counter[str] = Counter()
        self.whole: Counter[str] = Counter()
        self.steps: Counter[str] = Counter()

    def on_step(self, process: LearnerProcess, began: bool, now_s: float) -> None:
        (self.began if began else self.ended)[process.name].append(now_s)

    def on_read(self, process: LearnerProcess, message: GlobalFragment, ok: bool, now_s: float) -> None:
        self.read_s.setdefault((message.version, process.name), now_s)

    def on_syncer(self, given: LearnerMessage | None, effects: Effects, now_s: float) -> None:
        self.values += isinstance(given, FragmentValue)
        if isinstance(given, Hello):
            self.greetings[given.learner_id] += 1
        for effect in effects:
            if isinstance(effect, Merge):
                self.merges.append((now_s, effect))
            elif isinstance(effect, Note):
                self.notes.append((now_s, effect))
            elif isinstance(effect, Send) and isinstance(effect.message, GlobalFragment):
                (self.whole if effect.message.base == NO_VERSION else self.steps)[effect.peer] += 1

    def on_learner(self, process: LearnerProcess, given: SyncerMessage | None, effects: Effects, now_s: float) -> None:
        self.adopted[process.key] += [(e.fragment_id, e.version) for e in effects if isinstance(e, Adopt)]

    def mergers(self, from_s: float, to_s: float) -> set[str]:
        """Return the learners that were merged in this time."""
        merges = [merge for at_s, merge in self.merges if from_s <= at_s < to_s]
        return {each.learner_id for merge in merges for each in merge.contributions}

    def times_s(self, kind: str) -> dict[int, float]:
        """Return round -> time of the syncer's note of this kind."""
        return {note.global_step: at_s for at_s, note in self.notes if note.kind == kind}

    def gaps_s(self, name: str) -> list[float]:
        """Return the times between the ends of a learner's steps."""
        return [after - before for before, after in zip(self.ended[name], self.ended[name][1:], strict=False)]


def judged(scenario: Scenario, watch: Watch | None = None) -> Verdict:
    """Simulate under all checkers. Every rule must hold, so the run is complete too."""
    verdict = judge(scenario, observers=[watch] if watch is not None else [])
    assert not verdict.problem, verdict
    return verdict


def watched(scenario: Scenario) -> Watch:
    """Simulate like `judged`, and return the record."""
    judged(scenario, watch := Watch())
    return watch
