"""Build the initial model and evaluate global parameters on the held-out split, in one process without a mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from diloco_jax.runtime.settings import RunConfig
from diloco_jax.training.data import eval_batches, load_source
from diloco_jax.training.island import Island
from diloco_jax.training.sharding import MeshConfig

Assemble = Callable[[], Mapping[str, np.ndarray]]


class Evaluator:
    """The model on one device of this host, for its initial values and for evaluation.

    Raises:
        ValueError: the model or the data cannot be loaded.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._source = load_source(config.data, config.train.seq_len)
        device = jax.local_devices(backend="cpu")[0]
        self._island = Island(config.model, config.optimizer, MeshConfig(), seed=config.seed, devices=[device])
        self.initial_parameters = self._island.parameters()
        self.shapes = self._island.shapes

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    def evaluate(self, parameters: Mapping[str, np.ndarray], max_batches: int) -> dict[str, Any]:
        """Mean held-out loss of these parameters.

        Args:
            parameters: float32 arrays by path.
            max_batches: batches of train.eval_batch_size sequences; fewer when the split is smaller.

        Returns:
            loss in nats per token, bits_per_byte (None unless a token is a byte), tokens.
        """
        self._island.load(parameters)
        result = self._island.evaluate(eval_batches(self._source, self._config.train.eval_batch_size, max_batches))
        bits = result["loss"] / math.log(2) if self._config.data.format == "bytes" else None
        return {"loss": result["loss"], "bits_per_byte": bits, "tokens": int(result["tokens"])}


class Evaluations:
    """Evaluates the global model every so many global steps, on a thread of its own, one evaluation at a time.

    Args:
        config: how often and on how much.
        evaluator: does it.
        report: gets each result, or the exception that ended one, on that thread.
    """

    def __init__(self, config: RunConfig, evaluator: Evaluator, report: Callable[[Any], None]) -> None:
        self._every = config.train.eval_every
        self._batches = config.train.eval_batches
        self._evaluator = evaluator
        self._report = report
        self._thread = ThreadPoolExecutor(1, "eval")
        self._running: Future[None] | None = None
        self._next = self._every

    def skip_to(self, global_step: int) -> None:
        """Do not repeat what an earlier process has evaluated."""
        self._next = (global_step // self._every + 1) * self._every if self._every else 0

    def maybe(self, global_step: int, tokens: int, capture: Callable[[], Assemble]) -> None:
        """Begin an evaluation if one is due and none is running.

        Args:
            global_step: of the model.
            tokens: that it was trained on.
            capture: called here, if at all; what it returns is called on the thread and assembles the model.
        """
        busy = self._running is not None and not self._running.done()
        if not self._next or global_step < self._next or busy:
            return
        self._next += self._every
        self._running = self._thread.submit(self._evaluate, global_step, tokens, capture())

    def _evaluate(self, global_step: int, tokens: int, assemble: Assemble) -> None:
        try:
            result = self._evaluator.evaluate(assemble(), self._batches)
            self._report({**result, "global_step": global_step, "tokens": tokens})
        except Exception as error:
            self._report(error)

    def close(self) -> None:
        """Wait for the evaluation that is running, and end the thread."""
        self._thread.shutdown(wait=True)
