"""The fate of every sample index that a run handed out, found from its tapes alone (`diloco audit`).

The syncer's machine takes its decisions again. Leases, reports, merges and releases among them are entered in a second
book (sample_book.py), which is compared with the machine's. The learners' tapes, where they are, must not read
what was never leased to them.
"""

from bisect import bisect_right
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from diloco_jax.protocol.effects import Drop, Effect, Merge, Note, Restore, Send
from diloco_jax.protocol.leases import LeaseBook
from diloco_jax.protocol.messages import Lease
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.progress import NO_BUDGET, Budget
from diloco_jax.protocol.syncer.tape import BEGINNING, Moment, Moments, back_to, captured, returns
from diloco_jax.runtime.records.files import SUMMARY_FILE, TAPE_FILE, TAPES
from diloco_jax.runtime.records.tape_file import read_lines
from diloco_jax.runtime.records.telemetry import read_object
from diloco_jax.tools.replay.lives import Begin, Lost, TapedStep, read_entries
from diloco_jax.tools.replay.sample_book import Book, Findings, Life, Range, SampleShare, joined
from diloco_jax.tools.replay.script import fingerprint_of, inputs, machine_of, without_stamp

COMPARED_AFTER = ("merged", "restart", "rewind")  # inputs


class Auditor:
    """The keeper of the book of one run: reads the syncer's tape, and what each input led to, and enters it."""

    def __init__(self, num_fragments: int, uses: Mapping[Moment, int] | None = None) -> None:
        self.findings = Findings()
        self.book = Book(num_fragments)
        self.rounds = 0
        self.void = 0  # handed out in a history that the run went back behind
        self._lives: dict[str, Life] = {}  # the newest of each learner
        self._steps: dict[Life, int] = {}
        self._values: dict[tuple[int, str], Life] = {}
        self._orders: dict[int, tuple[Merge, tuple[Life, ...]]] = {}
        self._held: list[int] = []  # after a restart: what the syncer has
        self.reported: dict[Life, int] = {}  # newest local step that each life told of, whether it was heeded or not
        self._snapshots: Moments[Book] = Moments(uses)
        # Lives of the syncer that are still to begin from the initial model; unknown without `uses`.
        self._to_beginning = 1 if uses is None else uses.get(BEGINNING, 0)
        self._number = 0

    def take(self, line: list[Any], effects: list[Effect]) -> None:
        self._number += 1
        kind = line[0]
        dropped = len(line) > 2 and any(isinstance(e, Drop) and e.peer == line[2] for e in effects)
        if kind == "Hello" and not dropped:
            self._lives[line[2]] = (line[2], line[3])
        elif kind == "StepReport":
            self.reported[line[2], line[3]] = max(line[4], self.reported.get((line[2], line[3]), 0))
            if not dropped:
                self._report((line[2], line[3]), line[4], line[7])
        elif kind == "FragmentValue" and not dropped:
            self._values[line[4], line[2]] = (line[2], line[3])
        elif (moment := back_to(kind, without_stamp(line))) is not None:
            self._begin_life(kind, moment, line)
        elif kind == "merged":
            self._version(line[2], line[4])
        for effect in effects:
            self._effect(effect, kind)
        for moment in captured(kind, line[2:], effects):
            self._snapshots.keep(moment, lambda: deepcopy(self.book))
            self._forget()

    def _report(self, life: Life, local_step: int, adopted: list[list[int]]) -> None:
        if local_step <= self._steps.get(life, 0) or self._lives.get(life[0]) != life:
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
            self.book.lease(self._lives[effect.peer], *effect.message, self.findings)
        elif isinstance(effect, Merge):
            lives = tuple(self._values.pop((effect.global_step, part.learner_id)) for part in effect.parts)
            self._orders[effect.global_step] = (effect, lives)
        elif isinstance(effect, Restore):
            self._held[effect.fragment_id] = effect.version
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
            names = [part.learner_id for part in self._orders[note.global_step][0].parts]
            self._version(note.global_step, [name for name in names if name not in note.members])

    def _begin_life(self, kind: str, moment: Moment, line: list[Any]) -> None:
        """A syncer began from a snapshot: with everything decided since, or with that void."""
        self._values.clear()
        if kind == "restart":
            self._held = list(line[2])
            self._to_beginning -= moment == BEGINNING
            if moment in self._snapshots:
                self._snapshots.at(moment)
            return
        self._orders.clear()
        leased = self.book.leased
        self.book = deepcopy(self._snapshots.at(moment))
        self.void += leased - self.book.leased

    def _forget(self) -> None:
        """Forget the shares in versions that no later life of the syncer goes back behind."""
        if not self._to_beginning:
            versions = [book.versions for book in (*self._snapshots, self.book)]
            self.book.keep_until([min(each) for each in zip(*versions, strict=True)])

    def compare(self, machine: LeaseBook, global_step: int) -> None:
        """Hold the book against the machine's at this global step, unless a breach is known already."""
        ours, theirs = tuple(self.book.fates), tuple(machine.fates)
        if ours != theirs and not self.findings.count:
            self.findings.add(
                f"at input {self._number} (global step {global_step}) the syncer counted leased, merged, overwritten, "
                f"released, out {theirs}, its tape says {ours}"
            )


def audit(run_dir: Path, protocol: ProtocolConfig, total_steps: int, budget: Budget = NO_BUDGET) -> dict[str, Any]:
    """Follow every sample index of a run; ValueError names a tape that is missing or broken.

    Returns:
        leased, merged, overwritten, released, out: handed out, and what became of it; repeated: handed out not for the
        first time; undone: merged into a version that was lost later; void: handed out in a history that the run went
        back behind; rounds, learner_tapes, violations (how many) and the first of them in words.
    """
    tape = run_dir / TAPE_FILE
    machine = machine_of(fingerprint_of(tape), protocol, total_steps, budget)
    uses = returns(read_lines(tape))
    auditor = Auditor(machine.config.num_fragments, uses)
    for line, effects in inputs(tape, machine, uses):
        auditor.take(line, effects)
        if line[0] in COMPARED_AFTER:
            auditor.compare(machine.leases, machine.global_step)
    auditor.compare(machine.leases, machine.global_step)
    summary = run_dir / SUMMARY_FILE
    if not machine.finished and summary.exists() and read_object(summary, "complete")["complete"]:
        raise ValueError(f"{tape} ends at global step {machine.global_step}, but the run is complete: restore the rest")
    book, findings = auditor.book, auditor.findings
    leased, *fates = book.fates
    if leased != sum(fates):
        told = "{} merged, {} overwritten, {} released and {} out".format(*fates)
        findings.add(f"{leased} were leased, but {told} make {sum(fates)}")
    tapes = sorted((run_dir / TAPES).glob("*.jsonl"))
    for path in tapes:
        _check_tape(path, findings, auditor.reported)
    return {
        **book.fates._asdict(),
        "repeated": book.repeated,
        "undone": book.undone,
        "void": auditor.void,
        "rounds": auditor.rounds,
        "learner_tapes": len(tapes),
        "violations": findings.count,
        "first_violations": findings.texts,
    }


def _check_tape(path: Path, findings: Findings, reported: Mapping[Life, int]) -> None:
    """Check that a learner read only what was leased to this life of it, and that its tape is whole.

    A step is on the tape before it is reported, so no kill makes a tape end before the newest step that was reported.
    """
    life, local_step, own, lost = ("", 0), 0, list[Range](), False
    for number, entry in read_entries(path):
        if isinstance(entry, Begin):
            life = (entry.learner_id, entry.incarnation)
            own = joined(sorted(findings.granted.get(life, [])))
        elif isinstance(entry, Lost):
            lost = True
        elif isinstance(entry, TapedStep):
            name = life[0]
            if entry.local_step != local_step + 1 and not lost:
                findings.add(
                    f"{path.name} line {number} is of local step {entry.local_step}, expected {local_step + 1}"
                )
                return
            local_step = entry.local_step
            for start, stop in entry.ranges:
                at = bisect_right(own, start, key=lambda piece: piece[0]) - 1
                if at < 0 or stop > own[at][1]:
                    findings.add(
                        f"{path.name} line {number}: {name} read positions {start} to {stop - 1}, which were not "
                        "leased to it"
                    )
                    return
    if local_step < reported.get(life, 0):
        findings.add(
            f"{path.name} ends at local step {local_step}, but step {reported[life]} was reported: the end of the tape "
            "is missing"
        )


def describe(result: Mapping[str, Any]) -> str:
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
