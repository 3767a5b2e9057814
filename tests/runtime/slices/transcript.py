"""Golden transcripts of the slices of one island: commands in, everything that they sent each other out.

The form is that of tests/protocol/transcript.py. Lines `0 -> 1: ...` are messages in the order of their sending.
Indented lines are what slices log.

Commands (numbers are those of slices):

    new [slices=N shrink=1]   a fresh island; all slices look for a leader, and the others follow it
    step [times=N]        the leader makes inner steps; each is committed elsewhere with the next message
    adopt FRAGMENT        the leader adopts a value of the syncer
    lose N                the process of a slice ends
    lose-in-turn N        the same when it gets the next turn
    suspend N             a slice stands still from now on; resume N: it continues, and looks for a leader
    start N               the process of a slice starts again, without a state, and looks for a leader
    elect                 the leader was lost: all others look for a new one
    states                the last step is committed; what each slice has then
"""

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from diloco_jax.runtime.slices import messages as m
from diloco_jax.runtime.slices.following import Chosen, FollowingSlice
from diloco_jax.runtime.slices.leading import ForwardingIsland, Leadership
from diloco_jax.transport.slices.links import Item
from tests.protocol.transcript import Case
from tests.runtime.slices.conftest import timeless
from tests.runtime.slices.island import NAME, PARTS, RATE, Net

STRAGGLER_S = 3.0
PULSE = cast(Any, SimpleNamespace(beat=lambda: None, ready=lambda trains: None))
LOGGER = logging.getLogger("diloco_jax.runtime.slices")

_WORDS: dict[type, str] = {
    m.Lead: "Lead in term {0.term}, from change {0.base_change} of term {0.base_term}",
    m.Stand: "Stand at change {0.change} of term {0.term}",
    m.BeginCopy: "BeginCopy of the state after change {0.change}",
    m.Give: "Give slice {0.to} the state after change {0.change}",
    m.Caught: "Caught up at change {0.change}",
    m.Chunk: "Chunk of part {0.part} for turn {0.change}, attempt {0.attempt}",
    m.Mean: "Mean, chunk {0.chunk} for turn {0.change}, attempt {0.attempt}",
    m.HoldsMean: "HoldsMean of turn {0.change}, attempt {0.attempt}",
    m.Commit: "Commit of change {0.change}",
    m.AdoptValue: "AdoptValue of fragment {0.fragment_id} with {0.mode}, as change {0.change}",
    m.Overwrite: "Overwrite of fragment {0.fragment_id}, as change {0.change}",
    m.GoBack: "GoBack to the state before the term, as change {0.change}",
    m.End: "End with status {0.status}",
}


def message_text(message: Any, payload: memoryview) -> str:
    """Describe a message and the size of its payload in one line."""
    match message:
        case m.Follow(term, has_state):
            text = f"Follow in term {term}, with{'' if has_state else 'out'} the state"
        case m.Turn():
            owners = ", ".join(f"part {part} by {owner}" for part, owner in enumerate(message.owners))
            also = f", also to {' '.join(map(str, message.listeners))}" if message.listeners else ""
            text = f"Turn {message.change}, attempt {message.attempt}: {owners}{also}"
        case m.StatePart(_, change, start, total):
            text = f"StatePart from byte {start} of {total} of the state after change {change}"
        case _:
            text = _WORDS[type(message)].format(message)
    return f"{text} ({payload.nbytes} bytes)" if payload.nbytes else text


class Island:
    """The slices of one island; `tell` takes what they send."""

    def __init__(
        self, patch: pytest.MonkeyPatch, tell: Callable[[str], None], *, slices: int = 2, shrink: int = 0
    ) -> None:
        self._tell, self._shrinks = tell, bool(shrink)
        self.net = net = timeless(Net(slices), patch)
        net.on_sent = lambda sender, to, *sent: tell(f"{sender} -> {to}: {message_text(*sent)}")
        self._looking: dict[int, FollowingSlice] = {}
        self._leadership: Leadership | None = None
        for number in range(slices):
            self._starts(number)
        self.elect()

    @property
    def _leads(self) -> Leadership:
        assert self._leadership is not None, "no slice leads: use elect"
        return self._leadership

    def _starts(self, number: int) -> None:
        member = self.net.members[number]
        self._looking[number] = FollowingSlice(member, self.net.slices, 1, STRAGGLER_S, lambda: False, PULSE)

    def elect(self) -> None:
        """Let all slices that run look for a leader, each while the one before it waits; the best one leads."""
        members = self.net.members
        order = sorted(self._looking, key=lambda number: (members[number].standing, -number))
        chosen = self._look(order)
        for number in sorted(order):
            if number != chosen[number].leader:
                self._follow(number, chosen[number])
        self._leads.gather()

    def _look(self, order: list[int]) -> dict[int, Chosen]:
        own, *others = order
        chosen: dict[int, Chosen] = {}

        def wait() -> None:
            self.net.on_wait = lambda: None
            chosen.update(self._look(others))

        if others:
            self.net.on_wait = wait
        found = self._looking[own].elect()
        assert found is not None, "nobody stops it"
        if found.leader == own:
            self._leadership = Leadership(self.net.members[own], found, 1, STRAGGLER_S, lambda: False)
        return {**chosen, own: found}

    def _follow(self, number: int, chosen: Chosen) -> None:
        self.net.follow(number, self._leads, self.net.members[number].standing == chosen.base)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            # A slice that has followed since the last step counts from the next one on.
            self._leads.look()
            count = self._leads.count if self._shrinks else self.net.slices
            self._leads.make(RATE, PARTS[:count], NAME)

    def adopt(self, fragment_id: int) -> None:
        member = self._leads.member
        fragment = member.fragments[fragment_id]
        value = {piece.key: np.full(piece.stop - piece.start, 7, np.float32) for piece in fragment.slices}
        ForwardingIsland(self._leads, member).adopt(fragment, value, mode="overwrite")

    def lose(self, number: int) -> None:
        del self._looking[number]
        self.net.kill(number)
        if self._leads.member.own == number:
            self._leadership = None
            self.net.following.clear()

    def lose_in_turn(self, number: int) -> None:
        def on_message(receiver: int, item: Item) -> None:
            if receiver == number and isinstance(item.message, m.Turn):
                self.net.on_message = lambda *message: None
                self.lose(number)

        self.net.on_message = on_message

    def suspend(self, number: int) -> None:
        self.net.silent_since_s[number] = self.net.now_s

    def resume(self, number: int) -> None:
        """Let a slice continue; the end of its connections is the first that it notices."""
        del self.net.silent_since_s[number], self.net.following[number]
        self.net.links[number].inbox.clear()
        for other in self._looking.keys() - {number}:
            self.net.connect(number, other)
        self._look_at_leader(number)

    def start(self, number: int) -> None:
        self.net.start(number)
        self._starts(number)
        self._look_at_leader(number)

    def _look_at_leader(self, number: int) -> None:
        """Let one slice find the leader, which sends its notice twice per second."""
        self.net.on_wait = self._leads._tell
        chosen = self._looking[number].elect()
        self.net.on_wait = lambda: None
        assert chosen is not None, "nobody stops it"
        self._follow(number, chosen)

    def states(self) -> None:
        leader = self._leads.member.own
        self._leads._commit()
        self.net.others_work(leader)
        for number in sorted(self._looking):
            term, change = self.net.members[number].standing
            same = self.net.state(number).tobytes() == self.net.state(leader).tobytes()
            who = "leads" if number == leader else f"has {'the same' if same else 'another'} state"
            self._tell(f"slice {number} {who}, at change {change} of term {term}")


class Told(logging.Handler):
    """Takes what slices log."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self._take = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._take(f"    {record.getMessage()}")


def run(cases: list[Case]) -> Iterator[Case]:
    """Yield the same cases with the output that the slices give now."""
    island, lines = cast(Island, None), list[str]()
    handler, level = Told(lines.append), LOGGER.level
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for case in cases:
                for command in case.commands:
                    name, *words = command.split()
                    if name == "new":
                        island = Island(patch, lines.append, **_settings(words))
                    else:
                        _execute(island, name, words)
                yield case._replace(output=[*lines] or ["nothing happens"])
                lines.clear()
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(level)


def _settings(words: list[str]) -> dict[str, int]:
    return {key: int(value) for key, value in (word.split("=") for word in words)}


def _execute(island: Island, command: str, words: list[str]) -> None:
    names = "step", "adopt", "lose", "lose-in-turn", "suspend", "resume", "start", "elect", "states"
    if command not in names:
        raise ValueError(f"unknown command {command!r}; see the top of {__file__}")
    numbers = [int(word) for word in words if "=" not in word]
    getattr(island, command.replace("-", "_"))(*numbers, **_settings([word for word in words if "=" in word]))
