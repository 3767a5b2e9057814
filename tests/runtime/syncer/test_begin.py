"""The snapshots that a syncer loads when it starts in a folder, and its records of those that it captures."""

import json
import logging
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.syncer.tape import TapedSyncer, replay
from diloco_jax.protocol.watch.stats import RunStats
from diloco_jax.runtime.records import checkpoint
from diloco_jax.runtime.records.files import REWIND_FILE
from diloco_jax.runtime.records.tape_chain import TapeChain
from diloco_jax.runtime.records.tape_file import TapeFile, read_lines
from diloco_jax.runtime.syncer import snapshots
from diloco_jax.runtime.syncer.begin import FAILOVER, FRESH, REWIND, begin, mode_of
from diloco_jax.runtime.syncer.snapshots import SnapshotWriter
from tests.limits import HANGS_S
from tests.runtime.models import make_model

# Orbax leaves coroutines behind when it finds a damaged folder
pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")


class Process:
    """A syncer's process in a folder, without a listener: its machine only hears of time."""

    def __init__(self, folder: Path, mode: str, now_s: float = 0.0, keep: int = 3) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.model, self.now_s = folder, make_model(), now_s
        self.machine = new_syncer()
        self.tape = TapeFile(folder / "tape.jsonl", threading.Event(), lambda: None, segment_bytes=400)
        self.context: Any = SimpleNamespace(
            config=SimpleNamespace(
                name="run", checkpoints=SimpleNamespace(keep=keep), model=SimpleNamespace(initial="")
            ),
            run_dir=folder,
            stop=threading.Event(),
            clock=SimpleNamespace(now_s=lambda: self.now_s),
            tape=self.tape,
            machine=self.machine,
            taped=TapedSyncer(self.machine, self.tape.write),
            model=self.model,
            stats=RunStats((), 0, self.machine),
        )
        self.writer = SnapshotWriter(self.context)
        begin(self.context, lambda: self.model.parameters().items(), mode, now_s)

    def live(self, *global_steps: int) -> "Process":
        """Reach these global steps, and save each."""
        for global_step in global_steps:
            self.now_s += 1.0
            self.context.taped.on_tick(self.now_s)
            self.machine.progress.global_step = global_step
            self.writer.save()
            self.writer.wait()
        return self

    def ends(self) -> "Process":
        self.writer.close()
        self.tape.close()
        return self

    @property
    def lines(self) -> list[str]:
        return (self.folder / "tape.jsonl").read_text().splitlines()


def new_syncer() -> Syncer:
    return Syncer(ProtocolConfig(sync_every=2, num_fragments=2), 100)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_a_captured_snapshot_is_on_the_tape_and_a_skipped_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process(tmp_path, FRESH)
    go_on, write = threading.Event(), snapshots.write_snapshot

    def slow(*arguments: Any) -> Path:
        assert go_on.wait(HANGS_S)
        return write(*arguments)

    monkeypatch.setattr(snapshots, "write_snapshot", slow)
    process.machine.progress.global_step = 4
    process.writer.save()
    assert process.writer.busy
    process.machine.progress.global_step = 5
    process.writer.save()
    go_on.set()
    process.writer.wait()
    chain = TapeChain()
    chain.add(process.lines[0].encode())
    assert [json.loads(line) for line in process.lines[1:]] == [["snapshot", 0.0, 4, chain.head]]
    meta = checkpoint.CheckpointReader(tmp_path / "checkpoints" / "step_00000004").meta
    assert (meta["tape_bytes"], meta["tape_head"]) == (process.tape.position, chain.head)
    process.ends()


def test_the_last_snapshot_is_written_until_it_is_there_and_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, write, left = Process(tmp_path, FRESH), snapshots.write_snapshot, [1, 2]

    def full(*arguments: Any) -> Path:
        if left:
            left.pop()
            raise OSError(28, "No space left on device")
        return write(*arguments)

    monkeypatch.setattr(snapshots, "write_snapshot", full)
    monkeypatch.setattr(snapshots, "RETRY_S", 0.0)
    process.writer.save_last(lambda: None)
    assert process.writer.saved and sum('"snapshot"' in line for line in process.lines) == 1
    process.ends()


@pytest.mark.parametrize("mode", [FAILOVER, REWIND])
def test_a_snapshot_of_another_run_is_refused_set_aside_and_never_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    """Of the same config, at a byte that this tape has too, and at a later global step than any own one."""
    Process(tmp_path / "other", FRESH, 0.5).live(3, 9).ends()
    own = Process(tmp_path / "run", FRESH).live(4, 6).live(*([6] * 8)).ends()
    shutil.copytree(tmp_path / "other/checkpoints/step_00000009", tmp_path / "run/checkpoints/step_00000009")
    with caplog.at_level(logging.WARNING):
        again = Process(tmp_path / "run", mode, own.now_s, keep=1)
    assert again.machine.global_step == 6 and again.machine.epoch == 2
    assert "cannot be used: it is of another run, or of another history" in caplog.text
    again.live(7, 8).ends()
    assert names(tmp_path / "run") == ["other_history_step_00000009", "step_00000008"]


def test_of_a_tape_that_lost_its_end_later_snapshots_are_set_aside(tmp_path: Path) -> None:
    """Else the highest numbers would be those of lost rounds, and each new snapshot would be deleted at once."""
    own = Process(tmp_path, FRESH).live(4, 6).ends()
    data = (tmp_path / "tape.jsonl").read_bytes()
    (tmp_path / "tape.jsonl").write_bytes(b"".join(data.splitlines(keepends=True)[:4]))
    again = Process(tmp_path, FAILOVER, own.now_s, keep=1).live(5).ends()
    assert names(tmp_path) == ["other_history_step_00000006", "step_00000005"] and again.machine.global_step == 5


def test_a_rewind_with_other_histories_alone_changes_nothing(tmp_path: Path) -> None:
    Process(tmp_path / "other", FRESH, 0.5).live(3).ends()
    Process(tmp_path / "run", FRESH).live(4).ends()
    shutil.rmtree(tmp_path / "run/checkpoints")
    shutil.copytree(tmp_path / "other/checkpoints", tmp_path / "run/checkpoints")
    before = (tmp_path / "run/tape.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"holds 1 snapshots, but this run can continue from none.*of another run, or"):
        Process(tmp_path / "run", REWIND, 9.0)
    assert (tmp_path / "run/tape.jsonl").read_bytes() == before and names(tmp_path / "run") == ["step_00000003"]


def test_snapshots_of_an_older_release_have_no_head_and_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = Process(tmp_path, FRESH)
    monkeypatch.setattr(type(older.tape), "head", "")
    older.live(4).ends()
    assert json.loads(older.lines[-1])[0:3:2] == ["snapshot", 4] and len(json.loads(older.lines[-1])) == 3
    monkeypatch.undo()
    again = Process(tmp_path, REWIND, older.now_s).live(6).ends()
    rewind = json.loads(next(line for line in again.lines if line.startswith('["rewind"')))
    assert rewind[2:4] == [4, 2] and len(rewind) == 5
    assert Process(tmp_path, FAILOVER, again.now_s).ends().machine.global_step == 6


def test_a_ban_on_the_tape_holds_after_a_restart_and_after_a_rewind_to_an_earlier_snapshot(tmp_path: Path) -> None:
    process = Process(tmp_path, FRESH)
    process.context.taped.on_ban("early", "w", 0.5)
    process.live(4)
    process.context.taped.on_ban("late", "x", 1.5)
    process.context.taped.on_admit("early", 1.6)
    process.ends()
    for mode in (REWIND, FAILOVER, REWIND):
        again = Process(tmp_path, mode, 9.0).ends()
        assert list(again.machine.membership.bans) == [("late", "x")], mode
    fresh = new_syncer()
    for _ in replay(read_lines(tmp_path / "tape.jsonl"), fresh):
        pass
    assert fresh.membership.bans.state() == [("late", "x")]


def damage_newest(folder: Path) -> None:
    newest = checkpoint.complete(folder / "checkpoints")[0]
    (newest / "meta" / "data.json").write_text("{")


def test_a_rewind_behind_many_captured_snapshots_is_on_a_tape_that_can_be_replayed(tmp_path: Path) -> None:
    """Ten were captured, only the first was ever whole: more than a replay used to remember. The rewind repeats."""
    now_s, times = 0.0, 2
    process = Process(tmp_path, FRESH, keep=20).live(*range(2, 22, 2))
    for number in range(times):
        for _ in range(9):
            damage_newest(tmp_path)
            shutil.rmtree(checkpoint.complete(tmp_path / "checkpoints")[0])
        process.ends()
        now_s = process.now_s
        process = Process(tmp_path, REWIND, now_s, keep=20)
        assert (process.machine.global_step, process.machine.epoch) == (2, number + 2)
        process.live(*range(4, 22, 2))
    process.ends()
    failed_over = Process(tmp_path, FAILOVER, process.now_s)
    assert failed_over.machine.epoch == times + 2
    failed_over.ends()


def test_a_replay_of_the_tape_of_many_epochs_needs_no_snapshot_on_disk(tmp_path: Path) -> None:
    process = Process(tmp_path, FRESH).live(0).ends()
    for number in range(3):
        process = Process(tmp_path, FAILOVER if number % 2 else REWIND, process.now_s).live(0).ends()
    machine = new_syncer()
    list(replay(read_lines(tmp_path / "tape.jsonl"), machine))
    assert machine.epoch == 4 and machine.state() == process.machine.state()


def test_a_chosen_rewind_ends_when_the_tape_has_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    Process(folder, FRESH).live(4, 6).ends()
    shutil.rmtree(folder / "checkpoints/step_00000006")
    (folder / REWIND_FILE).write_text("4\n")
    mode = mode_of(folder, rewind=False)
    again = Process(folder, mode, 9.0)
    assert (mode, again.machine.global_step, json.loads(again.lines[-1])[0]) == (REWIND, 4, "rewind")
    assert not (folder / REWIND_FILE).exists() and mode_of(folder, rewind=False) == FAILOVER
    again.ends()
