"""Answers that members owe: a member that left pulls unanswered is asked less often, so that nobody waits for it.

The answer to a pull is owed after ANSWER_STEPS steps of the member, and if it owed none so far, not before the pull is
repeated. A round that waits only for owed answers ends as soon as it keeps the next round from opening. After each such
end the member is asked half as often: in every 1st, 2nd, 4th ... 64th round. So is one whose answer came, but had kept
the next round from opening for ANSWER_STEPS steps, or belongs to a version that is no longer kept. One answer in time
ends all of this.
"""

from collections.abc import Mapping
from typing import NamedTuple

# A learner answers between two steps, so the step that runs when the pull arrives comes first.
ANSWER_STEPS = 2.0
# A member that owes an answer is asked at least once in so many rounds.
ASKED_EVERY_MAX = 64


class Owed(NamedTuple):
    """Pulls in a row that ended without a member's answer, and the round of the newest of them."""

    pulls: int
    global_step: int

    @property
    def asked_every(self) -> int:
        """Number of rounds from one pull of the member to its next."""
        return min(1 << min(self.pulls - 1, 16), ASKED_EVERY_MAX)

    def after(self, global_step: int) -> "Owed":
        """Return what the member owes after another pull without its answer."""
        return Owed(self.pulls + 1, max(self.global_step, global_step))


def resting(owing: Mapping[str, Owed], global_step: int) -> set[str]:
    """Return the members that a round does not ask, because it is not their turn yet."""
    return {name for name, owed in owing.items() if global_step < owed.global_step + owed.asked_every}
