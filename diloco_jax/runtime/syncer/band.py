"""The band around the losses of an earlier run, and whether those of this run leave it.

A run may train without any fault and yet be worse than it should: another rate, another batch, too few islands in
rounds. Only another run shows that. The reference at T tokens is

    L(T) = the losses of the earlier run's evaluations, linear in log T between them

and the upper edge of the band is L(T) + excess |L(T)|. No rule reads it.
"""

import logging
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import isfinite, log
from pathlib import Path
from typing import Any, NamedTuple

from diloco_jax.protocol.corpora import RUN
from diloco_jax.protocol.watch.alarms import Alarm
from diloco_jax.protocol.watch.sites import LOSS
from diloco_jax.runtime.records.files import METRICS_FILE
from diloco_jax.runtime.records.telemetry import read_metrics
from diloco_jax.settings.run import EvaluationConfig

# The first part of the earlier run is not compared, because warm-up and the order of the data matter most there.
FIRST_SHARE = 0.1
# So many evaluations in a row must be above the band until there is an alarm. One alone may be chance.
ABOVE_MIN = 2
# Limit of a number of tokens in a record; above it the record is damaged.
TOKENS_MAX = 1 << 62

logger = logging.getLogger(__name__)


class Point(NamedTuple):
    """One evaluation: tokens of the run, its loss, and the names of its scores."""

    tokens: int
    loss: float
    scores: frozenset[str] = frozenset()


class Band:
    """Compares the evaluations of a run with those of an earlier one.

    Args:
        points: evaluations of the earlier run, at least one, with ascending tokens.
        excess: how far a loss may be above the reference, as a share of it.
    """

    def __init__(self, points: Sequence[Point], excess: float) -> None:
        self._points = points
        self._excess = excess
        # Evaluations in a row above the band, and what the newest of them shows.
        self._above = 0
        self._found = ""

    def reference(self, tokens: int, has: Collection[str] = (), lacks: Collection[str] = ()) -> float | None:
        """Return the earlier run's loss at this number of tokens; None where it is not compared.

        After the end of the earlier run this is its last loss, because more tokens do not make a model worse.

        Args:
            has: scores that its evaluations must have.
            lacks: scores that they must not have.
        """
        points = [each for each in self._points if each.scores.issuperset(has) and each.scores.isdisjoint(lacks)]
        if not points or tokens < max(points[0].tokens, FIRST_SHARE * points[-1].tokens):
            return None
        if tokens >= points[-1].tokens:
            return points[-1].loss
        at = bisect_left(points, tokens, key=lambda each: each.tokens)
        if points[at].tokens == tokens:
            return points[at].loss
        (start, before, _), (stop, after, _) = points[at - 1], points[at]
        return before + log(tokens / start) / log(stop / start) * (after - before)

    def on_score(self, point: Point, corpora: Collection[str] = ()) -> None:
        """Compare a new evaluation.

        A mean over other corpora is another number, so both evaluations must have the losses on the same ones.

        Args:
            corpora: names of this run's corpora; "" is the corpus that islands share.
        """
        losses = {f"{name or RUN}{LOSS}" for name in corpora} if any(corpora) else set()
        reference = self.reference(point.tokens, losses & point.scores, losses - point.scores)
        if reference is None or not isfinite(point.loss) or point.loss <= reference + self._excess * abs(reference):
            self._above = 0
            return
        self._above += 1
        beyond = point.loss - reference
        more = f"{beyond / abs(reference):.1%}" if reference else f"{beyond:.4f}"
        self._found = (
            f"the evaluation loss {point.loss:.4f} after {point.tokens:,} tokens is {more} above {reference:.4f}, that "
            f"of evaluation.baseline; alarm above {self._excess:.1%}"
        )

    def alarms(self) -> list[Alarm]:
        """List the alarm, if the newest evaluations are above the band."""
        return [Alarm("band", "", self._found)] if self._above >= ABOVE_MIN else []


def evaluations(path: Path) -> Iterator[Point]:
    """Yield the evaluations of a metrics.jsonl in order.

    Raises:
        ValueError: a record is damaged.
        OSError: the file cannot be read.
    """
    for record in read_metrics(path):
        if record.get("kind") != "eval" or record.get("loss") is None:
            continue
        tokens, loss, scores = record.get("tokens"), record["loss"], record.get("scores", {})
        if not (_is_number(tokens) and isinstance(tokens, int) and 0 < tokens <= TOKENS_MAX):
            raise ValueError(f"{path} has an evaluation after {tokens!r:.40} tokens")
        if not (_is_number(loss) and isfinite(loss) and isinstance(scores, Mapping)):
            raise ValueError(f"{path} has an evaluation with the loss {loss!r:.40} and the scores {scores!r:.40}")
        yield Point(tokens, float(loss), frozenset(name for name, value in scores.items() if value is not None))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= TOKENS_MAX


def read_band(config: EvaluationConfig) -> Band | None:
    """Return the band of the run that a config names; None if it names none.

    Raises:
        ValueError: the run cannot be read, or has no evaluation.
    """
    if not config.baseline:
        return None
    what, path = f"evaluation.baseline is '{config.baseline}'", Path(config.baseline)
    points: list[Point] = []
    try:
        path = path / METRICS_FILE if path.is_dir() else path
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is not a file")
        for point in evaluations(path):
            # A run that went back to a snapshot makes some tokens again, and only the new ones are its history.
            while points and points[-1].tokens >= point.tokens:
                points.pop()
            points.append(point)
    except OSError as error:
        raise ValueError(f"{what}, and {path} cannot be read ({error.strerror}); name the folder of a run") from None
    except ValueError as error:
        raise ValueError(f"{what}: {error}; name another run") from None
    if not points:
        raise ValueError(f"{what}, a run without evaluations; name one with train.eval_every above 0")
    return Band(points, config.baseline_excess)


def continued_band(config: EvaluationConfig, run_dir: Path) -> Band | None:
    """Return the band for a run that resumes, with its newest evaluations; None if it cannot be read.

    A run that has begun does not end because an older one was removed.
    """
    try:
        band = read_band(config)
        if band is not None and (run_dir / METRICS_FILE).is_file():
            for point in [*evaluations(run_dir / METRICS_FILE)][-ABOVE_MIN:]:
                band.on_score(point)
        return band
    except (OSError, ValueError) as error:
        logger.warning(f"{error}; the run continues without this comparison")
        return None
