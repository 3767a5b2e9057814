"""`diloco doctor` on one machine: what its kernel says is faked, what it means for the run is checked."""

import dataclasses
import os
import resource
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from diloco_jax.runtime.local import machine
from diloco_jax.settings.slices import Topology
from diloco_jax.settings.text import load
from diloco_jax.tools.budget.memory import PROCESS_BYTES, SYNCER_PROCESS_BYTES
from diloco_jax.tools.budget.needs import LinkNeeds
from diloco_jax.tools.doctor import machine as doctor_machine
from diloco_jax.tools.doctor.machine import of_error, part_of
from tests.runtime.helpers import write_config

GIB = 1 << 30


def test_errors_fall_into_finding_and_remedy() -> None:
    assert of_error("x", ValueError("a: b is wrong; do c"))[2:] == ("a: b is wrong", "do c")
    assert of_error("x", ValueError("b is wrong: do c"))[2:] == ("b is wrong", "do c")
    assert of_error("x", ValueError("b is wrong"), "do d")[2:] == ("b is wrong", "do d")


def test_data_that_is_missing_or_short(tmp_path: Path) -> None:
    config = load(write_config(tmp_path))
    assert doctor_machine.check_data(config).status == "ok"

    def check(path: Path) -> doctor_machine.Check:
        data = dataclasses.replace(config.data, path=str(path))
        return doctor_machine.check_data(dataclasses.replace(config, data=data))

    missing = check(tmp_path / "none")
    assert missing.status == "fail" and "does not exist" in missing.found and "give a file" in missing.fix
    (tmp_path / "short").write_text("few words")
    short = check(tmp_path / "short")
    assert short.status == "fail" and "0 training" in short.found and "give more text" in short.fix


def machine_with(root: Path, *, gpus: int = 0, chips: int = 0) -> Path:
    """Make the files of a machine's kernel for GPUs and TPU chips."""
    for n in range(gpus):
        (root / "dev").mkdir(parents=True, exist_ok=True)
        (root / f"dev/nvidia{n}").touch()
        folder = root / f"proc/driver/nvidia/gpus/0000:0{n}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t NVIDIA H100 80GB HBM3\nDevice Minor: \t {n}\n")
    for n in range(chips):
        device = root / f"sys/bus/pci/devices/{n}"
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x1ae0\n")
        (device / "device").write_text("0x006f\n")
    return root


def test_accelerators_are_named_and_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(write_config(tmp_path))
    none = tmp_path / "none"
    gpus, chips = machine_with(tmp_path / "gpus", gpus=4), machine_with(tmp_path / "chips", chips=4)
    here = {"JAX_PLATFORMS": "cpu"}
    found = doctor_machine.check_accelerators(None, here, none)
    assert (found.status, found.found.partition(";")[0]) == ("ok", "no GPU or TPU here")
    assert "2 islands on emulated CPU devices" in doctor_machine.check_accelerators(config, here, none).found
    # A GPU that JAX cannot use is a warning with the remedy.
    monkeypatch.setattr(machine, "CUDA_PLUGINS", ("no_such_plugin",))
    found = doctor_machine.check_accelerators(None, here, gpus)
    assert (found.status, found.found) == ("warn", "4 GPUs here, but JAX has no CUDA plugin")
    assert found.fix == "pip install 'jax[cuda13]'"
    monkeypatch.setattr(machine, "CUDA_PLUGINS", ("json",))
    assert doctor_machine.check_accelerators(None, here, gpus)[1:] == ("ok", "4 NVIDIA H100 80GB HBM3", "")
    local = doctor_machine.check_accelerators(config, here, gpus)
    assert local.found == "4 NVIDIA H100 80GB HBM3: 4 GPUs, 2 for each of 2 islands"
    one = doctor_machine.check_accelerators(None, {**here, "CUDA_VISIBLE_DEVICES": "1"}, gpus)
    assert one.found == "1 NVIDIA H100 80GB HBM3"
    assert doctor_machine.check_accelerators(None, here, chips).found == "4 TPU v6e"
    refused = doctor_machine.check_accelerators(config, here, chips)
    assert refused.status == "fail" and "set islands.controller to single" in refused.fix


def test_memory_of_all_islands_on_one_machine(tmp_path: Path) -> None:
    config = load(write_config(tmp_path))
    one = part_of(config, "island-0").memory_bytes
    assert one and doctor_machine.islands_memory(config) == pytest.approx(config.islands.count * one)


@pytest.mark.parametrize(("free_gb", "status"), [(9.216, "fail"), (12.288, "warn"), (20.48, "ok")])
def test_memory(tmp_path: Path, free_gb: float, status: str) -> None:
    path = tmp_path / "meminfo"
    path.write_text(f"MemTotal:  99 kB\nMemAvailable:  {round(free_gb * 1e9) // 1024} kB\n")
    found = doctor_machine.check_memory(10e9, path)
    assert found.status == status and f"{free_gb:.3g} GB available, about 10 GB needed" in found.found
    assert "unknown" in doctor_machine.check_memory(GIB, tmp_path / "none").found


@pytest.mark.parametrize(("free_gib", "status"), [(9, "fail"), (15, "warn"), (30, "ok")])
def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_gib: int, status: str) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or SimpleNamespace(free=free_gib * GIB))
    assert doctor_machine.check_disk(10 * GIB, tmp_path / "runs" / "new").status == status
    # The folder does not exist yet, so its parent is examined.
    assert asked == [tmp_path]


def test_a_folder_in_which_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    found = doctor_machine.check_disk(0, tmp_path / "file" / "run")
    assert found.status == "fail" and "file is not a folder" in found.found and "--run-dir" in found.fix
    # Root may write anywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    found = doctor_machine.check_disk(0, tmp_path / "run")
    assert found.status == "fail" and f"{tmp_path} may not be written" in found.found


def test_environment_of_a_multislice_job() -> None:
    stray = {"MEGASCALE_NUM_SLICES": "2", "PATH": ""}
    found = doctor_machine.check_environment(stray, emulated=False)
    assert found.status == "fail" and "MEGASCALE_NUM_SLICES set" in found.found and "unset" in found.fix
    assert doctor_machine.check_environment(stray, emulated=True).status == "warn"
    assert doctor_machine.check_environment({"PATH": ""}, emulated=False).status == "ok"


def bus(folder: Path, *devices: tuple[str, str]) -> Path:
    for number, (vendor, device) in enumerate(devices):
        place = folder / f"0000:00:{number:02x}.0"
        place.mkdir(parents=True)
        (place / "vendor").write_text(f"{vendor}\n")
        (place / "device").write_text(f"{device}\n")
    folder.mkdir(exist_ok=True)
    return folder


def test_chips_of_this_machine(tmp_path: Path) -> None:
    google, other = "0x1ae0", "0x8086"
    four = bus(tmp_path / "four", *[(google, "0x0062")] * 4, (other, "0x0062"), (google, "0x001f"))
    two = bus(tmp_path / "two", *[(google, "0x0062")] * 2)
    none = bus(tmp_path / "none", (other, "0x1237"))
    assert doctor_machine.check_chips(Topology.parse("v5p:4x4x8"), four).status == "ok"
    assert doctor_machine.check_chips(None, four).status == "ok"
    fewer = doctor_machine.check_chips(Topology.parse("v5p:4x4x8"), two)
    assert fewer.status == "fail" and "2 TPU chips on this machine (v5p), but v5p:4x4x8 has 4 v5p" in fewer.found
    assert doctor_machine.check_chips(Topology.parse("v6e:4x4"), four).status == "fail"
    assert "passed through" in doctor_machine.check_chips(Topology.parse("v6e:4x4"), none).fix


def test_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (1024, 4096))
    assert doctor_machine.check_files(1000).status == "ok", "a syncer raises its soft limit"
    found = doctor_machine.check_files(4000)
    assert found.status == "fail" and "4096 open files allowed, up to 4256 needed" in found.found
    assert "ulimit -Hn" in found.fix


def test_windows_that_limit_a_long_link(tmp_path: Path) -> None:
    (tmp_path / "tcp_rmem").write_text("4096\t131072\t6291456\n")
    (tmp_path / "tcp_wmem").write_text("4096\t16384\t4194304\n")
    # The buffer limits one connection to 70 MB/s.
    limited = doctor_machine.check_windows(60e6, 0.06, 1, tmp_path)
    assert limited.status == "warn" and "tcp_wmem allows 4.19 MB" in limited.found
    assert "transport.stripes to 2" in limited.fix and "tcp_rmem" in limited.fix
    assert doctor_machine.check_windows(60e6, 0.06, 4, tmp_path).status == "ok"
    assert doctor_machine.check_windows(3e9, 0.001, 1, tmp_path).status == "ok"
    assert doctor_machine.check_windows(60e6, 0.06, 1, tmp_path / "none").status == "ok"


def test_step_time_that_a_link_suffices_for() -> None:
    needs = LinkNeeds((100, 300), (200, 200), 4000, sync_every=4, overlap_steps=2)
    # The link carries 400 bytes each way in 4 steps. A round moves 300 up and 200 down in 1.5 round trips, within 2
    # steps minus the half step that the quorum needs to report.
    assert needs.step_s(1000.0, 1000.0, 0.0) == pytest.approx(0.5 / 1.5)
    assert needs.step_s(1000.0, 1000.0, 1.0) == pytest.approx(2.0 / 1.5)
    just = needs.rounds(needs.step_s(1000.0, 1000.0, 1.0), round_trip_s=1.0)
    assert just.overlap_needed(8e-6) == 2 and just.utilisation(8e-6) == pytest.approx(1.0), "the forecast agrees"
    wide = needs._replace(overlap_steps=100)
    # Each step moves these bytes on average.
    assert wide.step_s(100.0, 1000.0, 0.0) == pytest.approx(1.0)
    # Of 4 steps, two move 100 bytes and one moves 300.
    often = wide._replace(turns=(2, 1))
    assert often.step_s(100.0, 1000.0, 0.0) == pytest.approx(1.25) and often.per_step["down_bytes_per_step"] == 150


def test_needs_follow_the_config(tmp_path: Path) -> None:
    config = load(write_config(tmp_path, protocol={"snapshot_every": 0, "sync_every": 6, "num_fragments": 6}))
    island, syncer = part_of(config, "island-0"), part_of(config)
    size = 4 * island.parameters
    assert island.links.joining_bytes == size and len(island.links.up_bytes) == 6
    # The codes have four bits, with scales.
    assert island.parameters / 2 < sum(island.links.up_bytes) < island.parameters
    assert island.disk_bytes == syncer.disk_bytes == 0
    assert island.memory_bytes > PROCESS_BYTES + 3 * size and syncer.memory_bytes > SYNCER_PROCESS_BYTES + 2 * size
    saving = load(write_config(tmp_path, protocol={"snapshot_every": 5}))
    # Both states hold Adam's moments.
    assert part_of(saving, "island-0").disk_bytes >= 2 * 3 * size
    assert part_of(saving).disk_bytes >= 4 * 2 * size
