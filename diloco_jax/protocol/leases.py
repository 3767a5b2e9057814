"""Leases of data: ranges of one global sample order, leased to learners, each handed out index with one fate.

The order has positions 0, 1, 2, ... without end. A lease is a range [start, stop) of them. An index that was handed out

    out  --every fragment of the model took a value of its learner that had seen it-->  merged, or overwritten
    out  --its learner's incarnation ended, or was away for too long-->                 released, to be leased again

so at any time  leased = merged + overwritten + released + out  (an index that is leased again counts again). It is
merged if one of these values still held what it taught, and overwritten if none did: its learner had adopted a newer
version of every fragment before a round took it. A value counts once a learner reports to hold the version that it went
into: a merge whose result died with the syncer merged nothing.

Rules of this file
  * A learner's own samples are numbered 0, 1, 2, ... in the order of its grants; `Lease.first_sample` says where a
    range begins, so that a lost or repeated message does no harm.
  * When its data went to others while it was away, its numbers go on from the next multiple of BOOK: what it had not
    read by then is void, and an old lease that still arrives is recognised.
  * Released ranges are leased again before new ones.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from diloco_jax.protocol.messages import Adopted, Lease

Range = tuple[int, int]
Share = tuple[int, int, int, int]  # that a value has in a version: fragment, version, since, samples (as on_merged)
BOOK = 1 << 32  # more samples than one incarnation is ever given
# Largest position and sample number of a lease: a message carries numbers up to 2^62.
ORDER_MAX = 1 << 61


class Batch(NamedTuple):
    """The data of one inner step."""

    ranges: tuple[Range, ...]  # positions of the global order
    end: int  # samples of its leases that are used up then


def cut(ranges: Iterable[Range], first: int, stop: int) -> list[Range]:
    """Return the positions first..stop-1 of these ranges, counted from the begin of the first one."""
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


class Allotment:
    """The learner's side: leases that arrived, and how far it is.

    Args:
        keep_steps: steps whose positions are remembered, to be read again when no new lease comes.
    """

    def __init__(self, step_samples: int, keep_steps: int) -> None:
        self.step_samples = step_samples
        self._keep = keep_steps * step_samples
        self._ranges: list[Range] = []  # the samples first, first + 1, ..., granted - 1
        self._first = 0
        self.granted = 0
        self._taken = 0
        self._repeats = 0

    @property
    def ready(self) -> bool:
        """True once there is anything to train on."""
        return self.granted - self._first >= self.step_samples

    def add(self, lease: Lease) -> None:
        """Take a lease, as far as it is new; one that leaves a gap is left to be sent again."""
        if lease.first_sample > self.granted and lease.first_sample % BOOK == 0:
            self._begin_book(lease.first_sample)
        skipped = self.granted - lease.first_sample
        if 0 <= skipped < lease.stop - lease.start:
            self._ranges.append((lease.start + skipped, lease.stop))
            self.granted += lease.stop - lease.start - skipped

    def _begin_book(self, first_sample: int) -> None:
        """Give up the samples that are not read yet: they are somebody else's now. The others may be read again."""
        self._ranges = cut(self._ranges, 0, self._taken - self._first)
        self._first += first_sample - self._taken
        self._taken = self.granted = first_sample

    def take(self) -> Batch:
        """The positions of the next step; of an earlier one again while leases are used up, so that no step waits."""
        if self._taken + self.step_samples <= self.granted:
            start = self._taken
            self._taken += self.step_samples
            self._repeats = 0
            self._forget()
        else:
            assert self.ready, "a batch was taken before the first lease arrived"
            batches = (self.granted - self._first) // self.step_samples
            start = self._first + self._repeats % batches * self.step_samples
            self._repeats += 1
        return Batch(self._positions(start, self.step_samples), self._taken)

    def upcoming(self, steps: int) -> tuple[Range, ...]:
        """The positions that the steps after those taken will read, of whole steps and at most so many.

        They are as good as their leases: what is given up before it is taken goes to others.
        """
        known = min(steps, (self.granted - self._taken) // self.step_samples)
        return self._positions(self._taken, known * self.step_samples)

    def _positions(self, start: int, count: int) -> tuple[Range, ...]:
        return tuple(cut(self._ranges, start - self._first, start - self._first + count))

    def _forget(self) -> None:
        while self._ranges:
            size = self._ranges[0][1] - self._ranges[0][0]
            if self._first + size > self._taken - self._keep:
                return
            del self._ranges[0]
            self._first += size


class Fates(NamedTuple):
    """Counts of the indices that were handed out, and of each fate."""

    leased: int
    merged: int
    overwritten: int
    released: int
    out: int


@dataclass(slots=True)
class Holding:
    """The samples of one incarnation of a learner of which the fate is open."""

    settled: int
    granted: int
    marks: list[int]  # fragment -> samples in its newest confirmed share
    ranges: list[Range] = field(default_factory=list)  # the samples settled, settled + 1, ..., granted - 1
    pending: list[Share] = field(default_factory=list)  # in versions that nobody is known to hold
    # samples of which a confirmed share held something: sorted, never adjacent
    taught: list[Range] = field(default_factory=list)

    def after(self, sample: int) -> list[Lease]:
        """The leases from this sample on."""
        leases, first = [], max(sample, self.settled)
        for start, stop in cut(self.ranges, sample - self.settled, BOOK):
            leases.append(Lease(first, start, stop))
            first += stop - start
        return leases

    def confirm(self, fragment_id: int, version: int) -> bool:
        """Note that versions of this fragment up to this one are safe; returns whether it was the last one behind."""
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
        """A confirmed share held something of these samples."""
        taught = self.taught
        if taught and taught[-1][0] <= start <= taught[-1][1] < stop:  # as nearly always
            taught[-1] = (taught[-1][0], stop)
        elif start < stop:
            self.taught = joined([*taught, (start, stop)])

    def settle(self) -> tuple[int, int]:
        """Let go of what every fragment has passed; returns how much of it is merged, and how much overwritten."""
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
    """The same positions in as few ranges as can be, sorted."""
    found: list[Range] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


class LeaseBook:
    """The syncer's book of leases. See the rules above."""

    def __init__(self, num_fragments: int) -> None:
        self._num_fragments = num_fragments
        self._next = 0
        self.pool: list[Range] = []  # released, sorted, never adjacent
        self.unconfirmed: dict[int, int] = {}  # fragment with pending shares -> its version, which nobody has told of
        self._leased = self._merged = self._overwritten = self._released = 0
        self.holdings: dict[str, Holding] = {}
        self._ended: dict[str, int] = {}  # learner -> samples up to the end of its newest book, which is closed

    @property
    def fates(self) -> Fates:
        """The counts of the identity above."""
        out = sum(holding.granted - holding.settled for holding in self.holdings.values())
        return Fates(self._leased, self._merged, self._overwritten, self._released, out)

    def open(self, learner_id: str, first_sample: int = 0) -> Holding:
        """Begin the book of an incarnation that has none; where it left off, if it had one before."""
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
        """At most `count` positions in one range: released ones first."""
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
        """A value that had seen so many samples, and held what those from `since` on taught, went into a version."""
        holding = self.holdings.get(learner_id)
        if holding is not None:
            known = samples if samples < holding.granted else holding.granted
            holding.pending.append((fragment_id, version, since, known))
            self.unconfirmed[fragment_id] = version

    def on_version(self, fragment_id: int, version: int) -> None:
        """A fragment is at this version now: whoever holds it holds what went into those before."""
        if fragment_id in self.unconfirmed:
            self.unconfirmed[fragment_id] = version

    def confirm(self, fragment_id: int, version: int) -> None:
        """A learner holds this version: what went into it is safe."""
        if version >= self.unconfirmed.get(fragment_id, 0):
            self.unconfirmed.pop(fragment_id, None)
        for holding in self.holdings.values():
            if holding.confirm(fragment_id, version):
                merged, overwritten = holding.settle()
                self._merged += merged
                self._overwritten += overwritten

    def on_held(self, adopted: Sequence[Adopted]) -> None:
        """A learner holds these versions: what went into them is safe."""
        for fragment_id, version in tuple(self.unconfirmed.items()):
            if adopted[fragment_id].version == version:
                self.confirm(fragment_id, version)

    def revert(self, fragment_id: int, version: int) -> None:
        """Every newer version than this one is lost: what went into it was not merged."""
        for holding in self.holdings.values():
            holding.pending = [one for one in holding.pending if one[0] != fragment_id or one[1] <= version]
        if not any(one[0] == fragment_id for holding in self.holdings.values() for one in holding.pending):
            self.unconfirmed.pop(fragment_id, None)

    def release(self, learner_id: str) -> int:
        """Take back of what a lost incarnation has the fate is open; returns how many samples."""
        holding = self.holdings.pop(learner_id, None)
        if holding is None:
            return 0
        count = holding.granted - holding.settled
        self._ended[learner_id] = holding.granted
        self._released += count
        self.pool = joined(self.pool + holding.ranges)
        return count

    def forget(self, learner_id: str) -> None:
        """A newer incarnation numbers its samples from 0 on."""
        self._ended.pop(learner_id, None)

    def state(self) -> dict[str, Any]:
        return {
            "counts": [self._next, self._leased, self._merged, self._overwritten, self._released],
            "pool": list(self.pool),
            "unconfirmed": list(self.unconfirmed.items()),
            "holdings": [{"name": name, **asdict(holding)} for name, holding in self.holdings.items()],
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
