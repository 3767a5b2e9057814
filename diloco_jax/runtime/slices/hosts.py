"""The other hosts of a slice, as its host 0 sees them: it orders, they report, and a slice has what all hosts have."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from diloco_jax.runtime.slices.messages import BeginCopy, Turn
from diloco_jax.runtime.slices.orders import (
    ORDERS,
    AskedToEnd,
    Disconnect,
    HasCopy,
    HasValue,
    HostReady,
    Reaches,
    TurnProgress,
)
from diloco_jax.transport.commands import HostOrder
from diloco_jax.transport.slices.links import Item, SliceJoined, SliceLinks

POLL_S = 0.1


class SliceHosts:
    """The other hosts of a slice of one process: there are none."""

    def order(self, message: Any) -> None:
        """Let the other hosts do what this host does next."""

    def hold(self, turn: Turn) -> bool:
        """Return whether the other hosts hold the whole mean gradient of a turn."""
        return True

    def lack(self, turn: Turn) -> set[int]:
        """Return the slices that the other hosts wait for in a turn."""
        return set()

    def late(self, turn: Turn, patience_s: float) -> bool:
        """Return whether another host has not computed its part of a turn, or does not report what it waits for.

        No other slice is to blame for that.
        """
        return False

    def have_value(self, term: int, change: int, fragment_id: int) -> bool:
        """Return whether the other hosts hold the value of a change; ValueError if one has another fragment's."""
        return True

    def have_copy(self) -> bool:
        """Return whether the other hosts hold the copy of another slice's state that they wait for."""
        return True


class LedHosts(SliceHosts):
    """The other hosts of a slice of several; for the thread that steps.

    Args:
        count: hosts of the slice, with this one.
        send: sends a command to all other hosts, in order.
    """

    def __init__(self, count: int, send: Callable[[HostOrder], object]) -> None:
        self._others = range(1, count)
        self._send = send
        self._progress: dict[int, TurnProgress] = {}
        # When each of these reports came.
        self._reported_s: dict[int, float] = {}
        # By host: the fragment of each value that it holds, by term and change.
        self._values: dict[int, dict[tuple[int, int], int]] = {host: {} for host in self._others}
        # How often they were ordered to wait for a copy, and which of these copies each has.
        self._asked = 0
        self._copies: dict[int, int] = {}

    def order(self, message: Any) -> None:
        self._asked += isinstance(message, BeginCopy)
        self._send(HostOrder(ORDERS.pack(message).decode()))

    def take(self, host: int, report: TurnProgress | HasValue | HasCopy) -> None:
        """Take a report."""
        match report:
            case TurnProgress():
                self._progress[host], self._reported_s[host] = report, time.monotonic()
                # Every change of an earlier term, or up to this turn, was made or never will be.
                at = report.term, report.change
                self._values[host] = {each: held for each, held in self._values[host].items() if each > at}
            case HasValue(term, change, fragment_id):
                self._values[host][term, change] = fragment_id
            case HasCopy(asked):
                self._copies[host] = asked

    def _of(self, turn: Turn) -> dict[int, TurnProgress]:
        at = turn.term, turn.change, turn.attempt
        return {host: each for host, each in self._progress.items() if (each.term, each.change, each.attempt) == at}

    def hold(self, turn: Turn) -> bool:
        return sum(each.complete for each in self._of(turn).values()) == len(self._others)

    def lack(self, turn: Turn) -> set[int]:
        return {slice_ for each in self._of(turn).values() for slice_ in each.lacks}

    def late(self, turn: Turn, patience_s: float) -> bool:
        since_s, told = time.monotonic() - patience_s / 2, self._of(turn)
        works = [host for host, each in told.items() if each.complete or self._reported_s[host] > since_s]
        return len(works) < len(self._others)

    def have_value(self, term: int, change: int, fragment_id: int) -> bool:
        held = [values[term, change] for values in self._values.values() if (term, change) in values]
        if other := {*held} - {fragment_id}:
            raise ValueError(
                f"change {change} is a value of fragment {fragment_id} here, of {min(other)} on another host"
            )
        return len(held) == len(self._values)

    def have_copy(self) -> bool:
        return all(self._copies.get(host) == self._asked for host in self._others)


class JointLinks:
    """The connections of all hosts of this slice, as one: a slice is connected if all of them are.

    Messages go between hosts 0 only. It has the functions of `SliceLinks`, for host 0.

    Args:
        own: number of this slice.
        links: the connections of host 0; the reports of the other hosts are among their items, from slice `own`.
    """

    def __init__(
        self, own: int, links: SliceLinks, hosts: LedHosts, count: int, on_asked: Callable[[], object]
    ) -> None:
        self._own, self._links, self._hosts, self._on_asked = own, links, hosts, on_asked
        # By host: the session of each slice that it is connected with. Another thread reads it.
        self._reached: dict[int, dict[int, int]] = {host: {} for host in range(1, count)}
        # The sessions that the owner has got SliceJoined of.
        self._announced: dict[int, int] = {}
        self._unready = {*self._reached}
        self._ready = deque[Item]()
        # Messages of slices that are not announced yet.
        self._held: dict[int, list[Item]] = {}
        self.session = links.session
        self.send, self.silent_s, self.listens = links.send, links.silent_s, links.listens
        self.waiting_bytes, self.close = links.waiting_bytes, links.close

    @property
    def connected(self) -> dict[int, int]:
        """Return the session of each slice that all hosts are connected with."""
        own, reached = self._links.connected, list(self._reached.values())
        return {each: session for each, session in own.items() if all(r.get(each) == session for r in reached)}

    def receive(self, timeout_s: float) -> Item | None:
        """Return the next item; None after `timeout_s` seconds, or at once after a report of another host."""
        if not self._ready and (item := self._links.receive(timeout_s)) is not None:
            self._sort(item)
        return self._ready.popleft() if self._ready else None

    def await_hosts(self, waits: Callable[[], object]) -> None:
        """Wait until the other hosts are ready: no other slice can reach this one before; `waits` is called meanwhile.

        A host that is lost ends this process.
        """
        while self._unready:
            self.receive(POLL_S)
            waits()

    def drop(self, number: int, reason: str) -> None:
        """End the connections of all hosts with a slice."""
        self._links.drop(number, reason)
        if number != self._own:
            self._hosts.order(Disconnect(number, reason))

    def _sort(self, item: Item) -> None:
        if item.slice == self._own:
            self._take(*item.message)
        elif item.message is None:
            self._held.pop(item.slice, None)
            self._lose(item.slice, item.reason)
        elif self._announced.get(item.slice) == item.session:
            self._ready.append(item)
        elif not isinstance(item.message, SliceJoined):
            held = self._held.setdefault(item.slice, [])
            held.append(item)
            # As much may wait in a connection: a whole state in parts, which a donor sends as soon as it is connected.
            if sum(each.num_bytes for each in held) > (limit := self._links.queue_bytes_max):
                self.drop(item.slice, f"{limit} bytes wait for other hosts of slice {self._own} to be connected")
        self._announce()

    def _take(self, host: int, report: Any) -> None:
        match report:
            case Reaches(slice_, session, connected, reason):
                others = {each: number for each, number in self._reached[host].items() if each != slice_}
                self._reached[host] = {**others, slice_: session} if connected else others
                if not connected:
                    self._lose(slice_, f"host {host}: {reason}")
            case HostReady():
                self._unready.discard(host)
            case AskedToEnd():
                self._on_asked()
            case _:
                self._hosts.take(host, report)

    def _lose(self, slice_: int, reason: str) -> None:
        if (session := self._announced.pop(slice_, None)) is not None:
            self._ready.append(Item(slice_, session, None, reason=reason))

    def _announce(self) -> None:
        for slice_, session in self.connected.items():
            if slice_ not in self._announced:
                self._announced[slice_] = session
                self._ready.append(Item(slice_, session, SliceJoined()))
                self._ready += [each for each in self._held.pop(slice_, ()) if each.session == session]
