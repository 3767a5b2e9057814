"""Positions of loaders: taken after the batch that was trained last, restored to the next one, bounded and refused."""

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import diloco_jax
from diloco_jax.runtime.island.host import Host
from diloco_jax.runtime.island.loader_state import LOADER_BYTES_MAX, bounded, restored
from diloco_jax.runtime.island.saved_states import StateName
from diloco_jax.runtime.own_loop import loaders
from diloco_jax.runtime.own_loop.data_shard import DataShard
from diloco_jax.runtime.own_loop.loaders import Batches, loader_of
from diloco_jax.runtime.own_loop.plain import pack, unpack
from tests.limits import HANGS_S

SAMPLES, BATCH = 40, 4


class Numbers:
    """A source whose text does not hold the address of the object, which Grain's DataLoader would compare."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, at: int) -> np.ndarray:
        return np.asarray(at)

    def __repr__(self) -> str:
        return "Numbers()"


def grain_dataset() -> Any:
    import grain

    # By default 16 threads read 500 batches ahead, which takes most of a second.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return grain.MapDataset.range(SAMPLES).shuffle(seed=3).repeat(None).to_iter_dataset(options).batch(BATCH)


def grain_prefetching() -> Any:
    import grain

    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=6)
    return grain.MapDataset.range(SAMPLES).shuffle(seed=3).repeat(None).to_iter_dataset(options).batch(BATCH)


def grain_mixed() -> Any:
    import grain

    parts = (grain.MapDataset.range(at, SAMPLES, 2).shuffle(seed=1).repeat(None) for at in (0, 1))
    # One thread for each part, because this machine may have few processors.
    odd, even = (part.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)) for part in parts)
    return grain.IterDataset.mix([odd, even], weights=[0.3, 0.7]).batch(BATCH)


def grain_loader() -> Any:
    import grain

    sampler = grain.samplers.IndexSampler(SAMPLES, shuffle=True, seed=3, num_epochs=None)
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    batch = grain.transforms.Batch(BATCH)
    return grain.DataLoader(data_source=Numbers(), sampler=sampler, operations=[batch], read_options=options)


def hugging_face() -> Any:
    import datasets

    found = datasets.IterableDataset.from_generator(lambda: ({"x": at} for at in range(SAMPLES)))
    return found.repeat(None).batch(BATCH)


class Own:
    """A loader with the two methods of the protocol."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.at += 1
            yield self.at

    def state(self) -> bytes:
        return str(self.at).encode()

    def restore(self, state: bytes) -> None:
        self.at = int(state)


def counted() -> Any:
    return diloco_jax.loader((number * number for number in itertools.count()), by_count=True)


# Hugging Face's `datasets` is installed with lm-eval.
SOURCES = [
    *(grain_dataset, grain_prefetching, grain_mixed, grain_loader, Own, counted),
    pytest.param(hugging_face, marks=pytest.mark.extra("eval")),
]


def plain(batch: Any) -> Any:
    return np.asarray(batch["x"] if isinstance(batch, dict) else batch).tolist()


def sequence(source: Callable[[], Any], count: int) -> list[Any]:
    """The batches of a source that is never interrupted, read without an island."""
    given = source()
    return [plain(batch) for batch in itertools.islice(iter(given), count)]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("steps", "ahead"), [(1, 0), (7, 0), (0, 2), (1, 3), (13, 3)])
def test_a_restored_loader_continues_after_the_batch_that_was_trained_last(
    source: Callable[[], Any], steps: int, ahead: int
) -> None:
    """A loop that is killed after `steps` steps has read `ahead` batches more than it trained."""
    want = sequence(source, steps + 5)
    first = diloco_jax.loader(source())
    waiting: list[Any] = []
    for number in range(steps):
        while len(waiting) <= ahead:
            waiting.append(plain(next(first)))
        assert waiting.pop(0) == want[number]
        first.stepped()
    while len(waiting) < ahead:
        waiting.append(plain(next(first)))
    state = first.state()
    assert isinstance(state, bytes) and len(state) < 4096
    second = diloco_jax.loader(source())
    second.restore(state)
    assert [plain(next(second)) for _ in range(5)] == want[steps:]
    # The state of a returned loop counts from its own start.
    third = diloco_jax.loader(source())
    for _ in range(4):
        second.stepped()
    third.restore(second.state())
    assert plain(next(third)) == want[steps + 4]


def test_a_loop_that_reads_from_the_loader_itself_is_resumed_too() -> None:
    want, iterator = sequence(grain_dataset, 6), iter(grain_dataset())
    first = diloco_jax.loader(iterator)
    for number in range(3):
        assert plain(next(iterator)) == want[number]
        first.stepped()
    again = iter(grain_dataset())
    diloco_jax.loader(again).restore(first.state())
    assert plain(next(again)) == want[3]


def test_several_batches_per_step_count_as_one_step_and_a_wrong_number_is_named() -> None:
    want = sequence(grain_dataset, 11)
    first = diloco_jax.loader(grain_dataset(), batches_per_step=3)
    for _ in range(3):
        assert [plain(next(first)) for _ in range(3)]
        first.stepped()
    # One batch of the fourth step is read, and the step is not made.
    next(first)
    second = diloco_jax.loader(grain_dataset(), batches_per_step=3)
    second.restore(first.state())
    assert plain(next(second)) == want[9]
    wrong = diloco_jax.loader(grain_dataset())
    with pytest.raises(ValueError, match=r"65 batches more than its steps trained \(1 per step\).*batches_per_step=N"):
        for _ in range(1 + loaders.AHEAD_MAX):
            next(wrong), next(wrong)
            wrong.stepped()


def test_a_thread_that_waits_for_a_batch_delays_no_step_and_no_save() -> None:
    """The thread has read batches 0 and 1 and waits for batch 2, while the loop trains batch 0."""
    released, asked = threading.Event(), threading.Event()

    def slow() -> Iterator[int]:
        for number in itertools.count():
            if number == 2:
                asked.set()
                assert released.wait(HANGS_S)
            yield number

    first = diloco_jax.loader(slow(), by_count=True)
    thread = threading.Thread(target=lambda: [next(first) for _ in range(3)])
    thread.start()
    try:
        assert asked.wait(HANGS_S)
        first.stepped()
        state = first.state()
    finally:
        released.set()
        thread.join()
    second = diloco_jax.loader(itertools.count(), by_count=True)
    second.restore(state)
    assert next(second) == 1


@pytest.mark.extra("eval")
def test_hugging_faces_shuffle_buffer_is_filled_again() -> None:
    """Its state has no samples of the buffer: a return skips or repeats about as many as the buffer holds."""
    import datasets

    def shuffled() -> Any:
        found = datasets.IterableDataset.from_generator(lambda: ({"x": at} for at in range(SAMPLES)))
        return found.shuffle(seed=3, buffer_size=8).batch(BATCH)

    first = diloco_jax.loader(shuffled())
    seen = [plain(next(first)) for _ in range(4)]
    for _ in seen:
        first.stepped()
    second = diloco_jax.loader(shuffled())
    second.restore(first.state())
    trained = [number for batch in [*seen, *map(plain, second)] for number in batch]
    repeated, skipped = len(trained) - len(set(trained)), SAMPLES - len(set(trained))
    assert 0 <= repeated <= 8 + BATCH and 0 < skipped <= 8 + BATCH


def test_a_state_of_another_kind_of_loader_or_of_a_shorter_one_is_refused() -> None:
    first = diloco_jax.loader(grain_dataset())
    next(first), first.stepped()
    with pytest.raises(ValueError, match="'get_state', and this one has 'state'"):
        diloco_jax.loader(Own()).restore(first.state())
    for broken in (b"", b"{}\n", b"[", b'{"kind":"state","skip":-1}\n'):
        with pytest.raises(ValueError, match=r"this one has|Expecting"):
            diloco_jax.loader(Own()).restore(broken)
    count = diloco_jax.loader(range(9), by_count=True)
    for _ in range(5):
        next(count), count.stepped()
    with pytest.raises(ValueError, match="ended after 3 of the 5 batches"):
        diloco_jax.loader(range(3), by_count=True).restore(count.state())
    with pytest.raises(ValueError, match=r"saved at global step 40: .*Join with the same loader as before"):
        restored(diloco_jax.loader(Own()), first.state(), 40)


class Large(Own):
    def state(self) -> Any:
        return bytes(LOADER_BYTES_MAX + 1)


class Texts(Own):
    def state(self) -> Any:
        return "here"


def test_a_state_is_bounded_and_is_bytes() -> None:
    with pytest.raises(ValueError, match=rf"has {LOADER_BYTES_MAX + 1} bytes, the limit is .*smaller shuffle buffer"):
        bounded(Large())
    with pytest.raises(ValueError, match="returned a str; it must return bytes"):
        bounded(Texts())


def test_a_loader_without_a_state_costs_a_save_and_not_the_run(caplog: pytest.LogCaptureFixture) -> None:
    host: Any = Host.__new__(Host)
    host._saves, host.loader = object(), Large()
    assert "has no state to save" in host.save_own(StateName(1, 2, 40, ()), -1).result()
    assert "global step 40 was not saved" in caplog.text


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (lambda: (number for number in range(3)), r"type generator has no state.*by_count=True"),
        (lambda: 7, "type int has no state"),
        (lambda: [1, 2], "list_iterator has no state"),
    ],
)
def test_a_source_without_a_state_is_refused_with_the_remedy(source: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        diloco_jax.loader(source())


def test_join_calls_a_function_with_the_islands_place() -> None:
    asked: list[Any] = []

    def place() -> DataShard:
        return DataShard(1, 3)

    def make(*given: int) -> Any:
        asked.append(given)
        return grain_dataset()

    assert isinstance(loader_of(make, place, 77), Batches) and asked == [(1, 3, 77)]
    # A loader whose class has __call__ is still a loader, and nobody is asked for a place.
    assert isinstance(loader_of(grain_dataset(), lambda: pytest.fail("asked"), 77), Batches)
    assert loader_of(None, place, 77) is None
    with pytest.raises(ValueError, match='give data="own"'):
        diloco_jax.join("127.0.0.1:1", name="a", params={}, samples_per_step=1, tokens_per_step=1, loader=make)
    with pytest.raises(ValueError, match="batches_per_step is 0"):
        diloco_jax.loader(grain_dataset(), batches_per_step=0)


VALUES: list[Any] = [
    None,
    True,
    -(1 << 200),
    0.1,
    "ä\ud800",
    b"\x00\xff",
    [1, [2.5, None]],
    (1, (2,), []),
    {"a": {"~": 3}, "b": {}},
    {1: "one", (2, 3): [b"x"], None: {"~": "dict"}},
]


@pytest.mark.parametrize("value", VALUES)
def test_states_come_back_as_they_were(value: Any) -> None:
    found = unpack(pack(value))
    assert found == value and type(found) is type(value)


def test_arrays_come_back_bit_for_bit() -> None:
    for array in (np.arange(6, dtype="<u2").reshape(2, 3).T, np.zeros((0, 3)), np.float32("nan"), np.bool_(True)):
        found = unpack(pack({"a": array}))["a"]
        assert type(found) is type(array) and found.dtype == array.dtype and found.shape == array.shape
        assert found.tobytes() == array.tobytes()


@pytest.mark.extra("parity")
def test_a_tensor_comes_back_bit_for_bit() -> None:
    import torch

    state = torch.Generator().manual_seed(5).get_state()
    assert torch.equal(unpack(pack(state)), state)


def test_what_json_cannot_hold_is_named() -> None:
    deep: Any = 0
    for _ in range(100):
        deep = [deep]
    for value, words in (
        ({"a": [object()]}, r"state\['a'\]\[0\] is a object"),
        (np.array([print]), "is a ndarray"),
        (deep, "deeper than 64"),
    ):
        with pytest.raises(ValueError, match=words):
            pack(value)
    for broken in (b"", b"[", b'{"~":"code"}', b'{"~":"array"}', b'{"~":"array","dtype":"O","shape":[1],"data":""}'):
        with pytest.raises(ValueError, match=r"."):
            unpack(broken)
    for bad in ({"dtype": "<f4", "shape": [3]}, {"dtype": "<f4", "shape": [-1, -1]}, {"dtype": "|O", "shape": [0]}):
        with pytest.raises(ValueError, match="damaged"):
            unpack(json.dumps({"~": "array", "data": "AAAAAA==", **bad}).encode())
