"""Devices as the kernel lists them, their shares for the processes of a run, and a terminal without noise."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from diloco_jax.runtime.local.machine import Machine, check, gpu_shares, limit_jax, look, settings_of
from diloco_jax.runtime.local.run import LocalRun, child_environment
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import parse
from tests.limits import HANGS_S
from tests.runtime.helpers import ROOT, SMALL, environment, merged

GPUS = tuple("01234567")
VISIBLE, FRACTION = "CUDA_VISIBLE_DEVICES", "XLA_PYTHON_CLIENT_MEM_FRACTION"


def root(folder: Path, *devices: str, chips: int = 0) -> Path:
    """A file system with these device files and so many TPU v5p chips."""
    for name in devices:
        (folder / "dev" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "dev" / name).touch()
    for number in range(chips):
        place = folder / "sys/bus/pci/devices" / f"0000:00:{number:02x}.0"
        place.mkdir(parents=True)
        (place / "vendor").write_text("0x1ae0\n")
        (place / "device").write_text("0x0062\n")
    return folder


def run_of(count: int = 4, devices: Any = "auto", **islands: Any) -> RunConfig:
    settings = {"islands": {"count": count, "devices": devices, "batch_size": 24, **islands}}
    return parse(merged(SMALL, settings), "test")


CARDS = ("nvidia0", "nvidia1", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm")


@pytest.mark.parametrize(
    ("files", "chips", "environ", "expected"),
    [
        ((), 0, {}, Machine()),
        ((), 0, {"JAX_PLATFORMS": "cpu"}, Machine()),
        (("accel0",), 4, {"JAX_PLATFORMS": "cpu"}, Machine(unused="JAX_PLATFORMS is cpu")),
        (CARDS, 0, {}, Machine(("0", "1", "2", "10"))),
        (CARDS, 0, {VISIBLE: "2,0"}, Machine(("2", "0"))),
        (CARDS, 0, {VISIBLE: "GPU-8f1, 1,7,0"}, Machine(("GPU-8f1", "1"))),
        (CARDS, 0, {VISIBLE: ""}, Machine()),
        (CARDS, 0, {VISIBLE: "-1"}, Machine()),
        (CARDS, 0, {"JAX_PLATFORMS": "cpu"}, Machine(unused="JAX_PLATFORMS is cpu")),
        (CARDS, 0, {"JAX_PLATFORMS": "tpu,cpu"}, Machine()),
        (CARDS, 0, {"JAX_PLATFORMS": "cuda,cpu"}, Machine(("0", "1", "2", "10"))),
        (CARDS, 0, {FRACTION: "0.2"}, Machine(("0", "1", "2", "10"), memory_chosen=True)),
        (("accel0",), 4, {}, Machine(tpu_chips=4)),
        (("accel0",), 4, {"JAX_PLATFORMS": "cuda"}, Machine(unknown=True)),
        (("vfio/0",), 0, {}, Machine(unknown=True)),
        (("kfd",), 0, {}, Machine(unknown=True)),
        ((), 0, {"TPU_WORKER_ID": "0"}, Machine(unknown=True)),
        ((), 0, {"JAX_PLATFORMS": "proxy"}, Machine(unknown=True)),
    ],
)
def test_what_is_here(
    tmp_path: Path, files: tuple[str, ...], chips: int, environ: Mapping[str, str], expected: Machine
) -> None:
    assert look(environ, root(tmp_path, *files, chips=chips), cuda=True) == expected


def test_gpus_without_a_plugin_are_told(tmp_path: Path) -> None:
    found = look({}, root(tmp_path, *CARDS), cuda=False)
    assert found.emulates and "4 GPUs here, but JAX has no CUDA plugin" in found.unused
    assert "4 GPUs here, but JAX" in check(run_of(), found)


@pytest.mark.parametrize(
    ("machine", "environ", "expected"),
    [
        (Machine(), {}, "cpu"),
        (Machine(GPUS), {}, "cuda,cpu"),
        (Machine(tpu_chips=4), {}, None),
        (Machine(unknown=True), {}, None),
        (Machine(), {"JAX_PLATFORMS": "tpu"}, "tpu"),
    ],
)
def test_jax_looks_only_for_what_can_be_here(machine: Machine, environ: dict[str, str], expected: str | None) -> None:
    limit_jax(environ, machine)
    assert environ.get("JAX_PLATFORMS") == expected


@pytest.mark.parametrize(("devices", "expected"), [("auto", "01 23 45 67"), (1, "0 1 2 3")])
def test_slices_share_the_gpus_of_their_island(devices: int | str, expected: str) -> None:
    config = run_of(2, devices, slices=2)
    places = [(name, place) for name in config.islands.names for place in range(2)]
    found = [settings_of(config, name, Machine(GPUS), place)[VISIBLE] for name, place in places]
    assert found == [",".join(each) for each in expected.split()]


@pytest.mark.parametrize(
    ("count", "devices", "gpus", "expected", "words"),
    [
        (4, "auto", 8, ["01", "23", "45", "67"], "8 GPUs, 2 for each of 4 islands"),
        (3, "auto", 8, ["01", "23", "45"], "6 GPUs, 2 for each of 3 islands; 2 idle"),
        (4, "auto", 1, ["0", "0", "0", "0"], "1 GPU, shared by 4 islands: 22% of a GPU's memory for each"),
        (3, "auto", 2, ["0", "1", "0"], "2 GPUs, shared by 3 islands: 45% of a GPU's memory for each"),
        (1, "auto", 8, ["01234567"], "8 GPUs for island-0"),
        (2, 3, 8, ["012", "345"], "6 GPUs, 3 for each of 2 islands; 2 idle"),
    ],
)
def test_islands_share_gpus(count: int, devices: int | str, gpus: int, expected: list[str], words: str) -> None:
    config, machine = run_of(count, devices), Machine(GPUS[:gpus])
    assert ["".join(each) for each in gpu_shares(config, machine).values()] == expected
    assert check(config, machine) == words
    for name, each in zip(config.islands.names, expected, strict=True):
        settings = settings_of(config, name, machine)
        assert settings[VISIBLE] == ",".join(each)
        together = sum(other == each for other in expected)
        assert settings.get(FRACTION) == (None if together == 1 else "0.45" if len(expected) == 3 else "0.22")
        assert settings_of(config, name, machine._replace(memory_chosen=True)).keys() == {VISIBLE}
    assert settings_of(config, "syncer", machine)["JAX_PLATFORMS"] == "cpu", "the syncer takes no accelerator"
    assert settings_of(config, "stranger", machine) == {}


def test_one_process_for_all_islands_and_hosts_of_one() -> None:
    single = run_of(2, controller="single")
    assert settings_of(single, "islands", Machine(GPUS)) == {VISIBLE: "0,1,2,3,4,5,6,7"}
    numbers = run_of(2, 2, controller="single")
    assert settings_of(numbers, "islands", Machine(GPUS)) == {VISIBLE: "0,1,2,3"}
    assert settings_of(numbers, "islands", Machine())["JAX_NUM_CPU_DEVICES"] == "4"
    hosts = run_of(2, hosts=2)
    assert settings_of(hosts, "island-1", Machine(GPUS), place=1) == {VISIBLE: "6,7"}
    assert settings_of(hosts, "island-1", Machine(), place=1)["JAX_NUM_CPU_DEVICES"] == "1"
    baseline = parse(merged(SMALL, {"algorithm": "data_parallel"}), "test")
    assert settings_of(baseline, "trainer", Machine(GPUS)) == {VISIBLE: "0,1"}


@pytest.mark.parametrize(
    ("config", "machine", "words"),
    [
        (run_of(4, 2), Machine(GPUS[:1]), "8 devices in all, but this machine has 1 GPU; set islands.devices to auto"),
        (run_of(2, hosts=3), Machine(GPUS), "island-0: 3 processes cannot share 4 GPUs equally"),
        (run_of(2, each={"island-1": {"devices": 8}}), Machine(GPUS), "none is left for islands with devices auto"),
        (run_of(2), Machine(tpu_chips=4), "set islands.controller to single"),
        (run_of(1), Machine(GPUS[:7]), "batch of 24 sequences cannot be shared equally by 7 devices"),
        (run_of(2, mesh={"fsdp": 3}), Machine(), "mesh"),
    ],
)
def test_what_a_machine_cannot_give_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: RunConfig, machine: Machine, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        check(config, machine)
    monkeypatch.setattr("diloco_jax.runtime.local.run.look", lambda environment: machine)
    with pytest.raises(ValueError, match=words):
        LocalRun(config, tmp_path, lambda line: None, Any)  # type: ignore[arg-type]


def test_tpus_are_left_to_their_one_process() -> None:
    chips = Machine(tpu_chips=4)
    assert settings_of(run_of(1), "island-0", chips) == {}
    assert check(run_of(1), chips) == "4 TPU chips for 1 island"
    assert check(run_of(2, controller="single"), chips) == "4 TPU chips for 2 islands"


def test_emulation_is_said_aloud_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco_jax.runtime.local.run.look", lambda environment: Machine())
    said: list[str] = []
    LocalRun(run_of(), tmp_path, said.append, Any)  # type: ignore[arg-type]
    assert said == ["no GPU or TPU here: 4 islands on emulated CPU devices, 2 each"]
    mixed = run_of(2, each={"island-1": {"devices": 4}})
    assert check(mixed, Machine()).endswith("2 to 4 each")
    of_a_program = check(run_of(2, command=("python", "loop.py")), Machine())
    assert of_a_program.endswith("2 islands of 'python loop.py'; JAX has 2 emulated CPU devices in each")


def test_a_number_emulates_as_many_where_there_is_nothing_better() -> None:
    own = child_environment(run_of(2, 3), "island-0", Machine())
    assert (own["JAX_PLATFORMS"], own["JAX_NUM_CPU_DEVICES"]) == ("cpu", "3")
    assert child_environment(run_of(2), "island-0", Machine())["JAX_NUM_CPU_DEVICES"] == "2"
    sliced = run_of(1, topology="v5p:2x2x1", mesh={"data": 1, "fsdp": 4})
    assert settings_of(sliced, "island-0", Machine()) == {}, "a slice is never emulated"


def test_a_tpu_plugin_without_a_tpu_says_nothing(tmp_path: Path) -> None:
    """A command that computes, as a user starts it: nothing about jellyfish, worker hostnames and host bounds."""
    if not look({}).emulates:
        pytest.skip("there is an accelerator here")
    words = "from diloco_jax.cli.main import main; main(['status', '/nowhere']); import jax; print(jax.devices())"
    settings = {key: value for key, value in environment().items() if key != "JAX_PLATFORMS"}
    found = subprocess.run(
        [sys.executable, "-c", words], capture_output=True, text=True, env=settings, cwd=ROOT, timeout=HANGS_S
    )
    assert "CpuDevice" in found.stdout, found.stderr
    assert len(found.stderr.splitlines()) == 1 and found.stderr.startswith("diloco status:"), found.stderr
    assert "JAX_PLATFORMS" not in settings and os.environ["JAX_PLATFORMS"] == "cpu"
