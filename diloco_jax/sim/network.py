"""A network of links between learners and the syncer: delay, bandwidth, loss, reorder, duplication, partition.

A link is one connection of one incarnation, two pipes of two lanes each. Like a real transport a lane keeps its order
and there is none between lanes. Unlike one, a link may lose, repeat and reorder: the machines must survive it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from diloco_jax.protocol.messages import AnchorValue, FragmentValue, GlobalFragment, Message, StatePart
from diloco_jax.sim.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOptions:
    """Delay, bandwidth and trouble of links. Probabilities are per message."""

    delay_s: float = 0.01
    """Seconds from one end to the other, before jitter and transfer."""
    jitter_s: float = 0.0
    """Up to so many seconds more, drawn evenly for every message; a lane keeps its order all the same."""
    bandwidth_bytes_per_s: float = 0.0
    """Of each direction of each link, for payloads; 0 means that they take no time."""
    thin_links: tuple[tuple[str, float], ...] = ()
    """(learner, bytes per second): links that have another bandwidth than that."""
    one_queue: bool = False
    """Whether every message waits for the payloads sent before it, as in the queue of a shaped link."""
    loss: float = 0.0
    """Probability that a message vanishes."""
    duplication: float = 0.0
    """Probability that a message arrives a second time, later."""
    reorder: float = 0.0
    """Probability that a message is held up and others overtake it."""
    reorder_s: float = 0.5
    """For up to so many seconds."""
    late: float = 0.0
    """Probability that a message still arrives although its link broke while it was under way."""
    heals_s: float = 0.0
    """When loss, duplication and reorder end; 0 means never."""

    def __post_init__(self) -> None:
        for name in ("loss", "duplication", "reorder", "late"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"network.{name} is {value}, but a probability must be at least 0 and below 1")
        for name in ("delay_s", "jitter_s", "bandwidth_bytes_per_s", "reorder_s", "heals_s"):
            value = getattr(self, name)
            if value < 0:
                raise ValueError(f"network.{name} is {value}, but must be at least 0")


Deliver = Callable[["tuple[SimulatedLink, Any]"], None]
BULK = (FragmentValue, GlobalFragment, AnchorValue, StatePart)  # those with a payload, on a lane of their own
DIGESTED = (GlobalFragment, AnchorValue, StatePart)  # those that name the digest of their payload
GARBLED = 0.5  # share of these that arrive garbled while a link corrupts


@final
class Garbled(NamedTuple):
    """A message whose payload is not what its digest says."""

    message: Message


@dataclass(slots=True, eq=False)
class LinkDirection:
    """One direction of a link."""

    link: SimulatedLink
    deliver: Deliver
    sent_s: float = 0.0  # when the payloads that wait for bandwidth are through
    control_s: float = 0.0  # newest arrival of each lane
    payload_s: float = 0.0


class SimulatedLink:
    """One connection.

    Args:
        learner_id: whose it is.
        incarnation: likewise.
        owner: the learner's process.
        up: what the syncer's process does with a message that arrives.
        down: what the learner's process does with one.
        lost: what the syncer's process does when it finds out that the link is gone.
    """

    __slots__ = ("alive", "down", "incarnation", "learner_id", "lost", "owner", "up")

    def __init__(
        self,
        learner_id: str,
        incarnation: int,
        owner: Any,
        up: Deliver,
        down: Deliver,
        lost: Callable[[SimulatedLink], None] | None = None,
    ) -> None:
        self.learner_id = learner_id
        self.incarnation = incarnation
        self.owner = owner
        self.lost = lost
        self.alive = True
        self.up = LinkDirection(self, up)
        self.down = LinkDirection(self, down)


class Network:
    """Moves messages: calls the pipe's `deliver` with (link, message) when one arrives.

    Args:
        engine: whose time and randomness it uses.
        options: what messages suffer.
        faultless: no link will break and nobody be partitioned, so arrivals need no second look.
    """

    def __init__(self, engine: Engine, options: NetworkOptions, *, faultless: bool) -> None:
        self.lost = 0
        self._engine = engine
        self._options = options
        self._delay_s = options.delay_s
        self._bandwidths = dict(options.thin_links)
        self._partitions: list[str] = []  # learners, as often as they are hit
        self._corrupting: list[str] = []
        self._held: dict[str, tuple[list[str], list[tuple[LinkDirection, Message | Garbled]]]] = {}  # what waits
        slow = options.jitter_s or options.bandwidth_bytes_per_s or options.thin_links
        self._clean = faultless and not (slow or options.loss or options.duplication or options.reorder)

    def partition(self, learner_id: str) -> None:
        """Let nothing through from now on; nobody is told."""
        self._partitions.append(learner_id)

    def heal(self, learner_id: str) -> None:
        """Take back one `partition`."""
        self._partitions.remove(learner_id)

    def hold(self, learner_id: str, direction: str) -> None:
        """Let nothing through in this direction ("up", "down" or "both"); it waits, and nothing is lost."""
        self._held.setdefault(learner_id, ([], []))[0].append(direction)

    def release(self, learner_id: str, direction: str) -> None:
        """Take back one `hold`: what waited arrives now, in its order, if its connection still stands."""
        directions, waiting = self._held[learner_id]
        directions.remove(direction)
        if not directions:
            del self._held[learner_id]
        arrived = waiting[:]
        waiting.clear()
        for item in arrived:  # who is held all the same waits again
            self._engine.at(self._engine.now_s, self._arrive, item)

    def narrow(self, learner_id: str, bytes_per_s: float) -> None:
        """Make payloads to and from this learner slower from now on."""
        self._bandwidths[learner_id] = bytes_per_s

    def widen(self, learner_id: str) -> None:
        """End a `narrow`; what is under way keeps its pace."""
        self._bandwidths.pop(learner_id, None)
        self._bandwidths.update((name, rate) for name, rate in self._options.thin_links if name == learner_id)

    def corrupt(self, learner_id: str) -> None:
        """Garble some payloads to and from this learner from now on."""
        self._corrupting.append(learner_id)

    def cure(self, learner_id: str) -> None:
        """Take back one `corrupt`."""
        self._corrupting.remove(learner_id)

    def send(self, pipe: LinkDirection, message: Message) -> None:
        """Put a message on its way."""
        engine, link = self._engine, pipe.link
        if self._clean:
            engine.at(engine.now_s + self._delay_s, pipe.deliver, (link, message))
            return
        if not link.alive or link.learner_id in self._partitions:
            self.lost += 1
            return
        options, random = self._options, engine.random.random
        troubled = not 0 < options.heals_s <= engine.now_s
        if troubled and random() < options.loss:
            self.lost += 1
            return
        arrival_s = self._arrival_s(pipe, message)
        if link.learner_id in self._corrupting and isinstance(message, DIGESTED) and random() < GARBLED:
            engine.at(arrival_s, self._arrive, (pipe, Garbled(message)))
            return
        if troubled and random() < options.reorder:
            arrival_s += options.reorder_s * random()
        engine.at(arrival_s, self._arrive, (pipe, message))
        if troubled and random() < options.duplication:
            engine.at(arrival_s + options.reorder_s * random(), self._arrive, (pipe, message))

    def _arrival_s(self, pipe: LinkDirection, message: Message) -> float:
        """Return when a message arrives that keeps the order of its lane."""
        options, now_s = self._options, self._engine.now_s
        way_s = options.delay_s + options.jitter_s * self._engine.random.random()
        if not isinstance(message, BULK):
            begin_s = max(pipe.sent_s, now_s) if options.one_queue else now_s
            pipe.control_s = max(pipe.control_s, begin_s + way_s)
            return pipe.control_s
        transfer_s = 0.0
        bandwidth = self._bandwidths.get(pipe.link.learner_id, options.bandwidth_bytes_per_s)
        if bandwidth:
            transfer_s = message.payload_bytes / bandwidth
        pipe.sent_s = max(pipe.sent_s, now_s) + transfer_s
        pipe.payload_s = max(pipe.payload_s, pipe.sent_s + way_s)
        return pipe.payload_s

    def _arrive(self, item: tuple[LinkDirection, Message | Garbled]) -> None:
        pipe, message = item
        link = pipe.link
        if link.learner_id in self._held and self._holds(pipe):
            self._held[link.learner_id][1].append(item)
            return
        cut = not link.alive and self._engine.random.random() >= self._options.late
        if cut or link.learner_id in self._partitions:
            self.lost += 1
            return
        pipe.deliver((link, message))

    def _holds(self, pipe: LinkDirection) -> bool:
        way = "up" if pipe is pipe.link.up else "down"
        return any(direction in ("both", way) for direction in self._held[pipe.link.learner_id][0])
