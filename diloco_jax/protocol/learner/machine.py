"""The learner's half of the protocol (paper, Alg. 1): report every step, answer pulls, adopt broadcasts, never wait.

Rules of this file
  * Inputs are `on_<event>` methods; each returns the effects that the driver executes in order. Nothing is buffered.
  * The machine never sees an array. It decides which fragment to copy (Stage), to send and to adopt.
  * While a step runs a driver may call (under its lock) what changes nothing that a step depends on: `on_connected`,
    `on_disconnected` and `on_tick`; `on_pull`, `on_anchor_request` and `on_state_pull`; `wants`, `on_read` and
    `on_corrupt`; `take_batch`, one step ahead; and `leave`, which ends it. Every other input belongs between two steps:
    a driver's Mailbox (mailbox.py) sees to it, and a checker of the simulator holds it.
  * Without a global value of every fragment it may not step: a fresh start reports nothing, nothing of it is merged.

States:  joining -> recovering (only when it joins a run that is under way) -> training <-> waiting (lockstep only)
         any -> stopped

Its parts own what there is to know: the global values held and read (anchors.py), the copies (stager.py),
the link (contact.py), how it begins (start.py), its data (leases.py), states for others (recovery.py), evaluations
(examination.py), and the learning-rate schedule (schedule_clock.py).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import assert_never

from diloco_jax.protocol import messages
from diloco_jax.protocol.effects import Adopt, Drop, Effect, Finish, SaveState, Send
from diloco_jax.protocol.learner.anchors import GAP, USEFUL, Anchors, Heads
from diloco_jax.protocol.learner.contact import Contact
from diloco_jax.protocol.learner.examination import Examination
from diloco_jax.protocol.learner.schedule_clock import ScheduleClock
from diloco_jax.protocol.learner.stager import Stager
from diloco_jax.protocol.learner.start import Saved, Start
from diloco_jax.protocol.leases import Allotment, Batch
from diloco_jax.protocol.messages import NO_VERSION, SYNCER, Adopted, GlobalFragment, SyncerMessage
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.recovery import Donor

JOINING, RECOVERING, TRAINING, WAITING, STOPPED = "joining", "recovering", "training", "waiting", "stopped"


class Learner:
    """State machine of one learner. See the rules above and docs/protocol.md.

    Args:
        fingerprint: what both sides must agree on.
        saved: its own state on disk, if there is one.
        adopt_mode: what adopting a global value leaves of the work done since: see `Stager`.
        payload_bytes: fragment -> size of its encoded value; 0 where nothing is said.
        evaluates: whether its driver can evaluate the global model.
    """

    def __init__(
        self,
        learner_id: str,
        incarnation: int,
        config: ProtocolConfig,
        fingerprint: tuple[tuple[str, str], ...],
        *,
        step_samples: int = 1,
        saved: Saved | None = None,
        adopt_mode: str = "overwrite",
        payload_bytes: Mapping[int, int] = MappingProxyType({}),
        evaluates: bool = True,
    ) -> None:
        self.learner_id = learner_id
        self.incarnation = incarnation
        self.state = JOINING
        self.global_step = 0  # newest known; in lockstep the schedule's own count
        self.local_step = 0
        self.tokens = 0
        self.samples = 0  # of its leases that are trained on
        self.schedule_clock = ScheduleClock()
        self.anchors = Anchors(config.num_fragments)
        self.heads = Heads()
        self.contact = Contact(learner_id, incarnation, fingerprint, config, evaluates)
        self.examination = Examination(learner_id, incarnation, self.anchors)
        self.start = Start(learner_id, incarnation, config, saved)
        self.allotment = Allotment(step_samples, config.lease_ahead_steps)
        self.donor = Donor(learner_id, incarnation)
        self._config = config
        self._schedule = schedule = config.schedule
        self.stager = Stager(learner_id, incarnation, config, schedule, self.anchors, adopt_mode, payload_bytes)
        self._marker = 0  # snapshots that this learner has passed
        self._waits_for = 0  # lockstep: the round whose fragment must come back before the next step

    def on_connected(self, now_s: float) -> list[Effect]:
        """The link stands; introduce yourself."""
        if self.state == STOPPED:
            return []
        self.contact.connect(now_s)
        return [self._hello(now_s), *self.start.receiver.on_connected(now_s)]

    def on_disconnected(self, now_s: float) -> list[Effect]:
        """The link is gone; training goes on, pulls of the old link are void."""
        self.contact.connected = False
        self.contact.fall_silent()
        self.stager.wanted.clear()
        effects = self.donor.forget_all()
        if self.state == WAITING:
            return effects  # no step will renew the copy, and the round may still ask for it on the next link
        return effects + self.stager.unstage_all()

    def leave(self, reason: str, now_s: float) -> list[Effect]:
        """Say goodbye and stop."""
        goodbye = Send(SYNCER, messages.Leave(self.learner_id, self.incarnation, reason))
        return [*([goodbye] if self.contact.connected else []), *self._stop(reason)]

    def wants(self, message: GlobalFragment, now_s: float) -> bool:
        """Say if a global fragment that has arrived is of use: read it, then call `on_read` or `on_corrupt`."""
        verdict = self.heads.judge(message)
        if verdict == GAP:
            self.on_corrupt(now_s)
        return verdict == USEFUL

    def on_read(self, message: GlobalFragment, now_s: float) -> None:
        """Its value is there, with the right digest: later steps apply to it, adopted or not."""
        self.heads.move(message, now_s)

    def on_corrupt(self, now_s: float) -> None:
        """A fragment arrived damaged, or led to another digest. Ask later, and once: the answer may be damaged too."""
        if self.contact.connected and self.state != STOPPED and self.contact.resend_at_s is None:
            self.contact.ask_again(now_s)

    def _hello(self, now_s: float) -> Send:
        return self.contact.hello(self.anchors, self.allotment, self.local_step, now_s)

    def may_step(self) -> bool:
        """Say if the next inner step may start. Outside lockstep: always, once every fragment is held."""
        return self.state == TRAINING and not self.examination.holds

    def take_batch(self) -> Batch:
        """Take the data of the next step. Once per step; a driver may read one step ahead."""
        return self.allotment.take()

    def on_step(self, num_tokens: int, step_s: float, loss: float, now_s: float, *, samples_end: int) -> list[Effect]:
        """An inner step on `num_tokens` tokens has finished."""
        assert self.state == TRAINING, f"step in state {self.state}"
        contact, stager = self.contact, self.stager
        self.local_step += 1
        self.tokens += num_tokens
        self.samples = samples_end
        contact.unheard_steps += 1
        if self._config.lockstep:
            self.global_step += 1
        effects: list[Effect] = []
        done = (self.learner_id, self.incarnation, self.local_step, self.tokens, self.global_step)
        data = (samples_end, self.allotment.granted, self.heads.arrived(now_s))
        contact.report = report = messages.StepReport(*done, self.anchors.adopted, step_s, loss, *data)
        if contact.connected or self._config.lockstep:
            stager.stage_due(report, self.global_step if self._config.lockstep else stager.next_round, effects)
        if contact.connected:
            effects.append(Send(SYNCER, report))
            if stager.wanted:
                stager.answer_wanted(report, effects)
        if self._config.lockstep and self._schedule.due(self.global_step) >= 0:
            self._waits_for = self.global_step
            self.state = WAITING
            contact.ask_again(now_s)
        every = self._config.snapshot_every
        if every and self.global_step // every > self._marker:
            self._marker = self.global_step // every
            effects.append(SaveState(self.global_step))
        if self.donor.waiting:
            self._serve(effects)
        return effects

    def _serve(self, effects: list[Effect]) -> None:
        """Copy the state for those who wait for it; between two steps only."""
        if self.local_step > 0 and self.state in (TRAINING, WAITING):
            effects += self.donor.serve(self.global_step, self.local_step)

    def on_message(self, message: SyncerMessage, now_s: float) -> list[Effect]:
        """Any message of the syncer."""
        if self.state == STOPPED:
            return []
        self.contact.heard_s, self.contact.unheard_steps = now_s, 0
        match message:
            case GlobalFragment():
                effects = self.on_global(message, now_s)
            case messages.PullRequest():
                effects = self.on_pull(message, now_s)
            case messages.Advance():
                effects = self.on_advance(message, now_s)
            case messages.Lease():
                self.allotment.add(message)
                effects = self._update_state(now_s)
            case messages.Welcome():
                effects = self.on_welcome(message, now_s)
            case messages.AnchorRequest():
                effects = self.on_anchor_request(message, now_s)
            case messages.StatePull():
                effects = self.on_state_pull(message, now_s)
            case messages.Evaluate():
                effects = self.on_evaluate(message, now_s)
            case messages.StateEnd(receiver):
                effects = self.donor.on_end(receiver)
            case messages.StatePart():
                effects = self.start.receiver.on_part(message, self.global_step, now_s) + self._update_state(now_s)
            case messages.StateUnavailable():
                effects = self.start.receiver.on_unavailable(message, self.global_step, now_s)
                effects += self._update_state(now_s)
            case messages.Refuse(reason):
                effects = self._stop(f"refused: {reason}")
            case messages.Expel(reason):
                effects = self._stop(f"expelled: {reason}")
            case messages.Stop(global_step, reason):
                self._see(global_step)
                effects = self.leave(reason, now_s)
            case _:
                assert_never(message)
        if self.donor.waiting:
            self._serve(effects)
        if self.state != STOPPED:
            self.examination.begin(self.global_step, effects)
        return effects

    def on_evaluate(self, message: messages.Evaluate, now_s: float) -> list[Effect]:
        """The syncer asks what the global model is worth: evaluate it in this gap, or when the final one is here."""
        again = self.examination.lacks
        effects = self.examination.on_request(message)
        if again and self.examination.lacks and self.contact.connected:
            effects.append(self._hello(now_s))  # what is missing was lost on its way here
        return effects

    def on_evaluated(self, found: messages.Score, now_s: float) -> list[Effect]:
        """The driver has evaluated the global values: `found` is all of the answer but what the machine knows."""
        answer = self.examination.on_evaluated(found, self.global_step)
        effects: list[Effect] = [answer] if self.contact.connected else []
        if self.donor.waiting and self.state == WAITING:
            self._serve(effects)
        return effects

    def on_welcome(self, message: messages.Welcome, now_s: float) -> list[Effect]:
        """Accepted; what is still missing follows as GlobalFragment."""
        self._see(message.global_step, message.schedule_lead)
        self.examination.over = False  # a syncer that lost the end of the run goes on
        self.anchors.epoch = max(self.anchors.epoch, message.epoch)
        if self.state in (RECOVERING, TRAINING):  # the hello of a reconnection is answered
            self.contact.answered()
        return self.start.on_welcome(message.global_step, now_s) + self._update_state(now_s)

    def on_state_adopted(self, ok: bool, now_s: float) -> list[Effect]:
        """The driver has taken a state over, or could not use it."""
        return self.start.on_adopted(ok, self.global_step, now_s) + self._update_state(now_s)

    def on_state_pull(self, message: messages.StatePull, now_s: float) -> list[Effect]:
        """Somebody needs a state: give what is copied already, or copy one between two steps."""
        again = message.receiver in self.donor.waiting
        effects = self.donor.on_pull(message)
        if again and message.clock > self.global_step and self.contact.connected:
            effects.append(self._hello(now_s))  # the broadcast that it waits for was lost on its way here
        if self.state == WAITING and not self.examination.running:
            self._serve(effects)
        return effects

    def on_anchor_request(self, message: messages.AnchorRequest, now_s: float) -> list[Effect]:
        """A restarted syncer lacks a global value that is held here, or was replaced by a newer one since."""
        return self.anchors.answer(message, self.learner_id, self.incarnation)

    def on_pull(self, message: messages.PullRequest, now_s: float) -> list[Effect]:
        """A round wants a fragment as it was after a step: now, or after the next one."""
        return self.stager.on_pull(message)

    def on_advance(self, message: messages.Advance, now_s: float) -> list[Effect]:
        """A global step closed without a new fragment; in lockstep that ends the wait for it."""
        self._see(message.global_step, message.schedule_lead)
        if self.state == WAITING and message.global_step >= self._waits_for:
            self._train()
        return []

    def on_global(self, message: GlobalFragment, now_s: float) -> list[Effect]:
        """Adopt a newer global fragment: its counters begin again at the current local step."""
        self._see(message.global_step, message.schedule_lead)
        anchors, fragment_id, version = self.anchors, message.fragment_id, message.version
        if not 0 <= fragment_id < len(anchors.adopted):
            return [Drop(SYNCER, f"unknown fragment {fragment_id}, there are {len(anchors.adopted)}")]
        if not anchors.is_news(message):
            return []
        effects: list[Effect] = [Adopt(fragment_id, version)]
        if self.state == JOINING and anchors.adopted[fragment_id].version == NO_VERSION:
            self.contact.ask_again(now_s)  # progress: what else is missing is probably on its way
        self.stager.on_global(message, self.samples, effects)
        anchors.take(message, self.local_step, self.tokens)
        self.global_step = max(self.global_step, version)
        return effects if self.state == TRAINING else effects + self._update_state(now_s)

    def _see(self, global_step: int, schedule_lead: int | None = None) -> None:
        if schedule_lead is not None:
            self.schedule_clock.hear(global_step, schedule_lead, self.global_step)
        if global_step >= self.stager.next_round:
            self.stager.next_round = global_step + 1
        if global_step > self.global_step and (not self._config.lockstep or self.state in (JOINING, RECOVERING)):
            self.global_step = global_step

    def _update_state(self, now_s: float) -> list[Effect]:
        """Begin to train when nothing is missing any more."""
        if self.state == WAITING:
            if self.adopted[self._schedule.due(self._waits_for)].version >= self._waits_for:
                self._train()
        elif self.state in (JOINING, RECOVERING):
            if not self.start.welcomed or NO_VERSION in self.anchors.versions or not self.allotment.ready:
                return []
            if self.state == JOINING:
                self.state, self.contact.resend_at_s = RECOVERING, None
            effects = self.start.take_over(self.anchors, self.global_step, now_s)
            if self.start.over:
                self._marker = self.global_step // max(1, self._config.snapshot_every)
                self._train()
            return effects
        return []

    def _train(self) -> None:
        self.state = TRAINING
        self.contact.answered()

    def _stop(self, reason: str) -> list[Effect]:
        self.state = STOPPED
        self.start.receiver.give_up()
        self.contact.fall_silent()
        return [*self.stager.unstage_all(), *self.donor.forget_all(), Finish(reason)]

    def next_deadline_s(self) -> float | None:
        """Return the time at which on_tick must be called next, or None."""
        contact = self.contact
        if not contact.connected:
            return None
        deadline_s, resend_s, repeat_s = contact.heartbeat_at_s, contact.resend_at_s, self.start.receiver.resend_s
        if resend_s is not None and (deadline_s is None or resend_s < deadline_s):
            deadline_s = resend_s
        if repeat_s is not None and (deadline_s is None or repeat_s < deadline_s):
            deadline_s = repeat_s
        return deadline_s

    def on_tick(self, now_s: float) -> list[Effect]:
        """Repeat an unanswered hello (and, in lockstep, the report that the round waits for); beat the heart."""
        effects: list[Effect] = []
        contact = self.contact
        if not contact.connected or self.state == STOPPED:
            return effects
        if contact.resend_at_s is not None and now_s >= contact.resend_at_s:
            if self.state == TRAINING and contact.hello_step == self.local_step:
                contact.ask_again(now_s)  # the answer may wait for the end of the step
            else:
                effects.append(self._hello(now_s))
            if self.state == WAITING and contact.report is not None:
                effects.append(Send(SYNCER, contact.report))
        if self.state != TRAINING:
            effects += self.start.receiver.on_tick(self.global_step, now_s)
            effects += self._update_state(now_s)  # the last attempt to get a state may have failed just now
        if contact.heartbeat_at_s is not None and now_s >= contact.heartbeat_at_s:
            if contact.lost_track(now_s) and (contact.unheard_steps >= 2 or self.state == RECOVERING):
                effects.append(self._hello(now_s))  # ask to be let in again
            effects.append(contact.heartbeat(now_s))
        return effects

    @property
    def schedule_step(self) -> int:
        """The step of the learning-rate schedule at which the next inner step trains: without a budget global_step."""
        return self.schedule_clock.at(self.global_step)

    @property
    def adopted(self) -> tuple[Adopted, ...]:
        """Version of each fragment that is held, and where this learner stood when it took it."""
        return self.anchors.adopted

    @property
    def digests(self) -> list[int]:
        """Digests of the global values that are held."""
        return self.anchors.digests

    @property
    def epoch(self) -> int:
        """Newest life of the syncer that is known."""
        return self.anchors.epoch
