"""The traffic of each island's link: its bytes over the whole run, and its bytes per second lately."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from diloco_jax.protocol.watch.stats import KEPT_PER_STEP
from diloco_jax.transport.link import Traffic

NOTHING = Traffic(0, 0)
# Shorter steps count as this long, or the payload of one round would be most of what the average covers.
STEP_S_MIN = 1.0


class _Window(NamedTuple):
    """Sums of time and bytes; older ones have less weight."""

    span_s: float = 0.0
    up: float = 0.0
    down: float = 0.0


class IslandTraffic:
    """Totals and rates of the islands' links.

    A rate is an average over about ten steps, as an island's tokens per second are. If b_i bytes moved in t_i seconds,
    n_i steps ago, the rate is sum(k^n_i b_i) / sum(k^n_i t_i) with k = KEPT_PER_STEP. Steps are counted by time,
    because a link also moves bytes while its island makes no steps, for example when it joins.

    Args:
        earlier: bytes of each island under earlier processes of the syncer.
    """

    def __init__(self, earlier: Mapping[str, Mapping[str, int]]) -> None:
        self._earlier = earlier
        self._windows: dict[str, _Window] = {}
        # What was counted at the newest look, and when that was.
        self._before: Mapping[str, Traffic] = {}
        self._looked_s: float | None = None

    def totals(self, counted: Mapping[str, Traffic], names: Collection[str]) -> dict[str, dict[str, int]]:
        """Return the bytes from and to these islands over all processes of the syncer.

        Args:
            counted: bytes of each learner under this process.
        """
        found = {}
        for name in sorted(names):
            up, down = counted.get(name, NOTHING)
            before = self._earlier.get(name, {"up_bytes": 0, "down_bytes": 0})
            found[name] = {"up_bytes": before["up_bytes"] + up, "down_bytes": before["down_bytes"] + down}
        return found

    def rates(
        self, counted: Mapping[str, Traffic], steps: Mapping[str, float | None], now_s: float
    ) -> dict[str, dict[str, float | None]]:
        """Return bytes per second from and to connected islands, by name; there are none at the first call.

        Args:
            counted: bytes of each learner under this process.
            steps: seconds of a step of each connected island; None if it has made none.
        """
        elapsed_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        if self._looked_s is None or elapsed_s > 0:
            if elapsed_s > 0:
                # An island that lost its link starts with an empty window when it is back.
                self._windows = {name: self._next(name, counted, step_s, elapsed_s) for name, step_s in steps.items()}
            self._before, self._looked_s = counted, now_s
        known = ((name, each) for name, each in self._windows.items() if name in steps)
        return {
            name: {"up_bytes_per_s": round(up / span_s, 1), "down_bytes_per_s": round(down / span_s, 1)}
            for name, (span_s, up, down) in known
        }

    def _next(self, name: str, counted: Mapping[str, Traffic], step_s: float | None, elapsed_s: float) -> _Window:
        """Return an island's window after some more seconds."""
        kept = KEPT_PER_STEP ** (elapsed_s / max(step_s or 0.0, STEP_S_MIN))
        span_s, up, down = self._windows.get(name, _Window())
        now, before = counted.get(name, NOTHING), self._before.get(name, NOTHING)
        more_up, more_down = now.received_bytes - before.received_bytes, now.sent_bytes - before.sent_bytes
        return _Window(kept * span_s + elapsed_s, kept * up + more_up, kept * down + more_down)
