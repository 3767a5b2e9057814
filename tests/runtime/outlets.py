"""Callbacks for runs with real processes."""

import os
import time
from typing import Any


class Raising:
    """Fails at the first call in every process."""

    def on_step(self, *arguments: Any) -> None:
        raise RuntimeError("out of order")

    on_round = on_step


class Waiting:
    """Keeps the syncer of a complete run until the test has its last metrics, or until it has waited long enough."""

    def on_event(self, kind: str, text: str) -> None:
        while kind == "finished" and not os.path.exists(os.environ["DILOCO_TEST_SCRAPED"]):
            time.sleep(0.05)
