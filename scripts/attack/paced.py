"""The built-in decoder with steps of a length that a file sets, so that a run can wait for an attack.

The pause is in `Island.wait`, outside of the compiled program, so that compilation and its cache stay as usual.
"""

import os
import time
from pathlib import Path

from diloco_jax.training.island import Island, StepHandle
from diloco_jax.training.models.decoder import Decoder

PACE_ENV = "ATTACK_PACE"
_WAIT = Island.wait


class PacedDecoder(Decoder):
    """The decoder under another name; the import of its module sets the pace."""


def _wait(island: Island, handle: StepHandle) -> dict[str, float]:
    began_s, metrics = time.monotonic(), _WAIT(island, handle)
    while time.monotonic() - began_s < float(Path(os.environ[PACE_ENV]).read_text(encoding="utf-8")):
        time.sleep(0.01)
    return metrics


if PACE_ENV in os.environ:
    Island.wait = _wait  # type: ignore[method-assign, assignment]
