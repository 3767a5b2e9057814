"""The checker of leases: it compares the book of the audit with the machine's leases throughout the run."""

import json

from diloco_jax.protocol.effects import Send
from diloco_jax.protocol.leases import BOOK
from diloco_jax.protocol.messages import LearnerMessage, Lease
from diloco_jax.protocol.watch.auditor import Auditor
from diloco_jax.protocol.watch.sample_book import Incarnation, RangeMap, joined
from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.invariants.checker import Checker
from diloco_jax.sim.node import Effects, LearnerProcess

# Number of the syncer's inputs between two comparisons.
COMPARED_EVERY = 20


class LeasesAccount(Checker):
    """Every index that was handed out has exactly one fate, and each learner reads only its own leases."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._auditor = Auditor(self.config.num_fragments)
        # Lines of the tape that were read. The first one is the start of the run and leases nothing.
        self._lines = 1
        # Sample -> position minus sample, of all leases so far.
        self._granted: dict[Incarnation, RangeMap[int | None]] = {}
        # End of the highest range so far.
        self._fronts: dict[Incarnation, int] = {}
        # Number of samples that were used.
        self._ends: dict[Incarnation, int] = {}

    def on_syncer(self, message: LearnerMessage | None, effects: Effects, now_s: float) -> None:
        line = json.loads(self.cluster.syncer_node.tape[self._lines])
        self._lines += 1
        self._auditor.take(line, effects)
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, Lease):
                self.check(
                    message is not None and effect.peer == message.learner_id, f"{effect} in answer to {message}"
                )
                first, start, stop = effect.message
                granted = self._granted.setdefault((line[2], line[3]), RangeMap(None))
                granted.paint(first, first + stop - start, start - first)
                self._fronts[line[2], line[3]] = max(self._fronts.get((line[2], line[3]), 0), stop)
        if self._lines % COMPARED_EVERY == 0:
            self._compare()
        self._tell()

    def _compare(self) -> None:
        """Compare the books with the machine's."""
        machine, books = self.cluster.syncer.leases, self._auditor.books
        self._auditor.compare(machine, self.cluster.syncer.global_step)
        self._tell()
        for corpus, book in machine.books.items():
            owners = books[corpus].owners if corpus in books else {}
            for name, holding in book.holdings.items():
                left = owners[name].left if name in owners else []
                self.check(joined(holding.ranges) == left, f"{name} holds {holding.ranges}, but was sent {left}")

    def _tell(self) -> None:
        found = self._auditor.findings
        self.check(not found.count, "; ".join(found.texts))

    def end(self) -> None:
        if self.cluster.syncer_node.process.alive:
            self._compare()

    def on_step(self, process: LearnerProcess, began: bool, now_s: float) -> None:
        if not began or process.name in self.hostile:
            return
        incarnation, (ranges, stop) = process.key, process.step.batch
        # SlicesLoseLittle has the rule for the size of a step that islands with missing slices make.
        size, end = process.step.samples, self._ends.get(incarnation, 0)
        whole = process.node.step_samples
        self.check(size == whole or process.node.shrinks, f"{incarnation[0]} reads {ranges} in a step of {whole}")
        # Its leases are used up, or a new book has started and nothing of it is read yet.
        if stop == end or (stop > end and stop % BOOK == 0):
            front = self._fronts.get(incarnation, 0)
            earlier = all(first >= 0 and last <= front for first, last in ranges)
            self.check(earlier, f"{incarnation[0]} reads {ranges} after sample {end}, beyond every lease up to {front}")
        else:
            start = stop - size
            self.check(
                start == end or (start > end and start % BOOK == 0),
                f"{incarnation[0]} reads {ranges} after sample {end}",
            )
            granted = self._granted.setdefault(incarnation, RangeMap(None)).over(start, stop)
            leased = joined((a + offset, b + offset) for a, b, offset in granted if offset is not None)
            self.check(
                joined(ranges) == leased, f"{incarnation[0]} reads {ranges} from sample {end} on, leased is {leased}"
            )
        self._ends[incarnation] = stop
