"""Global fragments and their rounds: quorum, pulls, merges, broadcasts (paper, Alg. 2). Syncer adds the members' side.

A round is one global step's turn of its due fragment:

    COLLECTING --quorum and grace--> PULLING --all answered or gone--> MERGING --on_merged--> broadcast
         |  (no fragment due)            |  (nobody answered)             |  (no value was usable)
         +--> Advance                    +--> abandoned: Discard, Advance +--> abandoned: Advance

One round collects at a time; up to overlap_steps rounds are in flight, never two of the same fragment. With fewer live
learners than the quorum a round stays in COLLECTING ("below quorum"): merging is paused, training is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from diloco_jax.protocol.effects import Discard, Drop, Effect, Finish, Merge, Note, Part, SaveSnapshot, Send
from diloco_jax.protocol.leases import LeaseBook
from diloco_jax.protocol.membership import ACTIVE, GONE, SILENT, Held, Member, Membership, Sent
from diloco_jax.protocol.messages import (
    NO_VERSION,
    Advance,
    Expel,
    FragmentValue,
    GlobalFragment,
    PullRequest,
    Stop,
)
from diloco_jax.protocol.pacing import Closing, ProtocolConfig, Schedule, closes, closing, grace_window_s
from diloco_jax.protocol.recovery import Matchmaker
from diloco_jax.protocol.syncer.restoring import Restoring
from diloco_jax.protocol.syncer.rounds import MERGING, PULLING, Pace, Round

STEPS_MAX = 2  # times that a version goes out to one member as a step: who lacks it then cannot use steps


class Collector:
    """The part of the syncer's machine that makes new versions of fragments."""

    def __init__(
        self,
        config: ProtocolConfig,
        total_steps: int,
        fingerprint: tuple[tuple[str, str], ...] = (),
        payload_bytes: Mapping[int, int] = MappingProxyType({}),
        step_bytes: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        if total_steps < 1:
            raise ValueError(f"total_steps is {total_steps}, but a run needs at least 1 global step")
        self.config = config
        self.total_steps = total_steps
        self.epoch, self.rewound = 1, 0  # which life of the syncer this is; in which the run was last put back
        self.global_step = 0  # closed rounds
        self.versions = [0] * config.num_fragments
        self.digests = [0] * config.num_fragments
        self.merged_rounds = self.merged_parts = 0
        self.finished = False
        self.payload_bytes = dict(payload_bytes)  # fragment -> size of its encoded global value
        self.step_bytes = dict(step_bytes)  # likewise of a step to its newest version; absent: steps are not used
        self.membership = Membership(fingerprint, config.num_fragments, config.learners_max)
        self.leases = LeaseBook(config.num_fragments)
        self._lockstep = config.lockstep
        self._matches = Matchmaker(self.membership)
        self._schedule = Schedule(config.sync_every, config.num_fragments)
        self._history = [[0] for _ in range(config.num_fragments)]  # versions against which a value can be read
        self._bases: dict[int, Held] = {}  # fragment -> value from which a step leads to its newest one
        self._rounds: dict[int, Round] = {}
        self._collecting: Round | None = None
        self._fresh: set[str] = set()
        self._pace = Pace()
        self._closed_s = 0.0  # when the newest round of a fragment closed
        self._lease_check_s = 0.0
        self._restoring: Restoring | None = None

    # ---- values ---------------------------------------------------------------------------------------------------

    def on_value(self, message: FragmentValue, now_s: float) -> list[Effect]:
        """The answer to a pull. Without a Drop for the sender the driver keeps the payload until Merge or Discard."""
        learner_id = message.learner_id
        member = self.membership.get(learner_id, message.incarnation)
        if member is None:
            return [Drop(learner_id, "value before hello, or of an old incarnation")]
        member.heard_s = now_s
        if not 0 <= message.fragment_id < len(self.versions):
            return [Drop(learner_id, f"value of fragment {message.fragment_id}, there are {len(self.versions)}")]
        this = self._rounds.get(message.global_step)
        if this is None or this.phase != PULLING or learner_id not in this.asked:
            return [Drop(learner_id, f"value for round {message.global_step} came late or was not asked for")]
        if message.fragment_id != this.fragment_id:
            return [Drop(learner_id, f"value of fragment {message.fragment_id} where {this.fragment_id} was asked for")]
        this.answered(learner_id, now_s)
        if message.steps < 1 or message.tokens < 1:
            return [Drop(learner_id, "value without a step since the last adoption"), *self._settle(this, now_s)]
        if message.base_version not in self._history[this.fragment_id]:
            reason = f"value against version {message.base_version}, kept are {self._history[this.fragment_id]}"
            refresh = self._global(member, this.fragment_id)
            return [Drop(learner_id, reason), refresh, *self._settle(this, now_s)]
        member.merged_base[this.fragment_id] = message.base_version
        this.values[learner_id] = Part(
            learner_id,
            message.local_step,
            message.steps,
            message.tokens,
            message.base_version,
            message.samples,
            message.since,
        )
        return self._settle(this, now_s) + self._proceed(now_s)  # it may have been left out of the collecting round

    def on_merged(self, global_step: int, digest: int, left_out: Sequence[str], now_s: float) -> list[Effect]:
        """The driver finished a Merge: the fragment has a new version, which everybody gets.

        Args:
            global_step: the round.
            digest: of the new value.
            left_out: learners whose value could not be used. If that was everybody, there is no new value.
            now_s: the driver's clock.
        """
        this = self._rounds.pop(global_step)
        assert this.phase == MERGING, f"round {global_step} merged in phase {this.phase}"
        effects: list[Effect] = []
        parts = [part for _, part in sorted(this.values.items()) if part.learner_id not in left_out]
        for learner_id in sorted(set(left_out) - this.former):
            if not parts:  # nothing comes that ends its steps; else they count again once it holds the new version:
                self.membership.members[learner_id].merged_base.pop(this.fragment_id, None)  # one bad value, one strike
            self._strike(self.membership.members[learner_id], this, effects, now_s)
        if not parts:
            effects.append(self._note("abandoned", this.fragment_id, (), "no value was usable", global_step))
            self._advance(effects)
            return effects + self._proceed(now_s)
        self._pace = self._pace.after_merge(now_s - this.closed_s, self.membership.median_step_s(), self.config)
        self._bases[this.fragment_id] = Held(self.versions[this.fragment_id], self.digests[this.fragment_id])
        self._renew(this, parts, digest, effects)
        for part in parts:
            if part.learner_id not in this.former:
                self.membership.members[part.learner_id].merged_round[this.fragment_id] = global_step
        for member in self.membership.connected():
            effects.append(self._global(member, this.fragment_id, broadcast_s=now_s))
        for member in self.membership.live_members():
            self._watch_share(member, effects)
        return effects + self._proceed(now_s)

    def _renew(self, this: Round, parts: Sequence[Part], digest: int, effects: list[Effect]) -> None:
        """Count a round that made a new version of its fragment."""
        fragment_id, version = this.fragment_id, this.global_step
        self.versions[fragment_id] = version
        self.digests[fragment_id] = digest
        history = self._history[fragment_id]
        history.append(version)
        del history[: -self.config.anchor_history]
        self.merged_rounds += 1
        self.merged_parts += len(parts)
        for part in parts:
            member = self.membership.members[part.learner_id]
            member.rounds += 1
            if part.learner_id in this.former:
                continue  # its own counters and data begin anew
            member.merged_mark, member.strikes, member.alarmed = self.merged_rounds, 0, False
            self.leases.on_merged(part.learner_id, fragment_id, version, part.samples, part.since)
        names = tuple(part.learner_id for part in parts)
        effects.append(self._note("merged", fragment_id, names, "", version))

    def _strike(self, member: Member, this: Round, effects: list[Effect], now_s: float) -> None:
        """A value that would have harmed the model: count it, and part with a learner that goes on like that."""
        if member.state == GONE:
            return
        member.strikes += 1
        name, most = member.learner_id, self.config.strikes_max
        reason = f"value of round {this.global_step} is not usable, strike {member.strikes} of {most}"
        effects.append(self._note("strike", this.fragment_id, (name,), reason, this.global_step))
        if member.strikes < most:
            return
        member.expelled = True
        reason = f"{most} values in a row were NaN, infinite, wildly large or unreadable"
        effects += [Send(name, Expel(reason)), self._note("expelled", -1, (name,), reason)]
        effects += self._lose(member, GONE, "expelled", now_s)
        self._release(member, effects)

    def _watch_share(self, member: Member, effects: list[Effect]) -> None:
        """Raise an alarm, once, for a live learner whose work never arrives in the model."""
        rounds = self.merged_rounds - member.merged_mark
        if rounds >= self.config.unmerged_rounds_max and not member.alarmed:
            member.alarmed = True
            reason = f"alive, but without a share in the last {rounds} merged rounds"
            effects.append(self._note("unmerged", -1, (member.learner_id,), reason))

    # ---- rounds ---------------------------------------------------------------------------------------------------

    def _proceed(self, now_s: float) -> list[Effect]:
        """Open, and close, what can be opened and closed now."""
        effects: list[Effect] = []
        while not self.finished and self._restoring is None:
            if self._collecting is None and not self._open(effects, now_s):
                break
            late = self._late(now_s)
            fresh = len(self._fresh - late) if late else len(self._fresh)
            live = self.membership.live - len(late)
            this = self._collecting
            assert this is not None
            self._watch_quorum(this, fresh, live, now_s)
            if now_s < this.paced_s or not closes(fresh, live, self.config.quorum, this.closes_s, now_s):
                break
            self._close(late, effects, now_s)
        return effects

    def _open(self, effects: list[Effect], now_s: float) -> bool:
        """Open the next round, if its fragment and a place in flight are free; finish when there is none left."""
        step = self._schedule.next_due(self.global_step) if self._lockstep else self.global_step + 1
        if step > self.total_steps:
            if not self._rounds:
                self.finished = True
                self._end(effects)
            return False
        fragment_id = self._schedule.due(step)
        if len(self._rounds) >= max(1, self.config.overlap_steps):
            return False
        if fragment_id >= 0 and any(r.fragment_id == fragment_id for r in self._rounds.values()):
            return False
        self._collecting = self._rounds[step] = Round(step, fragment_id, now_s)
        self._fresh = set()
        for member in self.membership.members.values():
            self._count(member)
        return True

    def _end(self, effects: list[Effect]) -> None:
        stop = Stop(self.global_step, "run complete")
        effects += [Send(member.learner_id, stop) for member in self.membership.connected()]
        effects += [self._note("finished", -1, (), "run complete"), Finish("run complete")]

    def _count(self, member: Member) -> bool:
        """Count a live member towards the collecting round, if its newest report is fresh; whether that is news."""
        this = self._collecting
        if this is None or member.state != ACTIVE or member.learner_id in self._fresh:
            return False
        if not member.is_fresh(this.global_step, this.fragment_id, self._lockstep):
            return False
        self._fresh.add(member.learner_id)
        return True

    def _watch_quorum(self, this: Round, fresh: int, live: int, now_s: float) -> None:
        """Begin the grace window when the quorum is met, and forget it when somebody leaves."""
        if fresh < self.config.quorum:
            this.closes_s = None
        elif this.closes_s is None:
            step_s = self.membership.median_step_s()
            broadcast_s, wait_s = self.membership.broadcast_s(step_s)
            self._pace = self._pace.after_quorum(now_s - this.opened_s, step_s, self.config)
            if this.fragment_id >= 0:  # if rounds closed faster than links carry what they make, it would pile up
                this.paced_s = self._closed_s + broadcast_s / self.config.grace_safety + wait_s
            sync_s = (self._pace.merge_s or 0.0) + broadcast_s
            grace_s = grace_window_s(self.config, step_s, self._pace.quorum_s, sync_s)
            this.closes_s = max(now_s + grace_s, this.paced_s)
        if this.closes_s is not None and fresh >= live:
            this.closes_s = min(this.closes_s, max(now_s, this.paced_s))

    def decide(self, now_s: float) -> Closing:
        """Whether the collecting round closes now, and why."""
        closes_s = self._collecting.closes_s if self._collecting is not None else None
        late = self._late(now_s)
        live = self.membership.live - len(late)
        return closing(len(self._fresh - late), live, self.config.quorum, closes_s, now_s)

    def _late(self, now_s: float) -> set[str]:
        """Live learners that the collecting round leaves out: an earlier one waits long for them (a slow link).

        It would wait as long, and with it every round after it. With too few others it takes them all the same.
        """
        if len(self._rounds) < 2:
            return set()
        late = set()
        for this in self._rounds.values():
            for name in this.waits_long_for(now_s):
                if self.membership.members[name].state == ACTIVE:
                    late.add(name)
        return late if self.membership.live - len(late) >= self.config.quorum else set()

    def _close(self, late: set[str], effects: list[Effect], now_s: float) -> None:
        reason = self.decide(now_s).reason
        this, self._collecting = self._collecting, None
        assert this is not None
        members = sorted(self._fresh - late)
        marker = self.config.snapshot_every
        snapshot = marker > 0 and this.global_step // marker > self.global_step // marker
        self.global_step = this.global_step
        for learner_id in members:
            member = self.membership.members[learner_id]
            member.used_step = member.local_step
        left_out = f", without {', '.join(sorted(late))}: an earlier round waits long for that" if late else ""
        effects.append(self._note("closed", this.fragment_id, tuple(members), reason + left_out))
        if snapshot:
            effects.append(SaveSnapshot(self.global_step))
        if this.fragment_id < 0:
            del self._rounds[this.global_step]
            self._advance(effects)
            return
        this.phase = PULLING
        this.closed_s = self._closed_s = now_s
        this.resend_wait_s = max(self.config.resend_s, 2.0 * (self._pace.merge_s or 0.0))
        this.resend_s = now_s + this.resend_wait_s
        this.expires_s = now_s + self.config.pull_timeout_s
        for learner_id in members:
            this.size += 1
            this.asked[learner_id] = local_step = self.membership.members[learner_id].local_step
            effects.append(Send(learner_id, PullRequest(this.global_step, this.fragment_id, local_step)))
        for member in self.membership.live_members():
            self._repair(member, this.fragment_id, effects)

    def _repair(self, member: Member, fragment_id: int, effects: list[Effect]) -> None:
        """Repeat a broadcast that was lost: its learner began a step after it was due, and still lacks it.

        A step that began before the arrival reports the old version, hence one step more than the overlap. Every
        repetition waits twice as long: on a slow link it is under way, not lost.
        """
        if not member.adopted or member.adopted[fragment_id].version >= self.versions[fragment_id]:
            return
        sent, base = member.sent.get(fragment_id), self._bases.get(fragment_id)
        if sent is not None and member.local_step > sent.local_step + sent.wait_steps:
            if base is not None and member.adopted[fragment_id].version == base.version:
                member.will_hold[fragment_id] = base  # whole values would fill a slow link for good
            effects.append(self._global(member, fragment_id, 2 * sent.wait_steps))

    def _settle(self, this: Round, now_s: float) -> list[Effect]:
        """Merge a pulled round once nobody is left to answer; give it up when nobody did."""
        if this.asked or this.phase != PULLING:
            return []
        if this.values:
            this.phase = MERGING
            parts = tuple(this.values[learner_id] for learner_id in sorted(this.values))
            return [Merge(this.global_step, this.fragment_id, parts)]
        del self._rounds[this.global_step]
        note = self._note("abandoned", this.fragment_id, (), "no value arrived", this.global_step)
        effects: list[Effect] = [note, Discard(this.global_step)]
        self._advance(effects)
        return effects + self._proceed(now_s)

    def _advance(self, effects: list[Effect]) -> None:
        message = Advance(self.global_step)
        effects += [Send(member.learner_id, message) for member in self.membership.connected()]

    # ---- members --------------------------------------------------------------------------------------------------

    def _lose(self, member: Member, state: str, reason: str, now_s: float) -> list[Effect]:
        """Take a member out of everything that waits for it."""
        kind = "silent" if state == SILENT else "left"
        self.membership.set_state(member, state, now_s)
        effects: list[Effect] = [self._note(kind, -1, (member.learner_id,), reason)]
        self._fresh.discard(member.learner_id)
        if state == GONE:
            effects += self._matches.on_lost(member.learner_id, f"it is gone: {reason}")
        if self._restoring is not None:
            self._restoring.on_lost(member.learner_id, last=not self.membership.present())
        for this in list(self._rounds.values()):
            if this.asked.pop(member.learner_id, None) is not None:
                effects += self._settle(this, now_s)
        return effects

    def _global(self, member: Member, fragment_id: int, wait_steps: int = 0, broadcast_s: float | None = None) -> Send:
        """Send the newest version: as a step to a member that will hold its base by then, else whole."""
        version, digest = self.versions[fragment_id], self.digests[fragment_id]
        sent, start = member.sent.get(fragment_id), self._bases.get(fragment_id)
        steps = sent.steps if sent is not None and sent.version == version else 0
        if fragment_id in self.step_bytes and start == member.will_hold[fragment_id] and steps < STEPS_MAX:
            size, base, steps = self.step_bytes[fragment_id], start.version, steps + 1
        else:
            size, base, steps = self.payload_bytes.get(fragment_id, 0), NO_VERSION, STEPS_MAX
        wait_steps = wait_steps or self.config.overlap_steps + 1
        member.sent[fragment_id] = Sent(version, steps, member.local_step, wait_steps, broadcast_s)
        member.will_hold[fragment_id] = Held(version, digest)
        merged_round = member.merged_round.get(fragment_id, NO_VERSION)
        value = (self.global_step, fragment_id, version, self.epoch, digest, size, base, merged_round)
        return Send(member.learner_id, GlobalFragment(*value))

    def _release(self, member: Member, effects: list[Effect]) -> None:
        """Let others have the data that a lost incarnation did not finish; it will not ask for a state any more."""
        effects += self._matches.on_done(member.learner_id)
        count = self.leases.release(member.learner_id)
        if count:
            effects.append(self._note("released", -1, (member.learner_id,), f"{count} samples go to others"))

    def _disown(self, member: Member) -> None:
        """What this learner gave to rounds that have not ended is of an earlier incarnation from now on."""
        uncertain = self._restoring.uncertain.values() if self._restoring is not None else ()
        for this in [*self._rounds.values(), *uncertain]:
            if member.learner_id in this.values:
                this.former.add(member.learner_id)

    def _note(
        self, kind: str, fragment_id: int, members: tuple[str, ...], reason: str, global_step: int | None = None
    ) -> Note:
        return Note(kind, self.global_step if global_step is None else global_step, fragment_id, members, reason)
