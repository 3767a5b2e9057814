"""Islands on slices that Pathways takes away: recognised, waited for, not counted; and a proxy that is required."""

import json
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from diloco_jax.cli import main as cli
from diloco_jax.runtime.island.threads import start_thread
from diloco_jax.runtime.learner.joined import Joining
from diloco_jax.runtime.learner.run import LearnerRun
from diloco_jax.runtime.local import controller
from diloco_jax.runtime.local.controller import IslandsRun
from diloco_jax.runtime.local.machine import need_proxy
from diloco_jax.runtime.local.pathways import WAITS, LentSlices, use_pathways
from diloco_jax.runtime.records.files import ADDRESS_FILE, STATES, SUMMARY_FILE, TAPE_FILE, TAPES
from diloco_jax.runtime.records.liveness import read_phases
from diloco_jax.settings.text import load
from tests.limits import HANGS_S
from tests.runtime.helpers import STEP_S, json_lines, start, status, wait_for, write_config
from tests.runtime.local.proxy import LOST, Proxy, elastic

ONE = {"controller": "single", "restart_delay_s": 0.0}
LOSS = jax.errors.JaxRuntimeError(LOST)
ELASTIC = elastic()


def slices(*answers: Any, recognises: Callable[[Exception], bool] | None = None) -> LentSlices:
    """Slices whose test gives these answers in turn, then the last one forever; an exception is raised."""
    told = iter(answers)
    last = [answers[-1]]

    def active(devices: dict[int, Any]) -> frozenset[int]:
        answer = next(told, last[0])
        if isinstance(answer, Exception):
            raise answer
        return frozenset(devices) if answer else frozenset()

    recognise = recognises or (lambda error, **_: ELASTIC.is_error_due_to_slice_down(error, log_traceback=False))
    module: Any = SimpleNamespace(is_error_due_to_slice_down=recognise, get_active_slice_indices=active)
    return LentSlices(module, poll_s=0.0)


def raised_from(error: Exception, cause: Exception) -> Exception:
    try:
        raise error from cause
    except Exception as both:
        return both


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (LOSS, True),
        (jax.errors.JaxRuntimeError("INTERNAL: stream is gone"), True),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"), False),
        (RuntimeError(LOST), False),
        (raised_from(ValueError("a copy failed"), LOSS), True),
        (raised_from(ValueError("a copy failed"), RuntimeError("disk")), False),
    ],
)
def test_only_the_errors_of_a_lost_slice_are_taken_for_one(error: Exception, lost: bool) -> None:
    assert LentSlices(ELASTIC).caused(error) is lost


@pytest.mark.parametrize(
    ("answers", "wait"),
    [
        ((True,), "there"),
        ((False, False, True), "back"),
        ((LOSS, True), "back"),
        ((ValueError("a wrong result"), True), "back"),
        ((False,), "away"),
    ],
)
def test_a_slice_is_tested_until_it_computes(answers: tuple[Any, ...], wait: str) -> None:
    timeout_s = 0.2 if wait == "away" else 20.0
    assert slices(*answers).wait([], timeout_s, lambda: False) == wait


def test_a_test_that_hangs_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()
    module: Any = SimpleNamespace(get_active_slice_indices=lambda _: hangs.wait(20) and {0})
    began_s = time.monotonic()
    assert LentSlices(module).wait([], 60.0, lambda: time.monotonic() - began_s > 0.2) == "over"
    assert LentSlices(module).wait([], 0.2, lambda: False) == "away"
    hangs.set()


class Fleet:
    """Two scripted islands on slices; `body` makes one incarnation of an island."""

    def __init__(self, folder: Path, body: Callable[[str, int], str], found: LentSlices, **islands: Any) -> None:
        config = load(write_config(folder, islands={**ONE, "devices": 2, **islands}, protocol={"quorum": 1}))
        self.starts: Counter[str] = Counter()
        self.explained: list[str] = []
        fleet = self

        class Scripted:
            def __init__(self, joining: Joining, stop: Any, *, devices: Any, explain: Any) -> None:
                self._name, self._explain = joining.learner_id, explain
                fleet.starts[self._name] += 1

            def run(self) -> str:
                try:
                    return body(self._name, fleet.starts[self._name])
                except Exception as error:
                    fleet.explained.append(self._explain(error))
                    raise

        kind: Any = Scripted
        self.stop = threading.Event()
        self.run_dir = folder / "run"
        devices = jax.devices()[:4]
        self.run = IslandsRun(
            config, self.run_dir, "127.0.0.1:1", self.stop, devices=devices, kind=kind, slices=found
        ).run


def test_a_lost_slice_is_not_a_failure_of_its_island(tmp_path: Path) -> None:
    """With restarts_max 0, which would give an island up after its first failure."""

    def body(name: str, start: int) -> str:
        if name == "island-1" and start < 4:
            raise LOSS
        return "drained"

    fleet = Fleet(tmp_path, body, slices(False, True, False, True, False, True), restarts_max=0)
    fleet.run()
    assert fleet.starts == {"island-0": 1, "island-1": 4}
    assert fleet.explained == [WAITS] * 3


def test_an_error_on_a_slice_that_computes_is_counted(tmp_path: Path) -> None:
    """pathwaysutils takes every INTERNAL for a lost slice, and a program may fail with one again and again."""

    def body(name: str, start: int) -> str:
        if name == "island-1":
            raise jax.errors.JaxRuntimeError("INTERNAL: the compiler failed")
        return "drained"

    fleet = Fleet(tmp_path, body, slices(True), restarts_max=2)
    with pytest.raises(ValueError, match="island-1 failed: JaxRuntimeError: INTERNAL"):
        fleet.run()
    assert fleet.starts["island-1"] == 3


def test_a_slice_that_stays_away_is_given_up(tmp_path: Path) -> None:
    def body(name: str, start: int) -> str:
        if name == "island-1":
            raise LOSS
        return "drained"

    fleet = Fleet(tmp_path, body, slices(False), slice_wait_s=0.2)
    with pytest.raises(
        ValueError, match=r"island-1 failed: its slice did not return within 0 s, islands\.slice_wait_s"
    ):
        fleet.run()
    assert fleet.starts["island-1"] == 1


@pytest.mark.parametrize("ends", ["stopped", "complete"])
def test_the_end_of_the_run_ends_the_wait(ends: str, tmp_path: Path) -> None:
    lost = threading.Event()

    def body(name: str, start: int) -> str:
        if name == "island-1":
            lost.set()
            raise LOSS
        assert lost.wait(HANGS_S)
        wait_for(lambda: [phase.words for phase in read_phases(fleet.run_dir)] == [WAITS], "the phase")
        if ends == "stopped":
            fleet.stop.set()
        return {"stopped": "stopped from outside", "complete": "run complete"}[ends]

    fleet = Fleet(tmp_path, body, slices(False))
    fleet.run()
    assert fleet.starts == {"island-0": 1, "island-1": 1}
    assert read_phases(fleet.run_dir) == []


def test_failures_long_ago_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the settings say of restarts_max, for islands that are threads too."""

    def body(name: str, start: int) -> str:
        if name == "island-1" and start < 5:
            raise RuntimeError("once in a while")
        return "drained"

    monkeypatch.setattr(controller, "STEADY_S", -1.0)
    fleet = Fleet(tmp_path, body, slices(True), restarts_max=1)
    fleet.run()
    assert fleet.starts["island-1"] == 5


def test_each_thread_of_an_island_has_its_default_device() -> None:
    found: dict[int, set[Any]] = {}
    done = threading.Barrier(3)

    def look(index: int) -> None:
        found[index] = jnp.zeros(2).devices() | jax.jit(lambda: jnp.ones(2))().devices()
        done.wait(HANGS_S)

    def island(index: int) -> None:
        with jax.default_device(jax.devices()[2 * index]):
            start_thread(lambda: look(index), "helper", daemon=True)

    for index in range(2):
        threading.Thread(target=island, args=(index,)).start()
    done.wait(HANGS_S)
    assert found == {0: {jax.devices()[0]}, 1: {jax.devices()[2]}}


@pytest.mark.parametrize("platforms", ["", "cpu", "tpu,cpu", "proxys"])
def test_pathways_needs_its_proxy(platforms: str) -> None:
    with pytest.raises(ValueError, match=rf"JAX_PLATFORMS is '{platforms}', so .*: set JAX_PLATFORMS=proxy"):
        need_proxy(platforms)


def test_a_run_without_a_proxy_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    config = write_config(tmp_path, islands={**ONE, "pathways": True})
    assert cli.main(["train", str(config), "--run-dir", str(tmp_path / "run"), "--quiet"]) == cli.WRONG_INPUT
    said = capsys.readouterr().err
    assert "set JAX_PLATFORMS=proxy and JAX_BACKEND_TARGET=grpc://HOST:29000" in said and said.count("\n") == 1


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Stand in for pathwaysutils; returns its calls."""
    calls: list[str] = []
    module = SimpleNamespace(initialize=lambda: calls.append("initialize"))
    monkeypatch.setitem(sys.modules, "pathwaysutils", module)
    monkeypatch.setitem(sys.modules, "pathwaysutils.elastic.elastic", ELASTIC)
    platforms = jax.config.jax_platforms
    yield calls
    jax.config.update("jax_platforms", platforms)


def test_without_the_package_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pathwaysutils", None)
    with pytest.raises(ValueError, match=r"pathwaysutils is not installed: install diloco-jax\[pathways\]"):
        use_pathways()


def test_a_backend_that_is_no_proxy_is_refused(package: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="JAX_PLATFORMS is 'cpu'"):
        use_pathways()
    assert package == []
    jax.config.update("jax_platforms", "cpu,proxy")
    own = jax.devices()[0].client
    monkeypatch.setattr("diloco_jax.runtime.local.pathways.backend.get_backend", lambda name: object())
    with pytest.raises(ValueError, match="JAX uses cpu first, because JAX_PLATFORMS is 'cpu,proxy'"):
        use_pathways()
    monkeypatch.setattr("diloco_jax.runtime.local.pathways.backend.get_backend", lambda name: own)
    assert use_pathways().elastic is ELASTIC and package == ["initialize"] * 2


def test_a_proxy_that_does_not_answer_is_a_fault_of_the_moment(
    package: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    jax.config.update("jax_platforms", "proxy")

    def fails(*_: Any) -> Any:
        raise RuntimeError("Unable to initialize backend 'proxy'")

    monkeypatch.setattr(jax, "devices", fails)
    with pytest.raises(ConnectionError, match=r"JAX cannot use Pathways' proxy at .*start the proxy"):
        use_pathways()


# Seconds of a step of island-0 that the run can spare while island-1 starts; it has 120 of them.
SLOW_STEP_S = 1.0


class Story:
    """Two islands behind a proxy: the slice of island-1 is taken once the island has saved a state.

    Island-0 merges alone meanwhile. It makes slow steps while island-1 starts or comes back, so that the run lasts.
    """

    ALONE = 5

    def __init__(self, proxy: Proxy, run_dir: Path) -> None:
        self._proxy, self._run_dir = proxy, run_dir
        # Merged rounds when the slice was taken.
        self._merged = 0
        self._lost = threading.Event()
        # Whether island-1 trains in its first and in its second incarnation.
        self._trained, self._trains = threading.Event(), threading.Event()
        self._incarnations: Counter[str] = Counter()

    @property
    def merged_alone(self) -> bool:
        return self._lost.is_set() and merges(self._run_dir) >= self._merged + self.ALONE

    def make(self, joining: Joining, *arguments: Any, devices: Any, **options: Any) -> LearnerRun:
        run, name = LearnerRun(joining, *arguments, devices=devices, **options), joining.learner_id
        self._proxy.guard(name, run.loop.island, devices)
        self._incarnations[name] += 1
        before = {"island-0": self._keep, "island-1": lambda: self._lose(devices)}[name]
        step, pace = run.loop.island.step, threading.Event()

        def told(*values: Any) -> Any:
            # Without a pause an island makes many steps while a round closes.
            pace.wait(before())
            return step(*values)

        run.loop.island.step = told  # type: ignore[method-assign]
        return run

    def _keep(self) -> float:
        away = self.merged_alone if self._lost.is_set() else not self._trained.is_set()
        return SLOW_STEP_S if away and not self._trains.is_set() else STEP_S

    def _lose(self, devices: Any) -> float:
        self._trained.set()
        if self._incarnations["island-1"] > 1:
            self._trains.set()
        elif list((self._run_dir / STATES / "island-1").rglob("*.json")):
            self._merged = merges(self._run_dir)
            self._proxy.take(devices)
            self._lost.set()
        return STEP_S


def merges(run_dir: Path) -> int:
    return sum(line[0] == "merged" for line in json_lines(run_dir / TAPE_FILE))


@pytest.mark.slow
@pytest.mark.net
def test_a_slice_goes_away_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The island waits, the other one merges on, and the island returns with its moments; no restart is allowed."""
    proxy = Proxy(monkeypatch)
    path = write_config(
        tmp_path,
        islands={**ONE, "devices": 2, "restarts_max": 0},
        train={"steps": 120, "eval_every": 0},
        protocol={"quorum": 1, "snapshot_every": 10},
    )
    run_dir, stop = tmp_path / "run", threading.Event()
    story: Any = Story(proxy, run_dir)
    syncer = start("syncer", path, "--run-dir", run_dir)
    slices = LentSlices(ELASTIC, poll_s=0.2)
    try:
        wait_for((run_dir / ADDRESS_FILE).exists, "the syncer's address")
        address = wait_for(lambda: (run_dir / ADDRESS_FILE).read_text(), "the syncer's address")
        islands = IslandsRun(load(path), run_dir, address, stop, kind=story.make, slices=slices)
        own = {name: set(devices) for name, devices in islands._devices.items()}
        thread = threading.Thread(target=islands.run)
        thread.start()
        wait_for(lambda: WAITS in [phase.words for phase in read_phases(run_dir)], "the wait for the slice")
        said = wait_for(
            lambda: next((each for each in status(run_dir)["learners"] if WAITS in each["reason"]), None),
            "the reason in the status",
        )
        wait_for(lambda: story.merged_alone, "merges of the other island")
        proxy.give_back(own["island-1"])
        thread.join(HANGS_S)
        output, _ = syncer.communicate(timeout=HANGS_S)
    finally:
        stop.set()
        if syncer.poll() is None:
            syncer.send_signal(signal.SIGKILL)
            syncer.communicate()
    assert syncer.returncode == 0 and not thread.is_alive(), output
    assert said["learner"] == "island-1"
    assert json.loads((run_dir / SUMMARY_FILE).read_text())["complete"]
    first, second = (json_lines(tape) for tape in sorted((run_dir / TAPES).glob("island-1.*")))
    saved = {line[1] for line in first if line[0] == "saved"}
    (state,) = [line for line in second if line[0] == "state"]
    assert state[1] == "" and state[3] in saved, "it did not come back with its own moments"
    assert [line[0] for line in second].count("step") > 5
    assert len(list((run_dir / TAPES).glob("island-0.*"))) == 1
    for (name, _), where in proxy.placed.items():
        assert where <= own[name], "an array that nobody placed was on the devices of another island"
    assert {thread for _, thread in proxy.placed} >= {"island-0", "island-1", "compile", "link"}
