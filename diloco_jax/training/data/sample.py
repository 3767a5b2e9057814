"""Samples and batches: arrays by name; the first axis of a batch counts its samples."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from diloco_jax.training.data.images import POOL

Sample = dict[str, np.ndarray]
# Anything with the shape and dtype of each array of a batch, by name.
Shapes = Mapping[str, jax.ShapeDtypeStruct | np.ndarray]
# The token ids of a text: int32 [length + 1].
TOKENS = "tokens"
# For each id the number of its document in the sample, from 1 on; 0 is padding: int32 [length + 1].
SEGMENTS = "segments"
# For each id its weight in the loss when it is predicted: float32 [length + 1]; absent: all are 1.
WEIGHTS = "weights"
# Pixels of the patches of each image, 0 in padding: uint8 [images, patches, numbers per patch].
PATCHES = "patches"
# Column and row of each patch, -1 in padding: int32 [images, patches, 2].
POSITIONS = "patch_positions"


def stack(samples: Sequence[Sample]) -> Sample:
    return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


def batch_shapes(sample: Sample, size: int) -> Shapes:
    return {name: jax.ShapeDtypeStruct((size, *value.shape), value.dtype) for name, value in sample.items()}


def described(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shape and dtype of each array by name; one program serves all batches with equal results."""
    return {name: (value.shape, value.dtype) for name, value in batch.items()}


def batch_size(batch: Sample) -> int:
    return len(next(iter(batch.values())))


def count_predicted(batch: Sample) -> int:
    """Return the number of predictions in a batch: its tokens but each sample's first; without tokens, its samples.

    With segments, the first token of each segment and padding do not count, nor do the soft tokens of images. Tokens of
    weight 0 do not count either.
    """
    # Without tokens, arrays with these names may mean anything.
    if TOKENS not in batch:
        return batch_size(batch)
    counted = np.ones_like(batch[TOKENS][:, 1:], bool)
    if SEGMENTS in batch:
        now, before = batch[SEGMENTS][:, 1:], batch[SEGMENTS][:, :-1]
        counted &= (now == before) & (now > 0)
    if WEIGHTS in batch:
        counted &= batch[WEIGHTS][:, 1:] > 0
    soft_tokens = int((batch[POSITIONS][..., 0] >= 0).sum()) // POOL**2 if POSITIONS in batch else 0
    return int(counted.sum()) - soft_tokens
