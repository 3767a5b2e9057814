"""The fate of every sample index, position by position, kept apart from the machine's own book (protocol/leases.py).

    never --leased--> out --passed by every fragment--> merged, or overwritten
                       out --released--> free --leased again--> out

A fragment has passed a position when it took a value of its learner that had seen it, and somebody was seen to hold the
version that the newest such value went into. The position is merged if one of these values still held what it taught,
and overwritten if its learner had adopted newer versions in every fragment before. The book is told what happened; what
may not happen it writes down.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from diloco_jax.tools.replay.script import LearnerLife

NEVER, OUT, FREE, MERGED, OVERWRITTEN = 0, 1, 2, 3, 4
WORDS = ("never leased", "out", "released", "merged", "overwritten")
VIOLATIONS_MAX = 100  # that are told one by one
POSITIONS_MAX = 1 << 33  # of one run; the book takes 7 bytes for each
NAMED_MAX = 4  # ranges of positions that one violation names
CREDITS_MAX = 4096  # of a fragment, newest last: what a restart may take back

Range = tuple[int, int]


class Violations:
    """The breaches of the rules that were found, in words."""

    def __init__(self) -> None:
        self.count = 0
        self.texts: list[str] = []

    def add(self, text: str) -> None:
        """Write one down."""
        self.count += 1
        if len(self.texts) < VIOLATIONS_MAX:
            self.texts.append(text)


class SampleShare(NamedTuple):
    """The samples of its learner that a merged value had seen."""

    since: int  # samples of which it held nothing any more
    samples: int


@dataclass(slots=True)
class Ownership:
    """The samples of one life of a learner that are out, numbered in the order of the grants."""

    life: LearnerLife
    owner: int
    granted: int  # samples so far
    settled: int  # samples below are merged or overwritten
    marks: list[int]  # fragment -> samples that it has taken, as far as that is safe
    ranges: list[tuple[int, int, int]] = field(default_factory=list)  # first sample, first position, one after the last
    pending: list[tuple[int, int, SampleShare]] = field(default_factory=list)  # fragment, version that is not safe yet

    def positions(self, first: int, last: int) -> list[Range]:
        """The positions [start, stop) of samples first to last - 1, neighbours joined."""
        found = list[Range]()
        for sample, start, stop in self.ranges:
            low, high = max(first, sample), min(last, sample + stop - start)
            if low < high:
                found.append((start + low - sample, start + high - sample))
        return joined(found)

    @property
    def left(self) -> int:
        """Samples that are out."""
        return self.granted - self.settled


class Book:
    """See above.

    Args:
        num_fragments: fragments of the model.
    """

    def __init__(self, num_fragments: int) -> None:
        self.leased = self.merged = self.overwritten = self.released = self.repeated = 0
        self.holdings: dict[str, Ownership] = {}
        self.versions = [0] * num_fragments  # the newest
        self._credits: list[deque[tuple[int, list[Range]]]] = [deque(maxlen=CREDITS_MAX) for _ in range(num_fragments)]
        self._owners: dict[str, int] = {}
        self._fate = np.zeros(0, np.int8)
        self._owner = np.zeros(0, np.int32)
        self._undone = np.zeros(0, np.bool_)
        self._taught = np.zeros(0, np.bool_)  # some fragment has taken a value that held what the position taught

    @property
    def out(self) -> int:
        """Positions that somebody has."""
        return int(np.count_nonzero(self._fate == OUT))

    @property
    def undone(self) -> int:
        """Merged positions of which a fragment's share was in a version that was lost with everybody who held it."""
        return int(np.count_nonzero(self._undone & (self._fate == MERGED)))

    # ---- leases ---------------------------------------------------------------------------------------------------

    def lease(self, life: LearnerLife, first_sample: int, start: int, stop: int, violations: Violations) -> None:
        """Enter a lease that was sent. Samples whose numbers were granted before are not handed out again."""
        if not 0 <= start < stop <= POSITIONS_MAX:
            violations.add(f"{life.learner_id} was leased positions {start} to {stop - 1}, which cannot be")
            return
        holding = self._holding(life, first_sample, violations)
        if first_sample > holding.granted:
            violations.add(f"{life.learner_id} was never leased its samples {holding.granted} to {first_sample - 1}")
        repeated = max(0, min(holding.granted - first_sample, stop - start))
        hidden = max(0, holding.settled - first_sample)  # settled meanwhile: the book has let go of them
        told = holding.positions(first_sample, first_sample + repeated)
        if hidden < repeated and told != [(start + hidden, start + repeated)]:
            violations.add(f"{life.learner_id} was told that it has {told}, then {start} to {start + repeated - 1}")
        if start + repeated < stop:
            self._hand_out(holding, start + repeated, stop, violations)

    def _holding(self, life: LearnerLife, first_sample: int, violations: Violations) -> Ownership:
        """Return what this life owns, or open a new account for it."""
        holding = self.holdings.get(life.learner_id)
        if holding is not None:
            if holding.life == life and (first_sample <= holding.granted or holding.left):
                return holding
            if holding.left:
                violations.add(
                    f"{holding.left} positions of {holding.life.learner_id} (incarnation {holding.life.incarnation}) "
                    "were neither merged nor released when it ended: "
                    f"{_in_words(holding.positions(holding.settled, holding.granted))}"
                )
        owner = self._owners.setdefault(life.learner_id, len(self._owners))
        marks = [first_sample] * len(self.versions)
        holding = self.holdings[life.learner_id] = Ownership(life, owner, first_sample, first_sample, marks)
        return holding

    def _hand_out(self, holding: Ownership, start: int, stop: int, violations: Violations) -> None:
        self._grow(stop)
        fates = self._fate[start:stop]
        for wrong in (OUT, MERGED, OVERWRITTEN):
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
        self._undone[start:stop] = self._taught[start:stop] = False
        holding.ranges.append((holding.granted, start, stop))
        holding.granted += stop - start

    def _grow(self, size: int) -> None:
        if size > len(self._fate):
            more = max(size, 2 * len(self._fate)) - len(self._fate)
            self._fate = np.concatenate([self._fate, np.zeros(more, np.int8)])
            self._owner = np.concatenate([self._owner, np.zeros(more, np.int32)])
            self._undone = np.concatenate([self._undone, np.zeros(more, np.bool_)])
            self._taught = np.concatenate([self._taught, np.zeros(more, np.bool_)])

    def release(self, learner_id: str) -> None:
        """Free what a learner has left for others."""
        holding = self.holdings.pop(learner_id, None)
        if holding is not None:
            for start, stop in holding.positions(holding.settled, holding.granted):
                self._fate[start:stop] = FREE
                self.released += stop - start

    # ---- merges ---------------------------------------------------------------------------------------------------

    def on_version(self, fragment_id: int, version: int, shares: Mapping[LearnerLife, SampleShare]) -> None:
        """Enter that a merge made a version of these shares."""
        self.versions[fragment_id] = version
        for life, (since, samples) in shares.items():
            holding = self.holdings.get(life.learner_id)
            if holding is not None and holding.life == life:
                holding.pending.append((fragment_id, version, SampleShare(since, min(samples, holding.granted))))

    def on_held(self, fragment_id: int, version: int) -> None:
        """Enter that somebody holds a version: if it is the newest, the shares in it are safe."""
        if version != self.versions[fragment_id]:
            return
        for holding in self.holdings.values():
            for p, made, share in holding.pending:
                if p == fragment_id and made <= version:
                    self._credit(holding, p, made, share)
            holding.pending = [one for one in holding.pending if one[0] != fragment_id or one[1] > version]

    def _credit(self, holding: Ownership, fragment_id: int, version: int, share: SampleShare) -> None:
        before = holding.marks[fragment_id]
        for start, stop in holding.positions(share.since, share.samples):
            self._taught[start:stop] = True
        if share.samples <= before:
            return
        holding.marks[fragment_id] = share.samples
        self._credits[fragment_id].append((version, holding.positions(before, share.samples)))
        last = min(holding.marks)
        for start, stop in holding.positions(holding.settled, last):
            taught = self._taught[start:stop]
            self._fate[start:stop] = np.where(taught, MERGED, OVERWRITTEN)
            self.merged += int(np.count_nonzero(taught))
            self.overwritten += int(np.count_nonzero(~taught))
        holding.settled = max(holding.settled, last)
        while holding.ranges and _end(holding.ranges[0]) <= holding.settled:
            del holding.ranges[0]

    def on_lost(self, fragment_id: int, version: int) -> None:
        """Enter that after a restart nobody holds anything newer than this version of a fragment."""
        for holding in self.holdings.values():
            holding.pending = [one for one in holding.pending if one[0] != fragment_id or one[1] <= version]
        for made, ranges in self._credits[fragment_id]:
            if made > version:
                for start, stop in ranges:
                    self._undone[start:stop] = True

    def keep_until(self, versions: Sequence[int]) -> None:
        """Forget the shares in these versions and older ones: they cannot be lost any more."""
        for credits, version in zip(self._credits, versions, strict=True):
            while credits and credits[0][0] <= version:
                credits.popleft()


def joined(ranges: Iterable[Range]) -> list[Range]:
    """Return ranges [start, stop), each that begins within the one before, or at its end, made one with it."""
    found: list[Range] = []
    for start, stop in ranges:
        if found and found[-1][0] <= start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def _end(piece: tuple[int, int, int]) -> int:
    sample, start, stop = piece
    return sample + stop - start


def _in_words(ranges: Sequence[Range]) -> str:
    named = ", ".join(f"{start} to {stop - 1}" for start, stop in ranges[:NAMED_MAX])
    return named + (", ..." if len(ranges) > NAMED_MAX else "")
