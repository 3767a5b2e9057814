"""Syncers that take over from each other through a bucket, in every order that a seed draws.

Each store operation of a process waits until the seed's schedule lets it take effect, so a process may be paused
between any two of them for as long as others like. Checked: of each epoch there is one leader, and the tape that a new
leader continues has every line whose effect any earlier leader has let out, before or after the takeover.
"""

import itertools
import random
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_jax.runtime.records.files import CHECKPOINTS, ISLANDS_FILE
from diloco_jax.runtime.records.tape_file import TapeStopped
from diloco_jax.runtime.syncer import copies
from diloco_jax.runtime.syncer.copies import Mirror, TapeCopy
from diloco_jax.runtime.syncer.island_numbers import IslandNumbers
from diloco_jax.runtime.syncer.leading import begin_to_lead
from diloco_jax.runtime.syncer.run import SyncerRun
from diloco_jax.transport.link import TransportConfig
from diloco_jax.transport.store import names
from diloco_jax.transport.store.bucket import Bucket, Leader
from diloco_jax.transport.store.store import StoreError

SEEDS = 15
NAMES = ("a", "b", "c")
LINES = 6


class Schedule:
    """Lets one waiting process take its next step at a time, drawn by a seed; a paused one waits many turns."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._turn = threading.Condition()
        self._waiting: set[str] = set()
        self._alive: set[str] = set()
        self._may = ""
        self._paused: dict[str, int] = {}

    def run(self, bodies: dict[str, Callable[[], None]]) -> None:
        self._alive = set(bodies)
        errors: list[BaseException] = []

        def guarded(name: str) -> None:
            try:
                self.step()
                bodies[name]()
            except BaseException as error:
                errors.append(error)
            finally:
                with self._turn:
                    self._alive.discard(name)
                    self._next()

        threads = [threading.Thread(target=guarded, args=(name,), name=name) for name in bodies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def step(self) -> None:
        """Wait for this process's turn."""
        name = threading.current_thread().name
        with self._turn:
            self._waiting.add(name)
            self._next()
            self._turn.wait_for(lambda: self._may == name)
            self._may = ""
            self._waiting.discard(name)

    def _next(self) -> None:
        if self._may or self._waiting != self._alive or not self._alive:
            return
        if self.random.random() < 0.05:
            self._paused[self.random.choice(sorted(self._alive))] = self.random.randrange(5, 60)
        self._paused = {name: left - 1 for name, left in self._paused.items() if left > 1}
        ready = sorted(self._alive - self._paused.keys()) or sorted(self._alive)
        self._may = self.random.choice(ready)
        self._turn.notify_all()


class SlowStore:
    """A store whose every operation takes effect when the schedule says so."""

    def __init__(self, store: Any, step: Callable[[], None]) -> None:
        self._store, self._step = store, step
        self.url = store.url

    def __getattr__(self, name: str) -> Callable[..., Any]:
        action = getattr(self._store, name)

        def later(*arguments: Any, **options: Any) -> Any:
            self._step()
            return action(*arguments, **options)

        return later


def check_takeovers(seed: int, folder: Path) -> int:
    """Run the processes of a seed, and return the number of epochs."""
    schedule = Schedule(seed)
    config = TransportConfig(address=f"memory://takeover-{folder.name}-{seed}")
    leaders: list[Leader] = []
    tapes: dict[int, list[str]] = {}
    effects: list[tuple[int, str]] = []

    def process(name: str) -> None:
        bucket = Bucket(config)
        bucket.store = SlowStore(bucket.store, schedule.step)  # type: ignore[assignment]
        run_dir = folder / f"{seed}-{name}"
        run_dir.mkdir()
        mirror, lost = Mirror(bucket, run_dir), 0
        if name != NAMES[0]:
            while (newest := bucket.leader()) is None:
                pass
            for _ in range(schedule.random.randrange(4)):
                mirror.refresh(newest.epoch)
            lost = newest.epoch
        while True:
            try:
                leader = bucket.lead(lost + 1, "run", "id", name)
                break
            except ValueError:
                newest = bucket.leader()
                assert newest is not None
                lost = newest.epoch
        leaders.append(leader)
        tape: list[str] = []
        if lost:
            try:
                mirror.finish(lost, threading.Event())
            except ValueError as error:
                if "another process" in str(error):
                    return
                # Nobody has completed a copy, so nobody has let an effect out.
                assert not [each for each in effects if each[0] < leader.epoch]
                return
            tape = (run_dir / "tape.jsonl").read_text().splitlines()
        tapes[leader.epoch] = tape
        copy = TapeCopy(bucket, leader)
        (run_dir / "tape.jsonl").write_text("".join(f"{line}\n" for line in tape))
        copy.begin(run_dir)
        # The listener does so when it opens.
        bucket.store.delete([key for key in bucket.store.list(names.LEADER) if key < names.leader(leader.epoch)])
        position = sum(len(line) + 1 for line in tape)
        for number in range(LINES):
            line = f"{leader.epoch}:{number}"
            tape.append(line)
            try:
                copy(position, f"{line}\n".encode())
            except TapeStopped:
                return
            effects.append((leader.epoch, line))
            position += len(line) + 1

    schedule.run({name: (lambda name=name: process(name)) for name in NAMES})
    assert len({leader.epoch for leader in leaders}) == len(leaders) == len(NAMES)
    for epoch, tape in tapes.items():
        seen = [line for of, line in effects if of < epoch]
        assert [line for line in tape if line in seen] == sorted(seen), (seed, epoch, tape, seen)
    return len(tapes)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_effect_is_lost_and_nobody_leads_twice(seed: int, tmp_path: Path) -> None:
    check_takeovers(seed, tmp_path)


@pytest.mark.nightly
def test_no_effect_is_lost_in_a_thousand_schedules(tmp_path: Path) -> None:
    assert sum(check_takeovers(seed, tmp_path) for seed in range(1000)) > 2000


def copied(bucket: Bucket, folder: Path) -> str:
    """The tape that a standby makes of the copy of epoch 1."""
    folder.mkdir()
    Mirror(bucket, folder).finish(1, threading.Event())
    return (folder / "tape.jsonl").read_text()


@pytest.mark.parametrize("moment", range(9))
def test_a_standby_that_is_overtaken_at_any_moment_finds_the_copy_or_the_later_leader(
    moment: int, tmp_path: Path
) -> None:
    """Epoch 3 replaces the copy of epoch 1 before one store operation of epoch 2, which is reading it."""
    config = TransportConfig(address=f"memory://{tmp_path}")
    bucket, other, folder = Bucket(config), Bucket(config), tmp_path / "third"
    folder.mkdir()
    first = TapeCopy(other, other.lead(1, "run", "id"))
    first.begin(tmp_path)
    first(0, b"a\n")
    other.lead(2, "run", "id")
    operations = itertools.count()

    def overtake() -> None:
        if next(operations) == moment:
            (folder / "tape.jsonl").write_text(copied(other, tmp_path / "fourth"))
            TapeCopy(other, other.lead(3, "run", "id")).begin(folder)

    bucket.store = SlowStore(bucket.store, overtake)  # type: ignore[assignment]
    try:
        assert copied(bucket, tmp_path / "standby") == "a\n"
    except ValueError as error:
        assert "another process has become the run's syncer" in str(error)
    assert next(operations) > moment, "the standby was never overtaken"


def test_what_an_ended_run_left_is_not_a_part_of_a_copy(tmp_path: Path) -> None:
    bucket = Bucket(TransportConfig(address=f"memory://{tmp_path}"))
    for position, line in ((0, b"old\n"), (1, b"x\n"), (4, b"old too\n")):
        bucket.write(names.on_tape(1, position), line)
    bucket.write(names.base(1), b"complete")
    copy = TapeCopy(bucket, bucket.lead(1, "run", "id"))
    copy.begin(tmp_path)
    copy(0, b"a\n")
    copy(2, b"b\n")
    assert copied(bucket, tmp_path / "standby") == "a\nb\n"
    # A part that is missing is waited for, and never taken for the end.
    bucket.store.delete([names.on_tape(1, 0)])
    stop = threading.Event()
    threading.Timer(0.1, stop.set).start()
    with pytest.raises(ValueError, match="stopped before the copy of the run was complete"):
        Mirror(bucket, tmp_path / "standby").finish(1, stop)


def test_an_object_of_a_stranger_ends_no_syncer_and_keeps_nobody_from_leading(tmp_path: Path) -> None:
    bucket = Bucket(TransportConfig(address=f"memory://{tmp_path}"))
    copy = TapeCopy(bucket, bucket.lead(1, "run", "id"))
    bucket.store.put(names.leader(2), b"no leader")
    copy(0, b"a\n")
    assert bucket.lead(2, "run", "id").epoch == 2
    with pytest.raises(TapeStopped, match="another process leads the run"):
        copy(2, b"b\n")


def test_a_syncer_that_was_replaced_does_not_continue_its_own_tape(tmp_path: Path) -> None:
    transport = TransportConfig(address=f"memory://{tmp_path}", poll_s=0.01)
    config: Any = SimpleNamespace(transport=transport, name="run", syncer=SimpleNamespace(standby=True))
    first = begin_to_lead(config, tmp_path, threading.Event())
    assert first is not None and first.copy is not None
    (tmp_path / "tape.jsonl").write_text("a\n")
    first.term.close()
    bucket = first.term.bucket
    TapeCopy(bucket, bucket.lead(2, "run", first.term.leader.run, "another folder")).begin(tmp_path)
    with pytest.raises(
        ValueError, match=r"another process has continued this run, as the syncer of epoch 2.*--standby"
    ):
        begin_to_lead(config, tmp_path, threading.Event())


def test_a_syncer_that_is_stopped_while_the_bucket_does_not_answer_gives_up_without_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = threading.Event()

    def fail(bucket: Bucket) -> None:
        stop.set()
        raise StoreError("no answer")

    monkeypatch.setattr(Bucket, "leader", fail)
    transport = TransportConfig(address=f"memory://{tmp_path}", poll_s=0.01)
    config: Any = SimpleNamespace(transport=transport, name="run", syncer=SimpleNamespace(standby=True))
    assert begin_to_lead(config, tmp_path, stop) is None
    run: Any = SimpleNamespace(_config=config, _run_dir=tmp_path, _stop=stop, _machine=None, _standby=False)
    run._lead = lambda: SyncerRun._lead(run)
    # The command then ends with the status of an interrupted process (cli/runs.py).
    assert SyncerRun._run(run, lambda: None) == {}


def test_a_new_number_of_an_island_is_in_the_copy_before_anybody_has_it(tmp_path: Path) -> None:
    bucket = Bucket(TransportConfig(address=f"memory://{tmp_path}"))
    copy = TapeCopy(bucket, bucket.lead(1, "run", "id"))
    copy.begin(tmp_path)
    numbers = IslandNumbers(tmp_path / ISLANDS_FILE, (), lambda: copy.copy_files(tmp_path))
    for name in ("a", "b"):
        assert numbers.number_of(name)
        assert bucket.read(f"{names.copy(1)}{ISLANDS_FILE}", 999) == (tmp_path / ISLANDS_FILE).read_bytes()


def test_the_files_of_a_snapshot_share_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "PIECE_BYTES", 10)
    monkeypatch.setattr(copies, "SNAPSHOT_LOOK_S", 0.0)
    bucket = Bucket(TransportConfig(address=f"memory://{tmp_path}"))
    copy = TapeCopy(bucket, bucket.lead(1, "run", "id"))
    copy(0, b"a\n")
    copy.begin(tmp_path / "nothing")
    contents = {"a": b"123456", "b/c": b"", "b/d": b"789012345678901234567", "e": b"x"}
    snapshot = tmp_path / "run" / CHECKPOINTS / "step_00000012"
    for name, content in contents.items():
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).write_bytes(content)
    copy.copy_snapshot(snapshot)
    # 28 bytes are three pieces, and the manifest.
    assert len(bucket.store.list(names.SNAPSHOT)) == 4
    mirror = Mirror(bucket, tmp_path / "standby")
    mirror.run_dir.mkdir()
    mirror.refresh(1)
    found = tmp_path / "standby" / CHECKPOINTS / "step_00000012"
    assert {str(each.relative_to(found)): each.read_bytes() for each in found.rglob("*") if each.is_file()} == contents
    # A piece that is gone makes the standby keep what it has.
    copy.copy_snapshot(snapshot.rename(snapshot.with_name("step_00000013")))
    bucket.store.delete([f"{names.snapshot(13, 1)}{1:012}"])
    mirror.refresh(1)
    assert [each.name for each in found.parent.iterdir() if each.name.startswith("step")] == ["step_00000012"]
