"""Evaluations of the global model while a run goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from diloco_jax.settings.run import RunConfig

if TYPE_CHECKING:  # which reads data: a syncer whose islands bring the model starts without
    from diloco_jax.runtime.model.evaluation import Evaluator

Assemble = Callable[[], Mapping[str, np.ndarray]]


class Evaluations:
    """Evaluates the global model every so many global steps, on a thread of its own, one evaluation at a time.

    Args:
        evaluator: does it; None if the islands do.
        report: gets each result, or the exception that ended one, on that thread.
    """

    def __init__(self, config: RunConfig, evaluator: Evaluator | None, report: Callable[[Any], None]) -> None:
        self._every = config.train.eval_every if evaluator is not None else 0
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
            capture: called here, if at all; what it returns is called on the thread and assembles the model.
        """
        busy = self._running is not None and not self._running.done()
        if not self._next or global_step < self._next or busy:
            return
        self._next += self._every
        self._running = self._thread.submit(self._evaluate, global_step, tokens, capture())

    def _evaluate(self, global_step: int, tokens: int, assemble: Assemble) -> None:
        assert self._evaluator is not None, "nobody evaluates"
        try:
            result = self._evaluator.evaluate(assemble(), self._batches, global_step)
            self._report({**result, "global_step": global_step, "tokens": tokens})
        except Exception as error:
            self._report(error)

    def close(self) -> None:
        """Wait for the evaluation that is running, and end the thread."""
        self._thread.shutdown(wait=True)
