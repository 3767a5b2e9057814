"""A process of a rehearsal: `diloco` with inner steps that take as long as those on slices."""

import os
import sys
import time

from diloco_jax.cli.main import main
from diloco_jax.runtime.island.built_in import BuiltInLoop

STEP_ENV, _wait = "REHEARSAL_STEP_S", BuiltInLoop.wait


def wait(loop: BuiltInLoop, handle: object) -> object:
    """Wait for a step, and at least STEP_ENV seconds after the step before."""
    figures = _wait(loop, handle)
    time.sleep(max(0.0, getattr(loop, "next_s", 0.0) - time.monotonic()))
    loop.next_s = time.monotonic() + float(os.environ[STEP_ENV])
    return figures


if __name__ == "__main__":
    BuiltInLoop.wait = wait
    sys.exit(main())
