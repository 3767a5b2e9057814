"""The one rule for closing a round; it has no state (paper, Alg. 2 and Eq. 3).

A round that has met its quorum waits for the other learners until the first of these moments:

  * all live learners have reported;
  * the grace window of Eq. 3 is over, and enough of the learners that keep pace reported within it;
  * the least wait for the learners that keep pace is over: one step, which counts as at least LEAST_STEP_S. If steps
    are shorter than SHORT_STEP_S, a round in the first turn of the fragments also waits FIRST_TURN_S for learners that
    make their first step.

It never closes before the links have carried the version before it. Eq. 3 gives a round the part of tau steps that its
quorum and its exchange leave. If that is nothing, a round would merge only the learner that reports first, and several
rounds would pass in one step. The least wait prevents this, also where messages take longer than the steps.
"""

from math import inf
from typing import NamedTuple

from diloco_jax.protocol.pacing import ProtocolConfig

# gamma of Eq. 3: the share of the slack that the grace window may use.
GAMMA = 0.9
# A shorter step counts as this long, because messages and the scheduler of a busy machine take as long.
LEAST_STEP_S = 0.1
# In the first turn of the fragments, a round waits this long for learners that have not made a step yet.
FIRST_TURN_S = 1.0
# A learner keeps pace if its steps are at most this many times as long as the median ones, or shorter than this.
PACE_FACTOR, SHORT_STEP_S = 1.25, 0.033
# A learner whose newest report is older than this many of its steps has stopped, and rounds do not wait for it.
PACE_REPORTS = 3.0
# This share of the learners that keep pace is enough to close a round when its grace window is over. In lockstep, the
# step that a round misses is lost, so all of them are needed.
ENOUGH = 0.75

# Why a round is open.
NOBODY, BELOW_QUORUM, COLLECTING, WAITING = "nobody", "below quorum", "collecting", "waiting"
# Why a round closes.
ALL, GRACE, LEAST = "all", "grace", "least"


class GraceWindow(NamedTuple):
    """The moments that limit a round which has met its quorum, in seconds of the syncer's clock."""

    met_s: float
    # The links have carried the version of the round before.
    links_s: float
    # The grace window of Eq. 3 ends.
    grace_s: float
    # The wait for learners that keep pace ends.
    least_s: float


class Facts(NamedTuple):
    """The state of a round, as far as the rule uses it. Learners that the round excludes do not count."""

    quorum: int
    live: int
    # Live learners with a report that no round has used, and those of them that may meet the quorum.
    fresh: int
    counted: int
    # None while the quorum is not met.
    window: GraceWindow | None
    # Whether a learner that keeps pace is missing, and too few of them reported in the grace window; known at its end.
    few: bool
    # Whether a learner makes its first step in the first turn of the fragments.
    starting: bool


class Closing(NamedTuple):
    """The moment when a round closes if nothing else happens, and why."""

    at_s: float
    why: str
    reason: str


def closing(facts: Facts, now_s: float) -> Closing:
    """Return when a round closes, and the reason; it is closed if that time is not after `now_s`."""
    quorum, live, fresh, window = facts.quorum, facts.live, facts.fresh, facts.window
    if window is None or facts.counted < quorum:
        if not live:
            return Closing(inf, NOBODY, f"no learner is live, the quorum is {quorum}")
        if live < quorum:
            few = f"{live} live learners are fewer than the quorum of {quorum}"
            return Closing(inf, BELOW_QUORUM, f"{few}: training continues, merging is paused")
        return Closing(inf, COLLECTING, f"{fresh} of {live} live learners reported a step, the quorum is {quorum}")
    least_s = max(window.least_s if facts.few else -inf, window.met_s + FIRST_TURN_S if facts.starting else -inf)
    if fresh >= live and not facts.starting:
        at_s, why, reason = window.met_s, ALL, f"all {live} live learners reported"
    elif least_s > window.grace_s:
        at_s, why, reason = least_s, LEAST, f"{fresh} of {live} live learners reported, least wait over"
    else:
        at_s, why, reason = window.grace_s, GRACE, f"{fresh} of {live} live learners reported, grace window over"
    at_s = max(at_s, window.links_s)
    if now_s < at_s:
        left = f"quorum met, {fresh} of {live} live learners reported, at most {at_s - now_s:.3f} s left"
        return Closing(at_s, WAITING, left)
    return Closing(at_s, why, reason)


def grace_window_s(config: ProtocolConfig, step_s: float | None, quorum_s: float | None, sync_s: float | None) -> float:
    """Return the wait of a round for more learners once its quorum is met (paper, Eq. 3).

    slack = tau * xi_step - (xi_quorum + xi_sync);  grace = min(gamma * slack, cap * xi_step), never below 0.

    Args:
        config: tau and the cap.
        step_s: xi_step, moving average of the duration of an inner step, in seconds; None before the first sample.
        quorum_s: xi_quorum, from opening a round to its quorum; None counts as 0.
        sync_s: xi_sync, from closing a round until learners have its result; None counts as 0.
    """
    if step_s is None:
        return 0.0
    slack_s = (config.overlap_steps + config.wait_steps) * step_s - ((quorum_s or 0.0) + (sync_s or 0.0))
    return max(0.0, min(GAMMA * slack_s, config.grace_steps_max * step_s))


def least_wait_s(config: ProtocolConfig, step_s: float | None) -> float:
    """Return the wait of a round for learners that keep pace: one step, or the cap if that is less.

    Args:
        step_s: xi_step as in `grace_window_s`.
    """
    return min(1.0, config.grace_steps_max) * max(step_s or 0.0, LEAST_STEP_S)
