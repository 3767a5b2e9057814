"""What the supervisor prepares for islands on a Ray cluster; no test here needs Ray."""

import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_jax.runtime.records.files import CONFIG_FILE
from diloco_jax.settings.islands import IslandOverride, IslandsConfig
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import load, save
from diloco_jax.tools.ray import cluster
from diloco_jax.tools.ray.cluster import RayIslands, launch_of, on_cluster, reachable
from tests.limits import HANGS_S
from tests.runtime.helpers import call


def config(**islands: Any) -> RunConfig:
    return RunConfig(islands=IslandsConfig(count=2, ray="auto", **islands))


def test_the_syncer_is_reachable_and_its_connections_are_encrypted(tmp_path: Path) -> None:
    """Another node needs an address of this machine and certificates; islands get their own and no other's."""
    there = reachable(config(), tmp_path, "10.0.0.7")
    assert there.transport.address == "10.0.0.7:0" and there.transport.encrypted
    assert load(tmp_path / CONFIG_FILE) == there
    launch = launch_of(there, "island-1", tmp_path, "10.0.0.7:5", "9", 0)
    assert {*launch.files} == {
        CONFIG_FILE, "certs/ca.pem", "certs/token", "certs/island-1.pem", "certs/island-1.key"
    }  # fmt: skip
    assert launch.files["certs/island-1.key"] == (tmp_path / "certs/island-1.key").read_bytes()
    # A resumed run has the same certificates.
    assert reachable(there, tmp_path, "10.0.0.7") == there == reachable(config(), tmp_path, "10.0.0.7")


def test_transport_of_the_user_stays(tmp_path: Path) -> None:
    for changes in ({"address": "10.0.0.7:50051", "allow_plaintext": True}, {"allow_plaintext": True}):
        ours = replace(config(), transport=replace(config().transport, **changes))
        there = reachable(ours, tmp_path, "10.0.0.7")
        assert there.transport.address.startswith("10.0.0.7:") and not there.transport.encrypted
    assert reachable(config(), tmp_path, "127.0.0.1") == config()


@pytest.mark.parametrize(
    ("islands", "there", "not_there"),
    [
        ({}, {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}, ["XLA_PYTHON_CLIENT_MEM_FRACTION"]),
        ({"resources": {"GPU": 4}}, {}, ["JAX_PLATFORMS", "XLA_PYTHON_CLIENT_MEM_FRACTION"]),
        ({"resources": {"GPU": 0.5}}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.45"}, ["JAX_PLATFORMS"]),
        ({"resources": {"TPU": 4}}, {}, ["JAX_PLATFORMS"]),
    ],
)
def test_environment_of_an_island(
    tmp_path: Path, islands: dict[str, Any], there: dict[str, str], not_there: list[str]
) -> None:
    save(config(), tmp_path / CONFIG_FILE)
    found = launch_of(config(**islands), "island-0", tmp_path, "127.0.0.1:5", "9", 0).environment
    assert found.items() >= there.items() and not {*found} & {*not_there}


def test_hosts_of_an_island_are_told_apart(tmp_path: Path) -> None:
    save(config(), tmp_path / CONFIG_FILE)
    found = launch_of(config(hosts=2), "island-1", tmp_path, "127.0.0.1:5", "9", 1).arguments
    assert found == (
        "learner", str(tmp_path / CONFIG_FILE), "--run-dir", str(tmp_path), "--island", "island-1",
        "--syncer", "127.0.0.1:5", "--incarnation", "9", "--host", "1",
    )  # fmt: skip


def test_islands_that_ask_for_the_same_are_one_group(tmp_path: Path) -> None:
    ray: Any = SimpleNamespace(
        nodes=lambda: [{"Alive": True}, {"Alive": False}],
        get_runtime_context=lambda: SimpleNamespace(gcs_address="10.0.0.1:6379"),
    )
    each = {"island-1": IslandOverride(resources={"GPU": 8}, hosts=2)}
    assert RayIslands(ray, config(each=each), tmp_path, print).describe() == (
        "Ray cluster at 10.0.0.1:6379, 1 node: 1 island with {CPU: 1} for emulated devices each; "
        "1 island with 2 x {GPU: 8} each"
    )


def test_a_lost_head_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run continues while something listens at the head's address, and is stopped once when nothing does."""
    monkeypatch.setattr(cluster, "HEAD_LOST_S", 0.05)
    monkeypatch.setattr(cluster, "HEAD_POLL_S", 0.01)
    listener, stop, lines = socket.create_server(("127.0.0.1", 0)), threading.Event(), list[str]()
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    ray: Any = SimpleNamespace(get_runtime_context=lambda: SimpleNamespace(gcs_address=address))
    with listener:
        RayIslands(ray, config(), tmp_path, lines.append).watch(stop)
        assert not stop.wait(0.1)
    assert stop.wait(HANGS_S)
    assert lines == [f"the head node of the Ray cluster at {address} is lost, so the run stops; start Ray, and resume"]


def test_without_ray_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(ValueError, match=r"ray is missing; in a clone run pip install -e '\.\[ray\]'"),
        on_cluster(config(), tmp_path, print),
    ):
        pass


@pytest.mark.parametrize(
    ("islands", "said"),
    [
        ({"ray": "ray://10.0.0.1:10001"}, r"islands.ray is 'ray://10.0.0.1:10001'; use auto on a node"),
        ({"ray": "10.0.0.1"}, r"islands.ray is '10.0.0.1'; use auto on a node"),
        ({"ray": "auto", "standby": True}, r"islands.standby needs islands on this machine, but islands.ray is auto"),
        ({"ray": "auto", "command": ("python", "a.py")}, r"islands.command needs islands on this machine"),
        ({"ray": "auto", "controller": "single"}, r"islands.controller single needs islands on this machine"),
        ({"resources": {}}, r"islands.resources is empty; name what"),
        ({"resources": {"GPU": 1.5}}, r"islands.resources has GPU: 1.5; use a whole number, or a share"),
        ({"resources": {"CPU": 0}}, r"islands.resources has CPU: 0; use a whole number"),
        ({"resources": {"GPU": 4}, "devices": 8}, r"islands.devices is 8, but islands.resources gives 4 to each of"),
    ],
)
def test_settings_that_do_not_fit_are_refused(islands: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        IslandsConfig(**islands)


def test_devices_and_resources_that_fit() -> None:
    for resources, hosts, devices in (({"GPU": 4}, 2, 8), ({"GPU": 0.5}, 1, 1), ({"CPU": 8}, 1, 4)):
        IslandsConfig(resources=resources, hosts=hosts, devices=devices)


def test_chaos_needs_islands_here() -> None:
    refused = call("chaos", "quickstart", "--islands.ray", "auto")
    assert refused.returncode == 2 and "leave islands.ray out" in refused.stderr
