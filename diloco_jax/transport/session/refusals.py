"""Log lines about refused callers: few of them, whatever callers do.

A caller that is refused tries again, perhaps for days, and anyone who reaches the port can be refused. So a pair of
caller and reason gets one line per minute, a caller at most CALLER_MAX, and at most PAIRS_MAX pairs are remembered.
"""

import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from diloco_jax.protocol.texts import clean

PAUSE_S = 60.0
PAIRS_MAX, CALLER_MAX = 64, 4
REASON_MAX = 600
NUMBERS = re.compile(r"\d+")

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Pair:
    """A caller and a reason: when they last had a line, and how many refusals had none since."""

    line_s: float
    unsaid: int = 0


class Refusals:
    """The refused callers of this process, and the callers behind gRPC's own port; any thread."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        # Pairs in the order of their newest lines.
        self._pairs: dict[tuple[str, str], _Pair] = {}
        # Refusals of pairs that were not remembered.
        self._others = 0
        # gRPC's name of a forwarded connection -> host of the caller.
        self._callers: dict[str, str] = {}
        # The forwarded connections that made a call.
        self._called: set[str] = set()

    def tell(self, caller: str, reason: str) -> None:
        """Log a refusal, unless there was a line about it in the last minute."""
        reason, now_s = clean(reason, REASON_MAX), self._now_s()
        # Numbers may differ from one attempt to the next.
        key = (caller, NUMBERS.sub("#", reason))
        with self._lock:
            pair = self._pairs.get(key)
            if pair is not None and now_s < pair.line_s + PAUSE_S:
                pair.unsaid += 1
                return
            own = [known for known in self._pairs if known[0] == caller]
            if pair is None and len(own) >= CALLER_MAX and now_s < self._pairs[own[0]].line_s + PAUSE_S:
                self._others += 1
                return
            if pair is None and len(self._pairs) >= PAIRS_MAX:
                oldest = next(iter(self._pairs))
                if now_s < self._pairs[oldest].line_s + PAUSE_S:
                    self._others += 1
                    return
                self._others += self._pairs.pop(oldest).unsaid
            unsaid, others, self._others = pair.unsaid if pair is not None else 0, self._others, 0
            # The newest line is the last one.
            self._pairs.pop(key, None)
            self._pairs[key] = _Pair(now_s)
        more = [f"{unsaid} more times since the last line"] * bool(unsaid)
        more += [f"{others} other refusals had no line"] * bool(others)
        log.warning(f"refused {caller}: {reason}" + f" ({'; '.join(more)})" * bool(more))

    def forwards(self, inner: str, caller: str) -> None:
        """Note whose connection is forwarded to gRPC under the name `inner`."""
        with self._lock:
            self._callers[inner] = caller

    def caller_of(self, peer: str) -> str:
        """Return the host of the caller that gRPC names `peer`, and note that it made a call."""
        with self._lock:
            if peer not in self._callers:
                # gRPC took the connection itself. It writes ipv4:10.0.0.7:1234 or ipv6:%5B::1%5D:1234.
                return peer.partition(":")[2].rpartition(":")[0].replace("%5B", "").replace("%5D", "") or peer
            self._called.add(peer)
            return self._callers[peer]

    def ended(self, inner: str) -> bool:
        """Forget a forwarded connection, and return whether a call was made on it."""
        with self._lock:
            called = inner in self._called
            self._callers.pop(inner, None)
            self._called.discard(inner)
            return called


REFUSALS = Refusals()
