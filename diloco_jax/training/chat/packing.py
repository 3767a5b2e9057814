"""Samples of whole conversations: as many as fit, each in a separate segment, and padding at the end.

A conversation that is longer than a sample is cut after the last turn of the assistant that fits. What follows is left
out, since without the beginning it would be another conversation. One without a trained turn that fits is left out
whole.
"""

import logging
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from diloco_jax.training.data.mixture import Samples
from diloco_jax.training.data.sample import SEGMENTS, TOKENS, WEIGHTS, Sample
from diloco_jax.training.data.store import TRAINED, TURN_END, Store

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PackedConversations:
    """Samples of consecutive conversations of a store."""

    store: Store
    seq_len: int
    # The first token of each conversation, and the one after its last turn that fits.
    ranges: Int[np.ndarray, "n 2"]
    # The first conversation of each sample, and the number of conversations at the end.
    firsts: Int[np.ndarray, " m"]
    # The numbers of conversations that are cut, and that are left out.
    cut: int
    left_out: int

    def __len__(self) -> int:
        return len(self.firsts) - 1

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        size = self.seq_len + 1
        tokens, segments, weights = np.zeros(size, np.int32), np.zeros(size, np.int32), np.zeros(size, np.float32)
        at = 0
        chosen = self.ranges[self.firsts[index] : self.firsts[index + 1]].tolist()
        for number, (start, stop) in enumerate(chosen, start=1):
            here = slice(at, at + stop - start)
            tokens[here], weights[here] = self.store.read(start, stop), self.store.weights(start, stop)
            segments[here] = number
            at = here.stop
        return {TOKENS: tokens, SEGMENTS: segments, WEIGHTS: weights}


@dataclass(frozen=True, slots=True)
class WithWeights:
    """Samples of other data with weights of 1, so that they fit into batches with conversations."""

    samples: Samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        sample = self.samples[index]
        ones = np.ones_like(sample[TOKENS])
        return {SEGMENTS: ones, WEIGHTS: ones.astype(np.float32), **sample}


def pack_conversations(store: Store, start: int, stop: int, seq_len: int) -> PackedConversations:
    """Pack the conversations of a range of tokens in order; a sample ends before the first one that does not fit."""
    size, ends = seq_len + 1, store.ends(start, stop)
    ranges = np.stack([np.concatenate(([start], ends[:-1])), ends], axis=1) if len(ends) else np.empty((0, 2), np.int64)
    long = np.flatnonzero(ranges[:, 1] - ranges[:, 0] > size)
    for number in long.tolist():
        first = int(ranges[number, 0])
        ranges[number, 1] = first + _fitting(store, first, size)
    kept = ranges[ranges[:, 1] > ranges[:, 0]]
    left_out = len(ranges) - len(kept)
    if len(long):
        log.warning(
            "%d of %d conversations have more than %d tokens (train.seq_len + 1): %d are cut after the last turn that "
            "fits, %d are left out, because no trained turn ends within a sample",
            len(long), len(ranges), size, len(long) - left_out, left_out,
        )  # fmt: skip
    firsts, room = [0] * bool(len(kept)), size
    for number, length in enumerate((kept[:, 1] - kept[:, 0]).tolist()):
        if length > room:
            firsts.append(number)
            room = size
        room -= length
    bounds = np.asarray([*firsts, len(kept)], np.int64) if firsts else np.zeros(1, np.int64)
    return PackedConversations(store, seq_len, kept, bounds, len(long) - left_out, left_out)


def _fitting(store: Store, first: int, size: int) -> int:
    """Return the tokens of a conversation up to its last turn within `size` tokens; 0 if they are not trained on."""
    flags = store.flags(first, first + size)
    ends = np.flatnonzero(flags & TURN_END)
    count = int(ends[-1]) + 1 if len(ends) else 0
    return count if (flags[:count] & TRAINED).any() else 0
