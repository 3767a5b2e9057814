"""Islands as threads of one process: who gets which devices, who starts again, and that the result is the same."""

import json
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from diloco_jax.cli import main as cli
from diloco_jax.runtime.learner.joined import Joining
from diloco_jax.runtime.learner.run import LearnerRun
from diloco_jax.runtime.local.controller import IslandsRun, split_devices
from diloco_jax.runtime.records.files import ADDRESS_FILE, LOGS, SUMMARY_FILE, TAPE_FILE, TAPES
from diloco_jax.runtime.records.signals import RefusedForGood
from diloco_jax.settings.text import load
from tests.limits import HANGS_S
from tests.runtime.helpers import start, trained, wait_for, write_config

ONE = {"controller": "single"}


def chips(*slices: int) -> Any:
    return [SimpleNamespace(id=index, slice_index=each) for index, each in enumerate(slices)]


def ids(groups: dict[str, Any]) -> list[list[int]]:
    return [[device.id for device in group] for group in groups.values()]


def test_a_slice_for_each_island(tmp_path: Path) -> None:
    config = load(write_config(tmp_path, islands={**ONE, "devices": "auto"}))
    assert ids(split_devices(config, chips(1, 0, 1, 0))) == [[1, 3], [0, 2]]
    with pytest.raises(ValueError, match=r"JAX sees 3 slices, but there are 2 islands; set islands\.count to 3"):
        split_devices(config, chips(0, 1, 2))
    with pytest.raises(ValueError, match="2 islands cannot share 5 devices equally"):
        split_devices(config, chips(0, 0, 0, 0, 0))
    assert ids(split_devices(config, chips(0, 0, 0, 0))) == [[0, 1], [2, 3]]  # one slice, shared


def test_a_slice_is_the_one_that_was_named(tmp_path: Path) -> None:
    islands = {**ONE, "devices": "auto", "topology": "v6e:2x2"}
    config = load(write_config(tmp_path, islands=islands, train={"batch_size": 8}))
    assert ids(split_devices(config, chips(0, 0, 0, 0, 1, 1, 1, 1)))[1] == [4, 5, 6, 7]
    with pytest.raises(ValueError, match="island-0 is to have v6e:2x2, 4 devices, but gets 2"):
        split_devices(config, chips(0, 0, 1, 1))


def test_emulated_islands_may_differ(tmp_path: Path) -> None:
    islands = {**ONE, "devices": 2, "each": {"island-1": {"devices": 4}}}
    config = load(write_config(tmp_path, islands=islands))
    assert ids(split_devices(config, chips(*[0] * 8))) == [[0, 1], [2, 3, 4, 5]]
    with pytest.raises(ValueError, match=r"the islands want 6 devices, but JAX sees 4.*JAX_NUM_CPU_DEVICES=6"):
        split_devices(config, chips(*[0] * 4))


@pytest.mark.parametrize(
    ("islands", "message"),
    [
        ({"pathways": True}, "islands.controller is 'processes'; set it to single"),
        ({**ONE, "devices": 2, "hosts": 2}, "part of one process, not of 2; set islands.hosts to 1"),
        ({**ONE, "devices": "auto", "topology": "v6e:4x4"}, "v6e:4x4 has several hosts, whose chips"),
        ({**ONE, "each": {"island-1": {"devices": "auto"}}}, "only some islands say how many devices"),
    ],
)
def test_settings_that_contradict_one_another(tmp_path: Path, islands: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(write_config(tmp_path, islands=islands))


def test_pathways_brings_slices_of_many_hosts_into_one_process(tmp_path: Path) -> None:
    islands = {"devices": "auto", "topology": "v6e:4x4"}
    train = {"batch_size": 32}
    assert load(write_config(tmp_path, islands=islands, train=train)).island("island-0").hosts == 4
    one = load(write_config(tmp_path, islands={**ONE, **islands, "pathways": True}, train=train))
    assert one.island("island-0").hosts == 1
    assert [len(group) for group in split_devices(one, chips(*[0] * 16, *[1] * 16)).values()] == [16, 16]


def test_chaos_needs_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path, islands={**ONE, "count": 3}, train={"batch_size": 24})
    assert cli.main(["chaos", str(config), "--run-dir", str(tmp_path / "run"), "--faults", "1"]) == cli.WRONG_INPUT
    assert "set islands.controller to processes" in capsys.readouterr().err


class Fleet:
    """Scripted islands with a record of their starts, devices and ends."""

    def __init__(self, tmp_path: Path, body: Callable[[str, int, threading.Event], str], **changes: Any) -> None:
        islands = {**ONE, "restart_delay_s": 0.0, "restarts_max": 2}
        config = load(write_config(tmp_path, islands=islands, **changes))
        self.starts: Counter[str] = Counter()
        self.devices: dict[str, set[int]] = {}
        self.incarnations: dict[str, list[int]] = {}
        self.stops: list[threading.Event] = []
        fleet = self

        class Told:
            def __init__(self, joining: Joining, stop: Any, *, devices: Any, explain: Any) -> None:
                name = joining.learner_id
                fleet.starts[name] += 1
                fleet.incarnations.setdefault(name, []).append(joining.incarnation)
                fleet.devices.setdefault(name, set()).update(device.id for device in devices)
                fleet.stops.append(stop)
                self._run = lambda: body(name, fleet.starts[name], stop)

            def run(self) -> str:
                return self._run()

        self.stop = threading.Event()
        kind: Any = Told
        self.run = IslandsRun(config, tmp_path, "127.0.0.1:1", self.stop, devices=jax.devices()[:4], kind=kind).run


def test_an_island_that_fails_starts_again_alone_on_its_devices(tmp_path: Path) -> None:
    others_end = threading.Event()

    def body(name: str, start: int, stop: threading.Event) -> str:
        if name == "island-0":
            assert others_end.wait(HANGS_S)
            return "run complete"
        if start < 3:
            raise RuntimeError("a device failed")
        others_end.set()
        return "run complete"

    fleet = Fleet(tmp_path, body)
    fleet.run()
    assert fleet.starts == {"island-0": 1, "island-1": 3}
    assert fleet.devices == {"island-0": {0, 1}, "island-1": {2, 3}}
    assert all(stop.is_set() for stop in fleet.stops)  # none is left


def test_wrong_settings_stay_wrong_and_end_a_run_below_its_quorum(tmp_path: Path) -> None:
    def body(name: str, start: int, stop: threading.Event) -> str:
        if name == "island-1":
            raise ValueError("the syncer refused this learner")
        assert stop.wait(HANGS_S), "nobody told this island that the run is over"
        return "stopped"

    fleet = Fleet(tmp_path, body, protocol={"quorum": 2})
    with pytest.raises(ValueError, match="island-1 failed: the syncer refused this learner"):
        fleet.run()
    assert fleet.starts == {"island-0": 1, "island-1": 1}


def test_a_banned_island_stays_away_and_the_others_continue(tmp_path: Path) -> None:
    def body(name: str, start: int, stop: threading.Event) -> str:
        if name == "island-1":
            raise RefusedForGood("island-1 is banned from this run: bad data")
        return "drained"

    fleet = Fleet(tmp_path, body, protocol={"quorum": 2})
    fleet.run()
    assert fleet.starts == {"island-0": 1, "island-1": 1}


def test_too_many_deaths_are_final_but_others_continue(tmp_path: Path) -> None:
    gave_up = threading.Event()

    def body(name: str, start: int, stop: threading.Event) -> str:
        if name == "island-0":
            assert gave_up.wait(HANGS_S)
            return "drained"
        if start == 3:
            gave_up.set()
        raise RuntimeError("again")

    fleet = Fleet(tmp_path, body, protocol={"quorum": 1})
    # Nobody is left, since island-0 has left before.
    with pytest.raises(ValueError, match="island-1 failed: RuntimeError: again"):
        fleet.run()
    assert fleet.starts == {"island-0": 1, "island-1": 3}


def test_a_stop_from_outside_reaches_every_island(tmp_path: Path) -> None:
    both = threading.Barrier(3)

    def body(name: str, start: int, stop: threading.Event) -> str:
        both.wait(HANGS_S)
        assert stop.wait(HANGS_S)
        return "stopped from outside"

    fleet = Fleet(tmp_path, body)
    thread = threading.Thread(target=fleet.run)
    thread.start()
    both.wait(HANGS_S)
    fleet.stop.set()
    thread.join(HANGS_S)
    assert not thread.is_alive() and fleet.starts == {"island-0": 1, "island-1": 1}


class FailsOnce(LearnerRun):
    """Island-1's fifth step of its first incarnation fails."""

    failed = False

    def __init__(self, joining: Joining, *arguments: Any, **options: Any) -> None:
        super().__init__(joining, *arguments, **options)
        step, steps = self.loop.island.step, Counter[str]()

        def failing(*values: Any) -> Any:
            steps["made"] += 1
            if joining.learner_id == "island-1" and steps["made"] == 5 and not FailsOnce.failed:
                FailsOnce.failed = True
                raise RuntimeError("the slice is gone")
            return step(*values)

        self.loop.island.step = failing  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.net
def test_an_islands_thread_dies_and_the_run_completes(tmp_path: Path) -> None:
    path = write_config(tmp_path, islands={**ONE, "devices": 2}, train={"steps": 400, "eval_every": 0})
    run_dir = tmp_path / "run"
    syncer = start("syncer", path, "--run-dir", run_dir)
    try:
        wait_for((run_dir / ADDRESS_FILE).exists, "the syncer's address")
        address = wait_for(lambda: (run_dir / ADDRESS_FILE).read_text(), "the syncer's address")
        IslandsRun(load(path), run_dir, address, threading.Event(), kind=FailsOnce).run()
        output, _ = syncer.communicate(timeout=HANGS_S)
    finally:
        if syncer.poll() is None:
            syncer.send_signal(signal.SIGKILL)
            syncer.communicate()
    assert syncer.returncode == 0, output
    summary = json.loads((run_dir / SUMMARY_FILE).read_text())
    assert summary["complete"] and FailsOnce.failed
    assert [summary["learners"][f"island-{i}"]["restarts"] for i in range(2)] == [0, 1]
    incarnations = Counter(path.name.split(".")[0] for path in (run_dir / TAPES).glob("*.jsonl"))
    assert incarnations == {"island-0": 1, "island-1": 2}
    assert not [thread for thread in threading.enumerate() if thread.name in ("link", "payload")]


@pytest.mark.net
@pytest.mark.slow
def test_one_process_or_several_give_the_same_model(tmp_path: Path) -> None:
    """In lockstep, where nothing depends on who is faster."""
    versions = {}
    for controller in ("single", "processes"):
        folder = tmp_path / controller
        folder.mkdir()
        protocol = {"overlap_steps": 0, "quorum": 2, "lease_ahead_steps": 64}
        islands, train = {"controller": controller, "devices": 2}, {"steps": 18, "eval_every": 0}
        run_dir = trained(folder, islands=islands, protocol=protocol, train=train)
        lines = [json.loads(line) for line in (run_dir / TAPE_FILE).read_text().splitlines()]
        versions[controller] = [line[2:] for line in lines if line[0] == "merged"]
        logs = {path.name for path in (run_dir / LOGS).iterdir() if not path.name.startswith("compiler-")}
        alone = {"island-0.log", "island-1.log"} if controller == "processes" else {"islands.log"}
        assert logs == {"syncer.log"} | alone
    assert len(versions["single"]) == 18 and versions["single"] == versions["processes"]
