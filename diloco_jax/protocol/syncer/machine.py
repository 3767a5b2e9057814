"""The syncer's half of the protocol (paper, Alg. 2): who takes part, what they report, what they get.

Rules of this file
  * Inputs are `on_<event>` methods; each returns the effects that the driver executes in order. Nothing is buffered.
  * The machine never sees an array. The driver holds the payload of every value that was not dropped, until the
    Merge or Discard of its round.
  * `next_deadline_s` names only what time alone can resolve. Disconnects and the end of a merge are inputs.
  * A fault of a peer is data (Drop, Refuse, Expel); a fault of the driver raises.
  * `state()` is everything: a machine that restored it does the same from then on, bit for bit.

Rounds are in collector.py, leases of data in leases.py, passing on states in recovery.py, coming back in snapshot.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import assert_never

from diloco_jax.protocol.effects import Drop, Effect, Send
from diloco_jax.protocol.membership import ACTIVE, GONE, JOINING, SILENT, Member
from diloco_jax.protocol.messages import (
    Advance,
    AnchorValue,
    FragmentValue,
    Heartbeat,
    Hello,
    LearnerMessage,
    Lease,
    Leave,
    PullRequest,
    Refuse,
    StateDone,
    StatePart,
    StateRefused,
    StateRequest,
    StepReport,
    Stop,
    Welcome,
)
from diloco_jax.protocol.syncer.rounds import COLLECTING, PULLING
from diloco_jax.protocol.syncer.snapshot import Restartable


class Syncer(Restartable):
    """State machine of the syncer. See the rules above and docs/protocol.md."""

    # ---- inputs ---------------------------------------------------------------------------------------------------

    def on_begin(self, digests: Sequence[int], now_s: float) -> list[Effect]:
        """The first input of a run: the digests of the initial fragments."""
        del now_s
        assert len(digests) == len(self.digests), f"{len(digests)} initial fragments, not {len(self.digests)}"
        self.digests = list(digests)
        return []

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
            return self.on_leave(message, now_s)
        if isinstance(message, AnchorValue):
            return self.on_anchor(message, now_s)
        if isinstance(message, StateRequest | StatePart | StateRefused | StateDone):
            return self.on_state_message(message, now_s)
        assert_never(message)

    def on_hello(self, message: Hello, now_s: float) -> list[Effect]:
        """A learner joins, comes back, or repeats its greeting because something was lost."""
        refusal = self.membership.refusal(message, self.epoch, self.rewound)
        if refusal:
            return [Send(message.learner_id, Refuse(refusal)), Drop(message.learner_id, refusal)]
        effects: list[Effect] = []
        known = self.membership.members.get(message.learner_id)
        if known is not None and message.incarnation > known.incarnation:
            if known.state != GONE:
                effects += self._lose(known, GONE, "replaced by a newer incarnation", now_s)
            self._release(known, effects)
            self._disown(known)
            self.leases.forget(known.learner_id)
        entered = known is None or known.state == GONE
        member = self.membership.join(message, now_s)
        if entered:
            effects.append(self._note("joined", -1, (member.learner_id,), f"incarnation {member.incarnation}"))
        elif member.state == SILENT:
            self._heard(member, effects, now_s)
            self._count(member)
        effects.append(Send(member.learner_id, Welcome(self.global_step, tuple(self.versions), self.epoch)))
        self._supply(member, message, effects)
        missing = self._missing(message)
        effects += [self._global(member, fragment_id) for fragment_id in missing]
        if self._restoring is not None:
            self._restoring.on_back(member.learner_id, now_s + self.config.restore_s)
            self._ask_anchors(effects, now_s)
            self._restored(effects, now_s)
        elif self.finished:
            effects.append(Send(member.learner_id, Stop(self.global_step, "run complete")))
        elif self._lockstep and not missing and len(self._rounds) == (self._collecting is not None):
            # what it waits for may have been given up; an Advance must not overtake a fragment, hence `missing`
            effects.append(Send(member.learner_id, Advance(self.global_step)))
        return effects + self._proceed(now_s)

    def _missing(self, hello: Hello) -> list[int]:
        """Fragments of which the learner holds another value than the newest, but those that are being restored."""
        wanted = self._restoring.wanted if self._restoring is not None else ()
        held = zip(hello.versions, hello.digests, self.versions, self.digests, strict=True)
        differ = [p for p, (theirs, bits, ours, our_bits) in enumerate(held) if theirs != ours or bits != our_bits]
        return [p for p in differ if p not in wanted]

    def on_report(self, message: StepReport, now_s: float) -> list[Effect]:
        """A learner finished an inner step."""
        member = self.membership.get(message.learner_id, message.incarnation)
        if member is None:
            return [Drop(message.learner_id, "report before hello, or of an old incarnation")]
        if len(message.adopted) != len(self.versions):
            return [Drop(message.learner_id, f"{len(message.adopted)} fragments reported, {len(self.versions)} exist")]
        if not (0 <= message.step_s < inf and message.local_step >= 1 and message.tokens >= 0):
            return [Drop(message.learner_id, f"step {message.local_step} that took {message.step_s} s is impossible")]
        if not 0 <= message.samples <= message.granted:
            reason = f"{message.samples} samples used of {message.granted} that were leased is impossible"
            return [Drop(message.learner_id, reason)]
        if message.local_step > member.local_step:  # else a duplicate, or overtaken by a newer one: a sign of life
            self._confirm(message)
            member.record(message, self.config, now_s)
        if self.finished and self._restoring is None:
            member.heard_s = now_s
            return [Send(member.learner_id, Stop(self.global_step, "run complete"))]
        effects: list[Effect] = []
        self._heard(member, effects, now_s)
        if message.local_step == member.local_step:  # an overtaken one tells of fewer leases than have arrived
            self._supply(member, message, effects)
        if self._count(member):
            return effects + self._proceed(now_s)
        if self._collecting is not None and self._collecting.fragment_id >= 0:
            self._repair(member, self._collecting.fragment_id, effects)
        return effects

    def _confirm(self, report: StepReport) -> None:
        """What a learner holds is safe: note it for the samples that went into it."""
        held = [(p, v) for p, v in self.leases.unconfirmed.items() if report.adopted[p].version == v]
        for fragment_id, version in held:
            self.leases.confirm(fragment_id, version)

    def on_heartbeat(self, message: Heartbeat, now_s: float) -> list[Effect]:
        """A sign of life between steps."""
        member = self.membership.get(message.learner_id, message.incarnation)
        if member is None:
            return [Drop(message.learner_id, "heartbeat before hello, or of an old incarnation")]
        effects: list[Effect] = []
        self._heard(member, effects, now_s)
        if effects and self._count(member):
            effects += self._proceed(now_s)
        return effects

    def on_leave(self, message: Leave, now_s: float) -> list[Effect]:
        """A learner says goodbye: its unfinished data is free at once."""
        member = self.membership.get(message.learner_id, message.incarnation)
        if member is None:
            return []
        effects = self._lose(member, GONE, message.reason, now_s)
        if not self.finished:
            self._release(member, effects)
        return effects + self._after_loss(now_s)

    def on_disconnect(self, learner_id: str, incarnation: int, reason: str, now_s: float) -> list[Effect]:
        """The link to a learner broke. It may come back; its data waits for it for a while."""
        member = self.membership.get(learner_id, incarnation)
        if member is None:
            return []
        return self._lose(member, GONE, reason, now_s) + self._after_loss(now_s)

    def _after_loss(self, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        self._ask_anchors(effects, now_s)
        self._restored(effects, now_s)
        return effects + self._proceed(now_s)

    def on_drain(self, learner_id: str, now_s: float) -> list[Effect]:
        """Somebody wants this learner to leave, politely.

        Raises:
            ValueError: no learner of that name is connected; the message names those that are.
        """
        del now_s
        connected = [member.learner_id for member in self.membership.connected()]
        if learner_id not in connected:
            names = ", ".join(connected[:16]) or "nobody"
            raise ValueError(f"no learner {learner_id[:80]!r} is connected; there are {names}")
        return [Send(learner_id, Stop(self.global_step, "drained"))]

    def on_state_message(
        self, message: StateRequest | StatePart | StateRefused | StateDone, now_s: float
    ) -> list[Effect]:
        """One learner's state on its way to another (recovery.py)."""
        member = self.membership.get(message.learner_id, message.incarnation)
        if member is None:
            return [Drop(message.learner_id, "a state's message before hello, or of an old incarnation")]
        effects: list[Effect] = []
        self._heard(member, effects, now_s)
        if isinstance(message, StateRequest):
            awaited = self._restoring.awaited if self._restoring is not None else ()
            return effects + self._matches.on_request(message, self.global_step, awaited)
        if isinstance(message, StatePart):
            return effects + self._matches.on_part(message)
        if isinstance(message, StateRefused):
            return effects + self._matches.on_refused(message)
        if message.donor:
            effects.append(self._note("recovered", -1, (message.learner_id, message.donor), "has its state"))
        return effects + self._matches.on_done(message.learner_id)

    # ---- time -----------------------------------------------------------------------------------------------------

    def next_deadline_s(self) -> float | None:
        """When on_tick must be called next, or None."""
        deadline_s = self._lease_check_s if self.membership.members else inf
        if self._restoring is not None:
            deadline_s = min(deadline_s, self._restoring.next_deadline_s())
        for this in self._rounds.values():
            if this.phase == PULLING:
                if this.resend_s < deadline_s:
                    deadline_s = this.resend_s
                if this.expires_s < deadline_s:
                    deadline_s = this.expires_s
            elif this.phase == COLLECTING and this.closes_s is not None and this.closes_s < deadline_s:
                deadline_s = this.closes_s
        return deadline_s if deadline_s < inf else None

    def on_tick(self, now_s: float) -> list[Effect]:
        """Time passed: leases, grace windows, unanswered pulls."""
        effects: list[Effect] = []
        if now_s >= self._lease_check_s:
            self._lease_check_s = now_s + self.config.lease_s / 4
            self._check_silence(effects, now_s)
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
        if self._restoring is not None:
            self._restoring.repeat(self.membership.members, now_s)
            self._ask_anchors(effects, now_s)
        self._restored(effects, now_s)
        return effects + self._proceed(now_s)

    def _check_silence(self, effects: list[Effect], now_s: float) -> None:
        for member in self.membership.expired(self.config.lease_s, now_s):
            effects += self._lose(member, SILENT, f"not heard for {self.config.lease_s} s", now_s)
        if not self.finished:
            for name in sorted(self.leases.holdings):
                member = self.membership.members[name]
                if member.state in (GONE, SILENT) and now_s - member.since_s >= self.config.release_s:
                    self._release(member, effects)

    # ---- members --------------------------------------------------------------------------------------------------

    def _heard(self, member: Member, effects: list[Effect], now_s: float) -> None:
        """A sign of life. A member counts as live once its report holds every fragment."""
        member.heard_s = now_s
        if member.state == ACTIVE:
            return
        if member.state == SILENT:
            effects.append(self._note("back", -1, (member.learner_id,), "heard again"))
            self.membership.set_state(member, JOINING, now_s)
            if self._restoring is not None:
                self._restoring.on_back(member.learner_id, now_s + self.config.restore_s)
                self._ask_anchors(effects, now_s)
        if member.holds_all:
            member.merged_mark = self.merged_rounds
            self.membership.set_state(member, ACTIVE, now_s)
            effects += self._matches.on_done(member.learner_id)  # in case that its own word for it was lost

    def _supply(self, member: Member, message: Hello | StepReport, effects: list[Effect]) -> None:
        """Keep a learner in data: lease what it uses up, repeat what it lost."""
        name, ahead = member.learner_id, self.config.lease_ahead_steps * member.step_samples
        holding = self.leases.holdings.get(name)
        if holding is not None and message.granted > holding.granted:
            self._release(member, effects)  # leased to it in a time that nobody remembers
            self.leases.forget(name)
            holding = None
        if holding is None:  # new, or away for so long that its data went to others
            holding = self.leases.open(name, message.granted)
        leases: list[Lease] = []
        greets = isinstance(message, Hello)
        if message.granted < holding.granted and (greets or member.local_step > member.lease_step + 1):
            leases = holding.after(message.granted)
        # a greeting does not tell what is used up: of what is settled it is sure, and the next report will tell
        used = holding.settled if isinstance(message, Hello) else max(message.samples, holding.settled)
        unused = holding.granted - used
        if 2 * unused <= ahead and not self.finished:
            steps = -(-(ahead - unused) // member.step_samples)
            leases = leases + self.leases.grant(name, steps * member.step_samples)
        if leases:
            member.lease_step = member.local_step
            effects += [Send(name, lease) for lease in leases]

    def donor_of(self, learner_id: str) -> str:
        """Who gives its state to this learner now, or an empty string."""
        return self._matches.donor_of(learner_id)

    # ---- looking ---------------------------------------------------------------------------------------------------

    def waiting_for(self, now_s: float) -> str:
        """In words, what the next round waits for."""
        if self.finished:
            return "nothing: the run is complete"
        if self._restoring is not None:
            names = ", ".join(sorted(self._restoring.awaited)) or "versions on their way"
            return f"learners to bring what the syncer lost: {names}"
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
