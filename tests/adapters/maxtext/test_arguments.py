"""The arguments of MaxText: what the user gave, and the defaults of an island."""

from pathlib import Path

import pytest
from pydantic import BaseModel

from diloco_jax.adapters.maxtext.arguments import (
    DATA,
    Arguments,
    island_seed,
    own_command,
    read_arguments,
    refusal_named,
    with_defaults,
)


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    (tmp_path / "base.yml").write_text("steps: 150001\n")
    return tmp_path


def completed(*words: str, data: str = "seed", hosts: int = 1, island: str = "a", configs: Path) -> dict[str, str]:
    found = with_defaults(
        read_arguments(words, configs), run="mx", island=island, steps=500, hosts=hosts, data=DATA[DATA.index(data)]
    )
    return dict(found.values)


def test_config_is_found_in_the_folder_of_maxtext(configs: Path) -> None:
    assert read_arguments(["base.yml", "steps=3"], configs) == Arguments(str(configs / "base.yml"), {"steps": "3"})
    assert read_arguments([], configs).config == str(configs / "base.yml")
    assert read_arguments(["base.yml", "a=b=c"], configs).as_words() == [str(configs / "base.yml"), "a=b=c"]


def test_the_folder_of_outputs_is_absolute(configs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(configs)
    monkeypatch.setenv("HOME", "/their/home")
    same = {each: each for each in ("/a/b", "gs://b/out", "")}
    for given, expected in {"out": str(configs / "out"), "~/out": "/their/home/out", **same}.items():
        values = read_arguments([f"base_output_directory={given}"], configs).values
        assert values == {"base_output_directory": expected}


def test_the_config_of_the_user_goes_before(configs: Path, tmp_path: Path) -> None:
    own = tmp_path / "own" / "base.yml"
    own.parent.mkdir()
    own.touch()
    assert read_arguments([str(own)], configs).config == str(own)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["other.yml"], "'other.yml' exists neither here nor in"),
        ([f"{'x' * 5000}.yml"], "'x{200}' exists neither here nor in"),
        (["base.yml", "more.yml"], "'more.yml' is not an argument of MaxText"),
        (["base.yml", "steps", "3"], "'steps' is not an argument of MaxText"),
        (["enable_diloco=true"], "enable_diloco=true does not work on an island"),
        (["elastic_enabled=True"], "elastic_enabled=true does not work on an island"),
    ],
)
def test_wrong_arguments_are_named(words: list[str], message: str, configs: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read_arguments(words, configs)


def test_arguments_that_maxtext_refuses_are_wrong_input_with_all_reasons() -> None:
    class MaxTextConfig(BaseModel):
        steps: int
        dtype: str

    reasons = "MaxText refuses its arguments: steps Input should be .*; dtype Field required"
    with pytest.raises(ValueError, match=reasons), refusal_named():
        MaxTextConfig(steps="many")  # type: ignore[call-arg, arg-type]
    with pytest.raises(ValueError, match=r"^1 validation error for Other"), refusal_named():
        type("Other", (MaxTextConfig,), {})(steps=1)


def test_defaults_come_from_the_run(configs: Path) -> None:
    found = completed("base.yml", configs=configs)
    assert (found["steps"], found["learning_rate_schedule_steps"]) == ("500", "500")
    assert found["enable_checkpointing"] == "false" and found["run_name"] == "mx-a"
    assert "skip_jax_distributed_system" not in found


def test_what_the_user_gave_stays(configs: Path) -> None:
    found = completed("steps=9", "enable_checkpointing=true", "run_name=mine", configs=configs)
    assert (found["steps"], found["learning_rate_schedule_steps"]) == ("9", "500")
    assert found["enable_checkpointing"] == "true" and found["run_name"] == "mine-a"


def test_maxtext_does_not_start_the_processes_of_cpus(configs: Path) -> None:
    assert completed("hardware=cpu", configs=configs)["skip_jax_distributed_system"] == "true"
    assert completed("hardware=tpu", hosts=2, configs=configs)["skip_jax_distributed_system"] == "true"


def test_an_export_names_complete_commands_of_maxtext(
    configs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    given = read_arguments(["base.yml", "hardware=cpu", "learning_rate=3e-3"], configs)
    start = f"python -m maxtext.trainers.pre_train.train {configs}/base.yml run_name=out hardware=cpu"
    parameters = f"load_parameters_path={tmp_path}/here/out/items skip_jax_distributed_system=true"
    assert own_command(given, Path("out")) == f"{start} learning_rate=3e-3 {parameters}"
    only = "steps=1 eval_interval=1 enable_checkpointing=false eval_steps=20"
    assert own_command(given, Path("out"), evaluates=True) == f"{start} learning_rate=0 {parameters} {only}"
    given = read_arguments(["base.yml", "run_name=mine", "eval_steps=4"], configs)
    on_tpu = own_command(given, Path("out"), evaluates=True)
    assert "run_name=mine" in on_tpu and "eval_steps=4" in on_tpu and "skip_jax" not in on_tpu


def test_islands_have_orders_of_their_own(configs: Path) -> None:
    seeds = {completed("data_shuffle_seed=7", island=name, configs=configs)["data_shuffle_seed"] for name in "abc"}
    assert len(seeds) == 3
    assert completed("data_shuffle_seed=7", configs=configs)["data_shuffle_seed"] == str(island_seed("7", "a"))
    assert island_seed("7", "a") != island_seed("8", "a") and 0 <= island_seed("7", "a") < 2**31
    for data in ("same", "shard", "leased"):
        assert completed("data_shuffle_seed=7", data=data, configs=configs)["data_shuffle_seed"] == "7"


def test_leased_data_need_one_record_for_each_sequence(configs: Path) -> None:
    found = completed(data="leased", configs=configs)
    assert (found["packing"], found["grain_worker_count"]) == ("false", "0")
    for word in ("packing=true", "grain_worker_count=2", "use_truncation=false", "dataset_type=hf"):
        with pytest.raises(ValueError, match=f"{word} does not fit to --data leased"):
            completed(word, data="leased", configs=configs)


def test_only_grains_pipeline_has_shards_and_leases(configs: Path) -> None:
    for data in ("shard", "leased"):
        assert completed(data=data, configs=configs)["dataset_type"] == "grain", "also with another one in a file"
        with pytest.raises(ValueError, match=f"dataset_type=hf does not fit to --data {data}"):
            completed("dataset_type=hf", data=data, configs=configs)
    for data in ("seed", "same"):
        assert "dataset_type" not in completed(data=data, configs=configs)
        assert completed("dataset_type=hf", data=data, configs=configs)["dataset_type"] == "hf"
