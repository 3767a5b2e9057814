"""Everything that the syncer knows about one learner; membership.py has the changes of its state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import nan
from typing import Any, NamedTuple

from diloco_jax.protocol.claims import AskedReport, Reported
from diloco_jax.protocol.messages import NO_VERSION, SYNCER_STOPPED, Adopted, Arrived, Hello, StepReport
from diloco_jax.protocol.pacing import ProtocolConfig, ema

# Records and JSON keep the older word for a learner without a connection.
JOINING, ACTIVE, SILENT, DISCONNECTED = "joining", "active", "silent", "gone"


class Sent(NamedTuple):
    """A version of a fragment that was sent to a member."""

    version: int
    # How often it was sent as a delta.
    steps: int
    # The member's local step when it was sent last, and the number of its steps until it is due.
    local_step: int
    wait_steps: int
    # Time of the broadcast after the merge, if this was part of it.
    broadcast_s: float | None


class Held(NamedTuple):
    """A value of a fragment, as a member holds it."""

    version: int
    digest: int


@dataclass(slots=True)
class Downlink:
    """The versions that were sent to one incarnation of a member, and how long they take to arrive."""

    # Fragment -> how its newest version was sent to this member.
    sent: dict[int, Sent] = field(default_factory=dict)
    # Versions that the member held when it last greeted.
    offered: tuple[int, ...] = ()
    # For each fragment, the value that the member holds once everything sent since then has arrived; deltas need it.
    will_hold: list[Held] = field(default_factory=list)
    # When the member last read a global value.
    arrived_s: float = 0.0
    # Moving averages: how long a new value is in transit, and how long it first waits behind the version before it.
    broadcast_s: float | None = None
    wait_s: float = 0.0

    def greeted(self, hello: Hello) -> None:
        """Record what the member holds when it greets; nothing else is in transit."""
        self.offered = hello.versions
        self.will_hold = [Held(*told) for told in zip(hello.versions, hello.digests, strict=True)]

    def disregard(self, fragment_id: int) -> None:
        """Assume that the member holds no version of a fragment, whatever it offered."""
        self.offered = tuple(NO_VERSION if p == fragment_id else held for p, held in enumerate(self.offered))

    def record(self, arrived: Sequence[Arrived], longest_s: float, decay: float, now_s: float) -> None:
        """Record the arrivals that a report names; a sample counts for at most `longest_s`."""
        for fragment_id, version, ago_s in arrived:
            # Whatever the report says, no arrival is in the future.
            arrived_s = now_s - (ago_s if ago_s > 0 else 0.0)
            sent, free_s = self.sent.get(fragment_id), self.arrived_s
            if arrived_s > free_s:
                self.arrived_s = arrived_s
            if sent is None or sent.version != version:
                continue
            begun_s = sent.broadcast_s
            if begun_s is not None:
                wait_s = free_s - begun_s if free_s > begun_s else 0.0
                took_s = arrived_s - begun_s - wait_s
                sample_s = 0.0 if took_s < 0 else took_s if took_s < longest_s else longest_s
                self.broadcast_s = ema(self.broadcast_s, sample_s, decay)
                self.wait_s = ema(self.wait_s, wait_s if wait_s < longest_s else longest_s, decay)


@dataclass(slots=True)
class Credit:
    """Record of one incarnation's work in merges, and of its faults."""

    # Newest local step that a closed round has counted.
    used_step: int = 0
    # Fragment -> base version of the newest value whose steps are used up.
    merged_base: dict[int, int] = field(default_factory=dict)
    # Fragment -> newest round that merged a value of this incarnation.
    merged_round: dict[int, int] = field(default_factory=dict)
    # Reported tokens up to the newest value that a round has merged.
    merged_tokens: int = 0
    # Number of merged rounds when a round last merged this incarnation, or when it became active.
    merged_mark: int = 0
    # Fragment -> the newest report when a round last asked for it.
    asked: dict[int, AskedReport] = field(default_factory=dict)
    alarmed: bool = False
    # Unusable values in a row.
    strikes: int = 0
    expelled: bool = False

    def merge(self, told_tokens: int, value_tokens: int) -> int:
        """Count a merged value; return how many tokens it merges for the first time.

        Args:
            told_tokens: tokens that were reported when the value was requested.
            value_tokens: most tokens that the value may contain: those since its version was adopted.
        """
        news = max(0, told_tokens - self.merged_tokens)
        self.merged_tokens += news
        return min(news, value_tokens)


@dataclass(slots=True)
class Member:
    """One learner: its state, the newest report of its incarnation, and the totals of all its incarnations."""

    learner_id: str
    incarnation: int
    # When its state changed last, and when its newest message arrived.
    since_s: float
    heard_s: float
    state: str = JOINING
    # Inner steps and tokens of earlier incarnations.
    past_steps: int = 0
    past_tokens: int = 0
    restarts: int = 0
    # Rounds that merged a value of this learner.
    rounds: int = 0
    local_step: int = 0
    # The plausible part of the reported tokens (claims.py), and all of them.
    tokens: int = 0
    reported_tokens: int = 0
    # Samples in its newest report; -1 if unknown.
    samples: int = -1
    global_step: int = 0
    adopted: tuple[Adopted, ...] = ()
    step_samples: int = 1
    # Whether its driver can evaluate the global model, from its greeting.
    evaluates: bool = True
    # The corpus whose samples it leases (leases.py).
    corpus: str = ""
    # The reason in its goodbye, if it sent one.
    goodbye: str = ""
    # Its local step when leases were last sent.
    lease_step: int = 0
    step_s: float | None = None
    # When its newest report arrived, and how long after the one before it.
    reported_s: float = 0.0
    between_s: float = 0.0
    loss: float = nan
    down: Downlink = field(default_factory=Downlink)
    credit: Credit = field(default_factory=Credit)

    def restarted(self, incarnation: int, now_s: float) -> Member:
        """Return the member for a newer incarnation; the counters of the old one are added to the totals.

        A learner that starts with a resume of the run did not fail, so it counts as no restart.
        """
        restarts = self.restarts + (self.goodbye != SYNCER_STOPPED)
        totals = (self.total_steps, self.total_tokens, restarts, self.rounds)
        return Member(self.learner_id, incarnation, now_s, now_s, JOINING, *totals)

    def record(self, report: StepReport, tokens: int, config: ProtocolConfig, now_s: float) -> None:
        """Record a report that is newer than all before it; `tokens` is the plausible number of its tokens."""
        # The first step of an incarnation compiles, so it is not a sample of its speed.
        if self.local_step > 0:
            self.step_s = ema(self.step_s, report.step_s, config.ema_decay)
            self.between_s = now_s - self.reported_s
        if report.arrived and self.step_s is not None:
            self.down.record(report.arrived, config.overlap_steps * self.step_s, config.ema_decay, now_s)
        self.local_step, self.reported_s = report.local_step, now_s
        self.tokens, self.reported_tokens, self.samples = tokens, report.tokens, report.samples
        self.global_step = report.global_step
        self.adopted = report.adopted
        self.loss = report.loss

    def asked_for(self, fragment_id: int, global_step: int) -> None:
        """Remember the newest report when a round asks for a fragment."""
        held = self.adopted[fragment_id]
        self.credit.asked[fragment_id] = AskedReport(global_step, self.local_step, self.reported_tokens, held)

    def reported(self, fragment_id: int) -> Reported:
        """Return the newest report, with the held version of one fragment."""
        return Reported(self.local_step, self.reported_tokens, self.samples, self.adopted[fragment_id])

    @property
    def holds_all(self) -> bool:
        """True if the newest report holds every fragment."""
        return bool(self.adopted) and all(a.version != NO_VERSION for a in self.adopted)

    def is_fresh(self, global_step: int, fragment_id: int, lockstep: bool) -> bool:
        """Return whether the newest report counts for this round: its step was not counted by an earlier round.

        A fragment that was adopted after the reported step has no step yet, and would have weight 0/0. A fragment that
        was not adopted since this member's last value of it still contains the steps of that value, which count once.
        """
        if lockstep:
            # The member waits at this step, even if a syncer that lost the end of its tape has counted it before.
            return self.global_step >= global_step
        if self.local_step <= self.credit.used_step:
            return False
        if fragment_id < 0:
            return True
        held = self.adopted[fragment_id]
        return self.local_step > held.local_step and held.version > self.credit.merged_base.get(fragment_id, NO_VERSION)

    @property
    def total_steps(self) -> int:
        return self.past_steps + self.local_step

    @property
    def total_tokens(self) -> int:
        return self.past_tokens + self.tokens

    def to_plain(self) -> dict[str, Any]:
        """Return all fields as plain values that JSON keeps exactly."""
        owners = (self, self.down, self.credit)
        plain = {name: getattr(owner, name) for owner in owners for name in owner.__slots__}
        del plain["down"], plain["credit"]
        plain["merged_base"] = list(self.credit.merged_base.items())
        plain["merged_round"] = list(self.credit.merged_round.items())
        plain["asked"] = [[fragment_id, *asked] for fragment_id, asked in self.credit.asked.items()]
        plain["sent"] = [[fragment_id, *sent] for fragment_id, sent in self.down.sent.items()]
        plain["will_hold"] = list(self.down.will_hold)
        return dict(sorted(plain.items()))

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Member:
        """Make the member that `to_plain` described."""
        member = cls(plain["learner_id"], plain["incarnation"], 0.0, 0.0)
        for owner in (member, member.down, member.credit):
            # A field that an older release did not write has its default.
            for name in plain.keys() & set(owner.__slots__):
                setattr(owner, name, plain[name])
        member.adopted = tuple(Adopted(*held) for held in plain["adopted"])
        member.reported_tokens = plain.get("reported_tokens", member.tokens)
        member.credit.asked = {
            fragment_id: AskedReport(this_round, local_step, tokens, Adopted(*held))
            for fragment_id, this_round, local_step, tokens, held in plain.get("asked", ())
        }
        member.credit.merged_base = {fragment_id: version for fragment_id, version in plain["merged_base"]}
        member.credit.merged_round = {fragment_id: version for fragment_id, version in plain["merged_round"]}
        member.down.offered = tuple(plain["offered"])
        member.down.sent = {fragment_id: Sent(*sent) for fragment_id, *sent in plain["sent"]}
        member.down.will_hold = [Held(*held) for held in plain["will_hold"]]
        return member
