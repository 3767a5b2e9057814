"""Syncers that take over from each other through a bucket, in every order that a seed draws.

Each store operation of a process waits until the seed's schedule lets it take effect, so a process may be paused
between any two of them for as long as others like. Checked: of each epoch there is one leader, and the tape that a new
leader continues has every line whose effect any earlier leader has let out, before or after the takeover.
"""

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco_jax.runtime.records.tape_file import TapeStopped
from diloco_jax.runtime.syncer.copies import Mirror, TapeCopy
from diloco_jax.transport.link import TransportConfig
from diloco_jax.transport.store.bucket import Bucket, Leader

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
                mirror.finish(lost)
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
