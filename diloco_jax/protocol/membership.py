"""The members of a run: joining, leaving, silence, disconnection, incarnations.

States of a member, and what moves it:

    joining  --first report that holds every fragment-->  active
    joining, active  --no message for silence_s-->           silent  --any message-->  joining or active
    any      --disconnect, leave, expulsion, ban-->        gone    --hello-->        joining or active
    any      --hello of a newer incarnation-->             joining (counters of the old one are added to the totals)

Only active members count as live. A disconnected member keeps its record, because its totals belong to the run.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from math import inf
from typing import Any

from diloco_jax.protocol.bans import Bans
from diloco_jax.protocol.closing import LEAST_STEP_S, PACE_FACTOR, PACE_REPORTS, SHORT_STEP_S
from diloco_jax.protocol.corpora import OF_DATA, Corpora, corpus_of
from diloco_jax.protocol.member import ACTIVE, DISCONNECTED, JOINING, SILENT, Member
from diloco_jax.protocol.messages import FULL, NO_VERSION, OTHER_RUN, STALE, SYNCER, Hello
from diloco_jax.protocol.releases import OLDEST, PROTOCOL

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# A value of a fingerprint that is not compared; the syncer takes it from the first learner that has one.
OPEN = ""
# Entries in the fingerprints of older releases that decide nothing any more. Tapes still have them.
OBSOLETE = frozenset({"shards"})
# The entry with the digest of the frozen weights below adapters.
BASE_WEIGHTS = "base weights"


def difference(
    ours: Mapping[str, str], theirs: Iterable[tuple[str, str]], agreed: Mapping[str, str] | None = None
) -> str:
    """Return the name of the first entry that differs between a learner and the syncer; "" if they agree.

    Args:
        ours: the syncer's fingerprint; OPEN where it has nothing to compare with.
        theirs: the learner's fingerprint; OPEN likewise.
        agreed: the first learner's values of the open entries.
    """
    mine, other = {**ours, **(agreed or {})}, dict(theirs)
    named = sorted((mine.keys() | other.keys()) - OBSOLETE)
    unequal = (what for what in named if mine.get(what) != other.get(what))
    return next((what for what in unequal if OPEN not in (mine.get(what), other.get(what)) or what not in other), "")


def agreement(what: str) -> str:
    """Return what to do if this entry differs between a learner and the syncer."""
    if what == BASE_WEIGHTS:
        return (
            "let model.weights name a folder of the same model on every island; if the first one had the wrong model, "
            "start the run again with another --run-dir"
        )
    return "start both from the same config, on the same data"


def other_run(learner_id: str, theirs: str, ours: str, why: str = "") -> str:
    """Return the refusal of a learner that has joined another run of the same name.

    Args:
        theirs: id of the learner's run; "" if it is unknown.
        ours: id of the syncer's run; "" if it has none.
        why: what shows that the runs differ, if the ids do not show it.
    """
    which, this = (f" with the id {run}" if run else "" for run in (theirs, ours))
    return (
        f"{learner_id} {OTHER_RUN}{which}, and this syncer trains the run{this}{f' ({why})' * bool(why)}: stop this "
        "island, or give it the address of the syncer of its run; to let it train in this run, start its process again"
    )


def wrong_name(learner_id: str) -> str:
    """Return why no learner can have this name; "" if one can."""
    if learner_id == SYNCER or not learner_id:
        return f"the name {learner_id!r} is reserved; give the learner another name"
    # Drivers use the name in file names.
    if not _NAME.fullmatch(learner_id):
        return f"the name {learner_id[:80]!r} is not allowed; use up to 64 letters, digits, '.', '_', '-'"
    return ""


class Membership:
    """The members by name, and the number of live ones."""

    def __init__(self, fingerprint: tuple[tuple[str, str], ...], num_fragments: int, learners_max: int) -> None:
        self._fingerprint = dict(fingerprint)
        # The open entries of the fingerprint, as the first accepted learner has them.
        self.agreed: dict[str, str] = {}
        self.corpora = Corpora()
        self._num_fragments = num_fragments
        self._learners_max = learners_max
        self.members: dict[str, Member] = {}
        self.live = 0
        # Id of the run; "" if an older release started it.
        self.run = ""
        self.bans = Bans()

    @property
    def expected(self) -> dict[str, str]:
        """Return the fingerprint that greeting learners must match; OPEN where the first learner will determine it."""
        return {**self._fingerprint, **self.agreed}

    def expect(self, what: str, value: str) -> None:
        """Replace the expected value of one entry of the fingerprint, which greeting learners must match."""
        if value and what in self._fingerprint:
            self._fingerprint[what] = value

    def get(self, learner_id: str, incarnation: int) -> Member | None:
        """Return the member if this incarnation of it is connected, else None."""
        member = self.members.get(learner_id)
        if member is None or member.incarnation != incarnation or member.state == DISCONNECTED:
            return None
        return member

    def connected(self) -> list[Member]:
        """Return the members with a link, sorted by name."""
        return [m for _, m in sorted(self.members.items()) if m.state != DISCONNECTED]

    def present(self) -> list[Member]:
        """Return the connected members that are not silent, sorted by name."""
        return [m for m in self.connected() if m.state != SILENT]

    def live_members(self) -> list[Member]:
        """Return the members that count as live, sorted by name."""
        return [m for _, m in sorted(self.members.items()) if m.state == ACTIVE]

    def refusal(self, hello: Hello, epoch: int, rewound: int, newest: int | None = None) -> str:
        """Return why this learner cannot join, or an empty string.

        Args:
            rewound: the epoch that last put the run back to a snapshot; 0 if none. Earlier epochs are refused.
            newest: the newest round; None while a restarted syncer still collects versions from learners.
        """
        if wrong := wrong_name(hello.learner_id) or self.bans.refusal(hello.learner_id):
            return wrong
        if not OLDEST <= hello.speaks <= PROTOCOL:
            which = "the syncer first, then the islands" if hello.speaks > PROTOCOL else hello.learner_id
            return (
                f"{hello.learner_id} speaks protocol {hello.speaks}, the syncer {OLDEST} to {PROTOCOL}: they are of "
                f"different releases of diloco-jax; upgrade {which}"
            )
        if hello.run and self.run and hello.run != self.run:
            return other_run(hello.learner_id, hello.run, self.run)
        known = self.members.get(hello.learner_id)
        if known is not None and hello.incarnation < known.incarnation:
            return (
                f"incarnation {hello.incarnation} of {hello.learner_id} {STALE}: {known.incarnation} is known already; "
                "stop one of the two processes or rename it"
            )
        if known is not None and known.credit.expelled and hello.incarnation == known.incarnation:
            return f"incarnation {hello.incarnation} of {hello.learner_id} was expelled; start the learner again"
        if (known is None or known.state == DISCONNECTED) and len(self.connected()) >= self._learners_max:
            return f"{self._learners_max} {FULL}; raise protocol.learners_max"
        # A separate corpus is compared with those of its name (corpora.py).
        told = [pair for pair in hello.fingerprint if not (hello.corpus and pair[0] in OF_DATA)]
        told += [(what, OPEN) for what in OF_DATA if hello.corpus and what in self._fingerprint]
        if what := difference(self._fingerprint, told, self.agreed):
            whose = "the first learner of the run" if what in self.agreed else "the syncer"
            value, their_value = self.expected.get(what, "absent"), dict(hello.fingerprint).get(what, "absent")
            return f"{what} differs: {whose} has {value}, {hello.learner_id} has {their_value}; {agreement(what)}"
        if known is not None and hello.incarnation == known.incarnation and corpus_of(hello) != known.corpus:
            return (
                f"{hello.learner_id} greeted with the corpus {hello.corpus!r}, and before with {known.corpus!r}; start "
                "the learner again"
            )
        if why := self.corpora.refusal(hello):
            return why
        if not len(hello.versions) == len(hello.digests) == self._num_fragments:
            return (
                f"{len(hello.versions)} versions and {len(hello.digests)} digests offered, {self._num_fragments} "
                "fragments expected; use the same config"
            )
        if hello.epoch > epoch:
            return (
                f"{hello.learner_id} has heard of epoch {hello.epoch} of the syncer, this is epoch {epoch}: it was "
                "replaced; stop it, or give the learner the address of the newer one"
            )
        # Islands of older releases send no id. Runs that such releases started keep their decisions.
        held = max(hello.versions, default=NO_VERSION)
        if self.run and not hello.run and newest is not None and hello.epoch == epoch and held > newest:
            why = f"{hello.learner_id} holds version {held}, and the newest round of this run is {newest}"
            return other_run(hello.learner_id, hello.run, self.run, why)
        if 0 < hello.epoch < rewound:
            return (
                f"{hello.learner_id} belongs to epoch {hello.epoch} of the run, which went back to a snapshot in epoch "
                f"{rewound}; start the learner again"
            )
        return ""

    def join(self, hello: Hello, now_s: float) -> Member:
        """Add a learner that was not refused, or let it return."""
        for what, value in hello.fingerprint:
            if self._fingerprint.get(what) == OPEN != value and not (hello.corpus and what in OF_DATA):
                self.agreed.setdefault(what, value)
        member = self.members.get(hello.learner_id)
        if member is None:
            member = self.members[hello.learner_id] = Member(hello.learner_id, hello.incarnation, now_s, now_s)
        elif hello.incarnation > member.incarnation:
            self.set_state(member, DISCONNECTED, now_s)
            member = self.members[hello.learner_id] = member.restarted(hello.incarnation, now_s)
        elif member.state == DISCONNECTED:
            self.set_state(member, JOINING, now_s)
        member.heard_s = now_s
        member.down.greeted(hello)
        member.step_samples, member.evaluates, member.goodbye = hello.step_samples, hello.evaluates, ""
        member.corpus = corpus_of(hello)
        self.corpora.join(hello)
        return member

    def set_state(self, member: Member, state: str, now_s: float) -> None:
        """Move a member to a state, keeping the count of live ones."""
        self.live += (state == ACTIVE) - (member.state == ACTIVE)
        member.state, member.since_s = state, now_s

    def expired(self, silence_s: float, now_s: float) -> list[Member]:
        """Return the members that become silent, because no message came for `silence_s`; sorted by name."""
        return [m for m in self.present() if now_s - m.heard_s >= silence_s]

    def median_step_s(self, among: Collection[str] | None = None) -> float | None:
        """Return the lower median of the live learners' step times: one slow island must not stretch every window.

        Args:
            among: names of the learners that count; all if None.
        """
        live = [m for m in self.members.values() if m.state == ACTIVE and (among is None or m.learner_id in among)]
        times = sorted([m.step_s for m in live if m.step_s is not None])
        return times[(len(times) - 1) // 2] if times else None

    def keeping_pace(self, now_s: float) -> list[Member]:
        """Return the live learners whose steps are about as long as the median, and that have not stopped.

        A learner whose second step has not ended counts as one with median steps. A learner whose values rounds never
        get does not count, once it has its alarm.
        """
        median_s = self.median_step_s() or 0.0
        limit_s = max(PACE_FACTOR * median_s, SHORT_STEP_S)
        paced: list[Member] = []
        # A round that waits asks this at every message.
        for member in self.members.values():
            if member.state != ACTIVE or member.credit.alarmed:
                continue
            step_s = member.step_s if member.step_s is not None else median_s
            counted_s = step_s if step_s > LEAST_STEP_S else LEAST_STEP_S
            if step_s <= limit_s and now_s - member.reported_s < PACE_REPORTS * counted_s:
                paced.append(member)
        return paced

    def usual_step_tokens(self, member: Member | None = None) -> float:
        """Return the lower median of the live learners' tokens per inner step.

        If no learner is live, the member's own rate counts; if it has made no step, the result is infinite. The lower
        median of two learners is the lower rate, so a learner with a wrong counter does not set its own limit.
        """
        counted = [m for m in self.members.values() if m.state == ACTIVE and m.total_steps > 0]
        if not counted and member is not None and member.total_steps > 0:
            counted = [member]
        rates = sorted([m.total_tokens / m.total_steps for m in counted])
        return rates[(len(rates) - 1) // 2] if rates else inf

    def broadcast_s(self, step_s: float | None) -> tuple[float, float]:
        """Return how long a new version is in transit to the live learners, and how long it waits before that.

        The first is the longest time of all learners, the second the mean; both are 0 before the first arrival. A
        version waits behind the one before it if rounds follow each other too fast. A shorter grace window would make
        rounds faster still, so the wait is not part of the first number. It slows rounds down instead. A learner that
        gets a version more than an inner step later than half of them does not count, because its slow link would
        close every learner's window forever.

        Args:
            step_s: the median of the inner steps.
        """
        links = [m.down for m in self.members.values() if m.state == ACTIVE]
        ways = sorted([(link.broadcast_s, link.wait_s) for link in links if link.broadcast_s is not None])
        if not ways:
            return 0.0, 0.0
        limit_s = ways[(len(ways) - 1) // 2][0] + (step_s or 0.0)
        while ways[-1][0] > limit_s:
            del ways[-1]
        return ways[-1][0], sum([wait_s for _, wait_s in ways]) / len(ways)

    def state(self) -> dict[str, Any]:
        members = [member.to_plain() for member in self.members.values()]
        return {
            "members": members,
            "agreed": dict(self.agreed),
            "run": self.run,
            "corpora": self.corpora.state(),
            "bans": self.bans.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.members = {member.learner_id: member for member in map(Member.from_plain, state["members"])}
        self.live = sum(member.state == ACTIVE for member in self.members.values())
        self.agreed = dict(state["agreed"])
        # Older releases wrote neither.
        self.run = str(state.get("run", ""))
        self.corpora.restore(state.get("corpora", {}))
        self.bans.restore(state.get("bans", ()))
