"""A store with faults, in front of the real one of every process of a test."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from diloco_jax.transport.store.store import ObjectStore, Requests, StoreError


class FaultyStore:
    """The methods of ObjectStore, each of which may go wrong.

    Args:
        before: Is called with the operation and its name of an object or prefix; it may wait or raise, or return a
            value as the answer.
        after: Is called in the same way when the operation is done, so that only its answer is lost.
    """

    def __init__(self, inner: ObjectStore, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        self._inner, self._before, self._after = inner, before, after

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def do(*arguments: Any, **options: Any) -> Any:
            answer = self._before(name, arguments[0])
            if answer is not None:
                return answer[0]
            done = found(*arguments, **options)
            answer = self._after(name, arguments[0], done)
            return done if answer is None else answer[0]

        return do


class Faults:
    """What goes wrong, in a test's own words: rules that a test sets and removes.

    A rule takes an operation and an object's name, and returns None, raises, or returns a 1-tuple with the answer.
    """

    def __init__(self) -> None:
        self.before: list[Callable[[str, Any], Any]] = []
        self.after: list[Callable[[str, Any, Any], Any]] = []

    def make(self, url: str, requests: Requests | None = None) -> FaultyStore:
        """Open a store, in place of ObjectStore."""
        return FaultyStore(ObjectStore(url, requests), self._before, self._after)

    def _before(self, name: str, key: Any) -> Any:
        return next((answer for rule in list(self.before) if (answer := rule(name, key)) is not None), None)

    def _after(self, name: str, key: Any, done: Any) -> Any:
        return next((answer for rule in list(self.after) if (answer := rule(name, key, done)) is not None), None)


def outage(_: str, key: Any) -> None:
    """No request is answered."""
    raise StoreError(f"503 Slow Down: {key}")


class Drawn:
    """Faults that a seed draws: errors, lost answers, slow calls, missing objects, old listings, and outages."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self.over = False
        self._rates = {kind: self._random.choice([0, 0, 0.02, 0.1]) for kind in ("error", "lost", "missing", "stale")}
        self._slow = self._random.choice([0, 0, 0.1])
        self._outage = self._random.choice([0, 0, 0.003])
        self._down_s = 0.0
        self._listed: dict[str, list[str]] = {}

    def _draw(self) -> float:
        with self._lock:
            return self._random.random()

    def before(self, name: str, key: Any) -> Any:
        if self.over:
            return None
        if self._draw() < self._outage:
            self._down_s = time.monotonic() + 0.1 * self._draw()
        if time.monotonic() < self._down_s or self._draw() < self._rates["error"]:
            raise StoreError(f"cannot {name} {key}")
        if self._draw() < self._slow:
            time.sleep(0.004 * self._draw())
        if name in ("get", "read_whole") and self._draw() < self._rates["missing"]:
            return (None,)
        if name == "list" and key in self._listed and self._draw() < self._rates["stale"]:
            return (self._listed[key],)
        return None

    def after(self, name: str, key: Any, done: Any) -> Any:
        if self.over:
            return None
        if name == "list":
            self._listed[key] = done
        if name in ("put", "create", "delete") and self._draw() < self._rates["lost"]:
            raise StoreError(f"no answer to {name} {key}")
        return None


def spoil(store: ObjectStore, seed: int, prefix: str) -> Sequence[str]:
    """Delete or damage one object below a prefix, as a stranger would; return its name."""
    drawn = random.Random(seed)
    found = store.list(prefix)
    if not found:
        return []
    key = drawn.choice(found)
    if drawn.random() < 0.5:
        store.delete([key])
    else:
        store.put(key, drawn.randbytes(200))
    return [key]
