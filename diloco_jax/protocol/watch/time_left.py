"""Estimates the time left of a run from its recent rate of global steps, for status, logs, live view and page.

The window of the rate is the last WINDOW_S, or the last WINDOW_SHARE of the time since the first global step if that is
longer. It always has at least STEPS_LEAST steps. The time before the first global step of this process does not count,
so a slow start or resume does not spoil the estimate. The first STEPS_LEAST steps are often slow too, because islands
still join. So they give no estimate unless they take WINDOW_S, and do not count once twice as many were made. The time
since the newest step counts only when it is longer than a step.
"""

from collections import deque

WINDOW_S = 60.0
WINDOW_SHARE = 0.05
STEPS_LEAST = 8
POINTS = 256


class TimeLeft:
    """Estimator of the remaining time; call `step` with every new count of global steps.

    Args:
        begin: Global steps that were made before.
    """

    def __init__(self, begin: int = 0) -> None:
        self._begin = begin
        self._first_s, self._first = 0.0, begin
        self._points: deque[tuple[float, int]] = deque()

    def step(self, now_s: float, global_step: int) -> None:
        """Record the number of global steps made; a smaller number than before restarts the estimate."""
        points = self._points
        if points and (now_s < points[-1][0] or global_step < points[-1][1]):
            points.clear()
        self._begin = min(self._begin, global_step)
        if global_step <= self._begin or (points and points[-1][1] == global_step):
            return
        if not points:
            self._first_s, self._first = now_s, global_step
        window_s = max(WINDOW_S, WINDOW_SHARE * (now_s - self._first_s))
        if len(points) > 2 and now_s - points[-2][0] < window_s / POINTS:
            points.pop()
        points.append((now_s, global_step))
        settled = self._first + STEPS_LEAST
        while len(points) > 2 and points[0][1] < settled and global_step - points[1][1] >= STEPS_LEAST:
            points.popleft()
        while len(points) > 2 and points[1][0] <= now_s - window_s and global_step - points[1][1] >= STEPS_LEAST:
            points.popleft()

    def left_s(self, now_s: float, total_steps: int) -> float | None:
        """Return the seconds until the last global step; None without an estimate, or long after the newest step."""
        if len(self._points) < 2:
            return None
        (begin_s, begin), (end_s, end) = self._points[0], self._points[-1]
        if end - begin < STEPS_LEAST and end_s - begin_s < WINDOW_S:
            return None
        each_s, waited_s = (end_s - begin_s) / (end - begin), now_s - end_s
        if each_s <= 0 or waited_s > max(WINDOW_S, STEPS_LEAST * each_s):
            return None
        left = max(0, total_steps - end)
        return max(left * each_s - waited_s, max(0, left - 1) * each_s)
