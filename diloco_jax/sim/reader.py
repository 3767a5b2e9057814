"""How a learner's driver reads global fragments as they arrive: as the link thread of runtime/run_learner.py.

Values are stood for by their digests. A whole value carries its own; a step makes the right one of its base's only.
"""

from __future__ import annotations

from diloco_jax.protocol.learner import Learner
from diloco_jax.protocol.messages import NO_VERSION, GlobalFragment
from diloco_jax.sim.node import Node, Value
from diloco_jax.sim.world import World, digest_of


class Reader:
    """What one life of a learner's process has read.

    Args:
        world: where it runs.
        node: the learner.
        machine: of this life.
    """

    def __init__(self, world: World, node: Node, machine: Learner) -> None:
        self._world = world
        self._node = node
        self._machine = machine
        self._heads: dict[int, Value] = {}  # fragment -> value that was read last, adopted or not
        self._newest: dict[int, GlobalFragment] = {}  # fragment -> the message of that value

    def read(self, message: GlobalFragment, garbled: bool, now_s: float) -> bool:
        """Whether it leads to a value that the step thread should take."""
        if not self._machine.wants(message, now_s):
            return False
        made = digest_of("garbled", message) if garbled else self._made_by(message)
        for observer in self._world.observers:
            observer.on_read(self._node, message, made == message.digest, now_s)
        if made != message.digest:
            self._machine.on_corrupt(now_s)
            return False
        self._machine.on_read(message)
        self._heads[message.fragment_id] = (message.version, made)
        self._newest[message.fragment_id] = message
        return True

    def is_newest(self, message: GlobalFragment) -> bool:
        """Whether no newer value of the fragment has been read since: only the newest is adopted."""
        return self._newest[message.fragment_id] is message

    def _made_by(self, message: GlobalFragment) -> int:
        """Digest of the value that the payload leads to."""
        if message.base == NO_VERSION:
            return message.digest
        step = self._world.steps.get((message.epoch, message.fragment_id, message.version))
        held = self._heads.get(message.fragment_id)
        if step is None or held is None or held[1] != step.base:
            return digest_of("garbage", message, held)
        return step.made
