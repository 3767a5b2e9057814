"""Links that lose, repeat and reorder, that break, stand still, are slow or garble: the machines must survive it."""

from dataclasses import dataclass
from typing import NamedTuple, final

from diloco_jax.protocol.messages import AnchorValue, GlobalFragment, Message, StatePart
from diloco_jax.sim.engine import Engine
from diloco_jax.sim.network import BULK, LinkDirection, Network, NetworkOptions

DIGESTED = (GlobalFragment, AnchorValue, StatePart)  # messages that name the digest of their payload
GARBLED = 0.5  # share of these that arrive garbled while a link corrupts


@final
class Garbled(NamedTuple):
    """A message whose payload is not what its digest says."""

    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class TroubledOptions(NetworkOptions):
    """Trouble of links, besides their delay and bandwidth. Probabilities are per message."""

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
        NetworkOptions.__post_init__(self)
        for name in ("loss", "duplication", "reorder", "late"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"network.{name} is {value}, but a probability must be at least 0 and below 1")
        for name in ("reorder_s", "heals_s"):
            value = getattr(self, name)
            if value < 0:
                raise ValueError(f"network.{name} is {value}, but must be at least 0")


class TroubledNetwork(Network):
    """A network on which faults happen.

    Args:
        engine: whose time and randomness it uses.
        options: what messages suffer.
        faultless: no link will break and nobody be partitioned, so arrivals need no second look.
    """

    _options: TroubledOptions

    def __init__(self, engine: Engine, options: TroubledOptions, *, faultless: bool) -> None:
        super().__init__(engine, options)
        self._bandwidths = dict(options.thin_links)
        self._partitions: list[str] = []  # learners, as often as they are hit
        self._corrupting: list[str] = []
        self._held: dict[str, tuple[list[str], list[tuple[LinkDirection, Message | Garbled]]]] = {}  # what waits
        troubled = options.thin_links or options.loss or options.duplication or options.reorder
        self._clean = self._clean and faultless and not troubled

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
            super().send(pipe, message)
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

    def _bandwidth(self, learner_id: str) -> float:
        return self._bandwidths.get(learner_id, self._options.bandwidth_bytes_per_s)

    def _arrival_s(self, pipe: LinkDirection, message: Message) -> float:
        options = self._options
        if not options.one_queue or isinstance(message, BULK):
            return super()._arrival_s(pipe, message)
        way_s = options.delay_s + options.jitter_s * self._engine.random.random()
        pipe.control_s = max(pipe.control_s, pipe.sent_s + way_s, self._engine.now_s + way_s)
        return pipe.control_s

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
