"""The pair of tests/protocol/pair.py with every learner's tape on disk: a whole run's tapes without a process."""

from pathlib import Path
from typing import Any

from diloco_jax.protocol.effects import Adopt, AdoptState, Effect, SaveState, Send, StageState
from diloco_jax.protocol.messages import FragmentValue, GlobalFragment, Message
from diloco_jax.runtime.learner.tape import LearnerTape, learner_tape_path
from tests.protocol.pair import Pair

LOSS = 2.5


class TapedPair(Pair):
    """A pair that writes tapes.

    Args:
        folder: where they go, as a run's folder.
    """

    def __init__(self, folder: Path, *, step_samples: int = 2, **settings: Any) -> None:
        self.folder = folder
        self.step_samples = step_samples
        self._tapes: dict[tuple[str, int], LearnerTape] = {}
        # (donor, step) -> incarnation of the donor
        self._copied: dict[tuple[str, int], int] = {}
        # learner -> incarnation and step of its saved state
        self._own: dict[str, tuple[int, int]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(**settings)

    def join(self, *names: str, incarnation: int = 1, **settings: Any) -> None:
        super().join(*names, incarnation=incarnation, **{"step_samples": self.step_samples} | settings)

    def step(self, *names: str, step_s: float = 1.0, tokens: int = 10) -> None:
        for name in names:
            learner = self.learners[name]
            if not learner.may_step():
                continue
            clock, batch = learner.global_step, learner.take_batch()
            effects = learner.on_step(tokens, step_s, LOSS, self.now_s, samples_end=batch.end)
            self._tape_of(name).step(learner.local_step, clock, batch.ranges, LOSS)
            self._run_learner(name, effects)
        self.deliver()

    def steps(self, count: int, *names: str) -> None:
        """So many steps of each, in turns."""
        for _ in range(count):
            self.step(*names)

    def stop(self) -> None:
        """Everybody is stopped politely: the syncer saves where it is."""
        global_step = self.syncer.global_step
        self._taped.on_snapshot(global_step, self.now_s)
        self.driver.save(global_step, self.syncer, len(self.tape))

    def finish(self) -> Path:
        """Write the syncer's tape; returns the folder."""
        (self.folder / "tape.jsonl").write_text("".join(line + "\n" for line in self.tape), encoding="utf-8")
        return self.folder

    def path_of(self, name: str, incarnation: int = 1) -> Path:
        """Return the path of a learner's tape."""
        return learner_tape_path(self.folder, name, incarnation)

    def _tape_of(self, name: str) -> LearnerTape:
        key = (name, self.learners[name].incarnation)
        if key not in self._tapes:
            self._tapes[key] = LearnerTape(self.folder, *key, self.step_samples)
        return self._tapes[key]

    def _run_learner(self, name: str, effects: list[Effect], handled: Message | None = None) -> None:
        learner, tape = self.learners[name], self._tape_of(name)
        for effect in effects:
            if isinstance(effect, Adopt):
                assert isinstance(handled, GlobalFragment)
                tape.adopt(handled)
            elif isinstance(effect, StageState):
                self._copied[name, effect.local_step] = learner.incarnation
                tape.note("staged_state", effect.local_step)
            elif isinstance(effect, SaveState):
                self._own[name] = (learner.incarnation, learner.local_step)
                tape.note("saved", learner.local_step, effect.global_step)
            elif isinstance(effect, Send) and isinstance(effect.message, FragmentValue):
                value = effect.message
                tape.note("sent", value.fragment_id, value.global_step, value.local_step)
            elif isinstance(effect, AdoptState) and name not in self.broken:
                own = self._own.get(name, (0, 0))
                donor = (self._copied[effect.donor, effect.donor_step], effect.donor_step) if effect.donor else own
                tape.state(effect, *donor)
        super()._run_learner(name, effects, handled)
