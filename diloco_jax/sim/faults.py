"""Faults, their times and durations: a schedule that is drawn before the run, so that it can be printed."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

NEVER_S = float("inf")
WEIGHTS = {  # what random_faults draws, and how often; other kinds happen when a scenario says so
    "crash": 3,
    "disconnect": 3,
    "pause": 2,
    "slow": 2,
    "partition": 3,
    "corrupt": 2,
    "poison": 3,
    "donor_crash": 4,
    "syncer_crash": 4,
    "rewind": 2,
}
KINDS = tuple(WEIGHTS)
ARMED_S = 5.0  # how long a donor_crash waits for a donor, and a rewind for a snapshot
ARMED = ("donor_crash", "rewind")


class Fault(NamedTuple):
    """One fault of one learner, or of several at once, or of the syncer.

    crash: the process is gone; after `duration_s` a new incarnation starts, which has what is on its disk.
    disconnect: the link breaks; the same incarnation dials again after `duration_s`.
    pause: the process stands still, its connection does not break (SIGSTOP, a stuck disk).
    slow: steps take `factor` times as long.
    partition: nothing gets through, and nobody is told.
    hold: nothing gets through in one direction, or in both, and nobody is told; then all of it arrives.
    narrow: payloads pass at `factor` bytes per second.
    corrupt: payloads arrive garbled now and then.
    poison: the learner's values cannot be used (NaN, infinite, wildly large).
    donor_crash: the crash of whoever gives its state to another learner, as soon as somebody does.
    syncer_crash: the syncer's process is gone, maybe in the middle of an input; after `duration_s` another one starts.
    rewind: as soon as there is a snapshot, every process is gone, but those of `learners`, whom nobody finds; after
        `duration_s` the run goes on from the newest snapshot.
    leave: a polite goodbye, for good.
    drain: the syncer is told to ask for one.
    join: the learner starts only now.
    """

    at_s: float
    kind: str
    learners: tuple[str, ...] = ()
    duration_s: float = NEVER_S
    factor: float = 1.0
    notice_s: float = NEVER_S  # crash, disconnect: how much later the syncer's transport finds out
    direction: str = "both"  # hold: "up", "down" or "both"
    breaks_snapshot: bool = False  # syncer_crash, rewind: the newest snapshot turns out to be damaged

    @property
    def over_s(self) -> float:
        """Time at which it is healed, as far as it ever is."""
        if self.duration_s == NEVER_S:
            return self.at_s
        return self.at_s + self.duration_s + (ARMED_S if self.kind in ARMED else 0.0)

    def __str__(self) -> str:
        text = f"{self.kind} of {', '.join(self.learners)}" if self.learners else self.kind
        if self.duration_s < NEVER_S:
            text += f" for {self.duration_s:.2f} s"
        if self.kind == "narrow":
            text += f", {self.factor:.0f} bytes/s"
        elif self.factor != 1.0:
            text += f", {self.factor:.1f} times slower"
        if self.kind in ("crash", "disconnect", "donor_crash"):
            text += f", noticed after {self.notice_s:.2f} s" if self.notice_s < NEVER_S else ", unnoticed"
        return text + (", the newest snapshot is damaged" if self.breaks_snapshot else "")


def random_faults(
    random: Random, learners: Sequence[str], count: int, until_s: float, kinds: Sequence[str] = KINDS
) -> tuple[Fault, ...]:
    """Draw faults that have all healed at `until_s`, sorted by time.

    Args:
        random: source of randomness.
        learners: whom they may hit.
        count: how many.
        until_s: end of the last one.
        kinds: which of KINDS may be drawn.
    """
    drawn = random.choices(kinds, [WEIGHTS[kind] for kind in kinds], k=count)
    return tuple(sorted(_draw(random, kind, learners, until_s) for kind in drawn))


def _draw(random: Random, kind: str, learners: Sequence[str], until_s: float) -> Fault:
    at_s = random.uniform(0.0, 0.8 * until_s)
    # mostly short ones that hide within a round, some that outlast lease and pull timeout
    left_s = max(0.0, until_s - at_s - (ARMED_S if kind in ARMED else 0.0))
    longest_s = (3.0, 40.0) if kind in ("corrupt", "poison") else (0.05, 0.5, 3.0, 40.0)
    duration_s = min(random.choice(longest_s) * random.uniform(0.2, 1.0), left_s)
    hit: Sequence[str]
    if kind in ("donor_crash", "syncer_crash"):
        hit = ()
    elif kind == "rewind":
        hit = random.sample(list(learners), random.randint(0, len(learners) // 2)) if random.random() < 0.3 else ()
    else:
        hit = random.sample(list(learners), random.randint(1, len(learners)) if kind == "partition" else 1)
    breaks = kind in ("crash", "disconnect", "donor_crash")
    return Fault(
        at_s,
        kind,
        tuple(sorted(hit)),
        duration_s,
        random.choice((2.0, 5.0, 20.0)) if kind == "slow" else 1.0,
        random.choice((0.02, 0.02, 1.0, NEVER_S)) if breaks else NEVER_S,
        breaks_snapshot=kind in ("syncer_crash", "rewind") and random.random() < 0.3,
    )
