"""A snapshot is whole or it is not there, and a run never starts from a damaged one."""

import json
import logging
import threading
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from diloco_jax.core.fragments import Slice
from diloco_jax.protocol.effects import SaveSnapshot
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.releases import OtherRelease
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.syncer.subscribers import Subscribers
from diloco_jax.runtime.model.arithmetic import Capture
from diloco_jax.runtime.model.global_model import GlobalModel
from diloco_jax.runtime.records import checkpoint
from diloco_jax.runtime.syncer import snapshots
from diloco_jax.runtime.syncer.run import SyncerDriver
from diloco_jax.runtime.syncer.snapshots import (
    OtherHistory,
    Snapshot,
    SnapshotWriter,
    TapeExtent,
    read_snapshot,
    set_others_aside,
    write_snapshot,
)
from tests.limits import HANGS_S
from tests.protocol.syncer_inputs import running
from tests.runtime.models import gradient, make_model, merge

# Orbax leaves coroutines behind when it finds a damaged folder
pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]


def taken(model: GlobalModel, step: int) -> tuple[Capture, Snapshot]:
    machine = Syncer(ProtocolConfig(sync_every=2, num_fragments=2), 100)
    machine.on_begin(model.digests, 0.0)
    stats = {"learners": {}, "began_s": None, "covered_s": [0.0, 0.1 + 0.2], "outrun": {}}
    return model.capture(bounded=True), Snapshot(step, json.dumps(machine.state()), 1234, 77, stats, 12.5)


def tape_beside(folder: Path, size: int = 1234) -> TapeExtent:
    """Write a tape of `size` bytes; a line ends at byte 1234 if the tape is long enough."""
    path = folder.parent / f"{folder.name}.tape.jsonl"
    path.write_bytes((b"x" * 1233 + b"\n")[:size])
    return TapeExtent(path, size)


def newest(folder: Path, model: GlobalModel) -> tuple[Path, Snapshot] | None:
    return checkpoint.newest_readable(folder, lambda path: read_snapshot(path, model, tape_beside(folder)))


def writer_of(folder: Path, model: GlobalModel, step: int = 0) -> SnapshotWriter:
    """What writes the snapshots of a run that is at this global step, whose folder of snapshots this is."""
    config = SimpleNamespace(name="run", checkpoints=SimpleNamespace(keep=3))
    parts: Any = SimpleNamespace(config=config, run_dir=folder.parent, model=model, stats=SimpleNamespace(tokens=100))
    parts.machine = SimpleNamespace(global_step=step)
    writer = SnapshotWriter(parts)
    writer._folder = folder
    return writer


def damage(path: Path) -> None:
    """Cut the end of every file, as a broken disk may do."""
    for file in path.rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def test_it_comes_back_as_it_was(tmp_path: Path) -> None:
    model = make_model()
    for step in range(1, 5):
        merge(model, step, {"a": gradient(model, step % 2, step)}, step % 2)
    capture, snapshot = taken(model, 4)
    # The path of a folder may contain "..".
    (tmp_path / "here").mkdir()
    path = write_snapshot(tmp_path / "here" / "..", "run", model, capture, snapshot, keep=3)
    assert path == tmp_path / "step_00000004"
    other = make_model()
    back = read_snapshot(tmp_path / "here" / ".." / path.name, other, tape_beside(tmp_path))
    assert back == snapshot._replace(machine=back.machine)
    assert json.loads(back.machine) == json.loads(snapshot.machine)
    assert other.digests == model.digests
    assert other.capture().marks == tuple(mark._replace(base=-1) for mark in capture.marks)
    with pytest.raises(ValueError, match="byte 1234 of a tape that has 1233"):
        read_snapshot(path, make_model(), tape_beside(tmp_path, 1233))
    from orbax.checkpoint import v1 as ocp

    # Orbax reads all of it.
    theirs = ocp.load_checkpointables(path, {"parameters": None, "outer": None})
    parameters, meta = checkpoint.load_parameters(path)
    assert theirs["parameters"].keys() == parameters.keys() and len(theirs["outer"]) == 2
    assert all(np.array_equal(value, theirs["parameters"][name]) for name, value in parameters.items())
    assert all(np.array_equal(value, parameters[name]) for name, value in model.parameters().items())
    assert (meta["global_step"], meta["tokens"], meta["run"], meta["epoch"]) == (4, 77, "run", 1)
    assert meta["versions"] == model.versions and meta["digests"] == model.digests


def test_one_of_a_release_that_is_not_read_is_refused_and_not_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    write_snapshot(tmp_path, "run", model, *taken(model, 3), keep=3)
    monkeypatch.setattr(snapshots, "STAMP", (9, "9.8.7"))
    write_snapshot(tmp_path, "run", model, *taken(model, 6), keep=3)
    with pytest.raises(OtherRelease, match=r"step_00000006 is of diloco-jax 9\.8\.7, protocol 9; this is"):
        newest(tmp_path, model)


@pytest.mark.parametrize("chunk_bytes", [16, 100, 4096])
@pytest.mark.parametrize(("axis", "bounds"), [(0, (0, 2, 4, 7)), (1, (0, 3, 5)), (2, (0, 2, 4))])
def test_slices_may_be_written_in_any_order_and_read_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, axis: int, bounds: tuple[int, ...], chunk_bytes: int
) -> None:
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", chunk_bytes)
    value = np.arange(7 * 5 * 4, dtype=np.float32).reshape(7, 5, 4)
    slices = [Slice("a/b", axis, start, stop) for start, stop in pairwise(bounds)]
    pieces = (checkpoint.SavedPart("parameters", each, value.shape, value[each.at]) for each in slices[::-1])
    reader = checkpoint.CheckpointReader(checkpoint.save_pieces(tmp_path, ["parameters"], pieces, {"global_step": 1}))
    assert all(np.array_equal(reader.piece("parameters", each), value[each.at]) for each in slices)
    assert np.array_equal(reader.array("parameters", "a/b"), value)
    files = [
        file for file in (tmp_path / "step_00000001" / "parameters" / "a" / "b" / "c").rglob("*") if file.is_file()
    ]
    assert max(file.stat().st_size for file in files) <= max(chunk_bytes, 4), "of one chunk each"
    files[0].write_bytes(bytes(files[0].stat().st_size))
    with pytest.raises(ValueError, match="checksum of its parameters differs"):
        reader.array("parameters", "a/b")


def test_only_the_newest_stay(tmp_path: Path) -> None:
    model = make_model()
    # A process was killed here while it wrote.
    (tmp_path / "step_00000009.orbax-checkpoint-tmp-3").mkdir()
    (tmp_path / "learners").mkdir()
    assert checkpoint.complete(tmp_path) == checkpoint.complete(tmp_path / "missing") == []
    for step in (8, 9, 10, 100):
        write_snapshot(tmp_path, "run", model, *taken(model, step), keep=2)
    assert [path.name for path in checkpoint.complete(tmp_path)] == ["step_00000100", "step_00000010"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["learners", "step_00000010", "step_00000100"]


@pytest.mark.parametrize("how", ["truncated", "empty", "one byte", "without machine", "other model"])
def test_a_damaged_one_is_named_and_the_one_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    model = make_model()
    write_snapshot(tmp_path, "run", model, *taken(model, 3), keep=3)
    bad = write_snapshot(tmp_path, "run", model, *taken(model, 6), keep=3)
    if how == "truncated":
        damage(bad)
    elif how == "empty":
        for file in bad.rglob("*"):
            if file.is_file():
                file.unlink()
    elif how == "one byte":
        path = bad / "meta" / "data.json"
        path.write_text(path.read_text().replace('"tape_bytes": 1234', '"tape_bytes": 1235'))
    elif how == "without machine":
        checkpoint.save_parameters(tmp_path, model.parameters(), {"global_step": 6})
    else:
        about = checkpoint.CheckpointReader(bad).meta
        checkpoint.save(tmp_path, {"parameters": {"x": np.zeros(3, np.float32)}, "outer": {}}, about)
    with caplog.at_level(logging.WARNING):
        found = newest(tmp_path, model)
    assert found is not None and found[0].name == "step_00000003" and found[1].global_step == 3
    assert "skipped step_00000006, trying the one before" in caplog.text
    damage(found[0])
    assert newest(tmp_path, model) is None


def test_a_snapshot_that_is_set_aside_is_not_a_checkpoint(tmp_path: Path) -> None:
    model = make_model()
    for _ in range(2):
        checkpoint.set_aside(write_snapshot(tmp_path, "run", model, *taken(model, 3), keep=3))
    assert [path.name for path in tmp_path.iterdir()] == ["unreadable_step_00000003"]
    assert checkpoint.complete(tmp_path) == []


def test_one_at_a_time_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, begun, go_on = make_model(), threading.Event(), threading.Event()
    steps = []

    def slow(folder: Path, run: str, model: GlobalModel, capture: Capture, snapshot: Snapshot, *_: Any) -> Path:
        begun.set()
        assert go_on.wait(HANGS_S)
        steps.append(snapshot.global_step)
        return folder

    monkeypatch.setattr(snapshots, "write_snapshot", slow)
    writer = writer_of(tmp_path, model)
    writer.submit(*taken(model, 1))
    assert begun.wait(HANGS_S) and writer.busy, "so nobody captures another one"
    # A waiting writer reports that it is alive.
    writer.wait(go_on.set)
    assert not writer.busy
    writer.submit(*taken(model, 3))
    writer.close()
    assert steps == [1, 3]


def test_a_failure_is_told_and_the_next_one_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, write = make_model(), snapshots.write_snapshot

    def full(*arguments: Any) -> Path:
        raise OSError(28, "No space left on device")

    writer = writer_of(tmp_path, model)
    monkeypatch.setattr(snapshots, "write_snapshot", full)
    writer.submit(*taken(model, 1))
    writer.wait()
    assert "global step 1 cannot be written" in writer.condition and "No space left" in writer.condition
    monkeypatch.setattr(snapshots, "write_snapshot", write)
    writer.submit(*taken(model, 2))
    writer.wait()
    assert writer.condition == ""
    writer.close()
    assert [path.name for path in checkpoint.complete(tmp_path)] == ["step_00000002"]


def test_what_a_failed_snapshot_wrote_goes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(path: Path, piece: Any) -> None:
        raise OSError(28, "No space left on device")

    model = make_model()
    monkeypatch.setattr(checkpoint, "_write", ends)
    with pytest.raises(OSError, match="No space"):
        write_snapshot(tmp_path, "run", model, *taken(model, 1), keep=3)
    assert not list(tmp_path.iterdir())


def test_a_rescued_model_never_replaces_a_snapshot(tmp_path: Path) -> None:
    model = make_model()
    writer = writer_of(tmp_path, model, 5)
    writer.write(*taken(model, 5))
    writer.rescue()
    read_snapshot(tmp_path / "step_00000005", model, tape_beside(tmp_path))
    writer_of(tmp_path, model, 6).rescue()
    assert checkpoint.load_parameters(tmp_path / "step_00000006")[1]["tokens"] == 100
    writer.close()


def test_snapshots_of_another_history_are_set_aside(tmp_path: Path) -> None:
    """They are neither the newest for anybody nor in the way of the run's own, which have lower numbers."""
    model = make_model()
    for step, tape_bytes in ((3, 1234), (90, 99_999), (80, 1235)):
        capture, snapshot = taken(model, step)
        write_snapshot(tmp_path, "run", model, capture, snapshot._replace(tape_bytes=tape_bytes), keep=9)
    damaged = write_snapshot(tmp_path, "run", model, *taken(model, 5), keep=9)
    damage(damaged)
    with pytest.raises(OtherHistory, match="taken at byte 99999 of a tape that has 1234"):
        read_snapshot(tmp_path / "step_00000090", model, tape_beside(tmp_path))
    set_others_aside(tmp_path, tape_beside(tmp_path))
    assert [path.name for path in checkpoint.complete(tmp_path)] == ["step_00000005", "step_00000003"]
    write_snapshot(tmp_path, "run", model, *taken(model, 6), keep=1)
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == ["other_history_step_00000080", "other_history_step_00000090", "step_00000006"]


def test_a_snapshot_at_the_last_step_is_left_to_the_final_one() -> None:
    machine, snapshots, other = running("a", "b", total_steps=100), MagicMock(), MagicMock()
    context: Any = SimpleNamespace(taped=None, machine=machine, model=None, clock=other, tape=other)
    driver = SyncerDriver(context, other, other, other, snapshots, other, Subscribers(machine, ""))
    driver._execute([SaveSnapshot(100)])
    assert not snapshots.save.called
    driver._execute([SaveSnapshot(99)])
    snapshots.save.assert_called_once_with()
