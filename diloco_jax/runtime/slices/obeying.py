"""A host of a slice other than host 0: it obeys host 0, and exchanges its shards with the hosts of its number.

Host 0 decides for the whole slice. This host does the same with its devices, in the same order, and reports what has
arrived here: connections, chunks of the mean gradient, values, and the copy of another slice's state.
"""

import queue
import threading
import time
from typing import Any

from diloco_jax.runtime.island.threads import start_thread
from diloco_jax.runtime.slices.following import BACKLOG_MAX, BEAT_S, POLL_S
from diloco_jax.runtime.slices.forwarding import HostChanges
from diloco_jax.runtime.slices.member import SliceMember
from diloco_jax.runtime.slices.messages import (
    AdoptValue,
    BeginCopy,
    Chunk,
    Commit,
    Give,
    GoBack,
    Mean,
    Overwrite,
    StatePart,
    Turn,
    Value,
)
from diloco_jax.runtime.slices.orders import (
    ORDERS,
    REPORTS,
    AskedToEnd,
    BeginTerm,
    Disconnect,
    EndTerm,
    HasCopy,
    HasValue,
    HostReady,
    LoadCopy,
    Reaches,
    Receivers,
    Serve,
    TurnProgress,
)
from diloco_jax.transport.commands import Command, HostEnd, HostOrder, HostReport
from diloco_jax.transport.group.group import GroupMember
from diloco_jax.transport.slices.links import Item, SliceJoined, SliceLinks

# Host 0 sends the last message of a leader within this time, after its own hosts have left the learner.
ENDED_S = 15.0


class ObeyingHost:
    """One host of a slice that obeys; for the thread that steps, except `put`.

    Args:
        member: this host.
        links: its connections with the hosts of its number.
        stop: is set when this process shall end.
    """

    def __init__(self, member: SliceMember, links: SliceLinks, group: GroupMember, stop: threading.Event) -> None:
        self.member, self._links, self._group, self._stop = member, links, group, stop
        # The changes of this host while its slice leads.
        self.changes = HostChanges(member)
        # The values of changes that host 0 has not ordered yet, by term and change.
        self._values: dict[tuple[int, int], Any] = {}
        # How often host 0 has ordered to wait for a copy.
        self._asked = 0
        # The last reports of a turn and of a copy.
        self._told: TurnProgress | None = None
        self._told_s = 0.0
        self._told_copy = 0
        self._told_stop = False
        self._report(HostReady())

    def put(self, command: Command) -> bool:
        """Take a command of host 0, after those before it; tell whether it is the last one of its kind. Any thread."""
        order = ORDERS.unpack(command.message.encode()) if isinstance(command, HostOrder) else command
        self._links.put(order)
        return isinstance(order, Serve | HostEnd)

    def get(self, timeout: float) -> Any:
        """Return the next command that is for the caller, or Serve; obey one order or take one message before it.

        Raises:
            queue.Empty: there is none yet.
            ValueError: this host cannot do what host 0 does, so the slice cannot continue.
        """
        item = self.member.receive(timeout)
        try:
            if item is None:
                raise queue.Empty
            if item.slice != self.member.own:
                self._take(item)
                raise queue.Empty
            if type(item.message) in ORDERS.classes and not isinstance(item.message, Serve):
                self._obey(item.message)
                raise queue.Empty
            return item.message
        finally:
            self._tell()

    def await_ended(self) -> None:
        """Keep the connections until the other slices have ended theirs, for at most ENDED_S seconds."""
        until_s = time.monotonic() + ENDED_S
        while self._links.connected and time.monotonic() < until_s:
            self._links.receive(POLL_S)

    def _obey(self, order: Any) -> None:
        member = self.member
        match order:
            case BeginTerm(term):
                self._forget_values((term, -1))
                member.begin_term(term)
            case EndTerm():
                member.end_term()
            case Turn():
                member.begin_turn(order)
            case Commit(change):
                member.apply(change)
            case AdoptValue(change) | Overwrite(change) | GoBack(change):
                member.obey(order, self._values.pop((member.standing.term, change), b""))
            case BeginCopy(term, change):
                self._asked += 1
                self._forget_values((term, change))
                member.await_copy(term, change)
            case LoadCopy():
                member.load()
            case Give(to, change):
                member.give(to, change, lambda body: start_thread(body, "give", daemon=True))
            case Receivers(slices):
                self.changes.receivers = slices
            case Disconnect(slice_, reason):
                self._links.drop(slice_, reason)

    def _forget_values(self, until: tuple[int, int]) -> None:
        self._values = {at: value for at, value in self._values.items() if at > until}

    def _take(self, item: Item) -> None:
        """Take a message of another slice, or the start or the end of a connection."""
        member = self.member
        try:
            match item.message:
                case SliceJoined():
                    self._report(Reaches(item.slice, item.session, True, ""))
                case None:
                    self._report(Reaches(item.slice, item.session, False, item.reason))
                case Chunk() | Mean():
                    member.route(item.slice, item.message, item.payload)
                case StatePart():
                    member.take_state(item.message, item.payload)
                case Value():
                    self._keep_value(item.message, item.payload)
                case _:
                    raise ValueError(f"a {type(item.message).__name__} is for host 0 of a slice")
        except ValueError as error:
            self._links.drop(item.slice, str(error))

    def _keep_value(self, message: Value, payload: Any) -> None:
        """Keep a value until host 0 orders its change; drop one of an earlier change. ValueError if it cannot be one.

        Host 0 orders the change for the fragment that this host has reported, so no other value may replace the first.
        """
        term, change, fragment_id = message
        self.member.value(fragment_id, payload)
        if (term, change) <= self.member.standing:
            return
        if (term, change) in self._values:
            raise ValueError(f"change {change} of term {term} has a value here already")
        if len(self._values) >= BACKLOG_MAX:
            raise ValueError(f"{BACKLOG_MAX} values wait here, and this slice cannot catch up")
        self._values[term, change] = payload
        self._report(HasValue(*message))

    def _tell(self) -> None:
        """Report what has changed here."""
        exchange, copy = self.member.exchange, self.member.receiving
        if exchange is not None:
            turn, lacks = exchange.turn, tuple(sorted(exchange.lacks))
            progress = TurnProgress(turn.term, turn.change, turn.attempt, exchange.complete, lacks)
            again = not progress.complete and time.monotonic() - self._told_s > BEAT_S
            if progress != self._told or again:
                self._told, self._told_s = progress, time.monotonic()
                self._report(progress)
        if copy is not None and copy.complete and self._told_copy != self._asked:
            self._told_copy = self._asked
            self._report(HasCopy(self._asked))
        if self._stop.is_set() and not self._told_stop:
            self._told_stop = True
            self._report(AskedToEnd())

    def _report(self, report: Any) -> None:
        self._group.send(HostReport(REPORTS.pack(report).decode()))
