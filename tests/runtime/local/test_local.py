"""The supervisor keeps a run going with processes that do as they are told: what it starts again, and when it gives up.

The processes are shell scripts, so that each way to end can be had at will. Real ones are in test_run, test_failover.
"""

import json
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.runtime.local import processes, run
from diloco_jax.runtime.local.machine import AT_INPUT, Machine
from diloco_jax.runtime.local.processes import BRIEF_S, STEADY_S, Child, Process, Silence
from diloco_jax.runtime.local.run import LocalRun, RunFailed
from diloco_jax.runtime.local.standby import shared_by_several
from diloco_jax.runtime.records.files import PROGRAMS
from diloco_jax.settings.compiler import host_kind
from diloco_jax.settings.islands import IslandOverride
from diloco_jax.settings.run import IslandsConfig, RunConfig, SyncerConfig, TrainConfig
from tests.runtime.helpers import wait_for

FOREVER = "exec sleep 1000"


class Scripted(LocalRun):
    """Starts scripts: the n-th start of a name runs its n-th script, the last one again and again."""

    scripts: dict[str, list[str]]
    started: list[str]
    # name of a process -> the arguments of each of its starts
    words: dict[str, list[list[str]]]

    def _start_process(self, name: str, arguments: list[str], environment: Mapping[str, str]) -> Process:
        self.words.setdefault(name, []).append(arguments)
        number = sum(started == name for started in self.started)
        self.started.append(name)
        # Only the process that compiles ahead has no script; it fails.
        scripts = self.scripts.get(name, ["exit 1"])
        script = scripts[min(number, len(scripts) - 1)]
        log = self._run_dir / "logs" / f"{name}.log"
        with log.open("ab") as stream:
            begins = stream.tell()
            pipe = subprocess.PIPE if {"--standby", AT_INPUT} & {*arguments} else None
            shell = ["sh", "-c", script]
            process = subprocess.Popen(shell, stdin=pipe, stdout=stream, stderr=stream, cwd=self._run_dir)
        return Process(name, process, log, begins)


class ScriptedRun:
    """Supervised run of scripts with a record of its output."""

    def __init__(
        self,
        folder: Path,
        syncer: Sequence[str],
        islands: Sequence[Sequence[str]],
        *,
        quorum: int = 1,
        syncer_restarts: int = 3,
        **settings: Any,  # of the islands
    ) -> None:
        alike: dict[str, Any] = {"devices": 4, "batch_size": 32, "restart_delay_s": 0.0, "restarts_max": 3}
        config = RunConfig(
            islands=IslandsConfig(count=len(islands), **alike | settings),
            syncer=SyncerConfig(restart_delay_s=0.0, restarts_max=syncer_restarts),
            protocol=ProtocolConfig(quorum=quorum),
        )
        self.lines: list[str] = []
        self.stop = threading.Event()
        self.run = Scripted(config, folder, self.lines.append, self.stop)
        self.run.started, self.run.words = [], {}
        listen = "echo 127.0.0.1:1 > syncer.address; "
        self.run.scripts = {f"island-{n}": list(scripts) for n, scripts in enumerate(islands)}
        self.run.scripts["syncer"] = [listen + script for script in syncer]

    @property
    def said(self) -> str:
        return "\n".join(self.lines)

    def starts(self, name: str) -> int:
        return self.run.started.count(name)


def until(condition: str) -> str:
    """Return a script that waits until a shell condition holds."""
    return f"while ! {condition}; do sleep 0.02; done; "


def lines_in(name: str, count: int) -> str:
    return f"[ $(cat {name} 2>/dev/null | wc -l) -ge {count} ]"


def test_a_dead_syncer_is_started_again_and_islands_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text(json.dumps({"state": "running"}))
    job = ScriptedRun(tmp_path, ["kill -9 $$", "exit 1", "exit 0"], [[FOREVER], [FOREVER]])
    job.run.run()
    assert job.said.count("starting it again, islands train on") == 2
    assert job.starts("syncer") == 3
    assert job.starts("island-0") == job.starts("island-1") == 1
    assert "syncer killed by SIGKILL" in job.said and "syncer ended with status 1" in job.said


def test_the_syncer_can_read_what_happens_to_an_island_that_ended(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text(json.dumps({"state": "running"}))
    seen = "cat health/island-0.restart >> seen; echo >> seen; "
    job = ScriptedRun(
        tmp_path,
        [until(lines_in("seen", 2)) + "sleep 0.3; exit 0"],
        [["kill -9 $$", seen + "exit 1", seen + "exit 2"], [FOREVER]],
    )
    job.run.run()
    first, second = (tmp_path / "seen").read_text().splitlines()
    assert first.startswith("`diloco train` restarts it by itself (restart 1, failure 1 of at most 3); its log is ")
    assert "(restart 2, failure 2 of at most 3)" in second
    given_up = (tmp_path / "health" / "island-0.restart").read_text()
    assert "does not restart it, because a restart would fail as well" in given_up and "--resume" in given_up


def test_islands_load_when_their_programs_are_compiled_and_join_when_the_syncer_listens(tmp_path: Path) -> None:
    """The syncer listens only after an island has loaded, and that loads only after the compiler has ended."""
    loads = "touch waits; read line; [ -e compiled ] && [ $line = compiled ] && touch loaded; "
    joins = "read address; echo $address > joined; " + FOREVER
    job = ScriptedRun(tmp_path, [until("[ -s joined ]")], [[loads + joins], [FOREVER]])
    job.run.scripts["syncer"] = [until("[ -e loaded ]") + job.run.scripts["syncer"][0]]
    job.run.scripts["compiler-island-0"] = [until("[ -e waits ]") + "touch compiled"]
    job.run.run()
    assert job.run.started == ["compiler-island-0", "syncer", "island-0", "island-1"]
    assert (tmp_path / "joined").read_text() == "127.0.0.1:1\n"
    assert job.run.words["island-0"][0][-4:-1] == ["--syncer", AT_INPUT, "--incarnation"]


def test_an_island_that_ends_before_the_syncer_listens_is_started_again_with_the_address(tmp_path: Path) -> None:
    job = ScriptedRun(tmp_path, [until("[ -e back ]")], [["touch ended; exit 1", "touch back; " + FOREVER], [FOREVER]])
    job.run.scripts["syncer"] = [until("[ -e ended ]") + job.run.scripts["syncer"][0]]
    job.run.run()
    assert job.starts("island-0") == 2 and "island-0 ended with status 1" in job.said
    assert "127.0.0.1:1" in " ".join(job.run.words["island-0"][1])


def test_nothing_is_compiled_if_an_earlier_run_has_left_the_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # There is no set for a user with a separate cache.
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    sets: list[str] = []
    monkeypatch.setattr(run, "restore", lambda name, run_dir: not sets.append(name))  # type: ignore[func-returns-value]
    damaged = tmp_path / PROGRAMS / host_kind() / "jit_step-cache"
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"half")
    told = 'read line; echo "$line" > draft; mv draft loads; '
    job = ScriptedRun(tmp_path, [until("[ -e loads ]")], [[told + FOREVER], [FOREVER]])
    job.run.run()
    assert job.run.started == ["syncer", "island-0", "island-1"] and not damaged.exists()
    # An island that has to compile removes the set of its kind.
    assert (tmp_path / "loads").read_text().split() == ["compiled", *sets] and all(sets)


def test_islands_that_wait_end_with_a_syncer_that_never_listens(tmp_path: Path) -> None:
    job = ScriptedRun(tmp_path, [], [["echo $$ >> waiting; " + FOREVER]] * 2)
    job.run.scripts["syncer"] = [until(lines_in("waiting", 2)) + "exit 2"]
    with pytest.raises(RunFailed, match="syncer ended with status 2"):
        job.run.run()
    for number in (tmp_path / "waiting").read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(number), 0)


ALIKE, TWO = IslandsConfig(count=3, devices=1), IslandOverride(devices=2)


@pytest.mark.parametrize(
    ("islands", "compiled"),
    [
        (ALIKE, ["island-0"]),
        (replace(ALIKE, each={"island-0": TWO}), ["island-1"]),
        (replace(ALIKE, each={"island-0": TWO, "island-1": replace(TWO, zone="a"), "island-2": TWO}), ["island-0"]),
        (replace(ALIKE, count=2, each={"island-0": TWO}), []),
        (replace(ALIKE, controller="single"), []),
        (replace(ALIKE, devices=2, hosts=2), []),
    ],
)
def test_one_island_of_each_kind_is_compiled(islands: IslandsConfig, compiled: list[str]) -> None:
    config = RunConfig(islands=islands, train=TrainConfig(batch_size=12))
    assert shared_by_several(config, Machine()) == compiled
    assert shared_by_several(config, Machine(gpus=("0", "1"))) == []


def test_a_syncer_that_dies_again_and_again_ends_the_run(tmp_path: Path) -> None:
    job = ScriptedRun(tmp_path, ["echo gone; exit 1"], [[FOREVER]], syncer_restarts=2)
    with pytest.raises(RunFailed, match=r"gone .*given up after 3 starts \(syncer.restarts_max\)") as failed:
        job.run.run()
    assert not failed.value.wrong_input and "train on" not in job.said, "nobody trained yet"
    assert job.starts("syncer") == 3


def test_a_syncer_with_a_wrong_setting_is_not_started_again(tmp_path: Path) -> None:
    job = ScriptedRun(tmp_path, ["exit 2"], [[FOREVER]])
    with pytest.raises(RunFailed, match="syncer ended with status 2") as failed:
        job.run.run()
    assert failed.value.wrong_input
    assert job.starts("syncer") == 1


def test_islands_and_syncer_are_counted_apart(tmp_path: Path) -> None:
    died = "echo x >> died; kill -9 $$"
    syncer = [until(lines_in("died", 3)) + "kill -9 $$", until(lines_in("back", 1)) + "exit 0"]
    scripts = [died, "echo x >> died; exit 1", died, f"echo x >> back; {FOREVER}"]
    job = ScriptedRun(tmp_path, syncer, [scripts], syncer_restarts=1)
    job.run.run()
    assert job.starts("island-0") == 4 and job.starts("syncer") == 2


@pytest.mark.parametrize(
    ("scripts", "starts"),
    [
        (["echo 'ModuleNotFoundError: No module named flux'; exit 1"], 1),  # stays so
        # The module is missing at every start.
        (["touch tapes/island-0.7.jsonl; echo 'ImportError: for once'; exit 1"], 4),
        (["exit 1"], 4),
        # SIGTERM and a preemption notice are not failures.
        (["exit 130"] * 5 + ["exit 1"], 9),
        (["kill $$"] * 5 + ["exit 2"], 6),
        (["exit 143"] * 5 + ["exit 2"], 6),
        (["exit 124"], 4),
    ],
)
def test_how_often_an_island_that_ends_is_started_again(tmp_path: Path, scripts: list[str], starts: int) -> None:
    (tmp_path / "tapes").mkdir()
    job = ScriptedRun(tmp_path, [FOREVER], [scripts])
    with pytest.raises(RunFailed, match="0 islands are left") as failed:
        job.run.run()
    assert job.starts("island-0") == starts
    assert failed.value.wrong_input == ("exit 2" in scripts)


def test_a_program_that_never_joins_fails_and_one_that_joined_has_left(tmp_path: Path) -> None:
    (tmp_path / "tapes").mkdir()
    scripts = [[""], ["touch tapes/island-1.7.jsonl; echo complete"]]
    job = ScriptedRun(tmp_path, [FOREVER], scripts, command=("python", "loop.py"))
    with pytest.raises(RunFailed, match=r"0 islands are left, .*: island-0 ended with status 0") as failed:
        job.run.run()
    assert not failed.value.wrong_input
    assert "island-0 ended without joining the run; call diloco_jax.join in islands.command" in job.lines
    assert "island-1 left: complete" in job.lines
    assert job.starts("island-0") == job.starts("island-1") == 1


def test_brief_incarnations_are_followed_by_longer_and_longer_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(processes.time, "monotonic", lambda: now_s[0])
    ended: Any = SimpleNamespace(poll=lambda: 1, returncode=1)
    child, waits = Child("a", [Process("a", ended, Path())]), []
    for lived_s in (1.0, 2.0, BRIEF_S - 1, *[1.0] * 6, BRIEF_S, 1.0, STEADY_S + 1):
        now_s[0] += lived_s
        child.poll()
        child.plan_restart(0.5)
        waits.append(child.again_at_s - now_s[0])
        child.start_again(child.hosts)
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 0.5, 1.0, 0.5]
    assert child.failures == 1, "counted from 0 after a long incarnation"


def test_silence_is_time_without_computing_or_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, log, programs = [1000.0], tmp_path / "a.log", {"busy": "while :; do :; done", "still": "exec sleep 1000"}
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(processes, "COMPUTED_S", 0.05)
    log.write_text("begins\n")
    begun = {name: subprocess.Popen(["sh", "-c", words]) for name, words in programs.items()}
    try:
        silences = {name: Silence(Process(name, process, log)) for name, process in begun.items()}
        now_s[0] += 400.0
        wait_for(lambda: silences["busy"].seconds() == 0.0, "a process that computes")
        assert silences["still"].seconds() == 400.0
        with log.open("a") as file:
            file.write("drawing the model\n")
        assert silences["still"].seconds() == 0.0
        log.unlink()
        now_s[0] += 1.0
        assert silences["still"].seconds() <= 1.0, "a log that somebody removed does not end the run"
    finally:
        for process in begun.values():
            process.kill()
            process.wait()


def test_a_spare_takes_the_place_of_an_island_that_dies(tmp_path: Path) -> None:
    trains = "mkdir -p health; touch health/island-0.ready; "
    dies = trains + until("[ -e health/island-0.standby ]") + "kill -9 $$"
    spare = "touch health/island-0.standby; read syncer incarnation; rm health/island-0.standby; "
    spare += "echo $syncer $incarnation > went; touch health/island-0.ready; " + FOREVER
    next_one = "touch health/island-0.standby; touch again; read word || touch ended"
    job = ScriptedRun(tmp_path, [until("[ -e again ]") + "exit 0"], [[dies]], standby=True)
    job.run.scripts["island-0.standby"] = [spare, next_one]
    job.run.run()
    assert job.starts("island-0") == 1 and job.starts("island-0.standby") == 2
    assert "killed by SIGKILL" in job.said and "its spare takes over" in job.said
    syncer, incarnation = (tmp_path / "went").read_text().split()
    assert syncer == "127.0.0.1:1" and incarnation.isdecimal()
    assert "--incarnation" not in job.run.words["island-0.standby"][0], "before its word it is nobody"


def test_an_island_whose_spare_cannot_load_starts_as_ever(tmp_path: Path) -> None:
    dies = "mkdir -p health; touch health/island-0.ready; " + until("[ -e tried ]") + "kill -9 $$"
    job = ScriptedRun(tmp_path, [until("[ -e back ]") + "exit 0"], [[dies, "touch back; " + FOREVER]], standby=True)
    job.run.scripts["island-0.standby"] = ["touch tried; exit 1"]
    job.run.run()
    assert job.starts("island-0") == 2


def test_the_hosts_of_an_island_are_started_again_together_and_alone(tmp_path: Path) -> None:
    dies = until("[ -e began ]") + "kill -9 $$"
    job = ScriptedRun(
        tmp_path, [until(lines_in("back", 2)) + "exit 0"], [["touch began; " + FOREVER], [FOREVER]], hosts=2
    )
    job.run.scripts["island-0"].append(f"echo x >> back; {FOREVER}")
    job.run.scripts["island-0.host-1"] = [dies, f"echo x >> back; {FOREVER}"]
    job.run.scripts["island-1.host-1"] = [FOREVER]
    job.run.run()
    assert [job.starts(f"island-0{host}") for host in ("", ".host-1")] == [2, 2]
    assert [job.starts(f"island-1{host}") for host in ("", ".host-1")] == [1, 1]
    assert "island-0.host-1 killed by SIGKILL" in job.said
    leader, follower = (dict(zip(w[2::2], w[3::2], strict=True)) for w in _incarnations(job, "island-0", 0))
    assert (leader.pop("--host"), follower.pop("--host")) == ("0", "1") and leader == follower
    again = dict(
        zip(
            _incarnations(job, "island-0", 1)[0][2::2],
            _incarnations(job, "island-0", 1)[0][3::2],
            strict=True,
        )
    )
    assert again["--coordinator"] != leader["--coordinator"] and again["--incarnation"] > leader["--incarnation"]


def _incarnations(job: ScriptedRun, name: str, incarnation: int) -> list[list[str]]:
    """Return the arguments of the two hosts of an island at one start."""
    return [job.run.words[f"{name}{host}"][incarnation] for host in ("", ".host-1")]


def test_a_drained_island_stays_away_and_others_are_still_looked_after(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text(json.dumps({"state": "running"}))
    leaves = "echo drained; echo x >> left; exit 0"
    dies = until(lines_in("left", 1)) + "kill -9 $$"
    syncer = until(lines_in("back", 1)) + "exit 0"
    job = ScriptedRun(tmp_path, [syncer], [[leaves], [dies, f"echo x >> back; {FOREVER}"]], quorum=2)
    job.run.run()
    assert job.starts("island-0") == 1 and job.starts("island-1") == 2
    assert job.said.count("island-0 left: drained") == 1


RAISED = """Traceback (most recent call last):
  File "loop.py", line 3, in <module>
ValueError: the cause

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "loop.py", line 5, in <module>
    step()
    ^^^^^^
RuntimeError: the step failed
  a note
CLEANUP: name 'open' is not defined
"""


@pytest.mark.parametrize(
    ("status", "words"),
    [(1, "status 1: RuntimeError: the step failed (log:"), (2, "status 2: CLEANUP: name 'open' is not defined (log:")],
)
def test_the_reason_of_an_end_is_the_exception_of_this_incarnation(tmp_path: Path, status: int, words: str) -> None:
    log = tmp_path / "a.log"
    log.write_text(RAISED)
    ended: Any = SimpleNamespace(returncode=status)
    assert words in Process("a", ended, log).describe_exit()
    begins = log.stat().st_size
    with log.open("a") as file:
        file.write("Exception in thread a:\n" + RAISED[RAISED.rindex("Traceback") :] + "nothing to train\n")
    assert f"status {status}: nothing to train (log:" in Process("a", ended, log, begins).describe_exit()


def test_too_few_islands_end_the_run(tmp_path: Path) -> None:
    job = ScriptedRun(tmp_path, [FOREVER], [["echo broken; exit 2"], [FOREVER]], quorum=2)
    words = r"1 island is left, fewer than protocol.quorum = 2: island-0 .* broken"
    with pytest.raises(RunFailed, match=words) as failed:
        job.run.run()
    assert failed.value.wrong_input


def test_islands_that_end_with_the_run_are_not_started_again(tmp_path: Path) -> None:
    """The syncer is busy with the last evaluation; an island is killed on its way out."""
    complete = """echo '{"state": "complete"}' > status.json; echo x >> over; """
    syncer = complete + until(lines_in("ended", 2)) + "sleep 0.5; exit 0"
    ends = until(lines_in("over", 1)) + "echo x >> ended; "
    job = ScriptedRun(tmp_path, [syncer], [[ends + "exit 0"], [ends + "kill -9 $$"]], quorum=2)
    job.run.run()
    assert job.starts("island-0") == job.starts("island-1") == 1
    assert len(job.lines) == 1 and "emulated" in job.said, "what islands run on, and nothing else"


def test_stopping_while_the_syncer_is_away_prints_how_to_resume(tmp_path: Path) -> None:
    job = ScriptedRun(tmp_path, ["kill -9 $$", FOREVER], [[FOREVER]])
    # The supervisor has noticed the death when it prints this line.
    job.run._say = lambda line: job.stop.set()
    with pytest.raises(RunFailed, match="--resume"):
        job.run.run()


def test_nobody_is_left_behind(tmp_path: Path) -> None:
    job = ScriptedRun(tmp_path, [until(lines_in("up", 2)) + "exit 0"], [[f"echo x >> up; {FOREVER}"]] * 2)
    job.run.run()
    children = [*job.run._islands.values(), job.run._syncer]
    assert all(child is not None and child.process.poll() is not None for child in children)
