"""One life of a learner, repeated from its tape: the same steps on the same data, with the same values coming in.

All lives of a replay share one island and its compiled programs; each has a training state, anchors and residuals of
its own, which are on the island only while its life advances. Between two lives nothing is shared but global values and
copies of whole states.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, Protocol

import jax
import numpy as np

from diloco_jax.core.fragments import Fragment
from diloco_jax.runtime.replay_lives import Adopted, Copied, Entry, Need, Sent, Step, TookState, read_entries
from diloco_jax.runtime.replay_script import Life, Name
from diloco_jax.runtime.settings import RunConfig
from diloco_jax.training.data import SampleOrder, load_source
from diloco_jax.training.island import Island
from diloco_jax.training.optimizers import learning_rate
from diloco_jax.training.outgoing import Held, StagedFragment
from diloco_jax.training.state_bytes import HostState
from diloco_jax.training.train_step import TrainState

Values = dict[str, np.ndarray]


class Trainer:
    """What all lives share.

    Args:
        config: of the run.
        sequences: that one sample on the tapes stands for.

    Raises:
        ValueError: model or data cannot be loaded.
    """

    def __init__(self, config: RunConfig, sequences: int = 1) -> None:
        self.config = config
        self.sequences = sequences
        devices = jax.devices()[: config.islands.devices or None]  # as many as an island has
        self.island = Island(
            config.model,
            config.optimizer,
            config.islands.mesh,
            seed=config.seed,
            devices=devices,
            wire=config.wire.up,
            rebase=config.adopt.mode == "rebase",
        )
        self.rate = learning_rate(config.optimizer, config.train.steps)
        self.fragments: tuple[Fragment, ...] = ()  # of the run's plan
        self.steps = 0
        self._compiled: set[int] = set()  # sizes of a batch
        source = load_source(config.data, config.train.seq_len)
        self._order = SampleOrder(source, config.data.shuffle_seed + config.seed)
        self._shardings = jax.tree.map(lambda leaf: leaf.sharding, self.island.state)
        self._first = jax.device_get(self.island.state)

    def fresh(self) -> TrainState:
        """The state of an island that has just started."""
        # Copies of our own: the next step writes to this memory.
        state: TrainState = jax.tree.map(lambda v, s: jax.device_put(np.array(v), s), self._first, self._shardings)
        return state

    def step(self, entry: Step) -> float:
        """Repeat an inner step on the island; returns its loss."""
        ranges = [(start * self.sequences, stop * self.sequences) for start, stop in entry.ranges]
        island, windows = self.island, self._order.batch(ranges)
        if len(windows) not in self._compiled:  # in the same way as a learner does
            self._compiled.add(len(windows))
            island.warm_up((windows.shape[0], windows.shape[1]))
        batch = island.put_batch(windows)
        self.steps += 1
        return island.wait(island.step(batch, self.rate(entry.clock)))["loss"]


class World(Protocol):
    """What one life needs of the others."""

    def take(self, name: Name) -> Values:
        """A global value that this life adopts."""

    def state_of(self, took: TookState, receiver: Life, held: dict[int, int]) -> HostState:
        """The state that this life takes over; `held` are the versions of its fragments."""

    def on_loss(self, life: Life, step: Step, loss: float) -> None:
        """A step was repeated; `loss` is what came of it now."""


class Replica:
    """One life. `advance` repeats it up to a line of its tape.

    Args:
        life: whose it is.
        need: what is needed of it.
        trainer: what all lives share.
        world: the others.
    """

    def __init__(self, life: Life, need: Need, trainer: Trainer, world: World) -> None:
        self.life = life
        self._need = need
        self._trainer = trainer
        self._world = world
        self._entries = read_entries(need.outline.path)
        self._line = 0  # the last one that was repeated
        self._state: TrainState | None = None
        self._held: dict[int, Held] = {}
        self._versions: dict[int, int] = {}
        self._stage_at = self._fragments_by_step()
        self._staged: dict[tuple[int, int], StagedFragment] = {}  # (fragment, local step) -> its update
        self._sent: dict[int, tuple[int, StagedFragment]] = {}  # fragment -> (round, what was sent)
        self._payloads: dict[tuple[int, int], bytes] = {}  # (fragment, local step) -> encoded outer gradient
        self._copies: dict[int, list[tuple[dict[int, int], HostState]]] = {}  # local step -> (versions, state)

    def _fragments_by_step(self) -> dict[int, set[int]]:
        wanted: dict[int, set[int]] = {}
        for fragment_id, local_step in self._need.values:
            wanted.setdefault(local_step, set()).add(fragment_id)
        for line, sent in self._need.outline.sent:
            if line <= self._need.stop:
                wanted.setdefault(sent.local_step, set()).add(sent.fragment_id)
        return wanted

    def value(self, fragment_id: int, local_step: int) -> bytes:
        """The encoded outer gradient of a fragment after a local step, as the learner sent it."""
        self.advance(self._need.outline.steps[local_step - 1])
        key = (fragment_id, local_step)
        return self._payloads.pop(key) if _used_up(self._need.values, key) else self._payloads[key]

    def copy(self, local_step: int) -> list[tuple[dict[int, int], HostState]]:
        """The states that were copied after a local step, each with the versions that the learner held."""
        self.advance(max(self._need.outline.copied[local_step]))
        last = _used_up(self._need.copies, local_step)
        return self._copies.pop(local_step) if last else self._copies[local_step]

    def advance(self, line: int) -> None:
        """Repeat everything up to this line."""
        line = min(line, self._need.stop)
        if line <= self._line:
            return
        self._enter()
        while self._line < line:
            number, entry = next(self._entries)
            if number > line:
                raise ValueError(f"{self._need.outline.path} was changed while it was replayed; start again")
            self._repeat(entry)
            self._line = number
        self._exit()
        if self._line >= self._need.stop:  # what is left are payloads and copies that somebody will ask for
            self._entries.close()
            self._state = None
            self._held.clear()
            self._staged.clear()
            self._sent.clear()

    def _enter(self) -> None:
        self._trainer.island.state = self._state if self._state is not None else self._trainer.fresh()
        self._trainer.island.exchange.held = self._held

    def _exit(self) -> None:
        self._state = self._trainer.island.state

    def _repeat(self, entry: Entry) -> None:
        if isinstance(entry, Step):
            loss = self._trainer.step(entry)
            self._world.on_loss(self.life, entry, loss)
            for fragment_id in sorted(self._stage_at.get(entry.local_step, ())):
                self._stage(fragment_id, entry.local_step)
        elif isinstance(entry, Adopted):
            self._adopt(entry.name)
        elif isinstance(entry, TookState):
            self._exit()  # the donor's life may have to advance
            state = self._world.state_of(entry, self.life, self._versions)
            self._enter()
            self._trainer.island.load_state(state, [self._trainer.fragments[p] for p in entry.fragments])
        elif isinstance(entry, Copied):
            if self._need.copies[entry.local_step]:
                copy = (dict(self._versions), self._trainer.island.stage_state().value())
                self._copies.setdefault(entry.local_step, []).append(copy)
        elif isinstance(entry, Sent):
            self._sent[entry.fragment_id] = (entry.global_step, self._staged[entry.fragment_id, entry.local_step])

    def _stage(self, fragment_id: int, local_step: int) -> None:
        staged = self._trainer.island.stage(self._trainer.fragments[fragment_id])
        self._staged[fragment_id, local_step] = staged
        if not self._need.values[fragment_id, local_step]:
            return
        try:
            payload = staged.encode()
        except ValueError:  # NaN does not fit an integer format; the learner sent nothing either
            payload = b""
        assert isinstance(payload, bytes), "a replay has all devices in one process"
        self._payloads[fragment_id, local_step] = payload

    def _adopt(self, name: Name) -> None:
        """As LearnerRun takes a global fragment."""
        fragment_id, adopt = name.fragment_id, self._trainer.config.adopt
        values = self._world.take(name)
        sent_round, sent = self._sent.pop(fragment_id, (0, None))
        if sent_round != name.version:
            sent = None
        first = fragment_id not in self._versions
        self._versions[fragment_id] = name.version
        self._staged = {key: staged for key, staged in self._staged.items() if key[0] != fragment_id}
        mode = "overwrite" if first or (adopt.mode == "rebase" and sent is None) else adopt.mode
        fragment = self._trainer.fragments[fragment_id]
        self._trainer.island.adopt(fragment, values, mode=mode, alpha=adopt.alpha, sent=sent)


def _used_up(uses: Counter[Any], key: object) -> bool:
    """Count one use; whether it was the last."""
    uses[key] -= 1
    if uses[key] > 0:
        return False
    del uses[key]
    return True


def same_loss(recorded: float | None, repeated: float) -> bool:
    """Whether a repeated step had the loss that its tape says; NaN and infinity are written as null."""
    return not math.isfinite(repeated) if recorded is None else recorded == repeated
