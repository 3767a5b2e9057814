"""`diloco rewind`: the snapshots of a run, and the return of a stopped run to an older one."""

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from diloco_jax.cli.main import main
from diloco_jax.runtime.local.rewind import go_back, list_snapshots
from diloco_jax.runtime.records.files import (
    REWIND_FILE,
    SUMMARY_FILE,
    SUPERVISOR_LOCK,
    complete_checkpoints,
    global_step_of,
)
from diloco_jax.runtime.records.folder_lock import FolderInUse, FolderLock, LearnerLock
from diloco_jax.runtime.records.signals import WRONG_INPUT
from diloco_jax.runtime.syncer.begin import FAILOVER, REWIND, mode_of
from tests.limits import HANGS_S
from tests.runtime.helpers import call, replayed, wait_for
from tests.runtime.syncer.test_failover import STEPS, Job, folder, tape_of

__all__ = ["folder"]  # a fixture
SHARDS = "states/island-0/host-0-of-1"


def evaluated(step: int, loss: float | None) -> str:
    return json.dumps({"kind": "eval", "t": 1.0, "global_step": step, "loss": loss}) + "\n"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with three snapshots, evaluations, and two states that an island saved."""
    for step in (10, 20, 30):
        (tmp_path / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
    (tmp_path / SHARDS).mkdir(parents=True)
    for step in (18, 27):
        for kind in ("json", "shards", "loader"):
            (tmp_path / SHARDS / f"step_{step:08d}.{kind}").write_text(str(step))
    (tmp_path / "tape.jsonl").write_text('["begin", 0.0]\n')
    (tmp_path / "config.yaml").write_text("name: x\n")
    (tmp_path / "metrics.jsonl").write_text(evaluated(12, 3.0) + evaluated(19, 2.5) + evaluated(28, None))
    (tmp_path / SUMMARY_FILE).write_text("{}")
    return tmp_path


def steps(run_dir: Path) -> list[int]:
    return [global_step_of(path) for path in complete_checkpoints(run_dir / "checkpoints")]


def test_snapshots_are_listed_with_the_loss_up_to_them(run_dir: Path) -> None:
    assert [(each.global_step, each.loss) for each in list_snapshots(run_dir)] == [(30, 2.5), (20, 2.5), (10, None)]


def test_losses_of_void_rounds_do_not_count(run_dir: Path) -> None:
    """The run went back before step 19, and evaluated again at 15."""
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(evaluated(15, 2.0))
    assert [each.loss for each in list_snapshots(run_dir)] == [2.0, 2.0, None]


def test_everything_newer_moves_into_one_folder_and_counts_again_when_it_is_moved_back(run_dir: Path) -> None:
    moved, *more = go_back(run_dir, 20)
    assert moved == run_dir / "before_rewind_to_20" and not more
    assert steps(run_dir) == [20, 10] and not (run_dir / SUMMARY_FILE).exists()
    assert sorted(path.name for path in (run_dir / SHARDS).iterdir()) == [
        f"step_00000018.{kind}" for kind in ("json", "loader", "shards")
    ]
    found = sorted(str(path.relative_to(moved)) for path in moved.rglob("*") if path.is_file())
    assert found == [f"{SHARDS}/step_00000027.{kind}" for kind in ("json", "loader", "shards")] + [SUMMARY_FILE]
    assert go_back(run_dir, 20) == [], "nothing is newer now"
    (moved / "checkpoints" / "step_00000030").rename(run_dir / "checkpoints" / "step_00000030")
    assert go_back(run_dir, 10) == [run_dir / "before_rewind_to_10"] and steps(run_dir) == [10]


def test_states_outside_the_folder_of_the_run_are_void_too(
    run_dir: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path_factory.mktemp("other")
    host = other / "x/island-0/host-0-of-1"
    host.mkdir(parents=True)
    for step in (20, 27):
        (host / f"step_{step:08d}.json").write_text("{}")
    (run_dir / "config.yaml").write_text(f"name: x\ncheckpoints: {{states: {other}}}\n")
    assert main(["rewind", str(run_dir), "--to", "20"]) == 0
    kept = other / "x/before_rewind_to_20"
    assert f"before_rewind_to_20 and {kept};" in capsys.readouterr().out
    assert [path.name for path in host.iterdir()] == ["step_00000020.json"]
    assert (kept / "island-0/host-0-of-1/step_00000027.json").exists()
    assert go_back(run_dir, 20, other / "x") == [], "what was moved is not moved again"
    (run_dir / "config.yaml").write_text("name: x\ncheckpoints: {states: 'memory://other'}\n")
    assert main(["rewind", str(run_dir), "--to", "10"]) == 0
    assert "delete the states of later global steps in memory://other/x" in capsys.readouterr().out


def test_a_folder_on_another_disk_keeps_there_what_became_void(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disks, rename = {"checkpoints": 1, "states": 2}, os.rename

    def disk_of(path: Path) -> int:
        return disks.get(path.relative_to(run_dir).parts[0], 0)

    def rename_on_a_disk(source: Path, target: Path) -> None:
        if disk_of(Path(source)) != disk_of(Path(target)):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        rename(source, target)

    def with_disk(path: Path, **options: Any) -> Any:
        found = stat(path, **options)
        below = path.is_relative_to(run_dir) and path != run_dir
        return os.stat_result((*found[:2], disk_of(path) if below else 0, *found[3:]))

    stat = Path.stat
    monkeypatch.setattr(os, "rename", rename_on_a_disk)
    monkeypatch.setattr(Path, "stat", with_disk)
    moved = go_back(run_dir, 20)
    name = "before_rewind_to_20"
    assert moved == [run_dir / "checkpoints" / name, run_dir / "states" / name, run_dir / name]
    assert steps(run_dir) == [20, 10] and (moved[0] / "step_00000030").is_dir()
    assert (moved[1] / "island-0/host-0-of-1/step_00000027.json").exists() and (moved[2] / SUMMARY_FILE).exists()


def test_the_next_syncer_goes_back_unless_the_newer_snapshots_return(run_dir: Path) -> None:
    assert mode_of(run_dir, rewind=False) == FAILOVER
    [moved] = go_back(run_dir, 20)
    assert mode_of(run_dir, rewind=False) == REWIND
    (moved / "checkpoints" / "step_00000030").rename(run_dir / "checkpoints" / "step_00000030")
    assert mode_of(run_dir, rewind=False) == FAILOVER, "the rewind was undone"


def test_a_step_without_a_snapshot_and_a_folder_without_a_run_are_refused(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rewind", str(run_dir), "--to", "21"]) == WRONG_INPUT
    assert "no snapshot of global step 21; choose one of 30, 20, 10" in capsys.readouterr().err
    (run_dir / "tape.jsonl").unlink()
    assert main(["rewind", str(run_dir)]) == WRONG_INPUT
    assert "holds no run that has started; name the folder of a run" in capsys.readouterr().err
    assert steps(run_dir) == [30, 20, 10]


def test_a_run_without_a_snapshot_names_the_setting(run_dir: Path) -> None:
    for path in (run_dir / "checkpoints").iterdir():
        path.rmdir()
    with pytest.raises(ValueError, match=r"none at all, and protocol\.snapshot_every decides"):
        go_back(run_dir, 20)


def test_nothing_moves_while_a_process_of_the_run_uses_the_folder(run_dir: Path) -> None:
    for lock in (lambda: FolderLock(run_dir, SUPERVISOR_LOCK), lambda: LearnerLock(run_dir, "island-0")):
        with lock(), pytest.raises(FolderInUse):
            go_back(run_dir, 20)
    assert steps(run_dir) == [30, 20, 10]


def test_the_command_prints_how_to_resume(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rewind", str(run_dir)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["30", "20", "10"]
    assert main(["rewind", str(run_dir), "--to", "10"]) == 0
    told = capsys.readouterr().out
    assert f"is now in {run_dir}/before_rewind_to_10" in told and f"--run-dir {run_dir} --resume" in told


@pytest.mark.long
@pytest.mark.net
def test_a_run_continues_from_the_snapshot_that_was_chosen(folder: Path) -> None:
    job = Job(folder, 0.05)
    wait_for(lambda: len(complete_checkpoints(job.run_dir / "checkpoints")) >= 2, "two snapshots")
    refused = call("rewind", job.run_dir, "--to", steps(job.run_dir)[1])
    assert refused.returncode == WRONG_INPUT and "stop it first" in refused.stderr
    job.process.send_signal(signal.SIGINT)
    job.process.communicate(timeout=HANGS_S)
    chosen = steps(job.run_dir)[-1]
    lines = len(tape_of(job.run_dir))
    assert call("rewind", job.run_dir, "--to", chosen).returncode == 0
    job.process = job.begin("--resume")
    _, summary = job.finish()
    assert summary["complete"] and summary["global_steps"] == STEPS
    kind, _, global_step, *_ = tape_of(job.run_dir)[lines]
    assert (kind, global_step) == ("rewind", chosen) and not (job.run_dir / REWIND_FILE).exists()
    replayed(job.run_dir)
