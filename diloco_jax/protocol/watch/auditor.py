"""Fills the books of samples of a run, one for each corpus, from the syncer's tape and the effects of each input.

It repeats the run's exclusions in the same pass.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from diloco_jax.protocol.effects import Drop, Effect, Merge, Note, Restore, Send
from diloco_jax.protocol.leases import COMMON, Fates, LeaseBooks
from diloco_jax.protocol.messages import Hello, Lease
from diloco_jax.protocol.syncer.tape import BEGINNING, Moment, Moments, back_to, captured, without_stamp
from diloco_jax.protocol.watch.exclusion_auditor import ExclusionAuditor
from diloco_jax.protocol.watch.sample_book import Book, Findings, Incarnation, SampleShare

# Place of the corpus in the line of a greeting: its time and its fields follow its kind.
HELLO_CORPUS = 2 + Hello._fields.index("corpus")
NO_FATES = (0, 0, 0, 0, 0)


class Auditor:
    """Reader of one run's tape that records each input and its effects in books of samples."""

    def __init__(self, num_fragments: int, uses: Mapping[Moment, int] | None = None) -> None:
        self.findings = Findings()
        self._num_fragments = num_fragments
        # The name of each corpus -> its samples.
        self.books = {COMMON: Book(num_fragments)}
        self.exclusions = ExclusionAuditor(num_fragments, self.findings.add, uses)
        self.rounds = 0
        # Leased positions of a history that going back to a snapshot made void.
        self.void = 0
        # The newest incarnation of each learner, and the corpus that it reads.
        self._incarnations: dict[str, Incarnation] = {}
        self._corpora: dict[str, str] = {}
        self._steps: dict[Incarnation, int] = {}
        self._values: dict[tuple[int, str], Incarnation] = {}
        self._orders: dict[int, tuple[Merge, tuple[Incarnation, ...]]] = {}
        # After a restart: the versions that the syncer holds.
        self._held: list[int] = []
        # Samples of its leases that each incarnation reported as trained.
        self._used: dict[Incarnation, int] = {}
        # Released samples that their incarnation had trained on.
        self.released_trained = 0
        # Newest local step that each incarnation reported, whether the syncer used the report or not.
        self.reported: dict[Incarnation, int] = {}
        self._snapshots: Moments[dict[str, Book]] = Moments(uses)
        # Epochs of the syncer that are still to start from the initial model; unknown without `uses`.
        self._to_beginning = 1 if uses is None else uses.get(BEGINNING, 0)
        self._number = 0
        # The operators' bans and admits, in their order.
        self.operations: list[dict[str, Any]] = []

    def take(self, line: list[Any], effects: list[Effect]) -> None:
        """Record one input of the tape and its effects."""
        self._number += 1
        self.exclusions.take(line, effects)
        kind = line[0]
        dropped = len(line) > 2 and any(isinstance(e, Drop) and e[::2] == (line[2], -1) for e in effects)
        if kind == "Hello" and not dropped:
            self._incarnations[line[2]] = (line[2], line[3])
            # Tapes of older releases have no corpus in a greeting.
            self._corpora[line[2]] = line[HELLO_CORPUS] if len(line) > HELLO_CORPUS else COMMON
        elif kind == "StepReport":
            self.reported[line[2], line[3]] = max(line[4], self.reported.get((line[2], line[3]), 0))
            if not dropped:
                self._report((line[2], line[3]), line[4], line[7], line[10])
        elif kind == "FragmentValue" and not dropped:
            self._values[line[4], line[2]] = (line[2], line[3])
        elif (moment := back_to(kind, without_stamp(line))) is not None:
            self._begin_epoch(kind, moment, line)
        elif kind == "merged":
            self._version(line[2], line[4])
        elif kind in ("ban", "admit"):
            why = {"reason": line[3]} if kind == "ban" else {}
            self.operations.append({"action": kind, "learner": line[2], "t": line[1], **why})
        for effect in effects:
            self._effect(effect, kind)
        for moment in captured(kind, line[2:], effects):
            self._snapshots.keep(moment, lambda: deepcopy(self.books))
            self._forget()

    def _report(self, incarnation: Incarnation, local_step: int, adopted: list[list[int]], samples: int) -> None:
        if local_step <= self._steps.get(incarnation, 0) or self._incarnations.get(incarnation[0]) != incarnation:
            return
        self._steps[incarnation], self._used[incarnation] = local_step, samples
        for fragment_id, (version, *_) in enumerate(adopted):
            for book in self.books.values():
                book.on_held(fragment_id, version)

    def _version(self, global_step: int, excluded: list[str]) -> None:
        order, incarnations = self._orders.pop(global_step)
        shares = {
            incarnation: SampleShare(part.since, part.samples)
            for incarnation, part in zip(incarnations, order.contributions, strict=True)
            if part.learner_id not in excluded
        }
        if shares:
            self.rounds += 1
            for book in self.books.values():
                # A book passes over the shares of learners that own nothing in it.
                book.on_version(order.fragment_id, global_step, shares)

    def _effect(self, effect: Effect, kind: str) -> None:
        if isinstance(effect, Send) and isinstance(effect.message, Lease):
            self.book_of(effect.peer).lease(self._incarnations[effect.peer], *effect.message, self.findings)
        elif isinstance(effect, Merge):
            merged = tuple(self._values.pop((effect.global_step, each.learner_id)) for each in effect.contributions)
            self._orders[effect.global_step] = (effect, merged)
        elif isinstance(effect, Restore):
            self._held[effect.fragment_id] = effect.version
        elif isinstance(effect, Note):
            self._note(effect, kind)

    def _note(self, note: Note, kind: str) -> None:
        if note.kind == "released":
            self.released_trained += self._trained(note.members[0])
            # A newer incarnation may read another corpus.
            for book in self.books.values():
                book.release(note.members[0])
        elif note.kind in ("lost", "restored"):
            version = self._held[note.fragment_id]
            for book in self.books.values():
                if note.kind == "lost":
                    book.on_lost(note.fragment_id, version)
                book.versions[note.fragment_id] = version
        elif note.kind == "merged" and kind != "merged":
            # A learner brought the result of the merge after a restart.
            names = [each.learner_id for each in self._orders[note.global_step][0].contributions]
            self._version(note.global_step, [name for name in names if name not in note.members])

    @property
    def out_trained(self) -> int:
        """Return how many of the samples that are still leased were trained on."""
        return sum(self._trained(name) for book in self.books.values() for name in book.owners)

    def _trained(self, name: str) -> int:
        """Return how many of the samples that a learner still leases it has trained on, by its reports."""
        book = self.books.get(self._corpora.get(name, COMMON))
        owner = None if book is None else book.owners.get(name)
        return 0 if owner is None else max(0, min(self._used.get(owner.incarnation, 0), owner.granted) - owner.settled)

    def _begin_epoch(self, kind: str, moment: Moment, line: list[Any]) -> None:
        """Record that an epoch of the syncer started from a snapshot; after a rewind, everything since then is void."""
        self._values.clear()
        if kind == "restart":
            self._held = list(line[2])
            self._to_beginning -= moment == BEGINNING
            if moment in self._snapshots:
                self._snapshots.at(moment)
            return
        self._orders.clear()
        leased = sum(book.leased for book in self.books.values())
        self.books = deepcopy(self._snapshots.at(moment))
        self.void += leased - sum(book.leased for book in self.books.values())

    def _forget(self) -> None:
        """Forget the shares in versions that no later epoch of the syncer can lose."""
        if not self._to_beginning:
            versions = [books[COMMON].versions for books in (*self._snapshots, self.books)]
            oldest = [min(each) for each in zip(*versions, strict=True)]
            for book in self.books.values():
                book.keep_until(oldest)

    def book_of(self, learner_id: str) -> Book:
        """Return the book of the corpus that a learner reads."""
        corpus = self._corpora.get(learner_id, COMMON)
        if corpus not in self.books:
            book = self.books[corpus] = Book(self._num_fragments)
            book.versions = list(self.books[COMMON].versions)
        return self.books[corpus]

    @property
    def fates(self) -> Fates:
        """Return the samples of all corpora by fate."""
        return Fates(*map(sum, zip(*[book.fates for book in self.books.values()], strict=True)))

    def compare(self, machine: LeaseBooks, global_step: int) -> None:
        """Compare the books with the machine's at this global step, unless a violation is known already."""
        for corpus in {**self.books, **machine.books}:
            ours = tuple(self.books[corpus].fates) if corpus in self.books else NO_FATES
            theirs = tuple(machine.books[corpus].fates) if corpus in machine.books else NO_FATES
            if ours != theirs and not self.findings.count:
                self.findings.add(
                    f"at input {self._number} (global step {global_step}) the syncer counted leased, merged, "
                    f"overwritten, released, out {theirs}{f' of {corpus}' * bool(corpus)}, its tape says {ours}"
                )
