"""A second process for a folder in use is refused, changes nothing there, and the run does not notice it."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco_jax.runtime.local.machine import AT_INPUT
from diloco_jax.runtime.local.run import LocalRun, RunFailed
from diloco_jax.runtime.records.files import SUPERVISOR_LOCK, SYNCER_LOCK
from diloco_jax.runtime.records.folder_lock import FolderInUse, FolderLock, LearnerLock, refuse_if_locked
from diloco_jax.settings.text import load
from tests.runtime.helpers import SLOW_STEP_S, call, notes, run, wait_for, write_config
from tests.runtime.local.test_local import FOREVER, ScriptedRun, until
from tests.runtime.syncer.test_failover import Job, folder

__all__ = ["folder"]  # a fixture

FILES = {
    "tape.jsonl": '["begin",0.0,[]]\n["tick",1.0]\n["to',
    "summary.json": '{"complete": false}',
    "status.json": '{"state": "running"}',
    "syncer.address": "127.0.0.1:1",
    "metrics.jsonl": "{}\n",
    "checkpoints/step_00000030/meta": "",
    "logs/syncer.log": "line\n",
}


@pytest.fixture
def in_use(tmp_path: Path) -> Iterator[Path]:
    """The folder of a run, whose supervisor, syncer and first island are there."""
    run_dir = tmp_path / "run"
    for name, text in FILES.items():
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).write_text(text)
    write_config(run_dir)
    write_config(tmp_path)
    with FolderLock(run_dir, SUPERVISOR_LOCK), FolderLock(run_dir, SYNCER_LOCK), LearnerLock(run_dir, "island-0"):
        yield run_dir


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.mark.parametrize(
    "words",
    [
        "train",
        "train --seed 5",
        "train --resume",
        "train --resume --train.steps 160",
        "syncer",
        "syncer --rewind",
        "baseline",
        "chaos --faults 1 --kinds kill",
        "learner --island island-0",
    ],
)
def test_a_refusal_names_the_holder_and_changes_nothing(
    in_use: Path, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DILOCO_PARENT_PID", raising=False)
    before = contents(in_use)
    name, *options = words.split()
    refused = call(name, in_use.parent / "config.yaml", "--run-dir", in_use, *options)
    assert refused.returncode == 2 and f"process {os.getpid()} (" in refused.stderr, refused
    assert "since 20" in refused.stderr and "stop it first, or choose another --" in refused.stderr
    assert contents(in_use) == before


def test_a_syncer_alone_keeps_supervisors_out(in_use: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DILOCO_PARENT_PID", raising=False)
    (in_use / SUPERVISOR_LOCK).unlink()
    before = contents(in_use)
    refused = call("train", in_use.parent / "config.yaml", "--run-dir", in_use, "--resume")
    assert refused.returncode == 2 and f"process {os.getpid()} (" in refused.stderr, refused
    assert contents(in_use) == before


def test_a_second_run_of_a_config_says_which_folder_it_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line goes to stderr, because stdout of --json is for programs. A named folder needs no line."""
    monkeypatch.delenv("DILOCO_PARENT_PID", raising=False)
    monkeypatch.setattr("diloco_jax.cli.train.train_locally", lambda *_, **__: {"complete": True})
    words = ("train", write_config(tmp_path), "--runs_dir", tmp_path / "runs", "--json")
    first, second = call(*words), call(*words)
    folder = Path(json.loads(first.stdout)["run_dir"])
    assert first.returncode == 0 and "new run" not in first.stderr
    assert json.loads(second.stdout)["run_dir"] == f"{folder}-2"
    remedy = f"to resume the run of {folder}, stop and start with --run-dir {folder} --resume"
    assert second.stderr.splitlines() == [f"{folder} exists, so this new run gets the folder {folder}-2; {remedy}"]
    assert "new run" not in call(*words, "--run-dir", tmp_path / "named").stderr


def test_settings_on_top_of_a_runs_own_config_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of the run read them there. Raised limits are on the tape, too, once."""

    def trained(*_: object, **__: object) -> dict[str, bool]:
        with pytest.raises(FolderInUse):
            refuse_if_locked(tmp_path, SUPERVISOR_LOCK)
        return {"complete": True}

    monkeypatch.delenv("DILOCO_PARENT_PID", raising=False)
    monkeypatch.setattr("diloco_jax.cli.train.train_locally", trained)
    config = write_config(tmp_path)
    (tmp_path / "tape.jsonl").write_text('["begin",0.0,[]]\n')
    words = ("train", config, "--run-dir", tmp_path, "--resume", "--json")
    for options in (("--syncer.restarts_max", "7"), ("--train.steps", "160"), ()):
        done = call(*words, *options)
        assert done.returncode == 0, done
    kept = load(config)
    assert (kept.syncer.restarts_max, kept.train.steps) == (7, 160)
    assert (tmp_path / "tape.jsonl").read_text().splitlines()[1:] == ['["limits",0.0,[80,0,"80"],[160,0,"160"]]']
    refuse_if_locked(tmp_path, SUPERVISOR_LOCK)


def test_a_learner_of_another_machine_does_not_keep_the_name(in_use: Path) -> None:
    """It may be lost with its machine, while its file system does not know yet: the syncer takes the newer one."""
    path = in_use / "health" / "island-0.lock"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"host": "far"}))
    LearnerLock(in_use, "island-0").close()


def test_an_island_comes_back_though_the_address_is_gone(tmp_path: Path) -> None:
    """Whatever took the file away: the supervisor knows what it said, and learners by hand find it again."""
    joins = "read compiled; read address; "
    scripts = [joins + "rm syncer.address; kill -9 $$", until("[ -e syncer.address ]") + "touch back; " + FOREVER]
    job = ScriptedRun(tmp_path, [until("[ -e back ]")], [scripts])
    job.run.run()
    assert job.starts("island-0") == 2 and (tmp_path / "syncer.address").read_text() == "127.0.0.1:1\n"
    assert [words[words.index("--syncer") + 1] for words in job.run.words["island-0"]] == [AT_INPUT, "127.0.0.1:1\n"]


def test_a_resume_that_cannot_start_puts_back_what_the_folder_said(tmp_path: Path) -> None:
    job = ScriptedRun(tmp_path, [""], [[FOREVER]])
    job.run.scripts["syncer"] = ["exit 2"]
    job.run._resume = True
    said = {"status.json": '{"state": "stopped"}', "summary.json": "{}", "syncer.address": "127.0.0.1:9"}
    for name, text in said.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(RunFailed):
        LocalRun.run(job.run)
    assert {name: (tmp_path / name).read_text() for name in said} == said


@pytest.mark.nightly
@pytest.mark.net
def test_a_run_survives_every_second_start_in_its_folder(folder: Path) -> None:
    """After each an island is killed: it finds its syncer, and the run completes."""
    job = Job(folder, SLOW_STEP_S)
    run_dir = job.run_dir
    train = ("train", job.config, "--run-dir", run_dir)
    wait_for(lambda: (run_dir / "config.yaml").exists(), "the first files of the run")
    attack(run_dir, *train, "--seed", "5")
    job.reached(3)
    # No round can close without it, so the run does not end before the last attack.
    other = island_pid(job, "island-1")
    os.kill(other, signal.SIGSTOP)
    attacks = (
        train,
        (*train, "--resume"),
        ("syncer", job.config, "--run-dir", run_dir, "--rewind"),
        ("learner", job.config, "--run-dir", run_dir, "--island", "island-0"),
    )
    kill_island_0(job, 1)
    for number, words in enumerate(attacks, start=2):
        attack(run_dir, *words)
        kill_island_0(job, number)
    os.kill(other, signal.SIGCONT)
    _, summary = job.finish()
    assert summary["complete"] and summary["learners"]["island-1"]["restarts"] == 0
    audit = call("audit", run_dir, "--json")
    assert audit.returncode == 0 and json.loads(audit.stdout)["violations"] == 0, audit
    log = (run_dir / "logs" / "syncer.log").read_text()
    assert "supervisor" not in log and "stop it first" not in log, "the refused ones wrote into the run's logs"


def attack(run_dir: Path, *words: object) -> None:
    config = (run_dir / "config.yaml").read_bytes()
    refused = run(*words)
    assert refused.returncode == 2 and "stop it first, or choose another --" in refused.stderr, refused
    assert (run_dir / "config.yaml").read_bytes() == config and not (run_dir / "summary.json").exists()


def kill_island_0(job: Job, number: int) -> None:
    """Kill it for the so-manieth time, and wait until it has joined again."""
    os.kill(island_pid(job, "island-0"), signal.SIGKILL)
    wait_for(lambda: notes(job.run_dir, "joined", "island-0") == number + 1, f"return {number} of island-0")


def island_pid(job: Job, name: str) -> int:
    about = json.loads((job.run_dir / "health" / f"{name}.lock").read_text())
    return int(about["pid"])
