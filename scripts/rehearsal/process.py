"""A process of a rehearsal: `diloco` as it is, but for inner steps that take their time, as those on slices do."""

from __future__ import annotations

import os
import sys
import time

from diloco_jax.cli.main import main
from diloco_jax.runtime.island.built_in import BuiltInLoop

STEP_ENV = "REHEARSAL_STEP_S"
_wait = BuiltInLoop.wait


def wait(loop: BuiltInLoop, handle: object) -> object:
    """Wait for a step, and then for the end of its time."""
    figures = _wait(loop, handle)
    next_s = getattr(loop, "next_s", 0.0)
    time.sleep(max(0.0, next_s - time.monotonic()))
    loop.next_s = time.monotonic() + float(os.environ[STEP_ENV])
    return figures


if __name__ == "__main__":
    BuiltInLoop.wait = wait
    sys.exit(main())
