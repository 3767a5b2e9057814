"""Slices of several hosts in one thread: the slices of island.py, each with more hosts, which obey its host 0."""

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

# The shards of the other hosts begin with other numbers than those of hosts 0.
SECOND = np.arange(SIZE, dtype=np.float32) + 100


class SecondNet(Net):
    """The hosts of one number above 0 of all slices, and their connections."""

    def _member(self, number: int) -> SliceMember:
        made = super()._member(number)
        cast(Model, made.loop.island).x = SECOND.copy()
        return made

    def connect(self, one: int, other: int) -> None:
        super().connect(one, other)
        for own, peer in ((one, other), (other, one)):
            self.links[own].inbox.append(Item(peer, self.session(peer), SliceJoined()))


class HostsNet(Net):
    """Slices of several hosts; what `Net` offers is of the hosts 0, and `second` and `obeying` of the hosts 1."""

    def __init__(self, hosts: int = 2) -> None:
        self.nets = {host: SecondNet() for host in range(1, hosts)}
        self.second = self.nets[1]
        self.stops = [threading.Event() for _ in range(SLICES)]
        # Slices that a host 1 told that its process was asked to end.
        self.asked: list[int] = []
        # Slices whose hosts above 0 stand still.
        self.still: set[int] = set()
        self.obeying_of: dict[int, dict[int, ObeyingHost]] = {host: {} for host in self.nets}
        self.obeying = self.obeying_of[1]
        # Called before a host above 0 takes a message; it may return True to lose the message.
        self.on_second: Callable[[int, Item], bool] = lambda number, item: False
        super().__init__()
        self.others_work(-1)
        for number in range(SLICES):
            while self.links[number].inbox:
                self.next_item(number)

    def _member(self, number: int) -> SliceMember:
        made, links = super()._member(number), self.links[number]

        def reports(host: int) -> Any:
            return SimpleNamespace(send=lambda reply: links.put((host, REPORTS.unpack(reply.message.encode()))))

        for host, net in self.nets.items():
            self.obeying_of[host][number] = ObeyingHost(
                net.members[number], cast(Any, net.links[number]), reports(host), self.stops[number]
            )

        def order(command: Any) -> None:
            for obeying in self.obeying_of.values():
                obeying[number].put(command)

        led = LedHosts(1 + len(self.nets), order)
        joint = JointLinks(number, cast(Any, links), led, 1 + len(self.nets), lambda: self.asked.append(number))
        return SliceMember(number, made.run, made.loop, joint, led)

    def next_item(self, number: int) -> Item | None:
        return self.members[number].links.receive(0.0)

    def kill(self, number: int) -> None:
        super().kill(number)
        for net in self.nets.values():
            net.kill(number)

    def start(self, number: int) -> None:
        for net in self.nets.values():
            net.start(number)
        super().start(number)

    def others_work(self, waiting: int) -> None:
        super().others_work(waiting)
        while any([self._obey(*each) for each in self._working()]):
            super().others_work(waiting)
        # A host that has nothing to do reports again what it waits for.
        for host, number in self._working():
            self.obeying_of[host][number]._tell()

    def _working(self) -> list[tuple[int, int]]:
        return [(host, number) for host in self.nets for number in range(SLICES) if number not in self.still]

    def _obey(self, host: int, number: int) -> bool:
        """Let a host above 0 do what has arrived for it; return whether it did anything."""
        links, busy = self.nets[host].links[number], False
        while links.inbox:
            busy = True
            if self.on_second(number, links.inbox[0]):
                links.inbox.popleft()
                continue
            try:
                command = self.obeying_of[host][number].get(0.0)
            except queue.Empty:
                continue
            raise AssertionError(f"host {host} of slice {number} got {command}")
        return busy

    def both(self, number: int) -> tuple[list[float], list[float]]:
        """Return the states of both hosts of a slice, which have made the same changes."""
        mine, other = self.members[number], self.second.members[number]
        assert (other.standing, other.name) == (mine.standing, mine.name), f"slice {number}"
        return self.state(number).tolist(), self.second.state(number).tolist()

    def second_island(self, number: int) -> ForwardingIsland:
        """Return the state of host 1 of a slice that leads, as its learner's host uses it."""
        return ForwardingIsland(self.obeying[number].changes, self.second.members[number])
