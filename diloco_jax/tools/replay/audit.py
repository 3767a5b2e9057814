"""The audit of a run from its tapes alone (`diloco audit`): the fate of each sample, and the exclusions from merges.

The syncer's machine repeats its decisions. Its leases, reports, merges and releases are entered into a second book
(protocol/watch/sample_book.py), which is compared with the machine's book. The learners' tapes, as far as they are
there, must have only samples that were leased to the learner, and the earlier ones that it reads while its leases are
used up. If the tape records the norms of a round, the rule must
exclude the same learners again (protocol/watch/exclusion_auditor.py).
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diloco_jax.protocol.corpora import Corpora
from diloco_jax.protocol.leases import COMMON, earlier_range
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.releases import decided_elsewhere
from diloco_jax.protocol.syncer.progress import NO_BUDGET, Budget
from diloco_jax.protocol.syncer.tape import returns, stamps
from diloco_jax.protocol.watch.auditor import Auditor
from diloco_jax.protocol.watch.sample_book import Book, Findings, Incarnation, Range, joined
from diloco_jax.runtime.records.files import SUMMARY_FILE, TAPE_FILE, TAPES
from diloco_jax.runtime.records.tape_file import read_lines
from diloco_jax.runtime.records.telemetry import read_object
from diloco_jax.tools.replay.guarantees import LEASED, OWN, RESUMED, DataOfIncarnation, describe_guarantees, guarantees
from diloco_jax.tools.replay.learner_tapes import Begin, Lost, OwnData, ResumedLoader, TapedStep, read_entries
from diloco_jax.tools.replay.script import fingerprint_of, inputs, machine_of

# The books are compared after these inputs.
COMPARED_AFTER = ("merged", "restart", "rewind")


def audit(run_dir: Path, protocol: ProtocolConfig, total_steps: int, budget: Budget = NO_BUDGET) -> dict[str, Any]:
    """Follow every sample of a run, and repeat the exclusions from merges.

    Returns:
        leased: samples that were leased; merged, overwritten, released, out: their fates, where `out` is still leased;
        released_trained, out_trained: samples of these two fates that their learner had trained on;
        repeated: samples that were leased again; undone: samples merged into a version that was lost later; void:
        samples leased in a history that the run returned from; rounds; exclusions_repeated: rounds whose exclusions
        were decided again from recorded norms; operations: bans and admits of operators; learner_tapes; corpora: fates
        and epochs by corpus, if islands have separate corpora; data: for each learner what is known of the data that
        its loop read (guarantees.py); violations: their number; first_violations: the first of them in words.

    Raises:
        ValueError: a tape is missing or broken; the message names it.
    """
    tape = run_dir / TAPE_FILE
    machine = machine_of(fingerprint_of(tape), protocol, total_steps, budget)
    if elsewhere := decided_elsewhere(stamps(read_lines(tape))):
        raise ValueError(f"{tape} cannot be audited: {elsewhere}")
    uses = returns(read_lines(tape))
    auditor = Auditor(machine.config.num_fragments, uses)
    for line, effects in inputs(tape, machine, uses):
        auditor.take(line, effects)
        if line[0] in COMPARED_AFTER:
            auditor.compare(machine.leases, machine.global_step)
    auditor.compare(machine.leases, machine.global_step)
    summary = run_dir / SUMMARY_FILE
    if not machine.finished and summary.exists() and read_object(summary, "complete")["complete"]:
        raise ValueError(
            f"{tape} ends at global step {machine.global_step}, but the run is complete: restore the rest of the tape"
        )
    books, findings = auditor.books, auditor.findings
    leased, *fates = auditor.fates
    if leased != sum(fates):
        fates_text = "{} merged, {} overwritten, {} released and {} still leased".format(*fates)
        findings.add(f"{leased} were leased, but {fates_text} make {sum(fates)}")
    own = {name: book for name, book in sorted(books.items()) if name != COMMON}
    if own and books[COMMON].leased:
        own[COMMON] = books[COMMON]
    tapes = sorted((run_dir / TAPES).glob("*.jsonl"))
    incarnations = [_check_tape(path, findings, auditor.reported) for path in tapes]
    return {
        **auditor.fates._asdict(),
        "released_trained": auditor.released_trained,
        "out_trained": auditor.out_trained,
        "repeated": sum(book.repeated for book in books.values()),
        "undone": sum(book.undone for book in books.values()),
        "void": auditor.void,
        "rounds": auditor.rounds,
        "exclusions_repeated": auditor.exclusions.repeated,
        "operations": auditor.operations,
        "learner_tapes": len(tapes),
        "corpora": {name: _of_corpus(book, machine.membership.corpora, name) for name, book in own.items()},
        "data": guarantees(incarnations, [name for name, _ in (*findings.granted, *auditor.reported)]),
        "violations": findings.count,
        "first_violations": findings.texts,
    }


def _check_tape(path: Path, findings: Findings, reported: Mapping[Incarnation, int]) -> DataOfIncarnation:
    """Check that an incarnation of a learner had only samples that were leased to it, and that its tape is whole.

    While its leases were used up, it had earlier positions, which its name and step determine. A step is written to the
    tape before it is reported. So even the tape of a killed learner has the newest reported step.
    """
    incarnation, local_step, own, lost = ("", 0), 0, list[Range](), False
    data, fronts = DataOfIncarnation("", 0), deque[int]()
    for number, entry in read_entries(path):
        if isinstance(entry, Begin):
            incarnation = (entry.learner_id, entry.incarnation)
            granted = findings.granted.get(incarnation, [])
            own, data = joined(sorted(granted)), DataOfIncarnation(*incarnation)
            # Leases that were lost on their way may end higher than those that arrived later.
            fronts = deque(sorted({stop for _, stop in granted}))
        elif isinstance(entry, OwnData):
            data = data._replace(guarantee=entry.guarantee)
        elif isinstance(entry, ResumedLoader):
            data = data._replace(resumed=entry)
        elif isinstance(entry, Lost):
            lost = True
        elif isinstance(entry, TapedStep):
            name = incarnation[0]
            if entry.local_step != local_step + 1 and not lost:
                findings.add(
                    f"{path.name} line {number} is of local step {entry.local_step}, expected {local_step + 1}"
                )
                return data
            local_step = entry.local_step
            data = data._replace(steps=local_step)
            other = next((each for each in entry.ranges if not _within(own, *each)), None)
            if other is not None and not _is_earlier(entry, incarnation, fronts):
                findings.add(
                    f"{path.name} line {number}: {name} read positions {other[0]} to {other[1] - 1}, which were not "
                    "leased to it"
                )
                return data
    if local_step < reported.get(incarnation, 0):
        findings.add(
            f"{path.name} ends at local step {local_step}, but step {reported[incarnation]} was reported: the end of "
            "the tape is missing"
        )
    return data


def _within(ranges: list[Range], start: int, stop: int) -> bool:
    """Return whether one of these sorted ranges contains all positions."""
    at = bisect_right(ranges, start, key=lambda piece: piece[0]) - 1
    return at >= 0 and stop <= ranges[at][1]


def _is_earlier(step: TapedStep, incarnation: Incarnation, fronts: deque[int]) -> bool:
    """Return whether a step read what the rule gives it without leased data; drop the fronts that are passed."""
    size = sum(stop - start for start, stop in step.ranges)
    while fronts:
        if step.ranges == (earlier_range(*incarnation, step.local_step, fronts[0], size),):
            return True
        fronts.popleft()
    return False


def describe(result: Mapping[str, Any]) -> str:
    """Format the result of an audit as text."""
    data = result.get("data", {})
    own = all(found["guarantee"] in (OWN, RESUMED) for found in data.values())
    if data and (own or not result["leased"]):
        lines = [f"{result['rounds']:,} merged rounds; every loop read its own data"]
        if result["leased"]:
            lines[0] += f", so the {result['leased']:,} positions that the syncer leased are not samples of any data"
        return "\n".join([*lines, *describe_guarantees(data), *_operations(result), *_verdict(result, "")])
    again = f", and {result['repeated']:,} times again after a release: {result['leased']:,} leases of a sample"
    lines = [
        f"{result['leased'] - result['repeated']:,} samples were leased in {result['rounds']:,} merged rounds"
        f"{again if result['repeated'] else ''}; {result['merged']:,} leases ended merged, "
        f"{result['overwritten']:,} overwritten, {result['released']:,} released, {result['out']:,} are still leased",
    ]
    if result["overwritten"]:
        lines.append(
            f"{result['overwritten']:,} were trained on without effect: their learner adopted newer values of every "
            "fragment before a round merged the result"
        )
    lines += _unfinished(result)
    for name, found in result.get("corpora", {}).items():
        what = name or "the corpus of the run"
        lines.append(
            f"{what}: {found['leased']:,} leased, {found['merged']:,} merged, {found['overwritten']:,} overwritten, "
            f"{found['released']:,} released, {found['out']:,} still leased{_epochs(found['epochs'])}"
        )
    if result["undone"]:
        lines.append(f"{result['undone']:,} were merged into a version that was lost with all processes that held it")
    if result["void"]:
        lines.append(f"{result['void']:,} more were leased in a history that the run returned from")
    if result["exclusions_repeated"]:
        lines.append(
            f"{result['exclusions_repeated']:,} rounds have recorded norms, and the rule decided again from them"
        )
    one_fate = f"every lease of a sample has one fate; {result['learner_tapes']:,} learner tapes have no other samples"
    known = {found["guarantee"] for found in data.values()}
    if known & {OWN, RESUMED}:
        lines.append("these counts include the positions that were leased to loops with other data, and not read")
    if known - {LEASED}:
        lines += describe_guarantees(data)
        one_fate = f"every leased position has one fate; {result['learner_tapes']:,} learner tapes have no other ones"
    return "\n".join([*lines, *_operations(result), *_verdict(result, one_fate)])


def _operations(result: Mapping[str, Any]) -> list[str]:
    """Return a line for each ban and admit of an operator."""
    done = {"ban": "banned", "admit": "admitted"}
    return [
        f"an operator {done[each['action']]} {each['learner']} {each['t']:.1f} s after the start of the run"
        + (f": {each['reason']}" if "reason" in each else "")
        for each in result["operations"]
    ]


def _of_corpus(book: Book, corpora: Corpora, name: str) -> dict[str, Any]:
    known = corpora.known.get(name)
    samples = known.samples if known else 0
    return {**book.fates._asdict(), "samples": samples, "epochs": book.end / samples if samples else None}


def _epochs(epochs: float | None) -> str:
    return "" if epochs is None else f"; {epochs:.2f} epochs"


def _unfinished(result: Mapping[str, Any]) -> list[str]:
    """Separate trained samples that are not merged from those that were leased ahead, which cost no work."""
    reasons = (
        ("released", "by a learner that ended before every fragment had merged them"),
        ("out", "in the last steps, and not merged in every fragment when the tape ended"),
    )
    names = {"released": "released", "out": "still leased"}
    return [
        f"of the {result[fate]:,} {names[fate]}, {result[f'{fate}_trained']:,} were trained on {when}; "
        f"{result[fate] - result[f'{fate}_trained']:,} were leased ahead and not trained on"
        for fate, when in reasons
        if result[fate]
    ]


def _verdict(result: Mapping[str, Any], holds: str) -> list[str]:
    if result["violations"]:
        return [f"{result['violations']} VIOLATIONS:", *result["first_violations"]]
    return [holds] if holds else []
