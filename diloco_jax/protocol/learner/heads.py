"""The newest global fragments that a learner has read, adopted or not: the values to which steps apply.

A driver reads values as they arrive; the training state adopts them between two inner steps, the newest only. So a step
applies to the newest value that was read, its head, which is as new as the adopted one or newer. It stays over
reconnections.

    whole value   newer than the head:                  useful
    step          newer, and its base is the head:      useful
                  newer, and its base is another:       a gap: only a whole value helps
    either        as old as the head or older:          stale
"""

from diloco_jax.protocol.messages import NO_VERSION, Arrived, GlobalFragment

USEFUL, STALE, GAP = "useful", "stale", "gap"


class Heads:
    """The head of every fragment of which something has arrived; a later epoch's is newer, whatever its version."""

    def __init__(self) -> None:
        self._heads: dict[int, GlobalFragment] = {}  # fragment -> the message of its head
        self._untold: dict[int, float] = {}  # fragment -> when its head was read, if nobody was told of it yet

    def judge(self, message: GlobalFragment) -> str:
        """USEFUL, STALE or GAP, as above."""
        head = self._heads.get(message.fragment_id)
        if head is not None and (message.epoch, message.version) <= (head.epoch, head.version):
            return STALE
        if message.base == NO_VERSION or (head is not None and message.base == head.version):
            return USEFUL
        return GAP

    def move(self, message: GlobalFragment, now_s: float) -> None:
        """Its value was read and is as it should be."""
        self._heads[message.fragment_id] = message
        self._untold[message.fragment_id] = now_s

    def arrived(self, now_s: float) -> tuple[Arrived, ...]:
        """Tell what was read since this was asked last. A driver's thread may have read it after the moment `now_s`."""
        if not self._untold:
            return ()
        told = []
        for fragment_id, read_s in self._untold.items():
            ago_s = now_s - read_s if now_s > read_s else 0.0
            told.append(Arrived(fragment_id, self._heads[fragment_id].version, ago_s))
        self._untold.clear()
        return tuple(told)
