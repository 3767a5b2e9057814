"""What a learner's process holds, in memory and on its disk, and what its machine asks it to do with that."""

from __future__ import annotations

from typing import Any

from diloco_jax.protocol.effects import (
    Adopt,
    DropParts,
    Effect,
    Finish,
    KeepPart,
    SaveState,
    StageState,
    UnstageState,
)
from diloco_jax.protocol.learner import Saved
from diloco_jax.protocol.messages import (
    AnchorValue,
    FragmentValue,
    GlobalFragment,
    Message,
    StatePart,
    SyncerMessage,
)
from diloco_jax.sim.node import Node, SavedCopy
from diloco_jax.sim.pace import Pace
from diloco_jax.sim.world import World, digest_of

SAVED_KEPT = 2
HANDLED = frozenset((Adopt, StageState, UnstageState, KeepPart, DropParts, SaveState, Finish))


class Holder(Node):
    """See above.

    Args:
        name: of the learner.
        world: where it runs.
        pace: of its steps.
        step_samples: samples in one of them.
    """

    __slots__ = ("_engine", "_world")

    def __init__(self, name: str, world: World, pace: Pace, step_samples: int) -> None:
        super().__init__(name, pace, step_samples)
        self._world = world
        self._engine = world.engine

    def filled(self, message: Any) -> Message | None:
        """What a machine says of bytes that only the driver knows."""
        scenario = self._world.scenario
        if isinstance(message, FragmentValue):
            if self.poisoned:
                self._world.useless.add((self.name, message.global_step))
            return message
        if isinstance(message, AnchorValue):
            held = self.anchors[message.fragment_id]
            assert held == (message.version, message.digest), f"{self.name} holds {held}, but sends {message}"
            return message._replace(payload_bytes=scenario.payload_bytes)
        assert isinstance(message, StatePart)
        assert message.local_step in self.copies, f"{self.name} sends {message}, but has copies {list(self.copies)}"
        if message.part >= scenario.state_parts:
            return None
        digest = digest_of(self.name, self.incarnation, message.local_step, message.part)
        return message._replace(parts=scenario.state_parts, digest=digest, payload_bytes=scenario.payload_bytes)

    def handle(self, effect: Effect, message: SyncerMessage | None) -> None:
        engine, scenario = self._engine, self._world.scenario
        if isinstance(effect, Adopt):
            assert isinstance(message, GlobalFragment), f"{effect} without a fragment that came"
            self.anchors[effect.fragment_id] = (effect.version, message.digest)
        elif isinstance(effect, StageState):
            assert not self.stepping, f"{self.name} copies its state while a step runs"
            assert effect.local_step not in self.copies, f"{self.name} copies its state twice: {effect}"
            self.copies[effect.local_step] = dict(self.anchors)
        elif isinstance(effect, UnstageState):
            del self.copies[effect.local_step]
        elif isinstance(effect, KeepPart):
            assert isinstance(message, StatePart), f"{effect} without a part that came"
            self.kept[effect.part] = message
        elif isinstance(effect, DropParts):
            self.kept = {}
        elif isinstance(effect, SaveState):
            machine = self.machine
            assert machine is not None
            described = Saved(effect.global_step, tuple(machine.digests))
            copy = SavedCopy(described, self.incarnation, machine.local_step, dict(self.anchors))
            engine.at(engine.now_s + scenario.save_s * engine.random.random(), self._saved, (self.life, copy))
        elif isinstance(effect, Finish):
            self.finished = effect.reason

    def _saved(self, item: tuple[int, SavedCopy]) -> None:
        life, copy = item
        if life == self.life:  # else it is half-written, and nobody takes it for one
            self.saved = [*self.saved, copy][-SAVED_KEPT:]
