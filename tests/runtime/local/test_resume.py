"""Every process is dead, and the run resumes from its folder."""

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.syncer.tape import limits_after, limits_before
from diloco_jax.runtime.local.resume import (
    check_no_run,
    check_resumable,
    check_same_run,
    config_of_run,
    raise_limits,
)
from diloco_jax.runtime.local.run import next_incarnation
from diloco_jax.runtime.records.checkpoint import complete
from diloco_jax.runtime.records.files import newest_run_dir
from diloco_jax.runtime.records.status import read_status
from diloco_jax.runtime.syncer.begin import FAILOVER, FRESH, REWIND, _rewind, mode_of
from diloco_jax.settings.run import RunConfig, SyncerConfig, TrainConfig
from diloco_jax.settings.text import load
from diloco_jax.tools.replay.script import fingerprint_of, inputs
from diloco_jax.transport.session.calls import ask_status
from tests.limits import HANGS_S
from tests.runtime.helpers import SLOW_STEP_S, call, json_lines, replayed, run, set_pace, trained, wait_for
from tests.runtime.syncer.test_failover import STEPS, Job, check_end, folder, tape_of
from tests.runtime.syncer.test_snapshots import damage

__all__ = ["folder"]  # a fixture


@pytest.mark.long
@pytest.mark.net
def test_everybody_killed_and_the_newest_snapshot_broken(folder: Path) -> None:
    # The syncer does not restart while the test looks.
    job = Job(folder, 0.05, syncer={"restart_delay_s": 600.0})
    wait_for(lambda: len(complete(job.run_dir / "checkpoints")) >= 2, "two snapshots")
    stop_and_kill_the_syncer(job)
    job.kill_everybody()
    status_of_the_dead(job.run_dir)
    snapshots = [path.name for path in complete(job.run_dir / "checkpoints")]
    damage(job.run_dir / "checkpoints" / snapshots[0])
    before = json_lines(job.run_dir / "tape.jsonl")
    other = call("train", job.config, "--run-dir", job.run_dir, "--resume", "--outer.learning_rate", "0.5")
    assert other.returncode == 2 and "outer.learning_rate is 0.5, but the run" in other.stderr
    again = call("train", job.config, "--run-dir", job.run_dir)
    assert again.returncode == 2 and "continue it (--resume)" in again.stderr

    job.process = job.begin("--resume")
    _, summary = job.finish()
    assert summary["complete"] and summary["global_steps"] == STEPS
    log = (job.run_dir / "logs" / "syncer.log").read_text()
    assert f"skipped {snapshots[0]}, trying the one before" in log
    assert f"the run continues from {snapshots[1]}" in log
    tape = tape_of(job.run_dir)
    assert tape[: len(before)] == before
    kind, now_s, global_step, epoch, *_ = tape[len(before)]
    assert (kind, f"step_{global_step:08d}", epoch) == ("rewind", snapshots[1], 2)
    assert now_s >= before[-1][1]
    check_end(job.run_dir)
    incarnations = {}
    for path in (job.run_dir / "tapes").iterdir():
        incarnations.setdefault(path.name.split(".")[0], []).append(int(path.name.split(".")[1]))
    assert all(len(set(numbers)) == 2 for numbers in incarnations.values()), incarnations
    done = call("train", job.config, "--run-dir", job.run_dir, "--resume")
    assert done.returncode == 2 and "complete" in done.stderr


def stop_and_kill_the_syncer(job: Job) -> None:
    """`diloco status` says what has become of it."""

    def state() -> str:
        return str(read_status(str(job.run_dir), ask_status)["state"])

    syncer = job.pid_of("syncer")
    os.kill(syncer, signal.SIGSTOP)
    wait_for(lambda: state() == "silent", "a word about the process that was stopped")
    told = call("status", job.run_dir)
    assert told.returncode == 1 and f"kill -CONT {syncer}" in told.stdout
    os.kill(syncer, signal.SIGKILL)
    wait_for(lambda: state() == "without a syncer", "a word about the syncer's death")
    assert call("status", job.run_dir).returncode == 0


def status_of_the_dead(run_dir: Path) -> None:
    """Check that `diloco status` reports the run as ended although its file still says "running"."""
    assert '"state": "running"' in (run_dir / "status.json").read_text()
    told = call("status", run_dir)
    assert told.returncode == 1 and told.stdout.startswith("small is not running: last status ")
    assert " s ago, at global step " in told.stdout
    assert f"diloco train {run_dir}/config.yaml --run-dir {run_dir} --resume" in told.stdout
    assert " left" not in told.stdout.splitlines()[0], "a run that has ended has no time left"
    found = json.loads(call("status", run_dir, "--json").stdout)
    assert found["state"] == "not running" and found["said_s_ago"] >= 0 and "--resume" in found["remedy"]


@pytest.mark.long
@pytest.mark.net
def test_a_stopped_run_resumes_and_its_tape_records_it(folder: Path) -> None:
    """The snapshot of the stop is one that the machine never asked for; a syncer that fails over must know it too."""
    every, planned = 8, 80
    numbers = {"sync_every": 6, "num_fragments": 6, "snapshot_every": every, "quorum": 2}
    # Each of the global steps has 8 sequences of 32 tokens.
    tokens = planned * 256 - 100
    # Islands train on while rounds wait for a loaded machine, and the budget counts their steps. So the steps are slow
    # up to the kill: a wait of a minute and a half does not use the budget up.
    set_pace(pace := folder / "pace", 1.5)
    job = Job(folder, pace, train={"steps": 0, "tokens": tokens, "eval_every": 0}, protocol=numbers)
    job.reached(every + 1)
    job.process.send_signal(signal.SIGINT)
    job.process.communicate(timeout=HANGS_S)
    assert job.process.returncode == 130
    stop = complete(job.run_dir / "checkpoints")[0]
    assert int(stop.name.removeprefix("step_")) % every, (
        "the stop came just where a snapshot was due: not what is tested"
    )
    job.process = job.begin("--resume")
    job.reached(int(stop.name.removeprefix("step_")) + 1, epoch=2)
    damage(stop)
    os.kill(job.pid_of("syncer"), signal.SIGKILL)
    job.reached(1, epoch=3)
    set_pace(pace, SLOW_STEP_S)
    _, summary = job.finish()
    assert summary["complete"] and summary["merged_tokens"] >= tokens
    check_budget(job.run_dir, planned)
    for told in (call("audit", job.run_dir), run("replay", job.run_dir)):
        assert told.returncode == 0, told.stdout + told.stderr


@pytest.mark.nightly
@pytest.mark.net
def test_a_complete_run_trains_longer_in_its_folder(folder: Path) -> None:
    """The way that its refusal names; the tape has both parts, under the limits and the schedule of each."""
    numbers = {"sync_every": 6, "num_fragments": 6, "snapshot_every": 20, "quorum": 2}
    changes = {"islands": {"count": 2, "devices": 1}, "train": {"steps": 30, "eval_every": 0}, "protocol": numbers}
    run_dir = trained(folder, **changes)
    train = ("train", folder / "config.yaml", "--run-dir", run_dir, "--resume")
    before = contents(run_dir)
    refused = call(*train)
    assert refused.returncode == 2 and "complete, after 30 global steps" in refused.stderr, refused
    assert contents(run_dir) == before
    _, _, told = refused.stderr.partition("train it longer (")
    _, *words = told.partition(")")[0].split()
    assert words[1:] == [str(run_dir / "config.yaml"), "--run-dir", str(run_dir), "--resume", "--train.steps", "60"]
    done = run(*words, "--quiet")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["complete"] and summary["global_steps"] == 60 and load(run_dir / "config.yaml").train.steps == 60
    kinds = [line[0] for line in tape_of(run_dir)]
    assert kinds.count("limits") == kinds.count("rewind") == 1
    audit = call("audit", run_dir)
    assert audit.returncode == 0, audit
    replayed(run_dir)


def contents(run_dir: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


def check_budget(run_dir: Path, planned: int) -> None:
    """The run ended with the merge that reached its tokens, and the learning rate went all the way with them."""
    config, numbers = load(run_dir / "config.yaml"), [0]
    machine = Syncer(config.protocol, 0, fingerprint_of(run_dir / "tape.jsonl"), budget=config.budget)
    for _ in inputs(run_dir / "tape.jsonl", machine):
        numbers = [*(n for n in numbers if n < machine.progress.merged_tokens), machine.progress.merged_tokens]
    assert numbers[-2] < config.train.tokens <= numbers[-1] and machine.finished
    newest = max((run_dir / "tapes").glob("island-0.*.jsonl"), key=lambda path: int(path.name.split(".")[1]))
    clocks = [line[2] for line in map(json.loads, newest.read_text().splitlines()) if line[0] == "step"]
    assert clocks == sorted(clocks) and config.planned_steps == planned
    # after the syncer was away a merge brings many steps at once; the last one ends the run, so nobody steps after it
    heard, slack = numbers[-2] // 256, config.protocol.overlap_steps + 2
    assert heard - slack <= clocks[-1] <= planned + slack, (clocks[-5:], numbers[-3:])


def test_a_tape_that_ends_in_no_line_of_a_tape_is_named(tmp_path: Path) -> None:
    (tmp_path / "tape.jsonl").write_text('["tick",1.0]\n["tick","x"]\n')
    with pytest.raises(ValueError, match=r"tape.jsonl is damaged: its last line is .*tick"):
        mode_of(tmp_path, rewind=True)


def test_what_may_change_and_what_may_not(tmp_path: Path) -> None:
    began = RunConfig()
    check_same_run(began, replace(began, trackers=(), syncer=SyncerConfig(restarts_max=3)), tmp_path)
    with pytest.raises(ValueError, match=r"protocol\.quorum is 2, but .* started with 1; continue with the run's own"):
        check_same_run(began, replace(began, protocol=ProtocolConfig(quorum=2)), tmp_path)
    with pytest.raises(ValueError, match=r"seed is 1, but .*, and 1 more settings differ; .*--resume\), or start"):
        check_same_run(began, replace(began, seed=1, train=replace(began.train, steps=9)), tmp_path)
    with pytest.raises(ValueError, match=r"own settings \(\S*diloco syncer \S+/config\.yaml --run-dir \S+\), or start"):
        check_same_run(began, replace(began, seed=1), tmp_path, program="syncer")


def test_only_a_run_that_ended_early_can_be_resumed(tmp_path: Path) -> None:
    (tmp_path / "tape.jsonl").write_text('["begin",0.0,[]]\n')
    check_resumable(tmp_path, RunConfig())
    (tmp_path / "summary.json").write_text('{"complete": false}')
    # tests/cli/catalogue.py has the runs that cannot be resumed.
    check_resumable(tmp_path, RunConfig())


def limited(steps: int, tokens: int = 0) -> RunConfig:
    return replace(RunConfig(), train=TrainConfig(steps=steps, tokens=tokens))


BATCH = RunConfig().budget.step_tokens


@pytest.mark.parametrize(
    ("limits", "done", "goes_on", "remedy"),
    [
        ((600, 0), (600, 999), False, "--resume --train.steps 1200"),
        ((601, 0), (600, 999), True, ""),
        ((0, 80 * BATCH), (85, 80 * BATCH), False, f"--resume --train.tokens {160 * BATCH})"),
        ((0, 81 * BATCH), (85, 80 * BATCH), True, ""),
        ((90, 80 * BATCH), (90, 70 * BATCH), False, f"--resume --train.tokens {160 * BATCH} --train.steps 180)"),
        ((91, 80 * BATCH), (90, 70 * BATCH), True, ""),
    ],
)
def test_a_complete_run_resumes_with_higher_limits_only(
    tmp_path: Path, limits: tuple[int, int], done: tuple[int, int], goes_on: bool, remedy: str
) -> None:
    (tmp_path / "tape.jsonl").write_text('["begin",0.0,[]]\n')
    summary = {"complete": True, "global_steps": done[0], "merged_tokens": done[1]}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    if goes_on:
        check_resumable(tmp_path, limited(*limits))
    else:
        with pytest.raises(ValueError, match="a run that is complete") as refused:
            check_resumable(tmp_path, limited(*limits))
        assert remedy in str(refused.value)


@pytest.mark.parametrize(
    ("began", "now", "may"),
    [
        ((600, 0), (1200, 0), True),
        ((600, 0), (599, 0), False),
        ((0, 80 * BATCH), (0, 90 * BATCH), True),
        ((90, 80 * BATCH), (0, 80 * BATCH), True),
        ((0, 80 * BATCH), (90, 80 * BATCH), False),
        ((600, 0), (0, 900 * BATCH), False),
    ],
)
def test_limits_may_be_raised_when_a_run_goes_back_to_a_snapshot(
    tmp_path: Path, began: tuple[int, int], now: tuple[int, int], may: bool
) -> None:
    with pytest.raises(ValueError, match=r"train\.(steps|tokens) is"):
        check_same_run(limited(*began), limited(*now), tmp_path)
    if may:
        check_same_run(limited(*began), limited(*now), tmp_path, rewinds=True)
    else:
        with pytest.raises(ValueError, match=r"train\.(steps|tokens) is"):
            check_same_run(limited(*began), limited(*now), tmp_path, rewinds=True)


def test_the_tape_records_raised_limits_once(tmp_path: Path) -> None:
    tape = tmp_path / "tape.jsonl"
    tape.write_text('["begin",0.0,[]]\n["tick",7.5]\n["to')
    first, second, third = limited(600).limits, limited(1200).limits, limited(1300).limits
    raise_limits(tmp_path, first, first)
    assert tape.read_text().endswith('["to')
    raise_limits(tmp_path, first, second)
    # A config that was not saved in time, after a kill, does not count: the tape does.
    raise_limits(tmp_path, first, second)
    raise_limits(tmp_path, first, third)
    lines = tape.read_text().splitlines()
    assert lines[2:] == [
        '["limits",7.5,[600,0,"600"],[1200,0,"1200"]]',
        '["limits",7.5,[1200,0,"1200"],[1300,0,"1300"]]',
    ]
    assert limits_before(lines) == first and limits_before(lines[3:]) == second and limits_before(lines[4:]) is None
    assert limits_after(lines) == third and limits_after(lines[:2]) is None
    with pytest.raises(ValueError, match="cannot be read"):
        limits_after(['["limits",7.5,[600,0]]'])


@pytest.mark.parametrize("tape", [None, "", '["begin",0'])
def test_snapshots_without_a_tape_are_not_gone_over(tmp_path: Path, tape: str | None) -> None:
    """A new run in their folder would delete its own snapshots: theirs have the higher numbers."""
    for number in (30, 60):
        (tmp_path / "checkpoints" / f"step_{number:08d}").mkdir(parents=True)
    if tape is not None:
        (tmp_path / "tape.jsonl").write_text(tape)
    what = "missing" if tape is None else "empty"
    refusals = [
        lambda: mode_of(tmp_path, rewind=False),
        lambda: mode_of(tmp_path, rewind=True),
        lambda: check_resumable(tmp_path, RunConfig()),
        lambda: check_no_run(tmp_path),
    ]
    for refused in refusals:
        with pytest.raises(ValueError, match=rf"is {what}, but .* holds 2 snapshots, .*step_00000060.*diloco export"):
            refused()


def test_what_was_wrong_with_each_snapshot_is_told(tmp_path: Path) -> None:
    refused = [(tmp_path / f"step_{step:08d}", ValueError(f"reason {step}")) for step in (60, 50, 40, 30, 20)]
    parts: Any = SimpleNamespace(run_dir=tmp_path)
    with pytest.raises(ValueError, match=r"holds 5 snapshots.*step_00000060: reason 60; .*30: reason 30; and 1 more"):
        _rewind(parts, None, refused, 0.0)
    with pytest.raises(ValueError, match=r"holds no snapshot; .*set protocol.snapshot_every"):
        _rewind(parts, None, [], 0.0)


def test_an_empty_config_of_a_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("\n")
    with pytest.raises(ValueError, match=r"config.yaml is empty: .* \(cp CONFIG.yaml"):
        config_of_run(tmp_path)


def test_the_run_that_was_active_last_is_resumed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run named small"):
        newest_run_dir(tmp_path, "small")
    for age, name in enumerate(["small-2", "small", "small-10", "smaller", "small-x", "small-11"]):
        (tmp_path / name).mkdir()
        if name != "small-11":  # which never began
            (tmp_path / name / "tape.jsonl").touch()
            os.utime(tmp_path / name / "tape.jsonl", (1000 - age, 1000 - age))
    assert newest_run_dir(tmp_path, "small").name == "small-2"
    os.utime(tmp_path / "small-10" / "tape.jsonl", (2000, 2000))
    assert newest_run_dir(tmp_path, "small").name == "small-10"


def test_incarnations_never_repeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert abs(next_incarnation(tmp_path, "island-0") - time.time() * 1000) < 60_000
    (tmp_path / "tapes").mkdir()
    for name in ("island-0.5000000000000", "island-0.4", "island-00.9000000000000", "island-0.x"):
        (tmp_path / "tapes" / f"{name}.jsonl").touch()
    assert next_incarnation(tmp_path, "island-0") == 5_000_000_000_001, "the clock was set back"
    assert next_incarnation(tmp_path, "island-1") < 5_000_000_000_000


def test_how_a_syncer_begins(tmp_path: Path) -> None:
    assert mode_of(tmp_path, rewind=False) == FRESH
    with pytest.raises(ValueError, match="nothing to go back to"):
        mode_of(tmp_path, rewind=True)
    (tmp_path / "tape.jsonl").write_text('["begin",0.0')
    assert mode_of(tmp_path, rewind=False) == FRESH, "its first line is not whole"
    (tmp_path / "tape.jsonl").write_text('["begin",0.0,[1,2]]\n["tick",1')
    assert mode_of(tmp_path, rewind=False) == FAILOVER
    assert mode_of(tmp_path, rewind=True) == REWIND
