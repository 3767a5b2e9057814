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
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, assert_never

from diloco_jax.protocol.effects import AdoptState, Drop, Effect, Finish, SaveState, Send
from diloco_jax.protocol.learner.heads import GAP, USEFUL, Heads
from diloco_jax.protocol.learner.stager import Stager
from diloco_jax.protocol.leases import Allotment, Batch
from diloco_jax.protocol.messages import (
    NO_VERSION,
    SYNCER,
    Advance,
    AnchorRequest,
    Expel,
    GlobalFragment,
    Heartbeat,
    Hello,
    Lease,
    Leave,
    PullRequest,
    Refuse,
    StateEnd,
    StatePart,
    StatePull,
    StateUnavailable,
    StepReport,
    Stop,
    SyncerMessage,
    Welcome,
)
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.recovery import Donor, Receiver

JOINING, RECOVERING, TRAINING = "joining", "recovering", "training"
WAITING, STOPPED = "waiting", "stopped"


class Saved(NamedTuple):
    """A state of this learner on disk, from an earlier life."""

    global_step: int
    digests: tuple[int, ...]  # of the global values that its parameters are based on: a version may come twice


class Learner(Stager):
    """State machine of one learner. See the rules above and docs/protocol.md.

    Args:
        learner_id: its name.
        incarnation: grows with every start.
        config: the numbers of the algorithm.
        fingerprint: what both sides must agree on.
        step_samples: samples in one inner step.
        saved: its own state on disk, if there is one.
        adopt_mode: what adopting a global value leaves of the work done since: see `Stager`.
        payload_bytes: fragment -> size of its encoded value; 0 where nothing is said.
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
    ) -> None:
        super().__init__(learner_id, incarnation, config, adopt_mode, payload_bytes)
        self.state = JOINING
        self._fingerprint = fingerprint
        self._step_samples = step_samples
        self._saved = saved
        self._allotment = Allotment(step_samples, config.lease_ahead_steps)
        self._receiver = Receiver(learner_id, incarnation, config)
        self._donor = Donor(learner_id, incarnation)
        self._heads = Heads()
        self._welcomed = False
        self.adopting = False  # a state is being taken over by the driver
        self._marker = 0  # snapshots that this learner has passed
        self._waits_for = 0  # lockstep: the round whose fragment must come back before the next step
        self._report: StepReport | None = None
        self._resend_at_s: float | None = None
        self._resend_wait_s = config.resend_s
        self._heard_s = 0.0  # when a message of the syncer was last taken, or the link came to stand
        self._unheard_steps = 0  # inner steps since then
        self._hello_step = 0  # local step of the newest greeting
        self._heartbeat_at_s: float | None = None

    # ---- connection ---------------------------------------------------------------------------------------------

    def on_connected(self, now_s: float) -> list[Effect]:
        """The link stands; introduce yourself."""
        if self.state == STOPPED:
            return []
        self._connected = True
        self._heard_s, self._unheard_steps = now_s, 0
        self._resend_wait_s = self._config.resend_s
        self._heartbeat_at_s = now_s + self._config.heartbeat_s
        return [self._hello(now_s), *self._receiver.on_connected(now_s)]

    def on_disconnected(self, now_s: float) -> list[Effect]:
        """The link is gone; training goes on, pulls of the old link are void."""
        self._connected = False
        self._resend_at_s = self._heartbeat_at_s = None
        self._wanted.clear()
        effects = self._donor.forget_all()
        if self.state == WAITING:
            return effects  # no step will renew the copy, and the round may still ask for it on the next link
        return effects + self._unstage_all()

    def leave(self, reason: str, now_s: float) -> list[Effect]:
        """Say goodbye and stop."""
        said: list[Effect] = [Send(SYNCER, Leave(self.learner_id, self.incarnation, reason))] if self._connected else []
        return [*said, *self._stop(reason)]

    def wants(self, message: GlobalFragment, now_s: float) -> bool:
        """Whether a global fragment that has arrived is of use: read it, then call `on_read` or `on_corrupt`."""
        verdict = self._heads.judge(message)
        if verdict == GAP:
            self.on_corrupt(now_s)
        return verdict == USEFUL

    def on_read(self, message: GlobalFragment, now_s: float) -> None:
        """Its value is there, with the right digest: later steps apply to it, adopted or not."""
        self._heads.move(message, now_s)

    def on_corrupt(self, now_s: float) -> None:
        """A fragment arrived damaged, or led to another digest. Ask later, and once: the answer may be damaged too."""
        if self._connected and self.state != STOPPED and self._resend_at_s is None:
            self._resend_at_s = now_s + self._resend_wait_s

    def _hello(self, now_s: float) -> Send:
        self._resend_at_s = now_s + self._resend_wait_s
        self._hello_step = self.local_step
        self._resend_wait_s = min(2 * self._resend_wait_s, self._config.lease_s)  # it may be slow, and not lost
        versions, digests = tuple(a.version for a in self.adopted), tuple(self.digests)
        who = (self.learner_id, self.incarnation, self._fingerprint)
        return Send(SYNCER, Hello(*who, versions, digests, self.epoch, self._step_samples, self._allotment.granted))

    # ---- stepping -----------------------------------------------------------------------------------------------

    def may_step(self) -> bool:
        """Whether the next inner step may start. Outside lockstep: always, once every fragment is held."""
        return self.state == TRAINING

    def take_batch(self) -> Batch:
        """What the next step reads. Once per step; a driver may read one step ahead."""
        return self._allotment.take()

    def on_step(self, num_tokens: int, step_s: float, loss: float, now_s: float, *, samples_end: int) -> list[Effect]:
        """An inner step on `num_tokens` tokens has finished.

        Args:
            num_tokens: tokens in the step's batch.
            step_s: how long it took, in seconds.
            loss: its training loss.
            now_s: the driver's clock.
            samples_end: `end` of the batch that it read.
        """
        assert self.state == TRAINING, f"step in state {self.state}"
        self.local_step += 1
        self.tokens += num_tokens
        self.samples = samples_end
        self._unheard_steps += 1
        if self._lockstep:
            self.global_step += 1
        effects: list[Effect] = []
        if self._connected or self._lockstep:
            self._stage_due(effects)
        told = (self.local_step, self.tokens, self.global_step, self.adopted, step_s, loss, samples_end)
        leased, arrived = self._allotment.granted, self._heads.arrived(now_s)
        self._report = report = StepReport(self.learner_id, self.incarnation, *told, leased, arrived)
        if self._connected:
            effects.append(Send(SYNCER, report))
            if self._wanted:
                self._answer_wanted(effects)
        if self._lockstep and self._schedule.due(self.global_step) >= 0:
            self._waits_for = self.global_step
            self.state = WAITING
            self._resend_at_s = now_s + self._resend_wait_s
        every = self._config.snapshot_every
        if every and self.global_step // every > self._marker:
            self._marker = self.global_step // every
            effects.append(SaveState(self.global_step))
        self._serve(effects)
        return effects

    def _serve(self, effects: list[Effect]) -> None:
        """Copy the state for those who wait for it; between two steps only."""
        if self._donor.waiting and self.local_step > 0 and self.state in (TRAINING, WAITING):
            effects += self._donor.serve(self.global_step, self.local_step, tuple(a.version for a in self.adopted))

    # ---- messages of the syncer ------------------------------------------------------------------------------------

    def on_message(self, message: SyncerMessage, now_s: float) -> list[Effect]:
        """Any message of the syncer."""
        if self.state == STOPPED:
            return []
        self._heard_s, self._unheard_steps = now_s, 0
        effects = self._take(message, now_s)
        self._serve(effects)
        return effects

    def _take(self, message: SyncerMessage, now_s: float) -> list[Effect]:
        match message:
            case GlobalFragment():
                return self.on_global(message, now_s)
            case PullRequest():
                return self.on_pull(message, now_s)
            case Advance():
                return self.on_advance(message, now_s)
            case Lease():
                self._allotment.add(message)
                return self._update_state(now_s)
            case Welcome():
                return self.on_welcome(message, now_s)
            case AnchorRequest():
                return self.on_anchor_request(message, now_s)
            case StatePull():
                return self.on_state_pull(message, now_s)
            case StateEnd(receiver):
                return self._donor.on_end(receiver)
            case StatePart() | StateUnavailable():
                return self._recover(message, now_s)
            case Refuse(reason):
                return self._stop(f"refused: {reason}")
            case Expel(reason):
                return self._stop(f"expelled: {reason}")
            case Stop(global_step, reason):
                self._see(global_step)
                return self.leave(reason, now_s)
            case _:
                assert_never(message)

    def on_welcome(self, message: Welcome, now_s: float) -> list[Effect]:
        """Accepted; what is still missing follows as GlobalFragment. A run under way has states to give."""
        self._see(message.global_step)
        self.epoch = max(self.epoch, message.epoch)
        if self.state in (RECOVERING, TRAINING):  # the hello of a reconnection is answered
            self._resend_at_s, self._resend_wait_s = None, self._config.resend_s
        effects: list[Effect] = []
        if not self._welcomed:
            self._welcomed = True
            if self._saved is not None and abs(self._saved.global_step - message.global_step) > self._config.sync_every:
                self._saved = None  # too old to be better than the others' states
            if self._saved is None and message.global_step > 0 and self._config.recover_from_peers:
                effects += self._receiver.begin(message.global_step, now_s)
        return effects + self._update_state(now_s)

    def _recover(self, message: StatePart | StateUnavailable, now_s: float) -> list[Effect]:
        if isinstance(message, StatePart):
            effects = self._receiver.on_part(message, self.global_step, now_s)
        else:
            effects = self._receiver.on_unavailable(message, self.global_step, now_s)
        return effects + self._update_state(now_s)

    def on_state_adopted(self, ok: bool, now_s: float) -> list[Effect]:
        """The driver has taken a state over, or could not use it."""
        self.adopting = False
        own, self._saved = self._saved is not None, None
        effects: list[Effect] = []
        if not own:
            effects += self._receiver.adopted() if ok else self._receiver.failed(self.global_step, now_s)
        elif not ok and self._config.recover_from_peers:
            effects += self._receiver.begin(self.global_step, now_s)
        return effects + self._update_state(now_s)

    def on_state_pull(self, message: StatePull, now_s: float) -> list[Effect]:
        """Somebody needs a state: give what is copied already, or copy one between two steps."""
        again = message.receiver in self._donor.waiting
        effects = self._donor.on_pull(message)
        if again and message.clock > self.global_step and self._connected:
            effects.append(self._hello(now_s))  # the broadcast that it waits for was lost on its way here
        if self.state == WAITING:
            self._serve(effects)
        return effects

    def on_advance(self, message: Advance, now_s: float) -> list[Effect]:
        """A global step closed without a new fragment; in lockstep that ends the wait for it."""
        self._see(message.global_step)
        if self.state == WAITING and message.global_step >= self._waits_for:
            self._train()
        return []

    def on_global(self, message: GlobalFragment, now_s: float) -> list[Effect]:
        """Adopt a newer global fragment: its counters begin again at the current local step."""
        self._see(message.global_step)
        fragment_id, version, epoch = message.fragment_id, message.version, message.epoch
        if not 0 <= fragment_id < len(self.adopted):
            return [Drop(SYNCER, f"unknown fragment {fragment_id}, there are {len(self.adopted)}")]
        held = self.adopted[fragment_id].version
        if (epoch, version) <= (self._epochs[fragment_id], held):
            return []  # a duplicate, or overtaken by a newer one
        if version == held and message.digest == self.digests[fragment_id]:
            return []  # a duplicate from a later life of the syncer
        effects = self._adopt(message)
        if self.state == JOINING and held == NO_VERSION:  # progress: what else is missing is probably on its way
            self._resend_at_s = now_s + self._resend_wait_s
        return effects if self.state == TRAINING else effects + self._update_state(now_s)

    def _see(self, global_step: int) -> None:
        if global_step >= self._next_round:
            self._next_round = global_step + 1
        if global_step > self.global_step and (not self._lockstep or self.state in (JOINING, RECOVERING)):
            self.global_step = global_step

    def _update_state(self, now_s: float) -> list[Effect]:
        """Begin to train when nothing is missing any more."""
        if self.state == WAITING:
            if self.adopted[self._schedule.due(self._waits_for)].version >= self._waits_for:
                self._train()
        elif self.state in (JOINING, RECOVERING):
            held = [a.version for a in self.adopted]
            if not self._welcomed or NO_VERSION in held or not self._allotment.ready:
                return []
            if self.state == JOINING:
                self.state, self._resend_at_s = RECOVERING, None
            if self.adopting:
                return []
            if self._saved is not None:
                self.adopting = True
                same = tuple(p for p, digest in enumerate(self._saved.digests) if digest == self.digests[p])
                return [AdoptState("", self._saved.global_step, same)]
            effects = self._receiver.adopt(held, self.global_step, now_s)
            self.adopting = any(isinstance(effect, AdoptState) for effect in effects)
            if self._receiver.over:
                self._marker = self.global_step // max(1, self._config.snapshot_every)
                self._train()
            return effects
        return []

    def _train(self) -> None:
        self.state = TRAINING
        self._resend_at_s = None
        self._resend_wait_s = self._config.resend_s

    def _stop(self, reason: str) -> list[Effect]:
        self.state = STOPPED
        self._receiver.give_up()
        self._resend_at_s = self._heartbeat_at_s = None
        return [*self._unstage_all(), *self._donor.forget_all(), Finish(reason)]

    # ---- time -----------------------------------------------------------------------------------------------------

    def next_deadline_s(self) -> float | None:
        """When on_tick must be called next, or None."""
        if not self._connected:
            return None
        deadline_s, repeat_s = self._heartbeat_at_s, self._receiver.resend_s
        if self._resend_at_s is not None and (deadline_s is None or self._resend_at_s < deadline_s):
            deadline_s = self._resend_at_s
        if repeat_s is not None and (deadline_s is None or repeat_s < deadline_s):
            deadline_s = repeat_s
        return deadline_s

    def on_tick(self, now_s: float) -> list[Effect]:
        """Repeat an unanswered hello (and, in lockstep, the report that the round waits for); beat the heart."""
        effects: list[Effect] = []
        if not self._connected or self.state == STOPPED:
            return effects
        if self._resend_at_s is not None and now_s >= self._resend_at_s:
            if self.state == TRAINING and self._hello_step == self.local_step:
                self._resend_at_s = now_s + self._resend_wait_s  # the answer may wait for the end of the step
            else:
                effects.append(self._hello(now_s))
            if self.state == WAITING and self._report is not None:
                effects.append(Send(SYNCER, self._report))
        effects += self._receiver.on_tick(self.global_step, now_s)
        effects += self._update_state(now_s)  # the last attempt to get a state may have failed just now
        if self._heartbeat_at_s is not None and now_s >= self._heartbeat_at_s:
            unheard = self._unheard_steps >= 2 or self.state == RECOVERING
            silent = now_s - self._heard_s >= self._config.lease_s and unheard
            if silent and self._resend_at_s is None:
                effects.append(self._hello(now_s))  # maybe it lost track of us: ask to be let in again
            self._heartbeat_at_s = now_s + self._config.heartbeat_s
            effects.append(Send(SYNCER, Heartbeat(self.learner_id, self.incarnation)))
        return effects
