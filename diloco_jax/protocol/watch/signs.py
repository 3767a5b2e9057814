"""Signs of trouble that single messages do not show. RunStats (stats.py) collects them, and no rule reads them.

* A loss jumps, or a link is too slow.
* Rounds merge far fewer learners than are live.
* Islands make steps much faster than rounds close, so that their work is not merged and tokens are used up. Steps are
  counted in windows of STEPS_MIN steps per island, or longer ones until SECONDS_MIN are over. An episode is a row of
  windows with at least FACTOR steps per round. The clock of rounds follows the fastest islands, so a healthy run has
  about one step per round.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

from diloco_jax.protocol.member import ACTIVE
from diloco_jax.protocol.messages import FragmentValue, StepReport
from diloco_jax.protocol.pacing import ema

if TYPE_CHECKING:
    from diloco_jax.protocol.syncer.machine import Syncer

# Reports of an island before a jump of its loss counts.
REPORTS_MIN = 200
# Decays of the two averages of a loss that are compared.
FAST, SLOW = 0.8, 0.99
# A jump is larger than so many mean deviations, and larger than such a share of the loss.
DEVIATIONS, SHARE = 4.0, 0.05
STEPS_MIN = 16
# Where steps are short, a snapshot alone delays rounds for 16 of them.
SECONDS_MIN = 3.0
FACTOR = 2.0
# Episodes that are kept apart; later ones count as part of the last.
EPISODES_MAX = 8
# A round merged few learners if it merged less than this share of those that it could have merged.
CROWD_SHARE = 0.7
# The alarm is raised when the shares that rounds lack of CROWD_SHARE have this sum. Shares above it are subtracted.
# Fifteen rounds in a row with one of two learners raise it, or six rounds with one of six.
CROWD_MISSING = 3.0
WAY_DECAY = 0.8
# A fragment may be in transit for so many times the overlap. The second time, in seconds, is never too long.
WAY_FACTOR, WAY_LEAST_S = 2.0, 1.0


@dataclass(slots=True)
class _Curve:
    newest: float = 0.0
    fast: float | None = None
    slow: float | None = None
    # Mean distance of a loss from the fast average before it.
    deviation: float | None = None
    reports: int = 0

    def add(self, loss: float) -> None:
        self.newest = loss
        if not isfinite(loss):
            return
        self.reports += 1
        if self.fast is not None:
            self.deviation = ema(self.deviation, abs(loss - self.fast), SLOW)
        self.fast, self.slow = ema(self.fast, loss, FAST), ema(self.slow, loss, SLOW)

    @property
    def trouble(self) -> str:
        if not isfinite(self.newest):
            return f"its newest training loss is {self.newest}"
        if self.reports < REPORTS_MIN or self.fast is None or self.slow is None or self.deviation is None:
            return ""
        bound = self.slow + max(DEVIATIONS * self.deviation, SHARE * abs(self.slow))
        if self.fast <= bound:
            return ""
        return f"its training loss jumped to {self.fast:.4g}, from {self.slow:.4g} on average; alarm above {bound:.4g}"


class Losses:
    """Detects jumps and non-finite values of each island's training loss.

    In a jump, the short average exceeds the long one by more than DEVIATIONS mean deviations, and by more than SHARE of
    the loss.
    """

    def __init__(self) -> None:
        self._curves: dict[str, _Curve] = {}

    def on_report(self, report: StepReport) -> None:
        """Record the loss of a newer step."""
        self._curves.setdefault(report.learner_id, _Curve()).add(report.loss)

    def trouble(self, learner_id: str) -> str:
        """Return what is wrong with an island's loss; "" if nothing is."""
        curve = self._curves.get(learner_id)
        return "" if curve is None else curve.trouble


class SlowLink(NamedTuple):
    """The time that a fragment takes to and from an island, and the time that it may take."""

    took_s: float
    allowed_s: float


class Links:
    """Compares the time that fragments are in transit with the tau inner steps that overlap with it."""

    def __init__(self) -> None:
        # Island -> moving average of the time from the end of a round to the arrival of its value.
        self._up_s: dict[str, float] = {}

    def on_value(self, value: FragmentValue, took_s: float) -> None:
        """Record the time from the close of a round to the arrival of a value."""
        self._up_s[value.learner_id] = ema(self._up_s.get(value.learner_id), took_s, WAY_DECAY)

    def look(self, syncer: Syncer, now_s: float) -> None:
        """Record values that rounds still wait for: on the slowest links they never arrive in time."""
        for this in syncer.rounds.flying.values():
            for name in this.asked:
                if (waited_s := now_s - this.closed_s) > max(WAY_LEAST_S, self._up_s.get(name, 0.0)):
                    self._up_s[name] = waited_s

    def trouble(self, syncer: Syncer, learner_id: str, median_s: float | None) -> SlowLink | None:
        """Return the transit time of an island's fragments if it is too long; None if it is not, or is unknown.

        Args:
            median_s: median length of the live islands' inner steps.
        """
        member = syncer.membership.members[learner_id]
        steps_s = [each for each in (member.step_s, median_s) if each]
        if learner_id not in self._up_s or not steps_s:
            return None
        took_s = self._up_s[learner_id] + (member.down.broadcast_s or 0.0)
        allowed_s = max(WAY_LEAST_S, WAY_FACTOR * syncer.config.overlap_steps * max(steps_s))
        return SlowLink(took_s, allowed_s) if took_s > allowed_s else None


class Crowd:
    """Compares the merged learners with the live learners that could have been merged, over as many rounds as it takes.

    Each round adds the share that it lacks of CROWD_SHARE to a sum, or subtracts the share above it; the sum is never
    negative. So a large shortage is found in a few rounds, and a small one in many. A learner with long steps counts as
    the share of rounds that it can reach. Of all looks since the last merge the lowest number counts. So a learner that
    starts, restarts, evaluates or has its own alarm does not count as missing.
    """

    def __init__(self) -> None:
        self.trouble = ""
        # Merged rounds, and values in those rounds, at the last look with a new round.
        self._seen: tuple[int, int] | None = None
        # Lowest number of learners that could have been in each round since.
        self._least = inf
        # The sum, at most CROWD_MISSING, and its rounds, their values, and the values that they could have had.
        self._missing, self._rounds, self._parts, self._could = 0.0, 0, 0, 0.0

    def look(self, syncer: Syncer, troubled: Collection[str]) -> None:
        """Look at the merges so far; `troubled` names learners that have their own alarm."""
        expected, (seen_rounds, seen_parts) = self._expected(syncer, troubled), self._seen or (inf, 0)
        merged_rounds, merged_parts = syncer.progress.merged_rounds, syncer.progress.merged_parts
        rounds, parts = merged_rounds - seen_rounds, merged_parts - seen_parts
        self._least = min(self._least, expected)
        if not rounds:
            return
        # A round never merges fewer than one. At the first look and after a rewind the number of rounds has fallen.
        if rounds > 0 and self._least > 1:
            self._count(int(rounds), parts)
        else:
            self._missing = 0.0
        if not self._missing:
            self._rounds, self._parts, self._could = 0, 0, 0.0
            self.trouble = ""
        elif self.trouble or self._missing == CROWD_MISSING:
            merged, could = self._parts / self._rounds, self._could / self._rounds
            numbers = f"{merged:.1f} learners on average, of {could:.1f} that could have been merged"
            self.trouble = f"each of the last {self._rounds} rounds merged {numbers}"
        self._seen, self._least = (merged_rounds, merged_parts), expected

    def _count(self, rounds: int, parts: int) -> None:
        missing = self._missing + CROWD_SHARE * rounds - parts / self._least
        self._missing = min(CROWD_MISSING, max(0.0, missing))
        self._rounds += rounds
        self._parts += parts
        self._could += rounds * self._least

    def _expected(self, syncer: Syncer, troubled: Collection[str]) -> float:
        members, median_s = syncer.membership.members, syncer.membership.median_step_s()
        # With these settings, rounds do not wait for more learners on purpose.
        chosen = syncer.config.lockstep or not syncer.config.grace_steps_max
        if chosen or not median_s or syncer.rounds.awaits_starters:
            return 0.0
        away = {*troubled, *syncer.evaluations.asked}
        sound = [m for name, m in members.items() if m.state == ACTIVE and name not in away]
        sound = [m for m in sound if not (m.credit.strikes or m.credit.alarmed)]
        return sum(min(1.0, median_s / m.step_s) for m in sound if m.step_s)


class Episode(NamedTuple):
    """A time of a run when islands outran rounds."""

    # Global step at its start.
    from_step: int
    # Rounds that closed meanwhile, and steps of an average island.
    rounds: int
    steps: float
    # Later episodes that count as part of this one.
    later: int = 0

    def __str__(self) -> str:
        closed = f"{self.rounds} round{'s' if self.rounds != 1 else ''} closed"
        when = f"from global step {self.from_step}" + f", and {self.later} times later" * (self.later > 0)
        return f"islands outran rounds: {self.steps:.0f} steps each while {closed}, {when}"


class Outrun:
    """Compares the number of steps with the number of rounds, and keeps the episodes."""

    def __init__(self) -> None:
        # The oldest episode is first.
        self.episodes: list[Episode] = []
        # Whether the last episode is not over.
        self.current = False
        # Learners that have made steps in this window, and the sum of their steps.
        self._names: set[str] = set()
        self._steps = 0
        # Global step at the start of the window.
        self._since = 0

    def on_steps(self, learner_id: str, steps: int, global_step: int, step_s: float = inf) -> None:
        """Count steps of a learner; the last of them took `step_s` seconds."""
        # The run went back to a snapshot.
        if global_step < self._since:
            self._begin(global_step)
            self.current = False
        self._names.add(learner_id)
        self._steps += steps
        mean = self._steps / len(self._names)
        if mean < STEPS_MIN or mean * step_s < SECONDS_MIN:
            return
        rounds = global_step - self._since
        before, self.current = self.current, mean >= FACTOR * rounds
        if self.current:
            if not before and len(self.episodes) < EPISODES_MAX:
                self.episodes.append(Episode(self._since, 0, 0.0))
                before = True
            from_step, closed, made, later = self.episodes[-1]
            self.episodes[-1] = Episode(from_step, closed + rounds, made + mean, later + (not before))
        self._begin(global_step)

    def _begin(self, global_step: int) -> None:
        self._names, self._steps, self._since = set(), 0, global_step

    def state(self) -> dict[str, Any]:
        """Return all state as plain values for `restore`."""
        window = [sorted(self._names), self._steps, self._since]
        return {"episodes": [list(episode) for episode in self.episodes], "current": self.current, "window": window}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.episodes = [Episode(*episode) for episode in state["episodes"]]
        self.current = state["current"]
        names, self._steps, self._since = state["window"]
        self._names = set(names)
