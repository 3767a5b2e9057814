"""The syncer's half of the protocol (paper, Alg. 2): which learners take part, what they report, what they get.

Rules of this file
  * Inputs are `on_<event>` methods. Each drains the machine's Effects at its end and returns what the driver
    executes, in order. All other methods append to Effects.
  * The machine never sees an array. The driver holds the payload of every value that was not dropped, until the
    Merge or Discard of its round.
  * `next_deadline_s` names only what time alone can resolve. Disconnects and the end of a merge are inputs.
  * A fault of a peer is data (Drop, Refuse, Expel); a fault of the driver raises.
  * `state()` is everything: a machine that restored it takes the same decisions from then on, bit for bit.

Each part of the machine has its own subject: Progress how far the run is, and Downstream the newest versions
(progress.py); Membership and Roster the learners (membership.py, roster.py); RoundBook the rounds in flight (book.py);
LeaseBooks the data (leases.py); Matchmaker the transfers of states between learners (matchmaker.py); Evaluations the
evaluations of the global model (evaluations.py); Comeback what a restarted syncer lacks (comeback.py).
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from types import MappingProxyType
from typing import Any, get_args

from diloco_jax.protocol import bounds, messages
from diloco_jax.protocol.effects import Drop, Effect, Effects, Send
from diloco_jax.protocol.leases import LeaseBooks
from diloco_jax.protocol.member import DISCONNECTED, SILENT, Member
from diloco_jax.protocol.membership import Membership
from diloco_jax.protocol.messages import Advance, FragmentValue, Hello, LearnerMessage, StateMessage, StepReport
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.book import RoundBook
from diloco_jax.protocol.syncer.comeback import Comeback
from diloco_jax.protocol.syncer.evaluations import NEVER, EvaluationPlan, Evaluations
from diloco_jax.protocol.syncer.matchmaker import Matchmaker
from diloco_jax.protocol.syncer.progress import GLOBAL_STEPS, NO_BUDGET, Budget, Downstream, Limits, Progress
from diloco_jax.protocol.syncer.roster import Roster
from diloco_jax.protocol.syncer.round import COLLECTING, PULLING


class Syncer:
    """State machine of the syncer; docs/protocol.md describes the protocol.

    Args:
        total_steps: the run is complete after so many global steps at the latest.
        fingerprint: what both sides must agree on.
        payload_bytes: fragment -> size of its encoded global value.
        delta_bytes: fragment -> size of the delta to its newest version; a fragment that is missing has no deltas.
        budget: the run is complete when so many tokens are merged (progress.py).
        plan: when the global model is evaluated (evaluations.py).
    """

    def __init__(
        self,
        config: ProtocolConfig,
        total_steps: int,
        fingerprint: tuple[tuple[str, str], ...] = (),
        payload_bytes: Mapping[int, int] = MappingProxyType({}),
        delta_bytes: Mapping[int, int] = MappingProxyType({}),
        budget: Budget = NO_BUDGET,
        plan: EvaluationPlan = NEVER,
    ) -> None:
        self.config = config
        self._effects = effects = Effects()
        self.progress = progress = Progress(
            total_steps, budget, config.tokens_per_step_factor_max, config.groups.gap_max + config.overlap_steps
        )
        self.membership = members = Membership(fingerprint, config.num_fragments, config.learners_max)
        self.leases = leases = LeaseBooks(config.num_fragments)
        self.downstream = down = Downstream(effects, config, progress, payload_bytes, delta_bytes)
        self.evaluations = Evaluations(effects, plan, config, progress, members, down)
        self.rounds = rounds = RoundBook(
            effects, config, progress, members, down, leases, self.evaluations, config.turns
        )
        self.comeback = Comeback(effects, config, progress, members, down, rounds, leases)
        self.matches = matches = Matchmaker(effects, members)
        self.roster = Roster(effects, config, progress, members, leases, matches, rounds, self.comeback)
        self._inputs: dict[type, Callable[..., None]] = {
            StepReport: self._on_report,
            FragmentValue: self._on_value,
            messages.Heartbeat: self._on_heartbeat,
            messages.Leave: self._on_leave,
            messages.AnchorValue: self._on_anchor,
            messages.Score: self._on_score,
            **dict.fromkeys(get_args(StateMessage), self._on_state_message),
        }

    def on_begin(self, digests: Sequence[int], now_s: float, run: str = "") -> list[Effect]:
        """Take the first input of a run: the digests of the initial fragments, and the id that the driver drew."""
        assert len(digests) == len(self.versions), f"{len(digests)} initial fragments, not {len(self.versions)}"
        self.downstream.digests, self.membership.run = list(digests), run
        return []

    def on_message(self, message: LearnerMessage, now_s: float) -> list[Effect]:
        """Take any message of a learner. The driver vouches that the sender is the one that the message names."""
        wrong = bounds.objection(message)
        if not wrong:
            self._take(message, now_s)
        elif (empty := bounds.without_value(message)) is not None:
            self._take(empty, now_s)
        else:
            self._refuse(message, wrong)
        return self._effects.drain()

    def _take(self, message: LearnerMessage, now_s: float) -> None:
        if isinstance(message, Hello):
            self._on_hello(message, now_s)
            return
        member = self.membership.get(message.learner_id, message.incarnation)
        if member is None:
            self._drop(message.learner_id, f"{type(message).__name__} before hello, or of an old incarnation")
            return
        self._inputs[type(message)](member, message, now_s)

    def _drop(self, learner_id: str, reason: str) -> None:
        self._effects.append(Drop(learner_id, reason))

    def _refuse(self, message: LearnerMessage, reason: str) -> None:
        """Drop a message; if it is a greeting, send its sender the reason."""
        if isinstance(message, Hello):
            self._effects.append(Send(message.learner_id, messages.Refuse(reason)))
        self._drop(message.learner_id, reason)

    def _on_hello(self, message: Hello, now_s: float) -> None:
        """Let a learner join or return, or answer a greeting that it repeats because something was lost."""
        progress = self.progress
        newest = None if self.restoring else progress.global_step
        refusal = self.membership.refusal(message, progress.epoch, progress.rewound, newest)
        if refusal:
            self._refuse(message, refusal)
            return
        known = self.membership.members.get(message.learner_id)
        if known is not None and message.incarnation > known.incarnation:
            self.roster.replace(known, now_s)
        entered = known is None or known.state == DISCONNECTED
        member = self.membership.join(message, now_s)
        if entered:
            note = progress.note("joined", -1, (member.learner_id,), f"incarnation {member.incarnation}")
            self._effects.append(note)
        elif member.state == SILENT:
            self.roster.heard(member, now_s)
            self.rounds.count(member)
        restoring = self.comeback.restoring
        if progress.finished and restoring is None and not self.evaluations.needs(member):
            # A learner that gets no Welcome neither compiles nor loads anything.
            self.evaluations.stop(member.learner_id)
            return
        now = (progress.global_step, tuple(self.versions), progress.epoch, progress.schedule_lead)
        self._effects.append(Send(member.learner_id, messages.Welcome(*now, self.run)))
        self.roster.supply(member, message)
        # The newest version of a wanted fragment is not known yet.
        wanted = restoring.wanted if restoring is not None else ()
        missing = [p for p in self.downstream.missing(message) if p not in wanted]
        for fragment_id in missing:
            self.downstream.send(member, fragment_id)
        if restoring is not None:
            self.comeback.on_back(member.learner_id, now_s)
            self.comeback.finish(now_s)
        elif progress.finished:
            self.evaluations.on_hello(member, now_s)
        elif self.config.lockstep and not missing and not self.rounds.any_closed:
            # The learner's round may have been abandoned. An Advance must not overtake a fragment, so nothing may be
            # missing.
            self._effects.append(Send(member.learner_id, Advance(progress.global_step, progress.schedule_lead)))
        self.rounds.proceed(now_s)

    def _on_report(self, member: Member, message: StepReport, now_s: float) -> None:
        """Record that a learner finished an inner step, and count it towards the collecting round."""
        name, local_step = message.learner_id, message.local_step
        if len(message.adopted) != len(self.downstream.versions):
            self._drop(name, f"{len(message.adopted)} fragments reported, {len(self.versions)} exist")
            return
        if local_step < 1:
            self._drop(name, "a report of step 0 is impossible: there is none before the first step")
            return
        if not 0 <= message.samples <= message.granted:
            self._drop(name, f"{message.samples} samples used of {message.granted} that were leased is impossible")
            return
        # Any other report is a duplicate, or a newer one overtook it: it is a sign of life.
        if local_step > member.local_step:
            self.leases.on_held(message.adopted)
            steps, news = local_step - member.local_step, message.tokens - member.tokens
            tokens = member.tokens + self.progress.plausible(news, steps, member, self.membership)
            member.record(message, tokens, self.config, now_s)
        if self.progress.finished and self.comeback.restoring is None:
            member.heard_s = now_s
            self.evaluations.stop(name)
            return
        self.roster.heard(member, now_s)
        # An overtaken report names fewer leases than have arrived.
        if local_step == member.local_step:
            self.roster.supply(member, message)
        self.rounds.on_reported(member, now_s)
        if self.rounds.count(member):
            self.rounds.proceed(now_s)
            return
        collecting = self.rounds.collecting
        if collecting is not None and collecting.fragment_id >= 0:
            self.downstream.repair(member, collecting.fragment_id)

    def _on_value(self, member: Member, message: FragmentValue, now_s: float) -> None:
        """Take the answer to a pull. Unless it is dropped, the driver keeps its payload until Merge or Discard."""
        member.heard_s = now_s
        self.rounds.on_value(member, message, now_s)

    def _on_heartbeat(self, member: Member, message: messages.Heartbeat, now_s: float) -> None:
        """Record a sign of life between steps."""
        self.roster.heard(member, now_s)
        if self.progress.finished and self.comeback.restoring is None:
            self.evaluations.stop(member.learner_id)
        # A heartbeat that led to no effect leaves the rounds as they are.
        elif self._effects and self.rounds.count(member):
            self.rounds.proceed(now_s)

    def _on_score(self, member: Member, message: messages.Score, now_s: float) -> None:
        """Take a learner's evaluation of the global model, or its reason for having none."""
        member.heard_s = now_s
        self.evaluations.on_score(message, now_s)

    def _on_anchor(self, member: Member, message: messages.AnchorValue, now_s: float) -> None:
        """Take a global value that a restarted syncer lacks."""
        member.heard_s = now_s
        self.comeback.on_anchor(member, message, now_s)

    def _on_state_message(self, member: Member, message: StateMessage, now_s: float) -> None:
        """Forward one learner's state on its way to another (matchmaker.py)."""
        self.roster.heard(member, now_s)
        match message:
            case messages.StateRequest():
                restoring = self.comeback.restoring
                awaited = restoring.awaited if restoring is not None else ()
                self.matches.on_request(message, self.progress.global_step, awaited)
            case messages.StateChunk():
                self.matches.on_part(message)
            case messages.StateRefused():
                self.matches.on_refused(message)
            case messages.StateDone(learner_id, _, donor):
                if donor:
                    self._effects.append(self.progress.note("recovered", -1, (learner_id, donor), "has its state"))
                self.matches.on_done(learner_id)

    def _on_leave(self, member: Member, message: messages.Leave, now_s: float) -> None:
        """Take a learner's goodbye: its unfinished data is free at once."""
        self.roster.lose(member, DISCONNECTED, message.reason, now_s)
        member.goodbye = message.reason
        if not self.progress.finished:
            self.roster.release(member)
        self.comeback.proceed(now_s)
        self.rounds.proceed(now_s)

    def on_disconnect(self, learner_id: str, incarnation: int, reason: str, now_s: float) -> list[Effect]:
        """Record that the link to a learner broke. The learner may return; its data waits for it for a while."""
        member = self.membership.get(learner_id, incarnation)
        if member is not None:
            self.roster.lose(member, DISCONNECTED, reason, now_s)
            self.comeback.proceed(now_s)
            self.rounds.proceed(now_s)
        return self._effects.drain()

    def on_merged(self, global_step: int, digest: int, excluded: Sequence[str], now_s: float) -> list[Effect]:
        """Broadcast the new version of a fragment, because the driver finished a Merge.

        Args:
            digest: digest of the new value.
            excluded: learners whose value was unusable. If all values were, there is no new value.
        """
        this = self.rounds.merging(global_step)
        parts = [part for _, part in sorted(this.values.items()) if part.learner_id not in excluded]
        for learner_id in sorted(set(excluded) - this.former):
            member = self.membership.members[learner_id]
            # One bad value is one strike. If there is a new version, the learner's steps count again once it holds
            # that version. If there is none, nothing ends these steps, so they count again now.
            if not parts:
                member.credit.merged_base.pop(this.fragment_id, None)
            # An expulsion may end other rounds. Until this one has its new version, the run is not over.
            self.roster.strike(member, this, now_s)
        self.rounds.end_merge(this)
        if parts:
            self.rounds.renew(this, parts, digest, now_s)
            self.roster.watch_shares()
        else:
            self.rounds.abandon(this)
        self.rounds.proceed(now_s)
        self.evaluations.on_merged(now_s)
        return self._effects.drain()

    def on_drain(self, learner_id: str, now_s: float) -> list[Effect]:
        """Send a learner Stop, because an operator wants it to leave.

        Raises:
            ValueError: no learner of that name is connected; the message names those that are.
        """
        names = [member.learner_id for member in self.membership.connected()]
        if learner_id not in names:
            there = ", ".join(names[:16]) or "nobody"
            raise ValueError(f"no learner {learner_id[:80]!r} is connected; there are {there}")
        return [Send(learner_id, messages.Stop(self.global_step, messages.DRAINED))]

    def on_ban(self, learner_id: str, why: str, now_s: float) -> list[Effect]:
        """Exclude a learner from the run, because an operator does not want it; its greetings are refused from now on.

        Raises:
            ValueError: the ban is not possible, and nothing has changed; the message has the reason.
        """
        self.roster.ban(learner_id, why, now_s)
        self.comeback.proceed(now_s)
        self.rounds.proceed(now_s)
        return self._effects.drain()

    def on_admit(self, learner_id: str, now_s: float) -> list[Effect]:
        """Lift the ban of a learner; ValueError if there is none."""
        self.roster.admit(learner_id)
        return self._effects.drain()

    def on_restart(self, held: Sequence[int], digests: Sequence[int], now_s: float) -> list[Effect]:
        """Continue in a new process: links, and values in transit, are lost (comeback.py).

        Args:
            held: version of each fragment whose value the driver has.
        """
        self.matches.clear()
        self.roster.check_s = now_s
        self.evaluations.restart(now_s)
        self.comeback.restart(held, digests, now_s)
        return self._effects.drain()

    def on_limits(self, limits: Limits) -> list[Effect]:
        """Set other limits of a run that is not training; a rewind must follow."""
        self.progress.limit(limits)
        self.membership.expect(GLOBAL_STEPS, limits.text)
        return []

    def on_rewind(self, epoch: int, now_s: float) -> list[Effect]:
        """Continue the whole run from the snapshot that `go_back` just restored; what came after it is void.

        Args:
            epoch: this epoch of the syncer, above every earlier one.
        """
        if self.progress.finished and self.rounds.may_open():
            # The run was complete, and its limits have been raised since.
            self.progress.finished = False
        self.matches.clear()
        self.roster.check_s = now_s
        self.evaluations.restart(now_s)
        self.comeback.rewind(epoch, now_s)
        self.roster.release_banned()
        return self._effects.drain()

    def next_deadline_s(self) -> float | None:
        """Return when on_tick must be called next, or None."""
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
                if this.owed_s < deadline_s and not this.owed:
                    deadline_s = this.owed_s
            elif this.phase == COLLECTING and this.closes_s is not None and this.closes_s < deadline_s:
                deadline_s = this.closes_s
        return deadline_s if deadline_s < inf else None

    def on_tick(self, now_s: float) -> list[Effect]:
        """Take the time: silence of members, grace windows, and requests without an answer depend on it."""
        if now_s >= self.roster.check_s:
            self.roster.check_s = now_s + self.config.silence_s / 4
            self.roster.check_silence(now_s)
        self.rounds.on_tick(now_s)
        self.comeback.on_tick(now_s)
        if self.evaluations.open and self.comeback.restoring is None:
            self.evaluations.on_tick(now_s)
        self.rounds.proceed(now_s)
        return self._effects.drain()

    def waiting_for(self, now_s: float) -> str:
        """Describe what the next round waits for."""
        restoring = self.comeback.restoring
        if self.progress.finished:
            who = ", ".join(self.evaluations.asked) or "a learner to come back"
            final = f"the evaluation of the final model, by {who}"
            return final if self.evaluations.open else "nothing: the run is complete"
        if restoring is not None:
            names = ", ".join(sorted(restoring.awaited)) or "versions on their way"
            return f"learners to bring what the syncer lost: {names}"
        return self.rounds.waiting_for(now_s)

    @property
    def run(self) -> str:
        """Return the id of the run; "" if an older release started it."""
        return self.membership.run

    @property
    def epoch(self) -> int:
        """Return the present epoch of the syncer, from 1."""
        return self.progress.epoch

    @property
    def global_step(self) -> int:
        """Return the number of closed rounds."""
        return self.progress.global_step

    @property
    def finished(self) -> bool:
        """True once the run is complete."""
        return self.progress.finished

    @property
    def over(self) -> bool:
        """True once the run is complete, and no answer of a learner is expected any more."""
        return self.finished and not (self.restoring or self.evaluations.open)

    @property
    def merged_rounds(self) -> int:
        """Return the number of rounds that made a version."""
        return self.progress.merged_rounds

    @property
    def versions(self) -> list[int]:
        """Return the newest version of each fragment."""
        return self.downstream.versions

    @property
    def digests(self) -> list[int]:
        """Return the digests of the newest versions."""
        return self.downstream.digests

    @property
    def restoring(self) -> bool:
        """True while learners may bring newer values than the driver holds."""
        return self.comeback.restoring is not None

    def state(self) -> dict[str, Any]:
        """Return all state as plain values that JSON keeps exactly."""
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

    def go_back(self, state: Mapping[str, Any]) -> None:
        """Restore the state at a snapshot for a rewind; the bans stay as they are now (bans.py)."""
        bans = self.membership.bans.state()
        self.restore(state)
        self.membership.bans.restore(bans)

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
