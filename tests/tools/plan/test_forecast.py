"""The forecast of `diloco plan` for a config, against payloads, programs and arithmetic by hand."""

import gc
import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml

from diloco_jax.cli import main as cli
from diloco_jax.core.codec import Format, encode
from diloco_jax.core.fragments import plan_fragments, take
from diloco_jax.protocol.pacing import OVERLAP_STEPS_MAX
from diloco_jax.runtime.island.host import PLACED_MAX
from diloco_jax.settings.text import load, parse
from diloco_jax.sim.goodput.settings import Assumptions
from diloco_jax.tools.budget.memory import anchor_bytes, chip_memory, held_elements, syncer_memory
from diloco_jax.tools.plan.advice import advise
from diloco_jax.tools.plan.case import Case, case_of
from diloco_jax.tools.plan.forecast import (
    expected_goodput,
    forecast,
    link_state,
    rate_rows,
    recovery,
    syncer_load,
    wire_bytes,
)
from diloco_jax.tools.plan.report import describe
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.sharding import MeshConfig

CONFIGS = Path(__file__).parents[3] / "configs"
SETTINGS: dict[str, Any] = {
    "name": "small",
    "islands": {"count": 4, "devices": 4, "mesh": {"fsdp": 4}, "batch_size": 8},
    "train": {"seq_len": 32},
    "model": {"args": {"dim": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "mlp_dim": 130,
                       "seq_len_max": 32}},
    "protocol": {"sync_every": 8, "num_fragments": 4, "overlap_steps": 2, "quorum": 1},
}  # fmt: skip
QUIET = Assumptions(step_s=1.0)
MODULE = "diloco_jax.tools.plan.forecast"
pytestmark = pytest.mark.usefixtures("few_failures")


def small(**changes: Any) -> Case:
    """Return a case of the small config with changed sections and the assumptions `given`."""
    given = changes.pop("given", QUIET)
    sections = {key: {**SETTINGS.get(key, {}), **value} for key, value in changes.items()}
    return case_of(parse({**SETTINGS, **sections}, "test"), given)


def test_bytes_are_those_of_payloads() -> None:
    case = small()
    random = np.random.default_rng(0)
    values = {path: random.standard_normal(shape, np.float32) for path, shape in case.blueprint.shapes.items()}
    found = wire_bytes(case)
    ways: tuple[Format, ...] = ("float32", "bfloat16", "int8", "int4", "int2", "ternary")
    for way in ways:
        sizes = [len(encode(take(values, fragment), way)) for fragment in case.run.fragments]
        assert found[way]["round_max"] == max(sizes)
        assert found[way]["round_mean"] == sum(sizes) / 4
        assert found[way]["per_step"] == sum(sizes) / 8
        rounds = case.rounds(way, way)
        assert (rounds.up_bytes, rounds.down_total_bytes) == (max(sizes), sum(sizes))
    parameters = sum(value.size for value in values.values())
    assert found["data_parallel"] == {"gradient": 2 * parameters, "per_step": 2 * parameters * 1.5}


def test_periods_by_class_move_what_their_turns_move() -> None:
    case = small(protocol={"sync_every": {"mlp": 4, "rest": 8}, "num_fragments": 24, "sync_later": {500: 16}})
    counts = case.run.plan.counts
    sizes = [4 * fragment.num_elements for fragment in case.run.fragments]
    mlp, rest = sum(sizes[: counts[0]]), sum(sizes[counts[0] :])
    found = wire_bytes(case)["float32"]
    assert found["per_step"] == mlp / 4 + rest / 8, "before step 500, when they move the most"
    assert found["round_mean"] == (2 * mlp + rest) / (2 * counts[0] + counts[1])
    assert found["peak_to_mean"] == max(sizes) / (mlp / 4 + rest / 8)
    rounds = case.rounds("float32", "float32")
    assert rounds.planned_gbit_per_s == pytest.approx(found["per_step"] * 8e-9)  # of one second
    text = describe(forecast(case, advise(case)))
    assert f"H = 4 (mlp), 8 (rest), from step 500 on 16, P = {counts[0]} (mlp), {counts[1]} (rest), tau" in text
    assert f"{sum(counts)} fragments, fewer than protocol.num_fragments = 24" in text
    narrow = small(
        protocol={"sync_every": {"mlp": 4, "rest": 8}, "num_fragments": 24, "overlap_steps": 2},
        given=replace(QUIET, link_gbit_per_s=3e-5),
    )
    (longer,) = [entry["value"] for entry in advise(narrow) if entry["setting"] == "protocol.sync_every"]
    assert longer["rest"] == 2 * longer["mlp"] > 8


@pytest.mark.parametrize(
    ("up", "mesh", "adopt"),
    [
        ("int4", {"fsdp": 4}, "overwrite"),
        ("int8", {"data": 2, "tensor": 2}, "overwrite"),
        ("bfloat16", {"fsdp": 4}, "rebase"),
        ("float32", {"data": 2, "tensor": 2}, "overwrite"),
    ],
)
def test_chip_memory_is_that_of_the_programs(
    up: Format, mesh: dict[str, int], adopt: str, quick_compiler: None
) -> None:
    """Compare the forecast of held bytes, made without devices, with arguments and results of compiled programs."""
    case = small(wire={"up": up}, islands={"mesh": mesh}, adopt={"mode": adopt})
    config, blueprint = case.config, case.blueprint
    real = Blueprint(config.model, config.optimizer, MeshConfig(**mesh), jax.devices()[:4], seed=0)
    programs = real.exchange(up, adopt == "rebase").programs(case.run.fragments)
    staging = [compiled for kind, _, compiled in programs if kind == "stage"]
    anchors, residuals = (
        [shard_bytes(each.in_avals[0][place], each.input_shardings[0][place]) for each in staging] for place in (1, 2)
    )
    staged = [shard_bytes(each.out_info, each.output_shardings) for each in staging]
    found = chip_memory(case.run, blueprint)
    shapes, shardings = real.state_shapes, real.state_shardings
    assert found.parameters == shard_bytes(shapes.params, shardings.params)
    assert found.parameters + found.optimizer == shard_bytes(shapes, shardings)
    assert (found.anchors, found.residuals) == (sum(anchors), sum(residuals))
    assert anchors == [anchor_bytes(blueprint, fragment) for fragment in case.run.fragments]
    assert found.arriving == sum(sorted(anchors)[-PLACED_MAX:]), "values that wait for their adoption"
    # tau P / H + 1 = 2 fragments are staged at once.
    assert found.staged == sum(sorted(staged)[-2:])


def shard_bytes(shapes: Any, shardings: Any) -> float:
    """Return the bytes of one chip's shards of all arrays of a tree."""
    leaves = jax.tree.leaves(shardings, is_leaf=lambda leaf: isinstance(leaf, jax.sharding.Sharding))
    return sum(
        math.prod(sharding.shard_shape(tuple(leaf.shape))) * np.dtype(leaf.dtype).itemsize
        for leaf, sharding in zip(jax.tree.leaves(shapes), leaves, strict=True)
    )


def test_memory_of_the_syncer_by_hand() -> None:
    case = small(outer={"momentum": 0.9}, protocol={"anchor_history": 3})
    found = syncer_memory(case.run)
    assert found.values == found.outer_momentum == found.left_out_by_rounding == 4 * case.parameters
    down, largest = case.run.payload_bytes("int4"), max(each.num_elements for each in case.run.fragments)
    assert (found.steps, found.older_values) == (2 * sum(down), 0), "between protocol.anchor_history versions"
    assert found.fragment_in_merge == 4 * 4 * largest, "three arrays, and what a late value has missed"
    assert found.payloads == 2 * 4 * wire_bytes(case)["int4"]["round_max"], "tau rounds of all learners"


@pytest.mark.parametrize(
    ("mesh", "hosts", "share", "passed"),
    [
        ({"fsdp": 4}, 2, 0.5, 0),
        ({"data": 4}, 2, 1, 0.5),
        ({"data": 4}, 4, 1, 0.75),
        ({"data": 2, "fsdp": 2}, 2, 1, 0.5),
        ({"data": 2, "fsdp": 2}, 4, 0.5, 0.25),
    ],
)
def test_a_host_of_several_holds_what_its_devices_hold(
    mesh: dict[str, int], hosts: int, share: float, passed: float
) -> None:
    """Hosts have equally many of the four devices, in the order of the mesh."""
    blueprint = small(islands={"mesh": mesh}).blueprint
    matrix = min(path for path, shape in blueprint.shapes.items() if shape == (64, 130))
    (fragment,) = plan_fragments({matrix: (64, 130)}, 1).fragments
    assert held_elements(blueprint, fragment, hosts) == (share * 64 * 130, passed * 64 * 130)
    assert held_elements(blueprint, fragment, 1) == (64 * 130, 0)


def test_arrival_by_hand() -> None:
    copied = {"hosts": 2, "mesh": {"data": 4}}
    case = small(islands=copied, given=replace(QUIET, arrival_ns=4e6, place_ns=1e6, island_s_per_gb=0.0))
    # Four threads read; then one copies to the devices.
    assert case.arrive_s == pytest.approx(2e-3 * max(each.num_elements for each in case.run.fragments))
    assert case.arrive_all_s == pytest.approx(2e-3 * case.parameters)
    without = replace(case.rounds(), arrive_s=0.0)
    assert case.rounds().age_s(1.0) - without.age_s(1.0) == pytest.approx(case.arrive_s)
    passing = small(islands=copied, given=replace(QUIET, arrival_ns=0.0, place_ns=0.0, island_s_per_gb=1e9))
    # Each host gets a half from the syncer, and passes it on.
    assert passing.arrive_s == pytest.approx(max(passing.run.payload_bytes("int4")) / 2, rel=0.01)
    # Adam's moments, to one other host.
    back = recovery(passing)
    assert back["state_arrives"] and back["state_spread_s"] == pytest.approx(2 * 4 * passing.parameters, rel=0.01)
    sharded = small(islands={"hosts": 2, "mesh": {"fsdp": 4}}, given=passing.assumed)
    assert recovery(sharded)["state_spread_s"] == pytest.approx(back["state_spread_s"] / 2, rel=0.01)


def test_a_site_with_two_learners_needs_twice_as_much() -> None:
    four, two = (
        {(row["wire"], row["utilisation"]): row["gbit_per_s"] for row in rate_rows(small(given=given))}
        for given in (QUIET, replace(QUIET, sites=2))
    )
    assert two["int4", 0.9] == pytest.approx(2 * four["int4", 0.9])
    assert two["data_parallel", 0.9] == pytest.approx(four["data_parallel", 0.9] * 1.0 / 1.5)


def test_where_no_rate_is_enough_there_is_none() -> None:
    # Versions and reports about them take 2.5 s, and gamma of the 2 s between two rounds is for them.
    rows = rate_rows(small(given=replace(QUIET, round_trip_ms=2500.0)))
    never = [row for row in rows if row["gbit_per_s"] is None]
    assert {(row["wire"], row["utilisation"]) for row in never} == {
        (wire, share)
        for wire in ("float32", "bfloat16", "int8", "int4", "int2", "ternary")
        for share in (0.75, 0.9, 0.95, 0.99)
    }


def test_a_round_is_the_sum_of_its_parts() -> None:
    given = replace(QUIET, round_trip_ms=100.0, link_gbit_per_s=1e-3, step_s=0.3)
    link = link_state(small(given=given, islands={"hosts": 2, "mesh": {"data": 4}}))
    parts = [link[f"{name}_s"] for name in ("reports", "up", "merge", "down", "arrive")]
    assert min(parts) > 0 and link["round_s"] == pytest.approx(sum(parts))
    assert link["adopt_s"] == 0.15, "half a step until the gap between two steps"
    assert link_state(small(given=given, protocol={"overlap_steps": 0, "quorum": 4}))["adopt_s"] == 0


@pytest.mark.parametrize(
    ("protocol", "in_steps"),
    [
        ({}, 1.0),
        # Fragments take 60 ms in this case, too long for a wait of 50 ms.
        ({"wait_steps": 0.05}, 1.0),
        ({"overlap_steps": 0, "quorum": 4}, None),
    ],
)
def test_times_data_parallel_by_hand(protocol: dict[str, Any], in_steps: float | None) -> None:
    # A forward pass of 1/3 s, and an all-reduce of 5/3 s among four sites: data parallel computes half of the time.
    rate = 8 * 2 * small().parameters * 1.5 / (5 / 3) / 0.92e9
    link = link_state(small(given=replace(QUIET, link_gbit_per_s=rate), protocol=protocol))
    assert link["data_parallel_utilisation"] == pytest.approx(0.5)
    assert link["times_data_parallel"] == pytest.approx(2 * (in_steps or link["utilisation"]))
    assert (link["times_data_parallel"] < 1.9) == (in_steps is None), "in lockstep islands wait"


def test_load_of_the_syncer_by_hand() -> None:
    case = small(given=replace(QUIET, step_s=2.0, syncer_ms_per_mb=1e6, syncer_gb_per_s=1e-6, merge_ns=1e9))
    up = wire_bytes(case)["int4"]["round_mean"]
    load = syncer_load(case)
    # 4 rounds close in 8 steps of 2 s.
    assert load["rounds_per_s"] == 0.25
    assert load["cpu_s_per_round"] == pytest.approx(1000 * 4 * up / 1e6)
    assert load["busy"] == pytest.approx(4 * 4 * up / 16 / 1e3)
    largest = max(fragment.num_elements for fragment in case.run.fragments)
    assert load["merge_s"] == pytest.approx(largest * 4 / 16)


@pytest.mark.parametrize(("gbit_per_s", "half"), [(8e-4, False), (8e-5, True)])
def test_recovery_by_hand(gbit_per_s: float, half: bool) -> None:
    given = replace(QUIET, link_gbit_per_s=gbit_per_s, round_trip_ms=0.0, restart_s=7.0)
    case = small(given=given, protocol={"recovery_turns": 1})
    rate = 0.92e9 * gbit_per_s / 8
    back = recovery(case)
    # An island saves Adam's moments, and the syncer the parameters.
    state = 2 * 4 * case.parameters
    assert back["global_model_s"] == pytest.approx(4 * case.parameters / rate + case.arrive_all_s)
    rounds = case.rounds("int4", "int4").up_total_bytes / 8
    assert (rate - rounds < rate / 2) == half, "rounds leave the donor less than half of its link"
    assert back["state_s"] == pytest.approx(state / (rate / 2 if half else rate - rounds), rel=0.01)
    assert not back["state_arrives"]
    assert back["seconds"] == pytest.approx(7 + back["global_model_s"] + 3 * 8)
    alone = recovery(small(protocol={"recover_from_peers": False}, given=given))
    assert alone["seconds"] == pytest.approx(7 + back["global_model_s"]) and not alone["state_bytes"]
    (single,) = {recovery(small(islands={"count": 1}, given=given))["state_bytes"]}
    assert not single, "one learner has no neighbour"


def test_a_state_takes_turns_on_a_narrow_link_and_is_limited_by_its_parts_on_a_long_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = replace(QUIET, link_gbit_per_s=8e-4, round_trip_ms=0.0)
    state = recovery(small(given=given))["state_s"]
    part_bytes = 2_000
    monkeypatch.setattr(f"{MODULE}.STATE_PART_BYTES", part_bytes)
    fast = replace(given, link_gbit_per_s=8.0, round_trip_ms=200.0)
    case = small(given=fast)
    assert 2 * 4 * case.parameters > 4 * part_bytes, "the state has more parts than are on their way at least"
    # 4 parts take 0.09 s on each link of 92 kB/s.
    assert recovery(small(given=given))["state_s"] == state
    monkeypatch.setattr(f"{MODULE}.PART_S", 0.1)
    assert recovery(small(given=given))["state_s"] == pytest.approx(1.3 * state)
    monkeypatch.setattr(f"{MODULE}.PART_S", 1.0)
    assert recovery(case)["state_s"] == pytest.approx(2 * 4 * case.parameters / (64 * part_bytes / 0.4), rel=0.01)


def test_chips_are_what_is_paid_for_not_devices() -> None:
    case = small(islands={"devices": "auto", "topology": "tpu7x:2x2x1", "mesh": {"fsdp": -1}})
    assert case.chips == 4 * 4 and case.kinds[0].outline.kind.chips == 8


def test_goodput_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a rare failure costs the return of the slice, 64 s on average, and the recovery of its learner."""
    # A mean needs many failures.
    monkeypatch.undo()
    case = small(given=replace(QUIET, chips=1000, mtbi_years=0.1))
    found = expected_goodput(case, 100.0)
    failures_per_s = 250 / (0.1 * 31_536_000)
    assert 1 - found["goodput"] == pytest.approx(failures_per_s * (64.5 + 100), rel=0.1)
    # All four islands seldom fail together.
    assert found["uptime"] == pytest.approx(1, abs=1e-4)
    assert found["rigid_goodput"] < found["goodput"]
    assert found["hours_between_failures"] == pytest.approx(0.876)
    with pytest.raises(ValueError, match="3 chips cannot be cut into 4 slices"):
        expected_goodput(small(given=replace(QUIET, chips=3)), 1.0)
    with pytest.raises(ValueError, match="--slices is 2"):
        expected_goodput(small(given=replace(QUIET, slices=2)), 1.0)


Changes = dict[str, Any]


def changes(case: Case) -> Changes:
    """Return the settings that the advice changes."""
    return {each["setting"]: each["value"] for each in advise(case) if each["change"]}


def test_a_good_link_changes_nothing() -> None:
    advice = advise(small())
    assert not changes(small())
    assert [each["setting"] for each in advice] == [
        "protocol.sync_every", "protocol.num_fragments", "protocol.overlap_steps", "protocol.wait_steps", "wire.up",
        "wire.down", "transport.stripes", "optimizer.learning_rate",
    ]  # fmt: skip
    assert all(each["why"] for each in advice)


def test_a_run_whose_islands_come_and_go_is_advised_a_budget_of_tokens() -> None:
    case = small(islands={"least": 1})
    train, count = case.config.train, case.config.islands.count
    assert changes(case) == {"train.tokens": train.steps * train.batch_size * train.seq_len, "train.steps": 0}
    (rate,) = (each["why"] for each in advise(case) if each["setting"] == "optimizer.learning_rate")
    assert f"with 1 to {count} islands a global step has {train.batch_size // count} to {train.batch_size} seq" in rate
    assert not changes(small(islands={"least": 1}, train=changes_of_train(case)))


def changes_of_train(case: Case) -> Changes:
    """Return the advised settings of the section train, without its name."""
    return {name.removeprefix("train."): value for name, value in changes(case).items()}


@pytest.mark.parametrize("round_trip_ms", [100.0, 300.0])
def test_what_waiting_costs(round_trip_ms: float) -> None:
    given = replace(QUIET, round_trip_ms=round_trip_ms, tcp_window_mb=64.0)
    case = small(protocol={"wait_steps": 0.5, "num_fragments": 4, "overlap_steps": 3}, given=given)
    found, rounds, rate = link_state(case)["wait"], case.rounds(), case.usable_gbit_per_s()
    # Two round trips: report and request, value and new version. Four of eight steps have a fragment, each of a second.
    moved_s = (rounds.up_bytes + rounds.down_bytes) / (rate * 1e9 / 8)
    needs_s = 2e-3 * round_trip_ms + rounds.merge_s + rounds.arrive_s + moved_s
    assert case.step_s == 1.0 and found["needs_s"] == pytest.approx(needs_s) and found["limit_s"] == 0.5
    text = describe(forecast(case, advise(case)))
    if round_trip_ms == 100.0:
        assert found["per_step_s"] == pytest.approx(needs_s / 2) and not changes(case)
        assert f"islands wait {needs_s / 2:.3g} s per step for fragments" in text
        link = link_state(case)
        times = 1 / (1 + needs_s / 2) / link["data_parallel_utilisation"]
        assert link["times_data_parallel"] == pytest.approx(times)
        assert f"islands train {times:.1f} times as many tokens in the same time" in text
    else:
        assert found["per_step_s"] == 0 and changes(case) == {"protocol.wait_steps": 0.0}
        assert "nobody waits for it" in text and "steps wait a little" in text
    assert "steps never wait" in describe(forecast(small(), advise(small())))


@pytest.mark.parametrize("wait_steps", [0.0, 0.5])
def test_no_longer_wait_is_advised_than_a_config_takes(wait_steps: float) -> None:
    given = replace(QUIET, step_s=0.01, round_trip_ms=100.0, tcp_window_mb=64.0)
    case = small(protocol={"wait_steps": wait_steps}, given=given)
    (why,) = (each["why"] for each in advise(case) if each["setting"] == "protocol.wait_steps")
    assert "a wait of 20 steps, more than wait_steps may be (10)" in why


def narrow_syncer() -> Changes:
    """Return a rate above what all learners send in int4: less room than is advised, and enough for int2."""
    return {"syncer_gb_per_s": 1.2 * syncer_load(small())["gbit_per_s_each_way"] / 8}


LINKS: list[tuple[Changes, Changes | Callable[[], Changes], set[str]]] = [
    # Changes of the config, the assumptions, and settings that the advice must change.
    ({}, {"link_gbit_per_s": 6e-5}, {"wire.up", "wire.down"}),
    ({}, {"link_gbit_per_s": 3e-5}, {"protocol.sync_every"}),
    # One fragment needs 8 steps for each round.
    ({"protocol": {"num_fragments": 1}}, {"link_gbit_per_s": 5.8e-5}, {"protocol.num_fragments"}),
    # One step of overlap leaves no time for the grace window.
    ({"protocol": {"overlap_steps": 1}}, {}, {"protocol.overlap_steps"}),
    ({"wire": {"up": "float32", "down": "float32"}}, {"link_gbit_per_s": 4e-4}, {"wire.up", "wire.down"}),
    ({}, {"round_trip_ms": 1500.0, "tcp_window_mb": 64.0}, {"protocol.overlap_steps"}),
    ({"protocol": {"overlap_steps": 0, "quorum": 4}}, {}, {"protocol.overlap_steps"}),
    ({}, {"step_s": 1e-3, "round_trip_ms": 1.0, "tcp_window_mb": 0.003}, {"transport.stripes"}),
    ({}, narrow_syncer, {"wire.up", "wire.down"}),
    ({"transport": {"payload_bytes_max": 65536}}, {}, {"transport.payload_bytes_max"}),
    ({"protocol": {"pull_timeout_s": 1.0}}, {"step_s": 4.0}, {"protocol.pull_timeout_s"}),
    ({"protocol": {"recovery_turns": 1}}, {"link_gbit_per_s": 8e-4}, {"protocol.recovery_turns"}),
]


@pytest.mark.parametrize(("config", "given", "expected"), LINKS)
def test_advice_is_followed_once(
    config: Changes, given: Changes | Callable[[], Changes], expected: set[str], tmp_path: Path
) -> None:
    """Check that a config with the advice is valid, has rounds that return in time, and gets no more advice."""
    assumed = replace(QUIET, **(given() if callable(given) else given))
    case = small(**config, given=assumed)
    wanted = changes(case)
    assert expected <= set(wanted), wanted
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**SETTINGS, **{k: {**SETTINGS.get(k, {}), **v} for k, v in config.items()}}))
    printed = describe(forecast(case, advise(case))).partition("change:\n")[2].partition("compare:\n")[0].splitlines()
    words = [word for line in printed if line.startswith("  --") for word in line.partition("(now")[0].split()]
    assert words[::2] == [f"--{name}" for name in wanted], "as people copy it"
    after = case_of(load(path, words), assumed)
    assert not changes(after), words
    state = link_state(after)
    assert state["utilisation"] == 1.0 and state["age_s"] <= state["overlap_s"]


def test_latency_alone_does_not_raise_h() -> None:
    """Check that steps shorter than the round trip get overlap as advice, because rarer rounds do not help."""
    found = changes(small(given=replace(QUIET, step_s=0.05, round_trip_ms=400.0, tcp_window_mb=64.0)))
    assert found.keys() == {"protocol.overlap_steps"}
    # 1.5 x 0.4 s are 12 steps; reports need another half step.
    assert found["protocol.overlap_steps"] >= 13


def test_no_more_overlap_is_advised_than_a_config_takes() -> None:
    assert changes(small(given=replace(QUIET, step_s=1e-6)))["protocol.overlap_steps"] == OVERLAP_STEPS_MAX


def test_large_configs_allocate_nothing() -> None:
    # Arrays of earlier tests may be freed at any time.
    gc.collect()
    before = len(jax.live_arrays())
    for name in ("gemma_12b_4x_v5p", "mixed_v5p_v6e"):
        case = case_of(load(CONFIGS / "tpu" / f"{name}.yaml"), Assumptions())
        result = forecast(case, advise(case))
        assert len(describe(result)) > 2000
    assert len(jax.live_arrays()) == before
    assert [each["step_s"] for each in result["run"]["steps"]] == pytest.approx([0.73, 0.73], rel=0.01)
    assert all("v5p" in each["from"] or "v6e" in each["from"] for each in result["run"]["steps"])
    assert {row["wire"] for row in result["rows"]} == {
        "data_parallel",
        "float32",
        "bfloat16",
        "int8",
        "int4",
        "int2",
        "ternary",
    }
    assert result["memory"]["islands"][1]["hbm_limit_bytes"] == 32e9


def test_cost_where_prices_are_given() -> None:
    case = small(given=replace(QUIET, price_per_chip_hour=2.0, price_per_egress_gb=0.1))
    cost = forecast(case, [])["cost"]
    # Four learners send and receive.
    per_step = 2 * 4 * wire_bytes(case)["int4"]["per_step"]
    assert cost["egress_gb_per_day"] == pytest.approx(per_step * 86400 / 1e9)
    assert cost["egress_per_day"] == pytest.approx(cost["egress_gb_per_day"] * 0.1)
    assert cost["chips_per_day"] == 24 * 16 * 2.0
    assert "chips_per_day" not in forecast(small(), [])["cost"]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Return exit status, output and errors of `diloco plan`."""
    platforms = os.environ["JAX_PLATFORMS"]
    try:
        code = cli.main(["plan", *words])
    # A wrong override ends the parser.
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        os.environ["JAX_PLATFORMS"] = platforms
    said = capsys.readouterr()
    return code, said.out, said.err


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(CONFIGS / "quickstart.yaml")
    code, out, _ = run(capsys, config, "--json", "--step-s", "0.01", "--round-trip-ms", "200", "--train.steps", "7")
    result = json.loads(out)
    assert code == 0 and len(result["rows"]) == 35
    assert {"memory", "advice", "latency", "syncer", "recovery", "goodput", "cost", "link", "bytes"} <= result.keys()
    assert result["rows"][-1]["gbit_per_s"] is None, "200 ms do not fit into two steps of 10 ms at any rate"
    assert result["rows"][-1]["step_s"] == 0.01
    code, out, _ = run(capsys, config, "--round-trip-ms", "25", "--price-per-egress-gb", "0.1")
    assert code == 0 and "assumed, as no chips are named" in out and "traffic costs" in out
    assert "  25 " in out and "nothing to change (--why prints reasons)" in out and "keep:" not in out
    assert "compare:\n  --optimizer.learning_rate 0.003\n" in out and "optimizer.learning_rate:" not in out
    _, out, _ = run(capsys, config, "--why")
    assert "keep:\n  --protocol.sync_every" in out and "nothing to change" not in out


def test_the_words_are_those_of_the_config(capsys: pytest.CaptureFixture[str]) -> None:
    """A config for CPUs has islands and devices; chips are those of a slice, or of --chips."""
    config = str(CONFIGS / "quickstart.yaml")
    _, out, _ = run(capsys, config)
    assert "4 islands at 4 sites, 4 devices\n" in out and "one of 4 devices fails" in out
    assert "device memory " in out and "learner" not in out
    _, out, _ = run(capsys, config, "--chips", "8")
    assert "4 islands at 4 sites, 8 chips\n" in out and "one of 8 chips fails" in out
    _, out, _ = run(capsys, config, "--islands.devices", "auto", "--islands.topology", "v6e:2x2")
    assert "16 chips\n" in out and "chip memory   " in out and "device memory" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("missing.yaml", "cannot be read"),
        ("quickstart --mtbi-years 1e-12", "--mtbi-years is 1e-12, less than a second"),
        ("quickstart --slices 2000000", "--slices is 2000000; use at most 1e+06"),
        ("quickstart --sites 9", "only 4 islands"),
        ("quickstart --chips 2", "2 chips cannot be cut into 4 slices"),
        ("data_parallel", "--algorithm decoupled"),
        ("quickstart --protocol.num_fragments 99999 --protocol.sync_every 99999", "queue_payloads_max"),
    ],
)
def test_wrong_input_is_one_message(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    packed = {name: str(CONFIGS / f"{name}.yaml") for name in ("quickstart", "data_parallel")}
    code, out, err = run(capsys, *(packed.get(word, word) for word in arguments.split()))
    assert code == 2 and not out
    assert message in " ".join(err.split()).replace("│ ", "") and "Traceback" not in err
