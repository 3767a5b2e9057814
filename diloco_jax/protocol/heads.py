"""What has arrived of the global fragments at a learner, adopted or not: the values to which steps apply.

A driver reads values as they arrive; the training state adopts them between two inner steps, the newest only. So a step
applies to the newest value that was read, its head, which is as new as the adopted one or newer. It stays over
reconnections.

    whole value   newer than the head:                  useful
    step          newer, and its base is the head:      useful
                  newer, and its base is another:       a gap: only a whole value helps
    either        as old as the head or older:          stale
"""

from __future__ import annotations

from typing import NamedTuple

from diloco_jax.protocol.messages import NO_VERSION, GlobalFragment

USEFUL, STALE, GAP = "useful", "stale", "gap"


class Head(NamedTuple):
    """The newest value of a fragment that was read; a later epoch's is newer, whatever its version."""

    epoch: int = 0
    version: int = NO_VERSION


class Heads:
    """The head of every fragment of which something has arrived."""

    def __init__(self) -> None:
        self._heads: dict[int, Head] = {}

    def judge(self, message: GlobalFragment) -> str:
        """USEFUL, STALE or GAP, as above."""
        head = self._heads.get(message.fragment_id, Head())
        if (message.epoch, message.version) <= head:
            return STALE
        return USEFUL if message.base in (NO_VERSION, head.version) else GAP

    def move(self, message: GlobalFragment) -> None:
        """Its value was read and is as it should be."""
        self._heads[message.fragment_id] = Head(message.epoch, message.version)
