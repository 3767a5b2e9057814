"""Formulas for the rate that a wide-area link must have, for data parallel and for this protocol.

    data parallel   every step waits for a ring all-reduce of the gradient; the backward pass hides a part of it
    decoupled       learners never wait; rounds follow each other no faster than links carry their versions
    lockstep        tau = 0: learners wait for every round

Rates are in Gbit/s (1e9 bit) of one direction of a site's link, times are in seconds, and sizes are the encoded bytes
of the whole model. A utilisation is compute time over wall time.
"""

import math
from dataclasses import dataclass

from diloco_jax.protocol.closing import GAMMA

UTILISATIONS = (0.5, 0.75, 0.9, 0.95, 0.99)
# Gradients can travel during this share of a step, because the backward pass costs twice the forward pass.
BACKWARD = 2 / 3
# Learners step at different times, so a learner's copy waits half a step on average until its round requests it.
QUORUM_STEPS = 0.5
# A round opens when the one before it closes, and every learner reports once per step.
REPORT_STEPS = 1.0
# A round needs this many round trips: the pull and the value, then the new version in one direction.
TRIPS = 1.5
# A new version is on its way for this share of a round trip, besides its transfer.
DOWN_TRIPS = 0.5
# A learner's report is on its way for this share of a round trip before that.
REPORT_TRIPS = 0.5
# A step of an island of several slices may take this many times as long as its computation.
STEP_TIMES_MAX = 1.05
GBIT = 1e9 / 8  # bytes


def ring_factor(sites: int) -> float:
    """Return the bytes that each member of a ring all-reduce sends and receives, as a multiple of the reduced bytes."""
    return 2 * (sites - 1) / sites


def exchange_bytes(elements: float, slices: int, parts: int = 1) -> float:
    """Return the bytes that a host sends and receives per step to add up gradients in float32 with the other slices.

    With S slices and N elements of the gradient on the host, chunks of each part that its slice computes, and its chunk
    of the mean:

        (parts + 1) (S - 1) / S x 4 N

    Args:
      parts: parts of the batch that the slice computes; 1 while no slice is missing.
    """
    return (parts + 1) * (slices - 1) / slices * 4 * elements


def exchange_gbit_per_s(elements: float, slices: int, compute_s: float) -> float:
    """Return the rate of a host's network to other slices that keeps a step within `STEP_TIMES_MAX`."""
    return exchange_bytes(elements, slices) / ((STEP_TIMES_MAX - 1) * compute_s) / GBIT


def data_parallel_gbit_per_s(gradient_bytes: float, step_s: float, sites: int, utilisation: float) -> float:
    """Return the rate per site that lets data parallel compute for this share of the time.

    A step takes 1/3 of the compute time (forward) plus the longer of 2/3 (backward) and the all-reduce.

    Args:
      sites: members of the ring over the wide-area links.
    """
    _check_share(utilisation)
    travel_s = step_s * (1 / utilisation - (1 - BACKWARD))
    return gradient_bytes * ring_factor(sites) / travel_s / GBIT


def data_parallel_utilisation(gradient_bytes: float, step_s: float, sites: int, gbit_per_s: float) -> float:
    """Return the share of the time that data parallel computes over links of this rate."""
    travel_s = gradient_bytes * ring_factor(sites) / (gbit_per_s * GBIT)
    return step_s / (step_s * (1 - BACKWARD) + max(step_s * BACKWARD, travel_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Demands of one learner's rounds on its link."""

    # The time of an inner step.
    step_s: float
    # H: every fragment has one round in this many global steps. If periods differ, it is the longest one.
    sync_every: int
    # P: the number of rounds in H steps.
    num_fragments: int
    # tau: a round may take this many inner steps. With 0, learners wait for the round.
    overlap_steps: int
    # The encoded size of the largest fragment on its way to the syncer, and on its way back.
    up_bytes: float
    down_bytes: float
    # The encoded sizes of all rounds in H steps.
    up_total_bytes: float
    down_total_bytes: float
    # The round trip between learner and syncer.
    round_trip_s: float = 0.0
    # The time to merge the largest fragment.
    merge_s: float = 0.0
    # The time from the arrival of a new version at an island until all its hosts can adopt it.
    arrive_s: float = 0.0

    @property
    def planned_gbit_per_s(self) -> float:
        """Return the mean rate in the busier direction if every round is made."""
        return max(self.up_total_bytes, self.down_total_bytes) / (self.sync_every * self.step_s) / GBIT

    @property
    def due_s(self) -> float:
        """Return the mean time between two steps with a due fragment."""
        return self.step_s * self.sync_every / self.num_fragments

    def pace_s(self, gbit_per_s: float) -> float:
        """Return the least time between two rounds with overlap: gamma of it brings a version to the learners.

        The syncer knows this time from reports, whose way counts too (docs/decisions/0020-broadcasts.md). So a round
        trip slows rounds on a link of any rate, and tau does not help.
        """
        read_s = self.down_s(gbit_per_s) + self.arrive_s + REPORT_TRIPS * self.round_trip_s
        return read_s / GAMMA

    def reports_s(self, gbit_per_s: float) -> float:
        """Return the seconds that a round is open: a step until all have reported, or longer on a narrow link.

        In lockstep all learners report at once.
        """
        if not self.overlap_steps:
            return 0.0
        return REPORT_STEPS * self.step_s + max(0.0, self.pace_s(gbit_per_s) - self.due_s)

    def up_s(self, gbit_per_s: float) -> float:
        """Return the seconds from closing a round until the largest value has arrived: a pull and its answer."""
        return self.round_trip_s + self.up_bytes / (gbit_per_s * GBIT)

    def down_s(self, gbit_per_s: float) -> float:
        """Return the seconds that the largest new version travels."""
        return DOWN_TRIPS * self.round_trip_s + self.down_bytes / (gbit_per_s * GBIT)

    def round_s(self, gbit_per_s: float) -> float:
        """Return the seconds from the opening of the largest fragment's round to the arrival of its new version."""
        return self.reports_s(gbit_per_s) + self._quorum_free_s(gbit_per_s)

    def age_s(self, gbit_per_s: float) -> float:
        """Return the seconds from a learner's copy of the largest fragment to the arrival of the version from it."""
        return QUORUM_STEPS * self.step_s + self._quorum_free_s(gbit_per_s)

    def fragment_s(self, gbit_per_s: float) -> float:
        """Return the seconds from a learner's report, the last one of a round, to the arrival of the new version."""
        return REPORT_TRIPS * self.round_trip_s + self._quorum_free_s(gbit_per_s)

    def utilisation(self, gbit_per_s: float) -> float:
        """Return the share of the schedule that a link of this rate can keep.

        With overlap, the share of due rounds that are made is

            min(1, due / pace, min(tau, H) step / (way up + merge), rate / planned rate)

        since rounds keep the pace of the links, at most tau rounds are in flight until their merge, a fragment has at
        most one of them, and the link carries at most its rate. Inner steps continue at full speed in any case.
        In lockstep: the share of the time in inner steps.
        """
        if not self.overlap_steps:
            return self.due_s / (self.due_s + self.round_s(gbit_per_s))
        in_flight = self._overlap_s / (self.up_s(gbit_per_s) + self.merge_s)
        return min(1.0, self.due_s / self.pace_s(gbit_per_s), in_flight, gbit_per_s / self.planned_gbit_per_s)

    def gbit_per_s(self, utilisation: float) -> float:
        """Return the rate for this utilisation; infinite if the waits alone take too long for any rate."""
        _check_share(utilisation)
        trip_s = self.round_trip_s
        if not self.overlap_steps:
            left_s = self.due_s * (1 / utilisation - 1) - TRIPS * trip_s - self.merge_s - self.arrive_s
            return _rate(self.up_bytes + self.down_bytes, left_s)
        up_left_s = self._overlap_s / utilisation - trip_s - self.merge_s
        read_s = GAMMA * self.due_s / utilisation
        down_left_s = read_s - (DOWN_TRIPS + REPORT_TRIPS) * trip_s - self.arrive_s
        carried = utilisation * self.planned_gbit_per_s
        return max(carried, _rate(self.up_bytes, up_left_s), _rate(self.down_bytes, down_left_s))

    def overlap_needed(self, gbit_per_s: float) -> int:
        """Return the smallest tau, at least 1, that lets the largest fragment return in time."""
        return max(1, math.ceil(self.age_s(gbit_per_s) / self.step_s))

    @property
    def _overlap_s(self) -> float:
        return min(self.overlap_steps, self.sync_every) * self.step_s

    def _quorum_free_s(self, gbit_per_s: float) -> float:
        moved_s = (self.up_bytes + self.down_bytes) / (gbit_per_s * GBIT)
        return TRIPS * self.round_trip_s + self.merge_s + self.arrive_s + moved_s


def _rate(num_bytes: float, left_s: float) -> float:
    """Return the rate in Gbit/s that carries these bytes in the time that is left; infinite if none is."""
    return num_bytes / left_s / GBIT if left_s > 0 else math.inf


def _check_share(utilisation: float) -> None:
    if not 0 < utilisation <= 1:
        raise ValueError(f"utilisation is {utilisation}; use a share above 0 and at most 1")
