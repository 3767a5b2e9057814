"""One round at the syncer, from its opening to its new version, and the moving averages of rounds (paper, Eq. 3)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from diloco_jax.protocol.closing import LEAST_STEP_S, GraceWindow
from diloco_jax.protocol.effects import Contribution
from diloco_jax.protocol.messages import FragmentValue
from diloco_jax.protocol.pacing import ProtocolConfig, ema

# A round that is over may still be in the hands of a caller that went through several.
COLLECTING, PULLING, MERGING, OVER = "collecting", "pulling", "merging", "over"


@dataclass(slots=True)
class Round:
    """One fragment's turn at the syncer; RoundBook moves it from phase to phase."""

    global_step: int
    # -1 if no fragment is due.
    fragment_id: int
    opened_s: float
    phase: str = COLLECTING
    # The moments that limit the round once its quorum is met, and when it closes if nothing else happens (closing.py).
    window: GraceWindow | None = None
    closes_s: float | None = None
    closed_s: float = 0.0
    # When pulls without an answer are repeated. The wait doubles each time, because on a slow link the values are in
    # transit and not lost.
    resend_s: float = 0.0
    resend_wait_s: float = 0.0
    # When the answers that are missing are owed (owed.py), and whether that time has come.
    owed_s: float = 0.0
    owed: bool = False
    # When its wait for answers began to keep the next round from opening; None if it does not.
    blocks_s: float | None = None
    # When pulls without an answer are given up.
    expires_s: float = 0.0
    # When the last of the values had arrived.
    pulled_s: float = 0.0
    # Number of learners that were asked, and when half of them had answered.
    size: int = 0
    half_s: float | None = None
    # Learner -> local step that it was asked for, until it answers.
    asked: dict[str, int] = field(default_factory=dict)
    values: dict[str, Contribution] = field(default_factory=dict)
    # Learner -> its value of a step that it has not reported yet.
    early: dict[str, FragmentValue] = field(default_factory=dict)
    # Learner -> tokens that its member had reported when the round closed.
    told_tokens: dict[str, int] = field(default_factory=dict)
    # Learners whose value here is of an incarnation before the present one.
    former: set[str] = field(default_factory=set)

    def to_plain(self) -> dict[str, Any]:
        """Return all fields as plain values that JSON keeps exactly."""
        plain = {name: getattr(self, name) for name in sorted(self.__slots__)}
        plain |= {"values": list(self.values.values()), "former": sorted(self.former)}
        plain |= {"early": list(self.early.values())}
        return plain | {"asked": list(self.asked.items()), "told_tokens": dict(self.told_tokens)}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Round:
        """Make the round that `to_plain` described."""
        asked = {learner_id: local_step for learner_id, local_step in plain["asked"]}
        told_tokens = dict(plain["told_tokens"])
        values = {part.learner_id: part for part in (Contribution(*values) for values in plain["values"])}
        former = set(plain["former"])
        early = {value.learner_id: value for value in (FragmentValue(*values) for values in plain.get("early", ()))}
        # A state of an older release has no window, so it starts again.
        window = GraceWindow(*plain["window"]) if plain.get("window") else None
        read: dict[str, Any] = {
            "asked": asked,
            "told_tokens": told_tokens,
            "values": values,
            "former": former,
            "early": early,
            "window": window,
            "closes_s": plain["closes_s"] if window else None,
        }
        return cls(**{name: plain[name] for name in cls.__slots__ if name in plain} | read)

    def answered(self, learner_id: str, now_s: float) -> None:
        """Record that a learner that was asked has answered."""
        del self.asked[learner_id]
        self.early.pop(learner_id, None)
        if self.half_s is None and 2 * len(self.asked) <= self.size:
            self.half_s = now_s

    def waits_long(self, now_s: float) -> bool:
        """Return whether a closed round has waited too long for the missing answers.

        The wait since the close is more than twice what the first half of the answers took, and at least LEAST_STEP_S
        have passed since that half arrived. Before that half has arrived, no wait is too long.
        """
        if self.half_s is None or now_s - self.half_s < LEAST_STEP_S:
            return False
        return now_s - self.closed_s > 2 * (self.half_s - self.closed_s)

    @property
    def met_s(self) -> float:
        """Return when its quorum was met; the opening if the state of an older release does not tell."""
        return self.window.met_s if self.window is not None else self.opened_s

    @property
    def waits_for(self) -> str:
        """Describe what a closed round waits for."""
        return f"round {self.global_step}, {self.phase}: {', '.join(sorted(self.asked)) or 'the merge'}"


class Pace(NamedTuple):
    """Moving averages of Eq. 3, in seconds; None before the first sample.

    quorum_s is xi_quorum. merge_s is the part of xi_sync that the syncer sees, from closing a round to its new version.
    How long that version is in transit is measured per member (Membership.broadcast_s).

    A sample counts for at most the whole slack of tau steps. So one long wait (a first compile, a partition, a pull
    that timed out) closes the grace window at once, but not for the next dozens of rounds.
    """

    quorum_s: float | None = None
    merge_s: float | None = None

    def after_quorum(self, sample_s: float, step_s: float | None, config: ProtocolConfig) -> Pace:
        """Return the averages after a round that met its quorum so many seconds after it opened."""
        return self._replace(quorum_s=_averaged(self.quorum_s, sample_s, step_s, config))

    def after_merge(self, sample_s: float, step_s: float | None, config: ProtocolConfig) -> Pace:
        """Return the averages after a round that was pulled and merged so many seconds after it closed."""
        return self._replace(merge_s=_averaged(self.merge_s, sample_s, step_s, config))


def _averaged(average: float | None, sample_s: float, step_s: float | None, config: ProtocolConfig) -> float | None:
    if step_s is None:
        # No learner has made a second step, so the wait was for compilers.
        return average
    return ema(average, min(sample_s, config.overlap_steps * step_s), config.ema_decay)
