"""The beginning of a learner: with its own state from a disk, with that of a peer, or from the global model alone."""

from typing import NamedTuple

from diloco_jax.protocol.effects import AdoptState, Effect
from diloco_jax.protocol.learner.anchors import Anchors
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.recovery import Receiver


class Saved(NamedTuple):
    """A state of this learner on disk, from an earlier life."""

    global_step: int
    digests: tuple[int, ...]  # of the global values that its parameters are based on: a version may come twice


class Start:
    """The state with which a learner begins, `saved` if there is one, and how far it is with getting it."""

    def __init__(self, learner_id: str, incarnation: int, config: ProtocolConfig, saved: Saved | None) -> None:
        self.welcomed = False  # the syncer has let it in
        self.adopting = False  # a state is being taken over by the driver
        self.receiver = Receiver(learner_id, incarnation, config)  # of a peer's state
        self._config = config
        self._saved = saved

    @property
    def over(self) -> bool:
        """True once nothing stands between the learner and its first step."""
        return self._saved is None and not self.adopting and self.receiver.over

    def on_welcome(self, global_step: int, now_s: float) -> list[Effect]:
        """The first welcome: decide where the state is to come from. A run under way has states to give."""
        if self.welcomed:
            return []
        self.welcomed = True
        if self._saved is not None and abs(self._saved.global_step - global_step) > self._config.own_state_age_max:
            self._saved = None  # too old to be better than the others' states
        if self._saved is None and global_step > 0 and self._config.recover_from_peers:
            return self.receiver.begin(global_step, now_s)
        return []

    def take_over(self, anchors: Anchors, global_step: int, now_s: float) -> list[Effect]:
        """Every global value is there: take the state over that they are to complete, if it is there too."""
        if self.adopting:
            return []
        if self._saved is not None:
            self.adopting = True
            same = tuple(p for p, digest in enumerate(self._saved.digests) if digest == anchors.digests[p])
            return [AdoptState("", self._saved.global_step, same)]
        effects = self.receiver.adopt(global_step, now_s)
        self.adopting = any(isinstance(effect, AdoptState) for effect in effects)
        return effects

    def on_adopted(self, ok: bool, global_step: int, now_s: float) -> list[Effect]:
        """The driver has taken a state over, or could not use it."""
        self.adopting = False
        own, self._saved = self._saved is not None, None
        if not own:
            return self.receiver.adopted() if ok else self.receiver.failed(global_step, now_s)
        if not ok and self._config.recover_from_peers:
            return self.receiver.begin(global_step, now_s)
        return []
