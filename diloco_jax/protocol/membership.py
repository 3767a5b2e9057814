"""Who takes part: joining, leaving, silence, disconnection, incarnations.

States of a member, and what moves it:

    joining  --first report that holds every fragment-->  active
    joining, active  --no message within the lease-->      silent  --any message-->  joining or active
    any      --disconnect, leave, expulsion-->             gone    --hello-->        joining or active
    any      --hello of a newer incarnation-->             joining (counters of the old one are added to the totals)

Only active members count as live. A member that is gone keeps its record: its totals belong to the run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import nan
from typing import Any, NamedTuple

from diloco_jax.protocol.messages import NO_VERSION, SYNCER, Adopted, Hello, StepReport
from diloco_jax.protocol.pacing import ProtocolConfig, ema

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
OPEN = ""  # a value of the syncer's fingerprint that the first learner is to say
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


class Member:
    """What the syncer knows of one learner."""

    __slots__ = (
        "adopted",
        "alarmed",
        "arrived_s",
        "broadcast_s",
        "expelled",
        "global_step",
        "heard_s",
        "incarnation",
        "learner_id",
        "lease_step",
        "local_step",
        "loss",
        "merged_base",
        "merged_mark",
        "merged_round",
        "offered",
        "past_steps",
        "past_tokens",
        "restarts",
        "rounds",
        "sent",
        "since_s",
        "state",
        "step_s",
        "step_samples",
        "strikes",
        "tokens",
        "used_step",
        "wait_s",
        "will_hold",
    )

    def __init__(self, learner_id: str, incarnation: int, now_s: float) -> None:
        self.learner_id = learner_id
        self.past_steps = 0  # inner steps of earlier incarnations
        self.past_tokens = 0
        self.restarts = 0
        self.rounds = 0  # rounds in which a value of this learner was merged
        self._begin(incarnation, now_s)

    def _begin(self, incarnation: int, now_s: float) -> None:
        self.incarnation = incarnation
        self.state = JOINING
        self.since_s = now_s
        self.heard_s = now_s
        self.local_step = 0
        self.tokens = 0
        self.used_step = 0  # newest local step that a closed round has counted
        self.global_step = 0
        self.adopted: tuple[Adopted, ...] = ()
        self.merged_base: dict[int, int] = {}  # fragment -> version under its newest value that a round has used up
        self.merged_round: dict[int, int] = {}  # fragment -> newest round that merged a value of this incarnation
        self.sent: dict[int, Sent] = {}  # fragment -> its newest version's way to this member
        self.offered: tuple[int, ...] = ()  # versions held when it last greeted
        self.will_hold: list[Held] = []  # per fragment, once it has taken all that was sent since that greeting
        self.step_samples = 1
        self.lease_step = 0  # its local step when leases were last sent
        self.strikes = 0  # values in a row that could not be used
        self.expelled = False
        self.merged_mark = 0  # rounds merged when it last had a share in one, or became active
        self.alarmed = False
        self.step_s: float | None = None
        self.arrived_s = 0.0  # when it last read a global value
        self.broadcast_s: float | None = None  # moving average: how long a new value is on its way to it, by itself
        self.wait_s = 0.0  # moving average: how long it first waits behind the version before
        self.loss = nan

    def restart(self, incarnation: int, now_s: float) -> None:
        """Begin a newer incarnation; what the old one did stays in the totals."""
        self.past_steps += self.local_step
        self.past_tokens += self.tokens
        self.restarts += 1
        self._begin(incarnation, now_s)

    def record(self, report: StepReport, config: ProtocolConfig, now_s: float) -> None:
        """Take over a report that is newer than all before."""
        if self.local_step > 0:  # the first step of an incarnation compiles: no sample of its speed
            self.step_s = ema(self.step_s, report.step_s, config.ema_decay)
        if report.arrived and self.step_s is not None:
            longest_s = config.overlap_steps * self.step_s
            for fragment_id, version, ago_s in report.arrived:
                arrived_s = now_s - (ago_s if ago_s > 0 else 0.0)  # not in the future, whatever it says
                sent, free_s = self.sent.get(fragment_id), self.arrived_s
                if arrived_s > free_s:
                    self.arrived_s = arrived_s
                if sent is not None and sent.version == version and sent.broadcast_s is not None:
                    wait_s = free_s - sent.broadcast_s if free_s > sent.broadcast_s else 0.0
                    took_s = arrived_s - sent.broadcast_s - wait_s
                    sample_s = 0.0 if took_s < 0 else took_s if took_s < longest_s else longest_s
                    self.broadcast_s = ema(self.broadcast_s, sample_s, config.ema_decay)
                    self.wait_s = ema(self.wait_s, wait_s if wait_s < longest_s else longest_s, config.ema_decay)
        self.local_step = report.local_step
        self.tokens = report.tokens
        self.global_step = report.global_step
        self.adopted = report.adopted
        self.loss = report.loss

    @property
    def holds_all(self) -> bool:
        """Whether its newest report holds every fragment."""
        return bool(self.adopted) and all(a.version != NO_VERSION for a in self.adopted)

    def is_fresh(self, global_step: int, fragment_id: int, lockstep: bool) -> bool:
        """Whether the newest report counts for this round: a step that no earlier round has counted.

        A fragment that was adopted after the reported step has no step yet, and would have weight 0/0. One that was
        not adopted since this member's last value of it still holds the steps of that value: they count once.
        """
        if lockstep:  # it waits at this step; also when a syncer that lost the end of its tape has counted it before
            return self.global_step >= global_step
        if self.local_step <= self.used_step:
            return False
        if fragment_id < 0:
            return True
        held = self.adopted[fragment_id]
        return self.local_step > held.local_step and held.version > self.merged_base.get(fragment_id, NO_VERSION)

    def enter(self, state: str, now_s: float) -> None:
        self.state = state
        self.since_s = now_s

    @property
    def total_steps(self) -> int:
        return self.past_steps + self.local_step

    @property
    def total_tokens(self) -> int:
        return self.past_tokens + self.tokens

    def to_plain(self) -> dict[str, Any]:
        """Everything, as plain values that JSON keeps exactly."""
        plain = {name: getattr(self, name) for name in self.__slots__}
        plain["merged_base"] = list(self.merged_base.items())
        plain["merged_round"] = list(self.merged_round.items())
        plain["sent"] = [[fragment_id, *sent] for fragment_id, sent in self.sent.items()]
        plain["will_hold"] = list(self.will_hold)
        return plain

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Member:
        """The member that `to_plain` described."""
        member = cls(plain["learner_id"], plain["incarnation"], 0.0)
        for name in cls.__slots__:
            setattr(member, name, plain[name])
        member.adopted = tuple(Adopted(*held) for held in plain["adopted"])
        member.offered = tuple(plain["offered"])
        member.merged_base = {fragment_id: version for fragment_id, version in plain["merged_base"]}
        member.merged_round = {fragment_id: version for fragment_id, version in plain["merged_round"]}
        member.sent = {fragment_id: Sent(*sent) for fragment_id, *sent in plain["sent"]}
        member.will_hold = [Held(*held) for held in plain["will_hold"]]
        return member


def difference(
    ours: Mapping[str, str], theirs: Iterable[tuple[str, str]], agreed: Mapping[str, str] | None = None
) -> str:
    """Find the first thing on which a learner and the syncer differ; empty if they agree.

    Args:
        ours: what the syncer has; OPEN where it has nothing to compare with.
        theirs: what the learner has.
        agreed: what the first learner said of the open things.
    """
    mine, other = {**ours, **(agreed or {})}, dict(theirs)
    unequal = (what for what in sorted(mine.keys() | other.keys()) if mine.get(what) != other.get(what))
    return next((what for what in unequal if mine.get(what) != OPEN or what not in other), "")


class Membership:
    """The members by name, and the number of live ones."""

    def __init__(self, fingerprint: tuple[tuple[str, str], ...], num_fragments: int, learners_max: int) -> None:
        self._fingerprint = dict(fingerprint)
        self.agreed: dict[str, str] = {}  # what is open in it, as the first learner that was let in has it
        self._num_fragments = num_fragments
        self._learners_max = learners_max
        self.members: dict[str, Member] = {}
        self.live = 0

    def get(self, learner_id: str, incarnation: int) -> Member | None:
        """The member if this incarnation of it is connected, else None."""
        member = self.members.get(learner_id)
        if member is None or member.incarnation != incarnation or member.state == GONE:
            return None
        return member

    def connected(self) -> list[Member]:
        """Members with a link, sorted by name."""
        return [m for _, m in sorted(self.members.items()) if m.state != GONE]

    def present(self) -> list[Member]:
        """Members with a link that were heard within the lease, sorted by name."""
        return [m for m in self.connected() if m.state != SILENT]

    def live_members(self) -> list[Member]:
        """Members that count as live, sorted by name."""
        return [m for _, m in sorted(self.members.items()) if m.state == ACTIVE]

    def refusal(self, hello: Hello, epoch: int, rewound: int) -> str:
        """Why this learner cannot join, or an empty string.

        Args:
            hello: its greeting.
            epoch: the syncer's life.
            rewound: the life in which the run was last put back to a snapshot: earlier ones have another history.
        """
        if hello.learner_id == SYNCER or not hello.learner_id:
            return f"the name {hello.learner_id!r} is reserved; give the learner another name"
        if not _NAME.fullmatch(hello.learner_id):  # drivers use it in file names
            return f"the name {hello.learner_id[:80]!r} is not allowed; use up to 64 letters, digits, '.', '_', '-'"
        known = self.members.get(hello.learner_id)
        if known is not None and hello.incarnation < known.incarnation:
            return (
                f"incarnation {hello.incarnation} of {hello.learner_id} is older than {known.incarnation}, which is "
                "known already; stop one of the two processes or rename it"
            )
        if known is not None and known.expelled and hello.incarnation == known.incarnation:
            return f"incarnation {hello.incarnation} of {hello.learner_id} was expelled; start the learner again"
        if (known is None or known.state == GONE) and len(self.connected()) >= self._learners_max:
            return f"{self._learners_max} learners are connected, the limit; raise protocol.learners_max"
        if what := difference(self._fingerprint, hello.fingerprint, self.agreed):
            whose = "the first learner of the run" if what in self.agreed else "the syncer"
            value = {**self._fingerprint, **self.agreed}.get(what, "absent")
            their_value = dict(hello.fingerprint).get(what, "absent")
            return (
                f"{what} differs: {whose} has {value}, {hello.learner_id} has {their_value}; "
                "start both from the same config, on the same data"
            )
        if not len(hello.versions) == len(hello.digests) == self._num_fragments:
            return (
                f"{len(hello.versions)} versions and {len(hello.digests)} digests offered, {self._num_fragments} "
                "fragments expected; use the same config"
            )
        if hello.epoch > epoch:
            return (
                f"{hello.learner_id} has heard of life {hello.epoch} of the syncer, this is life {epoch}: it was "
                "replaced; stop it, or give the learner the address of the newer one"
            )
        if 0 < hello.epoch < rewound:
            return (
                f"{hello.learner_id} belongs to life {hello.epoch} of the run, which went back to a snapshot in life "
                f"{rewound}; start the learner again"
            )
        if hello.step_samples < 1:
            return f"step_samples is {hello.step_samples}, but an inner step takes at least 1 sample"
        return ""

    def join(self, hello: Hello, now_s: float) -> Member:
        """Enter or re-enter a learner that was not refused."""
        for what, value in hello.fingerprint:
            if self._fingerprint.get(what) == OPEN != value:
                self.agreed.setdefault(what, value)
        member = self.members.get(hello.learner_id)
        if member is None:
            member = self.members[hello.learner_id] = Member(hello.learner_id, hello.incarnation, now_s)
        elif hello.incarnation > member.incarnation:
            self.set_state(member, GONE, now_s)
            member.restart(hello.incarnation, now_s)
        elif member.state == GONE:
            self.set_state(member, JOINING, now_s)
        member.heard_s = now_s
        member.offered = hello.versions
        member.will_hold = [Held(*told) for told in zip(hello.versions, hello.digests, strict=True)]
        member.step_samples = hello.step_samples
        return member

    def set_state(self, member: Member, state: str, now_s: float) -> None:
        """Move a member to a state, keeping the count of live ones."""
        self.live += (state == ACTIVE) - (member.state == ACTIVE)
        member.enter(state, now_s)

    def expired(self, lease_s: float, now_s: float) -> list[Member]:
        """Members that are to become silent: not heard within the lease, sorted by name."""
        return [m for m in self.present() if now_s - m.heard_s >= lease_s]

    def median_step_s(self) -> float | None:
        """Lower median of the live learners' step times: one slow island must not stretch everybody's window."""
        times = sorted([m.step_s for m in self.members.values() if m.state == ACTIVE and m.step_s is not None])
        return times[(len(times) - 1) // 2] if times else None

    def broadcast_s(self, step_s: float | None) -> tuple[float, float]:
        """How long a new version is on its way to the live learners, and waits before that; 0 before any has told.

        The way is the longest, the wait the mean. A version waits behind the one before it if rounds follow each other
        too fast. A shorter grace window would make them faster: so the wait is no part of the way, and slows rounds
        down instead. Whoever gets a version more than an inner step later than half of them is not waited for: with a
        slow link it would close everybody's window for good.

        Args:
            step_s: the median of the inner steps.
        """
        live = [(m.broadcast_s, m.wait_s) for m in self.members.values() if m.state == ACTIVE]
        ways = sorted([(way_s, wait_s) for way_s, wait_s in live if way_s is not None])
        if not ways:
            return 0.0, 0.0
        limit_s = ways[(len(ways) - 1) // 2][0] + (step_s or 0.0)
        ways = [way for way in ways if way[0] <= limit_s]
        return ways[-1][0], sum([wait_s for _, wait_s in ways]) / len(ways)

    def to_plain(self) -> list[dict[str, Any]]:
        """The members as plain values."""
        return [member.to_plain() for member in self.members.values()]

    def from_plain(self, plain: list[dict[str, Any]]) -> None:
        """Take over members that `to_plain` described."""
        self.members = {member.learner_id: member for member in map(Member.from_plain, plain)}
        self.live = sum(member.state == ACTIVE for member in self.members.values())
