"""The global values that a learner knows: of each fragment its anchor, which it adopted last, and its newest, the head.

A driver reads values as they arrive; the training state adopts them between two inner steps, the newest only. So a step
applies to the newest value that was read, its head, which is as new as the adopted one or newer. It stays over
reconnections.

    whole value   newer than the head:                  useful
    step          newer, and its base is the head:      useful
                  newer, and its base is another:       a gap: only a whole value helps
    either        as old as the head or older:          stale
"""

from diloco_jax.protocol.effects import Drop, Effect, Send
from diloco_jax.protocol.messages import (
    NO_VERSION,
    SYNCER,
    Adopted,
    AnchorRequest,
    AnchorValue,
    Arrived,
    GlobalFragment,
)

USEFUL, STALE, GAP = "useful", "stale", "gap"
# Decimals of the seconds since a fragment arrived. More would be noise: a learner reads its inbox between two steps.
AGO_DIGITS = 4


class Anchors:
    """The version of each fragment that is held, and the life of the syncer that it is of."""

    def __init__(self, num_fragments: int) -> None:
        # version of each fragment, and where the learner stood when it took it
        self.adopted: tuple[Adopted, ...] = (Adopted(),) * num_fragments
        self.digests = [0] * num_fragments  # of these values
        self.epoch = 0  # newest life of the syncer that is known
        self._epochs = [0] * num_fragments  # lives of the syncer that these values are of

    @property
    def versions(self) -> tuple[int, ...]:
        """Version of each fragment; NO_VERSION where none is held."""
        return tuple([held.version for held in self.adopted])

    def is_news(self, message: GlobalFragment) -> bool:
        """Say if a value replaces the one that is held: it is newer, or of a later life and not the same."""
        held = self.adopted[message.fragment_id].version
        if (message.epoch, message.version) <= (self._epochs[message.fragment_id], held):
            return False  # a duplicate, or overtaken by a newer one
        return message.version != held or message.digest != self.digests[message.fragment_id]

    def take(self, message: GlobalFragment, local_step: int, tokens: int) -> None:
        """Hold this value: the counters of its fragment begin again."""
        adopted, fragment_id = list(self.adopted), message.fragment_id
        adopted[fragment_id] = Adopted(message.version, local_step, tokens)
        self.adopted = tuple(adopted)
        self._epochs[fragment_id], self.digests[fragment_id] = message.epoch, message.digest
        if message.epoch > self.epoch:
            self.epoch = message.epoch

    def answer(self, message: AnchorRequest, learner_id: str, incarnation: int) -> list[Effect]:
        """Give a restarted syncer a value that it lacks, or the newer one that replaced it here."""
        fragment_id, version = message
        held = self.adopted[fragment_id].version if 0 <= fragment_id < len(self.adopted) else NO_VERSION
        if not 0 <= version <= held:
            return [Drop(SYNCER, f"version {version} of fragment {fragment_id} is not held (any more)")]
        return [Send(SYNCER, AnchorValue(learner_id, incarnation, fragment_id, held, self.digests[fragment_id], 0))]


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
            ago_s = round(now_s - read_s, AGO_DIGITS) if now_s > read_s else 0.0
            told.append(Arrived(fragment_id, self._heads[fragment_id].version, ago_s))
        self._untold.clear()
        return tuple(told)
