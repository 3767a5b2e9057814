"""Requests for the places of islands, with a stand-in for Ray that a test moves by hand."""

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_jax.runtime.local.processes import Process
from diloco_jax.runtime.records.signals import FAILED, INTERRUPTED, TERMINATED, WRONG_INPUT
from diloco_jax.tools.ray import request
from diloco_jax.tools.ray.host import HostProcess, Launch
from diloco_jax.tools.ray.request import Placement, RemoteProcess, Request, options_of, waiting
from tests.limits import HANGS_S


class Answer:
    """A reference to a result of Ray, which is ready at once."""

    def __init__(self, value: Any) -> None:
        self.value = value


class ActorUnavailableError(Exception):
    pass


class Ray:
    """What a request uses of Ray: one node, whose actor a test lets report."""

    def __init__(self) -> None:
        self.ready = False
        self.alive = True
        self.reports: list[Any] = []
        self.sent: list[int] = []
        self.removed = 0
        self.exceptions = SimpleNamespace(ActorUnavailableError=ActorUnavailableError)
        self.util = SimpleNamespace(
            placement_group=lambda bundles, **_: self,
            placement_group_table=lambda _: {"bundles_to_node_id": {0: "abcdef0123"}},
            remove_placement_group=self._remove,
            scheduling_strategies=SimpleNamespace(PlacementGroupSchedulingStrategy=lambda *_, **__: None),
        )

    def _remove(self, group: Any) -> None:
        self.removed += 1

    def nodes(self) -> list[dict[str, Any]]:
        known = {"Alive": self.alive, "NodeManagerAddress": "10.0.0.7", "Resources": {"CPU": 2.0}}
        return [{"NodeID": "abcdef0123", **known}]

    def remote(self, kind: type) -> Any:
        assert kind is HostProcess
        actor = SimpleNamespace(
            start=SimpleNamespace(remote=lambda launch: Answer(None)), report=SimpleNamespace(remote=self._report)
        )
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: actor))

    def _report(self, signals: list[int]) -> Answer:
        self.sent += signals
        return Answer(self.reports.pop(0) if self.reports else (b"", None))

    def wait(self, answers: list[Any], num_returns: int = 1, timeout: float = 0.0) -> tuple[list[Any], list[Any]]:
        done = [each for each in answers if each is not self or self.ready]
        return done, [each for each in answers if each not in done]

    def get(self, answers: Any) -> Any:
        if isinstance(answers, list):
            return [self.get(each) for each in answers]
        value = getattr(answers, "value", None)
        if isinstance(value, Exception):
            raise value
        return value

    def kill(self, actor: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "POLL_S", 0.001)
    monkeypatch.setattr(request, "PLACED_AT_ONCE_S", 0.0)


def asked(ray: Any, folder: Path) -> tuple[Request, Process, list[str]]:
    lines: list[str] = []
    # The group's method `ready` returns a reference, and here it is the group itself.
    group = SimpleNamespace(ready=lambda: ray)
    ray.util.placement_group = lambda bundles, **_: group
    placement = Placement("island-3", "run island-3 1", "10.0.0.1:5", [{"CPU": 1}], [LAUNCH], folder / "log")
    made = Request(ray, placement, lines.append, lambda words: lines.append(f"phase: {words}"))
    return made, Process("island-3", made.processes[0], folder / "log"), lines


LAUNCH = Launch((), {}, "", {}, "")


def ended(made: Request) -> int:
    made.join(HANGS_S)
    assert made.ended
    return made.processes[0].wait(0)


def test_an_island_waits_once_then_starts_and_its_output_is_kept(tmp_path: Path) -> None:
    ray = Ray()
    ray.reports = [(b"one\n", None), ActorUnavailableError(), (b"two\n", None), (b"three\n", 0)]
    made, process, lines = asked(ray, tmp_path)
    while not lines:
        time.sleep(0.001)
    assert process.process.poll() is None
    ray.ready = True
    assert ended(made) == 0
    waits = ["island-3 waits for {CPU: 1}", "phase: waits for {CPU: 1}", "phase: "]
    assert lines == [*waits, "island-3 starts on node abcdef01 at 10.0.0.7", "phase: "]
    assert (tmp_path / "log").read_text() == "one\ntwo\nthree\n" and ray.removed == 1


def test_an_island_that_waits_ends_when_it_is_asked(tmp_path: Path) -> None:
    ray = Ray()
    made, process, _ = asked(ray, tmp_path)
    process.process.send_signal(signal.SIGTERM)
    assert ended(made) == INTERRUPTED and ray.removed == 1


def test_signals_reach_the_process(tmp_path: Path) -> None:
    ray = Ray()
    ray.ready = True
    made, process, lines = asked(ray, tmp_path)
    while not lines:
        time.sleep(0.001)
    time.sleep(0.01)
    process.process.send_signal(signal.SIGTERM)
    while not ray.sent:
        time.sleep(0.001)
    ray.reports = [(b"bye\n", INTERRUPTED)]
    assert ended(made) == INTERRUPTED and ray.sent == [signal.SIGTERM]


@pytest.mark.parametrize(
    ("alive", "error", "status", "said"),
    [
        (False, RuntimeError("the actor died"), TERMINATED, "Ray lost its node abcdef01 at 10.0.0.7"),
        (True, RuntimeError("first\n  the last line\n"), FAILED, "Ray ended it, RuntimeError: the last line"),
        (True, RuntimeError("x\nModuleNotFoundError: No module named 'diloco_jax'"), WRONG_INPUT, "on every node"),
    ],
)
def test_errors_of_ray_have_a_status(tmp_path: Path, alive: bool, error: Exception, status: int, said: str) -> None:
    ray = Ray()
    ray.ready, ray.reports = True, [error]
    ray.alive = alive
    made, process, _ = asked(ray, tmp_path)
    assert ended(made) == status
    assert said in process.describe_exit() and ray.removed == 1


def test_a_kill_that_ray_cannot_deliver_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "KILL_S", 0.01)
    process = RemoteProcess()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0)
    process.kill()
    assert process.wait() == process.poll() == -signal.SIGKILL


NODES = [
    {"Alive": True, "Resources": {"CPU": 4.0, "GPU": 1.0}},
    {"Alive": True, "Resources": {"CPU": 1.0, "site": 1.0}},
    {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}},
]


@pytest.mark.parametrize(
    ("bundle", "hosts", "said"),
    [
        ({"CPU": 4, "GPU": 1}, 1, "waits for {CPU: 4, GPU: 1}"),
        ({"CPU": 0.5}, 2, "waits for 2 x {CPU: 0.5}"),
        ({"CPU": 1, "GPU": 8}, 1, "waits for {CPU: 1, GPU: 8}; no node of the cluster has {GPU: 8}: add one, or"),
        # Each amount is somewhere, but not on one node.
        ({"GPU": 1, "site": 1}, 1, "waits for {GPU: 1, site: 1}; no node of the cluster has {GPU: 1, site: 1}: "),
    ],
)
def test_what_no_node_has_is_named(bundle: dict[str, float], hosts: int, said: str) -> None:
    assert waiting([bundle] * hosts, NODES).startswith(said)
    assert ("no node" in waiting([bundle] * hosts, NODES)) == ("no node" in said)


def test_options_of_an_actor() -> None:
    assert options_of({"CPU": 2, "GPU": 0.5, "site": 1}) == {"num_cpus": 2, "num_gpus": 0.5, "resources": {"site": 1}}
    assert options_of({"TPU": 4, "memory": 100}) == {"num_cpus": 0, "memory": 100, "resources": {"TPU": 4}}


def test_a_process_on_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node gets its files and starts the process, whose output, signals and end pass through."""
    code = "import os, sys, time; print(os.environ['KEY'], os.getcwd(), flush=True); time.sleep(600)"
    monkeypatch.setattr(sys, "executable", stand_in(tmp_path, code))
    folder = tmp_path / "run"
    launch = Launch(("learner",), {"KEY": "value"}, str(folder), {"certs/a.key": b"secret"}, "/nowhere")
    host = HostProcess()
    host.start(launch.with_arguments(("--coordinator", "10.0.0.1:7")))
    output, status, begins_s = b"", None, time.monotonic()
    while b"\n" not in output and time.monotonic() < begins_s + HANGS_S:
        more, status = host.report([])
        output += more
    assert output.decode().split() == ["value", str(folder)] and status is None
    assert (folder / "certs/a.key").read_bytes() == b"secret"
    assert (folder / "certs/a.key").stat().st_mode & 0o077 == 0
    while status is None:
        _, status = host.report([signal.SIGTERM])
    assert status == -signal.SIGTERM
    with contextlib.suppress(OSError):
        assert host.free_address("127.0.0.1:9").startswith("127.0.0.1:")


def stand_in(folder: Path, code: str) -> str:
    """Write a program that runs the code in place of `python -m diloco_jax`."""
    path = folder / "python"
    path.write_text(f"#!{sys.executable}\n{code}\n")
    path.chmod(0o755)
    return str(path)
