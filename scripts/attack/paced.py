"""The built-in decoder, whose steps take as long as a file says: so a run can wait for an attack.

The pause is in `Island.wait`, outside of the compiled program, so that compiling and its cache are those of any model.
"""

import os
import time
from pathlib import Path

from diloco_jax.training.island import Island, StepHandle
from diloco_jax.training.models.decoder import Decoder

PACE_ENV = "ATTACK_PACE"
_WAIT = Island.wait


class PacedDecoder(Decoder):
    """The decoder under another name, whose module sets the pace."""


def _wait(island: Island, handle: StepHandle) -> dict[str, float]:
    began_s, metrics = time.monotonic(), _WAIT(island, handle)
    while time.monotonic() - began_s < float(Path(os.environ[PACE_ENV]).read_text(encoding="utf-8")):
        time.sleep(0.01)
    return metrics


if PACE_ENV in os.environ:
    Island.wait = _wait  # type: ignore[method-assign, assignment]
