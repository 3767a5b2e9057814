"""The audit of tapes of real machines, and of machines that lose, double or forget samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco_jax.protocol.leases import Fates, Holding, LeaseBook
from diloco_jax.protocol.messages import Lease
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
    assert "every one has one fate" in describe(result)


def test_what_adoption_overwrote_before_any_round_took_it_is_not_merged(tmp_path: Path) -> None:
    """A fragment's rounds are taken without b twice: it has made 9 steps of 10 tokens, and 50 tokens are weighed."""
    pair = TapedPair(tmp_path, sync_every=3, num_fragments=1, overlap_steps=1)
    pair.join("a", "b")
    for number in range(10):
        pair.held = {"b:StepReport"} if 3 <= number < 6 else set()
        pair.step("a", "b")
        pair.wait(2.0)
    shares = [part for merge in pair.merges() for part in merge.parts if part.learner_id == "b"]
    assert [(part.since, part.samples, part.tokens) for part in shares] == [(8, 14, 30), (14, 18, 20)]
    result = result_of(pair)
    assert result["violations"] == 0
    assert (result["merged"], result["overwritten"]) == (18 + 10, 8), "of a and of b"
    assert "8 were trained on for nothing" in describe(result)


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
    assert result["void"] == before - _leased_at(pair)


def _leased_at(pair: TapedPair) -> int:
    """Samples that were handed out when the run went back."""
    line = next(line for line in pair.tape if line.startswith('["rewind"'))
    global_step = json.loads(line)[2]
    snapshot = next(s for s in pair.driver.snapshots if s.global_step == global_step)
    return int(json.loads(snapshot.state)["leases"]["counts"][1])


def test_a_value_of_an_earlier_life_says_nothing_of_the_new_ones_data(tmp_path: Path) -> None:
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
        (
            "release",
            lambda right: lambda self, name: self.holdings.pop(name, None) and 0,
            "neither merged nor released",
        ),
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
    fields[3] = [[start, _granted(pair, "b", start) + 1]] if excess else [[0, 2]]
    lines[at] = json.dumps(fields)
    path.write_text("\n".join(lines) + "\n")
    (found,) = broken(pair)
    words = f"{fields[3][0][0]} to {fields[3][0][1] - 1}"
    assert found == f"b.1.jsonl line {at + 1}: b read positions {words}, which were not leased to it"


def _granted(pair: TapedPair, name: str, position: int) -> int:
    """The end of the lease that this position was in."""
    return next(lease.stop for lease in pair.messages(Lease, name) if lease.start <= position < lease.stop)


def test_broken_tapes_are_named(tmp_path: Path) -> None:
    pair = TapedPair(tmp_path)
    with pytest.raises(ValueError, match=r"tape\.jsonl does not exist"):
        audit(tmp_path, pair.config, STEPS)
    pair.join("a")
    pair.steps(3, "a")
    pair.tape[4] = '["StepReport", 1.0'
    with pytest.raises(ValueError, match=r"tape\.jsonl: tape line 5 cannot be"):
        audit(pair.finish(), pair.config, STEPS)


def test_a_tape_that_ends_before_its_run_is_no_proof(tmp_path: Path) -> None:
    pair = TapedPair(tmp_path)
    pair.join("a")
    pair.steps(3, "a")
    (pair.finish() / "summary.json").write_text('{"complete": true}')
    with pytest.raises(ValueError, match=r"ends at global step [0-9]+, but the run is complete"):
        audit(tmp_path, pair.config, STEPS)
