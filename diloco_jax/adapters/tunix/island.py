"""`diloco_jax.tunix.attach`: a trainer of google-tunix as an island of a run.

    trainer = PeftTrainer(model, optimizer, config).with_gen_model_input_fn(inputs)
    with diloco_jax.tunix.attach(trainer, samples_per_step=B, tokens_per_step=B * T) as island:
        trainer.train(island.batches(load))

The trainer steps; the island exchanges after every update of the optimizer.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, Unpack

import numpy as np
from jaxtyping import Array, Int64

from diloco_jax.adapters.nnx.holder import VariableHolder
from diloco_jax.adapters.tunix.layouts import SteadyHolder
from diloco_jax.adapters.tunix.trainer import GlobalEvaluation, PeftTrainer, RunData, WatchedStep, axes_of, write
from diloco_jax.runtime.own_loop.attached import AttachedIsland
from diloco_jax.runtime.own_loop.attached import attach as attach_holder
from diloco_jax.runtime.own_loop.enter import LoopOptions
from diloco_jax.runtime.own_loop.loaders import Batches
from diloco_jax.settings.run import RunConfig
from diloco_jax.training.sharding import LogicalAxes

log = logging.getLogger(__name__)

# A batch from a range of positions of the run's global order.
Load = Callable[[Int64[np.ndarray, " samples"]], Any]


class TunixIsland:
    """A trainer of google-tunix that is an island of a run, created by `attach`.

    After `train` the trainer's model holds the run's global model, so that the trainer's last checkpoint has it.
    """

    def __init__(self, trainer: PeftTrainer, island: AttachedIsland, holder: SteadyHolder) -> None:
        self._trainer = trainer
        self._island = island
        self._holder = holder
        # Batches of one update of the optimizer.
        self._parts: int = trainer.config.gradient_accumulation_steps or 1
        self._losses: list[Any] = []
        # Batches that the trainer has trained on.
        self._trained = 0
        # Whether the trainer's data comes through this island, and so ends with the run.
        self._ends = False
        self._own_config = trainer.config
        if trainer.config.max_steps is not None:
            log.warning(f"max_steps={trainer.config.max_steps} is not used: the run decides when the training ends")
            trainer.config = replace(trainer.config, max_steps=None)
        self._make_steps = trainer.jit_train_and_eval_step
        trainer.jit_train_and_eval_step = self._steps  # type: ignore[method-assign]
        self._own_data = trainer.data_hooks
        if self._own_data is not None:
            trainer.with_data_hooks(RunData(self._own_data, self._going))

    @property
    def name(self) -> str:
        """Return the name of the island."""
        return self._island.name

    @property
    def config(self) -> RunConfig:
        """Return the config of the run."""
        return self._island.config

    @property
    def incarnation(self) -> int:
        """Return a number that grows with every start of the island.

        It is DILOCO_INCARNATION, as `diloco train` sets it, or the time of the start in milliseconds.
        """
        return self._island.incarnation

    @property
    def global_step(self) -> int:
        """Return the run's global step; the first access waits for the run's model."""
        return self._island.global_step

    @property
    def local_step(self) -> int:
        """Return the number of updates of the optimizer since this start of the island."""
        return self._island.local_step

    @property
    def index(self) -> int:
        """Return the number of this island's shard of own data, below `count`; it is the same at every start."""
        return self._island.index

    @property
    def count(self) -> int:
        """Return the number of shards of own data, `islands.count` of the run's config."""
        return self._island.count

    @property
    def loader(self) -> Batches | None:
        """Return the batches of `loader=` at the restored position, for `batches`; None without a loader.

        The first access waits for the run's model.
        """
        return self._island.loader

    def batches(self, source: Load | Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of `PeftTrainer.train` until the run is over.

        With gradient accumulation the samples of an update are split into equal batches, in their order.

        Args:
            source: Function that loads the samples at given positions of the run's global order. With `data="own"`, any
                iterable of batches, such as `island.loader`. The island leaves the run when the iterable ends, so
                repeat it.

        Raises:
            ValueError: The samples of an update cannot be split into equal batches.
        """
        if not callable(source):
            yield from self._own_batches(source)
            return
        while self._going():
            for positions in self._split(self._island.next_samples()):
                batch, trained = source(positions), self._trained
                # A trainer that restored a checkpoint skips as many batches as it has seen.
                while self._trained == trained:
                    yield batch

    def next_samples(self) -> Int64[np.ndarray, " samples"]:
        """Return the samples of the next update, for data hooks that read leased samples."""
        return self._island.next_samples()

    def global_params(self) -> dict[str, Array]:
        """Return the newest global model that this island holds, by path."""
        return self._island.global_params()

    def leave(self) -> None:
        """Leave the run if it is not over, and restore the trainer as it was; safe to call again."""
        self._detach()
        self._island.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._detach()
        self._island.__exit__(kind, error, where)

    def _own_batches(self, source: Iterable[Any]) -> Iterator[Any]:
        batches: Iterator[Any] | None = None
        # The source is read only after the first `_going`, which restores the position of a loader.
        while self._going():
            batches = iter(source) if batches is None else batches
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    def _split(self, positions: Int64[np.ndarray, " samples"]) -> list[Int64[np.ndarray, " part"]]:
        if len(positions) % self._parts:
            raise ValueError(
                f"samples_per_step is {len(positions)}, which is not a multiple of the {self._parts} steps of gradient "
                "accumulation; it counts the samples of one update of the optimizer"
            )
        return np.split(positions, self._parts)

    def _going(self) -> bool:
        """Tell whether the trainer shall make another step."""
        self._ends = True
        return self._island.training or self._end()

    def _end(self) -> bool:
        """Give the trainer the global model, if this start has made a step; False, because the training ends."""
        if self._island.local_step:
            write(self._holder.params, self._island.global_params())
        return False

    def _steps(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        train_step, eval_step = self._make_steps(*args, **kwargs)
        return WatchedStep(train_step, self._after_step), eval_step

    def _after_step(self, result: Any) -> None:
        if not self._ends:
            raise ValueError(
                "the trainer reads its own data, which does not end with the run: call train(island.batches(...)), and "
                "set data hooks before attach()"
            )
        self._trained += 1
        self._losses.append(result[0])
        if len(self._losses) == self._parts:
            loss, self._losses = sum(self._losses) / self._parts, []
            self._holder.check_trained()
            self._island.after_step({"loss": loss})
            # The trainer may save a checkpoint right after this step, and no other one at its end.
            if not self._island.training:
                self._end()

    def _detach(self) -> None:
        self._trainer.config = self._own_config
        self._trainer.jit_train_and_eval_step = self._make_steps  # type: ignore[method-assign]
        if self._own_data is not None:
            self._trainer.with_data_hooks(self._own_data)


def attach(
    trainer: PeftTrainer,
    syncer: str | None = None,
    *,
    model: Any = None,
    axes: Mapping[str, LogicalAxes] | None = None,
    eval_ds: Iterable[Any] | None = None,
    **options: Unpack[LoopOptions],
) -> TunixIsland:
    """Make a trainer of google-tunix an island of a run; docs/tunix.md explains it.

    The parameters that the trainer's optimizer trains are exchanged: all of them, or those of LoRA. The optimizer's
    state stays on the island. The run decides when the training ends, so the trainer's `max_steps` is not used.

    Args:
        trainer: A `PeftTrainer` or one of its subclasses, before `train`.
        syncer: host:port of the syncer. If None, the environment variable DILOCO_SYNCER.
        model: Part of `trainer.model` that the optimizer trains, such as the student of a distillation. If None, the
            whole model.
        axes: Logical axis names of parameters by path. They replace those of the model's metadata and those that this
            module knows for tunix' own models.
        eval_ds: Batches for evaluations of the global model, as an iterable that can be read again. If None, this
            island makes no evaluation. If the trainer has data hooks, it evaluates their batches in place of these.
        options: As for `diloco_jax.join`. `samples_per_step` and `tokens_per_step` count one update of the optimizer.

    Raises:
        ValueError: An argument is wrong, an array was donated, or the run has another model.
        ConnectionError: The syncer cannot be reached.
        RunComplete: The run is complete.
    """
    if isinstance(getattr(trainer.jit_train_and_eval_step, "__self__", None), TunixIsland):
        raise ValueError("this trainer is an island already; leave() that one first")
    optimizer = trainer.optimizer
    variables = VariableHolder(trainer.model if model is None else model, optimizer, filter=optimizer.wrt)
    holder = SteadyHolder(variables)
    if eval_ds is not None:
        options["evaluate"] = GlobalEvaluation(trainer, holder.params, eval_ds)
    names = axes_of(holder.params) | dict(axes or {})
    return TunixIsland(trainer, attach_holder(holder, syncer, axes=names, **options), holder)
