"""The fate of every sample index, range by range: an independent check of the machine's own counts (leases.py).

    never --leased--> still leased --passed by every fragment--> merged, or overwritten
                      still leased --released--> free --leased again--> still leased

A fragment has passed a position when two things are true: it took a value of its learner that had seen the position,
and a learner was seen to hold the version that contains the newest such value. The position is merged if one of these
values still contained its work, and overwritten if the learner had adopted newer versions in every fragment before. The
book is filled from the tape, and it records what must not happen. It grows with the number of ranges that are still
leased; neighbouring ranges of the same fate are joined.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from diloco_jax.protocol.leases import Fates

NEVER, STILL_LEASED, FREE, MERGED, OVERWRITTEN = "never leased", "still leased", "released", "merged", "overwritten"
# Violations that are described one by one.
VIOLATIONS_MAX = 100
# Positions of one run.
POSITIONS_MAX = 1 << 33
# Ranges of positions that one violation names.
NAMED_MAX = 4
# Newest shares of each fragment that are kept, because a restart may undo them.
CREDITS_MAX = 4096

# A learner's name and incarnation.
Incarnation = tuple[str, int]
Range = tuple[int, int]
Value = TypeVar("Value")


class RangeMap(Generic[Value]):
    """A map from every number >= 0 to a value; neighbours with equal values are one range."""

    def __init__(self, value: Value) -> None:
        self._starts = [0]
        self._values = [value]

    def over(self, start: int, stop: int) -> list[tuple[int, int, Value]]:
        """Return the ranges within [start, stop), and the value of each."""
        found = []
        at = bisect_right(self._starts, start)
        while start < stop:
            end = min(stop, self._starts[at]) if at < len(self._starts) else stop
            found.append((start, end, self._values[at - 1]))
            start, at = end, at + 1
        return found

    def paint(self, start: int, stop: int, value: Value) -> None:
        """Give every number in [start, stop) this value."""
        if start >= stop:
            return
        first, last = self._cut(start), self._cut(stop)
        self._starts[first:last] = [start]
        self._values[first:last] = [value]
        for at in (first + 1, first):
            if at and self._values[at] == self._values[at - 1]:
                del self._starts[at], self._values[at]

    def _cut(self, number: int) -> int:
        at = bisect_left(self._starts, number)
        if at == len(self._starts) or self._starts[at] != number:
            self._starts.insert(at, number)
            self._values.insert(at, self._values[at - 1])
        return at


class Findings:
    """Descriptions of all violations, and all positions that each incarnation ever got; both only grow."""

    def __init__(self) -> None:
        self.count = 0
        self.texts: list[str] = []
        self.granted: dict[Incarnation, list[Range]] = {}

    def add(self, text: str) -> None:
        """Count a violation, and keep its description if there are not too many."""
        self.count += 1
        if len(self.texts) < VIOLATIONS_MAX:
            self.texts.append(text)

    def owners(self, position: int) -> str:
        """Return the names of the learners that ever got a position."""
        granted = self.granted.items()
        names = [name for (name, _), ranges in granted if any(a <= position < b for a, b in ranges)]
        return ", ".join(dict.fromkeys(names))


class SampleShare(NamedTuple):
    """The samples that a merged value had seen: those from `since` to `samples` - 1 still had an effect on it."""

    since: int
    samples: int


@dataclass(slots=True)
class Ownership:
    """The samples of one incarnation of a learner that are still leased, numbered in the order of the grants."""

    incarnation: Incarnation
    # Number of samples so far.
    granted: int
    # Lower samples than this one are merged or overwritten.
    settled: int
    # Fragment -> samples that it has taken, in versions that a learner holds.
    marks: list[int]
    # Sample -> its position minus its number.
    offsets: RangeMap[int | None] = field(default_factory=lambda: RangeMap(None))
    # (fragment, version, share) of merges that count once a learner holds the newest version.
    pending: list[tuple[int, int, SampleShare]] = field(default_factory=list)

    def positions(self, first: int, last: int) -> list[Range]:
        """Return the positions of the samples first to last - 1 that are still leased, as ranges [start, stop)."""
        found = self.offsets.over(first, last)
        return joined((start + offset, stop + offset) for start, stop, offset in found if offset is not None)

    @property
    def left(self) -> list[Range]:
        """Return all positions that are still leased."""
        return self.positions(self.settled, self.granted)


class Book:
    """The fates of all samples of a run."""

    def __init__(self, num_fragments: int) -> None:
        self.leased = self.released = self.repeated = 0
        # Positions from here on were never leased.
        self.end = 0
        self.owners: dict[str, Ownership] = {}
        # Newest version of each fragment.
        self.versions = [0] * num_fragments
        self._credits: list[deque[tuple[int, list[Range]]]] = [deque(maxlen=CREDITS_MAX) for _ in range(num_fragments)]
        self._fates = RangeMap(NEVER)
        # Fate -> number of positions.
        self._sizes = Counter[str]()
        # True for positions whose share in a fragment was lost.
        self._undone = RangeMap(False)
        # True for positions whose work is in a value that a fragment has taken.
        self._taught = RangeMap(False)

    @property
    def fates(self) -> Fates:
        """Return the counts to compare with the machine's."""
        merged, overwritten, out = (self._sizes[fate] for fate in (MERGED, OVERWRITTEN, STILL_LEASED))
        return Fates(self.leased, merged, overwritten, self.released, out)

    @property
    def undone(self) -> int:
        """Return the number of merged positions with a share in a version that is lost."""
        lost = [(start, stop) for start, stop, undone in self._undone.over(0, self.end) if undone]
        merged = [piece for start, stop in lost for piece in self._fates.over(start, stop) if piece[2] == MERGED]
        return sum(stop - start for start, stop, _ in merged)

    def _mark(self, start: int, stop: int, fate: str) -> None:
        for begin, end, before in self._fates.over(start, stop):
            self._sizes[before] -= end - begin
        self._sizes[fate] += stop - start
        self._fates.paint(start, stop, fate)

    def lease(self, incarnation: Incarnation, first_sample: int, start: int, stop: int, findings: Findings) -> None:
        """Record a lease that was sent. Samples whose numbers were granted before are not leased again."""
        name = incarnation[0]
        if not 0 <= start < stop <= POSITIONS_MAX:
            findings.add(f"{name} was leased positions {start} to {stop - 1}, which cannot be")
            return
        owner = self._owner(incarnation, first_sample, findings)
        if first_sample > owner.granted:
            findings.add(f"{name} was never leased its samples {owner.granted} to {first_sample - 1}")
        repeated = max(0, min(owner.granted - first_sample, stop - start))
        # Samples that were settled meanwhile are not in the book any more.
        hidden = max(0, owner.settled - first_sample)
        told = owner.positions(first_sample, first_sample + repeated)
        if hidden < repeated and told != [(start + hidden, start + repeated)]:
            findings.add(f"{name} was told that it has {told}, then {start} to {start + repeated - 1}")
        if start + repeated < stop:
            self._lease(owner, start + repeated, stop, findings)

    def _owner(self, incarnation: Incarnation, first_sample: int, findings: Findings) -> Ownership:
        """Return the ownership of this incarnation; make one if it has none."""
        name = incarnation[0]
        owner = self.owners.get(name)
        if owner is not None:
            if owner.incarnation == incarnation and (first_sample <= owner.granted or owner.settled < owner.granted):
                return owner
            if owner.settled < owner.granted:
                findings.add(
                    f"{owner.granted - owner.settled} positions of {name} (incarnation {owner.incarnation[1]}) were "
                    f"neither merged nor released when it ended: {_in_words(owner.left)}"
                )
        owner = self.owners[name] = Ownership(
            incarnation, first_sample, first_sample, [first_sample] * len(self.versions)
        )
        return owner

    def _lease(self, owner: Ownership, start: int, stop: int, findings: Findings) -> None:
        pieces = self._fates.over(start, stop)
        for wrong in (STILL_LEASED, MERGED, OVERWRITTEN):
            found = [(begin, end) for begin, end, fate in pieces if fate == wrong]
            if found:
                first, more = found[0][0], sum(end - begin for begin, end in found) - 1
                findings.add(
                    f"position {first} (and {more} more) was leased to {owner.incarnation[0]} while it was {wrong}, "
                    f"leased before to {findings.owners(first)}"
                )
        if start > self.end:
            findings.add(f"positions {self.end} to {start - 1} were skipped")
        self.repeated += sum(end - begin for begin, end, fate in pieces if fate != NEVER)
        self.leased += stop - start
        self._mark(start, stop, STILL_LEASED)
        if stop > self.end and self._sizes[FREE]:
            findings.add(f"{stop - self.end} new positions were leased, while {self._sizes[FREE]} released ones wait")
        self.end = max(self.end, stop)
        self._undone.paint(start, stop, False)
        self._taught.paint(start, stop, False)
        size = stop - start
        owner.offsets.paint(owner.granted, owner.granted + size, start - owner.granted)
        owner.granted += size
        findings.granted.setdefault(owner.incarnation, []).append((start, stop))

    def release(self, learner_id: str) -> None:
        """Free the positions that a learner still leases, for others."""
        owner = self.owners.pop(learner_id, None)
        for start, stop in owner.left if owner is not None else ():
            self._mark(start, stop, FREE)
            self.released += stop - start

    def on_version(self, fragment_id: int, version: int, shares: Mapping[Incarnation, SampleShare]) -> None:
        """Record that a merge made a version of these shares."""
        self.versions[fragment_id] = version
        for incarnation, (since, samples) in shares.items():
            owner = self.owners.get(incarnation[0])
            if owner is not None and owner.incarnation == incarnation:
                owner.pending.append((fragment_id, version, SampleShare(since, min(samples, owner.granted))))

    def on_held(self, fragment_id: int, version: int) -> None:
        """Record that a learner holds a version: if it is the newest, the shares in it are safe."""
        if version != self.versions[fragment_id]:
            return
        for owner in self.owners.values():
            for p, made, share in owner.pending:
                if p == fragment_id and made <= version:
                    self._credit(owner, p, made, share)
            owner.pending = [one for one in owner.pending if one[0] != fragment_id or one[1] > version]

    def _credit(self, owner: Ownership, fragment_id: int, version: int, share: SampleShare) -> None:
        before = owner.marks[fragment_id]
        for start, stop in owner.positions(share.since, share.samples):
            self._taught.paint(start, stop, True)
        if share.samples <= before:
            return
        owner.marks[fragment_id] = share.samples
        self._credits[fragment_id].append((version, owner.positions(before, share.samples)))
        last = min(owner.marks)
        for start, stop in owner.positions(owner.settled, last):
            for begin, end, taught in self._taught.over(start, stop):
                self._mark(begin, end, MERGED if taught else OVERWRITTEN)
        owner.settled = max(owner.settled, last)
        owner.offsets.paint(0, owner.settled, None)

    def on_lost(self, fragment_id: int, version: int) -> None:
        """Record that after a restart no learner holds a newer version of a fragment than this one."""
        for owner in self.owners.values():
            owner.pending = [one for one in owner.pending if one[0] != fragment_id or one[1] <= version]
        for made, ranges in self._credits[fragment_id]:
            if made > version:
                for start, stop in ranges:
                    self._undone.paint(start, stop, True)

    def keep_until(self, versions: Sequence[int]) -> None:
        """Forget the shares in these versions and older ones, because they cannot be lost any more."""
        for credits, version in zip(self._credits, versions, strict=True):
            while credits and credits[0][0] <= version:
                credits.popleft()


def joined(ranges: Iterable[Range]) -> list[Range]:
    """Join each range [start, stop) that starts within the one before it, or at its end, with that one."""
    found: list[Range] = []
    for start, stop in ranges:
        if found and found[-1][0] <= start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def _in_words(ranges: Sequence[Range]) -> str:
    named = ", ".join(f"{start} to {stop - 1}" for start, stop in ranges[:NAMED_MAX])
    return named + (", ..." if len(ranges) > NAMED_MAX else "")
