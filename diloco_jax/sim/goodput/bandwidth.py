"""Rates that a wide-area link must have: formulas for data parallel and for this protocol.

    data parallel   every step waits for a ring all-reduce of the gradient, of which the backward pass hides a part
    decoupled       nobody waits; a round that takes longer than its overlap takes the place of others
    lockstep        tau = 0: learners wait for every round

Rates are in Gbit/s (1e9 bit) of one direction of a site's link, times in seconds, sizes in bytes of the whole model as
it travels; a utilisation is compute time over wall time.
"""

import math
from dataclasses import dataclass

UTILISATIONS = (0.5, 0.75, 0.9, 0.95, 0.99)
BACKWARD = 2 / 3  # share of a step in which gradients can travel: the backward pass costs twice the forward pass
QUORUM_STEPS = 0.5  # from the opening of a round until reports of steps that end at any time are in, on average
TRIPS = 1.5  # round trips of a round: pull down and value up, then the new version down
GBIT = 1e9 / 8  # bytes


def ring_factor(sites: int) -> float:
    """Return the bytes that each member of a ring all-reduce sends and receives, over the bytes that are reduced."""
    return 2 * (sites - 1) / sites


def data_parallel_gbit_per_s(gradient_bytes: float, step_s: float, sites: int, utilisation: float) -> float:
    """Rate per site at which data parallel computes for this share of the time.

    A step takes 1/3 of the compute time (forward) plus the longer of 2/3 (backward) and the all-reduce.

    Args:
      sites: members of the ring over the wide-area links.
    """
    _check_share(utilisation)
    travel_s = step_s * (1 / utilisation - (1 - BACKWARD))
    return gradient_bytes * ring_factor(sites) / travel_s / GBIT


def data_parallel_utilisation(gradient_bytes: float, step_s: float, sites: int, gbit_per_s: float) -> float:
    """Share of the time in which data parallel computes over links of this rate."""
    travel_s = gradient_bytes * ring_factor(sites) / (gbit_per_s * GBIT)
    return step_s / (step_s * (1 - BACKWARD) + max(step_s * BACKWARD, travel_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Demands of one learner's rounds on its link."""

    step_s: float  # an inner step
    sync_every: int  # H, global steps in which every fragment has one round; the longest period, if they differ
    num_fragments: int  # P; all rounds in so many steps, if periods differ
    overlap_steps: int  # tau, inner steps that a round may take; 0: learners wait for it
    up_bytes: float  # largest fragment on its way to the syncer
    down_bytes: float  # largest fragment on its way back
    up_total_bytes: float  # all of these rounds up
    down_total_bytes: float  # all of them down
    round_trip_s: float = 0.0  # between learner and syncer
    merge_s: float = 0.0  # of the largest fragment

    @property
    def planned_gbit_per_s(self) -> float:
        """Mean rate in the busier direction when every round is made."""
        return max(self.up_total_bytes, self.down_total_bytes) / (self.sync_every * self.step_s) / GBIT

    def round_s(self, gbit_per_s: float) -> float:
        """Return the seconds from a round's opening until its new version has arrived, for the largest fragment."""
        return self._waits_s + (self.up_bytes + self.down_bytes) / (gbit_per_s * GBIT)

    def utilisation(self, gbit_per_s: float) -> float:
        """Return the share of the schedule that a link of this rate can keep.

        With overlap: rounds that are made in time as a share of those that are due. At most tau are in flight and
        never two of a fragment, each for `round_s`, and the link carries no more than its rate. Inner steps go on at
        full speed whatever comes out.
        In lockstep: share of the time in inner steps.
        """
        if not self.overlap_steps:
            between_s = self.step_s * self.sync_every / self.num_fragments
            return between_s / (between_s + self.round_s(gbit_per_s))
        in_flight = self._overlap_s / self.round_s(gbit_per_s)
        return min(1.0, in_flight, gbit_per_s / self.planned_gbit_per_s)

    def gbit_per_s(self, utilisation: float) -> float:
        """Rate at which `utilisation` is this; infinite if no rate is enough, because waiting alone takes too long."""
        _check_share(utilisation)
        if not self.overlap_steps:
            between_s = self.step_s * self.sync_every / self.num_fragments
            return self._rate(between_s * (1 / utilisation - 1))
        carried = utilisation * self.planned_gbit_per_s
        return max(carried, self._rate(self._overlap_s / utilisation))

    def overlap_needed(self, gbit_per_s: float) -> int:
        """Return the smallest tau, at least 1, with which the largest fragment comes back in time."""
        return max(1, math.ceil(self._quorum_free_s(gbit_per_s) / self.step_s + QUORUM_STEPS))

    @property
    def _overlap_s(self) -> float:
        return min(self.overlap_steps, self.sync_every) * self.step_s

    @property
    def _waits_s(self) -> float:
        quorum_s = QUORUM_STEPS * self.step_s if self.overlap_steps else 0.0  # in lockstep all report at once
        return quorum_s + TRIPS * self.round_trip_s + self.merge_s

    def _quorum_free_s(self, gbit_per_s: float) -> float:
        moved_s = (self.up_bytes + self.down_bytes) / (gbit_per_s * GBIT)
        return TRIPS * self.round_trip_s + self.merge_s + moved_s

    def _rate(self, round_s: float) -> float:
        """Return the rate at which a round takes this long."""
        left_s = round_s - self._waits_s
        return (self.up_bytes + self.down_bytes) / left_s / GBIT if left_s > 0 else math.inf


def _check_share(utilisation: float) -> None:
    if not 0 < utilisation <= 1:
        raise ValueError(f"utilisation is {utilisation}; use a share above 0 and at most 1")
