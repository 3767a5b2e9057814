"""`diloco rewind`: the snapshots of a run, and the return of a stopped run to an older one."""

import json
import signal
from pathlib import Path

import pytest

from diloco_jax.cli.main import main
from diloco_jax.runtime.local.rewind import go_back, list_snapshots
from diloco_jax.runtime.records.files import SUMMARY_FILE, SUPERVISOR_LOCK, complete_checkpoints, global_step_of
from diloco_jax.runtime.records.folder_lock import FolderInUse, FolderLock, LearnerLock
from diloco_jax.runtime.records.signals import WRONG_INPUT
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
    (tmp_path / "tape.jsonl").write_text('["begin"]\n')
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
    moved = go_back(run_dir, 20)
    assert moved == run_dir / "before_rewind_to_20"
    assert steps(run_dir) == [20, 10] and not (run_dir / SUMMARY_FILE).exists()
    assert sorted(path.name for path in (run_dir / SHARDS).iterdir()) == [
        f"step_00000018.{kind}" for kind in ("json", "loader", "shards")
    ]
    found = sorted(str(path.relative_to(moved)) for path in moved.rglob("*") if path.is_file())
    assert found == [f"{SHARDS}/step_00000027.{kind}" for kind in ("json", "loader", "shards")] + [SUMMARY_FILE]
    assert go_back(run_dir, 20) is None, "nothing is newer now"
    (moved / "checkpoints" / "step_00000030").rename(run_dir / "checkpoints" / "step_00000030")
    assert go_back(run_dir, 10) == run_dir / "before_rewind_to_10" and steps(run_dir) == [10]


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
    assert (kind, global_step) == ("rewind", chosen)
    replayed(job.run_dir)
