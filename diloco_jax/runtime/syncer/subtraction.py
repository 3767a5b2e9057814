"""Is the model better with an island's contribution than without it? Other islands judge, on their held-out data.

A round merges the contributions of all islands m; leaving out island i gives another version of its fragment:

    Theta    = update(merge(v_m for all m))
    Theta_-i = update(merge(v_m for m != i))
    gain_i   = L(model with Theta_-i) - L(model with Theta), in nats per token

with L on the same held-out batches. At an evaluation that is due anyway, the syncer sends Theta_-i - Theta to the
islands that evaluate, which add it to whatever version they hold. One island is tested per evaluation, in turn. No
island judges its own contribution, and a request does not say whose it is about. No rule reads the result.

A contribution is a small step, so a gain is small beside the loss, and half of those of a healthy island may be
negative. Hence the alarm is about many in a row. Of several corpora the one with the best gain counts, so that a site
whose data are unlike all others makes nobody else look bad.
"""

from collections import deque
from collections.abc import Collection
from math import nan

from diloco_jax.protocol.corpora import RUN
from diloco_jax.protocol.effects import Merge
from diloco_jax.protocol.messages import SCORES_MAX, WITHOUT, Evaluate, EvaluateWithout, Hello, Metric, Score
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.watch.alarms import Alarm
from diloco_jax.runtime.model.global_model import Subtracted

# So many newest gains of an island must all be negative until there is an alarm, and their mean below this share of the
# loss. In a healthy run eight in a row were negative once, and their mean was half of this share.
LOSSES_MIN, HARM_MIN = 8, 0.001
GAIN = "gain of "
# A loss that states more is not used, so that sums stay finite. The loss of an own loop may be 0.
LOSS_MAX, TINY = 1e30, 1e-9


class Subtraction:
    """The tests of a run's contributions; a process of the syncer begins without any.

    Args:
        on: whether contributions are tested (`evaluation.subtract`).
        syncer: is only asked.
    """

    def __init__(self, on: bool, syncer: Syncer) -> None:
        self._on, self._syncer = on, syncer
        # The connected learners that can judge.
        self._judges: set[str] = set()
        # How often each island was tested.
        self._turns: dict[str, int] = {}
        # What the next evaluation tests, or the one that is under way.
        self._subject: Subtracted | None = None
        # By number of a request that was sent with it: the learner and its corpus.
        self._sent: dict[int, tuple[str, str]] = {}
        # By corpus: the losses with and without the contribution.
        self._losses: dict[str, tuple[float, float]] = {}
        # The newest gains of each island as shares of the loss, oldest first: of several corpora, the best for it.
        self._best: dict[str, deque[float]] = {}

    def choose(self, order: Merge) -> str:
        """Return the learner whose part in a merge is to be tested; "" for none.

        An evaluation begins after the merge during which its step was closed. As more rounds may close until then, some
        merges are asked in vain.
        """
        names = [each.learner_id for each in order.contributions]
        if not self._on or len(names) < 2:
            return ""
        evaluations = self._syncer.evaluations
        ahead = max(1, self._syncer.config.overlap_steps)
        if not evaluations.due(max(order.global_step, self._syncer.progress.global_step) + ahead - 1):
            return ""
        asked = evaluations.next_asked()
        # The only judge could not be tested.
        return min(names, key=lambda each: (asked == [each], self._turns.get(each, 0), each))

    def on_message(self, message: Hello | Score) -> None:
        """Take a greeting or an answer, before the machine does."""
        if isinstance(message, Hello):
            self._judges -= {message.learner_id}
            self._judges |= {message.learner_id} if message.judges else set()
        elif (sent := self._sent.get(message.number)) is not None and sent[0] == message.learner_id:
            losses = message.loss, dict(message.scores).get(WITHOUT, nan)
            if all(abs(loss) < LOSS_MAX for loss in losses):
                self._losses[sent[1]] = losses

    def on_merged(self, subtracted: Subtracted | None) -> None:
        """Take what a merge that was asked for it found, before the machine hears of the merge."""
        # An evaluation tests the newest round before it, and the same in all its requests.
        if not self._syncer.evaluations.open:
            self._subject, self._sent, self._losses = subtracted, {}, {}

    def request(self, peer: str, message: Evaluate) -> tuple[Evaluate | EvaluateWithout | None, bytes | memoryview]:
        """Return the request to send to a learner, with its payload; None if it was sent already.

        The links lose nothing while they last, and a second payload would only delay other messages.
        """
        if message.number in self._sent:
            return None, b""
        subject = self._subject
        if subject is None or message.versions or subject.learner_id == peer or peer not in self._judges:
            return message, b""
        if not self._sent:
            self._turns[subject.learner_id] = self._turns.get(subject.learner_id, 0) + 1
        self._sent[message.number] = peer, self._syncer.membership.members[peer].corpus
        payload = subject.change.view("u1").data.toreadonly()
        return EvaluateWithout(message.number, subject.fragment_id, len(payload)), payload

    def on_score(self, score: Score) -> Score:
        """Return the result of an evaluation with the gains in place of the losses that they follow from."""
        subject, losses, corpora = self._subject, self._losses, {corpus for _, corpus in self._sent.values()}
        self._subject, self._sent, self._losses = None, {}, {}
        if subject is None or not corpora:
            return score
        names = {WITHOUT, *(f"{corpus or RUN} {WITHOUT}" for corpus in corpora)}
        kept = [each for each in score.scores if each.name not in names]
        gains = {corpus: without - loss for corpus, (loss, without) in losses.items()}
        if not gains:
            return score._replace(scores=tuple(kept))
        name = subject.learner_id
        shares = [gain / max(abs(losses[corpus][0]), TINY) for corpus, gain in gains.items()]
        self._best.setdefault(name, deque(maxlen=LOSSES_MIN)).append(max(shares))
        found = [Metric(f"{GAIN}{name}", _mean(gains.values()))]
        if any(self._syncer.membership.corpora.known):
            found += [Metric(f"{corpus or RUN} {GAIN}{name}", gain) for corpus, gain in sorted(gains.items())]
        return score._replace(scores=(*kept, *found)[:SCORES_MAX])

    def alarms(self, active: Collection[str]) -> list[Alarm]:
        """List an alarm for each active island whose newest contributions all made the model worse, on each corpus."""
        return [
            Alarm(
                "harm",
                name,
                f"in each of the last {LOSSES_MIN} tests the held-out loss was lower without the contribution of "
                f"{name}, by {-_mean(shares):.2%} on average",
            )
            for name, shares in sorted(self._best.items())
            if name in active and len(shares) == LOSSES_MIN and max(shares) < 0 and _mean(shares) < -HARM_MIN
        ]


def _mean(values: Collection[float]) -> float:
    return sum(values) / len(values)
