"""Jobs of experiments: settings, digests, the tuning before the others, and the files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from diloco_jax.settings.text import load as load_config
from experiments.plan import Choice, differences, make_plan
from experiments.spec import HERE, Arm, Case, Tuning, flat, load, merged, names, problems, sizes
from experiments.tests.made import EXPERIMENT, RATES, record
from experiments.ways import placed


def test_settings_are_merged_by_path_and_null_removes() -> None:
    base = {"a": {"b": 1, "c": 2}, "d": [1]}
    assert merged(base, {"a.b": 3, "d": [2], "e": {"f": 4}}) == {"a": {"b": 3, "c": 2}, "d": [2], "e": {"f": 4}}
    assert merged(base, {"a": {"c": None}}) == {"a": {"b": 1}, "d": [1]}
    assert flat({"a": {"b": 1}, "c": {}}) == {"a.b": 1, "c": {}}


def test_the_tuning_goes_first_and_decides_the_rest() -> None:
    plan = make_plan(EXPERIMENT, Choice(), [])
    assert [(job.arm, job.point, job.seed) for job in plan.jobs] == [
        (arm, {"optimizer.learning_rate": rate}, 100) for arm in ("baseline", "m4") for rate in RATES
    ]
    assert len(plan.untuned) == 2 * (3 + 2), "two seeds of three arms, and of two"
    losses = {("baseline", RATES[0]): 1.0, ("baseline", RATES[1]): 2.0, ("m4", RATES[0]): 2.0, ("m4", RATES[1]): 1.0}
    rate = "optimizer.learning_rate"
    records = [record(job, losses[job.arm, job.point[rate]]) for job in plan.jobs if job.point is not None]
    half = make_plan(EXPERIMENT, Choice(), records[:3])
    assert set(half.tuned) == {("1M", "baseline")} and len(half.untuned) == 6
    tuned = make_plan(EXPERIMENT, Choice(), records)
    rates = {job.arm: job.settings["optimizer"]["learning_rate"] for job in tuned.jobs if job.point is None}
    assert rates == {"baseline": RATES[0], "m4": RATES[1], "m2": RATES[1]} and not tuned.untuned
    nan = [{**each, "loss": None} if each["loss"] == 1.0 else each for each in records]
    assert make_plan(EXPERIMENT, Choice(), nan).tuned["1M", "m4"] == {rate: RATES[0]}, "a run that diverged is not best"


def test_a_digest_is_of_settings_schedule_and_way_alone() -> None:
    def digests(**changes: object) -> list[str]:
        made = replace(EXPERIMENT, tuning=None, **changes)
        return [job.digest for job in make_plan(made, Choice(), []).jobs]

    usual = digests()
    assert len(set(usual)) == len(usual) == 10
    assert usual == digests(name="other", title="other", seeds=(0, 1)), "equal settings are trained once for all"
    assert not set(usual) & set(digests(base={"outer": {"momentum": 0.5}}))
    noisy = set(digests(schedule={"step_noise": 0.5}))
    assert len(set(usual) & noisy) == 4, "the schedule changes nothing for data parallel"


def test_a_command_line_chooses() -> None:
    untuned = replace(EXPERIMENT, tuning=None)
    plan = make_plan(untuned, Choice(seeds=(7,), arms=("m2",), size="0.25M", tokens=3e5), [])
    (job,) = plan.jobs
    assert (job.arm, job.seed, job.case.size, job.settings["train"]["tokens"]) == ("m2", 7, "0.25M", 300_000)
    quick = make_plan(replace(untuned, quick={"arms": ["m2", "baseline"]}), Choice(quick=True), []).jobs
    assert [(each.arm, each.seed) for each in quick] == [("baseline", 0), ("m2", 0)]
    assert quick[0].settings["model"]["args"]["dim"] == 32
    with pytest.raises(ValueError, match=r"no arm 'm3'; choose from baseline, m4"):
        make_plan(untuned, Choice(arms=("m3",)), [])
    with pytest.raises(ValueError, match=r"size '2M' is unknown"):
        make_plan(untuned, Choice(size="2M"), [])


def test_large_models_are_run_as_processes_on_the_large_text() -> None:
    job = make_plan(replace(EXPERIMENT, tuning=None), Choice(size="35M", arms=("m4",)), []).jobs[0]
    assert job.way == "run" and job.settings["islands"]["devices"] == "auto"
    assert placed(job.settings, Path("somewhere"))["data"]["path"] == "somewhere/text-16384"
    assert job.settings["protocol"]["snapshot_every"] > 0, "a run without snapshots cannot resume"


def test_words_in_braces_are_replaced() -> None:
    settings = {"seed": 3, "evaluation": {"args": {"folder": "{work}/x", "seed": "{seed}", "count": 5}}}
    filled = placed(settings, Path("there"))
    assert filled["evaluation"]["args"] == {"folder": "there/x", "seed": "3", "count": 5} and filled["seed"] == 3
    assert placed("{work}/x", Path("there")) == "there/x"


def test_data_parallel_of_large_models_can_resume() -> None:
    job = make_plan(replace(EXPERIMENT, tuning=None), Choice(size="35M", arms=("baseline",)), []).jobs[0]
    assert job.way == "run" and "algorithm" not in job.settings and job.settings["islands"]["count"] == 1
    assert job.settings["outer"] == {"optimizer": "sgd", "learning_rate": 1.0}
    assert job.settings["protocol"]["overlap_steps"] == 0 and job.settings["wire"] == {
        "up": "float32",
        "down": "float32",
    }


def test_contradictions_are_named() -> None:
    uneven = Tuning(tokens=1e6, grids={"baseline": {"seed": (1, 2)}, "m4": {"seed": (1,)}})
    assert "tuned harder" in next(problems(replace(EXPERIMENT, tuning=uneven)))
    assert "is not an arm" in next(problems(replace(EXPERIMENT, baseline="none")))
    assert "size '3M'" in next(problems(replace(EXPERIMENT, cases=(Case(size="3M"),))))
    assert "like 'm9'" in next(problems(replace(EXPERIMENT, arms={**EXPERIMENT.arms, "m3": Arm(like="m9")})))
    without = {**EXPERIMENT.arms, "m3": Arm(like="m4")}
    assert "say in `because` why" in next(problems(replace(EXPERIMENT, arms=without)))


@pytest.mark.parametrize(
    ("grids", "words"),
    [
        ({"baseline": {"seed": [1]}, "m4": {"seed": [1, 1]}}, "the grid of m4 has a value twice"),
        ({"baseline": {"seed": []}, "m4": {"seed": []}}, "the grid of baseline has no points"),
        ({"baseline": {}, "m4": {}}, "the grid of baseline has no points"),
        ({"baseline": {"seed": 1}, "m4": {"seed": 1}}, "write a list of values"),
        ({"baseline": {"adopt.mode": "blend"}, "m4": {"adopt.mode": "blend"}}, "write a list of values"),
        ({"baseline": None, "m4": None}, "write a list of values"),
        ({"baseline": {"seed": [1]}}, "arm m4 has no grid"),
        ({"baseline": {"seed": [1]}, "m4": {"seed": [1]}, "m2": {"seed": [1]}}, "arm m2 has a grid, but is like 'm4'"),
    ],
)
def test_a_grid_is_a_list_of_different_values_for_one_arm(grids: Any, words: str) -> None:
    found = list(problems(replace(EXPERIMENT, tuning=Tuning(tokens=1e6, grids=grids))))
    assert any(words in problem for problem in found), found


def test_a_reason_belongs_to_an_arm_that_it_names() -> None:
    arms = {**EXPERIMENT.arms, "m4": Arm(because="it fits")}
    assert "`because` without `like`" in next(problems(replace(EXPERIMENT, arms=arms)))
    arms = {**EXPERIMENT.arms, "m3": Arm(like="m4", because=" ")}
    assert "say in `because` why" in next(problems(replace(EXPERIMENT, arms=arms)))


def test_a_grid_may_have_words() -> None:
    grids = {arm: {"adopt.mode": ["blend", "rebase"]} for arm in ("baseline", "m4")}
    experiment = replace(EXPERIMENT, tuning=Tuning(tokens=1e6, grids=grids))
    assert not list(problems(experiment))
    assert "m4 (adopt.mode rebase)" in make_plan(experiment, Choice(), []).jobs[3].title


def test_an_unknown_key_is_named(tmp_path: Path) -> None:
    values = yaml.safe_load((HERE / "wire" / "experiment.yaml").read_text(encoding="utf-8"))
    values["arms"]["int8"]["settigns"] = {}
    (tmp_path / "wire").mkdir()
    (tmp_path / "wire" / "experiment.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    with pytest.raises(ValueError, match=r"wire: arm int8: 'settigns' is unknown"):
        load("wire", tmp_path)


def test_every_row_of_the_order_has_a_folder() -> None:
    assert sorted(names()) == sorted(path.parent.name for path in HERE.glob("*/experiment.yaml")) != []


@pytest.mark.parametrize("name", names())
def test_every_job_of_every_experiment_has_a_config(name: str, tmp_path: Path) -> None:
    experiment = load(name)
    for quick in (False, True):
        plan = make_plan(experiment, Choice(quick=quick, seeds=(0,)), [])
        # The points of the grids come first.
        jobs = plan.jobs + plan.untuned
        assert jobs and (not quick or len(jobs) <= 2), "a trial of the machinery takes a minute"
        for job in jobs:
            path = tmp_path / f"{job.digest}.yaml"
            path.write_text(yaml.safe_dump(placed(job.settings, tmp_path)), encoding="utf-8")
            config = load_config(path)
            assert config.planned_steps > 5 and config.train.tokens == round(job.case.tokens)


def test_sizes_have_the_parameters_of_their_names() -> None:
    """A decoder has an embedding, attention, a gated MLP and two norms per layer, and a norm at the end."""
    for name, size in sizes().items():
        a = {"vocab_size": 256, **size.settings["model"]["args"]}
        heads = 2 * (a["num_heads"] + a["num_kv_heads"]) * a["head_dim"]
        layer = a["dim"] * (heads + 3 * a["mlp_dim"] + 2)
        total = a["vocab_size"] * a["dim"] + a["num_layers"] * layer + a["dim"]
        assert total == pytest.approx(float(name.removesuffix("M")) * 1e6, rel=0.06), name


def test_differences_are_complete_and_have_nothing_else() -> None:
    jobs = {job.arm: job for job in make_plan(replace(EXPERIMENT, tuning=None, seeds=(0,)), Choice(), []).jobs[:3]}
    assert differences(jobs) == {
        "baseline": {"algorithm": "data_parallel", "islands.count": 4},
        "m4": {"islands.count": 4},
        "m2": {"islands.count": 2},
    }
