"""The built-in decoder, whose steps take at least a while when the environment says so.

DILOCO_TEST_STEP_S is a number of seconds, or the path of a file that has it and may change while islands train.

Islands that compute without a break leave a loaded machine no processor to start, compile or merge with. The pause is
in `Island.wait`, outside of the compiled program, so that compiling and its cache are those of any model.
"""

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from diloco_jax.training.island import Island, StepHandle
from diloco_jax.training.models.decoder import Decoder
from diloco_jax.training.state import Batch, Metrics

STEP_S_ENV = "DILOCO_TEST_STEP_S"
HANG_ENV = "DILOCO_TEST_HANG"


class Pacer:
    """`Island.wait`, but no earlier than `step_s` after it returned the last time."""

    def __init__(self, step_s: str) -> None:
        self._pace = step_s
        self._next_s = 0.0
        self._wait = Island.wait

    def __call__(self, island: Island, handle: StepHandle) -> dict[str, float]:
        metrics = self._wait(island, handle)
        time.sleep(max(0.0, self._next_s - time.monotonic()))
        self._next_s = time.monotonic() + self._step_s()
        return metrics

    def _step_s(self) -> float:
        file = Path(self._pace)
        return float(file.read_text() if file.is_absolute() else self._pace)


class Pace:
    """Callback that does nothing. A config that names it loads this file, which paces the steps of any model."""

    def on_event(self, kind: str, text: str) -> None:
        pass


class PacedDecoder(Decoder):
    """The decoder under another name, with one more metric."""

    def loss(self, batch: Batch) -> tuple[Float[Array, ""], Metrics]:
        loss, metrics = super().loss(batch)
        return loss, {**metrics, "perplexity": jnp.exp(loss)}


class HangingDecoder(PacedDecoder):
    """Decoder that blocks forever in a step, in the one process that finds and takes the file with its number.

    The first process blocks in a callback of the compiled step, which JAX calls there alone; others before their step.
    """

    def loss(self, batch: Batch) -> tuple[Float[Array, ""], Metrics]:
        jax.debug.callback(_hang_if_told)
        return super().loss(batch)


def _hang_if_told() -> None:
    order = Path(os.environ[HANG_ENV]).with_suffix(f".{jax.process_index()}")
    with contextlib.suppress(FileNotFoundError):
        order.unlink()
        threading.Event().wait()


if HANG_ENV in os.environ:
    STEP = Island.step

    def _step(island: Island, *told: Any) -> StepHandle:
        if jax.process_index():
            _hang_if_told()
        return STEP(island, *told)

    Island.step = _step  # type: ignore[method-assign]

if STEP_S_ENV in os.environ:
    PACER = Pacer(os.environ[STEP_S_ENV])
    Island.wait = lambda island, handle: PACER(island, handle)  # type: ignore[method-assign]
