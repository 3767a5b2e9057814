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


class TurnExchange:
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
        """Return the slices that this one waits for: owners of missing parts, or else members that owe their means."""
        turn = self.turn
        needed = turn.owners if self._index >= 0 else ()
        # A member without all parts owes its mean, but it waits itself.
        owners = {owner for part, owner in enumerate(needed) if part not in self._metrics} - {self._own}
        return owners or {turn.members[index] for index in self._missing} - {self._own}

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step, from those of all parts; only a member has them."""
        told = [self._metrics[part] for part in sorted(self._metrics)]
        return mean_metrics([metrics for metrics, _ in told], [weight for _, weight in told])

    def add(self, number: int, part: Part) -> Iterator[Sending]:
        """Take a part that this slice has computed; yield what the members need of it."""
        at = self.turn.term, self.turn.change, self.turn.attempt
        message = Chunk(*at, number, dict(part.metrics), part.weight)
        for index, (start, stop) in enumerate(self._bounds):
            chunk = part.flat[start:stop]
            if index == self._index:
                yield from self.on_chunk(self._own, message, chunk)
            else:
                yield Sending(self.turn.members[index], message, chunk.view(np.uint8).data)

    def on_chunk(self, sender: int, message: Chunk, chunk: np.ndarray) -> Iterator[Sending]:
        """Take this member's chunk of a part; yield the mean once every part is here.

        Raises:
            ValueError: the chunk is not one that the sender can have for this member, or other parts report other
                metrics.
        """
        part, (start, stop) = message.part, self._bounds[self._index]
        known = self._index >= 0 and 0 <= part < len(self.turn.parts) and self.turn.owners[part] == sender
        if not known or chunk.shape != (stop - start,):
            raise ValueError(f"a chunk of part {part} with {chunk.size} numbers does not belong to this turn")
        if self._metrics and message.metrics.keys() != next(iter(self._metrics.values()))[0].keys():
            raise ValueError(f"part {part} reports other metrics than the parts before it")
        self._chunks[part], self._metrics[part] = chunk, (message.metrics, message.weight)
        if len(self._chunks) < len(self.turn.parts) or self._index not in self._missing:
            return
        order = sorted(self._chunks)
        self.mean[start:stop] = mean_chunk(
            [self._chunks[number] for number in order], [self._metrics[number][1] for number in order]
        )
        self._chunks.clear()
        self._missing.discard(self._index)
        mean = Mean(self.turn.term, self.turn.change, self.turn.attempt, self._index)
        payload = self.mean[start:stop].view(np.uint8).data
        for to in sorted({*self.turn.members, *self.turn.listeners} - {self._own}):
            yield Sending(to, mean, payload)

    def on_mean(self, sender: int, index: int, chunk: np.ndarray) -> None:
        """Take one chunk of the mean gradient; ValueError if it is not one that the sender adds."""
        known = 0 <= index < len(self._bounds) and self.turn.members[index] == sender
        start, stop = self._bounds[index] if known else (0, -1)
        if chunk.shape != (stop - start,):
            raise ValueError(f"chunk {index} with {chunk.size} numbers does not belong to this turn")
        self.mean[start:stop] = chunk
        self._missing.discard(index)
