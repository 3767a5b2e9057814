"""A round at the syncer, and the moving averages of its durations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from diloco_jax.protocol.effects import Part
from diloco_jax.protocol.pacing import ProtocolConfig, ema

COLLECTING, PULLING, MERGING = "collecting", "pulling", "merging"


@dataclass(slots=True)
class Round:
    """One fragment's turn at the syncer; book.py moves it from phase to phase."""

    global_step: int
    fragment_id: int  # -1: no fragment is due
    opened_s: float
    phase: str = COLLECTING
    met_s: float = 0.0  # when the quorum was met
    closes_s: float | None = None  # end of the grace window, once the quorum is met
    paced_s: float = 0.0  # it does not close before
    # End of the grace window by Eq. 3, if grace_min_s keeps the round open for longer.
    slack_s: float | None = None
    closed_s: float = 0.0
    resend_s: float = 0.0  # when unanswered pulls are repeated
    resend_wait_s: float = 0.0  # doubles every time: on a slow link the values are under way, not lost
    expires_s: float = 0.0  # when they are abandoned
    pulled_s: float = 0.0  # when the last of the values was there
    size: int = 0  # learners that were asked
    half_s: float | None = None  # when half of them had answered
    asked: dict[str, int] = field(default_factory=dict)  # learner -> local step asked for, until it answers
    values: dict[str, Part] = field(default_factory=dict)
    told_tokens: dict[str, int] = field(default_factory=dict)  # learner -> that its member had reported as it closed
    former: set[str] = field(default_factory=set)  # whose value here is of an incarnation before the present one

    def to_plain(self) -> dict[str, Any]:
        """Everything, as plain values that JSON keeps exactly."""
        plain = {name: getattr(self, name) for name in sorted(self.__slots__)}
        plain |= {"values": list(self.values.values()), "former": sorted(self.former)}
        return plain | {"asked": list(self.asked.items()), "told_tokens": dict(self.told_tokens)}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Round:
        """The round that `to_plain` described."""
        asked = {learner_id: local_step for learner_id, local_step in plain["asked"]}
        told_tokens = dict(plain["told_tokens"])
        values = {part.learner_id: part for part in (Part(*values) for values in plain["values"])}
        former = set(plain["former"])
        return cls(**plain | {"asked": asked, "told_tokens": told_tokens, "values": values, "former": former})

    def answered(self, learner_id: str, now_s: float) -> None:
        """A learner that was asked has answered."""
        del self.asked[learner_id]
        if self.half_s is None and 2 * len(self.asked) <= self.size:
            self.half_s = now_s

    def waits_long(self, now_s: float, least_s: float = 0.0) -> bool:
        """Return whether the learners still asked have taken more than twice as long as the faster half.

        Args:
            least_s: a shorter wait after the faster half does not count as long.
        """
        if self.half_s is None or now_s - self.half_s < least_s:
            return False
        return now_s - self.closed_s > 2 * (self.half_s - self.closed_s)

    @property
    def waits_for(self) -> str:
        """In words, what a closed round waits for."""
        return f"round {self.global_step}, {self.phase}: {', '.join(sorted(self.asked)) or 'the merge'}"


class Pace(NamedTuple):
    """Moving averages of Eq. 3, in seconds; None before the first sample.

    quorum_s is xi_quorum. merge_s is the part of xi_sync that the syncer sees, from closing a round to its new version;
    how long that version is on its way, members tell (Membership.broadcast_s).

    A sample counts for at most the whole slack of tau steps: one long wait (a first compile, a partition, a pull that
    timed out) closes the grace window at once, but not for the next dozens of rounds.
    """

    quorum_s: float | None = None
    merge_s: float | None = None

    def after_quorum(self, sample_s: float, step_s: float | None, config: ProtocolConfig) -> Pace:
        """A round met its quorum so many seconds after it opened."""
        return Pace(_averaged(self.quorum_s, sample_s, step_s, config), self.merge_s)

    def after_merge(self, sample_s: float, step_s: float | None, config: ProtocolConfig) -> Pace:
        """A round was pulled and merged so many seconds after it closed."""
        return Pace(self.quorum_s, _averaged(self.merge_s, sample_s, step_s, config))


def _averaged(average: float | None, sample_s: float, step_s: float | None, config: ProtocolConfig) -> float | None:
    if step_s is None:
        return average  # nobody has made a second step: the wait was for compilers
    return ema(average, min(sample_s, config.overlap_steps * step_s), config.ema_decay)
