"""The fate of every sample index, range by range: a book that is kept apart from the machine's (protocol/leases.py).

    never --leased--> out --passed by every fragment--> merged, or overwritten
                       out --released--> free --leased again--> out

A fragment has passed a position when it took a value of its learner that had seen it, and somebody was seen to hold the
version that the newest such value went into. The position is merged if one of these values still held what it taught,
and overwritten if its learner had adopted newer versions in every fragment before. The book is told what happened; what
may not happen it writes down. Its size is that of what is out: what has its fate is joined.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from diloco_jax.protocol.leases import Fates

NEVER, OUT, FREE, MERGED, OVERWRITTEN = "never leased", "out", "released", "merged", "overwritten"
VIOLATIONS_MAX = 100  # that are told one by one
POSITIONS_MAX = 1 << 33  # of one run
NAMED_MAX = 4  # ranges of positions that one violation names
CREDITS_MAX = 4096  # of a fragment, newest last: what a restart may take back

Life = tuple[str, int]  # a learner's name and incarnation
Range = tuple[int, int]
Value = TypeVar("Value")


class RangeMap(Generic[Value]):
    """A value for every number from 0 on; neighbours that are equal are one range."""

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
    """The breaches of the rules in words, and all positions that a life was ever given. They never go back."""

    def __init__(self) -> None:
        self.count = 0
        self.texts: list[str] = []
        self.granted: dict[Life, list[Range]] = {}

    def add(self, text: str) -> None:
        self.count += 1
        if len(self.texts) < VIOLATIONS_MAX:
            self.texts.append(text)

    def owners(self, position: int) -> str:
        """Name the lives that were ever given a position."""
        lives = [life for life, ranges in self.granted.items() if any(a <= position < b for a, b in ranges)]
        return ", ".join(dict.fromkeys(name for name, _ in lives))


class SampleShare(NamedTuple):
    """The samples of its learner that a merged value had seen."""

    since: int  # samples of which it held nothing any more
    samples: int


@dataclass(slots=True)
class Ownership:
    """The samples of one life of a learner that are out, numbered in the order of the grants."""

    life: Life
    granted: int  # samples so far
    settled: int  # samples below are merged or overwritten
    marks: list[int]  # fragment -> samples that it has taken, as far as that is safe
    offsets: RangeMap[int | None] = field(default_factory=lambda: RangeMap(None))  # sample -> position less sample
    pending: list[tuple[int, int, SampleShare]] = field(default_factory=list)  # fragment, version that is not safe yet

    def positions(self, first: int, last: int) -> list[Range]:
        """Return the positions [start, stop) of samples first to last - 1, as far as they are out."""
        found = self.offsets.over(first, last)
        return joined((start + offset, stop + offset) for start, stop, offset in found if offset is not None)

    @property
    def left(self) -> list[Range]:
        """Positions that are out."""
        return self.positions(self.settled, self.granted)


class Book:
    """The fates of all samples. See above."""

    def __init__(self, num_fragments: int) -> None:
        self.leased = self.released = self.repeated = 0
        self.end = 0  # positions from here on were never leased
        self.owners: dict[str, Ownership] = {}
        self.versions = [0] * num_fragments  # the newest
        self._credits: list[deque[tuple[int, list[Range]]]] = [deque(maxlen=CREDITS_MAX) for _ in range(num_fragments)]
        self._fates = RangeMap(NEVER)
        self._sizes = Counter[str]()  # fate -> positions
        self._undone = RangeMap(False)
        self._taught = RangeMap(False)  # some fragment has taken a value that held what the position taught

    @property
    def fates(self) -> Fates:
        """The counts to hold against the machine's."""
        merged, overwritten, out = (self._sizes[fate] for fate in (MERGED, OVERWRITTEN, OUT))
        return Fates(self.leased, merged, overwritten, self.released, out)

    @property
    def undone(self) -> int:
        """Merged positions of which a fragment's share was in a version that was lost with everybody who held it."""
        lost = [(start, stop) for start, stop, undone in self._undone.over(0, self.end) if undone]
        merged = [piece for start, stop in lost for piece in self._fates.over(start, stop) if piece[2] == MERGED]
        return sum(stop - start for start, stop, _ in merged)

    def _mark(self, start: int, stop: int, fate: str) -> None:
        for begin, end, before in self._fates.over(start, stop):
            self._sizes[before] -= end - begin
        self._sizes[fate] += stop - start
        self._fates.paint(start, stop, fate)

    def lease(self, life: Life, first_sample: int, start: int, stop: int, findings: Findings) -> None:
        """Enter a lease that was sent. Samples whose numbers were granted before are not handed out again."""
        name = life[0]
        if not 0 <= start < stop <= POSITIONS_MAX:
            findings.add(f"{name} was leased positions {start} to {stop - 1}, which cannot be")
            return
        owner = self._owner(life, first_sample, findings)
        if first_sample > owner.granted:
            findings.add(f"{name} was never leased its samples {owner.granted} to {first_sample - 1}")
        repeated = max(0, min(owner.granted - first_sample, stop - start))
        hidden = max(0, owner.settled - first_sample)  # settled meanwhile: the book has let go of them
        told = owner.positions(first_sample, first_sample + repeated)
        if hidden < repeated and told != [(start + hidden, start + repeated)]:
            findings.add(f"{name} was told that it has {told}, then {start} to {start + repeated - 1}")
        if start + repeated < stop:
            self._hand_out(owner, start + repeated, stop, findings)

    def _owner(self, life: Life, first_sample: int, findings: Findings) -> Ownership:
        """Return what this life owns, or open a new account for it."""
        name = life[0]
        owner = self.owners.get(name)
        if owner is not None:
            if owner.life == life and (first_sample <= owner.granted or owner.settled < owner.granted):
                return owner
            if owner.settled < owner.granted:
                findings.add(
                    f"{owner.granted - owner.settled} positions of {name} (incarnation {owner.life[1]}) were neither "
                    f"merged nor released when it ended: {_in_words(owner.left)}"
                )
        owner = self.owners[name] = Ownership(life, first_sample, first_sample, [first_sample] * len(self.versions))
        return owner

    def _hand_out(self, owner: Ownership, start: int, stop: int, findings: Findings) -> None:
        pieces = self._fates.over(start, stop)
        for wrong in (OUT, MERGED, OVERWRITTEN):
            found = [(begin, end) for begin, end, fate in pieces if fate == wrong]
            if found:
                first, more = found[0][0], sum(end - begin for begin, end in found) - 1
                findings.add(
                    f"position {first} (and {more} more) was leased to {owner.life[0]} while it was {wrong}, leased "
                    f"before to {findings.owners(first)}"
                )
        if start > self.end:
            findings.add(f"positions {self.end} to {start - 1} were left out")
        self.repeated += sum(end - begin for begin, end, fate in pieces if fate != NEVER)
        self.leased += stop - start
        self._mark(start, stop, OUT)
        if stop > self.end and self._sizes[FREE]:
            findings.add(f"{stop - self.end} new positions were leased, while {self._sizes[FREE]} released ones wait")
        self.end = max(self.end, stop)
        self._undone.paint(start, stop, False)
        self._taught.paint(start, stop, False)
        size = stop - start
        owner.offsets.paint(owner.granted, owner.granted + size, start - owner.granted)
        owner.granted += size
        findings.granted.setdefault(owner.life, []).append((start, stop))

    def release(self, learner_id: str) -> None:
        """Free what a learner has left for others."""
        owner = self.owners.pop(learner_id, None)
        for start, stop in owner.left if owner is not None else ():
            self._mark(start, stop, FREE)
            self.released += stop - start

    def on_version(self, fragment_id: int, version: int, shares: Mapping[Life, SampleShare]) -> None:
        """Enter that a merge made a version of these shares."""
        self.versions[fragment_id] = version
        for life, (since, samples) in shares.items():
            owner = self.owners.get(life[0])
            if owner is not None and owner.life == life:
                owner.pending.append((fragment_id, version, SampleShare(since, min(samples, owner.granted))))

    def on_held(self, fragment_id: int, version: int) -> None:
        """Enter that somebody holds a version: if it is the newest, the shares in it are safe."""
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
        """Enter that after a restart nobody holds anything newer than this version of a fragment."""
        for owner in self.owners.values():
            owner.pending = [one for one in owner.pending if one[0] != fragment_id or one[1] <= version]
        for made, ranges in self._credits[fragment_id]:
            if made > version:
                for start, stop in ranges:
                    self._undone.paint(start, stop, True)

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


def _in_words(ranges: Sequence[Range]) -> str:
    named = ", ".join(f"{start} to {stop - 1}" for start, stop in ranges[:NAMED_MAX])
    return named + (", ..." if len(ranges) > NAMED_MAX else "")
