"""Who leads a run in a bucket: the real claims, on virtual time, with processes that stop in the middle of a request.

No thread and no clock is involved. Before a request of one process the world may run others, as long as a pause lasts,
and they may stop in their own requests. A seed decides on everything.
"""

import functools
import heapq
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_jax.transport.store import bucket as bucket_module
from diloco_jax.transport.store import names
from diloco_jax.transport.store.bucket import Bucket, Leader
from diloco_jax.transport.store.store import StoreError

LEASE_S, BEAT_S, END_S = 10.0, 4.0, 60.0
CANDIDATES, LEARNERS = 3, 1
SEEDS = 1000
# Processes that are stopped in a request at the same time.
STOPPED_MAX = 3


class Plain:
    """A seal that hides nothing, because sealing takes longer than everything else here."""

    def close(self, key: str, parts: Any) -> bytes:
        return b"".join(map(bytes, parts))

    def open(self, key: str, data: bytes) -> bytes:
        return data


class World:
    """Virtual time, the objects, and the processes that wait for their next turn."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.objects: dict[str, bytes] = {}
        # Epoch -> processes that were told that they lead it.
        self.won: dict[int, list[str]] = {}
        self.stopped = 0
        self._turns: list[tuple[float, int, Any]] = []
        self._count = 0
        for number in range(CANDIDATES):
            self.later(Candidate(self, f"c{number}"), self.random.uniform(0, BEAT_S))
        self.learners = [Learner(self) for _ in range(LEARNERS)]
        for learner in self.learners:
            self.later(learner, self.random.uniform(0, BEAT_S))

    def later(self, process: Any, pause_s: float) -> None:
        self._count += 1
        heapq.heappush(self._turns, (self.now_s + pause_s, self._count, process))

    def run(self, until_s: float) -> None:
        while self._turns and self._turns[0][0] <= until_s:
            at_s, _, process = heapq.heappop(self._turns)
            self.now_s = max(self.now_s, at_s)
            pause_s = process.turn()
            if pause_s is not None:
                self.later(process, pause_s)
        self.now_s = max(self.now_s, until_s)


class Requests:
    """The store as one process sees it: others act before a request, and answers may be lost."""

    url = "memory://run"

    def __init__(self, world: World) -> None:
        self._world = world

    def _request(self) -> None:
        world = self._world
        if world.stopped < STOPPED_MAX and world.random.random() < 0.06:
            world.stopped += 1
            # A slow request, or a process that is stopped for longer than the others wait for it.
            world.run(world.now_s + world.random.choice((0.3, BEAT_S, 1.5 * LEASE_S, 3 * LEASE_S)))
            world.stopped -= 1

    def _answer(self) -> None:
        if self._world.random.random() < 0.02:
            raise StoreError("the answer is lost")

    def create(self, key: str, data: bytes) -> bool:
        self._request()
        created = key not in self._world.objects
        if created:
            self._world.objects[key] = data
        self._answer()
        return created

    def put(self, key: str, data: bytes) -> None:
        self._request()
        self._world.objects[key] = data
        self._answer()

    def get(self, key: str, bytes_max: int) -> bytes | None:
        self._request()
        return self._world.objects.get(key)

    def list(self, prefix: str) -> list[str]:
        self._request()
        return sorted(key for key in self._world.objects if key.startswith(prefix))

    def delete(self, keys: Sequence[str]) -> None:
        self._request()
        for key in keys:
            self._world.objects.pop(key, None)


def bucket_of(world: World) -> Bucket:
    bucket = Bucket.__new__(Bucket)
    config, seal, store = SimpleNamespace(address="memory://run", poll_s=0.0), Plain(), Requests(world)
    bucket.config, bucket.seal, bucket.store = config, seal, store  # type: ignore[assignment]
    return bucket


class Candidate:
    """A syncer, or a standby that takes over from one without a sign of life."""

    def __init__(self, world: World, name: str) -> None:
        self._world, self._name, self._bucket = world, name, bucket_of(world)
        self._leader: Leader | None = None
        # The newest leader with its sign of life, and when that was new by this process's own clock.
        self._seen: tuple[int, bytes] | None = None
        self._seen_s = 0.0
        self._rate = world.random.uniform(0.9, 1.1)

    def turn(self) -> float | None:
        """Act once, and return the seconds to the next turn; None if the process has ended."""
        try:
            if self._leader is None:
                self._stand_by()
            elif not self._lead_on(self._leader):
                # It returns as a standby.
                self._leader = None
        except StoreError:
            pass
        return BEAT_S * self._world.random.uniform(0.5, 1.5)

    def _stand_by(self) -> None:
        bucket, newest = self._bucket, self._bucket.leader()
        now_s = self._world.now_s * self._rate
        seen = (0, b"") if newest is None else (newest.epoch, bucket.sign_of(newest))
        if seen != self._seen:
            self._seen, self._seen_s = seen, now_s
        if newest is not None and now_s < self._seen_s + LEASE_S:
            return
        try:
            self._leader = bucket.lead(seen[0] + 1, "run", "id", self._name)
        except ValueError:
            return
        self._world.won.setdefault(self._leader.epoch, []).append(self._leader.mark)
        earlier = [key for key in bucket.store.list(names.LEADER) if (names.number_of(key) or 0) < self._leader.epoch]
        bucket.store.delete(earlier)

    def _lead_on(self, leader: Leader) -> bool:
        """Give a sign of life and write something, as the listener does; False if another process leads."""
        bucket, newest = self._bucket, self._bucket.leader()
        if newest is not None and newest.epoch > leader.epoch:
            return False
        if newest is None or newest.mark != leader.mark:
            bucket.lead_again(leader)
        bucket.write(names.alive(leader.epoch), str(self._world.now_s).encode())
        bucket.write(f"{names.of_epoch(leader.epoch)}said", leader.mark.encode())
        return True


class Learner:
    """It follows the newest leader that it has seen, and reads what that one has written."""

    def __init__(self, world: World) -> None:
        self._world, self._bucket = world, bucket_of(world)
        self.followed: list[int] = []
        # Epoch that was followed, and mark of the writer of what was read.
        self.read: list[tuple[int, str]] = []

    def turn(self) -> float:
        led = bool(self._world.won)
        try:
            newest = self._bucket.leader()
        except StoreError:
            return BEAT_S
        assert newest is not None or not led, "a run that has a leader seems to have none"
        if newest is not None and (not self.followed or newest.epoch > self.followed[-1]):
            self.followed.append(newest.epoch)
        if self.followed:
            said = self._bucket.read(f"{names.of_epoch(self.followed[-1])}said", 1000)
            if said is not None:
                self.read.append((self.followed[-1], said.decode()))
        return BEAT_S


def check(world: World) -> None:
    """One process leads each epoch, and a learner reads what that process has written, of ever later epochs."""
    twice = {epoch: marks for epoch, marks in world.won.items() if len(marks) > 1}
    assert not twice, f"epochs with two leaders: {twice}"
    for learner in world.learners:
        assert learner.followed == sorted(set(learner.followed))
        epochs = [epoch for epoch, _ in learner.read]
        assert epochs == sorted(epochs)
        for epoch, mark in learner.read:
            assert [mark] == world.won[epoch], (epoch, mark)


def test_one_process_leads_each_epoch_and_nobody_reads_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # The same objects are read over and over.
    monkeypatch.setattr(bucket_module, "_read_leader", functools.cache(bucket_module._read_leader))
    led = 0
    for seed in range(SEEDS):
        world = World(seed)
        try:
            world.run(END_S)
            check(world)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from None
        led += len(world.won)
    assert led > 1.5 * SEEDS, "processes hardly ever took over: not what is tested"
