"""The learner's half of the protocol (paper, Alg. 1): report every step, answer pulls, adopt broadcasts, train on.

Rules of this file
  * Inputs are `on_<event>` methods, `answer` and `leave`. Each drains the machine's Effects at its end and returns
    what the driver executes, in order. All other methods append to Effects.
  * The machine never sees an array. It decides which fragment to copy (Stage), to send and to adopt.
  * While a step runs a driver may call, under its lock, what no step depends on: `on_connected`, `on_disconnected` and
    `on_tick`; `answer`; `wants`, `on_read` and `on_corrupt`; `take_batch`, one step ahead; and `leave`, which ends the
    step. Every other input belongs between two steps. A driver's Mailbox (mailbox.py) keeps this order, and a checker
    of the simulator watches it.
  * Without a global value of every fragment the learner may not step: what a fresh start knows is never merged.

States:  joining -> recovering (only when it joins a run that is under way) -> training <-> waiting (lockstep only)
         any -> stopped

Each part of the machine has its own subject: Anchors and Heads the global values held and read (anchors.py), Stager the
copies (stager.py), FragmentWait the wait for a fragment (waiting.py), Start and Donor the states of learners
(recovery.py), Allotment the data (leases.py), Contact greetings and heartbeats (contact.py). Examination and
ScheduleClock are in this file.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import assert_never

from diloco_jax.protocol import messages
from diloco_jax.protocol.corpora import THE_RUNS, OwnCorpus
from diloco_jax.protocol.effects import Adopt, Drop, Effect, Effects, EvaluateModel, Finish, SaveState, Send
from diloco_jax.protocol.learner.anchors import GAP, USEFUL, Anchors, Heads
from diloco_jax.protocol.learner.contact import Contact
from diloco_jax.protocol.learner.recovery import Donor, Saved, Start
from diloco_jax.protocol.learner.stager import Stager
from diloco_jax.protocol.learner.waiting import FragmentWait
from diloco_jax.protocol.leases import Allotment, Batch
from diloco_jax.protocol.messages import NO_VERSION, SYNCER, Adopted, GlobalFragment, StepReport, SyncerMessage
from diloco_jax.protocol.pacing import ProtocolConfig

JOINING, RECOVERING, TRAINING, WAITING, STOPPED = "joining", "recovering", "training", "waiting", "stopped"


class ScheduleClock:
    """A learner's place in the learning-rate schedule: its global step plus the newest known lead.

    With a token budget the syncer sends with its global step how far the schedule is ahead of it, or behind
    (Progress.schedule_lead in syncer/progress.py has the rule). Until the next message both advance alike. The place
    never goes back, even when fewer tokens are merged than expected.
    """

    def __init__(self) -> None:
        self._lead = 0
        # Global step of the message that had the newest lead.
        self._told_step = 0
        self._least = 0

    def hear(self, told_step: int, lead: int, global_step: int) -> None:
        """Take the lead of a message, unless the lead of a newer message is known.

        Args:
            told_step: global step of the syncer when it sent the message.
            global_step: the newest one that the learner knew before.
        """
        if told_step >= self._told_step:
            self._least, self._lead, self._told_step = self.at(global_step), lead, told_step

    def at(self, global_step: int) -> int:
        """Return the step of the schedule at a global step."""
        return max(self._least, global_step + self._lead)


class Examination:
    """The evaluation of the held global values that the syncer requested, and the newest answer.

    A learner evaluates one request at a time, between two steps.
    """

    def __init__(self, effects: Effects, learner_id: str, incarnation: int, anchors: Anchors) -> None:
        # Whether the driver evaluates now.
        self.running = False
        # Whether the final model is evaluated, so that no step is left to make.
        self.over = False
        self._effects = effects
        self._who = (learner_id, incarnation)
        self._anchors = anchors
        # The newest request that has no answer yet.
        self._wanted: messages.Evaluate | None = None
        self._score: messages.Score | None = None

    @property
    def holds(self) -> bool:
        """Return whether the evaluation forbids steps: it is running, or the final model was evaluated."""
        return self.running or self.over

    @property
    def lacks(self) -> bool:
        """True while the learner does not hold the values that it is to evaluate."""
        wanted, held = self._wanted, self._anchors.versions
        return wanted is not None and (NO_VERSION in held or held != (wanted.versions or held))

    def answers(self, message: messages.Evaluate) -> bool:
        """Return whether the evaluation that runs now is the answer to this request."""
        return self.running and self._wanted is not None and self._wanted.number == message.number

    def on_request(self, message: messages.Evaluate) -> None:
        """Take a request; if it has an answer already, send the answer again."""
        if self._score is not None and self._score.number == message.number:
            self._effects.append(Send(SYNCER, self._score))
        elif self._wanted is None or message.number > self._wanted.number:
            self._wanted = message

    def begin(self, global_step: int) -> None:
        """Evaluate, if that is wanted and possible."""
        if self._wanted is not None and not (self.running or self.lacks):
            self.running = True
            self._effects.append(EvaluateModel(self._wanted.number, global_step, final=bool(self._wanted.versions)))

    def complete(self, found: messages.Score, global_step: int) -> messages.Score:
        """Return the answer: what the driver found, with the first five fields, which the driver does not know."""
        wanted, self._wanted = self._wanted, None
        assert self.running and wanted is not None, "nobody asked for a score"
        self.running, self.over = False, bool(wanted.versions)
        (learner_id, incarnation), versions = self._who, self._anchors.versions
        self._score = found._replace(
            learner_id=learner_id,
            incarnation=incarnation,
            number=wanted.number,
            global_step=global_step,
            versions=versions,
        )
        return self._score


class Learner:
    """State machine of one learner; docs/protocol.md describes the protocol.

    Args:
        fingerprint: what both sides must agree on.
        saved: the learner's state on its own disk, if there is one.
        adopt_mode: what adopting a global value leaves of the work before it; `Stager` lists the modes.
        payload_bytes: fragment -> size of its encoded value; 0 where it is missing.
        evaluates: whether the driver can evaluate the global model.
        judges: whether it can evaluate it with a change as well.
        corpus: the corpus that it reads.
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
        judges: bool = False,
        corpus: OwnCorpus = THE_RUNS,
    ) -> None:
        self.learner_id = learner_id
        self.incarnation = incarnation
        self.state = JOINING
        # The newest known global step; in lockstep the schedule's own count.
        self.global_step = 0
        self.local_step = 0
        self.tokens = 0
        # Samples of its leases that it has trained on.
        self.samples = 0
        self._config = config
        self._turns = turns = config.turns
        self._effects = effects = Effects()
        self.schedule_clock = ScheduleClock()
        self.anchors = Anchors(effects, config.num_fragments)
        self.heads = Heads()
        self.contact = Contact(effects, learner_id, incarnation, fingerprint, config, evaluates, judges, corpus)
        self.examination = Examination(effects, learner_id, incarnation, self.anchors)
        self.start = Start(effects, learner_id, incarnation, config, saved)
        self.allotment = Allotment(learner_id, incarnation, step_samples)
        self.donor = Donor(effects, learner_id, incarnation, gives=config.recover_from_peers)
        self.stager = Stager(effects, learner_id, incarnation, config, turns, self.anchors, adopt_mode, payload_bytes)
        self.wait = FragmentWait(config, turns)
        # The global step of the newest saved state, or of the start.
        self._saved_step = 0
        # In lockstep: the round whose fragment must arrive before the next step.
        self._waits_for = 0

    def on_connected(self, now_s: float) -> list[Effect]:
        """Greet the syncer, because the link is open."""
        if self.state != STOPPED:
            self.contact.connect(now_s)
            self._greet(now_s)
            self.start.receiver.on_connected(now_s)
        return self._effects.drain()

    def on_disconnected(self, now_s: float) -> list[Effect]:
        """Continue to train without a link; pulls of the lost link are void."""
        self.contact.connected = False
        self.contact.fall_silent()
        self.wait.stop()
        self.stager.wanted.clear()
        self.donor.forget_all()
        # In lockstep no step renews the copy, and the round may still request it on the next link.
        if self.state != WAITING:
            self.stager.unstage_all()
        return self._effects.drain()

    def leave(self, reason: str, now_s: float) -> list[Effect]:
        """Send a goodbye and stop."""
        self._leave(reason)
        return self._effects.drain()

    def _leave(self, reason: str) -> None:
        if self.contact.connected:
            self._effects.append(Send(SYNCER, messages.Leave(self.learner_id, self.incarnation, reason)))
        self._stop(reason)

    def wants(self, message: GlobalFragment, now_s: float) -> bool:
        """Return whether an arrived global fragment is useful: read it, then call `on_read` or `on_corrupt`."""
        verdict = self.heads.judge(message)
        if verdict == GAP:
            self.on_corrupt(now_s)
        return verdict == USEFUL

    def on_read(self, message: GlobalFragment, now_s: float) -> None:
        """Record that the value is there with the right digest: later deltas apply to it, adopted or not."""
        self.heads.move(message, now_s)
        self.wait.on_shown(message.version, now_s)

    def on_corrupt(self, now_s: float) -> None:
        """Plan a greeting, because a fragment arrived damaged or led to another digest than it should.

        The greeting is sent later and once, because its answer may be damaged too.
        """
        self.contact.damaged = True
        if self.contact.connected and self.state != STOPPED and self.contact.resend_at_s is None:
            self.contact.ask_again(now_s)

    def _greet(self, now_s: float) -> None:
        self.contact.greet(self.anchors, self.allotment, self.local_step, now_s)

    def may_step(self) -> bool:
        """Return whether the next inner step may start. Without lockstep and `wait_steps` it always may, once every
        fragment is held."""
        return self.state == TRAINING and not (self.examination.holds or self.wait.holds)

    def stages_next(self) -> set[int]:
        """Return the fragments that the end of the next step will stage, if no message arrives before."""
        first_round = self.global_step + 1 if self._config.lockstep else self.stager.next_round
        due = self.stager.due(first_round) if self.contact.connected or self._config.lockstep else ()
        return {*due, *self.stager.wanted}

    def take_batch(self) -> Batch:
        """Take the data of the next step. Once per step; a driver may read one step ahead."""
        return self.allotment.take()

    def on_step(self, num_tokens: int, step_s: float, loss: float, now_s: float, *, samples_end: int) -> list[Effect]:
        """Record that an inner step on `num_tokens` tokens has finished."""
        assert self.state == TRAINING, f"step in state {self.state}"
        contact, stager, lockstep = self.contact, self.stager, self._config.lockstep
        self.local_step += 1
        self.tokens += num_tokens
        self.samples = samples_end
        contact.unheard_steps += 1
        if lockstep:
            self.global_step += 1
        done = (self.learner_id, self.incarnation, self.local_step, self.tokens, self.global_step)
        data = (samples_end, self.allotment.granted, self.heads.arrived(now_s))
        contact.report = report = StepReport(*done, self.anchors.adopted, step_s, loss, *data)
        if contact.connected or lockstep:
            stager.stage_due(report, self.global_step if lockstep else stager.next_round)
        if contact.connected:
            self._effects.append(Send(SYNCER, report))
            if stager.wanted:
                stager.answer_wanted(report)
            self.wait.on_report(self.local_step == 1, step_s, stager.next_round, now_s)
        if lockstep and self._turns.due(self.global_step) >= 0:
            self._waits_for = self.global_step
            self.state = WAITING
            contact.ask_again(now_s)
        if self._config.snapshot_due(self._saved_step, self.global_step):
            self._saved_step = self.global_step
            self._effects.append(SaveState(self.global_step))
        if self.donor.waiting:
            self._serve()
        return self._effects.drain()

    def _serve(self) -> None:
        """Copy the state for the receivers that wait for it; only between two steps."""
        if self.local_step > 0 and self.state in (TRAINING, WAITING):
            self.donor.serve(self.global_step, self.local_step)

    def on_message(self, message: SyncerMessage, now_s: float) -> list[Effect]:
        """Take any message of the syncer."""
        if self.state != STOPPED:
            self.contact.heard_s, self.contact.unheard_steps = now_s, 0
            self._take(message, now_s)
            if self.donor.waiting:
                self._serve()
            if self.state != STOPPED:
                self.examination.begin(self.global_step)
        return self._effects.drain()

    def answer(
        self, message: messages.PullRequest | messages.AnchorRequest | messages.StatePull, now_s: float
    ) -> list[Effect]:
        """Answer a request of the syncer that no step depends on, also while a step runs."""
        self._take(message, now_s)
        return self._effects.drain()

    def _take(self, message: SyncerMessage, now_s: float) -> None:
        match message:
            case GlobalFragment():
                self._on_global(message, now_s)
            case messages.PullRequest():
                self._on_pull(message, now_s)
            case messages.Advance():
                self._on_advance(message, now_s)
            case messages.Lease():
                self.allotment.add(message)
                self._update_state(now_s)
            case messages.Welcome():
                self._on_welcome(message, now_s)
            case messages.AnchorRequest():
                self.anchors.answer(message, self.learner_id, self.incarnation)
            case messages.StatePull():
                self._on_state_pull(message, now_s)
            case messages.Evaluate():
                self._on_evaluate(message, now_s)
            case messages.StateEnd(receiver):
                self.donor.on_end(receiver)
            case messages.StateChunk():
                self.start.receiver.on_part(message, self.global_step, now_s)
                self._update_state(now_s)
            case messages.StateUnavailable():
                self.start.receiver.on_unavailable(message, self.global_step, now_s)
                self._update_state(now_s)
            case messages.Refuse(reason):
                self._stop(f"refused: {reason}")
            case messages.Expel(reason):
                self._stop(f"expelled: {reason}")
            case messages.Stop(global_step, reason):
                self._see(global_step)
                self._leave(reason)
            case _:
                assert_never(message)

    def _on_evaluate(self, message: messages.Evaluate, now_s: float) -> None:
        """Take a request to evaluate the global model, now or when the final values are here."""
        again = self.examination.lacks
        self.examination.on_request(message)
        if again and self.examination.lacks and self.contact.connected:
            # What is missing was lost on its way here.
            self._greet(now_s)

    def on_evaluated(self, found: messages.Score, now_s: float) -> list[Effect]:
        """Send the score of the global values. The driver leaves open what only the machine knows."""
        if found.reason and self.contact.corpus.corpus:
            # An error may quote a path or a text of the site.
            found = found._replace(reason="its evaluation failed, or lacks scores; the island's log says why")
        score = self.examination.complete(found, self.global_step)
        if self.contact.connected:
            self._effects.append(Send(SYNCER, score))
        if self.donor.waiting and self.state == WAITING:
            self._serve()
        return self._effects.drain()

    def _on_welcome(self, message: messages.Welcome, now_s: float) -> None:
        """Record that the syncer has accepted the learner; missing values follow as GlobalFragment."""
        self._see(message.global_step, message.schedule_lead)
        self.wait.on_over(message.global_step, now_s)
        # A syncer that lost the end of the run continues it.
        self.examination.over = False
        self.anchors.epoch = max(self.anchors.epoch, message.epoch)
        self.contact.run = message.run or self.contact.run
        if self.state in (RECOVERING, TRAINING):
            # This answers the greeting of a reconnection.
            self.contact.answered()
        self.start.on_welcome(message.global_step, now_s, message.run)
        self._update_state(now_s)

    def on_part_damaged(self, message: messages.StateChunk, now_s: float) -> list[Effect]:
        """Record that a part of a peer's state has another digest than its message names."""
        self.start.receiver.on_damaged(message, self.global_step, now_s)
        self._update_state(now_s)
        return self._effects.drain()

    def on_state_adopted(self, ok: bool, now_s: float) -> list[Effect]:
        """Record that the driver has loaded a state, or could not use it."""
        self.start.on_adopted(ok, self.global_step, now_s)
        self._update_state(now_s)
        return self._effects.drain()

    def on_state_unusable(self, receiver: str, reason: str) -> list[Effect]:
        """Give a receiver nothing of its copy, because the driver found that the copy cannot be used."""
        self.donor.on_unusable(receiver, reason)
        return self._effects.drain()

    def _on_state_pull(self, message: messages.StatePull, now_s: float) -> None:
        """Give a peer a state that is copied already, or copy one between two steps."""
        again = message.receiver in self.donor.waiting
        self.donor.on_pull(message)
        if again and message.clock > self.global_step and self.contact.connected:
            # The broadcast that the receiver waits for was lost on its way here.
            self._greet(now_s)
        if self.state == WAITING and not self.examination.running:
            self._serve()

    def _on_pull(self, message: messages.PullRequest, now_s: float) -> None:
        """Send a round a fragment as it was after a step: now, or after the next one."""
        self.wait.on_pull(message.global_step, now_s)
        self.stager.on_pull(message)

    def _on_advance(self, message: messages.Advance, now_s: float) -> None:
        """See that a global step closed without a new fragment, which ends a wait for it."""
        self._see(message.global_step, message.schedule_lead)
        self.wait.on_over(message.global_step, now_s)
        if self.state == WAITING and message.global_step >= self._waits_for:
            self._train()

    def _on_global(self, message: GlobalFragment, now_s: float) -> None:
        """Adopt a newer global fragment: its counters restart at the current local step."""
        self._see(message.global_step, message.schedule_lead)
        self.wait.on_over(message.version, now_s)
        anchors, fragment_id, version = self.anchors, message.fragment_id, message.version
        if not 0 <= fragment_id < len(anchors.adopted):
            reason = f"unknown fragment {fragment_id}, there are {len(anchors.adopted)}"
            self._effects.append(Drop(SYNCER, reason))
            return
        if not anchors.is_news(message):
            return
        self._effects.append(Adopt(fragment_id, version))
        if self.state == JOINING and anchors.adopted[fragment_id].version == NO_VERSION:
            # One fragment arrived, so the other missing ones are probably on their way.
            self.contact.ask_again(now_s)
        self.stager.on_global(message, self.samples)
        anchors.take(message, self.local_step, self.tokens)
        self.global_step = max(self.global_step, version)
        if self.state != TRAINING:
            self._update_state(now_s)

    def _see(self, global_step: int, schedule_lead: int | None = None) -> None:
        if schedule_lead is not None:
            self.schedule_clock.hear(global_step, schedule_lead, self.global_step)
        if global_step >= self.stager.next_round:
            self.stager.next_round = global_step + 1
        if global_step > self.global_step and (not self._config.lockstep or self.state in (JOINING, RECOVERING)):
            self.global_step = global_step

    def _update_state(self, now_s: float) -> None:
        """Start or resume training when nothing is missing any more."""
        if self.state == WAITING:
            if self.adopted[self._turns.due(self._waits_for)].version >= self._waits_for:
                self._train()
        elif self.state in (JOINING, RECOVERING):
            if not self.start.welcomed or NO_VERSION in self.anchors.versions or not self.allotment.ready:
                return
            if self.state == JOINING:
                self.state, self.contact.resend_at_s = RECOVERING, None
            self.start.load(self.anchors.digests, self.global_step, now_s)
            if self.start.over:
                self._saved_step = self.global_step
                self._train()

    def _train(self) -> None:
        self.state = TRAINING
        self.contact.answered()

    def _stop(self, reason: str) -> None:
        self.state = STOPPED
        self.start.receiver.stop()
        self.contact.fall_silent()
        self.wait.stop()
        self.stager.unstage_all()
        self.donor.forget_all()
        self._effects.append(Finish(reason))

    def next_deadline_s(self) -> float | None:
        """Return when on_tick must be called next, or None."""
        contact = self.contact
        if not contact.connected:
            return None
        deadline_s, resend_s, repeat_s = contact.heartbeat_at_s, contact.resend_at_s, self.start.receiver.resend_s
        if resend_s is not None and (deadline_s is None or resend_s < deadline_s):
            deadline_s = resend_s
        if repeat_s is not None and (deadline_s is None or repeat_s < deadline_s):
            deadline_s = repeat_s
        if self.wait.holds and (deadline_s is None or self.wait.deadline_s < deadline_s):
            deadline_s = self.wait.deadline_s
        return deadline_s

    def on_tick(self, now_s: float) -> list[Effect]:
        """Repeat a greeting without an answer (in lockstep also the report of the open round); send heartbeats."""
        contact = self.contact
        if not contact.connected or self.state == STOPPED:
            return []
        self.wait.on_tick(now_s)
        if contact.resend_at_s is not None and now_s >= contact.resend_at_s:
            if self.state == TRAINING and not self.examination.over and contact.hello_step == self.local_step:
                # The answer may wait for the end of the step. No step follows the final evaluation.
                contact.ask_again(now_s)
            else:
                self._greet(now_s)
            if self.state == WAITING and contact.report is not None:
                self._effects.append(Send(SYNCER, contact.report))
        if self.state != TRAINING:
            self.start.receiver.on_tick(self.global_step, now_s)
            # The last attempt to get a state may have failed just now.
            self._update_state(now_s)
        if contact.heartbeat_at_s is not None and now_s >= contact.heartbeat_at_s:
            if contact.lost_track(now_s) and (contact.unheard_steps >= 2 or self.state == RECOVERING):
                # The syncer may have forgotten this learner, which then has to join again.
                self._greet(now_s)
            contact.send_heartbeat(now_s)
        return self._effects.drain()

    def on_receiving(self, now_s: float) -> list[Effect]:
        """Wait longer for missing values while a payload arrives: on a narrow link they follow it.

        Another greeting would make the syncer send all of them again.
        """
        if self.state == JOINING:
            self.contact.wait_longer(now_s)
        self.start.receiver.on_receiving(self.global_step, now_s)
        return self._effects.drain()

    def on_busy(self, now_s: float) -> list[Effect]:
        """Send a heartbeat that is overdue, from a driver that reads a long value and gives no ticks meanwhile.

        Nothing is repeated, because the missing answer may be that value.
        """
        contact = self.contact
        if contact.heartbeat_at_s is not None and now_s >= contact.heartbeat_at_s + self._config.heartbeat_s / 2:
            contact.send_heartbeat(now_s)
        return self._effects.drain()

    @property
    def schedule_step(self) -> int:
        """Return the learning-rate schedule's step for the next inner step; without a budget it is global_step."""
        return self.schedule_clock.at(self.global_step)

    @property
    def adopted(self) -> tuple[Adopted, ...]:
        """Return the held version of each fragment, and the learner's counters when it adopted that version."""
        return self.anchors.adopted

    @property
    def digests(self) -> list[int]:
        """Return the digests of the held global values."""
        return self.anchors.digests

    @property
    def run(self) -> str:
        """Return the id of the run that the learner has joined; "" before, or if the run has none."""
        return self.contact.run

    @property
    def epoch(self) -> int:
        """Return the newest known epoch of the syncer."""
        return self.anchors.epoch
