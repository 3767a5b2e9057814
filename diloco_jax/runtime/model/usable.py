"""The choice of the values that may be merged: none that is damaged, holds NaN or infinity, or is wildly large.

Large is judged by the norm per inner step of what a learner did itself. Usual is the largest of three medians: of the
fragment's last accepted values; of this round, if there are enough parts, since a change that concerns everybody, such
as the end of a long warm-up, must not expel everybody; and, per parameter, of the model's liveliest other fragment,
since rows of an embedding rest for hundreds of steps until their token comes by. Nor is wildly large what cannot do
harm, or what came as high twice before.

Where too few take part in a round to outvote anybody, a change that lasts is told from an accident by what follows it.
Damage stays where it is and does not move on; a divergence grows; a change goes on at its height. So a value above the
limit is merged all the same if its learner's earlier ones came as high, twice, and moved in between if they went far.

All that this needs is part of a fragment's state, which is kept with the model.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from diloco_jax.protocol.effects import Part
from diloco_jax.protocol.messages import NO_VERSION

RATES_KEPT = 32  # accepted values whose norm per step is remembered, by fragment
RATES_MIN = 8  # with fewer, the fragment's past says nothing yet
HARMLESS = 1e-3  # a change of this share of a fragment's length, per inner step, is left out by no comparison
PARTS_MIN = 3  # with fewer in a round, one bad part could be the median
ODD_KEPT = 16  # values above the limit that are remembered, by fragment
ODD_BEFORE = 2  # as high as this one, before one is merged: so honest work is left out twice at most
GROWTH = 3.0  # over the lower of those two: a ramp grows so much from its first round to its third
FAR = 3.0  # lengths; of a value that moves the fragment farther it is asked whether it moves on:
GOES_ON = 0.25  # share of its rate at which it must have moved since the one before


class Odd(NamedTuple):
    """A value above the limit, as a learner's later ones are held against it."""

    learner_id: str
    base: int  # version against which it was
    steps: int
    norm: float
    rate: float  # norm per inner step of what came since the learner's one before, against the same version
    lasts: bool  # it is no remainder of the one before
    merged: bool


class Mark(NamedTuple):
    """Notes on a fragment's newest version: all that is known without its values."""

    version: int
    digest: int
    rates: tuple[float, ...]  # norm per inner step of the values accepted last, oldest first
    base: int = NO_VERSION  # the version from which a step leads to it; none: only the whole value can be sent
    peaks: tuple[float, ...] = ()  # the highest rates that were ever accepted, up to ODD_BEFORE, highest first
    odd: tuple[Odd, ...] = ()  # the last values that were above the limit, oldest first
    elsewhere: float = 0.0  # what is usual in the model's liveliest other fragment for so many parameters; 0: unknown


class Candidate(NamedTuple):
    """One learner's part, and the norm of its value; not finite if the value is not."""

    part: Part
    norm: float

    @property
    def rate(self) -> float:
        return self.norm / self.part.steps


def choose(
    candidates: Sequence[Candidate], known: Mark, length: float, outlier_factor: float, left_out: dict[str, str]
) -> tuple[list[int], tuple[Odd, ...]]:
    """Return the indices of those who may be merged, and the fragment's next `Mark.odd`, as long as these are merged.

    Args:
        candidates: in the order of the learners' names.
        length: the fragment's initial norm, or that of as many average parameters of the model if that is more.
        outlier_factor: how many times what is usual a value may be; 0 for no limit.
        left_out: learner -> why; who may not be merged is added to it.
    """
    finite = [i for i, candidate in enumerate(candidates) if math.isfinite(candidate.norm)]
    for candidate in candidates:
        if not math.isfinite(candidate.norm):
            left_out[candidate.part.learner_id] = "NaN or infinity in its value"
    moving = [candidates[i].rate for i in finite if candidates[i].rate > 0]
    voted = len(moving) >= PARTS_MIN
    usual = _usual(known, moving if voted else [])
    seen = GROWTH * known.peaks[-1] if len(known.peaks) == ODD_BEFORE else 0.0
    limit = max(outlier_factor * usual, HARMLESS * length, seen) if usual and outlier_factor else math.inf
    chosen, odd = [], list(known.odd)
    for i in finite:
        candidate, name = candidates[i], candidates[i].part.learner_id
        if candidate.rate <= limit:
            chosen.append(i)
            continue
        before = [one for one in odd if one.learner_id == name]
        odd = [one for one in odd if one.learner_id != name] if voted else odd
        if not voted:
            this = _compared(candidate, before, length)
            odd.append(this)
            if this.merged:
                chosen.append(i)
                continue
        left_out[name] = (
            f"its value has norm {candidate.rate:.3g} per inner step, where {usual:.3g} is usual "
            f"(merge.outlier_factor {outlier_factor:g})"
        )
    return chosen, tuple(odd[-ODD_KEPT:])


def anchor_problem(distance: float, steps: int, known: Mark, length: float, outlier_factor: float) -> str:
    """Say why a global value that a learner brings after a restart cannot be used; "" if it can.

    As for a learner's value, but of the way of the global model: so many times what is usual for each inner step.

    Args:
        distance: norm of the difference from the value of `known`, which the snapshot holds; not finite if it is not.
        steps: global steps from that version to the one that is brought.
        known: what the snapshot knows of the fragment.
        length: as of `choose`.
        outlier_factor: as of `choose`.
    """
    if not math.isfinite(distance):
        return "NaN or infinity in it"
    usual = _usual(known, [])
    limit = max(outlier_factor * usual, HARMLESS * length) * max(1, steps) if usual else outlier_factor * length
    if not outlier_factor or distance <= limit:
        return ""
    return f"it is {distance:.3g} away from the snapshot's value, allowed is {limit:.3g} (merge.outlier_factor)"


def _usual(known: Mark, now: Sequence[float]) -> float:
    """Return the norm per inner step that is usual; 0 if nobody can know."""
    medians = [median(known.rates), known.elsewhere] if len(known.rates) >= RATES_MIN else []
    return max([*medians, *([median(now)] if now else [])], default=0.0)


def _compared(candidate: Candidate, before: Sequence[Odd], length: float) -> Odd:
    """Compare a value above the limit with its learner's earlier ones: it may be merged all the same."""
    part, norm, rate = candidate.part, candidate.norm, candidate.rate
    last = before[-1] if before else None
    again = last is not None and last.base == part.base_version and last.steps < part.steps
    if last is not None and again and norm > FAR * length:
        # Nothing was merged since, so the value holds the one before: an accident stays where it is.
        rate = (norm - last.norm) / (part.steps - last.steps)
        lasts = rate >= GOES_ON * candidate.rate
    else:  # nobody moves a fragment by its own length in one step
        lasts = last is None or last.merged or rate <= length
    as_high = [one for one in before if one.lasts and GROWTH * one.rate >= rate]
    merged = (lasts or again) and len(as_high) >= ODD_BEFORE  # `again`: an accident has but one before that lasts
    return Odd(part.learner_id, part.base_version, part.steps, norm, rate, lasts, merged)


def median(values: Sequence[float]) -> float:
    """Return the lower median: one of the values, so no rounding."""
    return sorted(values)[(len(values) - 1) // 2]
