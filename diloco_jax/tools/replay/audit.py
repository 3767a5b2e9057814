"""The fate of every sample index that a run handed out, found from its tapes alone (`diloco audit`).

The syncer's machine takes its decisions again. Leases, reports, merges and releases among them are entered in a book of
its own kind (audit_book.py), which is compared with the machine's. The learners' tapes, where they are, must not read
what was never leased to them.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diloco_jax.protocol.effects import Drop, Effect, Merge, Note, Restore, SaveSnapshot, Send
from diloco_jax.protocol.messages import Lease
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.runtime.records.files import TAPE_FILE, TAPES
from diloco_jax.tools.replay.audit_book import Book, Range, SampleShare, Violations, joined
from diloco_jax.tools.replay.lives import Begin, TapedStep, read_entries
from diloco_jax.tools.replay.script import LearnerLife, Moments, fingerprint_of, inputs

KEPT_MAX = 8  # snapshots that a run may go back to, and some

Orders = dict[int, tuple[Merge, tuple[LearnerLife, ...]]]


class Auditor:
    """The keeper of the book of one run.

    Args:
        machine: fresh, of the run's settings; takes the run's decisions again.
    """

    def __init__(self, machine: Syncer) -> None:
        self.violations = Violations()
        self.granted: dict[LearnerLife, list[Range]] = {}
        self.rounds = 0
        self.void = 0  # handed out in a history that the run went back behind
        self._machine = machine
        self.book = Book(machine.config.num_fragments)
        self._lives: dict[str, LearnerLife] = {}  # the newest of each learner
        self._steps: dict[LearnerLife, int] = {}
        self._values: dict[tuple[int, str], LearnerLife] = {}
        self._orders: Orders = {}
        self._held: list[int] = []  # after a restart: what the syncer has
        self._snapshots: Moments[Book] = Moments()
        self._old_versions: deque[list[int]] = deque(maxlen=KEPT_MAX)
        self._number = 0

    def take(self, line: list[Any], effects: list[Effect]) -> None:
        """Take one input and what it led to."""
        self._number += 1
        kind = line[0]
        dropped = len(line) > 2 and any(isinstance(e, Drop) and e.peer == line[2] for e in effects)
        if kind == "Hello" and not dropped:
            self._lives[line[2]] = LearnerLife(line[2], line[3])
        elif kind == "StepReport" and not dropped:
            self._report(LearnerLife(line[2], line[3]), line[4], line[7])
        elif kind == "FragmentValue" and not dropped:
            self._values[line[4], line[2]] = LearnerLife(line[2], line[3])
        elif kind == "restart":
            self._held = list(line[2])
            self._values.clear()
        elif kind == "rewind":
            self._go_back(line[2])
        elif kind == "snapshot":
            self._snapshot(line[2], True)
        elif kind == "merged":
            self._version(line[2], line[4])
        for effect in effects:
            self._effect(effect, kind)
        if kind in ("merged", "restart", "rewind"):
            self.compare()

    def _report(self, life: LearnerLife, local_step: int, adopted: list[list[int]]) -> None:
        if local_step <= self._steps.get(life, 0) or self._lives.get(life.learner_id) != life:
            return
        self._steps[life] = local_step
        for fragment_id, (version, *_) in enumerate(adopted):
            self.book.on_held(fragment_id, version)

    def _version(self, global_step: int, left_out: list[str]) -> None:
        order, lives = self._orders.pop(global_step)
        shares = {
            life: SampleShare(part.since, part.samples)
            for life, part in zip(lives, order.parts, strict=True)
            if part.learner_id not in left_out
        }
        if shares:
            self.rounds += 1
            self.book.on_version(order.fragment_id, global_step, shares)

    def _effect(self, effect: Effect, kind: str) -> None:
        if isinstance(effect, Send) and isinstance(effect.message, Lease):
            life, lease = self._lives[effect.peer], effect.message
            self.book.lease(life, *lease, self.violations)
            if lease.start < lease.stop:
                self.granted.setdefault(life, []).append((lease.start, lease.stop))
        elif isinstance(effect, Merge):
            lives = tuple(self._values.pop((effect.global_step, part.learner_id)) for part in effect.parts)
            self._orders[effect.global_step] = (effect, lives)
        elif isinstance(effect, Restore):
            self._held[effect.fragment_id] = effect.version
        elif isinstance(effect, SaveSnapshot):
            self._snapshot(effect.global_step, False)
        elif isinstance(effect, Note):
            self._note(effect, kind)

    def _note(self, note: Note, kind: str) -> None:
        if note.kind == "released":
            self.book.release(note.members[0])
        elif note.kind in ("lost", "restored"):
            version = self._held[note.fragment_id]
            if note.kind == "lost":
                self.book.on_lost(note.fragment_id, version)
            self.book.versions[note.fragment_id] = version
        elif note.kind == "merged" and kind != "merged":  # its result came back from a learner
            left_out = [
                p.learner_id for p in self._orders[note.global_step][0].parts if p.learner_id not in note.members
            ]
            self._version(note.global_step, left_out)

    def _snapshot(self, global_step: int, taken: bool) -> None:
        self._snapshots.keep(global_step, taken, copy.deepcopy(self.book))
        if len(self._old_versions) == KEPT_MAX:
            self.book.keep_until(self._old_versions[0])
        self._old_versions.append(list(self.book.versions))

    def _go_back(self, global_step: int) -> None:
        self._values.clear()
        self._orders.clear()
        leased = self.book.leased
        self.book = copy.deepcopy(self._snapshots.at(global_step))
        self.void += leased - self.book.leased

    def compare(self) -> None:
        """Hold the book against the machine's."""
        book, theirs = self.book, self._machine.leases.fates
        ours = (book.leased, book.merged, book.overwritten, book.released, book.out)
        if ours != tuple(theirs) and not self.violations.count:
            self.violations.add(
                f"at input {self._number} (global step {self._machine.global_step}) the syncer counted leased, merged, "
                f"overwritten, released, out {tuple(theirs)}, its tape says {ours}"
            )


def audit(run_dir: Path, protocol: ProtocolConfig, total_steps: int) -> dict[str, Any]:
    """Follow every sample index of a run.

    Args:
        run_dir: folder with the tapes.
        protocol: of the run.
        total_steps: global steps of the run.

    Returns:
        leased, merged, overwritten, released, out: handed out, and what became of it; repeated: handed out not for the
        first time; undone: merged into a version that was lost later; void: handed out in a history that the run went
        back behind; rounds, learner_tapes, violations (how many) and the first of them in words.

    Raises:
        ValueError: a tape is missing or broken; names it.
    """
    tape = run_dir / TAPE_FILE
    machine = Syncer(protocol, total_steps, fingerprint_of(tape))
    auditor = Auditor(machine)
    for line, effects in inputs(tape, machine):
        auditor.take(line, effects)
    auditor.compare()
    book, violations = auditor.book, auditor.violations
    fates = book.merged + book.overwritten + book.released + book.out
    if book.leased != fates:
        violations.add(
            f"{book.leased} were leased, but {book.merged} merged, {book.overwritten} overwritten, {book.released} "
            f"released and {book.out} out make {fates}"
        )
    tapes = sorted((run_dir / TAPES).glob("*.jsonl"))
    for path in tapes:
        _check_reads(path, auditor.granted, violations)
    return {
        "leased": book.leased,
        "merged": book.merged,
        "overwritten": book.overwritten,
        "released": book.released,
        "out": book.out,
        "repeated": book.repeated,
        "undone": book.undone,
        "void": auditor.void,
        "rounds": auditor.rounds,
        "learner_tapes": len(tapes),
        "violations": violations.count,
        "first_violations": violations.texts,
    }


def _check_reads(path: Path, granted: dict[LearnerLife, list[Range]], violations: Violations) -> None:
    """Check that a learner read only what was leased to this life of it."""
    life, own = LearnerLife("", 0), list[Range]()
    for number, entry in read_entries(path):
        if isinstance(entry, Begin):
            life = LearnerLife(entry.learner_id, entry.incarnation)
            own = joined(sorted(granted.get(life, [])))
        elif isinstance(entry, TapedStep):
            for start, stop in entry.ranges:
                at = bisect_right(own, start, key=lambda piece: piece[0]) - 1
                if at < 0 or stop > own[at][1]:
                    violations.add(
                        f"{path.name} line {number}: {life.learner_id} read positions {start} to {stop - 1}, which "
                        "were not leased to it"
                    )
                    return


def describe(result: Mapping[str, Any]) -> str:
    """Return a result in words."""
    lines = [
        f"{result['leased']} samples were handed out in {result['rounds']} merged rounds: {result['merged']} merged, "
        f"{result['overwritten']} overwritten, {result['released']} released to be leased again, {result['out']} out",
    ]
    if result["overwritten"]:
        lines.append(
            f"{result['overwritten']} were trained on for nothing: their learner had adopted newer values of every "
            "fragment before a round took what they taught"
        )
    if result["repeated"]:
        lines.append(f"{result['repeated']} of them were handed out for another time, after a release")
    if result["undone"]:
        lines.append(f"{result['undone']} were merged into a version that was lost with everybody who held it")
    if result["void"]:
        lines.append(f"{result['void']} more were handed out in a history that the run went back behind")
    if not result["violations"]:
        return "\n".join([*lines, f"every one has one fate; {result['learner_tapes']} learner tapes read nothing else"])
    return "\n".join([*lines, f"{result['violations']} VIOLATIONS:", *result["first_violations"]])
