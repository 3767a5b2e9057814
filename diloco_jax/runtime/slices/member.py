"""One slice of an island: it computes its parts of a turn, exchanges them, and obeys the changes of the leader.

Only the thread that steps uses it. A member has no timers: its callers decide who waits for what, and for how long
(following.py, leading.py).

Each host of a slice of several has a member with its shards. That of host 0 checks what it is asked to do, orders it of
the other hosts, and then does it too (hosts.py, obeying.py).
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from diloco_jax.core.fragments import Fragment
from diloco_jax.core.held import HeldBlocks
from diloco_jax.core.layout import Layout, whole
from diloco_jax.runtime.island.built_in import BuiltInLoop
from diloco_jax.runtime.island.saved_states import Leaves, StateName
from diloco_jax.runtime.slices.exchange import Sending, TurnExchange
from diloco_jax.runtime.slices.hosts import JointLinks, SliceHosts
from diloco_jax.runtime.slices.messages import (
    AdoptValue,
    BeginCopy,
    Change,
    Chunk,
    Commit,
    Give,
    GoBack,
    Mean,
    Overwrite,
    StatePart,
    Turn,
    check_numbers,
    check_turn,
)
from diloco_jax.runtime.slices.orders import BeginTerm, EndTerm, LoadCopy
from diloco_jax.runtime.slices.state import ReceivedCopy, copy_of, parts_of_state
from diloco_jax.settings.resolved import ResolvedRun
from diloco_jax.training.island import StepHandle
from diloco_jax.training.parts import Part
from diloco_jax.transport.slices.links import Item, SliceLinks

# Chunks and means of one slice that came before their turn: the leader's request may be slower than its answer.
EARLY_MAX = 256

# A state is larger than the queue of a connection, so its sender waits while this much is queued, and looks this often.
AHEAD_BYTES, LOOK_S = 1 << 26, 0.01

# How an island of several slices adopts values; rebase needs what was sent, which only the leader has.
MODES = ("overwrite", "blend")
# Digest in a state's name of a fragment that has changed since the name was made; no global value has it.
CHANGED = -1

log = logging.getLogger(__name__)


class HeldState(NamedTuple):
    """Name of a slice's state: the term of the leader whose changes it obeyed, and the number of the last one."""

    term: int = 0
    change: int = 0


class SliceMember:
    """The devices and the state of one slice, and its part in the present turn.

    Args:
        own: number of this slice.
        run: the run, resolved for the model.
        loop: the model, its data and its devices.
        links: the connections to the other slices.
        hosts: the other hosts of this slice, on host 0.
        held: the blocks of each fragment that this host holds; None if it is the slice's only one.
    """

    def __init__(
        self,
        own: int,
        run: ResolvedRun,
        loop: BuiltInLoop,
        links: SliceLinks | JointLinks,
        hosts: SliceHosts | None = None,
        held: Sequence[HeldBlocks] | None = None,
    ) -> None:
        self.own = own
        self.run = run
        self.loop = loop
        self.size = loop.part_size
        self.links = links
        self.hosts = SliceHosts() if hosts is None else hosts
        self._held = held
        self.steps = loop.parts
        self.standing = HeldState()
        # The name of the learner's state, whose fragments may be newer; None before the first turn.
        self.name: StateName | None = None
        # The state when the present leader began, until its first turn.
        self.copy: Leaves | None = None
        # The names of the copy: that among the slices, and the learner's.
        self._copied: tuple[HeldState, StateName | None] = self.standing, self.name
        self.exchange: TurnExchange | None = None
        # The copy of another slice's state that this one waits for, and one that came before the request for it.
        self.receiving: ReceivedCopy | None = None
        self._unasked: ReceivedCopy | None = None
        # The change, the attempt and the number of the part whose gradient is being computed. Another thread reads it.
        self.computing: tuple[int, int, int] | None = None
        # Parts of the present turn that this slice has computed.
        self._parts: dict[int, Part] = {}
        # What came before its turn, by sender.
        self._early: dict[int, list[tuple[Chunk | Mean, Any]]] = {}

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        return self.run.fragments

    @property
    def complete(self) -> bool:
        """Tell whether all hosts of this slice hold the whole mean gradient of the present turn."""
        exchange = self.exchange
        return exchange is not None and exchange.complete and self.hosts.hold(exchange.turn)

    @property
    def lacks(self) -> set[int]:
        """Return the slices that hosts of this slice wait for in the present turn."""
        exchange = self.exchange
        return set() if exchange is None else exchange.lacks | self.hosts.lack(exchange.turn)

    def begin_term(self, term: int) -> None:
        """Keep a copy of the present state, which a new leader may go back to."""
        self.hosts.order(BeginTerm(term))
        self.abandon()
        self.copy = copy_of(self.loop.island) if self.standing.change else None
        self.standing = HeldState(term, self.standing.change)
        self._copied = self.standing, self.name

    def end_term(self) -> None:
        """Forget the present turn; undo the changes of a leader that was lost before its first turn.

        Only a turn names the state after such changes, so a replay could not find it.
        """
        self.hosts.order(EndTerm())
        self.abandon()
        self.receiving = self._unasked = None
        standing, name = self._copied
        if self.copy is not None and self.standing != standing:
            self.loop.island.load_shards(self.copy)
            self.standing, self.name = standing, name
        self.copy = None

    def abandon(self) -> None:
        """Forget the present turn: its step was not made."""
        self.exchange = None
        self._parts.clear()

    def receive(self, timeout_s: float) -> Item | None:
        """Return the next item of the connections; a message with impossible numbers ends its connection instead."""
        while (item := self.links.receive(timeout_s)) is not None:
            try:
                if item.slice != self.own:
                    check_numbers(item.message)
            except ValueError as error:
                self.links.drop(item.slice, str(error))
            else:
                return item
        return None

    def begin_turn(self, turn: Turn) -> None:
        """Start an attempt of a turn, compute the parts of this slice, and send what the others need of them.

        Raises:
            ValueError: the turn is not one that this slice can make next.
        """
        check_turn(turn, self.run.config.islands.slices, self.size)
        last = -1 if self.exchange is None else self.exchange.turn.attempt
        term, change = self.standing
        if (turn.term, turn.change) != (term, change + 1) or turn.attempt <= last:
            raise ValueError(
                f"turn {turn.change} of term {turn.term} in attempt {turn.attempt} does not follow change {change} of "
                f"term {term} and attempt {last}"
            )
        if self.own not in (*turn.members, *turn.listeners):
            raise ValueError(f"slice {self.own} got a turn of slices {turn.members} and {turn.listeners}")
        name = StateName.from_text(turn.name)
        if len(name.digests) != len(self.fragments):
            raise ValueError(f"a state's name has {len(name.digests)} digests of {len(self.fragments)} fragments")
        self.hosts.order(turn)
        if self.exchange is None or self.exchange.turn.change != turn.change:
            self._parts.clear()
        self.copy = None
        self.name = name
        self.exchange = exchange = TurnExchange(self.own, turn, self.steps.size)
        mine = [part for part, owner in enumerate(turn.owners) if owner == self.own and self.own in turn.members]
        missing = [part for part in mine if part not in self._parts]
        for part in mine:
            if part not in missing:
                self._send(exchange.add(part, self._parts[part]))
        for number, part in enumerate(missing):
            ahead = [each for later in missing[number + 1 :] for each in turn.parts[later]]
            self.loop.put_batch(turn.parts[part], ahead)
            batch, position = self.loop.take_batch()
            self.computing = turn.change, turn.attempt, part
            self._parts[part] = self.steps.take(self.steps.gradient(batch, position))
            self.computing = None
            self._send(exchange.add(part, self._parts[part]))
        # After this slice's own parts, whose metrics are known to be right.
        early, self._early = self._early, {}
        for sender, messages in early.items():
            for message, payload in messages:
                self.route(sender, message, payload)

    def route(self, sender: int, message: Chunk | Mean, payload: Any) -> None:
        """Take a chunk or a mean of the present turn; keep one of a later turn, and drop one of an earlier turn.

        One that does not belong to its turn ends the connection of its sender.
        """
        try:
            self._take(sender, message, payload)
        except ValueError as error:
            self.links.drop(sender, str(error))

    def _take(self, sender: int, message: Chunk | Mean, payload: Any) -> None:
        if len(payload) % 4 or len(payload) > 4 * self.steps.size:
            raise ValueError(f"a chunk has {len(payload)} bytes, a gradient {self.steps.size} float32 numbers")
        exchange, at = self.exchange, (message.term, message.change, message.attempt)
        turn = None if exchange is None else exchange.turn
        present = (*self.standing, 0) if turn is None else (turn.term, turn.change, turn.attempt)
        if at > present:
            early = self._early.setdefault(sender, [])
            if len(early) >= EARLY_MAX:
                raise ValueError(f"{EARLY_MAX} chunks came before their turns")
            early.append((message, payload))
        elif exchange is not None and at == present:
            numbers = np.frombuffer(payload, np.float32)
            if isinstance(message, Mean):
                exchange.on_mean(sender, message.chunk, numbers)
            else:
                self._send(exchange.on_chunk(sender, message, numbers))

    def _send(self, sendings: Iterable[Sending]) -> None:
        for sending in sendings:
            self.links.send(sending.to, sending.message, sending.payload)

    def apply(self, change: int) -> StepHandle:
        """Dispatch the step of the present turn; `loop.wait` returns its metrics, which only a member of the turn has.

        Raises:
            ValueError: the change is not that of a turn whose mean gradient is here.
        """
        exchange = self.exchange
        if exchange is None or not self.complete or exchange.turn.change != change:
            raise ValueError(f"change {change} commits a turn whose gradient is not here")
        self.hosts.order(Commit(change))
        metrics = exchange.metrics() if self.own in exchange.turn.members else {}
        handle = self.steps.apply(exchange.mean, exchange.turn.rate, metrics)
        self.standing = self.standing._replace(change=change)
        if self.name is not None:
            self.name = self.name._replace(local_step=self.name.local_step + 1)
        self.abandon()
        self._forget_early(self.standing)
        return handle

    def await_copy(self, term: int, change: int) -> None:
        """Wait for another slice's state after this change, and forget what is of no use beside it."""
        self.hosts.order(BeginCopy(term, change))
        self.abandon()
        self._forget_early(HeldState(term, change))
        early, before, self._unasked = self._unasked, self.receiving, None
        if early is not None and early.is_of(term, change):
            self.receiving = early
        # A host whose part is complete has reported that.
        elif before is None or not (before.is_of(term, change) and before.complete):
            self.receiving = ReceivedCopy(self.loop.island.shards(), term, change)

    def take_state(self, part: StatePart, payload: Any) -> None:
        """Take a part of a state; drop one of another state. ValueError if it cannot belong to its state.

        The request for the state is sent by the leader, so the first parts may come before it.
        """
        at = part.term, part.change
        asked = self.receiving is not None and self.receiving.is_of(*at)
        if part.start == 0 and not asked and at > self.standing:
            self._unasked = ReceivedCopy(self.loop.island.shards(), *at)
        copy = self.receiving if asked else self._unasked
        if copy is not None and copy.is_of(*at):
            copy.add(part, payload)

    def _forget_early(self, state: HeldState) -> None:
        self._early = {
            sender: [each for each in early if (each[0].term, each[0].change) > state]
            for sender, early in self._early.items()
        }

    def obey(self, message: Change, payload: Any) -> None:
        """Make a change of the leader; ValueError if it cannot be the next one of this slice."""
        island = self.loop.island
        if message.change != self.standing.change + 1:
            raise ValueError(f"change {message.change} does not follow change {self.standing.change}")
        match message:
            case Commit(change):
                self.apply(change)
                return
            case AdoptValue(_, fragment_id, mode, alpha):
                if mode not in MODES:
                    raise ValueError(f"a value is to be adopted with {mode[:80]!r}, expected {' or '.join(MODES)}")
                value = self.value(fragment_id, payload)
                self.hosts.order(message)
                island.adopt(*value, mode=mode, alpha=alpha)  # type: ignore[arg-type]
                self._note_changed(fragment_id)
            case Overwrite(_, fragment_id):
                value = self.value(fragment_id, payload)
                self.hosts.order(message)
                island.overwrite(*value)
                self._note_changed(fragment_id)
            case GoBack():
                if self.copy is None:
                    raise ValueError("the state when the leader began is not here any more")
                self.hosts.order(message)
                island.load_shards(self.copy)
                self.name = self._copied[1]
        self.standing = self.standing._replace(change=message.change)

    def _note_changed(self, fragment_id: int) -> None:
        """Take a fragment out of the state's name, because the next turn is the first to name its new value."""
        if self.name is not None:
            digests = tuple(CHANGED if p == fragment_id else each for p, each in enumerate(self.name.digests))
            self.name = self.name._replace(digests=digests)

    def value(self, fragment_id: int, payload: Any) -> tuple[Fragment, dict[str, Any]]:
        """Return a fragment, and this host's part of a value of it, from its bytes; ValueError if they are not one."""
        if fragment_id >= len(self.fragments):
            raise ValueError(f"there is no fragment {fragment_id}, only 0 to {len(self.fragments) - 1}")
        layout = self._layout(fragment_id)
        numbers = np.frombuffer(payload, np.float32)
        if numbers.size != layout.size:
            raise ValueError(f"a value of fragment {fragment_id} has {numbers.size} numbers instead of {layout.size}")
        values = layout.views(numbers) if self._held is None else self._held[fragment_id].slices(numbers)
        return self.fragments[fragment_id], values

    def flat(self, fragment_id: int, values: Mapping[str, Any]) -> np.ndarray:
        """Return this host's part of a value of a fragment as float32 numbers, as `value` reads them."""
        held = values if self._held is None else {key: each.values for key, each in values.items()}
        return self._layout(fragment_id).flat(held)

    def _layout(self, fragment_id: int) -> Layout:
        return whole(self.fragments[fragment_id]) if self._held is None else self._held[fragment_id].layout

    def load(self) -> None:
        """Continue from the copy of another slice's state, which is complete."""
        received, self.receiving = self.receiving, None
        assert received is not None, "no state was requested"
        leaves = received.leaves()
        self.loop.island.check_shards(leaves)
        self.hosts.order(LoadCopy())
        self.loop.island.load_shards(leaves)
        self.standing = HeldState(received.term, received.change)
        # The turn that follows names it.
        self.copy, self.name = None, None

    def give(self, to: int, change: int, start: Callable[[Callable[[], None]], None]) -> None:
        """Send a copy of the present state to another slice, from a thread that `start` makes.

        Raises:
            ValueError: there is no such other slice, or this slice has another state.
        """
        if to == self.own or to >= self.run.config.islands.slices or change != self.standing.change:
            raise ValueError(f"slice {self.own} at change {self.standing.change} cannot give state {change} to {to}")
        self.hosts.order(Give(to, change))
        staged, term = self.loop.island.stage_shards(), self.standing.term

        def send() -> None:
            for part, payload in parts_of_state(staged, term, change):
                # Steps do not wait behind the state either.
                while self.links.waiting_bytes(to) > AHEAD_BYTES:
                    time.sleep(LOOK_S)
                if not self.links.send(to, part, payload):
                    return

        start(send)
