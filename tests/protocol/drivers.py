"""Drivers of both machines, in memory: the values that they keep, and what they may expect of a machine.

Digests and names stand for values, states and payloads. A machine that asks for one that is not there, frees one twice
or keeps too many fails the test.
"""

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from diloco_jax.protocol.effects import (
    Adopt,
    AdoptState,
    Discard,
    Drop,
    DropChunks,
    Effect,
    KeepChunk,
    Merge,
    Restore,
    SaveState,
    StageState,
    UnstageState,
)
from diloco_jax.protocol.learner.machine import Learner
from diloco_jax.protocol.learner.mailbox import Given, Mailbox
from diloco_jax.protocol.learner.recovery import STATES_MAX, Saved
from diloco_jax.protocol.messages import (
    NO_VERSION,
    AnchorValue,
    GlobalFragment,
    Message,
    StateChunk,
    StatePull,
    SyncerMessage,
)
from diloco_jax.protocol.syncer.machine import Syncer

PART_BYTES = 1000


class Value(NamedTuple):
    """A global value of a fragment."""

    version: int
    digest: int


def value_of(fragment_id: int, version: int, epoch: int) -> Value:
    """Return the value of a merge; each fragment, round and epoch of the syncer has another one."""
    return Value(version, 1 + epoch + 1_000 * version + 100_000_000 * (fragment_id + 1))


class Snapshot(NamedTuple):
    """Files of one moment of the run."""

    global_step: int
    # The state of the machine, as JSON.
    state: str
    values: tuple[Value, ...]
    tape_lines: int


class SyncerDriver:
    """Global values, payloads and snapshots of the syncer's process."""

    def __init__(self, num_fragments: int) -> None:
        self.values = [value_of(p, 0, 0) for p in range(num_fragments)]
        # (fragment, value): the value that a delta to it starts from.
        self.bases: dict[tuple[int, Value], Value] = {}
        self.snapshots: list[Snapshot] = []
        # The rounds whose merge has started.
        self.orders: dict[int, Merge] = {}
        self._payloads: set[tuple[int, str]] = set()

    def keep(self, global_step: int, learner_id: str) -> None:
        """Keep the value of a learner that the syncer did not drop."""
        key = (global_step, learner_id)
        assert key not in self._payloads, f"a second payload of {learner_id} for round {global_step}"
        self._payloads.add(key)

    def execute(self, effect: Effect, handled: Message | None) -> None:
        """Do what the machine asks for; `handled` is the message that it was given."""
        if isinstance(effect, Merge):
            assert all(each.steps >= 1 and each.tokens >= 1 for each in effect.contributions), effect
            self._free(effect.global_step, {each.learner_id for each in effect.contributions})
            self.orders[effect.global_step] = effect
        elif isinstance(effect, Drop) and effect.global_step >= 0:
            self._payloads.discard((effect.global_step, effect.peer))
        elif isinstance(effect, Discard):
            self._free(effect.global_step, set())
        elif isinstance(effect, Restore):
            assert isinstance(handled, AnchorValue), f"{effect} in answer to {handled}"
            assert (handled.fragment_id, handled.version) == (effect.fragment_id, effect.version), effect
            self.values[effect.fragment_id] = Value(handled.version, handled.digest)

    def merge(self, global_step: int, epoch: int, poisoned: set[str]) -> tuple[int, tuple[str, ...]]:
        """Finish a merge; return the digest of the fragment's value and the excluded learners."""
        order = self.orders.pop(global_step)
        names = [each.learner_id for each in order.contributions]
        excluded = tuple(name for name in names if name in poisoned)
        if len(excluded) < len(names):
            before, made = self.values[order.fragment_id], value_of(order.fragment_id, global_step, epoch)
            self.values[order.fragment_id] = made
            self.bases[order.fragment_id, made] = before
        return self.values[order.fragment_id].digest, excluded

    def check_sent(self, message: Message, handled: Message | None) -> None:
        """Check that the payload of a sent message exists."""
        if isinstance(message, GlobalFragment):
            held = self.values[message.fragment_id]
            assert held == (message.version, message.digest), f"{message} is to be sent, but the value here is {held}"
            if message.base != NO_VERSION:
                assert self.bases[message.fragment_id, held].version == message.base, f"no such step: {message}"
        elif isinstance(message, StateChunk):
            assert message is handled, "a part can be passed on only when it comes"

    def save(self, global_step: int, machine: Syncer, tape_lines: int) -> None:
        """Write a snapshot."""
        self.snapshots.append(Snapshot(global_step, json.dumps(machine.state()), tuple(self.values), tape_lines))

    def die(self) -> None:
        """Lose the memory, and load what an earlier process had on disk."""
        snapshots, num_fragments = self.snapshots, len(self.values)
        self.__init__(num_fragments)  # type: ignore[misc]
        self.snapshots = snapshots
        if snapshots:
            self.values = list(snapshots[-1].values)

    def _free(self, global_step: int, expected: set[str]) -> None:
        held = {name for step, name in self._payloads if step == global_step}
        assert held == expected, f"round {global_step}: payloads of {held} are held, {expected} are merged"
        self._payloads -= {(global_step, name) for name in held}


class LearnerDriver:
    """Anchors, copies of states and chunks of a donor's state in one learner's process."""

    def __init__(self, machine: Learner, num_parts: int) -> None:
        self.name = machine.learner_id
        self.machine = machine
        self.mailbox: Mailbox[None] = Mailbox(machine)
        self.anchors: dict[int, Value] = {}
        # The newest values that the learner has read, adopted or not.
        self.heads: dict[int, Value] = {}
        # True if the learner's arithmetic differs from the syncer's.
        self.misreads = False
        # The local steps of the staged copies.
        self.states: set[int] = set()
        self.state_adopted: AdoptState | None = None
        self._num_parts = num_parts
        # (donor, its local step, number of the chunk).
        self._parts: set[tuple[str, int, int]] = set()
        self._epochs: dict[int, int] = {}

    def given(
        self, message: SyncerMessage, bases: dict[tuple[int, Value], Value], now_s: float
    ) -> Iterator[Given[None]]:
        """Return what the machine is given for a message between two steps; the arguments are those of `read`."""
        if isinstance(message, GlobalFragment):
            self.read(message, bases, now_s)
        # No step is running, so the state may be copied now.
        elif isinstance(message, StatePull):
            yield Given(message, None, self.machine.on_message(message, now_s))
        elif (at_once := self.mailbox.arrive(message, None, now_s)) is not None:
            yield at_once
        while (given := self.mailbox.take(now_s)) is not None:
            yield given

    def execute(self, effect: Effect, handled: Message | None) -> None:
        """Do what the machine asks for; `handled` is the message that it was given."""
        if isinstance(effect, Adopt):
            self._adopt(effect, handled)
        elif isinstance(effect, StageState):
            assert effect.local_step == self.machine.local_step and effect.local_step not in self.states, effect
            self.states.add(effect.local_step)
            assert len(self.states) <= STATES_MAX, f"{self.name} keeps {self.states}"
        elif isinstance(effect, UnstageState):
            self.states.remove(effect.local_step)
        elif isinstance(effect, KeepChunk):
            assert isinstance(handled, StateChunk), f"{effect} in answer to {handled}"
            part = (handled.learner_id, handled.local_step, effect.part)
            assert part not in self._parts and effect.part == handled.part, f"{self.name} keeps {part} twice"
            self._parts.add(part)
        elif isinstance(effect, DropChunks):
            self._parts.clear()
        elif isinstance(effect, AdoptState):
            self._adopt_state(effect)

    def read(self, message: GlobalFragment, bases: dict[tuple[int, Value], Value], now_s: float) -> None:
        """Read a fragment that arrived, if the machine wants it.

        Args:
            bases: what a step leads to -> from where.
        """
        machine = self.machine
        if not machine.wants(message, now_s):
            return
        fragment_id, made = message.fragment_id, Value(message.version, message.digest)
        if message.base != NO_VERSION:
            head = self.heads.get(fragment_id, Value(NO_VERSION, 0))
            assert head.version == message.base, f"{self.name} applies {message} to {head}"
            if self.misreads or head != bases.get((fragment_id, made)):
                machine.on_corrupt(now_s)
                return
        self.mailbox.read(message, None, now_s)
        self.heads[fragment_id] = made

    def _adopt(self, effect: Adopt, handled: Message | None) -> None:
        assert isinstance(handled, GlobalFragment) and handled.fragment_id == effect.fragment_id, f"{effect}, {handled}"
        before = (self._epochs.get(effect.fragment_id, 0), self.anchors.get(effect.fragment_id, Value(-1, 0)).version)
        assert (handled.epoch, effect.version) > before, f"{self.name} went back to version {effect.version}"
        self._epochs[effect.fragment_id] = handled.epoch
        self.anchors[effect.fragment_id] = Value(effect.version, handled.digest)

    def _adopt_state(self, effect: AdoptState) -> None:
        machine = self.machine
        assert machine.local_step == 0, "a state is taken over before the first step"
        assert len(self.anchors) == len(machine.adopted), "global values come first"
        if effect.donor:
            wanted = {(effect.donor, effect.donor_step, part) for part in range(self._num_parts)}
            assert self._parts == wanted, f"{self.name} has {self._parts} of {wanted}"
        self._parts.clear()
        self.state_adopted = effect

    def fill(self, message: Message) -> Message | None:
        """Return the message with the fields that the driver fills in; None if there is nothing to send."""
        if isinstance(message, StateChunk):
            assert message.local_step in self.states, f"{self.name} gives a state of step {message.local_step}"
            if message.part >= self._num_parts:
                return None
            return message._replace(parts=self._num_parts, digest=message.local_step, payload_bytes=PART_BYTES)
        if isinstance(message, AnchorValue):
            held = self.anchors[message.fragment_id]
            assert held == (message.version, message.digest), f"{self.name} offers {message} and holds {held}"
            return message._replace(payload_bytes=PART_BYTES)
        return message


def saved_by(effect: SaveState, machine: Learner) -> Saved:
    """Describe the file after a learner saved its state."""
    return Saved(effect.global_step, tuple(machine.digests))


def check_fates(syncer: Syncer) -> None:
    """Check that every leased sample is merged, still leased to one learner, or free to be leased again."""
    book = syncer.leases
    leased, merged, overwritten, released, out = book.fates
    assert leased == merged + overwritten + released + out, book.fates
    plain = book.state()
    ranges = [*plain["pool"], *(held for holding in plain["holdings"] for held in holding["ranges"])]
    held = sorted(tuple(one) for one in ranges)
    assert all(before[1] <= after[0] for before, after in pairwise(held)), f"twice: {held}"
    assert merged + overwritten == plain["counts"][0] - sum(stop - start for start, stop in held), (
        f"{book.fates}, {held}"
    )
