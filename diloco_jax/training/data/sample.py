"""Samples and batches: arrays by name. A batch has one more axis, the first one, along which its samples lie."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

Sample = dict[str, np.ndarray]
Shapes = Mapping[str, jax.ShapeDtypeStruct | np.ndarray]  # what has shapes and types: of the arrays of a batch, by name
TOKENS = "tokens"  # the ids of a text: int32 [length + 1]
SEGMENTS = "segments"  # the number of each id's document within the sample, from 1 on; 0 is padding: int32 [length + 1]


def stack(samples: Sequence[Sample]) -> Sample:
    return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


def batch_shapes(sample: Sample, size: int) -> Shapes:
    return {name: jax.ShapeDtypeStruct((size, *value.shape), value.dtype) for name, value in sample.items()}


def described(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return shapes and types by name, equal for batches that one program takes."""
    return {name: (value.shape, value.dtype) for name, value in batch.items()}


def batch_size(batch: Sample) -> int:
    return len(next(iter(batch.values())))


def count_predicted(batch: Sample) -> int:
    """Return the number of what is predicted in a batch: all tokens but the first ones; its samples without tokens.

    Where documents are kept apart, the first ones are those of documents, and padding does not count.
    """
    if SEGMENTS in batch and TOKENS in batch:  # of images a user may call anything so
        now, before = batch[SEGMENTS][:, 1:], batch[SEGMENTS][:, :-1]
        return int(((now == before) & (now > 0)).sum())
    return batch[TOKENS][:, 1:].size if TOKENS in batch else batch_size(batch)
