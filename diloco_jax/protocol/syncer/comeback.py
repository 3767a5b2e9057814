"""Continuation of a run after the syncer's process ended: a restart of the process, or a rewind to a snapshot.

Restart. The new process has the values of the newest snapshot and, from the tape, every decision that was taken.
Learners hold newer values, bit for bit. No round opens until the syncer has these values; training does not stop.

    on_restart --learners return--> AnchorRequest -> AnchorValue -> Restore --all are back, or restore_s--> rounds

A version that no learner holds is lost. Nothing of it reached a learner, and its fragment continues from the newest
version that is left. A round that was being merged counts as merged if a learner holds its result. No version number is
used twice.

The syncer believes a version only if the tape allows it: a version that was made, or that of a round in flight when the
syncer stopped. It also believes the versions of the next rounds, because a lost machine may lose the end of its tape.
A later version needs two learners with the same bits, so no single learner moves the run's clock. If a value is
unusable (not finite, or far away), the driver passes it on as an anchor of no version, and the machine asks another
holder.

Rewind. When every process was lost, the run continues from the snapshot alone. What came after the snapshot is void,
and a learner that remembers it is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from diloco_jax.protocol.effects import Drop, Effects, Restore, Send
from diloco_jax.protocol.leases import LeaseBooks
from diloco_jax.protocol.member import DISCONNECTED, Member
from diloco_jax.protocol.membership import Membership
from diloco_jax.protocol.messages import NO_VERSION, STOPPED_OUTSIDE, SYNCER_STOPPED, AnchorRequest, AnchorValue
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.book import RoundBook
from diloco_jax.protocol.syncer.progress import Downstream, Progress
from diloco_jax.protocol.syncer.round import MERGING, Round

# How often the syncer repeats a request to learners that are back. It waits for that many even after the deadline.
REPETITIONS_MAX = 3


@dataclass(slots=True)
class Restoring:
    """The fragments that may have a newer version than the driver holds, and the requests for those versions."""

    # Version of each fragment that the driver holds, and its digest.
    held: list[int]
    digests: list[int]
    # Fragments with a newer version that was made, or may have been.
    wanted: list[int]
    # Fragment -> round that was being merged when the syncer stopped.
    uncertain: dict[int, Round]
    # Learners that were connected then, or were back and are lost again.
    awaited: set[str]
    # First wait before a request is repeated.
    resend_wait_s: float
    # Fragment -> versions above the newest made one that may exist.
    possible: dict[int, list[int]] = field(default_factory=dict)
    # When to continue without the learners that did not return; None until the first one returns.
    deadline_s: float | None = None
    # Fragment -> requested version, and the learner that has the request.
    asked: dict[int, tuple[int, str]] = field(default_factory=dict)
    # When a request was sent last, and when requests without an answer are repeated.
    asked_s: float = 0.0
    resend_s: float = 0.0
    # Repetitions of requests that a learner may have received, and of requests to learners that sent nothing since.
    # Each repetition of either kind doubles the wait.
    repetitions: int = 0
    unheard: int = 0
    # Fragment -> learner that did not answer the last request.
    unanswered: dict[int, str] = field(default_factory=dict)

    def asks(self, present: Iterable[Member], made: Sequence[int], now_s: float) -> list[tuple[str, int, int]]:
        """Return the (learner, fragment, version) to request now: the newest believed offers, from each holder in turn.

        Args:
            made: newest version of each fragment on the tape.
        """
        found = []
        members, turn = [m for m in present if m.down.offered], self.repetitions + self.unheard
        for fragment_id in self.wanted:
            offers = [m.down.offered[fragment_id] for m in members]
            believed = (v for v in offers if self.believes(fragment_id, v, made[fragment_id], members))
            version = max(believed, default=NO_VERSION)
            if version > max(self.held[fragment_id], self.asked.get(fragment_id, (-1, ""))[0]):
                holders = [m.learner_id for m in members if m.down.offered[fragment_id] == version]
                learner_id = holders[turn % len(holders)]
                self.asked[fragment_id] = (version, learner_id)
                found.append((learner_id, fragment_id, version))
        if found:
            self.asked_s = now_s
            # On a slow link the value is in transit and not lost.
            self.resend_s = now_s + self.resend_wait_s * 2**turn
        return found

    def believes(self, fragment_id: int, version: int, made: int, members: Iterable[Member]) -> bool:
        """Return whether this version of a fragment can exist by the tape, or two members offer it with equal bits."""
        if version <= made or version in self.possible.get(fragment_id, ()):
            return True
        offers = [m.down.will_hold[fragment_id] for m in members if m.down.offered and m.down.will_hold]
        bits = [offer.digest for offer in offers if offer.version == version]
        return len(set(bits)) < len(bits)

    def repeat(self, members: Mapping[str, Member], now_s: float) -> None:
        """Forget the open requests, if it is time to repeat them."""
        if not self.asked or now_s < self.resend_s:
            return
        if any(members[name].heard_s > self.asked_s for _, name in self.asked.values()):
            self.repetitions, self.unheard = self.repetitions + 1, 0
        else:
            # The check of silence decides whether that learner is lost.
            self.unheard += 1
        self.unanswered = {p: learner_id for p, (_, learner_id) in self.asked.items()}
        self.asked.clear()

    def give_up_silent(self) -> dict[int, str]:
        """Return for each fragment the learner that did not answer, and restart the count of repetitions."""
        silent = self.unanswered or {p: learner_id for p, (_, learner_id) in self.asked.items()}
        self.asked = {p: ask for p, ask in self.asked.items() if silent.get(p) != ask[1]}
        self.unanswered, self.repetitions, self.unheard = {}, 0, 0
        return silent

    def on_back(self, learner_id: str, deadline_s: float) -> None:
        """Record that a learner greeted, or is heard again; the first one sets the deadline for the others."""
        self.awaited.discard(learner_id)
        if self.deadline_s is None:
            self.deadline_s, self.repetitions, self.unheard = deadline_s, 0, 0

    def next_deadline_s(self) -> float:
        """Return when a wait ends without an input."""
        if self.asked and self.repetitions < REPETITIONS_MAX:
            return self.resend_s
        deadline_s = inf if self.deadline_s is None else self.deadline_s
        return min(deadline_s, self.resend_s) if self.asked else deadline_s

    def on_lost(self, learner_id: str, last: bool) -> None:
        """Cancel the requests to a learner that is lost or silent again; `last` if no other learner is present."""
        self.asked = {p: ask for p, ask in self.asked.items() if ask[1] != learner_id}
        self.awaited.add(learner_id)
        if last:
            self.deadline_s = None

    def take(self, fragment_id: int, version: int, digest: int) -> None:
        """Record that a newer value arrived."""
        self.held[fragment_id], self.digests[fragment_id] = version, digest
        if self.asked.get(fragment_id, (version, ""))[0] <= version:
            self.asked.pop(fragment_id, None)

    def is_over(self, versions: Sequence[int], now_s: float) -> bool:
        """Return whether no newer value can arrive, or the wait for it is over."""
        if self.deadline_s is None:
            # Without learners the run cannot continue, and the first one may bring everything.
            return False
        if now_s >= self.deadline_s:
            # A value that a present learner holds is worth a repeated request.
            return not self.asked or self.repetitions >= REPETITIONS_MAX
        if self.asked:
            return False
        return not self.awaited or all(self.held[p] >= self._newest(p, versions) for p in self.wanted)

    def _newest(self, fragment_id: int, versions: Sequence[int]) -> int:
        this = self.uncertain.get(fragment_id)
        return this.global_step if this is not None else versions[fragment_id]

    def to_plain(self) -> dict[str, Any]:
        """Return all fields as plain values that JSON keeps exactly."""
        return {
            "held": list(self.held),
            "digests": list(self.digests),
            "wanted": list(self.wanted),
            "possible": [[p, *versions] for p, versions in self.possible.items()],
            "uncertain": [this.to_plain() for this in self.uncertain.values()],
            "awaited": sorted(self.awaited),
            "asked": [[p, *ask] for p, ask in self.asked.items()],
            "times": [self.deadline_s, self.asked_s, self.resend_s, self.resend_wait_s],
            "turns": [self.repetitions, self.unheard],
            "unanswered": [[p, learner_id] for p, learner_id in self.unanswered.items()],
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Restoring:
        """Make what `to_plain` described."""
        rounds = [Round.from_plain(this) for this in plain["uncertain"]]
        deadline_s, asked_s, resend_s, resend_wait_s = plain["times"]
        repetitions, unheard = plain["turns"]
        return cls(
            list(plain["held"]),
            list(plain["digests"]),
            list(plain["wanted"]),
            {this.fragment_id: this for this in rounds},
            set(plain["awaited"]),
            resend_wait_s,
            {p: versions for p, *versions in plain.get("possible", ())},
            deadline_s,
            {p: (version, learner_id) for p, version, learner_id in plain["asked"]},
            asked_s,
            resend_s,
            repetitions,
            unheard,
            {p: learner_id for p, learner_id in plain.get("unanswered", ())},
        )


@dataclass(slots=True)
class Comeback:
    """The way of the syncer's machine from a restart, or a snapshot, to the next round."""

    effects: Effects
    config: ProtocolConfig
    progress: Progress
    # The members, who are expected back.
    membership: Membership
    downstream: Downstream
    # The rounds, which are paused until the syncer has what it lost.
    rounds: RoundBook
    leases: LeaseBooks
    # What learners are still to bring; None if nothing is missing.
    restoring: Restoring | None = None

    def restart(self, held: Sequence[int], digests: Sequence[int], now_s: float) -> None:
        """Start to restore what the process that ended held, and this one does not."""
        progress, versions, before = self.progress, self.downstream.versions, self.restoring
        assert len(held) == len(digests) == len(versions), f"{len(held)} fragments, not {len(versions)}"
        progress.epoch += 1
        self.effects.append(progress.note("restarted", -1, (), f"epoch {progress.epoch} of the syncer"))
        awaited = {member.learner_id for member in self.membership.connected()}
        flying = self.rounds.flying.values()
        uncertain = {this.fragment_id: this for this in flying if this.phase == MERGING}
        possible = self._possible(flying, before)
        if before is not None:
            # The process ended again before all learners were back.
            awaited |= before.awaited
            uncertain |= before.uncertain
        for this in flying:
            self._reopen(this.fragment_id, this.values)
        wanted = {p for p, version in enumerate(held) if version != versions[p]} | set(uncertain)
        restoring = Restoring(
            list(held), list(digests), sorted(wanted), uncertain, awaited, self.config.resend_s, possible
        )
        self._begin(restoring if wanted else None, now_s)

    def _possible(self, flying: Iterable[Round], before: Restoring | None) -> dict[int, list[int]]:
        """Return versions that may exist beyond the tape, because a lost machine may lose the end of its tape."""
        found = {p: list(versions) for p, versions in before.possible.items()} if before is not None else {}
        rounds = [(this.fragment_id, this.global_step) for this in flying]
        step, turns = self.progress.global_step, self.rounds.turns
        for _ in range(max(1, self.config.overlap_steps)):
            step = turns.next_due(step) if self.config.lockstep else step + 1
            rounds.append((turns.due(step), step))
        for fragment_id, step in rounds:
            if fragment_id >= 0 and step not in found.setdefault(fragment_id, []):
                found[fragment_id].append(step)
        return found

    def rewind(self, epoch: int, now_s: float) -> None:
        """Continue the run from a snapshot that was just restored."""
        progress = self.progress
        assert epoch > progress.epoch, f"epoch {epoch} after {progress.epoch}"
        progress.epoch = progress.rewound = epoch
        self.effects.append(progress.note("restarted", -1, (), f"epoch {epoch}, from the snapshot"))
        for member in self.membership.members.values():
            # The member trained when the snapshot was taken, or had just left; the run was stopped since.
            if member.state != DISCONNECTED or member.goodbye == STOPPED_OUTSIDE:
                member.goodbye = SYNCER_STOPPED
        self._begin(None, now_s)

    def _begin(self, restoring: Restoring | None, now_s: float) -> None:
        """Forget all links, and what was in transit on them."""
        for member in self.membership.connected():
            self.membership.set_state(member, DISCONNECTED, now_s)
        self.rounds.clear()
        self.downstream.forget_steps()
        self._set_restoring(restoring)

    def _set_restoring(self, restoring: Restoring | None) -> None:
        self.restoring = restoring
        self.rounds.paused = restoring is not None

    def _reopen(self, fragment_id: int, learners: Iterable[str]) -> None:
        """Let the steps in these learners' values of a fragment count again, because the values were lost."""
        for learner_id in learners:
            self.membership.members[learner_id].credit.merged_base.pop(fragment_id, None)

    def on_back(self, learner_id: str, now_s: float) -> None:
        """Request what is wanted of a learner that greeted, or is heard again."""
        if self.restoring is not None:
            self.restoring.on_back(learner_id, now_s + self.config.restore_s)
            self.ask(now_s)

    def on_tick(self, now_s: float) -> None:
        """Repeat requests without an answer."""
        if self.restoring is not None:
            self.restoring.repeat(self.membership.members, now_s)
            self.proceed(now_s)

    def on_anchor(self, member: Member, message: AnchorValue, now_s: float) -> None:
        """Restore a global value that a learner sends, if it is wanted and believed."""
        name, fragment_id, version = member.learner_id, message.fragment_id, message.version
        restoring = self.restoring
        wanted = restoring is not None and fragment_id in restoring.wanted
        if restoring is None or not wanted or NO_VERSION < version <= restoring.held[fragment_id]:
            self.effects.append(Drop(name, f"version {version} of fragment {fragment_id} is not needed"))
            return
        if reason := self._doubt(restoring, message):
            self.effects.append(Drop(name, reason))
            member.down.disregard(fragment_id)
            if restoring.asked.get(fragment_id, (version, ""))[1] == name:
                del restoring.asked[fragment_id]
            self.ask(now_s)
        else:
            restoring.take(fragment_id, version, message.digest)
            self.effects.append(Restore(fragment_id, version))
        self.finish(now_s)
        self.rounds.proceed(now_s)

    def _doubt(self, restoring: Restoring, message: AnchorValue) -> str:
        """Return why the syncer does not believe a learner's global value; "" if it does."""
        fragment_id, version = message.fragment_id, message.version
        made, what = self.downstream.versions[fragment_id], f"version {version} of fragment {fragment_id}"
        if version == NO_VERSION:
            return f"its value of fragment {fragment_id} cannot be used"
        if version == made and message.digest != self.downstream.digests[fragment_id]:
            return f"{what} has another digest than was made"
        if not restoring.believes(fragment_id, version, made, self.membership.present()):
            return f"{what} cannot exist: the run is at global step {self.progress.global_step}"
        return ""

    def on_lost(self, learner_id: str) -> None:
        """Cancel the requests to a learner that is lost or silent."""
        if self.restoring is not None:
            self.restoring.on_lost(learner_id, last=not self.membership.present())

    def forget(self, learner_id: str) -> None:
        """Wait no more for a learner that cannot return."""
        if self.restoring is not None:
            self.restoring.awaited.discard(learner_id)

    def proceed(self, now_s: float) -> None:
        """Request what is wanted, and continue the run when nothing more can arrive."""
        self.ask(now_s)
        self.finish(now_s)

    def ask(self, now_s: float) -> None:
        """Request, of each wanted fragment, the newest believed version that a present learner offers."""
        if self.restoring is not None:
            asks = self.restoring.asks(self.membership.present(), self.downstream.versions, now_s)
            for learner_id, fragment_id, version in asks:
                self.effects.append(Send(learner_id, AnchorRequest(fragment_id, version)))

    def finish(self, now_s: float) -> None:
        """Continue the run, once every version that a learner holds is here, or the wait for it is over."""
        restoring, downstream = self.restoring, self.downstream
        if restoring is None:
            return
        while restoring.is_over(downstream.versions, now_s):
            if not restoring.asked:
                break
            # A learner that offers a version and never brings it must not hide what others hold.
            for fragment_id, learner_id in restoring.give_up_silent().items():
                self.membership.members[learner_id].down.disregard(fragment_id)
            self.ask(now_s)
        else:
            return
        self._set_restoring(None)
        for fragment_id in restoring.wanted:
            self._decide(restoring, fragment_id)
        for member in self.membership.connected():
            for p in restoring.wanted:
                if not member.down.offered or member.down.offered[p] != downstream.versions[p]:
                    downstream.send(member, p)
        if self.progress.finished:
            # The process ended after the last round, before its last snapshot.
            self.rounds.evaluations.conclude(now_s)

    def _decide(self, restoring: Restoring, p: int) -> None:
        """Choose the version that a fragment continues from, and correct what depends on its rounds."""
        progress, downstream = self.progress, self.downstream
        version, made, this = restoring.held[p], downstream.versions[p], restoring.uncertain.get(p)
        if this is not None and version == this.global_step:
            # A learner holds the result of the merge, so the round counts as merged.
            self.rounds.credit(this, [part for _, part in sorted(this.values.items())])
        elif version < made:
            self.leases.revert(p, version)
            self._reopen(p, self.membership.members)
            for member in self.membership.members.values():
                if member.credit.merged_round.get(p, version) > version:
                    # No learner holds a value that contains what this member gave.
                    del member.credit.merged_round[p]
            self.effects.append(
                progress.note("lost", p, (), f"version {made}: nobody holds it, version {version} continues")
            )
        elif this is not None:
            note = progress.note("abandoned", p, (), "its merge was lost with the syncer", this.global_step)
            self.effects.append(note)
        else:
            self.effects.append(progress.note("restored", p, (), f"version {version}, from a learner"))
        downstream.replace(p, version, restoring.digests[p])
        self.leases.on_version(p, version)
        progress.global_step = max(progress.global_step, version)

    def state(self) -> dict[str, Any] | None:
        return self.restoring.to_plain() if self.restoring is not None else None

    def restore(self, state: Mapping[str, Any] | None) -> None:
        self._set_restoring(Restoring.from_plain(dict(state)) if state is not None else None)
