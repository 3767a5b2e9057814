"""Memory of payloads is used again, but never while something refers to the earlier payload."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from diloco_jax.transport.session import spares
from diloco_jax.transport.session.spares import SPARE_BYTES_MIN, keep_spares, take_buffer

SIZE = 4 * SPARE_BYTES_MIN


def allow(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """State so many bytes in flight, beside those that other tests have left in use."""
    monkeypatch.setattr(spares, "_in_flight_bytes", 0)
    keep_spares(sum(spares._lent.values()) + num_bytes)


@pytest.fixture(autouse=True)
def no_spares(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    gc.collect()
    spares._spares.clear()
    allow(monkeypatch, 4 * SIZE)
    yield
    spares._spares.clear()


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def test_memory_is_used_again_for_a_payload_that_fills_half_of_it() -> None:
    first = take_buffer(SIZE)
    where = address(first)
    del first
    assert address(take_buffer(SIZE // 2)) == where
    small = take_buffer(SIZE // 2 - 1)
    assert address(small) != where and small.shape == (SIZE // 2 - 1,)


@pytest.mark.parametrize(
    "refer",
    [
        lambda array: array[8:],
        lambda array: array.data[8:],
        lambda array: array.data.toreadonly(),
        lambda array: np.frombuffer(array.data, np.float32)[2:],
    ],
    ids=["slice", "memoryview", "read-only", "floats"],
)
def test_a_view_keeps_the_memory(refer: Callable[[np.ndarray], Any]) -> None:
    first = take_buffer(SIZE)
    first[:] = 7
    where, view = address(first), refer(first)
    del first
    second = take_buffer(SIZE)
    second[:] = 9
    assert address(second) != where
    assert np.asarray(view).view(np.uint8).min() == np.asarray(view).view(np.uint8).max() == 7
    del view
    assert address(take_buffer(SIZE)) == where


def waiting() -> list[int]:
    return [each.nbytes for each in spares._spares]


def test_memory_in_use_and_memory_that_waits_stay_within_what_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, 2 * SIZE)
    lent = [take_buffer(SIZE) for _ in range(3)]
    lent.append(take_buffer(2 * SIZE + 1))
    lent.append(take_buffer(SPARE_BYTES_MIN - 1))
    lent.clear()
    assert waiting() == [SIZE, SIZE]
    one = take_buffer(SIZE)
    assert waiting() == [SIZE]
    larger = take_buffer(SIZE + 1)
    assert waiting() == [], "the spare is too small, and no room is left for it"
    del one
    assert waiting() == []
    del larger
    assert waiting() == [SIZE + 1]


def test_a_process_that_states_nothing_keeps_nothing_and_several_islands_share(monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, 0)
    take_buffer(SIZE)
    assert waiting() == []
    allow(monkeypatch, SIZE)
    keep_spares(SIZE // 2)
    lent = [take_buffer(SIZE), take_buffer(SIZE)]
    lent.clear()
    assert waiting() == [SIZE]
