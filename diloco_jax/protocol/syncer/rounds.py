"""A round at the syncer, and the moving averages of its durations."""

from __future__ import annotations

from typing import Any, NamedTuple

from diloco_jax.protocol.effects import Part
from diloco_jax.protocol.pacing import ProtocolConfig, ema

COLLECTING, PULLING, MERGING = "collecting", "pulling", "merging"


class Round:
    """One fragment's turn at the syncer; book.py moves it from phase to phase."""

    __slots__ = (
        "asked",
        "closed_s",
        "closes_s",
        "expires_s",
        "former",
        "fragment_id",
        "global_step",
        "half_s",
        "opened_s",
        "paced_s",
        "phase",
        "resend_s",
        "resend_wait_s",
        "size",
        "values",
    )

    def __init__(self, global_step: int, fragment_id: int, now_s: float) -> None:
        self.global_step = global_step
        self.fragment_id = fragment_id  # -1: no fragment is due
        self.phase = COLLECTING
        self.opened_s = now_s
        self.closes_s: float | None = None  # end of the grace window, once the quorum is met
        self.paced_s = 0.0  # it does not close before
        self.closed_s = 0.0
        self.resend_s = 0.0  # when unanswered pulls are repeated
        self.resend_wait_s = 0.0  # doubles every time: on a slow link the values are under way, not lost
        self.expires_s = 0.0  # when they are given up
        self.size = 0  # learners that were asked
        self.half_s: float | None = None  # when half of them had answered
        self.asked: dict[str, int] = {}  # learner -> local step asked for, until it answers
        self.values: dict[str, Part] = {}
        self.former: set[str] = set()  # learners whose value here is of an incarnation before the present one

    def to_plain(self) -> dict[str, Any]:
        """Everything, as plain values that JSON keeps exactly."""
        plain = {name: getattr(self, name) for name in self.__slots__}
        values, former = list(self.values.values()), sorted(self.former)
        return plain | {"asked": list(self.asked.items()), "values": values, "former": former}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Round:
        """The round that `to_plain` described."""
        this = cls(plain["global_step"], plain["fragment_id"], 0.0)
        for name in cls.__slots__:
            setattr(this, name, plain[name])
        this.former = set(plain["former"])
        this.asked = {learner_id: local_step for learner_id, local_step in plain["asked"]}
        this.values = {part.learner_id: part for part in (Part(*values) for values in plain["values"])}
        return this

    def answered(self, learner_id: str, now_s: float) -> None:
        """A learner that was asked has answered."""
        del self.asked[learner_id]
        if self.half_s is None and 2 * len(self.asked) <= self.size:
            self.half_s = now_s

    def waits_long(self, now_s: float) -> bool:
        """Whether the learners that are still asked take more than twice as long as the faster half of them did."""
        return self.half_s is not None and now_s - self.closed_s > 2 * (self.half_s - self.closed_s)

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
        if step_s is None:
            return self  # nobody has made a second step: the wait was for compilers
        sample_s = min(sample_s, config.overlap_steps * step_s)
        return Pace(ema(self.quorum_s, sample_s, config.ema_decay), self.merge_s)

    def after_merge(self, sample_s: float, step_s: float | None, config: ProtocolConfig) -> Pace:
        """A round was pulled and merged so many seconds after it closed."""
        if step_s is None:
            return self
        sample_s = min(sample_s, config.overlap_steps * step_s)
        return Pace(self.quorum_s, ema(self.merge_s, sample_s, config.ema_decay))
