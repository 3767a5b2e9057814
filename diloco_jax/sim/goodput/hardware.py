"""The slices of one learner on virtual time: start, duration and useful share of each step while chips fail.

The model has five parameters of the paper (section 3.3 and appendix E.1); the others are ours (docs/simulate.md):
  * A learner has n slices of equal size. A step runs on the slices that are present, and its useful share is theirs.
  * During a step each chip fails with rate 1 / MTBI (Eq. 4: MTBF = MTBI / chips). A failure removes the whole slice
    at the end of the step. The slice returns after an exponentiated-Weibull time.
  * Each time slices fail, and each time slices return, the learner stalls for a fixed time without failures.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, expm1, inf, log, log1p, sqrt
from random import Random
from statistics import NormalDist
from typing import NamedTuple

from diloco_jax.protocol.watch.stats import goodput_of
from diloco_jax.sim.goodput.settings import CHIPS_MAX, SLICES_MAX, YEAR_S, setting

# Noise never makes a step shorter than this share of its mean.
STEP_SHARE_MIN = 0.05
# Above this mean of a Poisson number exp(-mean) is too close to 0; a normal distribution replaces it.
MEAN_MAX = 500.0
NORMAL = NormalDist()
TINY = 1e-300
OURS = "our calibration against the paper's Table 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Settings of chips: their step time, how often they fail, and what a failure costs; each names its source."""

    step_s: float = setting(4.6, "seconds per inner step of the fastest learner", OURS)
    slices: int = setting(192, "slices of the whole cluster, spread over the learners", OURS)
    mtbi_chip_s: float = setting(YEAR_S, "mean seconds between two failures of one chip", "the paper: 1 year")
    down_s: float = setting(7.7, "seconds that a learner stalls when slices fail", OURS)
    up_s: float = setting(15.6, "seconds that a learner stalls when slices return", OURS)
    return_a: float = setting(
        2.0, "first shape of the time until a slice returns, F(t) = (1-exp(-(t/scale)^c))^a", OURS
    )
    return_c: float = setting(1.0, "second shape of that time", OURS)
    return_scale_s: float = setting(43.0, "scale of that time in seconds", OURS)
    keep_batch: bool = setting(
        False, "slices that are left compute the parts of missing ones, so steps take longer", "islands.slices_batch"
    )
    speed_gap: float = setting(
        0.0, "the slowest learner's steps take this share longer than the fastest's", "the paper: 0 in Table 1"
    )
    generations: int = setting(2, "kinds of hardware, with speeds evenly spread over the gap", "the paper's Table 5: 2")
    step_noise: float = setting(
        0.0, "standard deviation of a learner's step time, as a share, drawn again for every step", "0 in Table 1"
    )
    chip_noise: float = setting(
        0.0, "the same for a single chip; a step takes as long as its slowest chip", "the paper: 0 in Table 1"
    )

    def __post_init__(self) -> None:
        _check(self.mtbi_chip_s >= 1, "mtbi_chip_s", self.mtbi_chip_s, "at least 1 (inf: nothing fails)")
        for name in ("step_s", "return_scale_s"):
            _check(0 < getattr(self, name) < inf, name, getattr(self, name), "above 0 and finite")
        for name in ("return_a", "return_c"):
            _check(0.05 <= getattr(self, name) <= 100, name, getattr(self, name), "from 0.05 to 100")
        for name in ("down_s", "up_s", "speed_gap", "step_noise", "chip_noise"):
            _check(0 <= getattr(self, name) < inf, name, getattr(self, name), "at least 0 and finite")
        for name in ("slices", "generations"):
            _check(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _check(self.slices <= SLICES_MAX, "slices", self.slices, f"at most {SLICES_MAX}")

    def return_s(self, share: float) -> float:
        """Return the seconds until this share of the slices has returned: the inverse of F."""
        below = share ** (1.0 / self.return_a)
        return self.return_scale_s * float((-log1p(-below)) ** (1.0 / self.return_c)) if below < 1.0 else 0.0

    def slowdown(self, learner: int, learners: int) -> float:
        """Return a learner's step time over that of learner 0, the fastest; the last learner is the slowest."""
        kinds = min(self.generations, learners)
        return 1.0 + self.speed_gap * (learner * kinds // learners) / (kinds - 1) if kinds > 1 else 1.0


def _check(ok: bool, name: str, value: object, limit: str) -> None:
    if not ok:
        raise ValueError(f"--hardware.{name.replace('_', '-')} is {value}, but must be {limit}")


class Gap(NamedTuple):
    """A time span without a step."""

    begins_s: float
    ends_s: float


def poisson(random: Random, mean: float, most: int) -> int:
    """Draw a Poisson number, cut off at `most`."""
    if mean > MEAN_MAX:
        return min(most, max(0, round(random.gauss(mean, sqrt(mean)))))
    left = random.random()
    probability, number = exp(-mean), 0
    while left >= probability and number < most:
        left -= probability
        number += 1
        probability *= mean / number
    return number


class Slices:
    """Slices of one learner; for each step call `begins_s`, `takes_s` and `ended`.

    Args:
        random: source of randomness of this learner alone, so that other learners do not change its draws.
        slowdown: its step time as a multiple of the fastest learner's.
        elastic: True if it continues with the remaining slices, False if it waits for all of them.
    """

    def __init__(
        self,
        hardware: Hardware,
        chips: float,
        slices: int,
        random: Random,
        *,
        slowdown: float = 1.0,
        elastic: bool = True,
    ) -> None:
        self.chips = chips
        self.steps = 0
        # The time in steps, weighted by the share of slices that were present.
        self.useful_s = 0.0
        self.gaps: list[Gap] = []
        self._hardware = hardware
        self._slices = slices
        self._random = random
        self._elastic = elastic
        self._step_s = hardware.step_s * slowdown
        self._failures_per_s = chips / hardware.mtbi_chip_s
        # The times when the absent slices return.
        self._absent: list[float] = []
        # The ends of the newest step and of the newest stall.
        self._ended_s = 0.0
        self._free_s = 0.0

    @property
    def lost(self) -> bool:
        """Return whether no slice is left, so that the learner's state is lost."""
        return len(self._absent) == self._slices

    @property
    def parts_each(self) -> int:
        """Return the most parts of a batch that a slice computes in a step."""
        present = self._slices - len(self._absent)
        return -(-self._slices // present) if self._hardware.keep_batch and present else 1

    def begins_s(self, now_s: float) -> float:
        """Return the time when the next step can start, after stalls and waits; `now_s` at the earliest."""
        begin_s = max(now_s, self._free_s)
        while self._absent:
            absent = self._absent
            if not self._elastic:
                begin_s = max(begin_s, *absent)
            elif len(absent) == self._slices:
                begin_s = max(begin_s, min(absent))
            left = [back_s for back_s in absent if back_s > begin_s]
            if len(left) == len(absent):
                break
            # All slices that have returned share one stall.
            self._absent = left
            begin_s += self._hardware.up_s
        self._free_s = begin_s
        return begin_s

    def takes_s(self) -> float:
        """Draw the seconds of a step that starts now."""
        hardware, random = self._hardware, self._random
        share = 1.0
        if hardware.step_noise:
            share += hardware.step_noise * random.gauss()
        if hardware.chip_noise:
            chips = self.chips * (1.0 - len(self._absent) / self._slices)
            # The slowest of n chips is above z with probability 1 - (1 - above)^n.
            above = -expm1(log(1.0 - random.random()) / chips)
            share -= hardware.chip_noise * NORMAL.inv_cdf(max(above, TINY))
        return self.parts_each * self._step_s * max(STEP_SHARE_MIN, share)

    def ended(self, began_s: float, now_s: float) -> None:
        """Count a step that has ended, and draw the failures during the step."""
        if began_s > self._ended_s:
            self.gaps.append(Gap(self._ended_s, began_s))
        self._ended_s = self._free_s = now_s
        step_s = now_s - began_s
        share = 1.0 - len(self._absent) / self._slices
        self.steps += 1
        self.useful_s += step_s / self.parts_each if self._hardware.keep_batch else step_s * share
        failed = poisson(self._random, self._failures_per_s * share * step_s, self._slices - len(self._absent))
        if failed:
            random, hardware = self._random.random, self._hardware
            self._absent += [now_s + hardware.return_s(random()) for _ in range(failed)]
            self._free_s += hardware.down_s

    def finish(self, now_s: float) -> None:
        """End the observed time; an unfinished step does not count."""
        if now_s > self._ended_s:
            self.gaps.append(Gap(self._ended_s, now_s))


def check_cluster(hardware: Hardware, learners: int, chips: float) -> None:
    """Refuse, with ValueError, a cluster that has fewer slices than learners, or fewer chips than slices."""
    if not 1 <= learners <= hardware.slices:
        raise ValueError(
            f"{learners} learners, but there are {hardware.slices} slices; use 1 to {hardware.slices}, "
            "or raise --hardware.slices"
        )
    if not chips <= CHIPS_MAX:
        raise ValueError(f"{chips:g} chips; simulate at most {CHIPS_MAX:g}")
    if chips < hardware.slices:
        raise ValueError(
            f"{chips:g} chips, but there are {hardware.slices} slices; use more, or lower --hardware.slices"
        )


def cluster(hardware: Hardware, learners: int, chips: float, seed: int, *, elastic: bool = True) -> list[Slices]:
    """Distribute the slices over all learners as equally as possible; ValueError if slices or chips are too few."""
    check_cluster(hardware, learners, chips)
    parts = [
        (learner + 1) * hardware.slices // learners - learner * hardware.slices // learners
        for learner in range(learners)
    ]
    return [
        Slices(
            hardware,
            chips * part / hardware.slices,
            part,
            Random(f"{seed}/{learner}"),
            slowdown=hardware.slowdown(learner, learners),
            elastic=elastic,
        )
        for learner, part in enumerate(parts)
    ]


def goodput(parts: Sequence[Slices], seconds: float) -> float:
    """Return the goodput of all chips; a step counts only for the slices that were present."""
    return goodput_of(sum(part.useful_s * part.chips for part in parts), seconds * sum(part.chips for part in parts))


def uptime(parts: Sequence[Slices], seconds: float) -> float:
    """Return the share of the time when at least one learner was in a step."""
    common = parts[0].gaps
    for part in parts[1:]:
        common = list(_both(common, part.gaps))
    return 1.0 - sum(gap.ends_s - gap.begins_s for gap in common) / seconds


def _both(ours: Sequence[Gap], theirs: Sequence[Gap]) -> Iterator[Gap]:
    """Intersect two lists of gaps; each is sorted and has no overlaps."""
    first = second = 0
    while first < len(ours) and second < len(theirs):
        gap = Gap(max(ours[first].begins_s, theirs[second].begins_s), min(ours[first].ends_s, theirs[second].ends_s))
        if gap.begins_s < gap.ends_s:
            yield gap
        if ours[first].ends_s < theirs[second].ends_s:
            first += 1
        else:
            second += 1
