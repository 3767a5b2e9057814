"""The built-in training loop of one process of an island: the model's inner step, on data of the run's global order.

A separate thread reads samples ahead, and the loop copies them to the devices while a step runs.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

import jax

from diloco_jax.runtime.island.host import DATA_WAIT, Ranges
from diloco_jax.runtime.island.model_evaluation import ModelEvaluation
from diloco_jax.runtime.island.threads import placed
from diloco_jax.settings.run import RunConfig
from diloco_jax.training.data.corpus import Source, load_source
from diloco_jax.training.data.order import SampleOrder
from diloco_jax.training.data.sample import Sample, Shapes, batch_shapes
from diloco_jax.training.island import Island, StepHandle
from diloco_jax.training.optimizers import learning_rate
from diloco_jax.training.parts import PartSteps
from diloco_jax.training.state import Batch

LOADING = "loading the data and building the model"  # a phase
# Limit of the samples that one process reads ahead.
AHEAD_BYTES = 1 << 30
# The ranges of a batch.
Key = tuple[tuple[int, int], ...]


class ReadAhead:
    """Batches that are read ahead, in the order of their use; for one thread.

    One other thread reads at most `ahead` batches beyond the next one; with 0 the caller's thread reads. The reader is
    not a daemon thread, because an interpreter may crash if it ends while a source runs C code.
    """

    def __init__(self, read: Callable[[Key], Sample], ahead: int) -> None:
        self._read = placed(read)
        self._ahead = ahead
        self._thread = ThreadPoolExecutor(1, "read") if ahead else None
        self._coming: dict[Key, Future[Sample]] = {}

    def expect(self, batches: Sequence[Key]) -> None:
        """Start to read these batches, in this order, as far as there is room; drop all other batches."""
        wanted = batches[: self._ahead + 1]
        for key in [key for key in self._coming if key not in wanted]:
            self._coming.pop(key).cancel()
        for key in wanted:
            if key not in self._coming:
                self._coming[key] = self._begin(key)

    def _begin(self, key: Key) -> Future[Sample]:
        if self._thread is not None:
            return self._thread.submit(self._read, key)
        done: Future[Sample] = Future()
        done.set_result(self._read(key))
        return done

    def has(self, key: Key) -> bool:
        """Tell whether `take` would return at once."""
        return self._coming[key].done()

    def take(self, key: Key) -> Sample:
        """Wait for an expected batch, and return it; raises the error of reading it."""
        return self._coming.pop(key).result()

    def close(self) -> None:
        self._coming.clear()
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)


class Feed:
    """Batches for the steps of an island, with only the rows of this process's devices; for one thread.

    The feed reads `ahead` batches beyond the next one; fewer if they are large (AHEAD_BYTES).
    """

    def __init__(self, island: Island, order: SampleOrder, sample: Sample, ahead: int, size: int) -> None:
        self._island = island
        self._order = order
        num_bytes = len(island.own_rows(size)) * sum(value.nbytes for value in sample.values())
        self._reader = ReadAhead(self._read, min(ahead, max(1, AHEAD_BYTES // max(1, num_bytes))))
        self._next: Key = ()
        self._batch: Batch | None = None
        self._waited_s = 0.0

    def put(self, ranges: Ranges, ahead: Ranges = ()) -> None:
        """Set the samples of the next step, and copy them to the devices if they are read; return at once."""
        self._next, self._batch = tuple(ranges), None
        self._reader.expect([self._next, *batches_of(ahead, count(ranges))])
        if self._reader.has(self._next):
            self.finish()

    def finish(self) -> None:
        """Wait until the samples of the next step are read, and copy them to the devices."""
        if self._batch is not None or not self._next:
            return
        began_s = time.monotonic()
        rows = self._reader.take(self._next)
        self._waited_s += time.monotonic() - began_s
        self._batch = self._island.put_batch(rows, count(self._next))

    def take(self) -> tuple[Batch, int]:
        """Return the batch of the next step, and its first position in the global order."""
        self.finish()
        assert self._batch is not None, "a step was made without data"
        batch, position, self._next, self._batch = self._batch, self._next[0][0], (), None
        return batch, position

    def waited_s(self) -> float:
        """Return how long steps have waited for samples since the last call, in seconds."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def close(self) -> None:
        self._reader.close()

    def _read(self, key: Key) -> Sample:
        return self._order.batch(key, self._island.own_rows(count(key)))


def count(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def batches_of(ranges: Ranges, size: int) -> Iterator[Key]:
    """Cut ranges into batches of `size` samples; drop an incomplete rest."""
    batch: Key = ()
    for start, stop in ranges:
        while (end := start + size - count(batch)) <= stop:
            yield (*batch, (start, end))
            batch, start = (), end
        if start < stop:
            batch = (*batch, (start, stop))


class BuiltInLoop:
    """The steps of an island that trains the config's model, on all devices by default; for one thread at a time."""

    def __init__(self, config: RunConfig, learner_id: str, devices: Sequence[jax.Device] | None = None) -> None:
        own = config.island(learner_id)
        source = load_source(config.data, config.train.seq_len)
        # Description of the data, so that processes can compare what they read.
        self.corpus = source.corpus
        self.epoch_samples = len(source.train)
        self.tokenizer = source.tokenizer.digest if source.tokenizer else ""
        self.batch_size = own.batch_size  # samples per step
        # Samples per part of a step.
        self.part_size = own.batch_size // config.islands.slices
        self.prefetch = config.data.prefetch  # batches ahead
        self._sample = source.train[0]
        # The learning rate of a step of the schedule.
        self.rate = learning_rate(config.optimizer, config.planned_steps)
        # The whole island, or this process's part of it.
        self.island = Island(
            config.model,
            config.optimizer,
            own.mesh,
            seed=config.seed,
            devices=devices,
            wire=config.wire.up,
            rebase=config.adopt.mode == "rebase",
        )
        # The evaluation of the run's model.
        self.evaluate = ModelEvaluation(config, self.island.blueprint, source, self.island.base.values)
        # Batches of each corpus that this loop reads, and its description; an island reads one.
        self._feeds: dict[str, tuple[Feed, str]] = {}
        self._feed = self._read(config, source)

    def _read(self, config: RunConfig, source: Source) -> Feed:
        order = SampleOrder(source, config.data.shuffle_seed + config.seed)
        feed = Feed(self.island, order, self._sample, self.prefetch, self.batch_size)
        self._feeds[config.data.corpus] = feed, source.corpus
        return feed

    def turn_to(self, config: RunConfig) -> str:
        """Take the next samples from the corpus of another island, in the same form; return its description."""
        if config.data.corpus not in self._feeds:
            self._read(config, load_source(config.data, config.train.seq_len))
        self._feed, corpus = self._feeds[config.data.corpus]
        return corpus

    def warm_up(self, batch_size: int = 0) -> None:
        """Compile the inner step, for `batch_size` samples if given; any thread may call it."""
        self.island.warm_up(self.shapes(batch_size or self.batch_size))

    def shapes(self, batch_size: int) -> Shapes:
        """Return the shapes and dtypes of a batch of this many samples, by name."""
        return batch_shapes(self._sample, batch_size)

    @cached_property
    def parts(self) -> PartSteps:
        """Return the steps in parts, for an island of several slices; ValueError if the model has none."""
        return PartSteps(self.island)

    def warm_up_steps(self) -> None:
        """Compile what this loop steps with: the inner step, or on a slice the programs of its parts; any thread."""
        if self.part_size == self.batch_size:
            self.warm_up()
        else:
            self.parts.warm_up(self.shapes(self.part_size))

    def put_batch(self, ranges: Ranges, ahead: Ranges = ()) -> None:
        """Copy the samples of the next step to the devices, and start to read later ones; return at once."""
        self._feed.put(ranges, ahead)

    def take_batch(self) -> tuple[Batch, int]:
        """Return the samples of `put_batch` on the devices, and the first one's position in the global order."""
        return self._feed.take()

    def waited_s(self) -> float:
        """Return how long steps have waited for samples since the last call, in seconds."""
        return self._feed.waited_s()

    def step(self, clock: int) -> StepHandle:
        """Dispatch one inner step on the newest batch, at this step of the schedule; return at once."""
        batch, position = self.take_batch()
        return self.island.step(batch, self.rate(clock), position)

    def wait(self, handle: StepHandle) -> Mapping[str, float]:
        """Block until a step is done and the next one has its samples; return the step's loss and other metrics."""
        metrics = self.island.wait(handle)
        # The feed finishes after the step, because only then does anything wait for it.
        self._feed.finish()
        return {**metrics, DATA_WAIT: self.waited_s()}

    def close(self) -> None:
        for feed, _ in self._feeds.values():
            feed.close()
