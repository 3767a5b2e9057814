"""Replicas: each repeats one incarnation of a learner from its tape, with the same steps, data and incoming values.

All incarnations of a replay share one island and its compiled programs. Each has a separate training state, anchors and
residuals, which are on the island only while it advances. Incarnations exchange only global values and copies of whole
states.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol, TypeVar

import jax
import numpy as np

from diloco_jax.core import codec
from diloco_jax.protocol.corpora import THE_RUNS, OwnCorpus
from diloco_jax.runtime.island.adoptions import Adoptions
from diloco_jax.runtime.island.built_in import BuiltInLoop, batches_of, count
from diloco_jax.runtime.island.host import Ranges
from diloco_jax.settings.fingerprint import own_corpus
from diloco_jax.settings.resolved import ResolvedRun
from diloco_jax.settings.run import RunConfig
from diloco_jax.tools.replay import learner_tapes
from diloco_jax.tools.replay.script import LearnerIncarnation, Name
from diloco_jax.training.data.config import OwnDataConfig
from diloco_jax.training.exchange.outgoing import HeldFragment
from diloco_jax.training.island import Island
from diloco_jax.training.optimizers import learning_rate
from diloco_jax.training.parts import PartSteps, mean_chunk, mean_metrics
from diloco_jax.training.state import TrainState
from diloco_jax.training.whole_state.layout import StateArrays

Values = dict[str, np.ndarray]
K = TypeVar("K")
V = TypeVar("V")


class Trainer:
    """The island that all incarnations share in turn.

    Args:
      sequences: the number of sequences that a sample on the tapes stands for.
      data: path of a corpus on this machine by its name, where that of the config does not hold.
    """

    def __init__(self, run: ResolvedRun, sequences: int = 1, data: Mapping[str, str] = MappingProxyType({})) -> None:
        self._data = data
        self._config = config = run.config
        # Without a corpus of the run, any island's has samples of the same form.
        first = config if config.shares_corpus else self._reading(config.islands.names[0])
        devices = jax.devices()[: config.island("").devices or None]
        self._loop = loop = BuiltInLoop(first, "", devices)
        # The island has the state of the incarnation that advances.
        self.island: Island = loop.island
        self.fragments = run.fragments
        self._sequences = sequences
        # The sizes of batches with a compiled program.
        self._compiled: set[int] = set()
        # One slice computes the parts of all, with the same bits.
        self._parts = loop.parts if config.islands.slices > 1 else None
        # The samples of a part of the incarnation that advances.
        self._part_size = 0
        self._shardings = jax.tree.map(lambda leaf: leaf.sharding, self.island.state)
        self._first = jax.device_get(self.island.state)
        # The settings for adopting global values.
        self.how = config.adopt
        self.steps = 0

    def fresh(self) -> TrainState:
        """Make the state of an island that has just started."""
        # The state must be a copy, because the next step writes to its memory.
        state: TrainState = jax.tree.map(lambda v, s: jax.device_put(np.array(v), s), self._first, self._shardings)
        return state

    def plan(self, steps: int) -> None:
        """Set the steps of the learning-rate schedule; 0: as in the config."""
        self._loop.rate = learning_rate(self._config.optimizer, steps or self._config.planned_steps)

    def read(self, incarnation: LearnerIncarnation, told: OwnCorpus) -> None:
        """Take the next samples from the corpus of an island.

        Args:
          told: what the island told of its corpus when it greeted.

        Raises:
          ValueError: the config names another corpus for this island, or the corpus was changed since.
        """
        name = incarnation.learner_id
        self._part_size = self._config.island(name).batch_size // self._config.islands.slices
        config = self._reading(name, told.corpus)
        remedy = f"say where it is: --data {told.corpus or 'CORPUS'}=PATH"
        if config.data.corpus != told.corpus:
            theirs, ours = (
                f"the corpus {each!r}" if each else "the run's" for each in (told.corpus, config.data.corpus)
            )
            raise ValueError(f"{name} trained on {theirs}, and this config gives it {ours}; {remedy}")
        corpus = self._loop.turn_to(config)
        if told.corpus and (here := own_corpus(config, corpus, 0, "").content) != told.content:
            raise ValueError(f"{name} trained on {told.content}, and here is {here}; {remedy}")

    def _reading(self, name: str, corpus: str = "") -> RunConfig:
        """Return the config of an island; `corpus` is the name of what it reads, if known."""
        config = self._config.of_island(name)
        known = corpus or config.data.corpus
        if known not in self._data:
            return config
        return replace(config, data=OwnDataConfig(corpus=known, path=self._data[known]).over(config.data, name))

    def fresh_adoptions(self) -> Adoptions:
        """Return the adoptions of a new incarnation, which has adopted and sent nothing."""
        return Adoptions(self.island, self.fragments, self.how)

    def step(self, entry: learner_tapes.TapedStep) -> float:
        """Repeat an inner step on the island; return its loss."""
        ranges = [(start * self._sequences, stop * self._sequences) for start, stop in entry.ranges]
        self.steps += 1
        if self._parts is not None:
            return self._step_in_parts(self._parts, ranges, entry.clock)
        size = count(ranges)
        # A learner compiles its step in the same way, which gives the same program.
        if size not in self._compiled:
            self._compiled.add(size)
            self._loop.warm_up(size)
        self._loop.put_batch(ranges)
        return self._loop.wait(self._loop.step(entry.clock))["loss"]

    def _step_in_parts(self, steps: PartSteps, ranges: Ranges, clock: int) -> float:
        """Repeat an inner step of an island of several slices; return its loss."""
        if not count(ranges) or count(ranges) % self._part_size:
            raise ValueError(
                f"a step on the tape has {count(ranges)} samples, which are not parts of {self._part_size}; replay "
                "with the islands.slices and batch size of the run"
            )
        if self._part_size not in self._compiled:
            self._compiled.add(self._part_size)
            steps.warm_up(self._loop.shapes(self._part_size))
        parts = []
        for samples in batches_of(ranges, self._part_size):
            self._loop.put_batch(samples)
            parts.append(steps.take(steps.gradient(*self._loop.take_batch())))
        weights = [part.weight for part in parts]
        metrics = mean_metrics([part.metrics for part in parts], weights)
        mean = mean_chunk([part.flat for part in parts], weights)
        return self.island.wait(steps.apply(mean, self._loop.rate(clock), metrics))["loss"]


class OtherIncarnations(Protocol):
    """The values and states that an incarnation needs from other incarnations."""

    def take(self, name: Name) -> Values:
        """Return a global value that this incarnation adopts."""

    def state_of(
        self, took: learner_tapes.TookState, receiver: LearnerIncarnation, held: dict[int, int]
    ) -> StateArrays:
        """Return the state that this incarnation loads; `held` has the versions of its fragments."""

    def on_loss(self, incarnation: LearnerIncarnation, step: learner_tapes.TapedStep, loss: float) -> None:
        """Receive the loss of a repeated step."""


class Replica:
    """The repetition of one incarnation; `advance` repeats it up to a line of its tape."""

    def __init__(
        self,
        incarnation: LearnerIncarnation,
        need: learner_tapes.Outline,
        trainer: Trainer,
        world: OtherIncarnations,
        planned_steps: int = 0,
        corpus: OwnCorpus = THE_RUNS,
    ) -> None:
        self.incarnation = incarnation
        self._corpus = corpus
        # The steps of its learning-rate schedule; 0: as in the config.
        self._planned_steps = planned_steps
        self._need = need
        self._trainer = trainer
        self._world = world
        self._entries = learner_tapes.read_entries(need.path)
        # The last repeated line.
        self._line = 0
        self._state: TrainState | None = None
        self._held: dict[int, HeldFragment] = {}
        self._versions: dict[int, int] = {}
        self._stage_at = self._fragments_by_step()
        self._adoptions = trainer.fresh_adoptions()
        # Encoded outer gradients by (fragment, local step).
        self._payloads: dict[tuple[int, int], bytes] = {}
        # Copies of the state with the versions of its fragments, by local step.
        self._copies: dict[int, list[tuple[dict[int, int], StateArrays]]] = {}

    def _fragments_by_step(self) -> dict[int, set[int]]:
        wanted: dict[int, set[int]] = {}
        for fragment_id, local_step in self._need.values:
            wanted.setdefault(local_step, set()).add(fragment_id)
        for line, sent in self._need.sent:
            if line <= self._need.stop:
                wanted.setdefault(sent.local_step, set()).add(sent.fragment_id)
        return wanted

    def value(self, fragment_id: int, local_step: int) -> bytes:
        """Return the encoded outer gradient of a fragment after a local step, as the learner sent it."""
        self.advance(self._need.steps[local_step - 1])
        return use(self._payloads, self._need.values, (fragment_id, local_step))

    def copy(self, local_step: int) -> list[tuple[dict[int, int], StateArrays]]:
        """Return the copies of the state after a local step, each with the versions of the incarnation's fragments."""
        self.advance(max(self._need.copied[local_step]))
        return use(self._copies, self._need.copies, local_step)

    def advance(self, line: int) -> None:
        """Repeat the tape up to a line."""
        line = min(line, self._need.stop)
        if line <= self._line:
            return
        self._enter()
        while self._line < line:
            number, entry = next(self._entries)
            if number > line:
                raise ValueError(f"{self._need.path} was changed while it was replayed; start again")
            self._repeat(entry)
            self._line = number
            if number in self._need.kept:
                self._copy(self._need.kept[number])
        self._state = self._trainer.island.state
        # At the end of the incarnation, only its payloads and copies are still needed.
        if self._line >= self._need.stop:
            self._entries.close()
            self._state = None
            self._held.clear()
            self._adoptions = self._trainer.fresh_adoptions()

    def _enter(self) -> None:
        self._trainer.read(self.incarnation, self._corpus)
        self._trainer.plan(self._planned_steps)
        self._trainer.island.state = self._state if self._state is not None else self._trainer.fresh()
        self._trainer.island.exchange.held = self._held

    def _repeat(self, entry: learner_tapes.Entry) -> None:
        match entry:
            case learner_tapes.TapedStep():
                loss = self._trainer.step(entry)
                self._world.on_loss(self.incarnation, entry, loss)
                for fragment_id in sorted(self._stage_at.get(entry.local_step, ())):
                    self._stage(fragment_id, entry.local_step)
            case learner_tapes.TookValue((fragment_id, version, _) as name, merged_round):
                self._versions[fragment_id] = version
                self._adoptions.unstage_all(fragment_id)
                self._adoptions.adopt(fragment_id, version, merged_round, self._world.take(name))
            case learner_tapes.TookState():
                # The donor's incarnation may have to advance, which replaces the state on the island.
                self._state = self._trainer.island.state
                state = self._world.state_of(entry, self.incarnation, self._versions)
                self._enter()
                self._trainer.island.load_state(state, [self._trainer.fragments[p] for p in entry.fragments])
            case learner_tapes.Copied(local_step) if self._need.copies[local_step]:
                self._copy(local_step)
            case learner_tapes.SentValue():
                self._adoptions.take_for_round(*entry)

    def _copy(self, local_step: int) -> None:
        copy = (dict(self._versions), self._trainer.island.stage_state().value())
        self._copies.setdefault(local_step, []).append(copy)

    def _stage(self, fragment_id: int, local_step: int) -> None:
        island = self._trainer.island
        staged = island.exchange.stage(island.state.params, self._trainer.fragments[fragment_id])
        self._adoptions.staged[fragment_id, local_step] = staged
        if not self._need.values[fragment_id, local_step]:
            return
        try:
            payload = staged.encode()
        except codec.NotFinite:
            # The learner sent an empty payload too.
            payload = b""
        assert isinstance(payload, bytes), "a replay has all devices in one process"
        self._payloads[fragment_id, local_step] = payload


def use(stored: dict[K, V], uses: Counter[K], key: K) -> V:
    """Return a stored value, and remove it at its last use."""
    uses[key] -= 1
    return stored[key] if uses[key] > 0 else stored.pop(key)
