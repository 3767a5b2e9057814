"""Leases of data: ranges of the sample order of a corpus, leased to learners. Each leased index has one fate.

The order has positions 0, 1, 2, ... without end. A lease is a range [start, stop) of them. Islands that read the run's
corpus share one order; a corpus that stays at its site has a separate order. The fate of a leased index:

    out  --every fragment of the model took a value of its learner that had seen it-->  merged, or overwritten
    out  --its learner's incarnation ended, or was lost for too long-->                 released, to be leased again

So at any time  leased = merged + overwritten + released + out  (an index that is leased again counts again). An index
is merged if one of these values still contained its work. It is overwritten if none did: its learner had adopted a
newer version of every fragment before a round took its value. A value counts once a learner reports that it holds the
version that contains the value. So a merge whose result was lost with the syncer merged nothing.

Rules of this file
  * A learner's own samples are numbered 0, 1, 2, ... in the order of its grants. `Lease.first_sample` is the number of
    a range's first sample, so that a lost or repeated message does no harm.
  * If a learner's data went to others while it was lost, its numbers continue from the next multiple of BOOK. What it
    had not read by then is void, and it recognises an old lease that still arrives.
  * Released ranges are leased again before new ones.
  * A learner that has used up its leases reads positions that were leased before, to anybody. These steps count for no
    lease (`earlier_range`).
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from diloco_jax.protocol.messages import Adopted, Lease

Range = tuple[int, int]
# What a value gave to a version: fragment, version, since and samples, as in on_merged.
Share = tuple[int, int, int, int]
# Name of the corpus that the run's config names; all other corpora are of single islands, or of a few.
COMMON = ""
# More samples than one incarnation ever gets.
BOOK = 1 << 32
# Largest position and sample number of a lease: a message carries numbers up to 2^62.
ORDER_MAX = 1 << 61
# The golden ratio minus 1, as a share of 2^64: its multiples modulo 1 are spread evenly.
GOLDEN = 0x9E3779B97F4A7C15


class Batch(NamedTuple):
    """The data of one inner step."""

    # Positions of the global order.
    ranges: tuple[Range, ...]
    # Samples of the learner's leases that are used up after the step.
    end: int


def cut(ranges: Iterable[Range], first: int, stop: int) -> list[Range]:
    """Return the positions first..stop-1 of these ranges, counted from the start of the first one."""
    found: list[Range] = []
    before = 0
    for begin, end in ranges:
        low, high = max(first - before, 0), min(stop - before, end - begin)
        if low < high:
            found.append((begin + low, begin + high))
        before += end - begin
        if before >= stop:
            break
    return found


def earlier_range(learner_id: str, incarnation: int, local_step: int, front: int, size: int) -> Range:
    """Return the positions that a learner reads in a step if its leases are used up.

        start = floor(frac(u + local_step * phi) (front - size + 1)),    phi = golden ratio - 1

    u in [0, 1) is a hash of the incarnation. The steps of an incarnation are spread evenly over all positions that were
    leased before, so that no few samples are learned by heart; two incarnations read in different orders.

    Args:
        front: the end of the highest range that was leased to the learner.
        size: samples of the step.
    """
    name = hashlib.blake2b(f"{learner_id} {incarnation}".encode(), digest_size=8).digest()
    turn = (int.from_bytes(name, "big") + local_step * GOLDEN) % (1 << 64)
    start = turn * max(1, front - size + 1) >> 64
    return start, start + size


class Allotment:
    """The learner's side of leases: those that arrived, and how much of them is read.

    Args:
        learner_id: name of the learner.
        incarnation: its incarnation.
        step_samples: leased samples of a step, 0 for a learner that reads its own data.

    Attributes:
        earlier_steps: steps in a row, up to the newest, that had no leased data.
    """

    def __init__(self, learner_id: str, incarnation: int, step_samples: int) -> None:
        self._name = (learner_id, incarnation)
        self.step_samples = step_samples
        # Positions of the samples _first, _first + 1, ..., granted - 1.
        self._ranges: list[Range] = []
        self._first = 0
        self.granted = 0
        self._taken = 0
        self._steps = 0
        # The end of the highest range so far.
        self._front = 0
        self.earlier_steps = 0

    def resize(self, step_samples: int) -> None:
        """Set the samples of the steps that are not taken yet, for an island that lost a slice or got one back."""
        self.step_samples = step_samples

    @property
    def ready(self) -> bool:
        """True while there is leased data for a step."""
        return self._taken + self.step_samples <= self.granted

    def add(self, lease: Lease) -> None:
        """Take the new part of a lease; the syncer repeats a lease that would leave a gap."""
        if lease.first_sample > self.granted and lease.first_sample % BOOK == 0:
            # Other learners have the samples that are not read yet.
            self._ranges = []
            self._first = self._taken = self.granted = lease.first_sample
        skipped = self.granted - lease.first_sample
        if 0 <= skipped < lease.stop - lease.start:
            self._ranges.append((lease.start + skipped, lease.stop))
            self.granted += lease.stop - lease.start - skipped
            self._front = max(self._front, lease.stop)

    def take(self) -> Batch:
        """Return the data of the next step; while leases are used up, earlier positions, so that no step waits."""
        assert self.ready or self._steps, "a batch was taken before the first lease arrived"
        self._steps += 1
        if not self.ready:
            # Samples that are left for the next step are not read before it.
            self.earlier_steps += 1
            return Batch((earlier_range(*self._name, self._steps, self._front, self.step_samples),), self._taken)
        self.earlier_steps = 0
        ranges = self._positions(self.step_samples)
        self._taken += self.step_samples
        self._forget()
        return Batch(ranges, self._taken)

    def upcoming(self, steps: int) -> tuple[Range, ...]:
        """Return the leased positions that the next steps will read: whole steps, and at most so many.

        If the learner has to give up a lease before it takes the data, other learners read it.
        """
        known = min(steps, (self.granted - self._taken) // max(1, self.step_samples))
        return self._positions(known * self.step_samples)

    def _positions(self, count: int) -> tuple[Range, ...]:
        start = self._taken - self._first
        return tuple(cut(self._ranges, start, start + count))

    def _forget(self) -> None:
        """Forget the ranges that are read."""
        while self._ranges and self._first + self._ranges[0][1] - self._ranges[0][0] <= self._taken:
            start, stop = self._ranges.pop(0)
            self._first += stop - start


class Fates(NamedTuple):
    """Numbers of leased indices, and of indices with each fate."""

    leased: int
    merged: int
    overwritten: int
    released: int
    out: int


@dataclass(slots=True)
class Holding:
    """The samples of one incarnation of a learner whose fate is open."""

    settled: int
    granted: int
    # Fragment -> samples in its newest confirmed share.
    marks: list[int]
    # Positions of the samples settled, settled + 1, ..., granted - 1.
    ranges: list[Range] = field(default_factory=list)
    # Shares in versions that no learner is known to hold.
    pending: list[Share] = field(default_factory=list)
    # Samples whose work a confirmed share contained: sorted, never adjacent.
    taught: list[Range] = field(default_factory=list)

    def to_plain(self) -> dict[str, Any]:
        """Return all fields; ranges and shares never change, so new lists of them are enough of a copy."""
        lists = {name: list(getattr(self, name)) for name in ("marks", "ranges", "pending", "taught")}
        return {"settled": self.settled, "granted": self.granted, **lists}

    def after(self, sample: int) -> list[Lease]:
        """Return the leases from this sample on."""
        leases, first = [], max(sample, self.settled)
        for start, stop in cut(self.ranges, sample - self.settled, BOOK):
            leases.append(Lease(first, start, stop))
            first += stop - start
        return leases

    def confirm(self, fragment_id: int, version: int) -> bool:
        """Confirm this version of a fragment and older ones; return whether no fragment was further behind."""
        last = self.marks[fragment_id] == self.settled
        left: list[Share] = []
        for share in self.pending:
            taught, made, since, samples = share
            if taught != fragment_id or made > version:
                left.append(share)
                continue
            if samples > self.marks[fragment_id]:
                self.marks[fragment_id] = samples
            self._teach(since if since > self.settled else self.settled, samples)
        self.pending = left
        return last

    def _teach(self, start: int, stop: int) -> None:
        """Record that a confirmed share contained work of these samples."""
        taught = self.taught
        # Nearly always the samples extend the last range.
        if taught and taught[-1][0] <= start <= taught[-1][1] < stop:
            taught[-1] = (taught[-1][0], stop)
        elif start < stop:
            self.taught = joined([*taught, (start, stop)])

    def settle(self) -> tuple[int, int]:
        """Remove the samples that every fragment has passed; return how many are merged, and how many overwritten."""
        end = min(self.marks)
        done = end - self.settled
        if done <= 0:
            return 0, 0
        merged, taught = 0, []
        for start, stop in self.taught:
            if start < end:
                merged += (stop if stop < end else end) - start
            if stop > end:
                taught.append((start if start > end else end, stop))
        self.taught = taught
        self.settled = end
        self.ranges = cut(self.ranges, done, BOOK)
        return merged, done - merged


def joined(ranges: Iterable[Range]) -> list[Range]:
    """Return the same positions in as few ranges as possible, sorted."""
    found: list[Range] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


class LeaseBook:
    """The syncer's record of all leases and fates of one corpus; the rules are in the docstring of this module."""

    def __init__(self, num_fragments: int) -> None:
        self._num_fragments = num_fragments
        self._next = 0
        # Released ranges: sorted, never adjacent.
        self.pool: list[Range] = []
        # Fragment with pending shares -> its version, which no learner has reported yet.
        self.unconfirmed: dict[int, int] = {}
        self._leased = self._merged = self._overwritten = self._released = 0
        self.holdings: dict[str, Holding] = {}
        # Learner -> end of its newest sample numbers, which are closed.
        self._ended: dict[str, int] = {}

    @property
    def end(self) -> int:
        """Return the first position that was never leased."""
        return self._next

    @property
    def fates(self) -> Fates:
        """Return the samples by fate; they add up to what was leased."""
        out = sum(holding.granted - holding.settled for holding in self.holdings.values())
        return Fates(self._leased, self._merged, self._overwritten, self._released, out)

    def open(self, learner_id: str, first_sample: int = 0) -> Holding:
        """Make the holding of an incarnation that has none; its numbers continue if it had one before."""
        assert learner_id not in self.holdings, f"{learner_id} holds leases already"
        ended = self._ended.pop(learner_id, None)
        if ended is not None:
            first_sample = (max(ended, first_sample) // BOOK + 1) * BOOK
        marks = [first_sample] * self._num_fragments
        holding = self.holdings[learner_id] = Holding(first_sample, first_sample, marks)
        return holding

    def grant(self, learner_id: str, count: int) -> list[Lease]:
        """Grant `count` more samples and return the leases to send; none if they would pass ORDER_MAX."""
        holding = self.holdings[learner_id]
        sample = holding.granted
        if max(self._next, sample) + count > ORDER_MAX:
            return []
        while count > 0:
            start, stop = self._take(count)
            holding.granted += stop - start
            count -= stop - start
            if holding.ranges and holding.ranges[-1][1] == start:
                holding.ranges[-1] = (holding.ranges[-1][0], stop)
            else:
                holding.ranges.append((start, stop))
        self._leased += holding.granted - sample
        return holding.after(sample)

    def _take(self, count: int) -> Range:
        """Return at most `count` positions in one range, released ones first."""
        if self.pool:
            start, stop = self.pool[0]
            if stop - start > count:
                self.pool[0] = (start + count, stop)
                return start, start + count
            return self.pool.pop(0)
        start = self._next
        self._next += count
        return start, self._next

    def on_merged(self, learner_id: str, fragment_id: int, version: int, samples: int, since: int = 0) -> None:
        """Record that a version contains a value, which contains the work of the samples from `since` to `samples`."""
        holding = self.holdings.get(learner_id)
        if holding is not None:
            known = samples if samples < holding.granted else holding.granted
            holding.pending.append((fragment_id, version, since, known))
            self.unconfirmed[fragment_id] = version

    def on_version(self, fragment_id: int, version: int) -> None:
        """Record a fragment's newest version; a learner that holds it holds everything that earlier ones contain."""
        if fragment_id in self.unconfirmed:
            self.unconfirmed[fragment_id] = version

    def confirm(self, fragment_id: int, version: int) -> None:
        """Settle what a version contains, because a learner holds it."""
        if version >= self.unconfirmed.get(fragment_id, 0):
            self.unconfirmed.pop(fragment_id, None)
        for holding in self.holdings.values():
            if holding.confirm(fragment_id, version):
                merged, overwritten = holding.settle()
                self._merged += merged
                self._overwritten += overwritten

    def on_held(self, adopted: Sequence[Adopted]) -> None:
        """Settle what these versions contain, because a learner holds them."""
        for fragment_id, version in tuple(self.unconfirmed.items()):
            if adopted[fragment_id].version == version:
                self.confirm(fragment_id, version)

    def revert(self, fragment_id: int, version: int) -> None:
        """Remove what newer versions than this one contained, because they are lost."""
        for holding in self.holdings.values():
            holding.pending = [one for one in holding.pending if one[0] != fragment_id or one[1] <= version]
        if not any(one[0] == fragment_id for holding in self.holdings.values() for one in holding.pending):
            self.unconfirmed.pop(fragment_id, None)

    def release(self, learner_id: str) -> int:
        """Take back the samples of a lost incarnation whose fate is open; return how many."""
        holding = self.holdings.pop(learner_id, None)
        if holding is None:
            return 0
        count = holding.granted - holding.settled
        self._ended[learner_id] = holding.granted
        self._released += count
        self.pool = joined(self.pool + holding.ranges)
        return count

    def forget(self, learner_id: str) -> None:
        """Let the samples of a newer incarnation start at 0."""
        self._ended.pop(learner_id, None)

    def state(self) -> dict[str, Any]:
        return {
            "counts": [self._next, self._leased, self._merged, self._overwritten, self._released],
            "pool": list(self.pool),
            "unconfirmed": list(self.unconfirmed.items()),
            "holdings": [{"name": name, **holding.to_plain()} for name, holding in self.holdings.items()],
            "ended": list(self._ended.items()),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._next, self._leased, self._merged, self._overwritten, self._released = state["counts"]
        self.pool = [(start, stop) for start, stop in state["pool"]]
        self._ended, self.unconfirmed = dict(state["ended"]), dict(state["unconfirmed"])
        self.holdings = {}
        for plain in state["holdings"]:
            rows = ([tuple(row) for row in plain[name]] for name in ("ranges", "pending", "taught"))
            self.holdings[plain["name"]] = Holding(plain["settled"], plain["granted"], list(plain["marks"]), *rows)


class LeaseBooks:
    """The books of leases of all corpora, by the name of the corpus: the orders of two corpora share no position."""

    def __init__(self, num_fragments: int) -> None:
        self._num_fragments = num_fragments
        self.books = {COMMON: LeaseBook(num_fragments)}

    def of(self, corpus: str) -> LeaseBook:
        """Return the book of a corpus whose samples are leased now; a new corpus gets a new one."""
        book = self.books.get(corpus)
        if book is None:
            book = self.books[corpus] = LeaseBook(self._num_fragments)
        return book

    def release(self, corpus: str, learner_id: str) -> int:
        """Take back the samples of a lost incarnation; return how many."""
        return self.books[corpus].release(learner_id) if corpus in self.books else 0

    def forget(self, corpus: str, learner_id: str) -> None:
        """Let the samples of a newer incarnation start at 0."""
        if corpus in self.books:
            self.books[corpus].forget(learner_id)

    @property
    def fates(self) -> Fates:
        """Return the samples of all corpora by fate."""
        return Fates(*map(sum, zip(*[book.fates for book in self.books.values()], strict=True)))

    @property
    def holders(self) -> list[str]:
        """Return the names of the learners that hold leases, sorted."""
        return sorted([name for book in self.books.values() for name in book.holdings])

    def on_version(self, fragment_id: int, version: int) -> None:
        """Record a fragment's newest version, which contains values from any corpus."""
        for book in self.books.values():
            book.on_version(fragment_id, version)

    def on_held(self, adopted: Sequence[Adopted]) -> None:
        """Settle what these versions contain, because a learner holds them, whatever corpus it reads."""
        for book in self.books.values():
            if book.unconfirmed:
                book.on_held(adopted)

    def revert(self, fragment_id: int, version: int) -> None:
        """Remove what newer versions than this one contained, because they are lost."""
        for book in self.books.values():
            book.revert(fragment_id, version)

    def state(self) -> dict[str, Any]:
        others = {corpus: book.state() for corpus, book in self.books.items() if corpus != COMMON}
        return {**self.books[COMMON].state(), "corpora": others}

    def restore(self, state: dict[str, Any]) -> None:
        self.books = {COMMON: LeaseBook(self._num_fragments)}
        # Older releases wrote no other corpora.
        for corpus, plain in {COMMON: state, **state.get("corpora", {})}.items():
            self.of(corpus).restore(plain)
