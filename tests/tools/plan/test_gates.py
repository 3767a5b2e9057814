"""The gates of a stage: bars by hand, the figures of a run against them, and the command."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco_jax.cli.main import main
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import parse
from diloco_jax.sim.goodput.settings import Assumptions
from diloco_jax.tools.plan.case import Case, case_of
from diloco_jax.tools.plan.law import distance
from diloco_jax.tools.stage.gates import RunFigures, gates, stage_of, with_sites
from diloco_jax.tools.stage.stage import facts_of, stage

pytestmark = pytest.mark.usefixtures("few_failures")
SETTINGS: dict[str, Any] = {
    "name": "small",
    "islands": {
        "count": 3,
        "devices": 1,
        "batch_size": 8,
        "each": {"island-0": {"accelerator": "H100"}, "island-1": {"accelerator": "A100", "batch_size": 16}},
    },
    "train": {"seq_len": 32},
    "model": {"args": {"dim": 32, "num_layers": 1, "num_heads": 2, "mlp_dim": 64, "seq_len_max": 32}},
    "protocol": {"sync_every": 4, "num_fragments": 4, "overlap_steps": 2, "quorum": 3},
}
ASSUMED = Assumptions(step_s=1.0, round_trip_ms=10.0)
STATUS: dict[str, Any] = {
    "global_step": 100,
    "wall_s": 110.0,
    "eval_loss": 2.04,
    "alarms": [],
    "wire": {"up_bytes": 100, "down_bytes": 100},
    "learners": [
        {"learner": f"island-{number}", "local_step": 102, "participation": 0.97, "restarts": number}
        for number in (0, 1, 2)
    ],
}


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return parse(SETTINGS, "test")


@pytest.fixture(scope="module")
def case(config: RunConfig) -> Case:
    return case_of(config, ASSUMED)


def judged(case: Case, facts: RunFigures, goodput: float = 1.0) -> dict[str, tuple[str, bool] | None]:
    return {each.name: each.judge(facts) for each in gates(case, "CONFIG", "RUN", goodput, link_given=False)}


def test_stages() -> None:
    assert [stage_of(sites)[::2] for sites in (2, 3, 4, 6, 7, 8)] == [(1, 6), (1, 6), (2, 8), (2, 8), (3, 14), (3, 16)]


def test_another_number_of_islands_keeps_their_batches(config: RunConfig) -> None:
    more, fewer = with_sites(config, 4), with_sites(config, 2)
    assert [more.island(name).batch_size for name in more.islands.names] == [8, 16, 8, 8]
    assert more.place("island-3") == config.place("island-0"), "an island that the config lacks is like its first one"
    assert fewer.islands.names == ("island-0", "island-1") and fewer.protocol.quorum == 2
    assert more.train.batch_size == 40 and with_sites(config, 3) is config


def test_a_good_run_passes(case: Case) -> None:
    loss = 2.04 / (1 + distance(3, case.parameters))
    found = judged(case, RunFigures(STATUS, 0, (loss, 101)))
    assert found.pop("link") is None and found.pop("syncer") is None, "doctor measures links"
    assert all(result is not None and result[1] for result in found.values()), found
    assert found["rounds"] == ("0.980 (100 global steps in 102 inner steps)", True)


@pytest.mark.parametrize(
    ("gate", "changes", "said"),
    [
        ("rounds", {"global_step": 96}, "0.941"),
        ("participation", {"learners": [{**STATUS["learners"][0], "participation": 0.94}]}, "island-0 0.94"),
        ("loss", {"eval_loss": 2.2}, "+10.0% (2.2000 against 2.0000)"),
        ("cost", {"wire": {"up_bytes": 10**9, "down_bytes": 0}}, "of the bar for 3 joins and 3 returns"),
        ("return", {"learners": STATUS["learners"][:1]}, "0 returns"),
        ("alarms", {"alarms": [{"alarm": "drift"}]}, "drift"),
        ("audit", {}, "2"),
    ],
)
def test_each_gate_stops_a_bad_run(case: Case, gate: str, changes: dict[str, Any], said: str) -> None:
    found = judged(case, RunFigures({**STATUS, **changes}, 2, (2.0, 100)))[gate]
    assert found is not None and said in found[0] and not found[1]


def test_what_a_run_lacks_is_not_measured(case: Case) -> None:
    empty = {**STATUS, "global_step": 0, "learners": [], "eval_loss": None}
    found = judged(case, RunFigures(empty, None, (2.0, 100)))
    assert {name for name, result in found.items() if result is None} == found.keys() - {"alarms"}
    other = judged(case, RunFigures(STATUS, 0, (2.0, 90)))
    assert other["loss"] is None, "losses after more or fewer steps say nothing"


def test_bars_by_hand(config: RunConfig) -> None:
    case = case_of(config, replace(ASSUMED, step_s=0.0, syncer_link_gbit_per_s=1.0))
    step_s = {name: kind.step_s for kind in case.kinds for name in kind.outline.kind.names}
    found = {each.name: each for each in gates(case, "CONFIG", "RUN", 0.9, link_given=True)}
    # A100s have 312 of the 989 TFLOP/s of an H100, and island-1 twice the batch.
    slow = step_s["island-0"] / step_s["island-1"]
    assert slow == pytest.approx(312 / 989 / 2, rel=1e-3)
    assert f"island-1 {0.95 * 0.9 * slow:.2f}" in found["participation"].bar
    wire = case.kinds[0].outline.links
    planned = max(sum(wire.up_bytes), sum(wire.down_bytes)) * 8e-9 / (4 * step_s["island-0"])
    assert f"at least {3 * planned / 0.7 / 0.92:.3g} Gbit/s" in found["syncer"].bar
    assert found["syncer"].given == ("the given link of 1 Gbit/s", 3 * planned / 0.7 / 0.92 <= 1)
    assert found["link"].given is not None


def test_mistakes(config: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="RUN has 3 islands, but --sites is 4; judge it with --sites 3"):
        stage(config, "CONFIG", 4, ASSUMED, "RUN", RunFigures(STATUS, 0, None))
    with pytest.raises(ValueError, match=r"has no summary.json; give the folder of a finished run"):
        facts_of("host:1", str(tmp_path), lambda run: STATUS)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path, base = tmp_path / "config.yaml", tmp_path / "base"
    path.write_text(json.dumps(SETTINGS), encoding="utf-8")
    base.mkdir()
    (base / "summary.json").write_text(json.dumps({"eval_loss": 1.9, "global_steps": 100}), encoding="utf-8")
    monkeypatch.setattr("diloco_jax.runtime.records.status.read_status", lambda run, *_, **__: STATUS)
    asked = ["stage", str(path), "--step-s", "1", "--price-per-chip-hour", "2", "--run", "host:1"]
    assert main([*asked, "--baseline", str(base)]) == 1, "the loss is too high"
    said = capsys.readouterr().out
    assert "3 sites, in the stage of 2 to 3 sites" in said and "planned like island-0" in said
    assert f"diloco doctor {path} --island island-0" in said and "not passed: +7.4% (2.0400 against 1.9000)" in said
    assert "3 not measured, 5 passed, 1 not passed: add no site yet" in said
    assert "the next stage, with 6 sites:" in said and "per day 144.00 for chips" in said
    assert "diloco drain island-2 host:1" in said
