"""The thread that inflicts faults: whom it spares, what it waits for, and that it takes everything back."""

import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco_jax.runtime.records.tape_file import Tail
from diloco_jax.tools.chaos.actions import Saboteur, next_donor, order_file
from diloco_jax.tools.chaos.driver import Driver
from diloco_jax.tools.chaos.ledger import WAITS_FILE, longest_waits
from diloco_jax.tools.chaos.relay import Relay
from diloco_jax.tools.chaos.schedule import ChaosFault
from tests.runtime.helpers import wait_for

pytestmark = pytest.mark.net
ISLANDS = ("a", "b", "c", "d")
STEPS = 1_000_000_000


def fault(number: int, kind: str, target: str, duration_s: float = 0.0, **fields: Any) -> ChaosFault:
    return ChaosFault(number=number, kind=kind, target=target, at_step=0, duration_s=duration_s, **fields)


class Stage:
    """Job with a real folder, real relays, and one process that sleeps in place of all others."""

    def __init__(self, folder: Path, *schedule: ChaosFault) -> None:
        self.folder = folder
        self.said: list[str] = []
        self.signals: list[tuple[str, signal.Signals]] = []
        self.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        self.relays = {name: Relay("127.0.0.1:1") for name in ISLANDS}
        (folder / "clock.json").write_text(json.dumps({"began_unix_s": time.time() - 1000.0}))
        (folder / "tape.jsonl").write_text('["Hello"]\n')
        self.saboteur = Saboteur(folder, self, self.relays)
        self.driver = Driver(schedule, ISLANDS, STEPS, 3.0, folder, self, self.saboteur, self.said.append)
        self.round = 0
        self.incarnation = dict.fromkeys(ISLANDS, 1)
        self.merge(*ISLANDS)

    def pid(self, name: str) -> int | None:
        return self.process.pid

    def send(self, name: str, number: signal.Signals) -> bool:
        self.signals.append((name, number))
        if number != signal.SIGKILL:
            self.process.send_signal(number)
        return True

    @property
    def killed(self) -> list[str]:
        return [name for name, number in self.signals if number == signal.SIGKILL]

    def merge(self, *members: str) -> None:
        """Record two rounds that merged these islands, and then enough quiet time for all of them to settle."""
        for _ in range(2):
            self.round += 1
            for name in members:
                self.write(kind="step", t=self.now_s(), learner=name, incarnation=self.incarnation[name], global_step=0)
            self.write(kind="merged", t=self.now_s() + 1e-6, global_step=self.round, members=members)
        self.driver.poll()
        for recovery in self.driver.ledger.recoveries:
            recovery.settled = recovery.merged_s is not None
        self.driver.poll()

    def now_s(self) -> float:
        time.sleep(0.001)  # times differ
        return time.time() - json.loads((self.folder / "clock.json").read_text())["began_unix_s"]

    def write(self, **record: Any) -> None:
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def polls(self, times: int) -> None:
        for _ in range(times):
            self.driver.poll()

    def rejoin(self, *names: str) -> None:
        """They come back as new incarnations, and are merged."""
        for name in names:
            self.incarnation[name] = 2
        self.merge(*names)
        self.driver.poll()

    def stops(self) -> bool:
        """Tell if the process stands still."""
        stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "T"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for relay in self.relays.values():
            relay.close()
        self.driver.conclude()


@pytest.fixture
def stages(tmp_path: Path) -> Iterator[Any]:
    made: list[Stage] = []

    def make(*schedule: ChaosFault) -> Stage:
        made.append(Stage(tmp_path, *schedule))
        return made[-1]

    yield make
    for stage in made:
        stage.close()


def test_one_island_is_always_left_alone(stages: Any) -> None:
    stage = stages(*(fault(number, "kill", name) for number, name in enumerate(ISLANDS, 1)))
    stage.polls(10)
    assert stage.killed == ["a", "b", "c"] and stage.driver.skipped == 1
    stage.rejoin("b")
    assert stage.killed == ["a", "b", "c", "d"] and stage.driver.skipped == 0


def test_an_island_is_not_hit_before_it_recovered(stages: Any) -> None:
    stage = stages(fault(1, "kill", "a"), fault(2, "kill", "a"), fault(3, "kill", "b"))
    stage.polls(5)
    assert stage.killed == ["a"], "faults keep their order"
    stage.rejoin("a")
    assert stage.killed == ["a", "a", "b"]
    assert stage.driver.inflicted == 3 and any("a is merged again" in line for line in stage.said)


def test_nothing_begins_before_everybody_was_merged_nor_before_its_step(stages: Any) -> None:
    stage = stages(ChaosFault(number=1, kind="kill", target="a", at_step=4))
    stage.polls(1)
    assert stage.killed == []
    stage.merge("a")
    stage.driver.poll()
    assert stage.killed == ["a"]


def test_what_the_run_is_too_short_for_is_skipped(stages: Any) -> None:
    stage = stages(fault(1, "stop", "a", 1e9), fault(2, "kill", "b"))
    stage.polls(3)
    assert stage.signals == [("b", signal.SIGKILL)]
    assert stage.driver.skipped == 1 and stage.driver.inflicted == 1


def test_donor_is_killed_when_the_first_part_of_its_state_comes(stages: Any) -> None:
    stage = stages(fault(1, "kill-donor", "a"))
    stage.driver.poll()
    assert stage.killed == ["a"]
    with (stage.folder / "tape.jsonl").open("a") as tape:
        tape.write('["StatePart",1.0,"b",1,"d",7]\n["StatePart",1.0,"c",1,"a",7]\n["StatePart",1.0,"d",1,"a",7]\n')
    stage.driver.poll()
    assert stage.killed == ["a", "c"]
    assert stage.driver.ledger.unwell == {"a", "c"}
    stage.rejoin("a", "c")
    assert stage.driver.ledger.unwell == set() and stage.driver.inflicted == 1


def test_who_recovers_without_a_donor_ends_no_other_process(stages: Any) -> None:
    stage = stages(fault(1, "kill-donor", "a"))
    stage.polls(1)
    stage.rejoin("a")
    assert stage.killed == ["a"] and any("no donor that could be killed" in line for line in stage.said)


def test_stopped_process_continues_when_its_time_is_over(stages: Any) -> None:
    stage = stages(fault(1, "stop", "a", 0.05))
    stage.polls(1)
    wait_for(stage.stops, "the stop")
    wait_for(lambda: stage.polls(1) or not stage.stops(), "the end of the stop")
    assert [number for _, number in stage.signals] == [signal.SIGSTOP, signal.SIGCONT]
    assert stage.driver.ledger.recoveries[0].ended_s is not None


def test_disk_of_the_syncer_is_full_until_it_is_not(stages: Any) -> None:
    stage = stages(fault(1, "full-disk", "syncer", 3000.0))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    stage.driver.poll()
    limit = resource.prlimit(stage.process.pid, resource.RLIMIT_FSIZE)[0]
    assert limit == min((stage.folder / name).stat().st_size for name in ("tape.jsonl", "metrics.jsonl"))
    stage.saboteur.take_back_all()
    assert resource.prlimit(stage.process.pid, resource.RLIMIT_FSIZE) == before


def test_end_of_the_run_ends_every_fault(stages: Any) -> None:
    stage = stages(fault(1, "black-hole", "a", 3000.0), fault(2, "stop", "b", 3000.0))
    stage.polls(2)
    wait_for(stage.stops, "the stop")
    stage.write(kind="finished", t=stage.now_s(), global_step=STEPS, members=[])
    stage.polls(1)
    wait_for(lambda: not stage.stops(), "the end of the stop")


def test_bad_values_are_ordered_by_file_and_signal(stages: Any) -> None:
    stage = stages(fault(1, "nan", "a", how="huge", amount=12))
    stage.polls(1)
    assert json.loads(order_file(stage.folder, "a").read_text()) == {"values": 12, "how": "huge"}
    assert stage.signals == [("a", signal.SIGUSR1)]
    assert stage.process.wait() == -signal.SIGUSR1, "it has no handler: it was told"


def test_a_cut_waits_until_there_is_something_to_cut(stages: Any) -> None:
    stage = stages(fault(1, "cut", "a", how="rst"))
    stage.polls(3)
    assert stage.driver.inflicted == 0


def test_what_happened_is_written_down(stages: Any) -> None:
    stage = stages(fault(1, "kill", "a"))
    stage.polls(1)
    stage.rejoin("a")
    lines = [json.loads(line) for line in (stage.folder / "chaos" / "faults.jsonl").read_text().splitlines()]
    assert [(row["event"], row["fault"], row["target"]) for row in lines] == [("begin", 1, "a"), ("recovered", 1, "a")]


def test_tail_gives_each_whole_line_once(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = Tail(path)
    assert list(tail.lines()) == []
    path.write_bytes(b"one\ntw")
    assert list(tail.lines()) == [b"one\n"]
    with path.open("ab") as file:
        file.write(b"o\n")
    assert list(tail.lines()) == [b"two\n"] and list(tail.lines()) == []
    assert list(Tail(path, from_end=True).lines()) == []
    assert next_donor(Tail(tmp_path / "none", from_end=True), "a") == ""


def test_waits_count_while_an_island_is_well(stages: Any) -> None:
    stage = stages(fault(1, "kill", "a"))
    stage.driver.poll()
    began_s = stage.driver.ledger.recoveries[0].begun_s
    path = stage.folder / "chaos" / WAITS_FILE.format(name="a", incarnation=1)
    path.write_text(f"[{began_s - 1}, 0.25]\n[{began_s + 2}, 9.0]\n[{began_s + 5}")
    assert longest_waits(stage.folder, stage.driver.ledger.recoveries) == {"median": 0.25, "max": 0.25}
    assert longest_waits(stage.folder, []) == {"median": 9.0, "max": 9.0}
