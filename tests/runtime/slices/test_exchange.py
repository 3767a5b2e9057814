"""The exchange of a turn: the same mean on every slice, for all owners and members, and nothing else is accepted."""

import random
from collections import deque
from itertools import combinations, product

import numpy as np
import pytest

from diloco_jax.runtime.slices.exchange import Sending, TurnExchange
from diloco_jax.runtime.slices.messages import Chunk, Mean, Turn
from diloco_jax.training.parts import Part

WEIGHTS = (1.0, 3.0, 0.1)


def parts(size: int, weights: tuple[float, ...] = WEIGHTS) -> list[Part]:
    values = np.random.default_rng(size).standard_normal((len(weights), size), np.float32)
    return [Part(g, {"loss": float(number)}, w) for number, (g, w) in enumerate(zip(values, weights, strict=True))]


def mean_of(given: list[Part]) -> np.ndarray:
    """(w_0 g_0 + w_1 g_1 + ...) / (w_0 + w_1 + ...), number by number."""
    result = []
    for at in range(given[0].flat.size):
        total, weights = given[0].flat[at] * np.float32(given[0].weight), np.float32(given[0].weight)
        for part in given[1:]:
            total, weights = total + part.flat[at] * np.float32(part.weight), weights + np.float32(part.weight)
        result.append(total / weights)
    return np.array(result, np.float32)


def turn(owners: tuple[int, ...], members: tuple[int, ...], listeners: tuple[int, ...] = ()) -> Turn:
    return Turn(64, 5, 0, 0.1, tuple(((n, n + 1),) for n in range(len(owners))), owners, members, listeners, "[]")


def made(request: Turn, given: list[Part], seed: int = 0) -> dict[int, TurnExchange]:
    """Deliver all messages of a turn, in any order."""
    size, chance = given[0].flat.size, random.Random(seed)
    slices = {own: TurnExchange(own, request, size) for own in (*request.members, *request.listeners)}
    ways: dict[tuple[int, int], deque[Sending]] = {(a, b): deque() for a in slices for b in slices if a != b}
    for part, owner in enumerate(request.owners):
        for sending in slices[owner].add(part, given[part]):
            ways[owner, sending.to].append(sending)
    while open_ways := [way for way, queue in ways.items() if queue]:
        sender, to = chance.choice(open_ways)
        _, message, payload = ways[sender, to].popleft()
        numbers = np.frombuffer(bytes(payload), np.float32)
        if isinstance(message, Mean):
            slices[to].on_mean(sender, message.chunk, numbers)
        else:
            for sending in slices[to].on_chunk(sender, message, numbers):
                ways[to, sending.to].append(sending)
    return slices


@pytest.mark.parametrize("size", [2, 7])
def test_every_slice_gets_the_same_bits_whoever_computes_and_adds(size: int) -> None:
    given = parts(size)
    expected = mean_of(given).tobytes()
    cases = [
        (owners, members, rest[:listening])
        for count in (1, 2, 3)
        for members in combinations(range(4), count)
        for owners in product(members, repeat=3)
        for rest in [tuple(sorted({*range(4)} - {*members}))]
        for listening in (0, len(rest))
    ]
    for seed, case in enumerate(cases):
        slices = made(turn(*case), given, seed)
        assert all(each.complete and not each.lacks for each in slices.values()), case
        assert {each.mean.tobytes() for each in slices.values()} == {expected}, case
        metrics = [slices[member].metrics() for member in case[1]]
        assert all(each == metrics[0] for each in metrics)


def test_the_mean_of_equal_parts_is_exact() -> None:
    given = [Part(np.array(g, np.float32), {"loss": loss}, 1.0) for g, loss in (([1, 2, 3], 4.0), ([3, 6, 1], 8.0))]
    slices = made(turn((0, 1), (0, 1), (2,)), given)
    assert slices[2].mean.tolist() == [2, 4, 2] and slices[0].metrics() == {"loss": 6.0}


def test_a_member_is_complete_only_with_every_part_and_every_chunk() -> None:
    given = parts(7)
    one = TurnExchange(1, turn((0, 1, 2), (0, 1, 2)), 7)
    assert not one.complete and one.lacks == {0, 2}
    assert len(list(one.add(1, given[1]))) == 2
    chunk = given[0].flat[2:4]
    assert list(one.on_chunk(0, Chunk(64, 5, 0, 0, given[0].metrics, WEIGHTS[0]), chunk)) == []
    assert one.lacks == {2}, "slice 0 cannot send its mean before it has the part of slice 2"
    one.on_mean(0, 0, np.zeros(2, np.float32))
    means = list(one.on_chunk(2, Chunk(64, 5, 0, 2, given[2].metrics, WEIGHTS[2]), given[2].flat[2:4]))
    assert [sending.to for sending in means] == [0, 2] and not one.complete and one.lacks == {2}
    one.on_mean(2, 2, np.zeros(3, np.float32))
    assert one.complete and one.lacks == set()
    assert one.mean[2:4].tobytes() == mean_of(given)[2:4].tobytes()


def chunk_of(part: int, **metrics: float) -> Chunk:
    return Chunk(64, 5, 0, part, metrics or {"loss": 1.0}, 1.0)


@pytest.mark.parametrize(
    ("sender", "message", "size"),
    [
        *((0, chunk_of(part), 2) for part in (-1, 1, 2, 3, 1 << 60)),
        *((0, chunk_of(0), size) for size in (0, 1, 3, 7)),
        (0, chunk_of(0, accuracy=1.0), 2),
        (0, chunk_of(0, loss=1.0, more=1.0), 2),
        (2, chunk_of(0), 2),
        *((0, Mean(64, 5, 0, index), 2) for index in (-1, -3, 1, 2, 3, 1 << 60)),
        *((0, Mean(64, 5, 0, 0), size) for size in (0, 1, 3)),
        (2, Mean(64, 5, 0, 0), 2),
    ],
)
def test_what_does_not_belong_to_a_turn_is_refused(sender: int, message: Chunk | Mean, size: int) -> None:
    one = TurnExchange(1, turn((0, 1, 2), (0, 1, 2)), 7)
    list(one.add(1, parts(7)[1]))
    with pytest.raises(ValueError, match=r"does not belong to this turn|other metrics"):
        if isinstance(message, Mean):
            one.on_mean(sender, message.chunk, np.zeros(size, np.float32))
        else:
            list(one.on_chunk(sender, message, np.zeros(size, np.float32)))
    assert one.lacks == {0, 2}


def test_a_slice_that_only_listens_takes_no_chunk() -> None:
    three = TurnExchange(3, turn((0, 1, 2), (0, 1, 2), (3,)), 7)
    with pytest.raises(ValueError, match="does not belong"):
        list(three.on_chunk(0, chunk_of(0), np.zeros(3, np.float32)))
