"""Slices of two hosts in one thread: the slices of island.py, each with one more host, which obeys its host 0."""

import queue
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from diloco_jax.runtime.slices.forwarding import ForwardingIsland
from diloco_jax.runtime.slices.hosts import JointLinks, LedHosts
from diloco_jax.runtime.slices.member import SliceMember
from diloco_jax.runtime.slices.obeying import ObeyingHost
from diloco_jax.runtime.slices.orders import REPORTS
from diloco_jax.transport.slices.links import Item, SliceJoined
from tests.runtime.slices.island import SIZE, SLICES, Model, Net

# The shards of hosts 1 begin with other numbers than those of hosts 0.
SECOND = np.arange(SIZE, dtype=np.float32) + 100


class SecondNet(Net):
    """The hosts 1 of all slices, and their connections."""

    def _member(self, number: int) -> SliceMember:
        made = super()._member(number)
        cast(Model, made.loop.island).x = SECOND.copy()
        return made

    def connect(self, one: int, other: int) -> None:
        super().connect(one, other)
        for own, peer in ((one, other), (other, one)):
            self.links[own].inbox.append(Item(peer, self.session(peer), SliceJoined()))


class HostsNet(Net):
    """Slices of two hosts; what `Net` offers is of the hosts 0."""

    def __init__(self) -> None:
        self.second = SecondNet()
        self.stops = [threading.Event() for _ in range(SLICES)]
        # Slices that a host 1 told that its process was asked to end.
        self.asked: list[int] = []
        # Slices whose host 1 stands still.
        self.still: set[int] = set()
        self.obeying: dict[int, ObeyingHost] = {}
        # Called before a host 1 takes a message; it may return True to lose the message.
        self.on_second: Callable[[int, Item], bool] = lambda number, item: False
        super().__init__()
        self.others_work(-1)
        for number in range(SLICES):
            while self.links[number].inbox:
                self.next_item(number)

    def _member(self, number: int) -> SliceMember:
        made, links = super()._member(number), self.links[number]

        def report(reply: Any) -> None:
            links.put((1, REPORTS.unpack(reply.message.encode())))

        self.obeying[number] = obeying = ObeyingHost(
            self.second.members[number],
            cast(Any, self.second.links[number]),
            cast(Any, SimpleNamespace(send=report)),
            self.stops[number],
        )
        led = LedHosts(2, obeying.put)
        joint = JointLinks(number, cast(Any, links), led, 2, lambda: self.asked.append(number))
        return SliceMember(number, made.run, made.loop, joint, led)

    def next_item(self, number: int) -> Item | None:
        return self.members[number].links.receive(0.0)

    def kill(self, number: int) -> None:
        super().kill(number)
        self.second.kill(number)

    def start(self, number: int) -> None:
        self.second.start(number)
        super().start(number)

    def others_work(self, waiting: int) -> None:
        super().others_work(waiting)
        while any([self._obey(number) for number in range(SLICES) if number not in self.still]):
            super().others_work(waiting)
        # A host that has nothing to do reports again what it waits for.
        for number in {*range(SLICES)} - self.still:
            self.obeying[number]._tell()

    def _obey(self, number: int) -> bool:
        """Let a host 1 do what has arrived for it; return whether it did anything."""
        links, busy = self.second.links[number], False
        while links.inbox:
            busy = True
            if self.on_second(number, links.inbox[0]):
                links.inbox.popleft()
                continue
            try:
                command = self.obeying[number].get(0.0)
            except queue.Empty:
                continue
            raise AssertionError(f"host 1 of slice {number} got {command}")
        return busy

    def both(self, number: int) -> tuple[list[float], list[float]]:
        """Return the states of both hosts of a slice, which have made the same changes."""
        mine, other = self.members[number], self.second.members[number]
        assert (other.standing, other.name) == (mine.standing, mine.name), f"slice {number}"
        return self.state(number).tolist(), self.second.state(number).tolist()

    def second_island(self, number: int) -> ForwardingIsland:
        """Return the state of host 1 of a slice that leads, as its learner's host uses it."""
        return ForwardingIsland(self.obeying[number].changes, self.second.members[number])
