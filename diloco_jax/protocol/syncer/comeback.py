"""The return of the syncer: restarts of its process, and going back to a snapshot.

Restart. A syncer that died comes back with the values of its newest snapshot and, from its tape, with every decision
that it took. Newer values are in the hands of learners, bit for bit. Until it has them no round opens; training does
not stop.

    on_restart --learners return--> AnchorRequest -> AnchorValue -> Restore --all are back, or restore_s--> rounds

A version that nobody holds is lost: nothing of it reached a learner, and its fragment goes on from the newest that is
left. A round that was being merged counts as merged if somebody holds its result. Versions are never numbered again.

A version is believed only if the tape allows it: a version that was made, or that of a round in flight when the syncer
stopped. The next rounds are believed as well, because a lost machine may lose the end of its tape. A later version
needs two learners with the same bits, so no single learner moves the run's clock. If a value is not usable (not finite,
or far away), the driver passes it on as an anchor of no version, and the machine asks another holder.

Rewind. When every process died, the run goes on from the snapshot alone: what came after it is void, and whoever
remembers it is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from diloco_jax.protocol.effects import Drop, Effect, Restore, Send
from diloco_jax.protocol.leases import LeaseBook
from diloco_jax.protocol.member import GONE, Member
from diloco_jax.protocol.membership import Membership
from diloco_jax.protocol.messages import NO_VERSION, STOPPED_OUTSIDE, AnchorRequest, AnchorValue
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.book import RoundBook
from diloco_jax.protocol.syncer.downstream import Downstream
from diloco_jax.protocol.syncer.progress import Progress
from diloco_jax.protocol.syncer.rounds import MERGING, Round

REPETITIONS_MAX = 3  # of a question to somebody who is back; behind the deadline that many are still waited for


@dataclass(slots=True)
class Restoring:
    """The fragments of which a newer version may exist than the driver holds."""

    held: list[int]  # version of each fragment that the driver holds
    digests: list[int]  # of these
    wanted: list[int]  # fragments of which a newer version was made, or may have been
    uncertain: dict[int, Round]  # fragment -> round that was being merged when the syncer died
    awaited: set[str]  # learners that were connected then, or were back and are lost again
    resend_wait_s: float  # when to ask again, at first
    possible: dict[int, list[int]] = field(default_factory=dict)  # fragment -> versions above its newest made one
    deadline_s: float | None = None  # when to go on without those that did not come back; None while nobody is back
    asked: dict[int, tuple[int, str]] = field(default_factory=dict)  # fragment -> version asked for, and of whom
    asked_s: float = 0.0  # when somebody was asked last
    resend_s: float = 0.0  # when what was asked for is asked for again
    repetitions: int = 0  # those whose question somebody may have heard: each waits twice as long,
    unheard: int = 0  # as it does behind a question to learners of whom nothing was heard since
    unanswered: dict[int, str] = field(default_factory=dict)  # fragment -> who did not answer the last question

    def asks(self, present: Iterable[Member], made: Sequence[int], now_s: float) -> list[tuple[str, int, int]]:
        """Return the (learner, fragment, version) to ask for now: the newest believed offers, from each holder in turn.

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
            self.resend_s = now_s + self.resend_wait_s * 2**turn  # on a slow link it is under way, not lost
        return found

    def believes(self, fragment_id: int, version: int, made: int, members: Iterable[Member]) -> bool:
        """Return whether this version of a fragment can exist by the tape, or two members offer it with equal bits."""
        if version <= made or version in self.possible.get(fragment_id, ()):
            return True
        offers = [m.down.will_hold[fragment_id] for m in members if m.down.offered and m.down.will_hold]
        bits = [offer.digest for offer in offers if offer.version == version]
        return len(set(bits)) < len(bits)

    def repeat(self, members: Mapping[str, Member], now_s: float) -> None:
        """Forget what was asked for, if it is time to ask again."""
        if not self.asked or now_s < self.resend_s:
            return
        if any(members[name].heard_s > self.asked_s for _, name in self.asked.values()):
            self.repetitions, self.unheard = self.repetitions + 1, 0
        else:
            self.unheard += 1  # its lease says whether it is dead
        self.unanswered = {p: learner_id for p, (_, learner_id) in self.asked.items()}
        self.asked.clear()

    def give_up_silent(self) -> dict[int, str]:
        """Return by fragment the learner that was asked in vain, and begin to count repetitions again."""
        silent = self.unanswered or {p: learner_id for p, (_, learner_id) in self.asked.items()}
        self.asked = {p: ask for p, ask in self.asked.items() if silent.get(p) != ask[1]}
        self.unanswered, self.repetitions, self.unheard = {}, 0, 0
        return silent

    def on_back(self, learner_id: str, deadline_s: float) -> None:
        """A learner greeted, or is heard again. The first one makes the wait for the others end some time."""
        self.awaited.discard(learner_id)
        if self.deadline_s is None:
            self.deadline_s, self.repetitions, self.unheard = deadline_s, 0, 0

    def next_deadline_s(self) -> float:
        """Return the time at which a wait ends by itself."""
        if self.asked and self.repetitions < REPETITIONS_MAX:
            return self.resend_s
        deadline_s = inf if self.deadline_s is None else self.deadline_s
        return min(deadline_s, self.resend_s) if self.asked else deadline_s

    def on_lost(self, learner_id: str, last: bool) -> None:
        """A learner is gone or silent again: what it was asked for will not come. It may be the last one."""
        self.asked = {p: ask for p, ask in self.asked.items() if ask[1] != learner_id}
        self.awaited.add(learner_id)
        if last:
            self.deadline_s = None

    def take(self, fragment_id: int, version: int, digest: int) -> None:
        """A newer value arrived."""
        self.held[fragment_id], self.digests[fragment_id] = version, digest
        if self.asked.get(fragment_id, (version, ""))[0] <= version:
            self.asked.pop(fragment_id, None)

    def is_over(self, versions: Sequence[int], now_s: float) -> bool:
        """Say if nothing newer can come, or the wait for it is over."""
        if self.deadline_s is None:
            return False  # without learners there is nothing to go on with, and they may bring everything
        if now_s >= self.deadline_s:  # what a learner that is back holds is worth asking for again
            return not self.asked or self.repetitions >= REPETITIONS_MAX
        if self.asked:
            return False
        return not self.awaited or all(self.held[p] >= self._newest(p, versions) for p in self.wanted)

    def _newest(self, fragment_id: int, versions: Sequence[int]) -> int:
        this = self.uncertain.get(fragment_id)
        return this.global_step if this is not None else versions[fragment_id]

    def to_plain(self) -> dict[str, Any]:
        """Everything, as plain values that JSON keeps exactly."""
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
    """Brings the syncer's parts from a restart to the next round."""

    config: ProtocolConfig
    progress: Progress
    membership: Membership  # who took part, and is expected back
    downstream: Downstream
    rounds: RoundBook  # paused until it is over
    leases: LeaseBook
    restoring: Restoring | None = None  # what is still to be had from learners

    def restart(self, held: Sequence[int], digests: Sequence[int], now_s: float) -> list[Effect]:
        """The process died: begin to restore what its successor does not hold."""
        progress, versions, before = self.progress, self.downstream.versions, self.restoring
        assert len(held) == len(digests) == len(versions), f"{len(held)} fragments, not {len(versions)}"
        progress.epoch += 1
        effects: list[Effect] = [progress.note("restarted", -1, (), f"life {progress.epoch} of the syncer")]
        awaited = {member.learner_id for member in self.membership.connected()}
        flying = self.rounds.flying.values()
        uncertain = {this.fragment_id: this for this in flying if this.phase == MERGING}
        possible = self._possible(flying, before)
        if before is not None:  # it died again before all were back
            awaited |= before.awaited
            uncertain |= before.uncertain
        for this in flying:
            self._reopen(this.fragment_id, this.values)
        wanted = {p for p, version in enumerate(held) if version != versions[p]} | set(uncertain)
        restoring = Restoring(
            list(held), list(digests), sorted(wanted), uncertain, awaited, self.config.resend_s, possible
        )
        self._begin(restoring if wanted else None, effects, now_s)
        return effects

    def _possible(self, flying: Iterable[Round], before: Restoring | None) -> dict[int, list[int]]:
        """Return versions that may exist beyond the tape, because a lost machine may lose the end of its tape."""
        found = {p: list(versions) for p, versions in before.possible.items()} if before is not None else {}
        rounds = [(this.fragment_id, this.global_step) for this in flying]
        step, schedule = self.progress.global_step, self.rounds.schedule
        for _ in range(max(1, self.config.overlap_steps)):
            step = schedule.next_due(step) if self.config.lockstep else step + 1
            rounds.append((schedule.due(step), step))
        for fragment_id, step in rounds:
            if fragment_id >= 0 and step not in found.setdefault(fragment_id, []):
                found[fragment_id].append(step)
        return found

    def rewind(self, epoch: int, now_s: float) -> list[Effect]:
        """The run goes on from a snapshot that was just restored."""
        progress = self.progress
        assert epoch > progress.epoch, f"epoch {epoch} after {progress.epoch}"
        progress.epoch = progress.rewound = epoch
        effects: list[Effect] = [progress.note("restarted", -1, (), f"life {epoch}, from the snapshot")]
        for member in self.membership.connected():  # when the snapshot was taken; the run was stopped since
            member.goodbye = STOPPED_OUTSIDE
        self._begin(None, effects, now_s)
        return effects

    def _begin(self, restoring: Restoring | None, effects: list[Effect], now_s: float) -> None:
        """Forget links, and what was on its way."""
        for member in self.membership.connected():
            self.membership.set_state(member, GONE, now_s)
        effects += self.rounds.clear()
        self.downstream.forget_steps()
        self._go(restoring)

    def _go(self, restoring: Restoring | None) -> None:
        self.restoring = restoring
        self.rounds.paused = restoring is not None

    def _reopen(self, fragment_id: int, learners: Iterable[str]) -> None:
        """Let the steps count again that these learners gave of the fragment: they did not come through."""
        for learner_id in learners:
            self.membership.members[learner_id].credit.merged_base.pop(fragment_id, None)

    def on_back(self, learner_id: str, effects: list[Effect], now_s: float) -> None:
        """A learner greeted, or is heard again: it may hold what is wanted."""
        if self.restoring is not None:
            self.restoring.on_back(learner_id, now_s + self.config.restore_s)
            self.ask(effects, now_s)

    def on_tick(self, effects: list[Effect], now_s: float) -> None:
        """Ask again for what did not come."""
        if self.restoring is not None:
            self.restoring.repeat(self.membership.members, now_s)
            self.proceed(effects, now_s)

    def on_anchor(self, member: Member, message: AnchorValue, now_s: float) -> list[Effect]:
        """A learner sends a global value that may be wanted."""
        name, fragment_id, version = member.learner_id, message.fragment_id, message.version
        restoring = self.restoring
        wanted = restoring is not None and fragment_id in restoring.wanted
        if restoring is None or not wanted or NO_VERSION < version <= restoring.held[fragment_id]:
            return [Drop(name, f"version {version} of fragment {fragment_id} is not needed")]
        effects: list[Effect] = []
        if reason := self._doubt(restoring, message):
            effects.append(Drop(name, reason))
            member.down.disregard(fragment_id)
            if restoring.asked.get(fragment_id, (version, ""))[1] == name:
                del restoring.asked[fragment_id]
            self.ask(effects, now_s)
        else:
            restoring.take(fragment_id, version, message.digest)
            effects.append(Restore(fragment_id, version))
        self.finish(effects, now_s)
        return effects + self.rounds.proceed(now_s)

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
        """A learner is gone or silent."""
        if self.restoring is not None:
            self.restoring.on_lost(learner_id, last=not self.membership.present())

    def proceed(self, effects: list[Effect], now_s: float) -> None:
        """Ask for what is wanted, and go on when nothing more can come."""
        self.ask(effects, now_s)
        self.finish(effects, now_s)

    def ask(self, effects: list[Effect], now_s: float) -> None:
        """Ask for the newest versions that somebody offers."""
        if self.restoring is not None:
            for learner_id, fragment_id, version in self.restoring.asks(
                self.membership.present(), self.downstream.versions, now_s
            ):
                effects.append(Send(learner_id, AnchorRequest(fragment_id, version)))

    def finish(self, effects: list[Effect], now_s: float) -> None:
        """Go on, once every version that anybody holds is here, or the wait for it is over."""
        restoring, downstream = self.restoring, self.downstream
        if restoring is None:
            return
        while restoring.is_over(downstream.versions, now_s):
            if not restoring.asked:
                break
            # A learner that offers a version and never brings it must not hide what others hold.
            for fragment_id, learner_id in restoring.give_up_silent().items():
                self.membership.members[learner_id].down.disregard(fragment_id)
            self.ask(effects, now_s)
        else:
            return
        self._go(None)
        for fragment_id in restoring.wanted:
            self._decide(restoring, fragment_id, effects)
        for member in self.membership.connected():
            for p in restoring.wanted:
                if not member.down.offered or member.down.offered[p] != downstream.versions[p]:
                    effects.append(downstream.send(member, p))
        if self.progress.finished:  # it died before its last snapshot
            self.rounds.evaluations.conclude(effects, now_s)

    def _decide(self, restoring: Restoring, p: int, effects: list[Effect]) -> None:
        """Settle from which version of this fragment the run goes on, and what that means for its rounds."""
        progress, downstream = self.progress, self.downstream
        version, made, this = restoring.held[p], downstream.versions[p], restoring.uncertain.get(p)
        if this is not None and version == this.global_step:  # the merge had come through
            self.rounds.credit(this, [part for _, part in sorted(this.values.items())], effects)
        elif version < made:
            self.leases.revert(p, version)
            self._reopen(p, self.membership.members)
            for member in self.membership.members.values():
                if member.credit.merged_round.get(p, version) > version:
                    del member.credit.merged_round[p]  # what it gave is in no value that anybody holds
            effects.append(progress.note("lost", p, (), f"version {made}: nobody holds it, {version} goes on"))
        elif this is not None:
            effects.append(progress.note("abandoned", p, (), "its merge died with the syncer", this.global_step))
        else:
            effects.append(progress.note("restored", p, (), f"version {version}, from a learner"))
        downstream.replace(p, version, restoring.digests[p])
        self.leases.on_version(p, version)
        progress.global_step = max(progress.global_step, version)

    def state(self) -> dict[str, Any] | None:
        return self.restoring.to_plain() if self.restoring is not None else None

    def restore(self, state: Mapping[str, Any] | None) -> None:
        self._go(Restoring.from_plain(dict(state)) if state is not None else None)
