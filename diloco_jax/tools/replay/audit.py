"""The fate of every sample index that a run handed out, found from its tapes alone (`diloco audit`).

The syncer's machine takes its decisions again. Leases, reports, merges and releases among them are entered in a second
book (auditor.py), which is compared with the machine's. The learners' tapes, where they are, must not read
what was never leased to them.
"""

from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.progress import NO_BUDGET, Budget
from diloco_jax.runtime.records.files import SUMMARY_FILE, TAPE_FILE, TAPES
from diloco_jax.runtime.records.telemetry import read_object
from diloco_jax.tools.replay.auditor import Auditor
from diloco_jax.tools.replay.lives import Begin, TapedStep, read_entries
from diloco_jax.tools.replay.sample_book import Findings, Range, joined
from diloco_jax.tools.replay.script import fingerprint_of, inputs, machine_of

COMPARED_AFTER = ("merged", "restart", "rewind")  # inputs


def audit(run_dir: Path, protocol: ProtocolConfig, total_steps: int, budget: Budget = NO_BUDGET) -> dict[str, Any]:
    """Follow every sample index of a run; ValueError names a tape that is missing or broken.

    Returns:
        leased, merged, overwritten, released, out: handed out, and what became of it; repeated: handed out not for the
        first time; undone: merged into a version that was lost later; void: handed out in a history that the run went
        back behind; rounds, learner_tapes, violations (how many) and the first of them in words.
    """
    tape = run_dir / TAPE_FILE
    machine = machine_of(fingerprint_of(tape), protocol, total_steps, budget)
    auditor = Auditor(machine.config.num_fragments)
    for line, effects in inputs(tape, machine):
        auditor.take(line, effects)
        if line[0] in COMPARED_AFTER:
            auditor.compare(machine.leases, machine.global_step)
    auditor.compare(machine.leases, machine.global_step)
    summary = run_dir / SUMMARY_FILE
    if not machine.finished and summary.exists() and read_object(summary, "complete")["complete"]:
        raise ValueError(f"{tape} ends at global step {machine.global_step}, but the run is complete: restore the rest")
    book, findings = auditor.book, auditor.findings
    fates = book.merged + book.overwritten + book.released + book.out
    if book.leased != fates:
        findings.add(
            f"{book.leased} were leased, but {book.merged} merged, {book.overwritten} overwritten, {book.released} "
            f"released and {book.out} out make {fates}"
        )
    tapes = sorted((run_dir / TAPES).glob("*.jsonl"))
    for path in tapes:
        _check_reads(path, findings)
    counted = ("leased", "merged", "overwritten", "released", "out", "repeated", "undone")
    return {
        **{name: getattr(book, name) for name in counted},
        "void": auditor.void,
        "rounds": auditor.rounds,
        "learner_tapes": len(tapes),
        "violations": findings.count,
        "first_violations": findings.texts,
    }


def _check_reads(path: Path, findings: Findings) -> None:
    """Check that a learner read only what was leased to this life of it."""
    name, own = "", list[Range]()
    for number, entry in read_entries(path):
        if isinstance(entry, Begin):
            name = entry.learner_id
            own = joined(sorted(findings.granted.get((name, entry.incarnation), [])))
        elif isinstance(entry, TapedStep):
            for start, stop in entry.ranges:
                at = bisect_right(own, start, key=lambda piece: piece[0]) - 1
                if at < 0 or stop > own[at][1]:
                    findings.add(
                        f"{path.name} line {number}: {name} read positions {start} to {stop - 1}, which were not "
                        "leased to it"
                    )
                    return


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
