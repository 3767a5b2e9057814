"""The rule that excludes learners' values from a merge: non-finite ones, and outliers by their norm.

The rule decides from norms, counters and the fragment's history alone. The driver measures the norms and computes the
merge; the tape records both, so that `diloco audit` and `diloco replay` can repeat each decision. A syncer that
restarts repeats those after its snapshot (`recall`), so that it forgets nothing of what is usual: values of learners
may be newer than the snapshot, and with an empty history any value would be accepted.

The *rate* of a value is its norm, divided by the inner steps that it covers. A finite value is an outlier if its rate
is above a limit, which is the largest of:

  * `outlier_factor` times the usual rate,
  * HARMLESS times the fragment's length,
  * GROWTH times the second-highest rate that the fragment ever accepted.

The usual rate is the largest of three medians:

  * The median of the rates that the fragment accepted last.
  * The median of this round, if at least VOTERS_MIN learners moved. A change that concerns everybody, such as the end
    of a long warm-up, must exclude nobody.
  * The median of the model's liveliest other fragment, scaled to an equal number of parameters. Rows of an embedding
    rest for hundreds of steps, until their token occurs.

If at least VOTERS_MIN learners moved, every outlier is excluded: the others outvote it. With fewer voters the rule
compares an outlier with earlier outliers of its learner. Damage is one jump and does not move on. A divergence grows
from round to round. A lasting change continues at its size. So the rule merges an outlier if two earlier ones were
about as large and the learner moved on in between. A lasting change is therefore excluded twice, then merged.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from diloco_jax.protocol.effects import Contribution

# Accepted rates that a fragment remembers.
RATES_KEPT = 32
# With fewer accepted rates a fragment's median means nothing yet.
RATES_MIN = 8
# A rate below this fraction of the fragment's length is never an outlier.
HARMLESS = 1e-3
# With fewer voters in a round, one bad value could be the median.
VOTERS_MIN = 3
# Outliers that a fragment remembers.
OUTLIERS_KEPT = 16
# A value is merged after so many earlier outliers of about its size, so honest work is excluded at most twice in a row.
EARLIER_MIN = 2
# An earlier outlier is about as large if the rate has grown by at most this factor: a ramp grows so from its first
# round to its third, and a divergence grows more.
GROWTH = 3.0
# A value whose norm is above this many lengths must show that its learner moved on since its earlier outlier.
FAR = 3.0
# The learner moved on if it moved at this fraction of its mean rate since then.
MOVED_ON = 0.25

UNKNOWN_RATE = 0.0


class Outlier(NamedTuple):
    """A value above the limit, kept for the comparison with later values of its learner."""

    learner_id: str
    # Version of the learner's anchor, which the value was measured against.
    base: int
    steps: int
    norm: float
    # Norm per inner step; since the learner's earlier outlier, if both have the same base and the value is far away.
    rate: float
    # False if the value may be what an earlier accident left behind.
    lasts: bool
    merged: bool


class RateHistory(NamedTuple):
    """The rates that one fragment has seen; part of the model's snapshot."""

    # Rates that were accepted last, oldest first; at most RATES_KEPT.
    rates: tuple[float, ...] = ()
    # The highest rates that were ever accepted, highest first; at most EARLIER_MIN.
    peaks: tuple[float, ...] = ()
    # Oldest first; at most OUTLIERS_KEPT.
    outliers: tuple[Outlier, ...] = ()
    # Usual rate of the liveliest other fragment, scaled to this fragment's size; UNKNOWN_RATE before there is one.
    elsewhere: float = UNKNOWN_RATE


class MeasuredValue(NamedTuple):
    """One learner's contribution to a round, and the norm of its value: NaN if the value is not finite."""

    contribution: Contribution
    norm: float

    @property
    def rate(self) -> float:
        return self.norm / self.contribution.steps


class Decision(NamedTuple):
    """Outcome of the rule for one round."""

    # Indices of the values that are merged.
    merged: tuple[int, ...]
    # Learner -> reason.
    excluded: dict[str, str]
    # The outliers of the fragment's next history.
    outliers: tuple[Outlier, ...]


class Evidence(NamedTuple):
    """Measurements of one round, as the tape records them: with the earlier rounds they repeat its decision."""

    # Learner -> norm; None if the value is not finite. A learner whose payload cannot be decoded is missing.
    norms: dict[str, float | None]
    length: float
    elsewhere: float
    outlier_factor: float
    # Finite values that were excluded because the merged result was not finite.
    overflows: int
    # Learner -> why it is excluded.
    reasons: dict[str, str]


def decide(values: Sequence[MeasuredValue], history: RateHistory, length: float, outlier_factor: float) -> Decision:
    """Decide which values of a round are merged.

    Args:
        values: sorted by learner.
        history: of the fragment.
        length: norm of the fragment's initial value, or of as many average parameters of the model if that is larger.
        outlier_factor: an outlier's rate is this many times the usual one; 0 excludes no finite value.
    """
    finite = [i for i, value in enumerate(values) if math.isfinite(value.norm)]
    excluded = {
        value.contribution.learner_id: "NaN or infinity in its value"
        for value in values
        if not math.isfinite(value.norm)
    }
    moving = [values[i].rate for i in finite if values[i].rate > 0]
    voted = len(moving) >= VOTERS_MIN
    usual = _usual_rate(history, moving if voted else [])
    limit = _limit(history, usual, length, outlier_factor)
    merged, outliers = [], list(history.outliers)
    for i in finite:
        value, name = values[i], values[i].contribution.learner_id
        if value.rate <= limit:
            merged.append(i)
            continue
        earlier = [each for each in outliers if each.learner_id == name]
        if voted:
            outliers = [each for each in outliers if each.learner_id != name]
        else:
            outliers.append(_compare(value, earlier, length))
            if outliers[-1].merged:
                merged.append(i)
                continue
        excluded[name] = (
            f"its value has norm {value.rate:.3g} per inner step, where {usual:.3g} is usual "
            f"(merge.outlier_factor {outlier_factor:g})"
        )
    return Decision(tuple(merged), excluded, tuple(outliers[-OUTLIERS_KEPT:]))


def exclude_largest(decision: Decision, values: Sequence[MeasuredValue]) -> Decision:
    """Exclude the merged value with the highest rate as well, because the merge of finite values overflowed."""
    worst = max(decision.merged, key=lambda i: (values[i].rate, values[i].contribution.learner_id))
    name = values[worst].contribution.learner_id
    return Decision(
        tuple(i for i in decision.merged if i != worst),
        decision.excluded | {name: "its value is so large that the result is not finite"},
        tuple(each for each in decision.outliers if each.learner_id != name),
    )


def next_history(history: RateHistory, decision: Decision, values: Sequence[MeasuredValue]) -> RateHistory:
    """Return the fragment's history after a round; `elsewhere` stays."""
    # A learner that did not move, at a learning rate of 0 for example, shows nothing about the usual rate.
    accepted = tuple(values[i].rate for i in decision.merged if values[i].rate > 0)
    return RateHistory(
        (*history.rates, *accepted)[-RATES_KEPT:],
        tuple(sorted((*history.peaks, *accepted), reverse=True)[:EARLIER_MIN]),
        decision.outliers,
        history.elsewhere,
    )


def usual_elsewhere(histories: Sequence[RateHistory], sizes: Sequence[int], fragment_id: int) -> float:
    """Return the usual rate of the liveliest other fragment, scaled to this fragment's number of parameters.

    Args:
        histories: of all fragments.
        sizes: parameters of each fragment.
        fragment_id: the fragment whose rate is scaled.
    """
    usual = [
        median(history.rates) / math.sqrt(sizes[number])
        for number, history in enumerate(histories)
        if number != fragment_id and len(history.rates) >= RATES_MIN
    ]
    return max(usual, default=UNKNOWN_RATE) * math.sqrt(sizes[fragment_id])


def evidence_of(
    values: Sequence[MeasuredValue],
    history: RateHistory,
    length: float,
    outlier_factor: float,
    overflows: int,
    reasons: dict[str, str],
) -> Evidence:
    """Return the tape's record of a round; arguments as of `decide` and `Evidence`."""
    norms = {value.contribution.learner_id: value.norm if math.isfinite(value.norm) else None for value in values}
    return Evidence(norms, length, history.elsewhere, outlier_factor, overflows, dict(sorted(reasons.items())))


def repeat(
    evidence: Evidence, contributions: Sequence[Contribution], history: RateHistory
) -> tuple[Decision, RateHistory]:
    """Repeat a recorded decision; returns it with the fragment's next history.

    Args:
        evidence: the record of the round.
        contributions: of all learners in the round, whose payloads could be decoded or not.
        history: of the fragment before the round.
    """
    values = [
        MeasuredValue(contribution, math.nan if (norm := evidence.norms[contribution.learner_id]) is None else norm)
        for contribution in contributions
        if contribution.learner_id in evidence.norms
    ]
    history = history._replace(elsewhere=evidence.elsewhere)
    decision = decide(values, history, evidence.length, evidence.outlier_factor)
    for _ in range(min(evidence.overflows, len(decision.merged))):
        decision = exclude_largest(decision, values)
    undecoded = {contribution.learner_id: "its payload cannot be decoded" for contribution in contributions}
    undecoded = {name: reason for name, reason in undecoded.items() if name not in evidence.norms}
    return decision._replace(excluded=decision.excluded | undecoded), next_history(history, decision, values)


def recall(
    histories: Sequence[RateHistory],
    sizes: Sequence[int],
    fragment_id: int,
    evidence: Evidence,
    contributions: Sequence[Contribution],
) -> RateHistory:
    """Return a fragment's history after a recorded round, as the process that decided the round had it.

    Args:
        histories: of all fragments before the round.
        sizes: parameters of each fragment.
        fragment_id: the fragment of the round.
        evidence: the record of the round.
        contributions: as of `repeat`.
    """
    _, history = repeat(evidence, contributions, histories[fragment_id])
    return history._replace(elsewhere=usual_elsewhere(histories, sizes, fragment_id))


def anchor_problem(distance: float, steps: int, history: RateHistory, length: float, outlier_factor: float) -> str:
    """Return why a global value that a learner brings after a restart cannot be used; "" if it can.

    The limit is that of a learner's value, for the way of the global model: once for each global step.

    Args:
        distance: norm of the difference between the value and the snapshot's; not finite if the value is not.
        steps: global steps from the snapshot's version to the value's.
        history: of the fragment, from the snapshot.
        length: as of `decide`.
        outlier_factor: as of `decide`.
    """
    if not math.isfinite(distance):
        return "NaN or infinity in it"
    usual = _usual_rate(history, [])
    limit = max(outlier_factor * usual, HARMLESS * length) * max(1, steps) if usual else outlier_factor * length
    if not outlier_factor or distance <= limit:
        return ""
    return f"it is {distance:.3g} away from the snapshot's value, allowed is {limit:.3g} (merge.outlier_factor)"


def median(values: Sequence[float]) -> float:
    """Return the lower median: one of the values, so nothing is rounded."""
    return sorted(values)[(len(values) - 1) // 2]


def _usual_rate(history: RateHistory, votes: Sequence[float]) -> float:
    """Return the usual rate; UNKNOWN_RATE without enough accepted rates and without votes."""
    medians = [median(history.rates), history.elsewhere] if len(history.rates) >= RATES_MIN else []
    return max([*medians, *([median(votes)] if votes else [])], default=UNKNOWN_RATE)


def _limit(history: RateHistory, usual: float, length: float, outlier_factor: float) -> float:
    """Return the rate above which a value is an outlier."""
    if not usual or not outlier_factor:
        return math.inf
    seen = GROWTH * history.peaks[-1] if len(history.peaks) == EARLIER_MIN else 0.0
    return max(outlier_factor * usual, HARMLESS * length, seen)


def _compare(value: MeasuredValue, earlier: Sequence[Outlier], length: float) -> Outlier:
    """Compare an outlier with earlier ones of its learner, oldest first; the result names whether it is merged."""
    contribution, norm, rate = value.contribution, value.norm, value.rate
    last = earlier[-1] if earlier else None
    # True if nothing of the fragment was merged since the last outlier, so that this value holds it.
    again = last is not None and last.base == contribution.base_version and last.steps < contribution.steps
    if last is not None and again and norm > FAR * length:
        rate = (norm - last.norm) / (contribution.steps - last.steps)
        lasts = rate >= MOVED_ON * value.rate
    else:
        # No learner moves a fragment by its own length in one step.
        lasts = last is None or last.merged or rate <= length
    as_large = [each for each in earlier if each.lasts and GROWTH * each.rate >= rate]
    # An accident leaves only one earlier outlier that lasts, so a value that holds the last outlier may be merged too.
    merged = (lasts or again) and len(as_large) >= EARLIER_MIN
    return Outlier(contribution.learner_id, contribution.base_version, contribution.steps, norm, rate, lasts, merged)
