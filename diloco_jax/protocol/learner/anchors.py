"""The global values that a learner's parameters are based on: of each fragment the one that it adopted last."""

from diloco_jax.protocol.effects import Drop, Effect, Send
from diloco_jax.protocol.messages import NO_VERSION, SYNCER, Adopted, AnchorRequest, AnchorValue, GlobalFragment


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
