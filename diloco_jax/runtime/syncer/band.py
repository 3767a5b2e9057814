"""The band around the losses of an earlier run, and whether those of this run leave it.

A run may train without any fault and yet be worse than it should: another rate, another batch, too few islands in
rounds. Only another run shows that. The reference at T tokens is

    L(T) = the losses of the earlier run's evaluations, linear in log T between them

and the upper edge of the band is (1 + excess) L(T). No rule reads it.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from math import inf, isfinite, log
from pathlib import Path

from diloco_jax.protocol.watch.alarms import Alarm
from diloco_jax.runtime.records.files import METRICS_FILE
from diloco_jax.runtime.records.telemetry import read_metrics
from diloco_jax.settings.run import EvaluationConfig

# The first part of the earlier run is not compared, because warm-up and the order of the data matter most there.
FIRST_SHARE = 0.1
# So many evaluations in a row must be above the band until there is an alarm. One alone may be chance.
ABOVE_MIN = 2

Point = tuple[int, float]


class Band:
    """Compares the evaluations of a run with those of an earlier one.

    Args:
        points: tokens and loss of the earlier run's evaluations, at least one, with ascending tokens.
        excess: how far a loss may be above the reference, as a share of it.
    """

    def __init__(self, points: Sequence[Point], excess: float) -> None:
        self._points = points
        self._excess = excess
        # Evaluations in a row above the band, and what the newest of them shows.
        self._above = 0
        self._found = ""

    def reference(self, tokens: int) -> float | None:
        """Return the earlier run's loss at this number of tokens; None where it is not compared.

        After the end of the earlier run this is its last loss, because more tokens do not make a model worse.
        """
        first, last = self._points[0], self._points[-1]
        if tokens < max(first[0], FIRST_SHARE * last[0]):
            return None
        if tokens >= last[0]:
            return last[1]
        at = bisect_left(self._points, (tokens, -inf))
        (start, before), (stop, after) = self._points[max(0, at - 1)], self._points[at]
        share = log(tokens / start) / log(stop / start) if stop > start else 1.0
        return before + share * (after - before)

    def on_loss(self, loss: float, tokens: int) -> None:
        """Compare a new evaluation."""
        reference = self.reference(tokens)
        if reference is None or not isfinite(loss) or loss <= (1 + self._excess) * reference:
            self._above = 0
            return
        self._above += 1
        self._found = (
            f"the evaluation loss {loss:.4f} after {tokens:,} tokens is {loss / reference - 1:.1%} above "
            f"{reference:.4f}, that of evaluation.baseline; alarm above {self._excess:.1%}"
        )

    def alarms(self) -> list[Alarm]:
        """List the alarm, if the newest evaluations are above the band."""
        return [Alarm("band", "", self._found)] if self._above >= ABOVE_MIN else []


def read_band(config: EvaluationConfig) -> Band | None:
    """Return the band of the run that a config names; None if it names none.

    Raises:
        ValueError: the run cannot be read, or has no evaluation.
    """
    if not config.baseline:
        return None
    path = Path(config.baseline)
    path = path / METRICS_FILE if path.is_dir() else path
    what = f"evaluation.baseline is '{config.baseline}'"
    try:
        points = sorted(
            (record["tokens"], record["loss"])
            for record in read_metrics(path)
            if record.get("kind") == "eval" and record.get("loss") is not None and record["tokens"] > 0
        )
    except OSError as error:
        raise ValueError(f"{what}, and {path} cannot be read ({error.strerror}); name the folder of a run") from None
    except (KeyError, TypeError) as error:
        raise ValueError(f"{what}, and {path} has a damaged evaluation ({error}); name another run") from None
    # Of two evaluations after equal tokens, the later one in this order counts.
    points = [point for point, later in pairwise([*points, (inf, 0.0)]) if point[0] < later[0]]
    if not points:
        raise ValueError(f"{what}, a run without evaluations; name one with train.eval_every above 0")
    return Band(points, config.baseline_excess)
