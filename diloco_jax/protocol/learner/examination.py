"""Evaluations that a learner is asked for: of the global values that it holds, one at a time, between two steps."""

from diloco_jax.protocol.effects import Effect, EvaluateModel, Send
from diloco_jax.protocol.learner.anchors import Anchors
from diloco_jax.protocol.messages import NO_VERSION, SYNCER, Evaluate, Score


class Examination:
    """The request that a learner works on, and its newest answer."""

    def __init__(self, learner_id: str, incarnation: int, anchors: Anchors) -> None:
        self.running = False  # the driver evaluates
        self.over = False  # the final model is evaluated: there is no step to make any more
        self._who = (learner_id, incarnation)
        self._anchors = anchors
        self._wanted: Evaluate | None = None  # newest request that has no answer yet
        self._score: Score | None = None

    @property
    def holds(self) -> bool:
        """True while no step may begin."""
        return self.running or self.over

    @property
    def lacks(self) -> bool:
        """True while the values are not here that are to be evaluated."""
        wanted, held = self._wanted, self._anchors.versions
        return wanted is not None and (NO_VERSION in held or held != (wanted.versions or held))

    def on_request(self, message: Evaluate) -> list[Effect]:
        """Take a request; one that is answered already gets its answer again."""
        if self._score is not None and self._score.number == message.number:
            return [Send(SYNCER, self._score)]
        if self._wanted is None or message.number > self._wanted.number:
            self._wanted = message
        return []

    def begin(self, global_step: int, effects: list[Effect]) -> None:
        """Evaluate, if that is wanted and can be done."""
        if self._wanted is not None and not (self.running or self.lacks):
            self.running = True
            effects.append(EvaluateModel(global_step, final=bool(self._wanted.versions)))

    def on_evaluated(self, found: Score, global_step: int) -> Send:
        """Answer with what the driver found; it does not know the first five fields."""
        wanted, self._wanted = self._wanted, None
        assert self.running and wanted is not None, "nobody asked for a score"
        self.running, self.over = False, bool(wanted.versions)
        (learner_id, incarnation), versions = self._who, self._anchors.versions
        self._score = found._replace(
            learner_id=learner_id,
            incarnation=incarnation,
            number=wanted.number,
            global_step=global_step,
            versions=versions,
        )
        return Send(SYNCER, self._score)
