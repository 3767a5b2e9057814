"""Runs with drawn norms: the rule of exclusion keeps its promises, and the checker catches rules that do not."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from diloco_jax.protocol import exclusion
from diloco_jax.protocol.effects import Contribution, Merge
from diloco_jax.protocol.exclusion import Decision, MeasuredValue, RateHistory
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.sim.fault import Fault
from diloco_jax.sim.invariants import __main__ as cli
from diloco_jax.sim.invariants.draw import random_scenario, with_norms
from diloco_jax.sim.invariants.exclusions import ExclusionsHold
from diloco_jax.sim.invariants.verdict import judge
from diloco_jax.sim.norms import SPREAD, DrawnNorms, NormEvent, NormSettings
from diloco_jax.sim.scenario import Scenario
from diloco_jax.tools.replay.audit import audit
from tests.drawn import seeds

CONFIG = ProtocolConfig(
    sync_every=1, num_fragments=1, overlap_steps=1, strikes_max=1000, unmerged_rounds_max=1000, recover_from_peers=False
)
ALONE = Scenario(config=CONFIG, learners=1, total_steps=80, norms=NormSettings())
CROWD = replace(ALONE, learners=4, config=replace(CONFIG, quorum=4))
PAIR = replace(ALONE, learners=2, config=replace(CONFIG, quorum=2))


def having(scenario: Scenario, *events: NormEvent, rate: float = 1e-4) -> Scenario:
    return replace(scenario, norms=NormSettings(rate=rate, events=events))


LASTING = NormEvent("island-0", "louder", 30, 1000, 300.0)
# An adoption may overwrite a single step before it is sent.
DAMAGE = NormEvent("island-1", "damage", 30, 4, 1e6)
NOT_FINITE = NormEvent("island-0", "nan", 30, 3)
OVERFLOW = NormEvent("island-0", "damage", 3, 1, 1e44)
DIVERGING = NormEvent("island-0", "diverge", 20, 60, 3.0)

Rule = Callable[[Sequence[MeasuredValue], RateHistory, float, float], Decision]


def merges_everything(values: Sequence[MeasuredValue], history: RateHistory, length: float, factor: float) -> Decision:
    return Decision(tuple(range(len(values))), {}, ())


def has_no_votes(values: Sequence[MeasuredValue], history: RateHistory, length: float, factor: float) -> Decision:
    with patch.object(exclusion, "VOTERS_MIN", 100):
        return exclusion.decide(values, RateHistory(), length, factor)


def forgets_outliers(values: Sequence[MeasuredValue], history: RateHistory, length: float, factor: float) -> Decision:
    return exclusion.decide(values, history._replace(outliers=()), length, factor)


def is_strict(values: Sequence[MeasuredValue], history: RateHistory, length: float, factor: float) -> Decision:
    return exclusion.decide(values, history._replace(peaks=()), length / 1e6, 0.9)


def hoards_outliers(values: Sequence[MeasuredValue], history: RateHistory, length: float, factor: float) -> Decision:
    with patch.object(exclusion, "OUTLIERS_KEPT", 10**6):
        return exclusion.decide(values, history, length, factor)


@pytest.mark.parametrize(
    ("rule", "scenario", "text"),
    [
        (merges_everything, having(ALONE, NOT_FINITE), "which is not finite"),
        (has_no_votes, having(CROWD, DAMAGE), "a single outlier"),
        (forgets_outliers, having(ALONE, LASTING), "for the third time in a row"),
        (is_strict, having(PAIR, rate=5e-3), "whose norm is usual"),
        (hoards_outliers, having(ALONE, DIVERGING), "the memory has grown"),
    ],
)
def test_a_broken_rule_is_caught(rule: Rule, scenario: Scenario, text: str) -> None:
    assert not judge(scenario).problem
    with patch("diloco_jax.sim.norms.decide", rule):
        verdict = judge(scenario, checkers=[ExclusionsHold])
    assert verdict.problem.startswith("Violation: ExclusionsHold at ") and text in verdict.problem, verdict


def test_a_syncer_that_restarts_knows_what_is_usual() -> None:
    """Also without a snapshot: then the tape alone tells it."""
    config = replace(PAIR.config, snapshot_every=1000)
    crash = Fault(27.0, "syncer_crash", duration_s=1.0)
    scenario = having(replace(PAIR, config=config, faults=(crash,)), DAMAGE)
    assert not judge(scenario).problem
    with patch("diloco_jax.sim.syncer_node.remembered", lambda lines, *_: lines):
        verdict = judge(scenario, checkers=[ExclusionsHold])
    assert "a single outlier" in verdict.problem, verdict


def test_a_finite_value_whose_merge_overflows_is_excluded() -> None:
    verdict = judge(having(ALONE, OVERFLOW))
    assert not verdict.problem
    with patch("diloco_jax.sim.norms.NORM_MAX", math.inf):
        assert "which is not finite" in judge(having(ALONE, OVERFLOW), checkers=[ExclusionsHold]).problem


@pytest.mark.parametrize("seed", seeds(8))
def test_seed_with_norms(seed: int) -> None:
    verdict = judge(with_norms(random_scenario(seed)))
    if verdict.problem:
        pytest.fail(str(verdict), pytrace=False)


def test_norms_change_nothing_else() -> None:
    scenario = with_norms(random_scenario(6))
    assert replace(scenario, norms=None, config=random_scenario(6).config, total_steps=1) == replace(
        random_scenario(6), total_steps=1
    )
    assert with_norms(random_scenario(6)) == scenario and random_scenario(6).norms is None


def test_a_norm_is_the_sum_over_the_inner_steps_of_a_value() -> None:
    norms = DrawnNorms(NormSettings(rate=1.0, events=(DAMAGE, NOT_FINITE), ends_s=50.0), seed=1, num_fragments=1)

    def norm(name: str, local_step: int, steps: int, now_s: float = 0.0) -> float:
        order = Merge(7, 0, (Contribution(name, local_step, steps, 64 * steps, 0, 4),))
        return norms.measure(order, (), now_s)[0].norm

    assert 10 / SPREAD <= norm("island-1", 29, 10) <= 10 * SPREAD
    assert norm("island-1", 29, 10) == pytest.approx(norm("island-1", 29, 4) + norm("island-1", 25, 6))
    assert 4e6 / SPREAD < norm("island-1", 35, 10) < 4e6 * SPREAD + 6 * SPREAD
    assert norm("island-1", 43, 10) < 10 * SPREAD, "the damage is of steps 30 to 33: a newer version replaced it"
    assert math.isnan(norm("island-0", 33, 4)) and not math.isnan(norm("island-0", 33, 1))
    assert norm("island-1", 33, 10, now_s=50.0) < 10 * SPREAD, "no event any more"


def test_the_tape_has_the_evidence_and_the_audit_finds_a_wrong_decision(tmp_path: Path) -> None:
    scenario = having(CROWD, DAMAGE)
    assert not judge(scenario, tapes=tmp_path).problem
    tape = tmp_path / "tape.jsonl"
    lines = tape.read_text(encoding="utf-8").splitlines()
    merged = [json.loads(line) for line in lines if line.startswith('["merged"')]
    wrong = next(line for line in merged if line[4])
    assert wrong[4] == ["island-1"] and wrong[5]["outlier_factor"] == 100.0
    assert wrong[5]["norms"]["island-1"] > 10 and wrong[5]["norms"]["island-0"] < 1
    assert "is usual (merge.outlier_factor 100)" in wrong[5]["reasons"]["island-1"]
    result = audit(tmp_path, scenario.config, scenario.total_steps)
    assert result["violations"] == 0 and result["exclusions_repeated"] == len(merged) == 80
    wrong[5]["norms"]["island-1"] = wrong[5]["norms"]["island-0"]
    start = f'["merged",{wrong[1]},{wrong[2]},'
    edited = [json.dumps(wrong) if line.startswith(start) else line for line in lines]
    tape.write_text("".join(line + "\n" for line in edited), encoding="utf-8")
    result = audit(tmp_path, scenario.config, scenario.total_steps)
    expected = f"round {wrong[2]} excluded island-1, but by its norms the rule excludes nobody"
    assert result["first_violations"] == [expected]


def test_a_failing_seed_with_norms_prints_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--seed", "0", "--norms", "--quiet"]) == 0
    with patch("diloco_jax.sim.norms.decide", merges_everything):
        assert cli.main(["--seed", "0", "--norms", "--quiet"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith("rerun with ./scripts/sweep --seed 0 --norms")
