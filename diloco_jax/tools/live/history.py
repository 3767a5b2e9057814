"""Numbers of a run as a view has seen them, few however long it goes on, and drawn as sparklines."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

POINTS_MAX = 512  # of a curve; then every second one goes
RATE_WINDOW_S = 60.0  # of run time, for the time left
FIRST_GAP_S = 0.5  # of run time between two points at first; twice as much each time that half of them go
BARS = "▁▂▃▄▅▆▇█"
TRAINING, EVALUATION, SPEED = "training loss", "evaluation loss", "tokens/s"


class History:
    """Curves and the rate of a run, from the statuses that came so far."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, int]] = deque()  # (wall_s, global_step), newest last
        self._begin_again()

    def _begin_again(self) -> None:
        self._recent.clear()
        self._curves: dict[str, list[float]] = {TRAINING: [], EVALUATION: [], SPEED: []}
        self._gap_s, self._next_s = FIRST_GAP_S, 0.0

    def add(self, status: Mapping[str, Any]) -> None:
        """Take the newest status."""
        now = (status["wall_s"], status["global_step"])
        if self._recent and (now < self._recent[-1] or now[1] < self._recent[-1][1]):
            self._begin_again()  # a new run in the same place, or back to a snapshot
        if not self._recent or now != self._recent[-1]:
            self._recent.append(now)
        while len(self._recent) > 2 and self._recent[1][0] < now[0] - RATE_WINDOW_S:
            self._recent.popleft()
        evaluations, loss = self._curves[EVALUATION], status["eval_loss"]
        if _known(loss) and evaluations[-1:] != [loss]:
            evaluations.append(loss)
        losses = [row["loss"] for row in status["learners"] if row["state"] == "active" and _known(row["loss"])]
        if losses and now[0] >= self._next_s:
            self._next_s = now[0] + self._gap_s
            self._curves[TRAINING].append(sum(losses) / len(losses))
            self._curves[SPEED].append(status["tokens_per_s"])
        for name, curve in self._curves.items():
            if len(curve) > POINTS_MAX:
                del curve[-2::-2]  # the newest stays
                self._gap_s *= 2 if name == TRAINING else 1

    def steps_per_s(self) -> float | None:
        """Return global steps per second of run time over the last minute; None before two statuses."""
        if len(self._recent) < 2:
            return None
        (begin_s, begin_step), (end_s, end_step) = self._recent[0], self._recent[-1]
        return (end_step - begin_step) / (end_s - begin_s) if end_s > begin_s else None

    def curves(self) -> dict[str, Sequence[float]]:
        """Return the curves that have two points at least, oldest first."""
        return {name: tuple(curve) for name, curve in self._curves.items() if len(curve) >= 2}


def _known(loss: float | None) -> bool:
    return loss is not None and math.isfinite(loss)


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values as at most so many bars, each the mean of its share of them, between the least and the greatest."""
    count = min(width, len(values))
    cuts = [len(values) * bar // count for bar in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, span = min(means), max(means) - min(means)
    return "".join(BARS[min(7, int(8 * (mean - low) / span)) if span > 0 else 0] for mean in means)
