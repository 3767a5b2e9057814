"""Slices against exact small numbers, and against the distributions that they are drawn from."""

from __future__ import annotations

import math
import statistics
from random import Random

import pytest

from diloco_jax.sim.goodput.hardware import Gap, Hardware, Slices, cluster, goodput, poisson, uptime

NEVER = Hardware(mtbi_chip_s=math.inf)


class Scripted(Random):
    """A random source that says what it is told."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.values = list(values)

    def random(self) -> float:
        return self.values.pop(0)


def half_back(hardware: Hardware) -> float:
    """The median time until a slice is back, from the inverse written out."""
    return hardware.return_scale_s * (-math.log(1 - 0.5 ** (1 / hardware.return_a))) ** (1 / hardware.return_c)


def test_one_failure_takes_a_slice_a_stall_a_return_and_another_stall() -> None:
    hardware = Hardware(step_s=10.0, down_s=3.0, up_s=5.0, mtbi_chip_s=1000.0)
    mean = 100 * 10 / 1000.0  # of failures in a step of all 100 chips
    one = math.exp(-mean) * 1.5  # below P(0) + P(1) = 2 exp(-1), above P(0) = exp(-1)
    none = 0.42  # below exp(-0.75), P(0) of the 75 chips that are left; above exp(-1)
    part = Slices(hardware, 100, 4, Scripted(one, 0.5, none))
    assert part.begins_s(0.0) == 0.0
    part.ended(0.0, 10.0)
    assert part.useful_s == 10.0 and not part.lost
    assert part.begins_s(10.0) == 13.0, "it stands still for down_s"
    part.ended(13.0, 23.0)
    assert part.useful_s == pytest.approx(10.0 + 7.5), "three of four slices"
    back_s = 10.0 + half_back(hardware)
    assert part.begins_s(23.0) == 23.0 < back_s
    assert part.begins_s(back_s + 1.0) == pytest.approx(back_s + 1.0 + 5.0), "up_s, between two steps"
    assert part.begins_s(back_s + 7.0) == pytest.approx(back_s + 7.0), "once"
    part.finish(100.0)
    assert part.gaps == [Gap(10.0, 13.0), Gap(23.0, 100.0)]


def test_a_rigid_learner_waits_for_the_last_slice() -> None:
    hardware = Hardware(step_s=10.0, down_s=3.0, up_s=5.0, mtbi_chip_s=1000.0)
    two = math.exp(-1.0) * 2.2  # P(0) + P(1) < it < P(0) + P(1) + P(2)
    part = Slices(hardware, 100, 4, Scripted(two, 0.1, 0.9), elastic=False)
    part.ended(0.0, 10.0)
    last_s = 10.0 + hardware.return_s(0.9)
    assert last_s > 13.0
    assert part.begins_s(10.0) == pytest.approx(last_s + 5.0)


def test_a_learner_without_slices_is_lost_and_waits_for_the_first() -> None:
    hardware = Hardware(step_s=10.0, up_s=5.0, mtbi_chip_s=1.0)
    part = Slices(hardware, 1e4, 2, Random(0))
    part.ended(0.0, 10.0)
    assert part.lost
    assert part.begins_s(10.0) > 15.0
    assert not part.lost


def test_the_return_time_has_the_distribution_that_it_says() -> None:
    hardware = Hardware(return_a=2.0, return_c=1.3, return_scale_s=40.0)
    random = Random(1)
    drawn = [hardware.return_s(random.random()) for _ in range(20_000)]
    for at_s in (10.0, 40.0, 90.0):
        share = sum(each <= at_s for each in drawn) / len(drawn)
        assert share == pytest.approx((1 - math.exp(-((at_s / 40.0) ** 1.3))) ** 2.0, abs=0.01)
    assert hardware.return_s(0.0) == 0.0


@pytest.mark.parametrize("mean", [0.02, 0.8, 30.0, 2000.0])
def test_poisson_has_its_mean_and_its_variance(mean: float) -> None:
    random = Random(2)
    drawn = [poisson(random, mean, 10**9) for _ in range(20_000)]
    assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.1 if mean < 0.1 else 0.03)
    assert statistics.pvariance(drawn) == pytest.approx(mean, rel=0.1)
    assert max(poisson(random, mean, 3) for _ in range(1000)) <= 3


def test_a_step_takes_as_long_as_its_slowest_chip() -> None:
    """The mean of the largest of 100 standard normals is 2.5076 (tables of normal order statistics)."""
    part = Slices(Hardware(step_s=1.0, chip_noise=0.1), 100, 4, Random(3))
    drawn = [part.takes_s() for _ in range(20_000)]
    assert statistics.fmean(drawn) == pytest.approx(1.25076, abs=0.002)
    many = Slices(Hardware(step_s=1.0, chip_noise=0.1), 2.4e6, 4, Random(3))
    assert 1.4 < statistics.fmean(many.takes_s() for _ in range(1000)) < 1.6, "5.1 standard deviations"


def test_generations_split_the_learners_and_the_gap_is_the_slowest() -> None:
    two, all_different = Hardware(speed_gap=0.18), Hardware(speed_gap=0.18, generations=99)
    assert [two.slowdown(m, 8) for m in range(8)] == [1.0] * 4 + [1.18] * 4
    assert [all_different.slowdown(m, 3) for m in range(3)] == pytest.approx([1.0, 1.09, 1.18])
    assert Hardware(speed_gap=0.18).slowdown(0, 1) == 1.0


def test_slices_and_chips_are_all_given_out() -> None:
    parts = cluster(Hardware(slices=10), 4, 1000, 0)
    assert [part.chips for part in parts] == [200, 300, 200, 300]
    assert sum(part.chips for part in parts) == 1000


def test_uptime_counts_the_time_in_which_anybody_steps() -> None:
    parts = cluster(NEVER, 2, 1e3, 0)
    parts[0].gaps, parts[1].gaps = [Gap(0, 3), Gap(5, 9)], [Gap(2, 4), Gap(6, 7), Gap(8, 20)]
    assert uptime(parts, 20.0) == pytest.approx(1 - (1 + 1 + 1) / 20)
    parts[0].useful_s, parts[1].useful_s = 10.0, 5.0
    assert goodput(parts, 20.0) == pytest.approx(15 / 40)


@pytest.mark.parametrize("name", ["step_s", "slices", "return_a", "generations", "down_s"])
def test_senseless_settings_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"--hardware.{name.replace('_', '-')} is -1"):
        Hardware(**{name: -1})


def test_more_learners_than_slices_are_refused() -> None:
    with pytest.raises(ValueError, match="193 learners, but there are 192 slices"):
        cluster(Hardware(), 193, 1e6, 0)
    with pytest.raises(ValueError, match="100 chips, but there are 192 slices"):
        cluster(Hardware(), 2, 100, 0)
