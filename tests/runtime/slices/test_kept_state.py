"""A state in the memory of a slice, beside the states on its disk."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from diloco_jax.runtime.island.kept_state import KeptState, StatesWithKept
from diloco_jax.runtime.island.saved_states import StateName

KEPT = StateName(2, 9, 30, (5, 6), "run")


def name(global_step: int) -> StateName:
    return StateName(1, global_step, global_step, (5, 6), "run")


def states(on_disk: list[StateName], keeps: list[int]) -> StatesWithKept:
    """Return states whose saves only note which state on disk they keep."""
    disk = SimpleNamespace(names=lambda: on_disk, save=lambda staged, name, keep, loader: keeps.append(keep))
    return StatesWithKept(cast(Any, disk), KeptState(KEPT, {}))


def test_the_state_in_memory_comes_first_and_is_read_once() -> None:
    found = states([name(20), name(10)], [])
    assert found.names() == [KEPT, name(20), name(10)]
    assert found.read(KEPT).leaves == {} and found.names() == [name(20), name(10)]


@pytest.mark.parametrize(("on_disk", "newest"), [([name(20), name(10)], 20), ([], -1)])
def test_the_newest_state_on_disk_is_kept_until_another_one_is_written(on_disk: list[StateName], newest: int) -> None:
    """The slice loaded the one in memory, which is not on the disk."""
    keeps: list[int] = []
    found = states(on_disk, keeps)
    found.names()
    for step, keep in ((40, 30), (50, 30), (60, 40)):
        found.save(cast(Any, None), name(step), keep)
    assert keeps == [newest, newest, 40]


def test_a_state_of_the_same_global_step_replaces_the_one_in_memory() -> None:
    keeps: list[int] = []
    found = states([name(20)], keeps)
    found.names()
    found.save(cast(Any, None), name(30), 30)
    found.save(cast(Any, None), name(40), 30)
    assert keeps == [20, 30]
