"""Waiting for what another thread does."""

from __future__ import annotations

import time
from collections.abc import Callable


def comes_true(condition: Callable[[], bool], within_s: float = 20.0) -> bool:
    """Whether it does in time."""
    until_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.005)
    return True
