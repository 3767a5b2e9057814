"""The syncer's half of the protocol (paper, Alg. 2): who takes part, what they report, what they get.

Rules of this file
  * Inputs are `on_<event>` methods; each returns the effects that the driver executes in order. Nothing is buffered.
  * The machine never sees an array. The driver holds the payload of every value that was not dropped, until the
    Merge or Discard of its round.
  * `next_deadline_s` names only what time alone can resolve. Disconnects and the end of a merge are inputs.
  * A fault of a peer is data (Drop, Refuse, Expel); a fault of the driver raises.
  * `state()` is everything: a machine that restored it does the same from then on, bit for bit.

Its parts own what there is to know: how far the run is (progress.py), who takes part (membership.py, roster.py), the
newest versions (downstream.py), the rounds in flight (book.py), leases of data (leases.py), who gives a state to whom
(recovery.py), who evaluates the global model (evaluations.py), and what a restarted syncer lacks (comeback.py).
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from types import MappingProxyType
from typing import Any, get_args

from diloco_jax.protocol import bounds, messages
from diloco_jax.protocol.effects import Drop, Effect, Send
from diloco_jax.protocol.leases import LeaseBook
from diloco_jax.protocol.member import GONE, SILENT, Member
from diloco_jax.protocol.membership import Membership
from diloco_jax.protocol.messages import Advance, FragmentValue, Hello, LearnerMessage, StateMessage, StepReport
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.recovery import Matchmaker
from diloco_jax.protocol.syncer.book import RoundBook
from diloco_jax.protocol.syncer.comeback import Comeback
from diloco_jax.protocol.syncer.downstream import Downstream
from diloco_jax.protocol.syncer.evaluations import NEVER, EvaluationPlan, Evaluations
from diloco_jax.protocol.syncer.progress import GLOBAL_STEPS, NO_BUDGET, Budget, Limits, Progress
from diloco_jax.protocol.syncer.roster import Roster
from diloco_jax.protocol.syncer.rounds import COLLECTING, PULLING


class Syncer:
    """State machine of the syncer. See the rules above and docs/protocol.md.

    Args:
        total_steps: global steps after which the run is complete at the latest.
        fingerprint: what both sides must agree on.
        payload_bytes: fragment -> size of its encoded global value.
        step_bytes: likewise of a step to its newest version; absent: steps are not used.
        budget: merged tokens after which the run is complete (progress.py).
        plan: when the global model is evaluated (evaluations.py).
    """

    def __init__(
        self,
        config: ProtocolConfig,
        total_steps: int,
        fingerprint: tuple[tuple[str, str], ...] = (),
        payload_bytes: Mapping[int, int] = MappingProxyType({}),
        step_bytes: Mapping[int, int] = MappingProxyType({}),
        budget: Budget = NO_BUDGET,
        plan: EvaluationPlan = NEVER,
    ) -> None:
        self.config = config
        self.progress = progress = Progress(
            total_steps, budget, config.tokens_per_step_factor_max, config.groups.gap_max + config.overlap_steps
        )
        self.membership = members = Membership(fingerprint, config.num_fragments, config.learners_max)
        self.leases = leases = LeaseBook(config.num_fragments)
        self.downstream = down = Downstream(config, progress, payload_bytes, step_bytes)
        self.evaluations = Evaluations(plan, config, progress, members, down)
        self.rounds = RoundBook(config, progress, members, down, leases, self.evaluations, config.schedule)
        self.comeback = Comeback(config, progress, members, down, self.rounds, leases)
        self.matches = matches = Matchmaker(members)
        self.roster = Roster(config, progress, members, leases, matches, self.rounds, self.comeback)
        self._inputs: dict[type, Callable[..., list[Effect]]] = {
            StepReport: self.on_report,
            FragmentValue: self.on_value,
            messages.Heartbeat: self.on_heartbeat,
            messages.Leave: self.on_leave,
            messages.AnchorValue: self.on_anchor,
            messages.Score: self.on_score,
            **dict.fromkeys(get_args(StateMessage), self.on_state_message),
        }

    def on_begin(self, digests: Sequence[int], now_s: float) -> list[Effect]:
        """The first input of a run: the digests of the initial fragments."""
        assert len(digests) == len(self.versions), f"{len(digests)} initial fragments, not {len(self.versions)}"
        self.downstream.digests = list(digests)
        return []

    def on_message(self, message: LearnerMessage, now_s: float) -> list[Effect]:
        """Any message of a learner. The driver vouches that the sender is who the message says."""
        if wrong := bounds.objection(message):
            answer = bounds.without_value(message)
            return _refused(message, wrong) if answer is None else self.on_message(answer, now_s)
        if isinstance(message, Hello):
            return self.on_hello(message, now_s)
        member = self.membership.get(message.learner_id, message.incarnation)
        if member is None:
            return [Drop(message.learner_id, f"{type(message).__name__} before hello, or of an old incarnation")]
        return self._inputs[type(message)](member, message, now_s)

    def on_hello(self, message: Hello, now_s: float) -> list[Effect]:
        """A learner joins, comes back, or repeats its greeting because something was lost."""
        progress = self.progress
        refusal = self.membership.refusal(message, progress.epoch, progress.rewound)
        if refusal:
            return _refused(message, refusal)
        effects: list[Effect] = []
        known = self.membership.members.get(message.learner_id)
        if known is not None and message.incarnation > known.incarnation:
            self.roster.replace(known, effects, now_s)
        entered = known is None or known.state == GONE
        member = self.membership.join(message, now_s)
        if entered:
            effects.append(progress.note("joined", -1, (member.learner_id,), f"incarnation {member.incarnation}"))
        elif member.state == SILENT:
            self.roster.heard(member, effects, now_s)
            self.rounds.count(member)
        welcome = messages.Welcome(progress.global_step, tuple(self.versions), progress.epoch, progress.schedule_lead)
        effects.append(Send(member.learner_id, welcome))
        self.roster.supply(member, message, effects)
        restoring = self.comeback.restoring
        wanted = restoring.wanted if restoring is not None else ()  # of these nobody knows yet which is the newest
        missing = [p for p in self.downstream.missing(message) if p not in wanted]
        effects += [self.downstream.send(member, fragment_id) for fragment_id in missing]
        if restoring is not None:
            self.comeback.on_back(member.learner_id, effects, now_s)
            self.comeback.finish(effects, now_s)
        elif progress.finished:
            effects += self.evaluations.on_hello(member, now_s)
        elif self.config.lockstep and not missing and not self.rounds.any_closed:
            # its round may have been abandoned; an Advance must not overtake a fragment, hence `missing`
            effects.append(Send(member.learner_id, Advance(progress.global_step, progress.schedule_lead)))
        return effects + self.rounds.proceed(now_s)

    def on_report(self, member: Member, message: StepReport, now_s: float) -> list[Effect]:
        """A learner finished an inner step."""
        name, local_step = message.learner_id, message.local_step
        if len(message.adopted) != len(self.downstream.versions):
            return [Drop(name, f"{len(message.adopted)} fragments reported, {len(self.versions)} exist")]
        if local_step < 1:
            return [Drop(name, "a report of step 0 is impossible: there is none before the first step")]
        if not 0 <= message.samples <= message.granted:
            return [Drop(name, f"{message.samples} samples used of {message.granted} that were leased is impossible")]
        if local_step > member.local_step:  # else a duplicate, or overtaken by a newer one: a sign of life
            if self.leases.unconfirmed:
                self.leases.on_held(message.adopted)
            steps, news = local_step - member.local_step, message.tokens - member.tokens
            tokens = member.tokens + self.progress.plausible(news, steps, member, self.membership)
            member.record(message, tokens, self.config, now_s)
        if self.progress.finished and self.comeback.restoring is None:
            member.heard_s = now_s
            return self.evaluations.stop(name)
        effects: list[Effect] = []
        self.roster.heard(member, effects, now_s)
        if local_step == member.local_step:  # an overtaken one tells of fewer leases than have arrived
            self.roster.supply(member, message, effects)
        if self.rounds.count(member):
            return effects + self.rounds.proceed(now_s)
        collecting = self.rounds.collecting
        if collecting is not None and collecting.fragment_id >= 0:
            self.downstream.repair(member, collecting.fragment_id, effects)
        return effects

    def on_value(self, member: Member, message: FragmentValue, now_s: float) -> list[Effect]:
        """The answer to a pull. Without a Drop for the sender the driver keeps the payload until Merge or Discard."""
        member.heard_s = now_s
        return self.rounds.on_value(member, message, now_s)

    def on_heartbeat(self, member: Member, message: messages.Heartbeat, now_s: float) -> list[Effect]:
        """A sign of life between steps."""
        effects: list[Effect] = []
        self.roster.heard(member, effects, now_s)
        if self.progress.finished and self.comeback.restoring is None:
            return effects + self.evaluations.stop(member.learner_id)
        if effects and self.rounds.count(member):
            effects += self.rounds.proceed(now_s)
        return effects

    def on_score(self, member: Member, message: messages.Score, now_s: float) -> list[Effect]:
        """A learner has evaluated the global model, or could not."""
        member.heard_s = now_s
        return self.evaluations.on_score(message, now_s)

    def on_anchor(self, member: Member, message: messages.AnchorValue, now_s: float) -> list[Effect]:
        """A learner sends a global value that a restarted syncer lacks."""
        member.heard_s = now_s
        return self.comeback.on_anchor(member, message, now_s)

    def on_state_message(self, member: Member, message: StateMessage, now_s: float) -> list[Effect]:
        """One learner's state on its way to another (recovery.py)."""
        effects: list[Effect] = []
        self.roster.heard(member, effects, now_s)
        if isinstance(message, messages.StateRequest):
            restoring = self.comeback.restoring
            awaited = restoring.awaited if restoring is not None else ()
            return effects + self.matches.on_request(message, self.progress.global_step, awaited)
        if isinstance(message, messages.StatePart):
            return effects + self.matches.on_part(message)
        if isinstance(message, messages.StateRefused):
            return effects + self.matches.on_refused(message)
        if message.donor:
            effects.append(self.progress.note("recovered", -1, (message.learner_id, message.donor), "has its state"))
        return effects + self.matches.on_done(message.learner_id)

    def on_leave(self, member: Member, message: messages.Leave, now_s: float) -> list[Effect]:
        """A learner says goodbye: its unfinished data is free at once."""
        effects = self.roster.lose(member, GONE, message.reason, now_s)
        member.goodbye = message.reason
        if not self.progress.finished:
            self.roster.release(member, effects)
        self.comeback.proceed(effects, now_s)
        return effects + self.rounds.proceed(now_s)

    def on_disconnect(self, learner_id: str, incarnation: int, reason: str, now_s: float) -> list[Effect]:
        """The link to a learner broke. It may come back; its data waits for it for a while."""
        member = self.membership.get(learner_id, incarnation)
        if member is None:
            return []
        effects = self.roster.lose(member, GONE, reason, now_s)
        self.comeback.proceed(effects, now_s)
        return effects + self.rounds.proceed(now_s)

    def on_merged(self, global_step: int, digest: int, left_out: Sequence[str], now_s: float) -> list[Effect]:
        """The driver finished a Merge: the fragment has a new version, which everybody gets.

        Args:
            digest: of the new value.
            left_out: learners whose value could not be used. If that was everybody, there is no new value.
        """
        this = self.rounds.end_merge(global_step)
        effects: list[Effect] = []
        parts = [part for _, part in sorted(this.values.items()) if part.learner_id not in left_out]
        for learner_id in sorted(set(left_out) - this.former):
            member = self.membership.members[learner_id]
            if not parts:  # nothing comes that ends its steps; else they count again once it holds the new version:
                member.credit.merged_base.pop(this.fragment_id, None)  # one bad value, one strike
            self.roster.strike(member, this, effects, now_s)
        if parts:
            self.rounds.renew(this, parts, digest, effects, now_s)
            self.roster.watch_shares(effects)
        else:
            self.rounds.abandon(this, effects)
        effects += self.rounds.proceed(now_s)
        self.evaluations.on_merged(effects, now_s)
        return effects

    def on_drain(self, learner_id: str, now_s: float) -> list[Effect]:
        """Somebody wants this learner to leave, politely.

        Raises:
            ValueError: no learner of that name is connected; the message names those that are.
        """
        names = [member.learner_id for member in self.membership.connected()]
        if learner_id not in names:
            there = ", ".join(names[:16]) or "nobody"
            raise ValueError(f"no learner {learner_id[:80]!r} is connected; there are {there}")
        return [Send(learner_id, messages.Stop(self.global_step, messages.DRAINED))]

    def on_restart(self, held: Sequence[int], digests: Sequence[int], now_s: float) -> list[Effect]:
        """The process died and is back: links and values on their way are gone (comeback.py).

        Args:
            held: version of each fragment of which the driver has the value.
        """
        self.matches.clear()
        self.roster.check_s = now_s
        self.evaluations.restart(now_s)
        return self.comeback.restart(held, digests, now_s)

    def on_limits(self, limits: Limits) -> list[Effect]:
        """Set other limits of a run that is not training; a rewind must follow."""
        self.progress.limit(limits)
        self.membership.expect(GLOBAL_STEPS, limits.told)
        return []

    def on_rewind(self, epoch: int, now_s: float) -> list[Effect]:
        """The whole run goes on from the snapshot that was just restored; what came after it is void.

        Args:
            epoch: this life of the syncer, above every earlier one.
        """
        if self.progress.finished and self.rounds.may_open():
            # The run was complete, and its limits have been raised since.
            self.progress.finished = False
        self.matches.clear()
        self.roster.check_s = now_s
        self.evaluations.restart(now_s)
        return self.comeback.rewind(epoch, now_s)

    def next_deadline_s(self) -> float | None:
        """Return the time at which on_tick must be called next, or None."""
        deadline_s = self.roster.check_s if self.membership.members else inf
        if self.comeback.restoring is not None:
            deadline_s = min(deadline_s, self.comeback.restoring.next_deadline_s())
        elif self.evaluations.open:
            deadline_s = min(deadline_s, self.evaluations.next_deadline_s())
        for this in self.rounds.flying.values():
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
        if now_s >= self.roster.check_s:
            self.roster.check_s = now_s + self.config.lease_s / 4
            self.roster.check_silence(effects, now_s)
        effects += self.rounds.on_tick(now_s)
        self.comeback.on_tick(effects, now_s)
        if self.evaluations.open and self.comeback.restoring is None:
            self.evaluations.on_tick(effects, now_s)
        return effects + self.rounds.proceed(now_s)

    def waiting_for(self, now_s: float) -> str:
        """In words, what the next round waits for."""
        restoring = self.comeback.restoring
        if self.progress.finished:
            who = self.evaluations.asked or "a learner to come back"
            final = f"the evaluation of the final model, by {who}"
            return final if self.evaluations.open else "nothing: the run is complete"
        if restoring is not None:
            names = ", ".join(sorted(restoring.awaited)) or "versions on their way"
            return f"learners to bring what the syncer lost: {names}"
        return self.rounds.waiting_for(now_s)

    @property
    def epoch(self) -> int:
        """The present life of the syncer."""
        return self.progress.epoch

    @property
    def global_step(self) -> int:
        """Closed rounds."""
        return self.progress.global_step

    @property
    def finished(self) -> bool:
        """True once the run is complete."""
        return self.progress.finished

    @property
    def over(self) -> bool:
        """True once the run is complete, and nobody is expected to say anything more."""
        return self.finished and not (self.restoring or self.evaluations.open)

    @property
    def merged_rounds(self) -> int:
        """Rounds that made a version."""
        return self.progress.merged_rounds

    @property
    def versions(self) -> list[int]:
        """Newest version of each fragment."""
        return self.downstream.versions

    @property
    def digests(self) -> list[int]:
        """Digests of the newest versions."""
        return self.downstream.digests

    @property
    def restoring(self) -> bool:
        """True while learners may bring newer values than the driver holds."""
        return self.comeback.restoring is not None

    def state(self) -> dict[str, Any]:
        """Everything, as plain values that JSON keeps exactly."""
        return {
            **self.progress.state(),
            **self.downstream.state(),
            **self.membership.state(),
            "leases": self.leases.state(),
            "matches": self.matches.state(),
            **self.rounds.state(),
            "evaluations": self.evaluations.state(),
            "lease_check_s": self.roster.check_s,
            "restoring": self.comeback.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Become the machine that `state()` described; the configuration must be the same."""
        self.progress.restore(state)
        self.downstream.restore(state)
        self.membership.restore(state)
        self.leases.restore(state["leases"])
        self.matches.restore(state["matches"])
        self.rounds.restore(state)
        self.evaluations.restore(state["evaluations"])
        self.roster.check_s = state["lease_check_s"]
        self.comeback.restore(state["restoring"])


def _refused(message: LearnerMessage, reason: str) -> list[Effect]:
    """Drop a message. If it is a greeting, its sender gets the reason."""
    told: list[Effect] = [Send(message.learner_id, messages.Refuse(reason))] if isinstance(message, Hello) else []
    return [*told, Drop(message.learner_id, reason)]
