"""A network of links between learners and the syncer: delay and bandwidth.

A link is one connection of one incarnation, two pipes of two lanes each. Like a real transport a lane keeps its order
and there is none between lanes. `faults/` has links that lose, repeat and reorder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from diloco_jax.protocol.messages import AnchorValue, FragmentValue, GlobalFragment, Message, StatePart
from diloco_jax.sim.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOptions:
    """Delay and bandwidth of links."""

    delay_s: float = 0.01
    """Seconds from one end to the other, before jitter and transfer."""
    jitter_s: float = 0.0
    """Up to so many seconds more, drawn evenly for every message; a lane keeps its order all the same."""
    bandwidth_bytes_per_s: float = 0.0
    """Of each direction of each link, for payloads; 0 means that they take no time."""

    def __post_init__(self) -> None:
        for name in ("delay_s", "jitter_s", "bandwidth_bytes_per_s"):
            value = getattr(self, name)
            if value < 0:
                raise ValueError(f"network.{name} is {value}, but must be at least 0")


Deliver = Callable[["tuple[SimulatedLink, Any]"], None]
BULK = (FragmentValue, GlobalFragment, AnchorValue, StatePart)  # those with a payload, on a lane of their own


@dataclass(slots=True, eq=False)
class LinkDirection:
    """One direction of a link."""

    link: SimulatedLink
    deliver: Deliver
    sent_s: float = 0.0  # when the payloads that wait for bandwidth are through
    control_s: float = 0.0  # newest arrival of each lane
    payload_s: float = 0.0


class SimulatedLink:
    """One connection; `lost` is what the syncer's process does when it finds out that the link is gone."""

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
    """Moves messages: calls the pipe's `deliver` with (link, message) when one arrives."""

    def __init__(self, engine: Engine, options: NetworkOptions) -> None:
        self.lost = 0
        self._engine = engine
        self._options = options
        self._delay_s = options.delay_s
        self._clean = not (options.jitter_s or options.bandwidth_bytes_per_s)  # arrivals need no second look

    def send(self, pipe: LinkDirection, message: Message) -> None:
        """Put a message on its way."""
        engine = self._engine
        if self._clean:
            engine.at(engine.now_s + self._delay_s, pipe.deliver, (pipe.link, message))
        elif pipe.link.alive:
            engine.at(self._arrival_s(pipe, message), self._arrive, (pipe, message))
        else:
            self.lost += 1

    def _bandwidth(self, learner_id: str) -> float:
        return self._options.bandwidth_bytes_per_s

    def _arrival_s(self, pipe: LinkDirection, message: Message) -> float:
        """Return when a message arrives that keeps the order of its lane."""
        options, now_s = self._options, self._engine.now_s
        way_s = options.delay_s + options.jitter_s * self._engine.random.random()
        if not isinstance(message, BULK):
            pipe.control_s = max(pipe.control_s, now_s + way_s)
            return pipe.control_s
        bandwidth = self._bandwidth(pipe.link.learner_id)
        transfer_s = message.payload_bytes / bandwidth if bandwidth else 0.0
        pipe.sent_s = max(pipe.sent_s, now_s) + transfer_s
        pipe.payload_s = max(pipe.payload_s, pipe.sent_s + way_s)
        return pipe.payload_s

    def _arrive(self, item: tuple[LinkDirection, Message]) -> None:
        pipe, message = item
        if pipe.link.alive:
            pipe.deliver((pipe.link, message))
        else:
            self.lost += 1
