"""The global order of samples, which every learner can compute alone.

    samples -> global order (reshuffled in each epoch) -> batches

The global order (`SampleOrder`) has positions 0, 1, 2, ... without end. A learner reads the positions that the syncer
leases to it.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from diloco_jax.training.data.config import DataConfig
from diloco_jax.training.data.corpus import Source, count_tokens, cut_source, find_files, load_source
from diloco_jax.training.data.image_store import no_image
from diloco_jax.training.data.mixture import Order, Samples
from diloco_jax.training.data.sample import SEGMENTS, TOKENS, WEIGHTS, Sample, stack


def check_source(config: DataConfig, seq_len: int, eval_batch_size: int) -> None:
    """Check that `load_source` and `eval_batches` will work; ValueError if not.

    For one source of bytes or raw tokens, names and sizes of files are enough, so that no file is read. From other
    sources some samples are read, and a missing token store is built.
    """
    if not config.plain:
        source = load_source(config, seq_len)
        for name in ("", *source.evaluation):
            next(eval_batches(source, eval_batch_size, 1, name))
        return
    (part,) = config.sources.values()
    if part.format == "bytes":
        _, files = find_files(part)
        count = sum(path.stat().st_size + 1 for path in files)
    else:
        count = count_tokens(part)
    # This array has the right length but takes only one byte of memory.
    ids = np.broadcast_to(np.uint8(0), count)
    cut_source(config, part, ids, seq_len, corpus="")


def example(config: DataConfig, seq_len: int) -> Sample:
    """Return a sample with the names, shapes and dtypes of all samples; from the user's source if there is one."""
    if config.module:
        return load_source(config, seq_len).train[0]
    tokens = np.zeros(seq_len + 1, np.int32)
    has_segments = config.documents != "joined" or config.with_images or config.with_chat
    found = {TOKENS: tokens, **({SEGMENTS: tokens} if has_segments else {})}
    found |= {WEIGHTS: tokens.astype(np.float32)} if config.with_chat else {}
    return found | (no_image(config.images.soft_tokens) if config.with_images else {})


def _stack(samples: Sequence[Sample], vocab_size: int) -> Sample:
    batch = stack(samples)
    highest = batch[TOKENS].max() if TOKENS in batch else 0
    # An embedding look-up would silently clamp an id that is too large.
    if highest >= vocab_size:
        raise ValueError(f"the data has token id {highest}, data.vocab_size is {vocab_size}; correct one of them")
    return batch


class SampleOrder:
    """The global order of the training windows; equal corpora and seeds give equal orders."""

    def __init__(self, source: Source, seed: int) -> None:
        self._source = source
        lengths = [len(part.train) for part in source.parts.values()] or [len(source.train)]
        self._order = Order(lengths, source.weights or (1.0,), seed)

    def window_id(self, position: int) -> int:
        """Return the index in `source.train` of the window at a position."""
        return self._order[position]

    def batch(self, ranges: Sequence[tuple[int, int]], rows: Sequence[int] | None = None) -> Sample:
        """Return the samples at the positions of all ranges as a batch.

        Args:
          ranges: pairs [start, stop) of positions.
          rows: the rows of the batch to return; all by default.

        Raises:
          ValueError: there is no position, or a token id is not below the vocabulary's size.
        """
        positions = [position for start, stop in ranges for position in range(start, stop)]
        if not positions or min(positions) < 0:
            raise ValueError(f"ranges {tuple(ranges)} hold no positions from 0 on; give [start, stop) pairs")
        chosen = positions if rows is None else [positions[row] for row in rows]
        return _stack([self._source.train[self.window_id(p)] for p in chosen], self._source.vocab_size)

    def batches(self, size: int) -> Iterator[Sample]:
        """Yield all samples in batches of `size`, without end, for training without other islands."""
        for start in itertools.count(0, size):
            yield self.batch(((start, start + size),))


def size_of_eval_batches(held_out: Samples, batch_size: int) -> int:
    """Return how many samples a batch of an evaluation has: all held-out ones if there are fewer than `batch_size`."""
    # No held-out sample makes no batch.
    return max(1, min(batch_size, len(held_out)))


def eval_batches(source: Source, batch_size: int, max_batches: int, name: str = "") -> Iterator[Sample]:
    """Yield up to `max_batches` batches of held-out windows, evenly spaced and always the same.

    With a name, the windows are those of this set in `source.evaluation`.
    """
    held_out = source.evaluation[name] if name else source.held_out
    batch_size = size_of_eval_batches(held_out, batch_size)
    count = min(len(held_out) // batch_size, max_batches) * batch_size
    chosen = [i * len(held_out) // count for i in range(count)]
    for start in range(0, count, batch_size):
        yield _stack([held_out[i] for i in chosen[start : start + batch_size]], source.vocab_size)
