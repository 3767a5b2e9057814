"""The global values that a learner knows: for each fragment its anchor and its head.

The anchor is the value that the training state adopted last. The head is the newest value that the driver has read. A
driver reads values as they arrive, and the training state adopts the newest one between two inner steps, so the head is
as new as the anchor or newer. A delta applies to the head. The head survives a reconnection.

    whole value   newer than the head:                  useful
    delta         newer, and the head is its base:      useful
                  newer, and its base is another:       a gap, which only a whole value closes
    either        as old as the head or older:          stale
"""

from diloco_jax.protocol.effects import Drop, Effects, Send
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
    """The version of each fragment that a learner holds, and the epoch of the syncer that made it."""

    def __init__(self, effects: Effects, num_fragments: int) -> None:
        self._effects = effects
        # Version of each fragment, and the learner's counters when it adopted that version.
        self.adopted: tuple[Adopted, ...] = (Adopted(),) * num_fragments
        # Digests of these values.
        self.digests = [0] * num_fragments
        # Newest known epoch of the syncer.
        self.epoch = 0
        # For each value, the epoch of the syncer that sent it.
        self._epochs = [0] * num_fragments

    @property
    def versions(self) -> tuple[int, ...]:
        """Return the version of each fragment; NO_VERSION where no value is held."""
        return tuple([held.version for held in self.adopted])

    def is_news(self, message: GlobalFragment) -> bool:
        """Return whether a value replaces the held one: it is newer, or another value from a later epoch."""
        held = self.adopted[message.fragment_id].version
        if (message.epoch, message.version) <= (self._epochs[message.fragment_id], held):
            # The message is a duplicate, or a newer one overtook it.
            return False
        return message.version != held or message.digest != self.digests[message.fragment_id]

    def take(self, message: GlobalFragment, local_step: int, tokens: int) -> None:
        """Hold this value from now on; the counters of its fragment restart."""
        adopted, fragment_id = list(self.adopted), message.fragment_id
        adopted[fragment_id] = Adopted(message.version, local_step, tokens)
        self.adopted = tuple(adopted)
        self._epochs[fragment_id], self.digests[fragment_id] = message.epoch, message.digest
        if message.epoch > self.epoch:
            self.epoch = message.epoch

    def answer(self, message: AnchorRequest, learner_id: str, incarnation: int) -> None:
        """Send a restarted syncer a value that it lacks, or the newer value that replaced it here."""
        fragment_id, version = message
        held = self.adopted[fragment_id].version if 0 <= fragment_id < len(self.adopted) else NO_VERSION
        if not 0 <= version <= held:
            reason = f"version {version} of fragment {fragment_id} is not held (any more)"
            self._effects.append(Drop(SYNCER, reason))
            return
        value = AnchorValue(learner_id, incarnation, fragment_id, held, self.digests[fragment_id], 0)
        self._effects.append(Send(SYNCER, value))


class Heads:
    """Newest value of each fragment that the driver has read. Values are ordered by epoch, then by version."""

    def __init__(self) -> None:
        # Fragment -> message of its head.
        self._heads: dict[int, GlobalFragment] = {}
        # Fragment -> when its head was read, until a report has included it.
        self._untold: dict[int, float] = {}

    def judge(self, message: GlobalFragment) -> str:
        """Return USEFUL, STALE or GAP; the table of this module has the rule."""
        head = self._heads.get(message.fragment_id)
        if head is not None and (message.epoch, message.version) <= (head.epoch, head.version):
            return STALE
        if message.base == NO_VERSION or (head is not None and message.base == head.version):
            return USEFUL
        return GAP

    def move(self, message: GlobalFragment, now_s: float) -> None:
        """Make a value the head, after the driver has read it and checked its digest."""
        self._heads[message.fragment_id] = message
        self._untold[message.fragment_id] = now_s

    def arrived(self, now_s: float) -> tuple[Arrived, ...]:
        """Return what was read since the last call. A driver's thread may have read it after the moment `now_s`."""
        if not self._untold:
            return ()
        arrivals = []
        for fragment_id, read_s in self._untold.items():
            ago_s = round(now_s - read_s, AGO_DIGITS) if now_s > read_s else 0.0
            arrivals.append(Arrived(fragment_id, self._heads[fragment_id].version, ago_s))
        self._untold.clear()
        return tuple(arrivals)
