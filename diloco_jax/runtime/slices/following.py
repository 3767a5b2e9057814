"""A slice that follows: it obeys its leader, and with the others finds a new one when the leader is lost."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Set
from functools import partial
from typing import Any, Literal, NamedTuple

from diloco_jax.runtime.island.threads import start_thread
from diloco_jax.runtime.records.pulse import Pulse
from diloco_jax.runtime.slices.member import HeldState, SliceMember
from diloco_jax.runtime.slices.messages import (
    CHANGES,
    AdoptValue,
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
    Overwrite,
    Stand,
    StatePart,
    Turn,
)
from diloco_jax.transport.slices.links import AGAIN_MAX_S, SliceJoined

POLL_S = 0.1
# A leader says that it leads twice per second.
BEAT_S = 0.5
# A slice that starts waits so long for a leader, and the first leader for the other slices.
START_S = 10.0
# Slices tell each other their states within this time, and the best one leads within as long.
VOTE_S = 1.0
# A slice that lost its connection, and still listens, gets so long to return before another one leads without it.
RETURN_S = VOTE_S + AGAIN_MAX_S
# Messages of a leader that wait for a state, or for a gradient. A slice that falls so far behind starts again.
BACKLOG_MAX = 256
# Terms of different slices differ.
TERMS = 64
# The largest exit status of a process.
STATUS_MAX = 255

log = logging.getLogger(__name__)


class Chosen(NamedTuple):
    """The outcome of an election."""

    leader: int
    term: int
    # The leader's state when it began.
    base: HeldState


Ended = Literal["lost", "stopped", "over"]


class FollowingSlice:
    """One slice between two times of leading; for the thread that steps.

    Args:
        least: slices that must be connected, with this one, before one leads.
        patience_s: a leader that is silent for so long is lost.
        stopped: tells whether this process shall end.
    """

    def __init__(
        self, member: SliceMember, slices: int, least: int, patience_s: float, stopped: Callable[[], bool], pulse: Pulse
    ) -> None:
        self._member = member
        self._links = member.links
        self._slices, self._least, self._patience_s = slices, least, patience_s
        self._stopped = stopped
        self._pulse = pulse
        # Until the first leader, slices that do not listen yet are on their way too.
        self._starts = True
        # By slice that is not connected: set if it will not return soon.
        self._gone: dict[int, threading.Event] = {}
        # What the leader sent at its end.
        self.status = 0

    def elect(self) -> Chosen | None:
        """Return who leads: another slice that says so, or this one if it has the best state; None if stopped.

        A slice that was suspended or cut off cannot tell whether the others train on without it. So it leads only when
        every other slice has sent its state, does not listen any more, or has not returned within RETURN_S.
        """
        member, links, began_s = self._member, self._links, time.monotonic()
        states: dict[int, HeldState] = {}
        told: dict[int, int] = {}
        awaited_s = began_s + (START_S if self._starts else RETURN_S)
        refused: set[int] = set()
        member.end_term()
        while not self._stopped():
            self._pulse.beat()
            now_s, connected = time.monotonic(), links.connected
            # A slice that was disconnected has forgotten this one's state, and may return as the same process.
            told = {slice_: session for slice_, session in told.items() if connected.get(slice_) == session}
            for slice_, session in connected.items():
                if told.get(slice_) != session:
                    told[slice_] = session
                    links.send(slice_, Stand(*member.standing))
            states = {slice_: state for slice_, state in states.items() if slice_ in connected}
            all_here = not self._returning(connected.keys())
            all_told = states.keys() == connected.keys()
            if len(connected) + 1 >= self._least and ((all_here and all_told) or now_s > awaited_s):
                candidates = {**states, member.own: member.standing}
                best = max(candidates.keys() - refused, key=lambda each: (candidates[each], -each))
                if best == member.own:
                    term = (max(state.term for state in candidates.values()) // TERMS + 1) * TERMS + member.own
                    self._starts = False
                    return Chosen(member.own, term, member.standing)
                if now_s > awaited_s + VOTE_S:
                    refused.add(best)
                    awaited_s = now_s
            item = member.receive(POLL_S)
            # Messages of a connection that ended may still wait here.
            if item is None or links.connected.get(item.slice) != item.session:
                continue
            if isinstance(item.message, Stand):
                states[item.slice] = HeldState(*item.message)
            elif isinstance(item.message, Lead) and item.message.term >= member.standing.term:
                self._starts = False
                return Chosen(item.slice, item.message.term, HeldState(*item.message[1:]))
        return None

    def _returning(self, connected: Set[int]) -> set[int]:
        """Return the slices that are not connected and may return soon."""
        missing = {*range(self._slices)} - {self._member.own} - connected
        if self._starts:
            return missing
        for slice_ in connected:
            self._gone.pop(slice_, None)
        for slice_ in missing - self._gone.keys():
            self._gone[slice_] = threading.Event()
            start_thread(partial(self._look_for, slice_, self._gone[slice_]), "look", daemon=True)
        return {slice_ for slice_ in missing if not self._gone[slice_].is_set()}

    def _look_for(self, slice_: int, gone: threading.Event) -> None:
        if not self._links.listens(slice_, RETURN_S):
            gone.set()

    def follow(self, chosen: Chosen) -> Ended:
        """Obey a leader until it is lost, or ends the island, or this process shall end."""
        member, links, leader = self._member, self._links, chosen.leader
        self._gone.clear()
        has_state = member.standing == chosen.base
        if has_state:
            member.begin_term(chosen.term)
        log.info(f"slice {member.own} follows slice {leader}" + ("" if has_state else ", which sends its state first"))
        session = links.connected.get(leader)
        if session is None or not links.send(leader, Follow(chosen.term, has_state)):
            return "lost"
        obedience = Obedience(member, leader, chosen.term, has_state)
        looked_s = ran_since_s = time.monotonic()
        while not self._stopped():
            item = member.receive(POLL_S)
            if item is not None:
                if item.slice == leader and item.message is None:
                    log.warning(f"slice {leader}, which led, is lost: {item.reason}")
                    return "lost"
                if isinstance(item.message, Lead) and item.message.term > chosen.term:
                    log.info(f"slice {item.slice} leads in a newer term")
                    return "lost"
                if isinstance(item.message, Stand):
                    # It looks for a leader, which answers it.
                    continue
                if (problem := obedience.take(item.slice, item.message, item.payload)) is not None:
                    links.drop(item.slice, problem)
            if (outcome := obedience.advance()) is not None:
                self.status = obedience.status
                return outcome
            self._pulse.beat()
            self._pulse.ready(obedience.trains)
            # A process that stood still itself has not read what the leader sent meanwhile.
            before_s, looked_s = looked_s, time.monotonic()
            if looked_s - before_s > max(2 * POLL_S, self._patience_s / 2):
                ran_since_s = looked_s
            silent_s = min(links.silent_s(leader), looked_s - ran_since_s)
            if silent_s > self._patience_s:
                self._gone[leader] = threading.Event()
                self._gone[leader].set()
                log.warning(f"slice {leader}, which led, was silent for {silent_s:.1f} s (islands.straggler_s)")
                links.drop(leader, f"it was silent for {silent_s:.1f} s")
                return "lost"
        return "stopped"


class Obedience:
    """The messages of one leader, and what of them is done; it waits for nothing."""

    def __init__(self, member: SliceMember, leader: int, term: int, has_state: bool) -> None:
        self._member, self._leader, self._term = member, leader, term
        self._has_state = has_state
        self._backlog: deque[tuple[Any, Any]] = deque()
        self._told: tuple[int, int] | None = None
        self._caught = has_state
        self.status = 0

    @property
    def trains(self) -> bool:
        """Tell whether this slice has the state and takes part in steps."""
        return self._caught

    def take(self, sender: int, message: Any, payload: Any) -> str | None:
        """Take a message; return why its sender cannot be used any more, None if it can."""
        member = self._member
        try:
            match message:
                case Chunk() | Mean():
                    member.route(sender, message, payload)
                case None | SliceJoined():
                    self._ask_again(joined=message is not None)
                case StatePart():
                    member.take_state(message, payload)
                case BeginCopy(term, change) if sender == self._leader and term == self._term:
                    self._backlog.clear()
                    member.await_copy(term, change)
                    self._has_state, self._caught = False, False
                case _ if sender == self._leader and isinstance(message, (*CHANGES, Turn, Give, End)):
                    self._backlog.append((message, payload))
                    if len(self._backlog) > BACKLOG_MAX:
                        return f"{BACKLOG_MAX} messages wait here, and this slice cannot catch up"
        except ValueError as error:
            return str(error)
        return None

    def _ask_again(self, *, joined: bool) -> None:
        """Request another copy if the start or the end of a connection may have cost this slice a message.

        Parts of the state, or means of the turns after it, would never come again.
        """
        receiving = self._member.receiving
        lost = self._has_state or receiving is not None
        # A donor that connects late could not send its first part.
        late = receiving is not None and not receiving.started
        if not self._caught and (late if joined else lost):
            self._has_state, self._member.receiving = False, None
            self._member.links.send(self._leader, Follow(self._term, False))

    def advance(self) -> Ended | None:
        """Do what can be done; return how the leader's time ended, None if it continues.

        A message that cannot be obeyed ends the connection with the leader.
        """
        try:
            return self._advance()
        except ValueError as error:
            log.warning(f"slice {self._leader}, which led, cannot be obeyed: {error}")
            self._member.links.drop(self._leader, str(error))
            return "lost"

    def _advance(self) -> Ended | None:
        member, links = self._member, self._member.links
        # It is the last message, and a slice whose state is still on its way would wait for nothing.
        if self._backlog and isinstance(end := self._backlog[-1][0], End):
            if end.status > STATUS_MAX:
                raise ValueError(f"{end.status} is not an exit status")
            self.status = end.status
            return "over"
        # The turn after a copy names its state, and a slice with a state that has no name could not lead.
        if self._has_copy() and self._backlog:
            member.load()
            log.info(f"slice {member.own} has the state of the others")
            self._has_state = True
        while self._has_state and self._backlog:
            message, payload = self._backlog[0]
            if self._must_wait(message):
                break
            self._backlog.popleft()
            match message:
                case Give(to, change):
                    member.give(to, change, lambda body: start_thread(body, "give", daemon=True))
                case Turn():
                    member.begin_turn(message)
                case _:
                    member.obey(message, payload)
        self._tell_held()
        if self._has_state and not self._caught and not self._backlog:
            self._caught = True
            links.send(self._leader, Caught(member.standing.change))
        return None

    def _has_copy(self) -> bool:
        """Tell whether all hosts of this slice have their parts of the copy that it waits for."""
        copy = self._member.receiving
        return copy is not None and copy.complete and self._member.hosts.have_copy()

    def _must_wait(self, message: Any) -> bool:
        """Tell whether a host of this slice cannot obey a message yet, because something is on its way to it."""
        member = self._member
        if isinstance(message, Commit):
            return member.exchange is not None and not member.complete
        valued = isinstance(message, AdoptValue | Overwrite)
        return valued and not member.hosts.have_value(member.standing.term, message.change, message.fragment_id)

    def _tell_held(self) -> None:
        exchange = self._member.exchange
        if exchange is not None and self._member.complete:
            at = exchange.turn.change, exchange.turn.attempt
            if at != self._told:
                self._told = at
                self._member.links.send(self._leader, HoldsMean(*at))
