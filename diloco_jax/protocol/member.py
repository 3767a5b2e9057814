"""Everything that the syncer knows of one learner; membership.py has what moves it from state to state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import nan
from typing import Any, NamedTuple

from diloco_jax.protocol.claims import AskedReport, Reported
from diloco_jax.protocol.messages import NO_VERSION, Adopted, Arrived, Hello, StepReport
from diloco_jax.protocol.pacing import ProtocolConfig, ema

JOINING, ACTIVE, SILENT, GONE = "joining", "active", "silent", "gone"


class Sent(NamedTuple):
    """A version of a fragment that was sent to a member."""

    version: int
    steps: int  # times that it went out as a step
    local_step: int  # of the member, when it last did
    wait_steps: int  # in how many of the member's steps it is due
    broadcast_s: float | None  # when, if that was the broadcast after its merge


class Held(NamedTuple):
    """A value of a fragment, as a member holds it."""

    version: int
    digest: int


@dataclass(slots=True)
class Downlink:
    """The versions that went to a member in this incarnation, and how long they take to it."""

    sent: dict[int, Sent] = field(default_factory=dict)  # fragment -> its newest version's way to this member
    offered: tuple[int, ...] = ()  # versions held when it last greeted
    will_hold: list[Held] = field(default_factory=list)  # per fragment, once all sent since then is there; for steps
    arrived_s: float = 0.0  # when it last read a global value
    broadcast_s: float | None = None  # moving average: how long a new value is on its way to it, by itself
    wait_s: float = 0.0  # moving average: how long it first waits behind the version before

    def greeted(self, hello: Hello) -> None:
        """Note what the member holds as it (re)connects: nothing else is on its way."""
        self.offered = hello.versions
        self.will_hold = [Held(*told) for told in zip(hello.versions, hello.digests, strict=True)]

    def disregard(self, fragment_id: int) -> None:
        """Take it that the member holds no version of a fragment, whatever it offered."""
        self.offered = tuple(NO_VERSION if p == fragment_id else held for p, held in enumerate(self.offered))

    def record(self, arrived: Sequence[Arrived], longest_s: float, decay: float, now_s: float) -> None:
        """Take over what a report tells of versions that have arrived; a sample counts for at most `longest_s`."""
        for fragment_id, version, ago_s in arrived:
            arrived_s = now_s - (ago_s if ago_s > 0 else 0.0)  # not in the future, whatever it says
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
    """The share that an incarnation of a member has had in merges, and what speaks against it."""

    used_step: int = 0  # newest local step that a closed round has counted
    merged_base: dict[int, int] = field(default_factory=dict)  # fragment -> version under its newest value used up
    merged_round: dict[int, int] = field(default_factory=dict)  # fragment -> newest round that merged a value of it
    merged_tokens: int = 0  # of its reported ones, those up to its newest value that a round has merged
    merged_mark: int = 0  # rounds merged when it last had a share in one, or became active
    # For each fragment: the newest report when a round last asked for it.
    asked: dict[int, AskedReport] = field(default_factory=dict)
    alarmed: bool = False
    strikes: int = 0  # values in a row that could not be used
    expelled: bool = False

    def merge(self, told_tokens: int, value_tokens: int) -> int:
        """Count a merged value, and return how many tokens are merged by it for the first time.

        Args:
            told_tokens: reported when the value was asked for.
            value_tokens: of these, newest first, what the value may hold: those since its version was adopted.
        """
        news = max(0, told_tokens - self.merged_tokens)
        self.merged_tokens += news
        return min(news, value_tokens)


@dataclass(slots=True)
class Member:
    """One learner: its standing, the newest report of its incarnation, and the totals of all of them."""

    learner_id: str
    incarnation: int
    since_s: float  # when it came into its state
    heard_s: float
    state: str = JOINING
    past_steps: int = 0  # inner steps of earlier incarnations
    past_tokens: int = 0
    restarts: int = 0
    rounds: int = 0  # rounds in which a value of this learner was merged
    local_step: int = 0
    # Reported tokens, as far as they are plausible (claims.py).
    tokens: int = 0
    reported_tokens: int = 0
    # Samples in its newest report; -1 if unknown.
    samples: int = -1
    global_step: int = 0
    adopted: tuple[Adopted, ...] = ()
    step_samples: int = 1
    evaluates: bool = True  # as it said when it greeted
    goodbye: str = ""  # why it left, if it said so
    lease_step: int = 0  # its local step when leases were last sent
    step_s: float | None = None
    loss: float = nan
    down: Downlink = field(default_factory=Downlink)
    credit: Credit = field(default_factory=Credit)

    def restarted(self, incarnation: int, now_s: float) -> Member:
        """Begin a newer incarnation; what the old one did stays in the totals."""
        totals = (self.total_steps, self.total_tokens, self.restarts + 1, self.rounds)
        return Member(self.learner_id, incarnation, now_s, now_s, JOINING, *totals)

    def record(self, report: StepReport, tokens: int, config: ProtocolConfig, now_s: float) -> None:
        """Record a report that is newer than all before it; `tokens` is the plausible number of its tokens."""
        if self.local_step > 0:  # the first step of an incarnation compiles: no sample of its speed
            self.step_s = ema(self.step_s, report.step_s, config.ema_decay)
        if report.arrived and self.step_s is not None:
            self.down.record(report.arrived, config.overlap_steps * self.step_s, config.ema_decay, now_s)
        self.local_step = report.local_step
        self.tokens, self.reported_tokens, self.samples = tokens, report.tokens, report.samples
        self.global_step = report.global_step
        self.adopted = report.adopted
        self.loss = report.loss

    def asked_for(self, fragment_id: int, global_step: int) -> None:
        """Remember its newest report at the moment when a round asks it for a fragment."""
        held = self.adopted[fragment_id]
        self.credit.asked[fragment_id] = AskedReport(global_step, self.local_step, self.reported_tokens, held)

    def reported(self, fragment_id: int) -> Reported:
        """Return its newest report, with the version that it holds of one fragment."""
        return Reported(self.local_step, self.reported_tokens, self.samples, self.adopted[fragment_id])

    @property
    def holds_all(self) -> bool:
        """True if its newest report holds every fragment."""
        return bool(self.adopted) and all(a.version != NO_VERSION for a in self.adopted)

    def is_fresh(self, global_step: int, fragment_id: int, lockstep: bool) -> bool:
        """Say if the newest report counts for this round: a step that no earlier round has counted.

        A fragment that was adopted after the reported step has no step yet, and would have weight 0/0. One that was
        not adopted since this member's last value of it still holds the steps of that value: they count once.
        """
        if lockstep:  # it waits at this step; also when a syncer that lost the end of its tape has counted it before
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
        """Everything, as plain values that JSON keeps exactly."""
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
        """The member that `to_plain` described."""
        member = cls(plain["learner_id"], plain["incarnation"], 0.0, 0.0)
        for owner in (member, member.down, member.credit):
            for name in plain.keys() & set(owner.__slots__):  # one that an older release did not write has its default
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
