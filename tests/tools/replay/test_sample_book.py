"""The book of samples: what it says of a few leases, and that ranges say what single samples would."""

from __future__ import annotations

import json
from typing import Any

import pytest
from faulty.cluster import FaultyCluster
from invariants.draw import random_scenario

from diloco_jax.protocol.messages import LearnerMessage
from diloco_jax.sim.node import Effects, Observer
from diloco_jax.tools.replay import sample_book
from diloco_jax.tools.replay.auditor import Auditor
from diloco_jax.tools.replay.sample_book import Book, Findings, SampleShare

A, B = ("a", 1), ("b", 1)


class SampleMap:
    """A RangeMap that remembers every number by itself."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.numbers: dict[int, Any] = {}

    def over(self, start: int, stop: int) -> list[tuple[int, int, Any]]:
        return [(number, number + 1, self.numbers.get(number, self.value)) for number in range(start, stop)]

    def paint(self, start: int, stop: int, value: Any) -> None:
        if value == self.value:
            self.numbers = {number: old for number, old in self.numbers.items() if not start <= number < stop}
        else:
            self.numbers |= dict.fromkeys(range(start, stop), value)


class Witness(Observer):
    """Hands what the syncer was told, and did, to an auditor."""

    def __init__(self, cluster: FaultyCluster) -> None:
        self.auditor = Auditor(cluster.scenario.config.num_fragments)
        self.said: list[tuple[Any, ...]] = []
        self._lines = iter(range(1, 1 << 30))
        self._tape = cluster.host.disk.tape

    def on_syncer(self, given: LearnerMessage | None, effects: Effects, now_s: float) -> None:
        self.auditor.take(json.loads(self._tape[next(self._lines)]), effects)
        book = self.auditor.book
        counts = (book.leased, book.merged, book.overwritten, book.released, book.out, book.repeated, book.undone)
        self.said.append((*counts, self.auditor.void, {name: owner.left for name, owner in book.owners.items()}))


def witness(seed: int) -> Witness:
    """Run a seed, and return all that an auditor said of it."""
    cluster = FaultyCluster(random_scenario(seed))
    one = Witness(cluster)
    cluster.watch(one)
    cluster.run(10_000.0)
    assert not one.auditor.findings.count
    return one


@pytest.mark.parametrize("seed", [6, 45, 70])
def test_ranges_say_what_single_samples_would(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among these seeds are samples that were overwritten, leased again, undone and void."""
    said = witness(seed).said
    monkeypatch.setattr(sample_book, "RangeMap", SampleMap)
    assert witness(seed).said == said


def test_book_names_positions() -> None:
    book, found = Book(2), Findings()
    book.lease(A, 0, 0, 10, found)
    book.lease(A, 0, 0, 10, found)  # repeated
    assert (book.leased, book.out, found.count) == (10, 10, 0)
    book.lease(B, 0, 8, 12, found)
    assert found.texts == ["position 8 (and 1 more) was leased to b while it was out, leased before to a"]
    book.lease(A, 2, 3, 5, found)
    assert found.texts[1:] == ["a was told that it has [(2, 4)], then 3 to 4"]
    book.lease(A, 12, 20, 21, found)
    assert found.texts[2:] == ["a was never leased its samples 10 to 11", "positions 12 to 19 were left out"]
    book.lease(("a", 2), 0, 21, 22, found)
    assert "(incarnation 1) were neither merged nor released when it ended: 0 to 9, 20 to 20" in found.texts[4]
    book.lease(B, 4, 5, 5, found)
    assert found.texts[5] == "b was leased positions 5 to 4, which cannot be"
    book.release("b")
    book.lease(("a", 2), 1, 22, 24, found)
    assert found.texts[6:] == ["2 new positions were leased, while 4 released ones wait"]


def test_book_merges_when_every_fragment_took_and_somebody_holds() -> None:
    book, found = Book(2), Findings()
    book.lease(A, 0, 0, 10, found)
    book.on_version(0, 1, {A: SampleShare(0, 6)})
    book.on_held(0, 1)
    assert book.merged == 0, "fragment 1 took nothing"
    book.on_version(1, 2, {A: SampleShare(0, 4)})
    assert book.merged == 0, "nobody is seen to hold version 2"
    book.on_held(1, 1)
    book.on_held(1, 99)
    assert book.merged == 0, "these are not the version that took it"
    book.on_held(1, 2)
    assert (book.merged, book.out) == (4, 6)
    book.on_version(1, 4, {("a", 2): SampleShare(0, 9)})
    book.on_held(1, 4)
    assert book.merged == 4, "that was another life"
    book.release("a")
    assert (book.leased, book.merged, book.released, book.out) == (10, 4, 6, 0)
    book.lease(B, 0, 4, 12, found)
    assert (book.leased, book.repeated, book.out, found.count) == (18, 6, 8, 0)
    book.lease(B, 8, 2, 4, found)
    assert found.texts == ["position 2 (and 1 more) was leased to b while it was merged, leased before to a"]


def test_book_tells_what_a_lost_version_undid() -> None:
    book, found = Book(1), Findings()
    book.lease(A, 0, 0, 10, found)
    for version, samples in ((1, 3), (2, 5), (3, 8)):
        book.on_version(0, version, {A: SampleShare(0, samples)})
        if version < 3:
            book.on_held(0, version)
    assert book.merged == 5
    book.on_lost(0, 1)
    assert book.undone == 2, "samples 3 and 4 went into version 2"
    book.on_version(0, 4, {A: SampleShare(0, 9)})
    book.on_held(0, 4)
    assert (book.merged, book.undone) == (9, 2)
    book.keep_until([4])
    book.on_lost(0, 0)
    assert book.undone == 2
