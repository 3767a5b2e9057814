"""The exchange of one turn at one slice: chunks of the parts' gradients come in, and the mean gradient goes out.

With n parts, weights w_p and gradients g_p, every slice gets

    g = (w_0 g_0 + w_1 g_1 + ... + w_{n-1} g_{n-1}) / (w_0 + ... + w_{n-1})

added in this order in float32, so the bits do not depend on the members. The member with index j adds chunk j and
sends it to the others: each byte of a gradient crosses the network twice, as in a reduce-scatter and an all-gather.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from diloco_jax.runtime.slices.division import bounds
from diloco_jax.runtime.slices.messages import Chunk, Mean, Turn
from diloco_jax.training.parts import Part, mean_chunk, mean_metrics


class Sending(NamedTuple):
    """A message to one slice."""

    to: int
    message: Chunk | Mean
    payload: memoryview


class Exchange:
    """One attempt of a turn at one slice; a slice that only listens adds nothing.

    Args:
        own: number of this slice.
        turn: the request of the leader.
        size: numbers of a gradient.
    """

    def __init__(self, own: int, turn: Turn, size: int) -> None:
        self.turn = turn
        self.mean = np.empty(size, np.float32)
        self._own = own
        self._bounds = bounds(size, len(turn.members))
        self._index = turn.members.index(own) if own in turn.members else -1
        self._missing = {index for index, (start, stop) in enumerate(self._bounds) if start < stop}
        # Of each part: this slice's chunk, and the part's weight and metrics.
        self._chunks: dict[int, np.ndarray] = {}
        self._metrics: dict[int, tuple[Mapping[str, float], float]] = {}

    @property
    def complete(self) -> bool:
        """Tell whether the whole mean gradient is here, and of a member the metrics of all parts."""
        return not self._missing and (self._index < 0 or len(self._metrics) == len(self.turn.parts))

    @property
    def lacks(self) -> set[int]:
        """Return the slices whose chunks or means are missing."""
        turn = self.turn
        owners = {owner for part, owner in enumerate(turn.owners) if part not in self._metrics} - {self._own}
        return owners | {turn.members[index] for index in self._missing} - {self._own}

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step, from those of all parts; only a member has them."""
        told = [self._metrics[part] for part in sorted(self._metrics)]
        return mean_metrics([metrics for metrics, _ in told], [weight for _, weight in told])

    def add(self, number: int, part: Part) -> Iterator[Sending]:
        """Take a part that this slice has computed; yield what the members need of it."""
        for index, (start, stop) in enumerate(self._bounds):
            chunk = part.flat[start:stop]
            if index == self._index:
                yield from self.on_chunk(number, part.metrics, part.weight, chunk)
            else:
                message = Chunk(self.turn.change, self.turn.attempt, number, dict(part.metrics), part.weight)
                yield Sending(self.turn.members[index], message, chunk.view(np.uint8).data)

    def on_chunk(self, part: int, metrics: Mapping[str, float], weight: float, chunk: np.ndarray) -> Iterator[Sending]:
        """Take this member's chunk of a part; yield the mean once every part is here; ValueError if it cannot be."""
        start, stop = self._bounds[self._index]
        if self._index < 0 or not 0 <= part < len(self.turn.parts) or chunk.shape != (stop - start,):
            raise ValueError(f"a chunk of part {part} with {chunk.size} numbers does not belong to this turn")
        self._chunks[part], self._metrics[part] = chunk, (metrics, weight)
        if len(self._chunks) < len(self.turn.parts) or self._index not in self._missing:
            return
        order = sorted(self._chunks)
        self.mean[start:stop] = mean_chunk(
            [self._chunks[number] for number in order], [self._metrics[number][1] for number in order]
        )
        self._chunks.clear()
        self._missing.discard(self._index)
        message = Mean(self.turn.change, self.turn.attempt, self._index)
        payload = self.mean[start:stop].view(np.uint8).data
        for to in sorted({*self.turn.members, *self.turn.listeners} - {self._own}):
            yield Sending(to, message, payload)

    def on_mean(self, index: int, chunk: np.ndarray) -> None:
        """Take one chunk of the mean gradient; ValueError if it does not belong to this turn."""
        if not 0 <= index < len(self._bounds) or chunk.shape != (self._bounds[index][1] - self._bounds[index][0],):
            raise ValueError(f"chunk {index} with {chunk.size} numbers does not belong to this turn")
        start, stop = self._bounds[index]
        self.mean[start:stop] = chunk
        self._missing.discard(index)
