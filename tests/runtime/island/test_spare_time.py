"""Work in the background uses what the cores have to spare, and a small share when they have nothing."""

import pytest

from diloco_jax.runtime.island.spare_time import LEAST, THREADS_COST, SpareTime, idle_time_s


class Machine:
    """Cores on virtual time: `busy` of them work for others, background work uses THREADS_COST of the rest."""

    def __init__(self, cores: int, busy: float) -> None:
        self.cores, self.busy = cores, busy
        self.now_s = self.idle_s = self.used_s = 0.0

    def pass_time(self, seconds: float, ours: float = 0.0) -> None:
        self.now_s += seconds
        self.used_s += ours * seconds
        self.idle_s += max(0.0, self.cores - self.busy - ours) * seconds

    def work(self, spare: SpareTime, seconds: float, piece_s: float = 0.002) -> float:
        """Work in pieces for so long; returns the share of the time of one core that was used."""
        began_s, began_used_s = self.now_s, self.used_s
        while self.now_s < began_s + seconds:
            rest_s = spare.rest_s(piece_s)
            self.pass_time(piece_s + rest_s, THREADS_COST * piece_s / (piece_s + rest_s))
        return (self.used_s - began_used_s) / (self.now_s - began_s)


def started(cores: int, busy: float) -> tuple[Machine, SpareTime]:
    machine = Machine(cores, busy)
    return machine, SpareTime(lambda: machine.idle_s, lambda: machine.now_s, cores)


@pytest.mark.parametrize(
    ("cores", "busy", "seconds", "least", "most"),
    [
        *((cores, cores, 20, 0.0, 1.1 * LEAST * cores) for cores in (1, 2, 16)),
        # Work starts right after the first look, without a rest.
        (16, 4, 2, 1.5, 1.1 * THREADS_COST),
        (1, 0.5, 10, 0.1, 0.4),
    ],
)
def test_idle_cores_are_used_and_of_busy_ones_a_small_share(
    cores: int, busy: float, seconds: float, least: float, most: float
) -> None:
    machine, spare = started(cores, busy)
    assert least < machine.work(spare, seconds) <= most


def test_old_looks_do_not_count() -> None:
    machine, spare = started(1, 0.0)
    machine.work(spare, 2)
    machine.busy = 1.0
    machine.pass_time(60)
    assert machine.work(spare, 2) <= 2 * LEAST


def test_a_system_that_does_not_tell_gives_the_small_share() -> None:
    machine = Machine(1, 0)
    spare = SpareTime(lambda: None, lambda: machine.now_s, 1)
    assert machine.work(spare, 10) <= 1.1 * LEAST


def test_this_system_counts_idle_time() -> None:
    first, second = idle_time_s(), idle_time_s()
    assert (first is None and second is None) or 0 < (first or 0) <= (second or 0)
