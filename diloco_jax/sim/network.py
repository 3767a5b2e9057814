"""The links between learners and the syncer: delay, bandwidth, and faults if they are configured.

A link is one connection of one incarnation. It has two directions, and each direction has two lanes: control messages
and payloads. Like a real transport, a lane keeps its order, and the two lanes are independent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from diloco_jax.protocol.messages import AnchorValue, Digested, FragmentValue, GlobalFragment, Message, StateChunk
from diloco_jax.sim.engine import NEVER_S, Engine

Deliver = Callable[["tuple[SimulatedLink, Any]"], None]
# Messages with a payload travel on a separate lane.
BULK = (FragmentValue, GlobalFragment, AnchorValue, StateChunk)
# Share of digested messages that arrive garbled while a link corrupts.
GARBLED_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFaults:
    """Faults that hit single messages at random. Probabilities are per message.

    A network with these settings draws random numbers for every message, even where all probabilities are 0. A network
    without them draws none, so both kinds of runs keep their bits.
    """

    loss: float = 0.0
    """Probability that a message vanishes."""
    duplication: float = 0.0
    """Probability that a message arrives a second time, later."""
    reorder: float = 0.0
    """Probability that a message is delayed and others overtake it."""
    reorder_s: float = 0.5
    """Longest such delay in seconds."""
    late: float = 0.0
    """Probability that a message still arrives although its link broke while the message was under way."""
    heals_s: float = 0.0
    """Time when loss, duplication and reorder end; 0 means never."""

    def __post_init__(self) -> None:
        for name in ("loss", "duplication", "reorder", "late"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"network.faults.{name} is {value}, but a probability must be at least 0 and below 1")
        for name in ("reorder_s", "heals_s"):
            _check_not_negative(f"network.faults.{name}", getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOptions:
    """Settings of the network."""

    delay_s: float = 0.01
    """Seconds from one end to the other, without jitter and transfer."""
    jitter_s: float = 0.0
    """Longest additional delay in seconds, drawn evenly for every message; a lane keeps its order nevertheless."""
    bandwidth_bytes_per_s: float = 0.0
    """Bandwidth of each direction of each link for payloads; 0 means that payloads take no time."""
    thin_links: tuple[tuple[str, float], ...] = ()
    """(learner, bytes per second) of each link that has another bandwidth."""
    one_queue: bool = False
    """Whether every message waits for the payloads sent before it, as in the queue of a shaped link."""
    faults: LinkFaults | None = None
    """Faults of single messages; None if no message is lost, repeated or reordered."""

    def __post_init__(self) -> None:
        for name in ("delay_s", "jitter_s", "bandwidth_bytes_per_s"):
            _check_not_negative(f"network.{name}", getattr(self, name))

    @property
    def only_delays(self) -> bool:
        """True if every message takes exactly `delay_s`."""
        faults = self.faults
        at_random = faults is not None and (faults.loss or faults.duplication or faults.reorder)
        return not (self.jitter_s or self.bandwidth_bytes_per_s or self.thin_links or at_random)


def _check_not_negative(name: str, value: float) -> None:
    if value < 0:
        raise ValueError(f"{name} is {value}, but must be at least 0")


@final
class Garbled(NamedTuple):
    """A message whose payload does not match its digest."""

    message: Message


@dataclass(slots=True, eq=False)
class LinkDirection:
    """One direction of a link.

    `sent_s` is when all payloads sent so far have passed the bandwidth. `control_s` and `payload_s` are the newest
    arrivals of the two lanes.
    """

    link: SimulatedLink
    deliver: Deliver
    sent_s: float = 0.0
    control_s: float = 0.0
    payload_s: float = 0.0


class SimulatedLink:
    """One connection; the syncer's process calls `lost` when it notices that the link has broken."""

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


Travelling = tuple[LinkDirection, Message | Garbled]


class _Hold:
    """The directions of a learner's link that are held, and the messages that wait there."""

    __slots__ = ("directions", "waiting")

    def __init__(self) -> None:
        self.directions: list[str] = []
        self.waiting: list[Travelling] = []

    def holds(self, pipe: LinkDirection) -> bool:
        """Return whether messages of this direction wait."""
        way = "up" if pipe is pipe.link.up else "down"
        return any(direction in ("both", way) for direction in self.directions)


class Network:
    """The links of a run: calls `deliver` of a link's direction with (link, message) when a message arrives."""

    def __init__(self, engine: Engine, options: NetworkOptions) -> None:
        self.lost = 0
        self._engine = engine
        self._options = options
        self._faults = options.faults
        self._delay_s = options.delay_s
        self._direct = options.only_delays
        self._bandwidths = dict(options.thin_links)
        # A learner is listed once per fault that hits it.
        self._partitioned: list[str] = []
        self._corrupted: list[str] = []
        self._held: dict[str, _Hold] = {}
        # Learner -> how late its answers to pulls are, once per fault.
        self._value_delays: dict[str, list[float]] = {}

    def expect_faults(self) -> None:
        """Check every message from now on, because links may break, be partitioned, held, narrowed or corrupted."""
        self._direct = False

    def partition(self, learner_id: str) -> None:
        """Drop all messages from and to this learner from now on, without telling anyone."""
        self._partitioned.append(learner_id)

    def heal(self, learner_id: str) -> None:
        """Undo one `partition`."""
        self._partitioned.remove(learner_id)

    def hold(self, learner_id: str, direction: str) -> None:
        """Let messages of this direction ("up", "down" or "both") wait from now on; none is lost."""
        self._held.setdefault(learner_id, _Hold()).directions.append(direction)

    def release(self, learner_id: str, direction: str) -> None:
        """Undo one `hold`: messages that waited arrive now, in their order, if their link has not broken."""
        hold = self._held[learner_id]
        hold.directions.remove(direction)
        if not hold.directions:
            del self._held[learner_id]
        waiting, hold.waiting = hold.waiting, []
        # A message whose direction is still held waits again on arrival.
        for item in waiting:
            self._engine.at(self._engine.now_s, self._arrive, item)

    def narrow(self, learner_id: str, bytes_per_s: float) -> None:
        """Reduce the bandwidth of this learner's link from now on."""
        self._bandwidths[learner_id] = bytes_per_s

    def widen(self, learner_id: str) -> None:
        """Undo `narrow`; payloads under way keep their arrival times."""
        self._bandwidths.pop(learner_id, None)
        self._bandwidths.update((name, rate) for name, rate in self._options.thin_links if name == learner_id)

    def corrupt(self, learner_id: str) -> None:
        """Garble some payloads from and to this learner from now on."""
        self._corrupted.append(learner_id)

    def cure(self, learner_id: str) -> None:
        """Undo one `corrupt`."""
        self._corrupted.remove(learner_id)

    def delay_values(self, learner_id: str, delay_s: float) -> None:
        """Deliver this learner's answers to pulls late from now on; NEVER_S loses them."""
        self._value_delays.setdefault(learner_id, []).append(delay_s)

    def speed_up_values(self, learner_id: str, delay_s: float) -> None:
        """Undo one `delay_values`; answers under way keep their arrival times."""
        self._value_delays[learner_id].remove(delay_s)

    def send(self, pipe: LinkDirection, message: Message) -> None:
        """Send a message in this direction of a link."""
        engine, link = self._engine, pipe.link
        if self._direct:
            engine.at(engine.now_s + self._delay_s, pipe.deliver, (link, message))
            return
        if not link.alive or link.learner_id in self._partitioned:
            self.lost += 1
            return
        faults, random = self._faults, engine.random.random
        if faults is not None and 0 < faults.heals_s <= engine.now_s:
            faults = None
        if faults is not None and random() < faults.loss:
            self.lost += 1
            return
        arrival_s = self._arrival_s(pipe, message)
        if isinstance(message, FragmentValue) and (late_s := self._value_delays.get(link.learner_id)):
            arrival_s += max(late_s)
            if arrival_s >= NEVER_S:
                self.lost += 1
                return
        if link.learner_id in self._corrupted and isinstance(message, Digested) and random() < GARBLED_SHARE:
            engine.at(arrival_s, self._arrive, (pipe, Garbled(message)))
            return
        if faults is not None and random() < faults.reorder:
            arrival_s += faults.reorder_s * random()
        engine.at(arrival_s, self._arrive, (pipe, message))
        if faults is not None and random() < faults.duplication:
            engine.at(arrival_s + faults.reorder_s * random(), self._arrive, (pipe, message))

    def _arrival_s(self, pipe: LinkDirection, message: Message) -> float:
        """Return when a message arrives that keeps the order of its lane."""
        options, now_s = self._options, self._engine.now_s
        way_s = options.delay_s + options.jitter_s * self._engine.random.random()
        if not isinstance(message, BULK):
            starts_s = max(pipe.sent_s, now_s) if options.one_queue else now_s
            pipe.control_s = max(pipe.control_s, starts_s + way_s)
            return pipe.control_s
        bandwidth = self._bandwidths.get(pipe.link.learner_id, options.bandwidth_bytes_per_s)
        transfer_s = message.payload_bytes / bandwidth if bandwidth else 0.0
        pipe.sent_s = max(pipe.sent_s, now_s) + transfer_s
        pipe.payload_s = max(pipe.payload_s, pipe.sent_s + way_s)
        return pipe.payload_s

    def _arrive(self, item: Travelling) -> None:
        pipe, message = item
        link, faults = pipe.link, self._faults
        hold = self._held.get(link.learner_id)
        if hold is not None and hold.holds(pipe):
            hold.waiting.append(item)
            return
        cut = not link.alive and (faults is None or self._engine.random.random() >= faults.late)
        if cut or link.learner_id in self._partitioned:
            self.lost += 1
            return
        pipe.deliver((link, message))
