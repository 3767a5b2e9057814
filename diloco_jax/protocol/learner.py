"""The learner's half of the protocol (paper, Alg. 1): report every step, answer pulls, adopt broadcasts, never wait.

Rules of this file
  * Inputs are `on_<event>` methods; each returns the effects that the driver executes in order. Nothing is buffered.
  * The machine never sees an array. It decides which fragment to copy (Stage), to send and to adopt.
  * `on_pull` changes nothing that a step depends on, so a driver may call it while a step runs (under its lock).
    Every other input belongs between two inner steps.
  * A learner that does not hold a global value of every fragment may not step: so a fresh start reports nothing, and
    nothing of it can be merged.

States:  joining -> training <-> waiting (lockstep only) ;  any -> stopped
"""

from __future__ import annotations

from typing import NamedTuple, assert_never

from diloco_jax.protocol.messages import (
    NO_VERSION,
    SYNCER,
    Adopt,
    Adopted,
    Advance,
    Drop,
    Effect,
    Finish,
    FragmentValue,
    GlobalFragment,
    Heartbeat,
    Hello,
    Leave,
    PullRequest,
    Refuse,
    Send,
    Stage,
    StepReport,
    Stop,
    SyncerMessage,
    Unstage,
    Welcome,
)
from diloco_jax.protocol.pacing import ProtocolConfig, Schedule

JOINING, TRAINING, WAITING, STOPPED = "joining", "training", "waiting", "stopped"
STAGED_STEPS_MAX = 3  # copies of one fragment: the grace window spans one step, the pull's way another


class StagedCopy(NamedTuple):
    local_step: int
    tokens: int
    adopted: Adopted  # of the fragment, when it was staged


class Learner:
    """State machine of one learner. See the rules above and docs/protocol.md."""

    def __init__(
        self, learner_id: str, incarnation: int, config: ProtocolConfig, fingerprint: tuple[tuple[str, str], ...]
    ) -> None:
        self.learner_id = learner_id
        self.incarnation = incarnation
        self.state = JOINING
        self.global_step = 0  # newest known; in lockstep the schedule's own count
        self.local_step = 0
        self.tokens = 0
        self.adopted: tuple[Adopted, ...] = (Adopted(),) * config.num_fragments
        self.payload_bytes: dict[int, int] = {}  # fragment -> size of its encoded value, told by the driver
        self._config = config
        self._schedule = Schedule(config.sync_every, config.num_fragments)
        self._fingerprint = fingerprint
        self._connected = False
        self._staged: dict[int, list[StagedCopy]] = {}
        self._wanted: dict[int, int] = {}  # fragment -> round that asked for it before any copy existed
        self._next_round = 1
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
        self._heard_s = now_s
        self._unheard_steps = 0
        self._resend_wait_s = self._config.resend_s
        self._heartbeat_at_s = now_s + self._config.heartbeat_s
        return [self._hello(now_s)]

    def on_disconnected(self, now_s: float) -> list[Effect]:
        """The link is gone; training goes on, pulls of the old link are void."""
        self._connected = False
        self._resend_at_s = self._heartbeat_at_s = None
        self._wanted.clear()
        if self.state == WAITING:
            return []  # no step will renew the copy, and the round may still ask for it on the next link
        return self._unstage_all()

    def leave(self, reason: str, now_s: float) -> list[Effect]:
        """Say goodbye and stop."""
        said: list[Effect] = [Send(SYNCER, Leave(self.learner_id, self.incarnation, reason))] if self._connected else []
        return [*said, *self._stop(reason)]

    def _hello(self, now_s: float) -> Send:
        # Every repetition waits longer: on a slow link the missing fragments are under way, not lost.
        self._resend_at_s = now_s + self._resend_wait_s
        self._hello_step = self.local_step
        self._resend_wait_s = min(2 * self._resend_wait_s, self._config.lease_s)
        versions = tuple(a.version for a in self.adopted)
        return Send(SYNCER, Hello(self.learner_id, self.incarnation, self._fingerprint, versions))

    # ---- stepping -----------------------------------------------------------------------------------------------

    def may_step(self) -> bool:
        """Whether the next inner step may start. Outside lockstep: always, once every fragment is held."""
        return self.state == TRAINING

    def on_step(self, num_tokens: int, step_s: float, loss: float, now_s: float) -> list[Effect]:
        """An inner step on `num_tokens` tokens has finished.

        Args:
            num_tokens: tokens in the step's batch.
            step_s: how long it took, in seconds.
            loss: its training loss.
            now_s: the driver's clock.
        """
        assert self.state == TRAINING, f"step in state {self.state}"
        self.local_step += 1
        self.tokens += num_tokens
        self._unheard_steps += 1
        if self._config.lockstep:
            self.global_step += 1
        effects: list[Effect] = []
        if self._connected or self._config.lockstep:
            self._stage_due(effects)
        self._report = report = StepReport(
            self.learner_id,
            self.incarnation,
            self.local_step,
            self.tokens,
            self.global_step,
            self.adopted,
            step_s,
            loss,
        )
        if self._connected:
            effects.append(Send(SYNCER, report))
            if self._wanted:
                self._answer_wanted(effects)
        if self._config.lockstep and self._schedule.due(self.global_step) >= 0:
            self._waits_for = self.global_step
            self.state = WAITING
            self._resend_at_s = now_s + self._resend_wait_s
        return effects

    def _stage_due(self, effects: list[Effect]) -> None:
        """Stage what the next rounds will ask for, and let go of what they will not."""
        if self._config.lockstep:
            fragments = self._schedule.due_within(self.global_step, 1)
        else:
            fragments = self._schedule.due_within(self._next_round, self._config.overlap_steps)
        for fragment_id in [p for p in self._staged if p not in fragments]:
            self._unstage(fragment_id, effects)
        for fragment_id in fragments:
            self._stage(fragment_id, effects)

    def _stage(self, fragment_id: int, effects: list[Effect]) -> None:
        copies = self._staged.setdefault(fragment_id, [])
        copies.append(StagedCopy(self.local_step, self.tokens, self.adopted[fragment_id]))
        effects.append(Stage(fragment_id, self.local_step))
        if len(copies) > STAGED_STEPS_MAX:
            effects.append(Unstage(fragment_id, copies.pop(0).local_step))

    def _unstage(self, fragment_id: int, effects: list[Effect]) -> None:
        for copy in self._staged.pop(fragment_id, ()):
            effects.append(Unstage(fragment_id, copy.local_step))

    def _unstage_all(self) -> list[Effect]:
        effects: list[Effect] = []
        for fragment_id in list(self._staged):
            self._unstage(fragment_id, effects)
        return effects

    def _answer_wanted(self, effects: list[Effect]) -> None:
        for fragment_id, global_step in sorted(self._wanted.items()):
            copies = self._staged.get(fragment_id)
            if not copies or copies[-1].local_step != self.local_step:
                self._stage(fragment_id, effects)
            effects.append(self._value(global_step, fragment_id, self._staged[fragment_id][-1]))
        self._wanted.clear()

    # ---- messages of the syncer ------------------------------------------------------------------------------------

    def on_message(self, message: SyncerMessage, now_s: float) -> list[Effect]:
        """Any message of the syncer."""
        if self.state == STOPPED:
            return []
        self._heard_s = now_s
        self._unheard_steps = 0
        match message:
            case GlobalFragment():
                return self.on_global(message, now_s)
            case PullRequest():
                return self.on_pull(message, now_s)
            case Advance():
                return self.on_advance(message, now_s)
            case Welcome():
                return self.on_welcome(message, now_s)
            case Refuse(reason):
                return self._stop(f"refused: {reason}")
            case Stop(global_step, reason):
                self._see(global_step)
                return self._stop(reason)
            case _:
                assert_never(message)

    def on_welcome(self, message: Welcome, now_s: float) -> list[Effect]:
        """Accepted; what is still missing follows as GlobalFragment."""
        self._see(message.global_step)
        if self.state == TRAINING:
            self._train()  # the hello of a reconnection is answered
        self._update_state()
        return []

    def on_advance(self, message: Advance, now_s: float) -> list[Effect]:
        """A global step closed without a new fragment; in lockstep that ends the wait for it."""
        self._see(message.global_step)
        if self.state == WAITING and message.global_step >= self._waits_for:
            self._train()
        return []

    def on_pull(self, message: PullRequest, now_s: float) -> list[Effect]:
        """Answer with the copy of the asked step, or the next newer one; without any, after the next step."""
        self._next_round = max(self._next_round, message.global_step + 1)
        fragment_id = message.fragment_id
        if not 0 <= fragment_id < len(self.adopted):
            return [Drop(SYNCER, f"pull of unknown fragment {fragment_id}, there are {len(self.adopted)}")]
        if message.global_step <= max(self.adopted[fragment_id].version, self._wanted.get(fragment_id, 0)):
            return []  # a duplicate, or of a round that is over
        for copy in self._staged.get(fragment_id, ()):
            if copy.local_step >= message.local_step:
                return [self._value(message.global_step, fragment_id, copy)]
        self._wanted[fragment_id] = message.global_step
        if len(self._wanted) > max(1, self._config.overlap_steps):  # more are never in flight: the oldest is over
            del self._wanted[min(self._wanted, key=self._wanted.__getitem__)]
        return []

    def _value(self, global_step: int, fragment_id: int, copy: StagedCopy) -> Send:
        value = FragmentValue(
            self.learner_id,
            self.incarnation,
            global_step,
            fragment_id,
            copy.local_step,
            copy.local_step - copy.adopted.local_step,
            copy.tokens - copy.adopted.tokens,
            copy.adopted.version,
            self.payload_bytes.get(fragment_id, 0),
        )
        return Send(SYNCER, value)

    def on_global(self, message: GlobalFragment, now_s: float) -> list[Effect]:
        """Adopt a newer global fragment: its counters begin again at the current local step."""
        self._see(message.global_step)
        fragment_id = message.fragment_id
        if not 0 <= fragment_id < len(self.adopted):
            return [Drop(SYNCER, f"unknown fragment {fragment_id}, there are {len(self.adopted)}")]
        if message.version <= self.adopted[fragment_id].version:
            return []  # a duplicate, or overtaken by a newer one
        adopted = list(self.adopted)
        adopted[fragment_id] = Adopted(message.version, self.local_step, self.tokens)
        self.adopted = tuple(adopted)
        self.global_step = max(self.global_step, message.version)
        effects: list[Effect] = [Adopt(fragment_id, message.version)]
        self._unstage(fragment_id, effects)
        if message.version >= self._wanted.get(fragment_id, 0):
            self._wanted.pop(fragment_id, None)
        if self.state == JOINING:  # progress: what is still missing is probably on its way
            self._resend_at_s = now_s + self._resend_wait_s
        self._update_state()
        return effects

    def _see(self, global_step: int) -> None:
        self._next_round = max(self._next_round, global_step + 1)
        if not self._config.lockstep or self.state == JOINING:
            self.global_step = max(self.global_step, global_step)

    def _update_state(self) -> None:
        if self.state == JOINING:
            ready = all(a.version != NO_VERSION for a in self.adopted)
        elif self.state == WAITING:
            ready = self.adopted[self._schedule.due(self._waits_for)].version >= self._waits_for
        else:
            ready = False
        if ready:
            self._train()

    def _train(self) -> None:
        self.state = TRAINING
        self._resend_at_s = None
        self._resend_wait_s = self._config.resend_s

    def _stop(self, reason: str) -> list[Effect]:
        self.state = STOPPED
        self._resend_at_s = self._heartbeat_at_s = None
        return [*self._unstage_all(), Finish(reason)]

    # ---- time -----------------------------------------------------------------------------------------------------

    def next_deadline_s(self) -> float | None:
        """When on_tick must be called next, or None."""
        if not self._connected:
            return None
        if self._resend_at_s is None or self._heartbeat_at_s is None:
            return self._heartbeat_at_s
        return min(self._resend_at_s, self._heartbeat_at_s)

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
        if self._heartbeat_at_s is not None and now_s >= self._heartbeat_at_s:
            silent = now_s - self._heard_s >= self._config.lease_s and self._unheard_steps >= 2
            if silent and self._resend_at_s is None:
                effects.append(self._hello(now_s))  # maybe it lost track of us: ask to be let in again
            self._heartbeat_at_s = now_s + self._config.heartbeat_s
            effects.append(Send(SYNCER, Heartbeat(self.learner_id, self.incarnation)))
        return effects
