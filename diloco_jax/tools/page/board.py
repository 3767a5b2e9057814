"""The news of runs for all viewers of a page; folders are read once for all viewers, and never without one."""

import json
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from diloco_jax.settings.run import RunConfig
from diloco_jax.tools.budget.needs import kinds_of, outline
from diloco_jax.tools.page.feed import RunFeed

EVERY_S = 1.0
# Time without news until a comment is sent, so that both ends notice a lost connection.
HEARTBEAT_S = 15.0
# A viewer that has missed more frames gets the whole state again.
FRAMES_KEPT = 30


def planned(config: RunConfig | None) -> dict[str, float]:
    """Return the bytes that an island should move per inner step by its config; {} if they are not known."""
    if config is None or config.model.own:
        return {}
    with suppress(ValueError, OSError):
        return outline(config, kinds_of(config)[0]).links.per_step
    return {}


def event(kind: str, content: Any) -> bytes:
    """Return a server-sent event as bytes."""
    return f"event: {kind}\ndata: {json.dumps(content, allow_nan=False, separators=(',', ':'))}\n\n".encode()


class Board:
    """A reader of the folders of runs, in the order of the page, in a separate thread, while there are viewers."""

    def __init__(self, feeds: Sequence[RunFeed]) -> None:
        self._feeds = feeds
        self._changed = threading.Condition()
        self._frames: deque[tuple[int, bytes]] = deque(maxlen=FRAMES_KEPT)
        self._number = 0
        self._planned: list[dict[str, float]] = []
        self._viewers = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read, name="board", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and every stream."""
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join()

    def state(self) -> dict[str, Any]:
        """Return the whole state of all runs."""
        with self._changed:
            while any([feed.look() for feed in self._feeds]):
                pass
            return self._state()

    def _state(self) -> dict[str, Any]:
        if not self._planned:
            self._planned = [planned(feed.config) for feed in self._feeds]
        runs = zip(self._feeds, self._planned, strict=True)
        return {"runs": [{**feed.whole(), "plan": plan} for feed, plan in runs]}

    def watch(self) -> Iterator[bytes]:
        """Yield the whole state, then news as they come, forever."""
        with self._changed:
            # Without viewers, no folder was read.
            if not self._viewers:
                for feed in self._feeds:
                    feed.fresh = True
            self._viewers += 1
            self._changed.notify_all()
        try:
            number = -1
            while not self._closed.is_set():
                with self._changed:
                    if number == self._number and not self._closed.is_set():
                        self._changed.wait(HEARTBEAT_S)
                    missed = [frame for each, frame in self._frames if each > number]
                    if number < 0 or len(missed) < self._number - number:
                        missed = [event("whole", self._state())]
                    number = self._number
                yield b"".join(missed) or b": nothing new\n\n"
        finally:
            with self._changed:
                self._viewers -= 1

    def _read(self) -> None:
        """Read news about once a second."""
        before: dict[str, Any] = {}
        while not self._closed.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._viewers or self._closed.is_set())
                more = [feed.look() for feed in self._feeds]
                # Another run in the same folder makes its feed fresh too.
                anew = any(feed.fresh for feed in self._feeds)
                news = {"runs": [feed.news() for feed in self._feeds]}
                if anew or news != before:
                    before = news
                    self._number += 1
                    self._frames.append((self._number, event(*(("whole", self._state()) if anew else ("news", news)))))
                    self._changed.notify_all()
            self._closed.wait(0.0 if any(more) else EVERY_S)
