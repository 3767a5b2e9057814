"""Settings: islands that differ, slices against Google Cloud's tables, and the schema that editors use."""

import copy
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from diloco_jax.core.merge import MergeConfig
from diloco_jax.protocol.pacing import LEARNERS_MAX_LIMIT, ProtocolConfig
from diloco_jax.protocol.releases import RELEASE
from diloco_jax.settings.compiler import compiler_variable, options_of
from diloco_jax.settings.packed import packed
from diloco_jax.settings.run import ModelConfig, RunConfig, TrainConfig
from diloco_jax.settings.schema import FIRST, config_schema, describe_settings, setting_names
from diloco_jax.settings.slices import GENERATIONS, Topology
from diloco_jax.settings.text import (
    PROBLEMS_SHOWN,
    WRITTEN_BY,
    as_begun,
    dump,
    dump_chosen,
    load,
    parse,
    parse_text,
    save,
)
from diloco_jax.training.sharding import MeshConfig

MIXED: dict[str, Any] = {
    "name": "mixed",
    "islands": {
        "count": 3,
        "devices": 2,
        "batch_size": 8,
        "each": {
            "island-1": {"devices": 4, "batch_size": 16, "mesh": {"fsdp": -1}},
            "island-2": {"devices": "auto", "topology": "v6e:4x4", "mesh": {"fsdp": 8, "data": -1}, "batch_size": 32},
        },
    },
}


def test_an_island_has_what_all_have_but_for_what_it_has_differently() -> None:
    config = parse(MIXED, "test")
    first, second, third = (config.island(name) for name in config.islands.names)
    assert (first.devices, first.hosts, first.batch_size, first.mesh) == (2, 1, 8, MeshConfig(data=-1))
    assert (second.devices, second.batch_size, second.mesh) == (4, 16, MeshConfig(fsdp=-1))
    assert (third.devices, third.hosts, third.batch_size) == (0, 4, 32), "a slice knows its hosts"
    assert config.island("a stranger")[1:] == first[1:]
    assert parse(yaml.safe_load(dump(config)), "dump") == config


def test_the_config_of_another_releases_run_names_both(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for first, told in ((f"{WRITTEN_BY} 9.8.7", True), (f"{WRITTEN_BY} {RELEASE}", False), ("# mine", False)):
        path.write_text(f"{first}\nnovelty: 1\n")
        with pytest.raises(ValueError, match="unknown setting novelty") as refused:
            load(path)
        words = f"diloco-jax 9.8.7 wrote it, this is {RELEASE}: use 9.8.7 for this run"
        assert (words in str(refused.value)) == told
    path.write_text(f"{WRITTEN_BY} 9.8.7\nname: mine\n")
    config = load(path)
    save(config, path)
    assert config.name == "mine" and load(path) == config and path.read_text().startswith(f"{WRITTEN_BY} {RELEASE}\n")


@pytest.mark.parametrize(
    ("islands", "message"),
    [
        pytest.param(
            {"each": {"island-1": {"mesh": {"fdsp": 1}}}},
            "did you mean islands.each.island-1.mesh.fsdp",
            id="typo-of-a-key",
        ),
        pytest.param({"each": 3}, "islands.each is 3", id="no-section"),
        pytest.param({"devices": 0}, "islands.devices is 0; use 1 to 64, or auto", id="no-devices"),
        pytest.param(
            {"each": {"island-1": {"devices": 65}}},
            "islands.each.island-1.devices is 65; use 1 to 64, or auto",
            id="more-devices-than-a-host-has",
        ),
        pytest.param({"devices": "all"}, "islands.devices", id="no-number-of-devices"),
        pytest.param({"each": {"island-1": 3}}, "islands.each.island-1 is 3", id="no-section-of-an-island"),
        pytest.param({"each": {"island-1": {"devices": 3}}}, "island-1's batch of 8", id="batch-and-devices"),
        pytest.param({"devices": 2, "hosts": 3}, "3 hosts cannot share 2 devices", id="hosts-and-devices"),
        pytest.param({"devices": 4, "topology": "v5p:2x2x1"}, "set devices to auto", id="devices-beside-a-slice"),
        pytest.param({"topology": "v5p:2x2x1", "mesh": {"data": 3}}, "does not fit 4 devices", id="mesh-and-slice"),
        pytest.param({"topology": "v6e:4x4", "mesh": {"fsdp": -1}}, "batch of 8", id="batch-and-slice"),
    ],
)
def test_what_cannot_be_is_refused_by_name(islands: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse({"islands": islands}, "test")


@pytest.mark.parametrize(
    ("name", "chips", "hosts", "accelerator_type", "machine_type"),
    [
        ("v5p:2x2x1", 4, 1, "v5p-8", "ct5p-hightpu-4t"),
        ("v5p:2x2x2", 8, 2, "v5p-16", "ct5p-hightpu-4t"),
        ("v5p:4x4x4", 64, 16, "v5p-128", "ct5p-hightpu-4t"),
        ("v6e:1x1", 1, 1, "v6e-1", "ct6e-standard-1t"),
        ("v6e:2x2", 4, 1, "v6e-4", "ct6e-standard-4t"),
        ("v6e:2x4", 8, 1, "v6e-8", "ct6e-standard-8t"),
        ("v6e:4x4", 16, 4, "v6e-16", "ct6e-standard-4t"),
        ("v6e:16x16", 256, 64, "v6e-256", "ct6e-standard-4t"),
        ("v4:2x2x4", 16, 4, "v4-32", "ct4p-hightpu-4t"),
        ("v5e:2x4", 8, 1, "v5litepod-8", "ct5lp-hightpu-8t"),
        ("v5e:8x16", 128, 32, "v5litepod-128", "ct5lp-hightpu-4t"),
        ("v5p:4x12x20", 960, 240, "v5p-1920", "ct5p-hightpu-4t"),
        ("tpu7x:1x1x1", 1, 1, "tpu7x-2", "tpu7x-standard-1t"),
        ("tpu7x:4x4x8", 128, 32, "tpu7x-256", "tpu7x-standard-4t"),
    ],
)
def test_a_slice_is_what_the_cloud_says(
    name: str, chips: int, hosts: int, accelerator_type: str, machine_type: str
) -> None:
    topology = Topology.parse(name)
    assert (topology.chips, topology.hosts) == (chips, hosts)
    assert (topology.accelerator_type, topology.machine_type) == (accelerator_type, machine_type)
    assert str(topology) == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v6e:4x4x4", "2 sizes"),
        ("v6e", "2 sizes"),
        ("v6e:0x4", "at least 1"),
        ("v6e:32x32", "at most 256"),
        ("v5p:1x1x1", "whole hosts; use a multiple of 4"),
        ("v6e:3x4", "no v6e slice; choose v6e: 1x1, 2x2, 2x4"),
        ("v6e:4x2", "no v6e slice"),
        ("v5p:2x4x8", "choose v5p: 2x2x1, 2x2x2, 2x2x4, 2x4x4, or sizes that are multiples of 4"),
    ],
)
def test_a_slice_that_cannot_be_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Topology.parse(name)


def test_peak_is_that_of_all_chips_whose_devices_share_it() -> None:
    assert Topology.parse("v5p:4x4x4").peak_flops == 64 * 459e12
    # Google writes the generation with capitals.
    two = Topology.parse("TPU7x:2x2x1")
    assert (two.devices, two.peak_flops, two.generation.hbm_bytes) == (8, 4 * 2307e12, 96e9)


OWN = {"v9": {"dims": 2, "chips_max": 64, "peak_tflops": 100, "hbm_gb": 10, "host_gb": 80, "alone": [2]}}
FUSED = "xla_tpu_enable_async_collective_fusion_fuse_all_gather"


def _on(topology: str, **sections: Any) -> RunConfig:
    islands = {"generations": OWN, "topology": topology, "mesh": {"fsdp": -1}, "count": 2}
    return parse({"islands": islands, "train": {"batch_size": 32}, **sections}, "test")


def test_the_first_islands_are_those_that_the_run_needs() -> None:
    assert [parse({"islands": {"count": 4, "least": n}}, "test").islands.base for n in (0, 2)] == [
        ("island-0", "island-1", "island-2", "island-3"),
        ("island-0", "island-1"),
    ]


def test_only_built_in_islands_share_the_batch() -> None:
    own = {"islands": {"count": 3}, "model": {"module": "own"}}
    assert parse(own, "test").islands.count == 3
    with pytest.raises(ValueError, match=r"train\.batch_size is 32, which 3 islands cannot share equally"):
        parse({"islands": {"count": 3}, "train": {"batch_size": 32}}, "test")


def test_a_generation_of_a_config_is_used_like_those_of_the_table() -> None:
    island = _on("v9:1x2").island("island-0")
    assert island.slice is not None
    assert (island.hosts, island.slice.host_bytes, island.slice.peak_flops) == (1, 40e9, 200e12)
    with pytest.raises(ValueError, match="6 chips, which do not fill whole hosts"):
        _on("v9:2x3")


@pytest.mark.parametrize(
    ("topology", "flags", "environment", "expected"),
    [
        ("v9:2x2", {}, {}, ("LIBTPU_INIT_ARGS", "")),
        ("v9:2x2", {"xla_a": "1"}, {"LIBTPU_INIT_ARGS": "--xla_b=2"}, ("LIBTPU_INIT_ARGS", "--xla_b=2 --xla_a=1")),
        ("v9:2x2", {"xla_a": "1"}, {"LIBTPU_INIT_ARGS": "--xla_a=3"}, ("LIBTPU_INIT_ARGS", "--xla_a=3")),
        ("", {"xla_a": "1"}, {"XLA_FLAGS": "--xla_b"}, ("XLA_FLAGS", "--xla_b --xla_a=1")),
    ],
)
def test_islands_get_the_compilers_options(
    topology: str, flags: dict[str, str], environment: dict[str, str], expected: tuple[str, str]
) -> None:
    config = _on(topology, cloud={"xla_flags": flags})
    assert compiler_variable(config, config.island("island-0"), environment) == expected


def test_the_config_goes_before_the_table() -> None:
    config = _on("v6e:4x4", cloud={"xla_flags": {FUSED: "", "xla_a": "1"}})
    options = options_of(config, config.island("island-0"))
    assert FUSED in GENERATIONS["v6e"].compiler_options and FUSED not in options and options["xla_a"] == "1"


@functools.cache
def schema() -> Any:
    """Return the validator of the schema that editors use."""
    import jsonschema

    return jsonschema.Draft202012Validator(config_schema())


# This config has an island that differs from the others.
WHOLE = yaml.safe_load(dump(load(packed()["mixed"])))
# Users choose the keys of these sections.
FREE = {
    *(f"{section}.args" for section in ("model", "data", "optimizer", "outer", "evaluation")),
    *(f"data.{name}" for name in ("mixture", "evaluation")),
    *(f"islands.{name}" for name in ("each", "resources", "mesh.rules", "each.island-1.mesh.rules")),
    *("protocol.sync_later", "merge.shares", "cloud.env", "cloud.xla_flags"),
}
NAMES = [key for section in WHOLE.values() if isinstance(section, dict) for key in section]


@pytest.mark.parametrize("name", packed())
def test_the_schema_takes_every_config_of_the_package(name: str) -> None:
    values = yaml.safe_load(packed()[name].read_text(encoding="utf-8"))
    schema().validate(values)
    schema().validate(yaml.safe_load(dump(parse(values, name))))


def sections(values: dict[str, Any], prefix: str = "") -> Iterator[list[str]]:
    """Yield the path of each section whose keys are known to the schema."""
    if prefix not in FREE:
        yield prefix.split(".")[bool(not prefix) :]
    for key, value in values.items():
        if isinstance(value, dict):
            yield from sections(value, f"{prefix}.{key}".removeprefix("."))


@given(st.sampled_from([*sections(WHOLE)]), st.sampled_from([*NAMES, "Steps"]) | st.text(max_size=12))
def test_a_key_that_load_does_not_know_is_refused_by_both_and_no_other(where: list[str], key: str) -> None:
    values = section = copy.deepcopy(WHOLE)
    for part in where:
        section = section[part]
    known = key in section
    section.setdefault(key, 1)
    assert schema().is_valid(values) is known
    if known:
        parse(values, "test")
    else:
        with pytest.raises(ValueError, match=r"unknown setting|it is a section"):
            parse(values, "test")


def test_every_setting_has_its_help() -> None:
    told = dict(setting_names(schema().schema))
    assert told["islands.mesh.fsdp"].startswith("Devices that") and len(told) > 100 and all(told.values())


def test_settings_are_listed_with_their_values_and_meaning() -> None:
    config = RunConfig(train=TrainConfig(steps=7), model=ModelConfig(args={"dim": 64}), trackers=("wandb", "mlflow"))
    text = describe_settings(config, "diloco train my.yaml", 80)
    assert "\n  --train.steps 7  (whole number; default 1000)\n      T: global steps of the run;" in text
    assert '\n  --model.args {"dim": 64}  (mapping; default {})\n' in text
    assert "\n  --trackers wandb mlflow  (list; default tensorboard)\n" in text
    assert "\nislands.mesh: " in text and "\n  --islands.each.NAME.zone  (text; default null)\n" in text
    first = " ".join(text.partition("The first to choose: ")[2].partition("\n\n")[0].split())
    assert [each.partition(" ")[0].removeprefix("--") for each in first.split("; ")] == list(FIRST)
    listed = re.findall(r"^  --(\S+)", text, re.MULTILINE)
    assert {name for name in listed if ".NAME." not in name} == dict(setting_names(schema().schema)).keys()
    fewer = describe_settings(config, "diloco train my.yaml", 80, every=False)
    assert "--settings --all lists cloud, cloud.extra, gpu, islands.generations.NAME" in " ".join(fewer.split())
    left_out = {*listed} - {*re.findall(r"^  --(\S+)", fewer, re.MULTILINE)}
    assert len(left_out) > 40 and all(name.startswith(("cloud.", "gpu.", "islands.generations.")) for name in left_out)


def test_a_run_of_an_earlier_release_keeps_its_decisions(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    save(RunConfig(), path)
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(line for line in lines if "pairs_max" not in line), encoding="utf-8")
    old = load(path)
    assert old.merge.pairs_max == LEARNERS_MAX_LIMIT and as_begun(RunConfig(), old) == old
    assert load(path, ["--merge.pairs_max", "5"]).merge.pairs_max == 5
    chosen = RunConfig(merge=MergeConfig(pairs_max=5))
    assert as_begun(chosen, old) == chosen, "what a user has set stays, and is refused elsewhere"
    own = tmp_path / "own.yaml"
    own.write_text("protocol: {quorum: 1}", encoding="utf-8")
    assert load(own) == RunConfig(), "a file of the user's own has the defaults of this release"


def test_a_config_for_another_release_has_only_what_was_chosen() -> None:
    config = RunConfig(
        name="own",
        protocol=ProtocolConfig(quorum=2, sync_later={50: 48}),
        model=ModelConfig(args={"dim": 64}),
        trackers=(),
    )
    text = dump_chosen(config)
    assert parse_text(text, "the syncer") == config and "grace" not in text
    assert dump_chosen(RunConfig()) == "{}\n" and parse_text("{}", "the syncer") == RunConfig()


def test_a_removed_setting_has_no_effect_and_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "old.yaml"
    path.write_text("protocol: {grace_safety: 0.5, quorum: 3}\n", encoding="utf-8")
    assert load(path) == parse({"protocol": {"quorum": 3}}, "test")
    assert f"{path}: protocol.grace_safety has no effect" in caplog.text
    caplog.clear()
    assert load(path, ["--protocol.grace-min-s", "2", "--protocol.quorum", "2"]).protocol.quorum == 2
    assert "command line: protocol.grace_min_s has no effect" in caplog.text
    caplog.clear()
    path.write_text("protocol: {grace_safety: 0.9}\n", encoding="utf-8")
    assert load(path) == RunConfig() and not caplog.text, "a folder of the release before lists all settings"


@pytest.mark.parametrize(
    ("name", "advice"), [("protocol.lease_s", "write protocol.silence_s"), ("syncer.shards", "delete it")]
)
def test_a_refused_setting_of_an_older_release_has_the_advice_for_it(tmp_path: Path, name: str, advice: str) -> None:
    """The most similar setting of today may have another meaning: lease_s resembles release_s."""
    section, key = name.split(".")
    words = rf"unknown setting {name} \(value '?2'?\); {advice}"
    with pytest.raises(ValueError, match=words):
        parse({section: {key: 2}}, "test")
    with pytest.raises(ValueError, match=f"command line: {words}"):
        load(packed()["quickstart"], [f"--{name}", "2"])


@pytest.mark.parametrize("words", [["*.a", "*.b"], ["[*a, *b]"], ["['*.a', '*.b']"], ["[one]"]])
def test_a_list_on_the_command_line(words: list[str]) -> None:
    """Several words, or a list as in a YAML file."""
    path = packed()["quickstart"]
    expected = {"*.b": ("*.a", "*.b"), "['*.a', '*.b']": ("*.a", "*.b"), "[one]": ("one",)}
    if (last := words[-1]) not in expected:
        # In YAML, a star starts the name of an anchor.
        with pytest.raises(ValueError, match="not valid YAML"):
            load(path, ["--data.patterns", *words])
        return
    assert load(path, ["--data.patterns", *words]).data.patterns == expected[last]


def test_all_misspelt_settings_and_wrong_types_are_told_at_once() -> None:
    wrong = {
        "train": {"stesp": 5, "batch_sise": 30, "seq_len": "long", "eval_every": True},
        "islnads": {"count": 2},
        "optimizer": 3,
        "islands": {"each": {"a": {"batch": 1}}},
    }
    with pytest.raises(ValueError, match=r"^mine has 7 errors:\n") as refused:
        parse(wrong, "mine")
    lines = str(refused.value).splitlines()
    assert len(lines) == 8 and not [line for line in lines[1:] if not line.startswith("  ")]
    for part in (
        "unknown setting train.stesp (value 5); did you mean train.steps?",
        "did you mean train.batch_size?",
        "did you mean islands?",
        "train.eval_every is true; it must be a number",
        "optimizer is 3, but it is a section",
        "unknown setting islands.each.a.batch",
        "train.seq_len is 'long'; it must be a valid integer",
    ):
        assert part in str(refused.value)
    with pytest.raises(ValueError, match=r"and 4 more$"):
        parse({f"odd{n}": n for n in range(PROBLEMS_SHOWN + 4)}, "mine")


def test_a_misspelt_setting_does_not_let_its_default_break_a_rule() -> None:
    """The batch of the file would fit three islands."""
    with pytest.raises(ValueError, match=r"^mine: unknown setting train\.batch_sise \(value 30\)[^\n]*$"):
        parse({"islands": {"count": 3}, "train": {"batch_sise": 30}}, "mine")
    with pytest.raises(ValueError, match="cannot share equally"):
        parse({"islands": {"count": 3}, "train": {"batch_size": 32}}, "mine")
