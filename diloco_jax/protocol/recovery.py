"""The way of a healthy learner's state to one that joins late (paper, App. E.3), relayed by the syncer.

    receiver                     syncer                        donor
    StateRequest(clock)  ----->  chooses a donor
                                 StatePull(clock)  --------->  waits until it has seen `clock` itself, then copies its
                                                               inner optimizer state between two steps
    KeepPart  <----------------  passes on  <----------------  StatePart 0
    StateRequest(1, 2, ...)      ...                           a window of parts is on its way at a time
    AdoptState; StateDone  --->  StateEnd  ----------------->  frees the copy

Parts are asked for one by one, so the receiver sets the pace, a broken link resumes where it was, and nobody buffers
more than a window. Broadcasts go on meanwhile: the receiver's parameters are the newest global values, of the donor it
takes the moments alone. It makes no step before it has them.

The transfer may take recovery_turns times sync_every global steps; then, and when its donor is lost, another attempt
begins, each after a longer wait. Without a donor, or after the last attempt, the learner goes on from the syncer alone.

Receiver and Donor are parts of a learner's machine, Matchmaker is one of the syncer's.
"""

from collections.abc import Container
from typing import Any

from diloco_jax.protocol.bounds import PARTS_MAX
from diloco_jax.protocol.effects import (
    AdoptState,
    Drop,
    DropParts,
    Effect,
    KeepPart,
    Note,
    Send,
    StageState,
    UnstageState,
)
from diloco_jax.protocol.member import ACTIVE, GONE, JOINING, Member
from diloco_jax.protocol.membership import Membership
from diloco_jax.protocol.messages import (
    SYNCER,
    StateDone,
    StateEnd,
    StatePart,
    StatePull,
    StateRefused,
    StateRequest,
    StateUnavailable,
)
from diloco_jax.protocol.pacing import ProtocolConfig

PARTS_IN_FLIGHT = 4
PATIENCE = 2.0  # times the longest wait for a part so far: what a narrow link still carries is not asked for twice
PATIENCE_LEASES = 4.0  # at most so many leases
STATES_MAX = 2  # copies that a donor keeps at a time
# Failed donors that are remembered for one receiver.
AVOIDED_MAX = 64


class Receiver:
    """A joining learner's side."""

    def __init__(self, learner_id: str, incarnation: int, config: ProtocolConfig) -> None:
        self._who = (learner_id, incarnation)
        self._config = config
        self.over = True  # nothing is wanted, or nothing can be had
        self.complete = False  # every part is kept
        self.donor = ""
        self.donor_step = 0
        self.resend_s: float | None = None
        self._clock = 0
        self._count = 0
        self._kept: set[int] = set()
        self._incarnation = 0  # of the donor
        self._asked = 0  # parts asked for so far
        self._attempts = 0
        self._resend_wait_s = config.resend_s
        self._heard_s = 0.0  # when a part came, or the first one was asked for
        self._longest_s = 0.0  # between two parts

    def begin(self, clock: int, now_s: float) -> list[Effect]:
        """Ask for a state of a donor that has seen `clock`."""
        self.over = False
        return self._ask_anybody(clock, now_s)

    def _ask_anybody(self, clock: int, now_s: float) -> list[Effect]:
        effects = self._forget()
        self._clock, self._asked, self._heard_s = clock, 1, now_s
        self._wait(now_s)
        return [*effects, self._request(0)]

    def _forget(self) -> list[Effect]:
        effects: list[Effect] = [DropParts()] if self._kept else []
        self.donor, self.donor_step = "", 0
        self._count, self._asked, self._kept, self.complete = 0, 0, set(), False
        return effects

    def _request(self, index: int) -> Send:
        return Send(SYNCER, StateRequest(*self._who, self._clock, self.donor, self.donor_step, index))

    def _wait(self, now_s: float) -> None:
        self.resend_s = now_s + self._resend_wait_s

    def on_part(self, message: StatePart, clock: int, now_s: float) -> list[Effect]:
        """A part came: keep it, and ask for what follows."""
        if self.over or self.complete or self._asked == 0 or message.receiver != self._who[0]:
            return []
        if not 1 <= message.parts <= PARTS_MAX or not 0 <= message.part < message.parts:
            return [Drop(SYNCER, f"part {message.part} of {message.parts} of a state is impossible")]
        if message.clock < self._clock:
            return []  # of an attempt that was given up
        if not self.donor and message.part == 0:
            self.donor, self.donor_step = message.learner_id, message.local_step
            self._incarnation, self._count = message.incarnation, message.parts
        wanted = (self.donor, self._incarnation, self.donor_step, self._count)
        if (message.learner_id, message.incarnation, message.local_step, message.parts) != wanted:
            return []  # of a state that was given up
        if message.part in self._kept or message.part >= self._asked:
            return []
        if clock - self._clock > self._config.transfer_steps_max:
            return self._abandon(clock, now_s)
        self._kept.add(message.part)
        self._longest_s, self._heard_s = max(self._longest_s, now_s - self._heard_s), now_s
        patience_s = min(PATIENCE * self._longest_s, PATIENCE_LEASES * self._config.lease_s)
        self._resend_wait_s = max(self._config.resend_s, patience_s)
        self._wait(now_s)
        effects: list[Effect] = [KeepPart(message.part, message.parts)]
        while self._asked < min(self._count, len(self._kept) + PARTS_IN_FLIGHT):
            effects.append(self._request(self._asked))
            self._asked += 1
        if len(self._kept) == self._count:
            self.complete, self.resend_s = True, None
        return effects

    def on_unavailable(self, message: StateUnavailable, clock: int, now_s: float) -> list[Effect]:
        """Nobody can give a state, or this donor cannot any more."""
        if self.over or self.complete or message.donor not in ("", self.donor or message.donor):
            return []
        if not message.donor:
            return self.give_up()
        return self._again(clock, now_s, at_once=self._attempts == 0)  # most likely its donor died: others are ready

    def _again(self, clock: int, now_s: float, *, at_once: bool = False) -> list[Effect]:
        """Another attempt, unless that was the last."""
        self._attempts += 1
        if self._attempts >= self._config.recovery_attempts:
            return self.give_up()
        self._resend_wait_s = min(self._config.resend_s * 2 ** (self._attempts - 1), self._config.lease_s)
        if at_once:
            return self._ask_anybody(clock, now_s)
        effects = self._forget()
        self._wait(now_s)
        return effects

    def _abandon(self, clock: int, now_s: float) -> list[Effect]:
        """It took too long, or cannot be used: the donor may free it."""
        done: list[Effect] = [Send(SYNCER, StateDone(*self._who, ""))] if self.donor else []
        return done + self._again(clock, now_s)

    def give_up(self) -> list[Effect]:
        """Go on without a state."""
        effects: list[Effect] = [DropParts()] if self._kept else []
        self.over, self.resend_s, self._kept = True, None, set()
        return effects

    def adopted(self) -> list[Effect]:
        """A complete state was taken over."""
        self.over, self._kept = True, set()
        return [Send(SYNCER, StateDone(*self._who, self.donor))]

    def failed(self, clock: int, now_s: float) -> list[Effect]:
        """A complete state turned out to be unusable."""
        self._kept = set()
        return self._abandon(clock, now_s)

    def on_connected(self, now_s: float) -> list[Effect]:
        """The link is back: go on where it broke."""
        self._heard_s = now_s
        return [] if self.over or self.complete else self._repeat(now_s)

    def on_tick(self, clock: int, now_s: float) -> list[Effect]:
        """Ask again for what does not come; begin again when it takes too long."""
        if self.resend_s is None or now_s < self.resend_s:
            return []
        if self._asked == 0:  # the wait before another attempt is over
            return self._ask_anybody(clock, now_s)
        if clock - self._clock > self._config.transfer_steps_max:
            return self._abandon(clock, now_s)
        self._resend_wait_s = max(self._resend_wait_s, min(2 * self._resend_wait_s, self._config.lease_s))
        return self._repeat(now_s)

    def _repeat(self, now_s: float) -> list[Effect]:
        # with the same clock: a newer one would make the donor copy its state anew, and void the part that is under way
        self._wait(now_s)
        return [self._request(index) for index in range(self._asked) if index not in self._kept]

    def adopt(self, clock: int, now_s: float) -> list[Effect]:
        """Take a complete state over, if it is recent; the parameters are those of the syncer."""
        if self.over or not self.complete:
            return []
        if clock - self._clock > self._config.transfer_steps_max:
            return self._abandon(clock, now_s)  # the global model was longer on its way than the state
        return [AdoptState(self.donor, self.donor_step, ())]


class Donor:
    """A healthy learner's side."""

    def __init__(self, learner_id: str, incarnation: int) -> None:
        self._who = (learner_id, incarnation)
        self._copies: dict[int, int] = {}  # local step of a state in host memory -> clock
        self._given: dict[str, int] = {}  # receiver -> local step of its copy
        self.waiting: dict[str, int] = {}  # receiver -> clock that must be seen first

    def on_pull(self, message: StatePull) -> list[Effect]:
        """Give a part of a copy that exists, or remember that one is wanted. Touches nothing that a step depends on."""
        receiver = message.receiver
        step = self._given.get(receiver)
        if message.donor_step:
            if step != message.donor_step:
                return [Send(SYNCER, StateRefused(*self._who, receiver, f"no state of step {message.donor_step}"))]
            return [self._part(receiver, step, message.part)]
        if step is not None and self._copies[step] >= message.clock:
            return [self._part(receiver, step, 0)]  # its first part was lost
        self.waiting[receiver] = message.clock
        return []

    def serve(self, clock: int, local_step: int) -> list[Effect]:
        """Between two steps: copy the state for those who wait, if their clock has been seen."""
        effects: list[Effect] = []
        seen = self._copies.get(local_step, clock)  # a copy was made earlier between the same two steps
        for receiver in sorted(r for r, wanted in self.waiting.items() if wanted <= seen):
            del self.waiting[receiver]
            effects += self._forget(receiver)
            if local_step not in self._copies:
                if len(self._copies) >= STATES_MAX:
                    reason = f"{STATES_MAX} states are being given already"
                    effects.append(Send(SYNCER, StateRefused(*self._who, receiver, reason)))
                    continue
                self._copies[local_step] = clock
                effects.append(StageState(local_step))
            self._given[receiver] = local_step
            effects.append(self._part(receiver, local_step, 0))
        return effects

    def _part(self, receiver: str, local_step: int, index: int) -> Send:
        # count, digest and size are the driver's: it alone knows the bytes
        return Send(SYNCER, StatePart(*self._who, receiver, local_step, index, 0, 0, 0, self._copies[local_step]))

    def on_end(self, receiver: str) -> list[Effect]:
        """The receiver needs no more."""
        self.waiting.pop(receiver, None)
        return self._forget(receiver)

    def _forget(self, receiver: str) -> list[Effect]:
        step = self._given.pop(receiver, None)
        if step is None or step in self._given.values():
            return []
        del self._copies[step]
        return [UnstageState(step)]

    def forget_all(self) -> list[Effect]:
        """The link is gone: the syncer sends its receivers to others."""
        self.waiting.clear()
        self._given.clear()
        effects: list[Effect] = [UnstageState(step) for step in self._copies]
        self._copies.clear()
        return effects


class Matchmaker:
    """The syncer's side: who gives to whom."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._donors: dict[str, tuple[str, int]] = {}  # receiver -> donor and its incarnation
        self._avoided: dict[str, list[str]] = {}  # receiver -> donors that refused or were lost

    def on_request(self, message: StateRequest, global_step: int, awaited: Container[str] = ()) -> list[Effect]:
        """Pass a request on, to the donor that it names or to one that is chosen now.

        Args:
            awaited: learners that a restarted syncer still expects back.
        """
        receiver = message.learner_id
        donor = self._live(receiver)
        if message.donor:
            if donor is None or donor.learner_id != message.donor:
                return [Send(receiver, StateUnavailable(message.donor, "it is not the donor any more"))]
            return [Send(donor.learner_id, StatePull(receiver, message.clock, message.donor_step, message.part))]
        effects: list[Effect] = []
        if donor is None:
            donor = self._choose(receiver)
            if donor is None:
                self._avoided.pop(receiver, None)
                if self._comes_back(receiver, awaited):
                    return []  # it will be asked for again
                return [Send(receiver, StateUnavailable("", "no other learner is active and free to give its state"))]
            former = self._membership.get(*self._donors.get(receiver, ("", 0)))
            if former is not None:  # silent: it may come back, and need not keep its copy then
                effects.append(Send(former.learner_id, StateEnd(receiver)))
            self._donors[receiver] = (donor.learner_id, donor.incarnation)
            effects.append(Note("recovering", global_step, -1, (receiver, donor.learner_id), "takes its state"))
        return [*effects, Send(donor.learner_id, StatePull(receiver, message.clock, 0, 0))]

    def _live(self, receiver: str) -> Member | None:
        donor = self._membership.get(*self._donors.get(receiver, ("", 0)))
        return donor if donor is not None and donor.state == ACTIVE else None

    def _choose(self, receiver: str) -> Member | None:
        """The active learner that failed this receiver least often, then that gives to the fewest, first by name."""
        busy = [name for name, _ in self._donors.values()]
        failed = self._avoided.get(receiver, [])
        others = [m.learner_id for m in self._membership.live_members() if m.learner_id != receiver]
        name = min(others, key=lambda name: (failed.count(name), busy.count(name), name), default="")
        return self._membership.members.get(name)

    def _comes_back(self, receiver: str, awaited: Container[str]) -> bool:
        """Say if another learner that has trained is about to be active again, as after a restart of the syncer."""
        trained = [m for m in self._membership.members.values() if m.local_step > 0 and m.learner_id != receiver]
        return any(m.state == JOINING or m.learner_id in awaited for m in trained)

    def on_part(self, part: StatePart) -> list[Effect]:
        """Pass a part on."""
        if not part.part < part.parts:
            return [Drop(part.learner_id, f"part {part.part} of {part.parts} of a state is impossible")]
        if self._donors.get(part.receiver) != (part.learner_id, part.incarnation):
            return [Drop(part.learner_id, f"a part of its state for {part.receiver[:64]!r}, who asked for none")]
        if self._membership.members[part.receiver].state == GONE:
            return [Drop(part.learner_id, f"a part of its state for {part.receiver}, who is away")]
        return [Send(part.receiver, part)]

    def on_refused(self, message: StateRefused) -> list[Effect]:
        """Send the receiver to somebody else."""
        if self._donors.get(message.receiver) != (message.learner_id, message.incarnation):
            return []
        return [self._part_ways(message.receiver, message.reason)]

    def _part_ways(self, receiver: str, reason: str) -> Send:
        donor, _ = self._donors.pop(receiver)
        failed = self._avoided.setdefault(receiver, [])
        failed.append(donor)
        del failed[:-AVOIDED_MAX]
        return Send(receiver, StateUnavailable(donor, reason))

    def on_done(self, receiver: str) -> list[Effect]:
        """The receiver is finished with its donor."""
        self._avoided.pop(receiver, None)
        donor, _ = self._donors.pop(receiver, ("", 0))
        return [Send(donor, StateEnd(receiver))] if donor else []

    def on_lost(self, learner_id: str, reason: str) -> list[Effect]:
        """A donor is gone. A receiver that is gone may come back, and go on where it was."""
        effects: list[Effect] = []
        for receiver in [r for r, (donor, _) in self._donors.items() if donor == learner_id]:
            effects.append(self._part_ways(receiver, reason))
        return effects

    def donor_of(self, receiver: str) -> str:
        """Name the learner that gives to this one, or nobody."""
        return self._donors.get(receiver, ("", 0))[0]

    def clear(self) -> None:
        """The syncer lost everybody."""
        self._donors.clear()
        self._avoided.clear()

    def state(self) -> dict[str, Any]:
        avoided = [[receiver, list(names)] for receiver, names in self._avoided.items()]
        return {"donors": [[r, *d] for r, d in self._donors.items()], "avoided": avoided}

    def restore(self, state: dict[str, Any]) -> None:
        self._donors = {receiver: (donor, incarnation) for receiver, donor, incarnation in state["donors"]}
        self._avoided = {receiver: list(names) for receiver, names in state["avoided"]}
