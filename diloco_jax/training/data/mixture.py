"""The order of a mixture: several sources in proportion to their weights, each shuffled separately, without end."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

import numpy as np

from diloco_jax.training.data.own import SAMPLES_MAX

# The pattern of sources repeats after this many positions, so that shares are multiples of about a millionth.
PATTERN = 1 << 20


@runtime_checkable
class Samples(Protocol):
    """Random access to samples."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class Pattern:
    """A table with the source of each position, spread so evenly that each prefix has nearly the right shares."""

    def __init__(self, weights: Sequence[float]) -> None:
        shares = np.asarray(weights, np.float64) / sum(weights)
        counts = np.maximum(1, np.floor(shares * PATTERN).astype(np.int64))
        counts[np.argmax(counts)] += PATTERN - counts.sum()
        due = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
        order = np.argsort(due, kind="stable")
        self._source = np.repeat(np.arange(len(counts), dtype=np.uint8), counts)[order]
        self._rank = np.concatenate([np.arange(count, dtype=np.uint32) for count in counts])[order]
        self._counts = counts

    def __getitem__(self, position: int) -> tuple[int, int]:
        turn, place = divmod(position, PATTERN)
        source = int(self._source[place])
        return source, turn * int(self._counts[source]) + int(self._rank[place])


class Order:
    """The number of the sample at each position of the global order, from 0 on.

    An epoch of a source contains each of its samples once, and each epoch is shuffled separately. A small source may
    start its next epoch while others are still in their first. The samples of the second source are numbered after
    those of the first.
    """

    def __init__(self, lengths: Sequence[int], weights: Sequence[float], seed: int) -> None:
        if max(lengths) > SAMPLES_MAX:
            raise ValueError(f"a source has {max(lengths)} samples, {SAMPLES_MAX} is the limit; use longer ones")
        # Grain imports Orbax, which takes long, and a process that never reads samples for training does not need it.
        import grain

        # Random access without a permutation in memory; `repeat` reshuffles every epoch.
        self._orders = [grain.MapDataset.range(length).shuffle(seed=seed).repeat() for length in lengths]
        self._firsts = [0, *accumulate(lengths)]
        self._pattern = Pattern(weights) if len(lengths) > 1 else None

    def __getitem__(self, position: int) -> int:
        source, place = self._pattern[position] if self._pattern else (0, position)
        return self._firsts[source] + int(self._orders[source][place])


class Chain:
    """A concatenation of sources, with a number of evenly spaced samples from each."""

    def __init__(self, sources: Sequence[Samples], counts: Sequence[int]) -> None:
        self._sources, self._counts, self._firsts = sources, counts, [0, *accumulate(counts)]

    def __len__(self) -> int:
        return self._firsts[-1]

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number = bisect_right(self._firsts, index) - 1
        source = self._sources[number]
        return source[(index - self._firsts[number]) * len(source) // self._counts[number]]


def mixed(sources: Sequence[Samples], weights: Sequence[float] = ()) -> Chain:
    """Join sources: all samples; or with weights, numbers in proportion to them, and all of the scarcest source."""
    if not weights:
        return Chain(sources, [len(source) for source in sources])
    scale = min(len(source) / weight for source, weight in zip(sources, weights, strict=True))
    return Chain(sources, [max(1, int(scale * weight)) for weight in weights])
