"""The runner: recorded jobs are not run again, a killed runner resumes, and limits of time are kept."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.plan import Choice, make_plan
from experiments.records import read
from experiments.runner import MARGIN_S, Estimate, Runner, TimeIsUp, alone, in_words
from experiments.tests.made import EXPERIMENT
from experiments.text import gather
from experiments.ways import JobFailed, execute, from_run

ROOT = Path(__file__).resolve().parents[3]
# A runner is a process without JAX, but this process may have JAX from earlier tests.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork")


def runner(work: Path, *words: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "scripts")])
    command = [sys.executable, "-m", "experiments.tests.slow_job", "--runner", str(work), *words]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, stderr=subprocess.PIPE, text=True)


def starts(work: Path) -> list[tuple[int, int]]:
    """Return (seed, process) of each started job."""
    path = work / "starts"
    rows = path.read_text().splitlines() if path.exists() else []
    return [(int(seed), int(pid)) for seed, pid in map(str.split, rows)]


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_for_second(work: Path) -> int:
    """Wait until the waiting job has started, and return its process."""
    while len(starts(work)) < 2:
        time.sleep(0.02)
    return starts(work)[-1][1]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a signal at the end of a parent process needs Linux")
def test_a_killed_runner_resumes(tmp_path: Path) -> None:
    first = runner(tmp_path)
    held = wait_for_second(tmp_path)
    first.kill()
    first.communicate()
    # The job ends after its runner.
    while running(held):
        time.sleep(0.02)
    records = tmp_path / "records" / "made.jsonl"
    assert [each["seed"] for each in read(records)] == [0]
    (tmp_path / "go").touch()
    second = runner(tmp_path)
    _, said = second.communicate()
    assert second.returncode == 0, said
    assert [seed for seed, _ in starts(tmp_path)] == [0, 1, 1, 2], "recorded jobs are not run again"
    assert [(each["seed"], each["loss"]) for each in read(records)] == [(0, 1.0), (1, 2.0), (2, 3.0)]
    third = runner(tmp_path)
    _, said = third.communicate()
    assert third.returncode == 0 and len(starts(tmp_path)) == 4, said


def test_ctrl_c_stops_the_running_job(tmp_path: Path) -> None:
    process = runner(tmp_path)
    held = wait_for_second(tmp_path)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode != 0 and "stopping" in said and not running(held)
    assert (tmp_path / "saved").exists(), "an interrupted job has time to save"
    assert len(read(tmp_path / "records" / "made.jsonl")) == 1


def test_minutes_end_the_running_job(tmp_path: Path) -> None:
    process = runner(tmp_path, str((MARGIN_S + 3.0) / 60))
    _, said = process.communicate()
    assert process.returncode == 1 and "time is up" in said, "the second job would wait forever"


def test_a_job_that_cannot_resume_is_not_started_without_enough_time(tmp_path: Path) -> None:
    plain = replace(EXPERIMENT, tuning=None)
    (job, *_) = make_plan(plain, Choice(arms=("m4",)), []).jobs
    assert job.way == "tapes"
    with alone(tmp_path, "made") as lock:
        for share, expected in ((0.5, ValueError), (2.0, TimeIsUp)):
            minutes = (share * job.expected_s + MARGIN_S) / 60
            this = Runner(plain, Choice(arms=("m4",)), tmp_path, tmp_path / "made.jsonl", lock, minutes)
            # Earlier jobs took this time.
            this._ends_s -= 1.5 * job.expected_s
            with pytest.raises(expected, match="m4, seed 0"):
                this.run()


def test_two_runners_do_not_do_one_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.runner.PATIENCE_S", 0.0)
    with (
        alone(tmp_path, "made"),
        pytest.raises(ValueError, match="another process runs made"),
        alone(tmp_path, "made"),
    ):
        pass
    with alone(tmp_path, "made"):
        pass


def test_a_job_without_a_result_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.ways.command", lambda *_: ["no_such_module"])
    (job, *_) = make_plan(EXPERIMENT, Choice(), []).jobs
    with alone(tmp_path, "made") as lock, pytest.raises(JobFailed, match=r"status 1; read .*output\.log"):
        execute(job, tmp_path, lock, lambda process, share: process.wait() >= 0)


def test_estimates_learn(tmp_path: Path) -> None:
    (job, *_) = make_plan(EXPERIMENT, Choice(), []).jobs
    estimate = Estimate()
    assert estimate.of(10.0) == 10.0
    for factor in (1.0, 3.0, 2.0):
        estimate.learn(job, factor * job.expected_s)
    assert estimate.of(10.0) == 20.0
    assert [in_words(s) for s in (40.0, 600.0, 9000.0)] == ["40 s", "10 min", "2.5 h"]


def test_a_run_is_read_from_its_files(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(
        '{"eval_loss": 1.5, "eval_scores": {}, "merged_tokens": 40, "global_steps": 2, "contributors_per_round": 2, '
        '"wire": {"up_bytes": 1, "down_bytes": 2}, "goodput": 1, "num_parameters": 3, "wall_s": 4}'
    )
    rows = [(1.0, "a", 10, 4.0), (1.5, "b", 10, 3.0), (2.0, "a", 20, 2.0)]
    lines = [f'{{"kind": "step", "t": {t}, "learner": "{who}", "tokens": {n}, "loss": {x}}}' for t, who, n, x in rows]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"kind": "eval", "loss": 9}', '{"kind": "st']))
    found = from_run(tmp_path)
    assert found["curve"] == [[10, 4.0], [20, 3.0], [30, 2.0]] and found["tokens"] == 40 and found["loss"] == 1.5


def test_text_is_taken_once_and_within_bounds(tmp_path: Path) -> None:
    source, out = tmp_path / "packages", tmp_path / "texts"
    (source / "a").mkdir(parents=True)
    (source / "a" / "one.py").write_text("x = 1\n" * 100)
    (source / "two.py").write_text("x = 1\n" * 100)  # equal
    (source / "three.md").write_text("words " * 100)
    (source / "short.md").write_text("words")
    (source / "four.bin").write_bytes(b"0" * 1000)
    (source / "five.txt").write_bytes(b"\xff" * 1000)  # not UTF-8
    assert gather(out, [source], shard=1) == 1200
    assert sorted(path.name for path in out.glob("*.jsonl")) == ["part-000.jsonl", "part-001.jsonl"]
    (source / "six.md").write_text("more " * 100)
    assert gather(out, [source]) == 1200, "existing text is kept"
