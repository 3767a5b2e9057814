"""The fate of every sample index, position by position, kept apart from the machine's own book (protocol/leases.py).

    never --leased--> out --merged--> merged
                       out --released--> free --leased again--> out

A position is merged when every fragment of the model took a value of its learner that had seen it, and somebody was
seen to hold the version that the newest such value went into. The book is told what happened; what may not happen it
writes down.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from diloco_jax.runtime.replay_script import Life

NEVER, OUT, FREE, MERGED = 0, 1, 2, 3
WORDS = ("never leased", "out", "released", "merged")
VIOLATIONS_MAX = 100  # that are told one by one
POSITIONS_MAX = 1 << 33  # of one run; the book takes 6 bytes for each
NAMED_MAX = 4  # ranges of positions that one violation names
CREDITS_MAX = 4096  # of a fragment, newest last: what a restart may take back

Range = tuple[int, int]


class Violations:
    """What went against the rules, in words."""

    def __init__(self) -> None:
        self.count = 0
        self.texts: list[str] = []

    def add(self, text: str) -> None:
        """Write one down."""
        self.count += 1
        if len(self.texts) < VIOLATIONS_MAX:
            self.texts.append(text)


@dataclass(slots=True)
class Holding:
    """What one life of a learner was given and is not merged yet. Samples are numbered in the order of the grants."""

    life: Life
    owner: int
    granted: int  # samples so far
    merged: int  # samples below are merged
    marks: list[int]  # fragment -> samples that it has taken, as far as that is safe
    ranges: list[tuple[int, int, int]] = field(default_factory=list)  # first sample, first position, one after the last
    pending: dict[int, tuple[int, int]] = field(default_factory=dict)  # fragment -> (version, samples), not safe yet

    def positions(self, first: int, last: int) -> list[Range]:
        """The positions [start, stop) of samples first to last - 1, neighbours joined."""
        found = []
        for sample, start, stop in self.ranges:
            low, high = max(first, sample), min(last, sample + stop - start)
            if low < high:
                found.append((start + low - sample, start + high - sample))
        return list(joined(found))

    @property
    def left(self) -> int:
        """Samples that are out."""
        return self.granted - self.merged


class Book:
    """See above.

    Args:
        num_fragments: fragments of the model.
    """

    def __init__(self, num_fragments: int) -> None:
        self.leased = self.merged = self.released = self.repeated = 0
        self.holdings: dict[str, Holding] = {}
        self.versions = [0] * num_fragments  # the newest
        self._credits: list[deque[tuple[int, list[Range]]]] = [deque(maxlen=CREDITS_MAX) for _ in range(num_fragments)]
        self._owners: dict[str, int] = {}
        self._fate = np.zeros(0, np.int8)
        self._owner = np.zeros(0, np.int32)
        self._undone = np.zeros(0, np.bool_)

    @property
    def out(self) -> int:
        """Positions that somebody has."""
        return int(np.count_nonzero(self._fate == OUT))

    @property
    def undone(self) -> int:
        """Merged positions of which a fragment's share was in a version that was lost with everybody who held it."""
        return int(np.count_nonzero(self._undone & (self._fate == MERGED)))

    # ---- leases ---------------------------------------------------------------------------------------------------

    def lease(self, life: Life, first_sample: int, start: int, stop: int, violations: Violations) -> None:
        """A lease was sent. What its samples' numbers say to be repeated is not handed out again."""
        if not 0 <= start < stop <= POSITIONS_MAX:
            violations.add(f"{life.learner_id} was leased positions {start} to {stop - 1}, which cannot be")
            return
        holding = self._holding(life, first_sample, violations)
        if first_sample > holding.granted:
            violations.add(f"{life.learner_id} was never leased its samples {holding.granted} to {first_sample - 1}")
        repeated = max(0, min(holding.granted - first_sample, stop - start))
        hidden = max(0, holding.merged - first_sample)  # merged meanwhile: the book has let go of them
        told = holding.positions(first_sample, first_sample + repeated)
        if hidden < repeated and told != [(start + hidden, start + repeated)]:
            violations.add(f"{life.learner_id} was told that it has {told}, then {start} to {start + repeated - 1}")
        if start + repeated < stop:
            self._hand_out(holding, start + repeated, stop, violations)

    def _holding(self, life: Life, first_sample: int, violations: Violations) -> Holding:
        """This life's, or a new one."""
        holding = self.holdings.get(life.learner_id)
        if holding is not None:
            if holding.life == life and (first_sample <= holding.granted or holding.left):
                return holding
            if holding.left:
                violations.add(
                    f"{holding.left} positions of {holding.life.learner_id} (incarnation {holding.life.incarnation}) "
                    "were neither merged nor released when it ended: "
                    f"{_in_words(holding.positions(holding.merged, holding.granted))}"
                )
        owner = self._owners.setdefault(life.learner_id, len(self._owners))
        marks = [first_sample] * len(self.versions)
        holding = self.holdings[life.learner_id] = Holding(life, owner, first_sample, first_sample, marks)
        return holding

    def _hand_out(self, holding: Holding, start: int, stop: int, violations: Violations) -> None:
        self._grow(stop)
        fates = self._fate[start:stop]
        for wrong in (OUT, MERGED):
            found = np.flatnonzero(fates == wrong) + start
            if len(found):
                last = next(name for name, owner in self._owners.items() if owner == self._owner[found[0]])
                violations.add(
                    f"position {found[0]} (and {len(found) - 1} more) was leased to {holding.life.learner_id} while it "
                    f"was {WORDS[wrong]}, last leased to {last}"
                )
        self.repeated += int(np.count_nonzero(fates != NEVER))
        self.leased += stop - start
        self._fate[start:stop] = OUT
        self._owner[start:stop] = holding.owner
        self._undone[start:stop] = False
        holding.ranges.append((holding.granted, start, stop))
        holding.granted += stop - start

    def _grow(self, size: int) -> None:
        if size > len(self._fate):
            more = max(size, 2 * len(self._fate)) - len(self._fate)
            self._fate = np.concatenate([self._fate, np.zeros(more, np.int8)])
            self._owner = np.concatenate([self._owner, np.zeros(more, np.int32)])
            self._undone = np.concatenate([self._undone, np.zeros(more, np.bool_)])

    def release(self, learner_id: str) -> None:
        """What a learner has left goes to others."""
        holding = self.holdings.pop(learner_id, None)
        if holding is not None:
            for start, stop in holding.positions(holding.merged, holding.granted):
                self._fate[start:stop] = FREE
                self.released += stop - start

    # ---- merges ---------------------------------------------------------------------------------------------------

    def on_version(self, fragment_id: int, version: int, shares: Sequence[tuple[Life, int]]) -> None:
        """A merge made a version; `shares` are the lives that have one in it, and the samples that each had seen."""
        self.versions[fragment_id] = version
        for life, samples in shares:
            holding = self.holdings.get(life.learner_id)
            if holding is not None and holding.life == life:
                holding.pending[fragment_id] = (version, min(samples, holding.granted))

    def on_held(self, fragment_id: int, version: int) -> None:
        """Somebody reported to hold a version: if it is the newest, what went into it is safe."""
        if version != self.versions[fragment_id]:
            return
        for holding in self.holdings.values():
            made, samples = holding.pending.get(fragment_id, (version + 1, 0))
            if made <= version:
                del holding.pending[fragment_id]
                self._credit(holding, fragment_id, made, samples)

    def _credit(self, holding: Holding, fragment_id: int, version: int, samples: int) -> None:
        before = holding.marks[fragment_id]
        if samples <= before:
            return
        holding.marks[fragment_id] = samples
        self._credits[fragment_id].append((version, holding.positions(before, samples)))
        last = min(holding.marks)
        for start, stop in holding.positions(holding.merged, last):
            self._fate[start:stop] = MERGED
            self.merged += stop - start
        holding.merged = max(holding.merged, last)
        while holding.ranges and _end(holding.ranges[0]) <= holding.merged:
            del holding.ranges[0]

    def on_lost(self, fragment_id: int, version: int) -> None:
        """After a restart nobody holds anything newer than this version of a fragment: what was newer is lost."""
        for holding in self.holdings.values():
            if holding.pending.get(fragment_id, (0, 0))[0] > version:
                del holding.pending[fragment_id]
        for made, ranges in self._credits[fragment_id]:
            if made > version:
                for start, stop in ranges:
                    self._undone[start:stop] = True

    def keep_until(self, versions: Sequence[int]) -> None:
        """Nothing up to these versions of the fragments can be lost any more."""
        for credits, version in zip(self._credits, versions, strict=True):
            while credits and credits[0][0] <= version:
                credits.popleft()


def joined(ranges: Iterable[Range]) -> Iterator[Range]:
    """Ranges [start, stop), each that begins where the one before ends made one with it."""
    newest: Range | None = None
    for start, stop in ranges:
        if newest is not None and start == newest[1]:
            newest = (newest[0], stop)
            continue
        if newest is not None:
            yield newest
        newest = (start, stop)
    if newest is not None:
        yield newest


def _end(piece: tuple[int, int, int]) -> int:
    sample, start, stop = piece
    return sample + stop - start


def _in_words(ranges: Sequence[Range]) -> str:
    named = ", ".join(f"{start} to {stop - 1}" for start, stop in ranges[:NAMED_MAX])
    return named + (", ..." if len(ranges) > NAMED_MAX else "")
