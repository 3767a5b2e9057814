"""The fragments and states that one process of a learner holds in memory; digests stand for their bytes.

A whole fragment carries its own digest. A step gives the right digest only when it is applied to its base.
"""

from hashlib import blake2b
from typing import NamedTuple

from diloco_jax.protocol.effects import Adopt, DropChunks, Effect, KeepChunk, StageState, UnstageState
from diloco_jax.protocol.messages import NO_VERSION, AnchorValue, GlobalFragment, Message, StateChunk, SyncerMessage
from diloco_jax.sim.scenario import Scenario

# A fragment's version, and the digest of its bytes.
Value = tuple[int, int]
HELD = frozenset((Adopt, StageState, UnstageState, KeepChunk, DropChunks))


def digest_of(*what: object) -> int:
    """Return 64 bits that stand for bytes: equal for equal arguments, different for different ones."""
    return int.from_bytes(blake2b(repr(what).encode(), digest_size=8).digest(), "little")


class Step(NamedTuple):
    """A payload that turns the fragment with digest `base` into the one with digest `made`."""

    base: int
    made: int


# The key is the number of the syncer's process, the fragment and the version.
Steps = dict[tuple[int, int, int], Step]


class Holdings:
    """The memory of one process.

    Attributes:
        anchors: fragment -> the global value that was adopted last.
        copies: local steps of copied states.
        kept: part of another learner's state -> the message that brought it.
        heads: fragment -> the value that was decoded last, adopted or not; steps apply to it.
    """

    __slots__ = ("_incarnation", "_name", "_scenario", "_steps", "anchors", "copies", "heads", "kept")

    def __init__(self, name: str, incarnation: int, scenario: Scenario, steps: Steps) -> None:
        self.anchors: dict[int, Value] = {}
        self.copies: set[int] = set()
        self.kept: dict[int, StateChunk] = {}
        self.heads: dict[int, Value] = {}
        self._name = name
        self._incarnation = incarnation
        self._scenario = scenario
        self._steps = steps

    def read(self, message: GlobalFragment) -> bool:
        """Decode a payload; return whether the result has the right digest."""
        fragment_id = message.fragment_id
        if message.base != NO_VERSION:
            step, held = self._steps.get((message.epoch, fragment_id, message.version)), self.heads.get(fragment_id)
            if step is None or held is None or held[1] != step.base or step.made != message.digest:
                return False
        self.heads[fragment_id] = (message.version, message.digest)
        return True

    def fill(self, message: AnchorValue | StateChunk) -> Message | None:
        """Complete a message of the machine with the bytes that only the driver has; None if there is no such part."""
        scenario = self._scenario
        if isinstance(message, AnchorValue):
            held = self.anchors[message.fragment_id]
            assert held == (message.version, message.digest), f"{self._name} holds {held}, but sends {message}"
            return message._replace(payload_bytes=scenario.payload_bytes)
        assert message.local_step in self.copies, f"{self._name} sends {message}, but has copies {self.copies}"
        if message.part >= scenario.state_parts:
            return None
        digest = digest_of(self._name, self._incarnation, message.local_step, message.part)
        return message._replace(parts=scenario.state_parts, digest=digest, payload_bytes=scenario.payload_bytes)

    def execute(self, effect: Effect, message: SyncerMessage | None) -> None:
        """Execute one of HELD; `message` is the input that led to it."""
        if type(effect) is Adopt:
            assert type(message) is GlobalFragment, f"{effect} without a fragment that arrived"
            self.anchors[effect.fragment_id] = (effect.version, message.digest)
        elif isinstance(effect, StageState):
            assert effect.local_step not in self.copies, f"{self._name} copies its state twice: {effect}"
            self.copies.add(effect.local_step)
        elif isinstance(effect, UnstageState):
            self.copies.remove(effect.local_step)
        elif isinstance(effect, KeepChunk):
            assert isinstance(message, StateChunk), f"{effect} without a part that arrived"
            self.kept[effect.part] = message
        elif isinstance(effect, DropChunks):
            self.kept = {}
