"""One slice of an island: it computes its parts of a turn, exchanges them, and obeys the changes of the leader.

Only the thread that steps uses it. A member has no timers: its callers decide who waits for what, and for how long
(following.py, leading.py).
"""

import json
import logging
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from diloco_jax.core.layout import Layout, whole
from diloco_jax.runtime.island.built_in import BuiltInLoop
from diloco_jax.runtime.island.saved_states import Leaves, StateName
from diloco_jax.runtime.slices.exchange import Exchange, Sending
from diloco_jax.runtime.slices.messages import Adopt, Change, Chunk, Commit, Mean, Overwrite, Restore, Turn
from diloco_jax.runtime.slices.state import ReceivedCopy, copy_of, parts_of_state
from diloco_jax.settings.resolved import ResolvedRun
from diloco_jax.training.island import StepHandle
from diloco_jax.training.parts import Part
from diloco_jax.transport.slices.links import SliceLinks

# Chunks and means that came before their turn: the leader's request may be slower than a neighbour's answer.
EARLY_MAX = 1024

log = logging.getLogger(__name__)


class Standing(NamedTuple):
    """What state a slice has: the term of the leader whose changes it obeyed, and the number of the last one."""

    term: int = 0
    change: int = 0


class Member:
    """The devices and the state of one slice, and its part in the present turn.

    Args:
        own: number of this slice.
        run: the run, resolved for the model.
        loop: the model, its data and its devices.
        links: the connections to the other slices.
    """

    def __init__(self, own: int, run: ResolvedRun, loop: BuiltInLoop, links: SliceLinks) -> None:
        self.own = own
        self.run = run
        self.loop = loop
        self.size = loop.part_size
        self.links = links
        self.steps = loop.parts
        self.standing = Standing()
        # The name of the learner's state, of which the fragments may be newer; None before the first turn.
        self.name: StateName | None = None
        # The state when the present leader began, until its first turn.
        self.copy: Leaves | None = None
        self.exchange: Exchange | None = None
        # Parts of the present turn that this slice has computed.
        self._parts: dict[int, Part] = {}
        self._early: list[tuple[Chunk | Mean, Any]] = []
        self._applied: StepHandle | None = None

    @property
    def fragments(self) -> tuple[Any, ...]:
        return self.run.fragments

    def begin_term(self, term: int) -> None:
        """Keep a copy of the present state, which a new leader may go back to."""
        self.abandon()
        self.copy = copy_of(self.loop.island) if self.standing.change else None
        self.standing = Standing(term, self.standing.change)

    def abandon(self) -> None:
        """Forget the present turn: its step was not made."""
        self.exchange = None
        self._parts.clear()

    def begin_turn(self, turn: Turn) -> None:
        """Start an attempt of a turn, compute the parts of this slice, and send what the others need of them."""
        if self.exchange is None or self.exchange.turn.change != turn.change:
            self._parts.clear()
        self.copy = None
        self.name = StateName.parse(json.loads(turn.name))
        self.exchange = exchange = Exchange(self.own, turn, self.steps.size)
        early, self._early = self._early, []
        for message, payload in early:
            self.route(message, payload)
        mine = [part for part, owner in enumerate(turn.owners) if owner == self.own and self.own in turn.members]
        missing = [part for part in mine if part not in self._parts]
        for part in mine:
            if part not in missing:
                self._send(exchange.add(part, self._parts[part]))
        for number, part in enumerate(missing):
            ahead = [each for later in missing[number + 1 :] for each in turn.parts[later]]
            self.loop.put_batch(turn.parts[part], ahead)
            batch, position = self.loop.take_batch()
            self._parts[part] = self.steps.take(self.steps.gradient(batch, position))
            self._send(exchange.add(part, self._parts[part]))

    def route(self, message: Chunk | Mean, payload: Any) -> None:
        """Take a chunk or a mean of the present turn; keep one of a later turn, and drop one of an earlier turn.

        Raises:
            ValueError: it does not belong to the turn that it names.
        """
        exchange, at = self.exchange, (message.change, message.attempt)
        present = (self.standing.change, 0) if exchange is None else (exchange.turn.change, exchange.turn.attempt)
        if at > present:
            if len(self._early) >= EARLY_MAX:
                raise ValueError(f"{EARLY_MAX} chunks came before their turns")
            self._early.append((message, payload))
        elif exchange is not None and at == present:
            if len(payload) % 4:
                raise ValueError(f"a chunk has {len(payload)} bytes, which are no float32 numbers")
            numbers = np.frombuffer(payload, np.float32)
            if isinstance(message, Mean):
                exchange.on_mean(message.chunk, numbers)
            else:
                self._send(exchange.on_chunk(message.part, message.metrics, message.weight, numbers))

    def _send(self, sendings: Iterable[Sending]) -> None:
        for sending in sendings:
            self.links.send(sending.to, sending.message, sending.payload)

    def apply(self, change: int) -> dict[str, float]:
        """Make the step of the present turn; return its metrics, which only a member of the turn has."""
        exchange = self.exchange
        assert exchange is not None and exchange.complete, "a turn was committed whose gradient is not here"
        member = self.own in exchange.turn.members
        metrics = exchange.metrics() if member else {}
        self._applied = self.steps.apply(exchange.mean, exchange.turn.rate, metrics)
        self.standing = self.standing._replace(change=change)
        if self.name is not None:
            self.name = self.name._replace(local_step=self.name.local_step + 1)
        norm = math.sqrt(float(np.dot(exchange.mean, exchange.mean))) if member else 0.0
        self.abandon()
        self._early = [each for each in self._early if each[0].change > change]
        return {**metrics, "grad_norm": norm}

    def obey(self, message: Change, payload: Any) -> None:
        """Make a change of the leader; ValueError if its payload does not fit."""
        island = self.loop.island
        match message:
            case Commit(change):
                self.apply(change)
                return
            case Adopt(_, fragment_id, mode, alpha):
                island.adopt(self.fragments[fragment_id], self._values(fragment_id, payload), mode=mode, alpha=alpha)  # type: ignore[arg-type]
            case Overwrite(_, fragment_id):
                island.overwrite(self.fragments[fragment_id], self._values(fragment_id, payload))
            case Restore():
                assert self.copy is not None, "a slice without the leader's state follows it"
                island.load_shards(self.copy)
        self.standing = self.standing._replace(change=message.change)

    def _values(self, fragment_id: int, payload: Any) -> dict[str, np.ndarray]:
        layout: Layout = whole(self.fragments[fragment_id])
        numbers = np.frombuffer(payload, np.float32)
        if numbers.size != layout.size:
            raise ValueError(f"a value of fragment {fragment_id} has {numbers.size} numbers instead of {layout.size}")
        return layout.views(numbers)

    def load(self, received: ReceivedCopy, term: int) -> None:
        """Continue from another slice's state."""
        leaves = received.leaves()
        self.loop.island.check_shards(leaves)
        self.loop.island.load_shards(leaves)
        self.standing = Standing(term, received.change)

    def give(self, to: int, change: int, start: Callable[[Callable[[], None]], None]) -> None:
        """Send a copy of the present state to another slice, from a thread that `start` makes."""
        staged = self.loop.island.stage_state()

        def send() -> None:
            for part, payload in parts_of_state(staged, change):
                if not self.links.send(to, part, payload):
                    return

        start(send)
