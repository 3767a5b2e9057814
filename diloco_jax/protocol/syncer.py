"""The syncer's half of the protocol (paper, Alg. 2): collect reports, close, pull, merge, broadcast.

Rules of this file
  * Inputs are `on_<event>` methods; each returns the effects that the driver executes in order. Nothing is buffered.
  * The machine never sees an array. The driver holds the payload of every value that was not dropped, until the
    Merge or Discard of its round.
  * `next_deadline_s` names only what time alone can resolve. Disconnects and the end of a merge are inputs.
  * A fault of a peer is data (Drop, Refuse); a fault of the driver raises.

A round is one global step's turn of its due fragment:

    COLLECTING --quorum and grace--> PULLING --all answered or gone--> MERGING --on_merged--> broadcast
         |  (no fragment due)            |  (nobody answered)
         +--> Advance                    +--> abandoned: Discard, Advance

One round collects at a time; up to overlap_steps rounds are in flight, never two of the same fragment. With fewer
live learners than the quorum a round stays in COLLECTING ("below quorum"): merging rests, training does not.
"""

from __future__ import annotations

from math import inf
from typing import assert_never

from diloco_jax.protocol.membership import ACTIVE, GONE, JOINING, SILENT, Member, Membership, Sent
from diloco_jax.protocol.messages import (
    NO_VERSION,
    Advance,
    Discard,
    Drop,
    Effect,
    Finish,
    FragmentValue,
    GlobalFragment,
    Heartbeat,
    Hello,
    LearnerMessage,
    Leave,
    Merge,
    Note,
    Part,
    PullRequest,
    Refuse,
    Send,
    StepReport,
    Stop,
    Welcome,
)
from diloco_jax.protocol.pacing import Closing, ProtocolConfig, Schedule, closing, grace_window_s
from diloco_jax.protocol.rounds import COLLECTING, MERGING, PULLING, Pace, Round


class Syncer:
    """State machine of the syncer. See the rules above and docs/protocol.md."""

    def __init__(self, config: ProtocolConfig, total_steps: int, fingerprint: tuple[tuple[str, str], ...] = ()) -> None:
        if total_steps < 1:
            raise ValueError(f"total_steps is {total_steps}, but a run needs at least 1 global step")
        self.config = config
        self.total_steps = total_steps
        self.global_step = 0  # closed rounds
        self.versions = [0] * config.num_fragments
        self.merged_rounds = 0
        self.merged_parts = 0
        self.finished = False
        self.payload_bytes: dict[int, int] = {}  # fragment -> size of its encoded global value, told by the driver
        self.membership = Membership(fingerprint, config.num_fragments, config.learners_max)
        self._schedule = Schedule(config.sync_every, config.num_fragments)
        self._history = [[0] for _ in range(config.num_fragments)]  # versions against which a value can be read
        self._rounds: dict[int, Round] = {}
        self._collecting: Round | None = None
        self._fresh: set[str] = set()
        self._pace = Pace()
        self._lease_check_s = 0.0

    # ---- inputs ---------------------------------------------------------------------------------------------------

    def on_message(self, message: LearnerMessage, now_s: float) -> list[Effect]:
        """Any message of a learner. The driver vouches that the sender is who the message says."""
        if isinstance(message, StepReport):
            return self.on_report(message, now_s)
        if isinstance(message, FragmentValue):
            return self.on_value(message, now_s)
        if isinstance(message, Heartbeat):
            return self.on_heartbeat(message, now_s)
        if isinstance(message, Hello):
            return self.on_hello(message, now_s)
        if isinstance(message, Leave):
            return self.on_disconnect(message.learner_id, message.incarnation, message.reason, now_s)
        assert_never(message)

    def on_hello(self, message: Hello, now_s: float) -> list[Effect]:
        """A learner joins, comes back, or repeats its greeting because something was lost."""
        refusal = self.membership.refusal(message, self.versions)
        if refusal:
            return [Send(message.learner_id, Refuse(refusal)), Drop(message.learner_id, refusal)]
        effects: list[Effect] = []
        known = self.membership.members.get(message.learner_id)
        if known is not None and message.incarnation > known.incarnation and known.state != GONE:
            effects += self._lose(known, GONE, "replaced by a newer incarnation", now_s)
        entered = known is None or known.state == GONE
        member = self.membership.join(message, now_s)
        if entered:
            effects.append(self._note("joined", -1, (member.learner_id,), f"incarnation {member.incarnation}"))
        elif member.state == SILENT:
            self._activate(member, effects, now_s)
            self._count(member)
        effects.append(Send(member.learner_id, Welcome(self.global_step, tuple(self.versions))))
        missing = [p for p, version in enumerate(message.versions) if version < self.versions[p]]
        effects += [self._global(member, fragment_id) for fragment_id in missing]
        if self.finished:
            effects.append(Send(member.learner_id, Stop(self.global_step, "run complete")))
        elif self.config.lockstep and not missing and len(self._rounds) == (self._collecting is not None):
            # what it waits for may have been given up; an Advance must not overtake a fragment, hence `missing`
            effects.append(Send(member.learner_id, Advance(self.global_step)))
        return effects + self._proceed(now_s)

    def on_report(self, message: StepReport, now_s: float) -> list[Effect]:
        """A learner finished an inner step."""
        member = self.membership.get(message.learner_id, message.incarnation)
        if member is None:
            return [Drop(message.learner_id, "report before hello, or of an old incarnation")]
        member.heard_s = now_s
        if len(message.adopted) != len(self.versions):
            return [Drop(message.learner_id, f"{len(message.adopted)} fragments reported, {len(self.versions)} exist")]
        if not (0 <= message.step_s < inf and message.local_step >= 1 and message.tokens >= 0):
            return [Drop(message.learner_id, f"step {message.local_step} that took {message.step_s} s is impossible")]
        if message.local_step > member.local_step:  # else a duplicate, or overtaken by a newer one: a sign of life
            member.record(message, self.config.ema_decay)
        if self.finished:
            return [Send(member.learner_id, Stop(self.global_step, "run complete"))]
        effects: list[Effect] = []
        if member.state != ACTIVE:
            self._activate(member, effects, now_s)
        if self._count(member):
            return effects + self._proceed(now_s)
        if self._collecting is not None and self._collecting.fragment_id >= 0:
            self._repair(member, self._collecting.fragment_id, effects)
        return effects

    def on_value(self, message: FragmentValue, now_s: float) -> list[Effect]:
        """The answer to a pull. Without a Drop for the sender the driver keeps the payload until Merge or Discard."""
        learner_id = message.learner_id
        member = self.membership.get(learner_id, message.incarnation)
        if member is None:
            return [Drop(learner_id, "value before hello, or of an old incarnation")]
        member.heard_s = now_s
        this = self._rounds.get(message.global_step)
        if this is None or this.phase != PULLING or learner_id not in this.asked:
            return [Drop(learner_id, f"value for round {message.global_step} came late or was not asked for")]
        if message.fragment_id != this.fragment_id:
            return [Drop(learner_id, f"value of fragment {message.fragment_id} where {this.fragment_id} was asked for")]
        del this.asked[learner_id]
        if message.steps < 1 or message.tokens < 1:
            return [Drop(learner_id, "value without a step since the last adoption"), *self._settle(this, now_s)]
        if message.base_version not in self._history[this.fragment_id]:
            reason = f"value against version {message.base_version}, kept are {self._history[this.fragment_id]}"
            return [Drop(learner_id, reason), self._global(member, this.fragment_id), *self._settle(this, now_s)]
        member.merged_base[this.fragment_id] = message.base_version
        this.values[learner_id] = Part(
            learner_id, message.local_step, message.steps, message.tokens, message.base_version
        )
        return self._settle(this, now_s)

    def on_heartbeat(self, message: Heartbeat, now_s: float) -> list[Effect]:
        """A sign of life between steps."""
        member = self.membership.get(message.learner_id, message.incarnation)
        if member is None:
            return [Drop(message.learner_id, "heartbeat before hello, or of an old incarnation")]
        member.heard_s = now_s
        effects: list[Effect] = []
        if member.state == SILENT:
            self._activate(member, effects, now_s)
            if self._count(member):
                effects += self._proceed(now_s)
        return effects

    def on_disconnect(self, learner_id: str, incarnation: int, reason: str, now_s: float) -> list[Effect]:
        """The link to a learner broke, or it said goodbye."""
        member = self.membership.get(learner_id, incarnation)
        if member is None:
            return []
        return self._lose(member, GONE, reason, now_s) + self._proceed(now_s)

    def on_merged(self, global_step: int, now_s: float) -> list[Effect]:
        """The driver finished a Merge: the fragment has a new version, which everybody gets."""
        this = self._rounds.pop(global_step)
        assert this.phase == MERGING, f"round {global_step} merged in phase {this.phase}"
        fragment_id = this.fragment_id
        self.versions[fragment_id] = global_step
        history = self._history[fragment_id]
        history.append(global_step)
        del history[: -self.config.anchor_history]
        self.merged_rounds += 1
        self.merged_parts += len(this.values)
        self._pace = self._pace.after_sync(now_s - this.closed_s, self.membership.median_step_s(), self.config)
        for learner_id in this.values:
            self.membership.members[learner_id].rounds += 1
        effects: list[Effect] = [self._note("merged", fragment_id, tuple(sorted(this.values)), "", global_step)]
        effects += [self._global(member, fragment_id) for member in self.membership.connected()]
        return effects + self._proceed(now_s)

    # ---- time -----------------------------------------------------------------------------------------------------

    def next_deadline_s(self) -> float | None:
        """When on_tick must be called next, or None."""
        deadline_s = self._lease_check_s if self.membership.live else inf
        for this in self._rounds.values():
            if this.phase == PULLING:
                deadline_s = min(deadline_s, this.resend_s, this.expires_s)
            elif this.phase == COLLECTING and this.closes_s is not None and this.closes_s < deadline_s:
                deadline_s = this.closes_s
        return deadline_s if deadline_s < inf else None

    def on_tick(self, now_s: float) -> list[Effect]:
        """Time passed: leases, grace windows, unanswered pulls."""
        effects: list[Effect] = []
        if now_s >= self._lease_check_s:
            self._lease_check_s = now_s + self.config.lease_s / 4
            for member in self.membership.expired(self.config.lease_s, now_s):
                effects += self._lose(member, SILENT, f"not heard for {self.config.lease_s} s", now_s)
        for this in [r for r in self._rounds.values() if r.phase == PULLING]:
            if now_s >= this.expires_s:
                for learner_id in sorted(this.asked):
                    effects.append(Drop(learner_id, f"no value within {self.config.pull_timeout_s} s"))
                this.asked.clear()
                effects += self._settle(this, now_s)
            elif now_s >= this.resend_s:
                this.resend_wait_s *= 2
                this.resend_s = now_s + this.resend_wait_s
                for learner_id, local_step in sorted(this.asked.items()):
                    effects.append(Send(learner_id, PullRequest(this.global_step, this.fragment_id, local_step)))
        return effects + self._proceed(now_s)

    # ---- rounds ---------------------------------------------------------------------------------------------------

    def _proceed(self, now_s: float) -> list[Effect]:
        """Open, and close, what can be opened and closed now."""
        effects: list[Effect] = []
        while not self.finished:
            if self._collecting is None and not self._open(effects, now_s):
                break
            self._watch_quorum(now_s)
            decision = self.decide(now_s)
            if decision.state != "closed":
                break
            self._close(decision, effects, now_s)
        return effects

    def _open(self, effects: list[Effect], now_s: float) -> bool:
        """Open the next round, if its fragment and a place in flight are free; finish when there is none left."""
        step = self._schedule.next_due(self.global_step) if self.config.lockstep else self.global_step + 1
        if step > self.total_steps:
            if not self._rounds:
                self.finished = True
                stop = Stop(self.global_step, "run complete")
                effects += [Send(member.learner_id, stop) for member in self.membership.connected()]
                effects += [self._note("finished", -1, (), "run complete"), Finish("run complete")]
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

    def _count(self, member: Member) -> bool:
        """Count a live member towards the collecting round, if its newest report is fresh; whether that is news."""
        this = self._collecting
        if this is None or member.state != ACTIVE or member.learner_id in self._fresh:
            return False
        if not member.is_fresh(this.global_step, this.fragment_id, self.config.lockstep):
            return False
        self._fresh.add(member.learner_id)
        return True

    def _watch_quorum(self, now_s: float) -> None:
        """Start the grace window when the quorum is met, and forget it when somebody leaves."""
        this = self._collecting
        assert this is not None
        if len(self._fresh) < self.config.quorum:
            this.closes_s = None
        elif this.closes_s is None:
            step_s = self.membership.median_step_s()
            self._pace = self._pace.after_quorum(now_s - this.opened_s, step_s, self.config)
            this.closes_s = now_s + self.grace_s()

    def decide(self, now_s: float) -> Closing:
        """Whether the collecting round closes now, and why."""
        closes_s = self._collecting.closes_s if self._collecting is not None else None
        return closing(len(self._fresh), self.membership.live, self.config.quorum, closes_s, now_s)

    def grace_s(self) -> float:
        """The grace window that a quorum met now would get, in seconds."""
        return grace_window_s(self.config, self.membership.median_step_s(), self._pace.quorum_s, self._pace.sync_s)

    def _close(self, decision: Closing, effects: list[Effect], now_s: float) -> None:
        this, self._collecting = self._collecting, None
        assert this is not None
        members = sorted(self._fresh)
        self.global_step = this.global_step
        for learner_id in members:
            member = self.membership.members[learner_id]
            member.used_step = member.local_step
        effects.append(self._note("closed", this.fragment_id, tuple(members), decision.reason))
        if this.fragment_id < 0:
            del self._rounds[this.global_step]
            self._advance(effects)
            return
        this.phase = PULLING
        this.closed_s = now_s
        this.resend_wait_s = max(self.config.resend_s, 2.0 * (self._pace.sync_s or 0.0))
        this.resend_s = now_s + this.resend_wait_s
        this.expires_s = now_s + self.config.pull_timeout_s
        for learner_id in members:
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
        sent = member.sent.get(fragment_id)
        if sent is not None and member.local_step > sent.local_step + sent.wait_steps:
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

    def _activate(self, member: Member, effects: list[Effect], now_s: float) -> None:
        """A report that holds every fragment makes a member count as live."""
        if not member.adopted or any(a.version == NO_VERSION for a in member.adopted):
            return
        if member.state == SILENT:
            effects.append(self._note("back", -1, (member.learner_id,), "heard again"))
        self.membership.set_state(member, ACTIVE, now_s)

    def _lose(self, member: Member, state: str, reason: str, now_s: float) -> list[Effect]:
        """Take a member out of everything that waits for it."""
        kind = "silent" if state == SILENT else "left"
        self.membership.set_state(member, state, now_s)
        effects: list[Effect] = [self._note(kind, -1, (member.learner_id,), reason)]
        self._fresh.discard(member.learner_id)
        for this in list(self._rounds.values()):
            if this.asked.pop(member.learner_id, None) is not None:
                effects += self._settle(this, now_s)
        return effects

    def _global(self, member: Member, fragment_id: int, wait_steps: int = 0) -> Send:
        member.sent[fragment_id] = Sent(member.local_step, wait_steps or self.config.overlap_steps + 1)
        version, size = self.versions[fragment_id], self.payload_bytes.get(fragment_id, 0)
        return Send(member.learner_id, GlobalFragment(self.global_step, fragment_id, version, size))

    def _note(
        self, kind: str, fragment_id: int, members: tuple[str, ...], reason: str, global_step: int | None = None
    ) -> Note:
        return Note(kind, self.global_step if global_step is None else global_step, fragment_id, members, reason)

    def waiting_for(self, now_s: float) -> str:
        """In words, what the next round waits for."""
        if self.finished:
            return "nothing: the run is complete"
        if self._collecting is None:
            oldest = min(self._rounds.values(), key=lambda r: r.global_step, default=None)
            return oldest.waits_for if oldest is not None else "the first learner"
        connected = self.membership.connected()
        late = [m.learner_id for m in connected if m.state == ACTIVE and m.learner_id not in self._fresh]
        joining = [m.learner_id for m in connected if m.state == JOINING]
        words = [f"round {self._collecting.global_step}: {self.decide(now_s).reason}"]
        words += [f"not yet: {', '.join(late)}"] if late else []
        words += [f"joining: {', '.join(joining)}"] if joining else []
        return "; ".join(words)
