"""The values that one process of a learner holds in memory, and what its machine asks for them. Bytes are digests.

A whole value carries its own digest; a payload that is a step makes the right one from its base only.
"""

from hashlib import blake2b
from typing import NamedTuple

from diloco_jax.protocol.effects import Adopt, DropParts, Effect, KeepPart, StageState, UnstageState
from diloco_jax.protocol.messages import NO_VERSION, AnchorValue, GlobalFragment, Message, StatePart, SyncerMessage
from diloco_jax.sim.scenario import Scenario

Value = tuple[int, int]  # version of a fragment, and the digest of its bytes
HELD = frozenset((Adopt, StageState, UnstageState, KeepPart, DropParts))


def digest_of(*what: object) -> int:
    """64 bits that stand for bytes which were never made: equal for equal arguments, different for others."""
    return int.from_bytes(blake2b(repr(what).encode(), digest_size=8).digest(), "little")


class Step(NamedTuple):
    """A payload that makes the one digest of the other, and garbage of any other."""

    base: int
    made: int


Steps = dict[tuple[int, int, int], Step]  # by the syncer's life, fragment and version


class Holdings:
    """The memory of one process, with the values to which steps apply."""

    __slots__ = ("_incarnation", "_name", "_scenario", "_steps", "anchors", "copies", "heads", "kept")

    def __init__(self, name: str, incarnation: int, scenario: Scenario, steps: Steps) -> None:
        self.anchors: dict[int, Value] = {}  # fragment -> global value that was adopted last
        self.copies: set[int] = set()  # local steps of copied states
        self.kept: dict[int, StatePart] = {}  # part of another learner's state -> as it came
        self._name = name
        self._incarnation = incarnation
        self._scenario = scenario
        self._steps = steps
        self.heads: dict[int, Value] = {}  # fragment -> value that was read last, adopted or not

    def read(self, message: GlobalFragment) -> bool:
        """Decode a payload; returns whether the value has the digest that it should."""
        fragment_id = message.fragment_id
        if message.base != NO_VERSION:
            step, held = self._steps.get((message.epoch, fragment_id, message.version)), self.heads.get(fragment_id)
            if step is None or held is None or held[1] != step.base or step.made != message.digest:
                return False
        self.heads[fragment_id] = (message.version, message.digest)
        return True

    def fill(self, message: AnchorValue | StatePart) -> Message | None:
        """Complete a message of the machine with bytes that only the driver knows; None: there is no such part."""
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
        """Do one of HELD; `message` led to it."""
        if type(effect) is Adopt:
            assert type(message) is GlobalFragment, f"{effect} without a fragment that came"
            self.anchors[effect.fragment_id] = (effect.version, message.digest)
        elif isinstance(effect, StageState):
            assert effect.local_step not in self.copies, f"{self._name} copies its state twice: {effect}"
            self.copies.add(effect.local_step)
        elif isinstance(effect, UnstageState):
            self.copies.remove(effect.local_step)
        elif isinstance(effect, KeepPart):
            assert isinstance(message, StatePart), f"{effect} without a part that came"
            self.kept[effect.part] = message
        elif isinstance(effect, DropParts):
            self.kept = {}
