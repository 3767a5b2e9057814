"""The condition of each learner, how long it has lasted, and what to look at. It is for people; no rule reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from diloco_jax.protocol.member import ACTIVE, DISCONNECTED, JOINING, SILENT, Member
from diloco_jax.protocol.messages import ON_PURPOSE

if TYPE_CHECKING:
    from diloco_jax.protocol.syncer.machine import Syncer

# A learner is slow if its steps take so many times the median.
SLOW_FACTOR = 2.0
# So many pulls in a row without an answer are an alarm; fewer may be one lost message or a long pause.
UNANSWERED_PULLS = 3
# A learner's step time is an average over about 1 / (1 - protocol.ema_decay) steps. While another one starts on its
# machine, that average rises. So it is compared only after SETTLES / (1 - protocol.ema_decay) steps.
SETTLES = 3.0


class Condition(NamedTuple):
    """A learner's condition: one word, how long it has lasted, and what it means."""

    learner_id: str
    # One of CONDITIONS (terms.py).
    condition: str
    # Time on the driver's clock.
    since_s: float
    reason: str


def conditions(syncer: Syncer, now_s: float) -> list[Condition]:
    """Return one condition per learner that ever joined, sorted by name; of several, the most serious one."""
    steps = round(SETTLES / (1.0 - syncer.config.ema_decay))
    settled = {name for name, m in syncer.membership.members.items() if m.local_step >= steps}
    median_s = syncer.membership.median_step_s(settled)
    return [
        Condition(name, *_condition(syncer, member, median_s if name in settled else None, now_s))
        for name, member in sorted(syncer.membership.members.items())
    ]


def _condition(syncer: Syncer, member: Member, median_s: float | None, now_s: float) -> tuple[str, float, str]:
    """Return a learner's condition, the time of its start, and what it means.

    Args:
        median_s: the median step time of all learners with enough steps; None if this one has too few of them.
    """
    name, since_s, strikes = member.learner_id, member.since_s, member.credit.strikes
    quiet_s = now_s - member.heard_s
    if why := syncer.membership.bans.why(name):
        return "banned", since_s, why
    if member.credit.expelled:
        return "expelled", since_s, f"{strikes} values in a row were not usable"
    if member.state == DISCONNECTED:
        if syncer.finished:
            return "left", since_s, "the run is complete"
        if member.goodbye in ON_PURPOSE:
            return "left", since_s, member.goodbye + _rest(syncer, member, now_s)
        return "gone", since_s, (member.goodbye or "no connection") + _rest(syncer, member, now_s)
    if member.state == SILENT:
        why = "stopped, or cut off"
        if not member.local_step:
            why = "compiles on an overloaded machine, was stopped, or cut off"
        return "silent", since_s, f"connected, but not heard for {quiet_s:.1f} s: {why}"
    if member.state == JOINING:
        if donor := syncer.matches.donor_of(name):
            return "recovering", since_s, f"loads the state of {donor}"
        return "joining", since_s, f"alive, last heard {quiet_s:.1f} s ago; loads, compiles or downloads"
    assert member.state == ACTIVE, f"{name} is {member.state}"
    if name in (asked := syncer.evaluations.asked):
        return "evaluating", asked[name], "evaluates the global model between two of its steps"
    if strikes:
        return "striking", since_s, f"{strikes} of {syncer.config.strikes_max} strikes"
    owed = syncer.rounds.owing.get(name)
    if owed is not None and owed.pulls >= UNANSWERED_PULLS:
        pulls = f"reports steps, but did not answer the last {owed.pulls} requests for a value in time"
        return "unanswered", since_s, f"{pulls}; it is asked in every {owed.asked_every}th round until it does"
    if member.credit.alarmed:
        rounds = syncer.merged_rounds - member.credit.merged_mark
        return "unmerged", since_s, f"trains, but had no share in the last {rounds} rounds"
    if median_s and member.step_s and member.step_s > SLOW_FACTOR * median_s:
        factor = member.step_s / median_s
        return "slow", since_s, f"steps take {member.step_s:.3f} s, {factor:.1f} times the median"
    return "training", since_s, f"last heard {quiet_s:.1f} s ago"


def _rest(syncer: Syncer, member: Member, now_s: float) -> str:
    """Return what happens to the leased data of a disconnected learner; "" if it reads its own."""
    if not member.step_samples:
        return ""
    if member.learner_id not in syncer.leases.holders:
        whose = f"the next island that reads {member.corpus!r}" if member.corpus else "others"
        return f"; what it left undone goes to {whose}"
    after_s = max(0.0, syncer.config.release_s - (now_s - member.since_s))
    return f"; its data goes to others in {after_s:.0f} s"
