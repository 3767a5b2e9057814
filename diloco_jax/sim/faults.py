"""What goes wrong, when, and for how long: a schedule that is drawn before the run, so that it can be printed."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

NEVER_S = float("inf")
KINDS = ("crash", "disconnect", "pause", "slow", "partition", "leave", "join")


class Fault(NamedTuple):
    """One fault of one learner, or of several at once.

    crash: the process is gone; after `duration_s` a new incarnation starts, which holds nothing.
    disconnect: the link breaks; the same incarnation dials again after `duration_s`.
    pause: the process stands still, its connection does not break (SIGSTOP, a stuck disk).
    slow: steps take `factor` times as long.
    partition: nothing gets through, and nobody is told.
    leave: a polite goodbye, for good.
    join: the learner starts only now.
    """

    at_s: float
    kind: str
    learners: tuple[str, ...]
    duration_s: float = NEVER_S
    factor: float = 1.0
    notice_s: float = NEVER_S  # crash, disconnect: how much later the syncer's transport finds out

    @property
    def over_s(self) -> float:
        """When it is healed, as far as it ever is."""
        return self.at_s if self.duration_s == NEVER_S else self.at_s + self.duration_s

    def __str__(self) -> str:
        text = f"{self.kind} of {', '.join(self.learners)}"
        if self.duration_s < NEVER_S:
            text += f" for {self.duration_s:.2f} s"
        if self.factor != 1.0:
            text += f", {self.factor:.1f} times slower"
        if self.kind in ("crash", "disconnect"):
            text += f", noticed after {self.notice_s:.2f} s" if self.notice_s < NEVER_S else ", unnoticed"
        return text


def random_faults(random: Random, learners: Sequence[str], count: int, until_s: float) -> tuple[Fault, ...]:
    """Draw faults that have all healed at `until_s`, sorted by time. Kinds are `crash` to `partition`.

    Args:
        random: source of randomness.
        learners: whom they may hit.
        count: how many.
        until_s: end of the last one.
    """
    faults = []
    for _ in range(count):
        kind = random.choice(KINDS[: KINDS.index("leave")])
        at_s = random.uniform(0.0, 0.8 * until_s)
        # mostly short ones that hide within a round, some that outlast lease and pull timeout
        duration_s = min(random.choice((0.05, 0.5, 3.0, 40.0)) * random.uniform(0.2, 1.0), until_s - at_s)
        hit = 1 if kind != "partition" else random.randint(1, len(learners))
        notice_s = random.choice((0.02, 0.02, 1.0, NEVER_S))
        faults.append(
            Fault(
                at_s,
                kind,
                tuple(sorted(random.sample(list(learners), hit))),
                duration_s,
                random.choice((2.0, 5.0, 20.0)) if kind == "slow" else 1.0,
                notice_s if kind in ("crash", "disconnect") else NEVER_S,
            )
        )
    return tuple(sorted(faults))
