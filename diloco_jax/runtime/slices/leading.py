"""The slice that leads: it has the learner's machine, divides each step over the slices, and forwards every change.

    run.py        loop.step(clock)      cuts the samples into parts
                  loop.wait(handle)     one Turn: all members compute their parts and exchange them; when every member
                                        holds the mean gradient, this slice applies it
    host.py       island.adopt(...)     the same change on every slice

A turn is committed on the other slices with the next message to them. By then the learner has written the step to its
tape, so no slice is ever ahead of what the tape explains.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from diloco_jax.protocol.learner.machine import Learner
from diloco_jax.runtime.island.built_in import batches_of
from diloco_jax.runtime.island.host import DATA_WAIT, Ranges
from diloco_jax.runtime.island.saved_states import StateName
from diloco_jax.runtime.island.threads import start_thread
from diloco_jax.runtime.records.signals import FAILED
from diloco_jax.runtime.slices.division import owners_of
from diloco_jax.runtime.slices.following import BEAT_S, POLL_S, VOTE_S, Chosen
from diloco_jax.runtime.slices.forwarding import ForwardingIsland
from diloco_jax.runtime.slices.member import SliceMember
from diloco_jax.runtime.slices.messages import (
    BeginCopy,
    Caught,
    Chunk,
    Commit,
    End,
    Follow,
    Give,
    HoldsMean,
    Lead,
    Mean,
    Stand,
    Turn,
)
from diloco_jax.runtime.slices.orders import Receivers
from diloco_jax.transport.slices.links import Item

# Turns whose duration is remembered, and so many times the usual one a turn may take beside islands.straggler_s.
TURNS_KEPT, USUAL_TIMES = 32, 2.0
# The first turn of a leader has no usual duration.
FIRST_S = 60.0
# A slice that leads no more sends its last messages within this time.
RESIGN_S = 1.0
OWN_SHARE_LATE = "its own share of a step is late (islands.straggler_s)"

log = logging.getLogger(__name__)


class SliceLost(Exception):
    """This slice cannot lead any more: another one leads, too few are left, or the process shall end."""


class Leadership:
    """The other slices, as the leader sees them; for the thread that steps, except the beat.

    Args:
        least: slices that must be there, this one included.
        straggler_s: beyond the usual duration of a turn, the others wait so long for a slice.
        leaving: tells whether this process shall end, so that another slice must lead.
    """

    def __init__(
        self, member: SliceMember, chosen: Chosen, least: int, straggler_s: float, leaving: Callable[[], bool]
    ) -> None:
        self.member = member
        self._links = member.links
        self._least, self._straggler_s, self._leaving = least, straggler_s, leaving
        self.term = chosen.term
        self._lead = Lead(chosen.term, *chosen.base)
        # The slices with the present state, and those that get it, with the slice that sends it.
        self.members: set[int] = set()
        self._joining: dict[int, int] = {}
        self._waiting: set[int] = set()
        # Members that hold the mean gradient of the present attempt.
        self._held: set[int] = set()
        # The slices that the other hosts of this one send values to.
        self._receivers: tuple[int, ...] = ()
        # Whether the slices have a state of an earlier incarnation, which the learner has not loaded.
        self.has_unloaded = False
        self._committed = True
        self._took_s: list[float] = []
        # The part that this slice computed at the last look, and since when.
        self._computed: tuple[tuple[int, int, int] | None, float] = None, 0.0
        self._closed = threading.Event()
        member.begin_term(chosen.term)
        self._base = member.standing
        self._tell()
        start_thread(self._beat, "lead", daemon=True)

    def gather(self) -> None:
        """Wait for the slices that have this state, before anything changes it; for at most VOTE_S."""
        until_s = time.monotonic() + VOTE_S
        while time.monotonic() < until_s and self.members | self._waiting < self._links.connected.keys():
            self._pump(POLL_S)

    def look(self) -> None:
        """Take the messages that have arrived, without a turn."""
        while self._pump(0.0):
            pass

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            self._look_at_own_share()
            self._tell()

    def _look_at_own_share(self) -> None:
        """Disconnect the other slices if this one computes a part for too long, so that they find a new leader.

        The thread that steps cannot: if a host of this slice stands still, the gradient of the others waits for it.
        """
        now_s, part = time.monotonic(), self.member.computing
        if part is None or part != self._computed[0]:
            self._computed = part, now_s
        elif self.members and now_s - self._computed[1] > self._usual_s + self._straggler_s:
            log.warning(f"slice {self.member.own} leads no more: {OWN_SHARE_LATE}")
            self._resign(OWN_SHARE_LATE)

    @property
    def _usual_s(self) -> float:
        """Return the seconds that a turn may take before anyone is late."""
        return USUAL_TIMES * median(self._took_s) if self._took_s else FIRST_S

    def _tell(self) -> None:
        for slice_ in self._links.connected:
            self._links.send(slice_, self._lead)

    def close(self) -> None:
        self._closed.set()

    def _resign(self, reason: str) -> SliceLost:
        """Let the other slices find a new leader at once: this process may still be writing a state to disk."""
        self.close()
        self._links.close(RESIGN_S)
        return SliceLost(reason)

    def end(self, status: int) -> None:
        """End the other slices with this exit status, and those that do not have the state yet."""
        for slice_ in self._links.connected:
            self._links.send(slice_, End(status))

    @property
    def count(self) -> int:
        """Return the slices that compute parts now."""
        return 1 + len(self.members)

    def change(self, message: Callable[[int], Any], values: np.ndarray | None = None) -> None:
        """Forward a change, made of its number, to all slices; this slice makes it itself."""
        self._commit()
        member = self.member
        member.standing = member.standing._replace(change=member.standing.change + 1)
        payload = memoryview(b"") if values is None else np.ascontiguousarray(values).view(np.uint8).data
        self._send_all(message(member.standing.change), payload)

    def renew(self) -> None:
        """Let every slice get this one's state again, because it loaded one that they do not have."""
        member = self.member
        self._commit()
        member.standing = member.standing._replace(change=member.standing.change + 1)
        self._waiting |= self.members | self._joining.keys()
        self.members.clear()
        self._joining.clear()
        self._tell_receivers()

    def _tell_receivers(self) -> None:
        """Let the other hosts of this slice send the values of changes to the slices that get the changes.

        The learner lets its hosts adopt a value before this host forwards it, so they must know that already.
        """
        receivers = tuple(sorted(self.members | self._joining.keys()))
        if receivers != self._receivers:
            self._receivers = receivers
            self.member.hosts.order(Receivers(receivers))

    def _commit(self) -> None:
        if not self._committed:
            self._committed = True
            self._send_all(Commit(self.member.standing.change))

    def _send_all(self, message: Any, payload: memoryview | bytes = b"") -> None:
        for slice_ in sorted(self.members | self._joining.keys()):
            self._links.send(slice_, message, payload)

    def make(self, rate: float, parts: Sequence[Ranges], name: str) -> dict[str, float]:
        """Make one step with all members, and return its metrics; `SliceLost` if this slice cannot lead any more."""
        if self.has_unloaded:
            self.end(FAILED)
            raise self._resign(
                "the learner did not load the state in memory, because it is too old or of another run; all slices "
                "start again without it"
            )
        self._commit()
        self.look()
        self._admit()
        began_s = time.monotonic()
        member, attempt, had = self.member, 0, dict[int, set[int]]()
        while True:
            turn = self._turn(attempt, rate, parts, name, had)
            self._held = set()
            self._send_all(turn)
            member.begin_turn(turn)
            lost = self._gather(turn)
            if not lost:
                break
            had = {}
            for part, owner in enumerate(turn.owners):
                if owner not in lost:
                    had.setdefault(owner, set()).add(part)
            attempt += 1
        self._tell_receivers()
        self._took_s = [*self._took_s[-TURNS_KEPT:], time.monotonic() - began_s]
        handle = member.apply(turn.change)
        self._committed = False
        return member.loop.island.wait(handle)

    def _turn(self, attempt: int, rate: float, parts: Sequence[Ranges], name: str, had: Mapping[int, set[int]]) -> Turn:
        members = sorted({self.member.own, *self.members})
        owners = owners_of(len(parts), members, had)
        told = tuple(tuple((int(start), int(stop)) for start, stop in part) for part in parts)
        change = self.member.standing.change + 1
        return Turn(self.term, change, attempt, rate, told, owners, tuple(members), tuple(sorted(self._joining)), name)

    def _gather(self, turn: Turn) -> set[int]:
        """Wait until every member holds the mean gradient; return the members that were lost instead."""
        began_s, usual_s = time.monotonic(), self._usual_s
        others = set(turn.members) - {self.member.own}
        while not self.member.complete or (others & self.members) - self._held:
            if lost := others - self.members:
                return lost
            self._pump(POLL_S)
            late_s = time.monotonic() - began_s - usual_s
            if late_s > self._straggler_s and self.members and self.member.hosts.late(turn, self._straggler_s):
                raise self._resign(f"a host of this slice is {late_s:.1f} s late (islands.straggler_s)")
            # One that lost a message between two others holds nothing, although nothing is missing here.
            late = self.member.lacks or others - self._held
            for slice_ in ((others - self._held) | late) & self.members & self._links.connected.keys():
                silent_s = self._links.silent_s(slice_)
                if silent_s > self._straggler_s:
                    self._lose(slice_, f"it was silent for {silent_s:.1f} s (islands.straggler_s)")
                elif late_s > self._straggler_s and slice_ in late:
                    self._lose(slice_, f"its share of a step is {late_s:.1f} s late (islands.straggler_s)")
        return others - self.members

    def _lose(self, slice_: int, reason: str) -> None:
        self._links.drop(slice_, reason)
        self._forget(slice_, reason)

    def _forget(self, slice_: int, reason: str) -> None:
        self._waiting.discard(slice_)
        self._joining.pop(slice_, None)
        for receiver in [each for each, donor in self._joining.items() if donor == slice_]:
            del self._joining[receiver]
            self._waiting.add(receiver)
        if slice_ in self.members:
            self.members.discard(slice_)
            log.warning(f"slice {slice_} is lost ({reason}); {self.count} train on")
            self._check_count()

    def _check_count(self) -> None:
        if self.count < self._least:
            raise self._resign(f"{self.count} slices are left, fewer than islands.slices_least = {self._least}")

    def _pump(self, timeout_s: float) -> bool:
        """Take one message; return False if there was none."""
        if self._closed.is_set():
            raise SliceLost(OWN_SHARE_LATE)
        # Without another slice that could lead, the learner sends the syncer a goodbye.
        if self.members and self._leaving():
            raise self._resign("this slice was asked to end, and another one leads on")
        item = self.member.receive(timeout_s)
        if item is not None:
            self._take(item)
            self._tell_receivers()
        return item is not None

    def _take(self, item: Item) -> None:
        slice_, message = item.slice, item.message
        if message is None:
            self._forget(slice_, item.reason)
        if self._links.connected.get(slice_) != item.session:
            return
        match message:
            case Chunk() | Mean():
                self.member.route(slice_, message, item.payload)
            case HoldsMean(change, attempt):
                exchange = self.member.exchange
                if exchange is not None and (change, attempt) == (exchange.turn.change, exchange.turn.attempt):
                    self._held.add(slice_)
            case Follow(term, has_state) if term == self.term:
                # A slice that did not get the request of a turn cannot commit it.
                if has_state and self.member.standing == self._base and self.member.exchange is None:
                    self.members.add(slice_)
                    log.info(f"slice {slice_} follows; {self.count} train")
                else:
                    self._waiting.add(slice_)
            case Caught() if slice_ in self._joining:
                del self._joining[slice_]
                self.members.add(slice_)
                log.info(f"slice {slice_} is back with the state; {self.count} train")
            case Stand():
                self._links.send(slice_, self._lead)
            case Lead(term) if term > self.term:
                raise self._resign(f"slice {slice_} leads in a newer term")

    def _admit(self) -> None:
        """Let slices that wait get the present state from a member, while all others step on."""
        member = self.member
        for slice_ in sorted(self._waiting):
            self._waiting.discard(slice_)
            donor = max(self.members, default=member.own)
            change = member.standing.change
            self._links.send(slice_, BeginCopy(self.term, change))
            self._joining[slice_] = donor
            if donor == member.own:
                member.give(slice_, change, lambda body: start_thread(body, "give", daemon=True))
            else:
                self._links.send(donor, Give(slice_, change))
        self._tell_receivers()


class SlicedLoop:
    """The steps of an island of several slices, as those of `BuiltInLoop`; for one thread at a time."""

    # The learner's machine, which is made after this.
    machine: Learner

    def __init__(self, leadership: Leadership, *, shrinks: bool) -> None:
        self.leadership = leadership
        self._member = member = leadership.member
        loop = member.loop
        self.island, self.evaluate, self.rate = ForwardingIsland(leadership, member), loop.evaluate, loop.rate
        self.corpus, self.epoch_samples, self.tokenizer = loop.corpus, loop.epoch_samples, loop.tokenizer
        self.prefetch = loop.prefetch
        self._whole, self._shrinks = loop.batch_size, shrinks
        self._next: Ranges = ()

    @property
    def batch_size(self) -> int:
        """Return the samples of the next step: fewer while slices are missing, if the batch shrinks."""
        return self._member.size * self.leadership.count if self._shrinks else self._whole

    def warm_up(self) -> None:
        """Compile the programs of parts; a slice has done it before it leads."""
        self._member.loop.warm_up_steps()

    def put_batch(self, ranges: Ranges, ahead: Ranges = ()) -> None:
        """Set the samples of the next step."""
        self._next = ranges

    def step(self, clock: int) -> tuple[float, Sequence[Ranges]]:
        """Return what `wait` makes: the rate of this step of the schedule, and the parts."""
        return self.rate(clock), list(batches_of(self._next, self._member.size))

    def wait(self, handle: tuple[float, Sequence[Ranges]]) -> Mapping[str, float]:
        """Make the step with the other slices; return its metrics."""
        machine = self.machine
        counters = machine.incarnation, machine.local_step, machine.global_step
        name = StateName(*counters, tuple(machine.digests), machine.run)
        metrics = self.leadership.make(*handle, name.to_text())
        return {**metrics, DATA_WAIT: self._member.loop.waited_s(), "slices": self.leadership.count}

    def close(self) -> None:
        """Leave the model and the data open, because this slice may follow, or lead again."""
