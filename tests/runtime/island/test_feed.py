"""Reading samples ahead: the samples, the thread, how far ahead, and where an error is raised."""

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from diloco_jax.runtime.island import built_in as module
from diloco_jax.runtime.island.built_in import Feed, Key, ReadAhead, batches_of
from diloco_jax.training.data.sample import Sample
from tests.limits import HANGS_S


class Source:
    """Reader of batches that waits until a test lets it pass, and records its ranges and threads."""

    def __init__(self, ready: int = 10**6) -> None:
        self.gate = threading.Semaphore(ready)
        self.read: list[Key] = []
        self.threads: set[threading.Thread] = set()

    def batch(self, key: Key, rows: Any = None) -> Sample:
        assert self.gate.acquire(timeout=HANGS_S)
        self.read.append(key)
        self.threads.add(threading.current_thread())
        if key[0][0] < 0:
            raise OSError("the disk is gone")
        return {"x": np.arange(*key[0])}


def key(number: int, size: int = 2) -> Key:
    return ((number * size, (number + 1) * size),)


def settle(reader: ReadAhead) -> None:
    """Wait until everything is read that was begun."""
    assert reader._thread is not None
    reader._thread.submit(int).result(HANGS_S)


def test_ranges_are_cut_into_the_batches_that_leases_give() -> None:
    assert list(batches_of([(0, 5), (9, 10), (20, 27)], 4)) == [((0, 4),), ((4, 5), (9, 10), (20, 22)), ((22, 26),)]
    assert list(batches_of([], 4)) == list(batches_of([(0, 3)], 4)) == []


def test_so_many_batches_are_read_ahead_each_once_and_on_one_thread() -> None:
    source = Source()
    reader = ReadAhead(source.batch, 2)
    for number in range(4):
        reader.expect([key(number + ahead) for ahead in range(6)])
        assert reader.take(key(number))["x"].tolist() == [2 * number, 2 * number + 1]
    settle(reader)
    reader.close()
    assert source.read == [key(number) for number in range(6)], "two beyond the last one that was asked for"
    assert len(source.threads) == 1 and not {*threading.enumerate()} & source.threads


def test_what_was_given_up_is_dropped_and_nothing_is_read_twice() -> None:
    source = Source(ready=1)
    reader = ReadAhead(source.batch, 3)
    reader.expect([key(0), key(1), key(2), key(3)])
    assert reader.take(key(0)) and not reader.has(key(1))
    # Batch 1 may be under way already; 2 and 3 went to other hosts.
    reader.expect([key(50), key(1), key(51)])
    source.gate.release(10)
    assert [reader.take(key(number))["x"][0] for number in (50, 1, 51)] == [100, 2, 102]
    reader.close()
    assert sorted(source.read) == [key(number) for number in (0, 1, 50, 51)]


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_error_is_raised_where_the_batch_is_asked_for(ahead: int) -> None:
    reader = ReadAhead(Source().batch, ahead)
    with pytest.raises(OSError, match="the disk is gone"):
        reader.expect([key(-5)])
        reader.take(key(-5))
    reader.expect([key(0), key(-5)])
    assert reader.take(key(0))["x"].size == 2, "one that is not asked for harms nobody"
    reader.close()


def feed_of(source: Source, ahead: int) -> tuple[Feed, list[list[int]]]:
    """A feed of an island that holds all rows, and what it put there."""
    put: list[list[int]] = []

    def take(batch: Sample, size: int) -> list[int]:
        put.append(batch["x"].tolist())
        return put[-1]

    island = SimpleNamespace(own_rows=range, put_batch=take)
    order: Any = source
    return Feed(island, order, {"x": np.zeros((), np.int64)}, ahead, 2), put  # type: ignore[arg-type]


def test_a_step_waits_only_for_what_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that ticks with every look: what is read before it is asked for costs one tick."""
    source = Source(ready=3)
    feed, put = feed_of(source, 2)
    ticks = iter(range(1000))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    feed.put(key(0), [(2, 6)])
    assert feed.take()[1] == 0 and feed.waited_s() == 1.0
    settle(feed._reader)
    feed.put(key(1), [(4, 8)])
    assert put == [[0, 1], [2, 3]], "it is there already, so it is copied while the step runs"
    assert feed.waited_s() == 1.0
    feed.take()
    feed.put(key(3), [])
    assert len(put) == 2, "it is not read yet, so the step that runs is waited for first"
    source.gate.release()
    feed.finish()
    # A second finish does nothing.
    feed.finish()
    assert feed.take() == ([6, 7], 6)
    assert (feed.waited_s(), feed.waited_s()) == (1.0, 0.0)
    feed.close()


def test_large_batches_are_read_ahead_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AHEAD_BYTES", 47)  # 16 bytes each
    feed, _ = feed_of(Source(), 8)
    assert feed._reader._ahead == 2
    monkeypatch.setattr(module, "AHEAD_BYTES", 1)
    assert feed_of(Source(), 8)[0]._reader._ahead == 1 and feed_of(Source(), 0)[0]._reader._ahead == 0
