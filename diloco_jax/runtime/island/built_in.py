"""The built-in training loop of one process of an island: the model's inner step, on data of the run's global order."""

from collections.abc import Mapping, Sequence

import jax

from diloco_jax.runtime.island.evaluation import ModelEvaluation
from diloco_jax.runtime.island.feed import DATA_WAIT, Feed
from diloco_jax.runtime.island.host import Ranges
from diloco_jax.settings.run import RunConfig
from diloco_jax.training.data.corpus import load_source
from diloco_jax.training.data.order import SampleOrder
from diloco_jax.training.data.sample import batch_shapes
from diloco_jax.training.island import Island, StepHandle
from diloco_jax.training.optimizers import learning_rate

LOADING = "loading the data and building the model"  # a phase


class BuiltInLoop:
    """The steps of an island that trains a model of the config. One thread at a time.

    Args:
        devices: of the island; all that JAX sees if not given.
    """

    def __init__(self, config: RunConfig, learner_id: str, devices: Sequence[jax.Device] | None = None) -> None:
        own = config.island(learner_id)
        source = load_source(config.data, config.train.seq_len)
        self.corpus = source.corpus  # what this process reads its samples from, in words that others can compare
        self.batch_size = own.batch_size  # samples of a step
        self.prefetch = config.data.prefetch  # batches that are read ahead
        self._sample = source.train[0]
        self.rate = learning_rate(config.optimizer, config.planned_steps)  # learning rate of a step of the schedule
        # that trains, or this process's part of it
        self.island = Island(
            config.model,
            config.optimizer,
            own.mesh,
            seed=config.seed,
            devices=devices,
            wire=config.wire.up,
            rebase=config.adopt.mode == "rebase",
        )
        self.evaluate = ModelEvaluation(config, self.island.blueprint, source)  # of the run's model
        order = SampleOrder(source, config.data.shuffle_seed + config.seed)
        self._feed = Feed(self.island, order, self._sample, self.prefetch, self.batch_size)

    def warm_up(self, batch_size: int = 0) -> None:
        """Compile the inner step, of another number of samples if it is given. Any thread."""
        self.island.warm_up(batch_shapes(self._sample, batch_size or self.batch_size))

    def put_batch(self, ranges: Ranges, ahead: Ranges = ()) -> None:
        """Copy the samples of the next step to the devices, and read `ahead` those after it; returns at once."""
        self._feed.put(ranges, ahead)

    def step(self, clock: int) -> StepHandle:
        """Dispatch one inner step on the batch that was put last; returns at once.

        Args:
            clock: step of the schedule, which says the learning rate.
        """
        batch, position = self._feed.take()
        return self.island.step(batch, self.rate(clock), position)

    def wait(self, handle: StepHandle) -> Mapping[str, float]:
        """Block until a step is done, and the next one has its samples; returns its loss and what else is reported."""
        metrics = self.island.wait(handle)
        self._feed.finish()  # after the step: only then does anything wait
        return {**metrics, DATA_WAIT: self._feed.waited_s()}

    def close(self) -> None:
        self._feed.close()
