"""Memory of payloads is used again, but never while something refers to the earlier payload."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from diloco_jax.transport.session import spares
from diloco_jax.transport.session.spares import SPARE_BYTES_MIN, take_buffer

SIZE = 4 * SPARE_BYTES_MIN


@pytest.fixture(autouse=True)
def no_spares() -> Iterator[None]:
    gc.collect()
    spares._spares.clear()
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


def test_little_memory_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spares, "SPARE_BYTES_MAX", 2 * SIZE)
    lent = [take_buffer(SIZE) for _ in range(3)]
    lent.append(take_buffer(2 * SIZE + 1))
    lent.append(take_buffer(SPARE_BYTES_MIN - 1))
    lent.clear()
    assert [each.nbytes for each in spares._spares] == [SIZE, SIZE]
