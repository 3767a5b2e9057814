"""Start of a learner: with its saved state, with the state of a healthy peer, or from the global model alone.

The state of a peer travels through the syncer (paper, App. E.3):

    receiver                     syncer                        donor
    StateRequest(clock)  ----->  chooses a donor
                                 StatePull(clock)  --------->  waits until it has seen `clock` itself, then copies its
                                                               inner optimizer state between two steps
    KeepChunk  <----------------  forwards   <----------------  StateChunk 0
    StateRequest(1, 2, ...)      ...                           a window of parts is in transit at a time
    AdoptState; StateDone  --->  StateEnd  ----------------->  frees the copy

The receiver requests each part, so it sets the pace, a broken link resumes where it stopped, and no process buffers
more than a window. Broadcasts continue meanwhile: the receiver's parameters are the newest global values, and only the
moments are the donor's. The receiver makes no step before it has them.

The transfer may take recovery_turns times sync_every global steps. If it takes longer, if too many parts arrive
damaged, or if the donor is lost, another attempt starts, each after a longer wait. Without a donor, or after the last
attempt, the learner starts from the global model alone.

Start, Receiver and Donor are parts of a learner's machine. The syncer's part is Matchmaker (syncer/matchmaker.py).
"""

from collections.abc import Sequence
from typing import NamedTuple

from diloco_jax.protocol.bounds import PARTS_MAX
from diloco_jax.protocol.effects import (
    AdoptState,
    Drop,
    DropChunks,
    Effects,
    KeepChunk,
    Send,
    StageState,
    UnstageState,
)
from diloco_jax.protocol.messages import (
    SYNCER,
    StateChunk,
    StateDone,
    StatePull,
    StateRefused,
    StateRequest,
    StateUnavailable,
)
from diloco_jax.protocol.pacing import ProtocolConfig

# The least and the most parts of a state that a receiver requests at a time. It requests more while a part takes less
# than PART_S: on a long and fast link the number limits the rate. On a narrow link the donor's own values wait behind
# the parts: with 16 parts a run merged nothing for 20 s (docs/log.md, 2026-11-27).
PARTS_IN_FLIGHT_MIN, PARTS_IN_FLIGHT_MAX = 4, 64
PART_S = 1.0
# A receiver waits for this many times the longest wait so far before it repeats a request. A part that a narrow link
# still carries is then not requested twice. The second number limits the wait, in multiples of silence_s; a learner
# waits as long at most for a value that it lacks while other payloads arrive.
PATIENCE = 2.0
PATIENCE_SILENCES = 4.0
# Parts that may arrive damaged in an attempt, and are requested again. If the run waits for the receiver, global steps
# do not limit the attempt.
DAMAGED_MAX = 16
# Copies that a donor keeps at a time.
STATES_MAX = 2


class Saved(NamedTuple):
    """A learner's state on its own disk, from an earlier incarnation."""

    global_step: int
    # Digests of the global values under its parameters. A version number alone is not enough: after the syncer went
    # back to a snapshot, the same number names another value.
    digests: tuple[int, ...]
    # Id of its run; "" if an older release saved it.
    run: str = ""

    def is_of_other(self, run: str) -> bool:
        """Return whether the state is of another run than the one with this id; False if one of the ids is unknown."""
        return bool(self.run and run) and self.run != run


class Start:
    """The source of a learner's first state, and how much of the state is there."""

    def __init__(
        self, effects: Effects, learner_id: str, incarnation: int, config: ProtocolConfig, saved: Saved | None
    ) -> None:
        # Whether the syncer has accepted the learner.
        self.welcomed = False
        # Whether the driver is loading a state now.
        self.adopting = False
        self.receiver = Receiver(effects, learner_id, incarnation, config)
        self._effects = effects
        self._config = config
        self._saved = saved

    @property
    def over(self) -> bool:
        """True once no state is expected any more, so that the first step may start."""
        return self._saved is None and not self.adopting and self.receiver.over

    def on_welcome(self, global_step: int, now_s: float, run: str = "") -> None:
        """Choose the source of the state when the first welcome arrives; a run under way has states to give."""
        if self.welcomed:
            return
        self.welcomed = True
        saved, age_max = self._saved, self._config.own_state_age_max
        # A state on disk may be of another run in the same folder, or too old to be better than a peer's.
        if saved is not None and (saved.is_of_other(run) or abs(saved.global_step - global_step) > age_max):
            self._saved = None
        if self._saved is None and global_step > 0 and self._config.recover_from_peers:
            self.receiver.begin(global_step, now_s)

    def load(self, digests: Sequence[int], global_step: int, now_s: float) -> None:
        """Load the state, if it is there; the global values of all fragments are.

        Args:
            digests: digest of each fragment's global value, as the learner holds it.
        """
        if self.adopting:
            return
        if self._saved is not None:
            self.adopting = True
            same = tuple(p for p, digest in enumerate(self._saved.digests) if digest == digests[p])
            self._effects.append(AdoptState("", self._saved.global_step, same))
            return
        self.receiver.adopt(global_step, now_s)
        self.adopting = self.receiver.ready

    def on_adopted(self, ok: bool, global_step: int, now_s: float) -> None:
        """Record that the driver has loaded a state, or could not use it."""
        self.adopting = False
        own, self._saved = self._saved is not None, None
        if not own:
            if ok:
                self.receiver.adopted()
            else:
                self.receiver.failed(global_step, now_s)
        elif not ok and self._config.recover_from_peers:
            self.receiver.begin(global_step, now_s)


class Receiver:
    """A joining learner's side of the transfer of a peer's state."""

    def __init__(self, effects: Effects, learner_id: str, incarnation: int, config: ProtocolConfig) -> None:
        self._effects = effects
        self._who = (learner_id, incarnation)
        self._config = config
        # True if no state is wanted, or none can be had.
        self.over = True
        # True if every part is kept.
        self.complete = False
        self.donor = ""
        self.donor_step = 0
        self.resend_s: float | None = None
        self._clock = 0
        self._count = 0
        self._kept: set[int] = set()
        self._donor_incarnation = 0
        # Parts requested so far, and when each part that has not arrived was requested last.
        self._asked = 0
        self._asked_s: dict[int, float] = {}
        self._in_flight = PARTS_IN_FLIGHT_MIN
        self._damaged = 0
        self._attempts = 0
        self._resend_wait_s = config.resend_s
        # When the newest part arrived, or the first one was requested.
        self._heard_s = 0.0
        # The longest time between two parts.
        self._longest_s = 0.0

    @property
    def ready(self) -> bool:
        """True while a complete state waits to be loaded."""
        return self.complete and not self.over

    def begin(self, clock: int, now_s: float) -> None:
        """Request a state of a donor that has seen global step `clock`."""
        self.over = False
        self._ask_anybody(clock, now_s)

    def _ask_anybody(self, clock: int, now_s: float) -> None:
        self._forget()
        self._clock, self._asked, self._heard_s = clock, 1, now_s
        self._wait(now_s)
        self._request(0, now_s)

    def _forget(self) -> None:
        if self._kept:
            self._effects.append(DropChunks())
        self.donor, self.donor_step = "", 0
        self._count, self._asked, self._kept, self.complete = 0, 0, set(), False
        self._asked_s, self._in_flight, self._damaged = {}, PARTS_IN_FLIGHT_MIN, 0

    def _request(self, index: int, now_s: float) -> None:
        self._asked_s[index] = now_s
        request = StateRequest(*self._who, self._clock, self.donor, self.donor_step, index)
        self._effects.append(Send(SYNCER, request))

    def _wait(self, now_s: float) -> None:
        self.resend_s = now_s + self._resend_wait_s

    def on_part(self, message: StateChunk, clock: int, now_s: float) -> None:
        """Keep a part that arrived, and request the parts after it."""
        if self.over or self.complete or self._asked == 0 or message.receiver != self._who[0]:
            return
        if not 1 <= message.parts <= PARTS_MAX or not 0 <= message.part < message.parts:
            self._effects.append(Drop(SYNCER, f"part {message.part} of {message.parts} of a state is impossible"))
            return
        if message.clock < self._clock:
            # The part belongs to an attempt that was given up.
            return
        if not self.donor and message.part == 0:
            self.donor, self.donor_step = message.learner_id, message.local_step
            self._donor_incarnation, self._count = message.incarnation, message.parts
        wanted = (self.donor, self._donor_incarnation, self.donor_step, self._count)
        if (message.learner_id, message.incarnation, message.local_step, message.parts) != wanted:
            # The part belongs to a state that was given up.
            return
        if message.part in self._kept or message.part >= self._asked:
            return
        if clock - self._clock > self._config.transfer_steps_max:
            self._abandon(clock, now_s)
            return
        self._kept.add(message.part)
        more = 1 if now_s - self._asked_s.pop(message.part) < PART_S else -1
        self._in_flight = min(max(self._in_flight + more, PARTS_IN_FLIGHT_MIN), PARTS_IN_FLIGHT_MAX)
        self._longest_s, self._heard_s = max(self._longest_s, now_s - self._heard_s), now_s
        patience_s = min(PATIENCE * self._longest_s, PATIENCE_SILENCES * self._config.silence_s)
        self._resend_wait_s = max(self._config.resend_s, patience_s)
        self._wait(now_s)
        self._effects.append(KeepChunk(message.part, message.parts))
        while self._asked < min(self._count, len(self._kept) + self._in_flight):
            self._request(self._asked, now_s)
            self._asked += 1
        if len(self._kept) == self._count:
            self.complete, self.resend_s = True, None

    def on_damaged(self, message: StateChunk, clock: int, now_s: float) -> None:
        """Count a part that arrived damaged, and is requested again like a lost one; too many end the attempt."""
        if self.over or self.complete or self._asked == 0 or message.receiver != self._who[0]:
            return
        if message.clock < self._clock or self.donor not in ("", message.learner_id):
            # The part belongs to an attempt that was given up.
            return
        self._damaged += 1
        if self._damaged > DAMAGED_MAX:
            self._abandon(clock, now_s)

    def on_unavailable(self, message: StateUnavailable, clock: int, now_s: float) -> None:
        """Try again, or give up if no learner can give a state."""
        if self.over or self.complete or message.donor not in ("", self.donor or message.donor):
            return
        if not message.donor:
            self.give_up()
            return
        # The most likely reason of a first failure is that the donor was lost, and other donors are ready.
        self._again(clock, now_s, at_once=self._attempts == 0)

    def _again(self, clock: int, now_s: float, *, at_once: bool = False) -> None:
        """Start another attempt, unless the failed one was the last."""
        self._attempts += 1
        if self._attempts >= self._config.recovery_attempts:
            self.give_up()
            return
        self._resend_wait_s = min(self._config.resend_s * 2 ** (self._attempts - 1), self._config.silence_s)
        if at_once:
            self._ask_anybody(clock, now_s)
            return
        self._forget()
        self._wait(now_s)

    def _abandon(self, clock: int, now_s: float) -> None:
        """End an attempt that took too long, or whose state is not usable; the donor may free its copy."""
        if self.donor:
            self._effects.append(Send(SYNCER, StateDone(*self._who, "")))
        self._again(clock, now_s)

    def give_up(self) -> None:
        """Start without a state."""
        if self._kept:
            self._effects.append(DropChunks())
        self.stop()

    def stop(self) -> None:
        """Request nothing more."""
        self.over, self.resend_s, self._kept = True, None, set()

    def adopted(self) -> None:
        """Report that a complete state was loaded."""
        self.over, self._kept = True, set()
        self._effects.append(Send(SYNCER, StateDone(*self._who, self.donor)))

    def failed(self, clock: int, now_s: float) -> None:
        """Abandon a complete state that turned out to be unusable."""
        self._kept = set()
        self._abandon(clock, now_s)

    def on_connected(self, now_s: float) -> None:
        """Resume where the link broke."""
        self._heard_s = now_s
        if not (self.over or self.complete):
            self._repeat(now_s)

    def on_tick(self, clock: int, now_s: float) -> None:
        """Repeat requests without an answer; start another attempt when the transfer takes too long."""
        if self.resend_s is None or now_s < self.resend_s:
            return
        if self._asked == 0:
            # The wait before another attempt is over.
            self._ask_anybody(clock, now_s)
            return
        if clock - self._clock > self._config.transfer_steps_max:
            self._abandon(clock, now_s)
            return
        self._resend_wait_s = max(self._resend_wait_s, min(2 * self._resend_wait_s, self._config.silence_s))
        self._repeat(now_s)

    def on_receiving(self, clock: int, now_s: float) -> None:
        """Wait longer for requested parts while a payload arrives, unless the transfer takes too long already."""
        if self.resend_s is not None and self._asked and clock - self._clock <= self._config.transfer_steps_max:
            self._wait(now_s)

    def _repeat(self, now_s: float) -> None:
        # The clock stays the same. With a newer one the donor would copy its state again, and the part in transit
        # would be void.
        self._wait(now_s)
        for index in range(self._asked):
            if index not in self._kept:
                self._request(index, now_s)

    def adopt(self, clock: int, now_s: float) -> None:
        """Load a complete state, if it is recent; the parameters are the syncer's."""
        if not self.ready:
            return
        if clock - self._clock > self._config.transfer_steps_max:
            # The global model took longer to arrive than the state.
            self._abandon(clock, now_s)
            return
        self._effects.append(AdoptState(self.donor, self.donor_step, ()))


class Donor:
    """A healthy learner's side of the transfer of its state to peers."""

    def __init__(self, effects: Effects, learner_id: str, incarnation: int, *, gives: bool = True) -> None:
        self._effects = effects
        self._who = (learner_id, incarnation)
        # False in a run whose states stay at their islands.
        self._gives = gives
        # Local step of each state in CPU memory -> the clock of its copy.
        self._copies: dict[int, int] = {}
        # Receiver -> local step of its copy.
        self._given: dict[str, int] = {}
        # Receiver -> clock that this learner must see first.
        self.waiting: dict[str, int] = {}

    def on_pull(self, message: StatePull) -> None:
        """Send a part of an existing copy, or remember that one is wanted; no running step depends on either."""
        receiver = message.receiver
        if not self._gives:
            self._refuse(receiver, "states stay at their islands (protocol.recover_from_peers is false)")
            return
        step = self._given.get(receiver)
        if message.donor_step:
            if step != message.donor_step:
                self._refuse(receiver, f"no state of step {message.donor_step}")
            else:
                self._part(receiver, step, message.part)
        elif step is not None and self._copies[step] >= message.clock:
            # The first part of this copy was lost.
            self._part(receiver, step, 0)
        else:
            self.waiting[receiver] = message.clock

    def serve(self, clock: int, local_step: int) -> None:
        """Copy the state for the waiting receivers whose clock has been seen; only between two steps."""
        # A copy may have been made earlier between the same two steps.
        seen = self._copies.get(local_step, clock)
        for receiver in sorted(r for r, wanted in self.waiting.items() if wanted <= seen):
            del self.waiting[receiver]
            self._forget(receiver)
            if local_step not in self._copies:
                if len(self._copies) >= STATES_MAX:
                    self._refuse(receiver, f"{STATES_MAX} states are being given already")
                    continue
                self._copies[local_step] = clock
                self._effects.append(StageState(local_step))
            self._given[receiver] = local_step
            self._part(receiver, local_step, 0)

    def _refuse(self, receiver: str, reason: str) -> None:
        self._effects.append(Send(SYNCER, StateRefused(*self._who, receiver, reason)))

    def on_unusable(self, receiver: str, reason: str) -> None:
        """Free a receiver's copy, because it cannot be used; the receiver gets the state of another donor."""
        if receiver in self._given:
            self._forget(receiver)
            self._refuse(receiver, reason)

    def _part(self, receiver: str, local_step: int, index: int) -> None:
        # The driver fills in count, digest and size: only it has the bytes.
        part = StateChunk(*self._who, receiver, local_step, index, 0, 0, 0, self._copies[local_step])
        self._effects.append(Send(SYNCER, part))

    def on_end(self, receiver: str) -> None:
        """Free the copy of a receiver that needs no more of it."""
        self.waiting.pop(receiver, None)
        self._forget(receiver)

    def _forget(self, receiver: str) -> None:
        step = self._given.pop(receiver, None)
        if step is not None and step not in self._given.values():
            del self._copies[step]
            self._effects.append(UnstageState(step))

    def forget_all(self) -> None:
        """Free all copies when the link is lost: the syncer sends the receivers to other donors."""
        self.waiting.clear()
        self._given.clear()
        self._effects.extend([UnstageState(step) for step in self._copies])
        self._copies.clear()
