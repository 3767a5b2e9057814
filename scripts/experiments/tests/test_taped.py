"""Schedules of experiments: their time, goodput and overlap, without training."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from diloco_jax.settings.run import RunConfig
from experiments.taped import flight_steps, simulate, trained

STEPS, SEQUENCES, SEQ_LEN = 240, 8, 16


def config_of(**protocol: Any) -> RunConfig:
    """Return a config of four islands with two sequences each."""
    values = {"sync_every": 6, "num_fragments": 6} | protocol
    base = RunConfig()
    train = type(base.train)(steps=0, tokens=STEPS * SEQUENCES * SEQ_LEN, batch_size=SEQUENCES, seq_len=SEQ_LEN)
    optimizer = type(base.optimizer)(warmup_steps=20)
    return RunConfig(train=train, optimizer=optimizer, protocol=type(base.protocol)(**values))


def simulated(folder: Path, schedule: Mapping[str, Any], **protocol: Any) -> dict[str, float]:
    tapes = folder / f"tapes-{len(list(folder.iterdir()))}"
    found = simulate(config_of(**protocol), schedule, 0, tapes)
    return {**found, "flight_steps": flight_steps(tapes)}


def test_learners_that_join_later_shorten_the_run(tmp_path: Path) -> None:
    plain = {"speed_spread": 0.0, "step_noise": 0.02, "after": 0.5}
    alone = simulated(tmp_path, plain)["virtual_s"]
    assert alone == pytest.approx(1.01 * STEPS, rel=0.02)
    for share in (0.5, 1.0):
        ratio = simulated(tmp_path, plain | {"extra": share})["virtual_s"] / alone
        assert ratio == pytest.approx(0.5 + 0.5 / (1 + share), abs=0.03)


def test_more_learners_do_not_warm_up_longer(tmp_path: Path) -> None:
    config = config_of()
    simulate(config, {"extra": 1.0}, 0, tmp_path / "tapes")
    found = trained(config, tmp_path / "tapes")
    assert found.islands.count == 8 and found.optimizer.warmup_steps == 10
    assert found.island("").batch_size == config.island("").batch_size == 2
    assert found.budget.step_tokens == 2 * config.budget.step_tokens, "so half of the steps have as many tokens"


def test_delays_are_steps_in_flight(tmp_path: Path) -> None:
    near = simulated(tmp_path, {"delay": 0.02}, sync_every=12, num_fragments=12)
    far = simulated(tmp_path, {"delay": 1.2}, sync_every=12, num_fragments=12, overlap_steps=6)
    waits = simulated(tmp_path, {"delay": 0.02}, overlap_steps=0, quorum=4, grace_steps_max=0.0)
    assert waits["flight_steps"] == 0 and 0.5 < near["flight_steps"] < 1.5 and 4 < far["flight_steps"] < 6.5


def test_waiting_learners_lose_no_step_on_quick_links_and_little_time_on_slow_ones(tmp_path: Path) -> None:
    quick, slow = {"delay": 0.025}, {"delay": 0.5}
    never, waits = (simulated(tmp_path, quick, wait_steps=steps) for steps in (0.0, 0.5))
    assert never["flight_steps"] > 1 and waits["flight_steps"] < 0.05
    # Two round trips and a merge in each step, and the slowest learner's pace.
    assert 1.15 < waits["virtual_s"] / never["virtual_s"] < 1.2
    never, waits = (simulated(tmp_path, slow, wait_steps=steps) for steps in (0.0, 0.5))
    assert waits["virtual_s"] < 1.01 * never["virtual_s"]


def test_failing_chips_cost_goodput(tmp_path: Path) -> None:
    never = simulated(tmp_path, {"hardware": {"mtbi_chip_s": math.inf}})["goodput"]
    often = simulated(tmp_path, {"hardware": {"step_s": 4.6}, "chips": 1.2e6})["goodput"]
    assert never > 0.99 and 0.5 < often < 0.95


def test_steps_in_flight_are_counted_from_the_tape(tmp_path: Path) -> None:
    (tmp_path / "tapes").mkdir()
    lines = [["begin", "a", 1, 1], ["step", 1], ["sent", 0, 7, 1], ["step", 2], ["step", 3], ["adopt", 0, 7, 1, 5, 7]]
    # The learner sent no value for the last round.
    lines += [["sent", 1, 8, 3], ["adopt", 1, 8, 1, 5, 8], ["adopt", 2, 9, 1, 5, 9]]
    (tmp_path / "tapes" / "a.1.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    assert flight_steps(tmp_path) == 1.0


def test_an_island_without_a_connection_trains_on_and_a_stopped_one_does_not(tmp_path: Path) -> None:
    steps = {}
    for kind in ("partition", "crash"):
        simulated(tmp_path, {"away": {"kind": kind, "after": 0.25, "steps": 100}})
        tapes = max(tmp_path.iterdir(), key=lambda folder: folder.name) / "tapes"
        lines = [line for path in tapes.glob("island-3.*.jsonl") for line in path.read_text("utf-8").splitlines()]
        steps[kind] = sum(line.startswith('["step"') for line in lines)
    assert steps["partition"] - steps["crash"] == pytest.approx(100, abs=20)


def test_an_unknown_setting_of_a_schedule_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the schedule has 'dealy'; use after, away, chips, delay"):
        simulate(config_of(), {"dealy": 1.0}, 0, tmp_path)
