"""The built-in decoder, whose steps take at least a while when the environment says so.

Islands that compute without a break leave a loaded machine no processor to start, compile or merge with. The pause is
in `Island.wait`, outside of the compiled program, so that compiling and its cache are those of any model.
"""

from __future__ import annotations

import os
import time

import jax.numpy as jnp
from jaxtyping import Array, Float

from diloco_jax.training.island import Island, StepHandle
from diloco_jax.training.models.decoder import Decoder
from diloco_jax.training.models.protocol import Batch, Metrics

STEP_S_ENV = "DILOCO_TEST_STEP_S"


class Pacer:
    """`Island.wait`, but no earlier than `step_s` after it returned the last time."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._next_s = 0.0
        self._wait = Island.wait

    def __call__(self, island: Island, handle: StepHandle) -> dict[str, float]:
        metrics = self._wait(island, handle)
        time.sleep(max(0.0, self._next_s - time.monotonic()))
        self._next_s = time.monotonic() + self._step_s
        return metrics


class PacedDecoder(Decoder):
    """The decoder under another name, with a metric of its own."""

    def loss(self, batch: Batch) -> tuple[Float[Array, ""], Metrics]:
        loss, metrics = super().loss(batch)
        return loss, {**metrics, "perplexity": jnp.exp(loss)}


if STEP_S_ENV in os.environ:
    PACER = Pacer(float(os.environ[STEP_S_ENV]))
    Island.wait = lambda island, handle: PACER(island, handle)  # type: ignore[method-assign]
