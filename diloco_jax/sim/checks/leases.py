"""The checker of who trains on which data: a second book of leases, kept from messages alone."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import NamedTuple

from diloco_jax.protocol.effects import Drop, Effect, Finish, Merge, Note, SaveSnapshot, Send
from diloco_jax.protocol.leases import BOOK
from diloco_jax.protocol.messages import SYNCER, FragmentValue, LearnerMessage, Lease, StepReport
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.sim.checks.checker import Checker
from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.node import LearnerProcess

FATES_EVERY = 20  # inputs of the syncer between two comparisons with its own book

Life = tuple[str, int]  # a learner's name and incarnation


class MergedShare(NamedTuple):
    """Samples of its learner that a merged value had seen."""

    version: int
    since: int  # samples of which it held nothing any more
    samples: int


class Account:
    """Samples that one learner has been given since its book was opened."""

    def __init__(self, first: int, fragments: int) -> None:
        self.first = first  # number of its first sample
        self.indices: list[int] = []  # of the samples first, first + 1, ...
        self.shares: list[list[MergedShare]] = [[] for _ in range(fragments)]
        self.marks = [first] * fragments  # most samples of a share whose version some learner has held
        self.taught: set[int] = set()  # samples of which such a share held what they taught

    def confirm(self, confirmed: list[int]) -> None:
        """Learners hold these versions now. That counts, whoever dies later."""
        for p, version in enumerate(confirmed):
            for share in [share for share in self.shares[p] if share.version <= version]:
                self.marks[p] = max(self.marks[p], share.samples)
                self.taught.update(range(max(self.first, share.since), share.samples))
                self.shares[p].remove(share)

    @property
    def settled(self) -> int:
        """Up to which sample every fragment has taken a value."""
        return min([*self.marks, self.first + len(self.indices)])

    def merged(self, settled: int) -> int:
        """Count the samples below this one that are in a merged value."""
        return sum(self.first <= sample < settled for sample in self.taught)


class Books:
    """Books of who has what; everything of it goes back with the run."""

    def __init__(self, fragments: int) -> None:
        self.accounts: dict[str, Account] = {}
        self.lives: dict[str, int] = {}  # learner -> incarnation of its account
        self.owners: dict[int, str] = {}  # index that is out, or whose fate is sealed -> learner
        self.pool: set[int] = set()  # released
        self.next = 0
        self.confirmed = [0] * fragments
        self.leased = self.released = 0
        self.merged = self.settled = 0  # of closed accounts


class LeasesAccount(Checker):
    """Every index that was handed out has exactly one fate, and nobody reads what was not leased to it."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._books = Books(self.config.num_fragments)
        self._kept: dict[int, Books] = {}  # global step of a snapshot -> as it was then
        self._values: dict[tuple[str, int], int] = {}  # learner and round -> incarnation
        self._merges: dict[int, Merge] = {}
        self._delivered: LearnerMessage | None = None
        self._inputs = 0
        self._granted: dict[Life, dict[int, int]] = {}  # everything ever: sample -> index
        self._read: dict[Life, tuple[int, set[int]]] = {}  # samples used up, and every index that was read

    # ---- the syncer's side ----------------------------------------------------------------------------------------

    def on_syncer_back(self, machine: Syncer, rewound_to: int, now_s: float) -> None:
        super().on_syncer_back(machine, rewound_to, now_s)
        self._delivered = None
        if rewound_to >= 0:
            self._books = deepcopy(self._kept[rewound_to])
            self._values.clear()

    def on_delivery(self, message: LearnerMessage, now_s: float) -> None:
        self._delivered = message

    def on_effects(self, source: str, incarnation: int, effects: list[Effect], now_s: float) -> None:
        if source != SYNCER:
            return
        message, self._delivered = self._delivered, None
        if message is not None and not any(isinstance(e, Drop) and e.peer == message.learner_id for e in effects):
            self._hear(message)
        for effect in effects:
            if isinstance(effect, Send):
                if isinstance(effect.message, Lease):
                    assert message is not None, "leases were sent to nobody who spoke"
                    self.check(effect.peer == message.learner_id, f"{effect} in answer to {message}")
                    self._grant(effect.peer, message.incarnation, effect.message)
            elif isinstance(effect, Merge):
                self._merges[effect.global_step] = effect
            elif isinstance(effect, Note):
                self._note(effect)
        self._inputs += 1
        if self._inputs % FATES_EVERY == 0:
            self._compare()
        for effect in effects:
            if isinstance(effect, SaveSnapshot):
                self._kept[effect.global_step] = deepcopy(self._books)
            elif isinstance(effect, Finish):  # its driver saves the end without being asked
                self._kept[self.cluster.syncer.global_step] = deepcopy(self._books)

    def _hear(self, message: LearnerMessage) -> None:
        if isinstance(message, FragmentValue):
            self._values.setdefault((message.learner_id, message.global_step), message.incarnation)
        elif isinstance(message, StepReport):
            confirmed = self._books.confirmed
            for fragment_id, held in enumerate(message.adopted):
                confirmed[fragment_id] = max(confirmed[fragment_id], held.version)
            for account in self._books.accounts.values():
                account.confirm(confirmed)

    def _grant(self, name: str, incarnation: int, lease: Lease) -> None:
        books = self._books
        account = books.accounts.get(name)
        anew = account is not None and lease.first_sample > account.first + len(account.indices)
        if account is not None and (books.lives[name] != incarnation or (anew and lease.first_sample % BOOK == 0)):
            self._close(name, account.first + len(account.indices))  # nothing was left, so nothing was said
            account = None
        if account is None:
            account = books.accounts[name] = Account(lease.first_sample, self.config.num_fragments)
            books.lives[name] = incarnation
        granted = self._granted.setdefault((name, incarnation), {})
        end = account.first + len(account.indices)
        self.check(lease.first_sample <= end and lease.start < lease.stop, f"{lease} leaves a gap after sample {end}")
        for sample, index in enumerate(range(lease.start, lease.stop), start=lease.first_sample):
            if sample < end:
                known = granted.get(sample)
                self.check(known == index, f"{name} has index {known} as sample {sample}, and then {lease}")
                continue
            owner = books.owners.get(index)
            self.check(owner is None, f"index {index} is leased to {name}, and to {owner}")
            if index in books.pool:
                books.pool.remove(index)
            else:
                self.check(index == books.next and not books.pool, f"{lease} to {name} begins at a new index, wrongly")
                books.next += 1
            books.owners[index] = name
            account.indices.append(index)
            granted[sample] = index
            books.leased += 1

    def _note(self, note: Note) -> None:
        books = self._books
        if note.kind == "released":
            (name,), count = note.members, int(note.reason.split()[0])
            self.check(name in books.accounts, f"{note}, but nothing is out")
            account = books.accounts[name]
            self._close(name, account.first + len(account.indices) - count)
        elif note.kind == "merged":
            for part in self._merges[note.global_step].parts:
                name = part.learner_id
                if name in note.members and books.lives.get(name) == self._values[name, note.global_step]:
                    share = MergedShare(note.global_step, part.since, part.samples)
                    books.accounts[name].shares[note.fragment_id].append(share)
        elif note.kind == "lost":
            p, version = note.fragment_id, self.cluster.syncer.versions[note.fragment_id]
            books.confirmed[p] = min(books.confirmed[p], version)
            for account in books.accounts.values():
                account.shares[p] = [share for share in account.shares[p] if share.version <= version]

    def _close(self, name: str, settled: int) -> None:
        """The account ends; what is above `settled` goes to others."""
        books = self._books
        account = books.accounts.pop(name)
        del books.lives[name]
        most = account.settled
        self.check(account.first <= settled <= most, f"{settled} samples of {name} are settled, {most} can be")
        left = account.indices[settled - account.first :]
        for index in left:
            del books.owners[index]
        books.pool |= set(left)
        books.settled += settled - account.first
        books.merged += account.merged(settled)
        books.released += len(left)

    def _compare(self) -> None:
        """Compare these books with the machine's."""
        machine, books = self.cluster.syncer.leases, self._books
        fates = machine.fates
        handed_out = (fates.leased, fates.released, fates.leased - sum(fates[1:]))
        self.check(handed_out == (books.leased, books.released, 0), f"{fates}, handed out were {books.leased}")
        settled, merged = books.settled, books.merged
        for name, holding in machine.holdings.items():
            account = books.accounts.get(name)
            if account is None:
                self.check(holding.granted == holding.settled, f"{name} holds {holding.ranges}, but was sent nothing")
                continue
            most = account.settled
            self.check(holding.settled <= most, f"{holding.settled} samples of {name} are settled, {most} can be")
            settled += holding.settled - account.first
            merged += account.merged(holding.settled)
            out = account.indices[holding.settled - account.first :]
            self.check(_expanded(holding.ranges) == out, f"{name} holds {holding.ranges}, but was sent {out}")
        told = (fates.merged, fates.overwritten)
        self.check(told == (merged, settled - merged), f"{fates}, but merged were {merged} of {settled}")
        pool = set(_expanded(machine.pool))
        self.check(pool == books.pool, f"free are {sorted(pool)}, released were {sorted(books.pool)}")

    def end(self) -> None:
        if self.cluster.host.process.alive:
            self._compare()

    # ---- a learner's side -----------------------------------------------------------------------------------------

    def on_step(self, process: LearnerProcess, began: bool, now_s: float) -> None:
        if not began:
            return
        life, batch = process.key, process.step.batch
        assert batch is not None, f"{process.name} steps without a batch"
        granted = self._granted.get(life, {})
        indices = _expanded(batch.ranges)
        end, read = self._read.get(life, (0, set()))
        self.check(
            len(indices) == process.node.step_samples,
            f"{process.name} reads {batch} in a step of {process.node.step_samples}",
        )
        again = batch.end == end or (batch.end > end and batch.end % BOOK == 0)  # of a new book nothing is read yet
        if not again:
            start = batch.end - len(indices)
            self.check(start == end or (start > end and start % BOOK == 0), f"{process.name} reads {batch} after {end}")
            expected = [granted.get(sample, -1) for sample in range(start, batch.end)]
            self.check(
                indices == expected, f"{process.name} reads {indices} from sample {end} on, leased is {expected}"
            )
        else:
            self.check(set(indices) <= read, f"{process.name} reads {batch} again after sample {end}")
        self._read[life] = (batch.end, read | set(indices))


def _expanded(ranges: Iterable[tuple[int, int]]) -> list[int]:
    return [index for start, stop in ranges for index in range(start, stop)]
