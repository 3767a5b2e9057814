"""Faults, their times and durations: a schedule that is drawn before the run, so that it can be printed."""

from typing import NamedTuple

from diloco_jax.sim.engine import NEVER_S

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
    hostile: the learner says anything (hostile.py); then its process ends, and a new incarnation starts.
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
