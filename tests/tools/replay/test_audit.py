"""The audit of tapes of real machines, and of machines that lose, double or forget samples; and its book."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco_jax.protocol.leases import Fates, Holding, LeaseBook, earlier_range
from diloco_jax.protocol.messages import LearnerMessage, Lease
from diloco_jax.protocol.watch import sample_book
from diloco_jax.protocol.watch.auditor import Auditor
from diloco_jax.protocol.watch.sample_book import Book, Findings, SampleShare
from diloco_jax.runtime.learner.tape import learner_tape_path
from diloco_jax.runtime.records.tape_chain import TapeChain
from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.invariants.draw import random_scenario
from diloco_jax.sim.node import Effects, Observer
from diloco_jax.tools.replay.audit import audit, describe
from tests.runtime.taped_pair import TapedPair

STEPS = 100


def result_of(pair: TapedPair) -> dict[str, Any]:
    """The audit of a story, whose counts must be those of the machine at its end."""
    result = audit(pair.finish(), pair.config, STEPS)
    counts = tuple(result[key] for key in Fates._fields)
    assert counts == tuple(pair.syncer.leases.fates) and counts[0] == sum(counts[1:])
    return result


def broken(pair: TapedPair) -> list[str]:
    """The violations of a story."""
    result = audit(pair.finish(), pair.config, STEPS)
    assert result["violations"] == len(result["first_violations"]) > 0
    assert "VIOLATIONS" in describe(result)
    return list(result["first_violations"])


def test_quiet_run(tmp_path: Path) -> None:
    pair = TapedPair(tmp_path)
    pair.join("a", "b")
    pair.steps(10, "a", "b")
    result = result_of(pair)
    assert result["violations"] == 0 and result["repeated"] == result["released"] == 0
    assert result["merged"] > 20 and result["rounds"] >= 10 and result["learner_tapes"] == 2
    assert "every lease of a sample has one fate" in describe(result)


def test_what_adoption_overwrote_before_any_round_took_it_is_not_merged(tmp_path: Path) -> None:
    """A fragment's round is taken without b: of its first 8 steps of 10 tokens, 50 tokens are weighed."""
    pair = TapedPair(tmp_path, sync_every=3, num_fragments=1, overlap_steps=1)
    pair.join("a", "b")
    for number in range(10):
        pair.held = {"b:StepReport"} if 3 <= number < 6 else set()
        pair.step("a", "b")
        pair.wait(2.0)
    shares = [each for merge in pair.merges() for each in merge.contributions if each.learner_id == "b"]
    assert [(part.since, part.samples, part.tokens) for part in shares] == [(0, 6, 30), (12, 16, 20)]
    result = result_of(pair)
    assert result["violations"] == 0
    assert (result["merged"], result["overwritten"]) == (16 + 10, 6), "of a and of b"
    assert "6 were trained on without effect" in describe(result)


def test_loss_and_return(tmp_path: Path) -> None:
    """A dead learner's data goes to others: handed out for another time, and merged once."""
    pair = TapedPair(tmp_path, lease_ahead_steps=4)
    pair.join("a", "b")
    pair.steps(6, "a", "b")
    pair.crash("b")
    pair.steps(3, "a")
    pair.join("b", incarnation=2)
    pair.steps(12, "a", "b")
    result = result_of(pair)
    assert result["violations"] == 0
    assert 0 < result["repeated"] <= result["released"] <= 12


def test_bans_and_admissions_are_listed_and_lose_no_sample(tmp_path: Path) -> None:
    pair = TapedPair(tmp_path, snapshot_every=4, lease_ahead_steps=4)
    pair.join("a", "b", "c")
    pair.steps(6, "a", "b", "c")
    pair.ban("b", "its values stand out")
    pair.steps(3, "a", "c")
    pair.restart_syncer()
    pair.connect("a", "c")
    pair.join("b", incarnation=2)
    pair.steps(3, "a", "c")
    pair.rewind()
    pair.wait(2.5)
    pair.admit("b")
    pair.join("a", "b", "c", incarnation=3)
    pair.steps(5, "a", "b", "c")
    result = result_of(pair)
    assert result["violations"] == 0 and result["released"] > 0
    assert result["operations"] == [
        {"action": "ban", "learner": "b", "t": 0.0, "reason": "its values stand out"},
        {"action": "admit", "learner": "b", "t": 2.5},
    ]
    lines = describe(result).splitlines()
    assert "an operator banned b 0.0 s after the start of the run: its values stand out" in lines
    assert "an operator admitted b 2.5 s after the start of the run" in lines


def test_failover_and_rewind(tmp_path: Path) -> None:
    pair = TapedPair(tmp_path, snapshot_every=4, lease_ahead_steps=2)
    pair.join("a", "b")
    pair.steps(9, "a", "b")
    pair.restart_syncer()
    pair.connect("a", "b")
    pair.steps(9, "a", "b")
    assert result_of(pair)["violations"] == 0
    pair.stop()
    pair.steps(3, "a", "b")
    before = pair.syncer.leases.fates.leased
    pair.rewind()
    pair.join("a", "b", incarnation=2)
    pair.steps(5, "a", "b")
    result = result_of(pair)
    assert result["violations"] == 0
    global_step = json.loads(next(line for line in pair.tape if line.startswith('["rewind"')))[2]
    snapshot = next(s for s in pair.driver.snapshots if s.global_step == global_step)
    assert result["void"] == before - json.loads(snapshot.state)["leases"]["counts"][1], "handed out by then"


def test_a_value_of_an_earlier_incarnation_says_nothing_of_the_new_ones_data(tmp_path: Path) -> None:
    """Learner b dies while its value is merged, and is back before the merge is done."""
    pair = TapedPair(tmp_path)
    pair.join("a", "b")
    pair.steps(4, "a", "b")
    pair.holds_merges = True
    pair.step("a", "b")
    pair.crash("b")
    pair.join("b", incarnation=2)
    pair.holds_merges = False
    pair.merge()
    pair.steps(6, "a", "b")
    assert result_of(pair)["violations"] == 0


@pytest.mark.parametrize(
    ("name", "wrong", "says"),
    [
        ("_take", lambda right: lambda self, count: (0, count), "while it was"),
        ("release", lambda right: lambda self, name: self.holdings.pop(name, None) and 0, "neither merged nor"),
        ("settle", lambda right: lambda self: _settle_early(right, self), "its tape says"),
    ],
)
def test_wrong_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, wrong: Callable[[Any], Any], says: str
) -> None:
    """A machine that hands out twice, forgets what a dead learner had, or counts too early, is found out."""
    book = Holding if name == "settle" else LeaseBook
    monkeypatch.setattr(book, name, wrong(getattr(book, name)))
    monkeypatch.setattr("tests.protocol.pair.check_fates", lambda syncer: None)
    pair = TapedPair(tmp_path, lease_ahead_steps=4)
    pair.join("a", "b")
    pair.steps(5, "a", "b")
    pair.crash("b")
    pair.join("b", incarnation=2)
    pair.steps(5, "a", "b")
    assert any(says in text for text in broken(pair)), broken(pair)


def _settle_early(right: Callable[..., tuple[int, int]], holding: Holding) -> tuple[int, int]:
    marks, holding.marks = holding.marks, [max(holding.marks)] * len(holding.marks)
    settled = right(holding)
    holding.marks = marks
    return settled


@pytest.mark.parametrize("excess", [0, 1])
def test_learner_that_reads_what_is_not_its_own(tmp_path: Path, excess: int) -> None:
    """Somebody else's positions, and one more than its last."""
    pair = TapedPair(tmp_path, lease_ahead_steps=4)
    pair.join("a", "b")
    pair.steps(5, "a", "b")
    pair.finish()
    path = pair.path_of("b")
    lines = path.read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith('["step",3,'))
    fields = json.loads(lines[at])
    start = fields[3][0][0]
    end = next(lease.stop for lease in pair.messages(Lease, "b") if lease.start <= start < lease.stop)
    fields[3] = [[start, end + 1]] if excess else [[0, 2]]
    lines[at] = json.dumps(fields)
    path.write_text("\n".join(lines) + "\n")
    (found,) = broken(pair)
    words = f"{fields[3][0][0]} to {fields[3][0][1] - 1}"
    assert found == f"b.1.jsonl line {at + 1}: b read positions {words}, which were not leased to it"


def test_a_learner_without_leased_data_reads_what_the_rule_gives_it_and_nothing_else(tmp_path: Path) -> None:
    pair = TapedPair(tmp_path, lease_ahead_steps=4)
    pair.join("a", "b")
    pair.steps(9, "a", "b")
    pair.cut("b")
    front = max(lease.stop for lease in pair.messages(Lease, "b"))
    pair.steps(30, "b")
    pair.connect("b")
    pair.steps(4, "a", "b")
    assert result_of(pair)["violations"] == 0
    path = pair.path_of("b")
    lines = path.read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith('["step",30,'))
    fields = json.loads(lines[at])
    assert fields[3] == [list(earlier_range("b", 1, 30, front, 2))]
    owned = {each for lease in pair.messages(Lease, "b") for each in range(lease.start, lease.stop)}
    # Another range that was leased to a.
    start = next(each for each in range(front) if each != fields[3][0][0] and not {each, each + 1} & owned)
    fields[3] = [[start, start + 2]]
    lines[at] = json.dumps(fields)
    path.write_text("\n".join(lines) + "\n")
    (found,) = broken(pair)
    assert found == f"b.1.jsonl line {at + 1}: b read positions {start} to {start + 1}, which were not leased to it"


def test_a_learner_whose_highest_lease_was_lost_reads_positions_below_the_highest_that_arrived(tmp_path: Path) -> None:
    """Its data goes to others, and the leases of its new book end below the lost one."""
    pair = TapedPair(tmp_path, lease_ahead_steps=8, release_s=30.0)
    pair.join("a", "b")
    pair.steps(3, "a", "b")
    pair.held = {"b:Lease"}
    pair.steps(1, "a", "b")
    pair.held = set()
    pair.cut("b")
    pair.wait(60.0)
    pair.connect("b")
    pair.cut("b")
    ends = [lease.stop for lease in pair.messages(Lease, "b")]
    assert ends[0] < ends[-1] < max(ends), "the newest lease ends between the first and the lost one"
    pair.steps(20, "b")
    assert pair.learners["b"].allotment.earlier_steps > 0
    pair.connect("b")
    pair.steps(4, "a", "b")
    assert result_of(pair)["violations"] == 0


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (
            lambda lines: lines[:-9],
            "b.1.jsonl ends at local step 3, but step 6 was reported: the end of the tape is missing",
        ),
        (lambda lines: [x for x in lines if '"step",3,' not in x], "line 12 is of local step 4, expected 3"),
    ],
)
def test_a_learners_tape_that_was_cut_is_noticed(tmp_path: Path, wrong: Callable[[Any], Any], says: str) -> None:
    pair = TapedPair(tmp_path)
    pair.join("a", "b")
    pair.steps(6, "a", "b")
    assert result_of(pair)["violations"] == 0
    path = pair.path_of("b")
    path.write_text("".join(wrong(path.read_text().splitlines(keepends=True))))
    (found,) = broken(pair)
    assert says in found, found


def test_a_learner_that_is_killed_has_a_whole_tape(tmp_path: Path) -> None:
    """A step is on its tape before anybody hears of it; what it made and did not report yet is more."""
    pair = TapedPair(tmp_path)
    pair.join("a", "b")
    pair.steps(4, "a", "b")
    pair.held = {"b:StepReport"}
    pair.step("a", "b")
    pair.crash("b")
    pair.steps(3, "a")
    assert result_of(pair)["violations"] == 0


def test_the_end_of_a_learners_tape_knows_its_lines(tmp_path: Path) -> None:
    """One that lost a line that says nothing of steps, between its begin and its end."""
    pair = TapedPair(tmp_path)
    pair.join("a")
    pair.steps(4, "a")
    pair._tape_of("a").end("run complete", [1, 2])
    assert result_of(pair)["violations"] == 0
    lines = pair.path_of("a").read_text().splitlines(keepends=True)
    at = next(number for number, line in enumerate(lines) if line.startswith('["sent"'))
    pair.path_of("a").write_text("".join([*lines[:at], *lines[at + 1 :]]))
    with pytest.raises(ValueError, match=rf"a\.1\.jsonl: a line before line {len(lines) - 1} is missing"):
        result_of(pair)


def test_files_beside_the_tape_must_be_of_it(tmp_path: Path) -> None:
    """The summary and every snapshot name the head of the tape; a tape that is shorter or another one is refused."""
    pair = TapedPair(tmp_path)
    pair.join("a")
    pair.steps(4, "a")
    lines = [line.encode() for line in pair.tape]
    chain = TapeChain()
    for line in lines:
        chain.add(line)
    size = sum(len(line) + 1 for line in lines)
    summary = pair.finish() / "summary.json"
    summary.write_text(json.dumps({"complete": False, "tape_bytes": size, "tape_head": chain.head}))
    assert result_of(pair)["violations"] == 0
    snapshot = tmp_path / "checkpoints" / "step_00000009" / "meta" / "data.json"
    snapshot.parent.mkdir(parents=True)
    snapshot.write_text(json.dumps({"tape_bytes": size, "tape_head": chain.head}))
    with pytest.raises(ValueError, match=r"is not the tape of .*step_00000009 at its byte"):
        result_of(pair)
    snapshot.unlink()
    lost = pair.tape.pop()
    with pytest.raises(
        ValueError, match=f"ends at byte {size - len(lost) - 1}, but .*summary.json was made at byte {size}"
    ):
        audit(pair.finish(), pair.config, STEPS)


def of_own_data(pair: TapedPair, name: str, guarantee: str, incarnation: int = 1, resumed: Any = None) -> None:
    """Add the lines of a loop that reads its own data to the tape of an incarnation."""
    path = learner_tape_path(pair.folder, name, incarnation)
    begin, *lines = path.read_text().splitlines()
    added = [json.dumps(["data", guarantee]), *([json.dumps(["loader", *resumed])] if resumed else [])]
    path.write_text("".join(f"{line}\n" for line in [begin, *added, *lines]))


def test_an_audit_names_the_guarantee_of_each_learner(tmp_path: Path) -> None:
    """Learner b makes 6 steps, returns at its fourth, makes 5, and returns at the same place for another 5."""
    pair = TapedPair(tmp_path)
    pair.join("a", "b")
    pair.steps(6, "a", "b")
    assert result_of(pair)["data"] == {
        name: {"guarantee": "leased", "steps": 6, "steps_again": None} for name in ("a", "b")
    }
    for incarnation in (2, 3):
        pair.crash("b")
        pair.join("b", incarnation=incarnation)
        pair.steps(5, "a", "b")
    of_own_data(pair, "b", "resumed")
    of_own_data(pair, "b", "resumed", 2, (1, 4))
    of_own_data(pair, "b", "resumed", 3, (1, 4))
    result = result_of(pair)
    # It read batches 0 to 5, 4 to 8 and 4 to 8: 16 steps, and 9 batches.
    assert result["data"]["b"] == {"guarantee": "resumed", "steps": 16, "steps_again": 16 - 9}
    text = describe(result)
    assert "a: exactly once, by lease" in text and "7 of 16 steps trained a batch again" in text
    assert "every leased position has one fate" in text and "include the positions that were leased to loops" in text
    of_own_data(pair, "a", "own")
    text = describe(result := result_of(pair))
    assert result["violations"] == 0 and "a: own data without a saved state; nothing is known" in text
    assert "that the syncer leased are not samples of any data" in text and "one fate" not in text
    learner_tape_path(pair.folder, "b", 1).unlink()
    learner_tape_path(pair.folder, "a", 1).unlink()
    text = describe(result := result_of(pair))
    assert result["data"]["a"] == {"guarantee": "unknown", "steps": 0, "steps_again": None}
    assert result["data"]["b"]["steps_again"] is None
    assert "a: no tape of it is here" in text and "b: resumed" in text and "an unknown number of 10 steps" in text


def test_trained_samples_are_told_from_those_that_were_leased_ahead(tmp_path: Path) -> None:
    """Every trained sample is merged, or unfinished in one of the two places that the audit names."""
    pair = TapedPair(tmp_path)
    pair.join("a", "b")
    pair.steps(6, "a", "b")
    pair.held.add("b:FragmentValue")
    pair.steps(3, "a", "b")
    pair.crash("b")
    pair.held.clear()
    pair.join("b", incarnation=2)
    pair.steps(5, "a", "b")
    result = result_of(pair)
    steps = 6 + 3 + 5 + 6 + 3 + 5
    unfinished = result["released_trained"], result["out_trained"]
    assert result["merged"] + result["overwritten"] + sum(unfinished) == steps * pair.step_samples
    assert min(unfinished) > 0, "the case is none otherwise"
    text = describe(result)
    ahead = result["out"] - result["out_trained"]
    assert f"of the {result['out']} still leased, {result['out_trained']} were trained on" in text
    assert f"; {ahead} were leased ahead and not trained on" in text
    again = {"leased": 12_345, "repeated": 2_345, "released": 3_000}
    line = describe(result | again).splitlines()[0]
    assert line.startswith(
        f"10,000 samples were leased in {result['rounds']} merged rounds, and 2,345 times again after "
    )
    assert "a release: 12,345 leases of a sample; " in line and ", 3,000 released, " in line
    assert "again" not in describe(result | {"repeated": 0}).splitlines()[0]


def test_an_audit_of_own_data_speaks_of_no_lease(tmp_path: Path) -> None:
    pair = TapedPair(tmp_path, step_samples=0)
    pair.join("a", "b")
    pair.steps(6, "a", "b")
    pair.crash("b")
    for name in ("a", "b"):
        of_own_data(pair, name, "own")
    learner_tape_path(pair.folder, "b", 1).unlink()
    result = result_of(pair)
    assert result["leased"] == 0 and result["violations"] == 0 and [*result["data"]] == ["a", "b"]
    of_b = result["data"].pop("b")
    assert of_b["guarantee"] == "unknown" and "every loop read its own data" in describe(result)
    assert "lease" not in describe(result)


def test_broken_tapes_are_named(tmp_path: Path) -> None:
    pair = TapedPair(tmp_path)
    with pytest.raises(ValueError, match=r"tape\.jsonl does not exist"):
        audit(tmp_path, pair.config, STEPS)
    pair.join("a")
    pair.steps(3, "a")
    pair.tape[4] = '["StepReport", 1.0'
    with pytest.raises(ValueError, match=r"tape\.jsonl: tape line 5 cannot be"):
        audit(pair.finish(), pair.config, STEPS)


def test_a_tape_that_ends_before_its_run_is_not_a_proof(tmp_path: Path) -> None:
    pair = TapedPair(tmp_path)
    pair.join("a")
    pair.steps(3, "a")
    (pair.finish() / "summary.json").write_text('{"complete": true}')
    with pytest.raises(ValueError, match=r"ends at global step [0-9]+, but the run is complete"):
        audit(tmp_path, pair.config, STEPS)


A, B = ("a", 1), ("b", 1)


class SampleMap:
    """A RangeMap that remembers every number by itself."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.numbers: dict[int, Any] = {}

    def over(self, start: int, stop: int) -> list[tuple[int, int, Any]]:
        return [(number, number + 1, self.numbers.get(number, self.value)) for number in range(start, stop)]

    def paint(self, start: int, stop: int, value: Any) -> None:
        if value == self.value:
            self.numbers = {number: old for number, old in self.numbers.items() if not start <= number < stop}
        else:
            self.numbers |= dict.fromkeys(range(start, stop), value)


class Witness(Observer):
    """Observer that passes the inputs and effects of a syncer to an auditor."""

    def __init__(self, cluster: Cluster) -> None:
        self.auditor = Auditor(cluster.scenario.config.num_fragments)
        self.said: list[tuple[Any, ...]] = []
        self._lines = iter(range(1, 1 << 30))
        self._tape = cluster.syncer_node.tape

    def on_syncer(self, given: LearnerMessage | None, effects: Effects, now_s: float) -> None:
        self.auditor.take(json.loads(self._tape[next(self._lines)]), effects)
        books = self.auditor.books.values()
        counts = (*self.auditor.fates, sum(book.repeated for book in books), sum(book.undone for book in books))
        left = {name: owner.left for book in books for name, owner in book.owners.items()}
        self.said.append((*counts, self.auditor.void, left))


def witness(seed: int) -> Witness:
    """Run a seed, and return all findings of an auditor."""
    cluster = Cluster(random_scenario(seed))
    one = Witness(cluster)
    cluster.watch(one)
    cluster.run(10_000.0)
    assert not one.auditor.findings.count
    return one


@pytest.mark.parametrize("seed", [6, 45, 70])
def test_ranges_say_what_single_samples_would(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among these seeds are samples that were overwritten, leased again, undone and void."""
    said = witness(seed).said
    monkeypatch.setattr(sample_book, "RangeMap", SampleMap)
    assert witness(seed).said == said


def test_book_names_positions() -> None:
    book, found = Book(2), Findings()
    book.lease(A, 0, 0, 10, found)
    book.lease(A, 0, 0, 10, found)  # repeated
    assert (book.leased, book.fates.out, found.count) == (10, 10, 0)
    book.lease(B, 0, 8, 12, found)
    assert found.texts == ["position 8 (and 1 more) was leased to b while it was still leased, leased before to a"]
    book.lease(A, 2, 3, 5, found)
    assert found.texts[1:] == ["a was told that it has [(2, 4)], then 3 to 4"]
    book.lease(A, 12, 20, 21, found)
    assert found.texts[2:] == ["a was never leased its samples 10 to 11", "positions 12 to 19 were skipped"]
    book.lease(("a", 2), 0, 21, 22, found)
    assert "(incarnation 1) were neither merged nor released when it ended: 0 to 9, 20 to 20" in found.texts[4]
    book.lease(B, 4, 5, 5, found)
    assert found.texts[5] == "b was leased positions 5 to 4, which cannot be"
    book.release("b")
    book.lease(("a", 2), 1, 22, 24, found)
    assert found.texts[6:] == ["2 new positions were leased, while 4 released ones wait"]


def test_book_merges_when_every_fragment_took_and_somebody_holds() -> None:
    book, found = Book(2), Findings()
    book.lease(A, 0, 0, 10, found)
    book.on_version(0, 1, {A: SampleShare(0, 6)})
    book.on_held(0, 1)
    assert book.fates.merged == 0, "fragment 1 took nothing"
    book.on_version(1, 2, {A: SampleShare(0, 4)})
    assert book.fates.merged == 0, "nobody is seen to hold version 2"
    book.on_held(1, 1)
    book.on_held(1, 99)
    assert book.fates.merged == 0, "these are not the version that took it"
    book.on_held(1, 2)
    assert (book.fates.merged, book.fates.out) == (4, 6)
    book.on_version(1, 4, {("a", 2): SampleShare(0, 9)})
    book.on_held(1, 4)
    assert book.fates.merged == 4, "that was another incarnation"
    book.release("a")
    assert (book.leased, book.fates.merged, book.released, book.fates.out) == (10, 4, 6, 0)
    book.lease(B, 0, 4, 12, found)
    assert (book.leased, book.repeated, book.fates.out, found.count) == (18, 6, 8, 0)
    book.lease(B, 8, 2, 4, found)
    assert found.texts == ["position 2 (and 1 more) was leased to b while it was merged, leased before to a"]


def test_book_tells_what_a_lost_version_undid() -> None:
    book, found = Book(1), Findings()
    book.lease(A, 0, 0, 10, found)
    for version, samples in ((1, 3), (2, 5), (3, 8)):
        book.on_version(0, version, {A: SampleShare(0, samples)})
        if version < 3:
            book.on_held(0, version)
    assert book.fates.merged == 5
    book.on_lost(0, 1)
    assert book.undone == 2, "samples 3 and 4 went into version 2"
    book.on_version(0, 4, {A: SampleShare(0, 9)})
    book.on_held(0, 4)
    assert (book.fates.merged, book.undone) == (9, 2)
    book.keep_until([4])
    book.on_lost(0, 0)
    assert book.undone == 2
