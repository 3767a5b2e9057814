"""The faults of a simulated run, with their times and durations; they are known before the run."""

from typing import NamedTuple

from diloco_jax.sim.engine import NEVER_S

# These kinds wait for their moment: a donor_crash for a donor, a rewind for a snapshot.
ARMED = ("donor_crash", "rewind")
# Longest such wait.
ARMED_S = 5.0
SYNCER_KINDS = ("syncer_crash", "rewind")
KINDS = (
    *("crash", "disconnect", "pause", "slow", "partition", "hold", "narrow", "corrupt", "poison", "hostile"),
    *("mute", "late"),
    *("donor_crash", "leave", "drain", "ban", "join", "slice"),
    *SYNCER_KINDS,
)


class Fault(NamedTuple):
    """One fault of one learner, of several at once, or of the syncer.

    crash: the process ends; after `duration_s` a new incarnation starts with the state on its disk.
    disconnect: the link breaks; the same incarnation dials again after `duration_s`.
    pause: the process stands still and keeps its connection, as after SIGSTOP or with a stuck disk.
    slow: steps take `factor` times as long.
    partition: messages in both directions are lost, and neither end notices.
    hold: messages of one direction or of both wait, and neither end notices; then all of them arrive.
    narrow: payloads pass at `factor` bytes per second.
    corrupt: some payloads arrive garbled.
    mute: the learner's answers to pulls are lost, and nothing else is.
    late: the learner's answers to pulls arrive `factor` seconds late.
    poison: the learner's values are unusable (NaN, infinite, wildly large).
    hostile: the learner sends arbitrary messages (hostile.py); then its process ends, and a new incarnation starts.
    donor_crash: the crash of the first learner that gives its state to another one.
    syncer_crash: the syncer's process ends, maybe in the middle of an input; after `duration_s` a new one starts.
    rewind: once there is a snapshot, every process ends, except those of `learners`; after `duration_s` the run
        continues from the newest snapshot.
    leave: the learner says goodbye and ends for good.
    drain: the syncer asks the learner to leave.
    ban: an operator bans the learner, and admits it after `duration_s`.
    join: the learner starts only now.
    slice: an island loses `factor` slices, as many as it can without the last one, and gets them back after
        `duration_s`. With `leads` the leading slice is one of them: its process ends, and another slice starts a new
        incarnation with the state in its memory.

    Attributes:
        at_s: time of its start.
        kind: one of KINDS.
        learners: names of the learners that it hits.
        duration_s: seconds until it is over.
        factor: see slow, narrow, late and slice.
        notice_s: crash and disconnect: seconds until the syncer's transport notices.
        direction: hold: "up", "down" or "both".
        breaks_snapshot: syncer_crash and rewind: the newest snapshot turns out to be unreadable.
        leads: see slice.
    """

    at_s: float
    kind: str
    learners: tuple[str, ...] = ()
    duration_s: float = NEVER_S
    factor: float = 1.0
    notice_s: float = NEVER_S
    direction: str = "both"
    breaks_snapshot: bool = False
    leads: bool = False

    @property
    def over_s(self) -> float:
        """Time when the fault is over; its start if it has no end."""
        if self.duration_s == NEVER_S:
            return self.at_s
        return self.at_s + self.duration_s + (ARMED_S if self.kind in ARMED else 0.0)

    def __str__(self) -> str:
        text = f"{self.kind} of {', '.join(self.learners)}" if self.learners else self.kind
        if self.duration_s < NEVER_S:
            text += f" for {self.duration_s:.2f} s"
        if self.kind == "narrow":
            text += f", {self.factor:.0f} bytes/s"
        elif self.kind == "late":
            text += f", {self.factor:.1f} s"
        elif self.kind == "slice":
            text += f", {self.factor:.0f} slices" + ", the leading one too" * self.leads
        elif self.factor != 1.0:
            text += f", {self.factor:.1f} times slower"
        if self.kind in ("crash", "disconnect", "donor_crash"):
            text += f", noticed after {self.notice_s:.2f} s" if self.notice_s < NEVER_S else ", unnoticed"
        return text + (", the newest snapshot is damaged" if self.breaks_snapshot else "")
