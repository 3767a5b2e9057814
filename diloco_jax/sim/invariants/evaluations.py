"""The checker of evaluations of the global model."""

from diloco_jax.protocol.effects import Adopt, Evaluated, EvaluateModel, Finish, Note, Send
from diloco_jax.protocol.messages import Evaluate, LearnerMessage, Score, SyncerMessage
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.invariants.checker import Checker
from diloco_jax.sim.node import Effects, LearnerProcess

ATTEMPTS_MAX = 3


class ScoresAreOfTheModel(Checker):
    """A learner that evaluates does nothing else, and tells of what it held then; one of a corpus is asked at a time.

    At the end the final model is told of, all of it, or that nobody of a corpus could evaluate it.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._held: dict[tuple[str, int], dict[int, int]] = {}
        # Versions that a process is evaluating.
        self._busy: dict[tuple[str, int], tuple[int, ...]] = {}
        # Number of a request -> the learner that got it.
        self._asked: dict[int, str] = {}
        self._finished = False
        # Outcomes since the end of the run, or since the syncer lost it.
        self._outcomes: list[str] = []
        self._attempts = 0

    def on_learner(
        self, process: LearnerProcess, message: SyncerMessage | None, effects: Effects, now_s: float
    ) -> None:
        key, count = process.key, self.config.num_fragments
        held = self._held.setdefault(key, {})
        for effect in effects:
            if isinstance(effect, Adopt):
                self.check(key not in self._busy, f"{process.name} does {effect} while it evaluates")
                held[effect.fragment_id] = effect.version
            elif isinstance(effect, EvaluateModel):
                self.check(key not in self._busy and len(held) == count, f"{process.name} cannot do {effect} now")
                self._busy[key] = tuple([held[p] for p in range(count)])
            elif isinstance(effect, Send) and isinstance(effect.message, Score) and key in self._busy:
                versions = self._busy.pop(key)
                self.check(effect.message.versions == versions, f"{effect.message} is of {versions}")
        if key in self._busy and not process.machine.examination.running:
            # The evaluation ended without a link.
            del self._busy[key]

    def on_step(self, process: LearnerProcess, began: bool, now_s: float) -> None:
        self.check(process.key not in self._busy, f"{process.name} steps while it evaluates")

    def on_syncer(self, message: LearnerMessage | None, effects: Effects, now_s: float) -> None:
        for effect in effects:
            if isinstance(effect, Note) and effect.kind == "finished":
                self._finished, self._outcomes, self._attempts = True, [], 0
            elif isinstance(effect, Send) and isinstance(effect.message, Evaluate):
                number = effect.message.number
                newest = max(self._asked, default=0)
                self.check(number in self._asked or number > newest, f"{effect} after request {newest}")
                self._attempts += number not in self._asked
                whom = self._asked.setdefault(number, effect.peer)
                self.check(whom == effect.peer, f"request {number} goes to {effect.peer} and {whom}")
                self.check(bool(effect.message.versions) == self._finished, f"{effect}, finished: {self._finished}")
            elif isinstance(effect, Evaluated):
                score = effect.score
                self._outcomes.append("evaluated")
                self.check(score.loss == score.loss, f"{score} has no loss")
                versions = tuple([version for version, _ in self.values])
                self.check(not self._finished or score.versions == versions, f"{score} is not of {versions}")
            elif isinstance(effect, Note) and effect.kind == "unevaluated":
                self._outcomes.append("unevaluated")
            elif isinstance(effect, Finish) and self.cluster.scenario.plan.wait_s:
                several = any(member.corpus for member in self.cluster.syncer.membership.members.values())
                told = len(self._outcomes) == 1 or (several and self._outcomes.count("evaluated") <= 1)
                self.check(told and bool(self._outcomes), f"the run ends, its final model is: {self._outcomes}")
                most = ATTEMPTS_MAX * len({member.corpus for member in self.cluster.syncer.membership.members.values()})
                self.check(self._attempts <= most, f"{self._attempts} learners were asked for the final model")

    def on_syncer_back(self, machine: Syncer, rewound_to: int, now_s: float) -> None:
        super().on_syncer_back(machine, rewound_to, now_s)
        self._finished = machine.finished
        if rewound_to >= 0:
            self._asked = {}
