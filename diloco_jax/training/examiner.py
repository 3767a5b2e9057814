"""Examiners: they measure parameters on held-out data, with one compiled program on the mesh of a blueprint.

Every process of an island reads whole batches and puts its part on its devices. A batch that the mesh does not divide
is split as far as the mesh divides it, and several devices compute the same. So batches and results do not depend on
the mesh.
"""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

import jax

from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.data.corpus import Source
from diloco_jax.training.data.order import SampleOrder, eval_batches, size_of_eval_batches
from diloco_jax.training.data.sample import Sample, batch_shapes, described
from diloco_jax.training.state import Batch, Params, Variables

MEASURED = ("loss", "bits_per_byte", "tokens")


@dataclass(eq=False)
class Examiner:
    """The held-out data of a run, with the program that measures a model on it."""

    blueprint: Blueprint
    # Opens the data at its first use.
    open_source: Callable[[], Source]
    batch_size: int  # samples
    # The number of training batches that `settled` runs to compute batch statistics and the like.
    settle_batches: int
    # The seed of the order of the training data.
    shuffle_seed: int
    # Returns the model's frozen variables, which the caller holds or reads again.
    frozen: Callable[[], Variables] = dict
    # The description of a batch, and the program compiled for it.
    _compiled: tuple[Any, jax.stages.Compiled] | None = field(default=None, init=False)
    _compiling: AbstractContextManager[Any] = field(default_factory=threading.Lock, init=False)

    @cached_property
    def source(self) -> Source:
        """Return the data."""
        return self.open_source()

    def warm_up(self) -> None:
        """Compile the program; any thread may call this."""
        with self._compiling:
            if self._compiled is None:
                size = size_of_eval_batches(self.source.held_out, self.batch_size)
                shapes = batch_shapes(self.source.train[0], size)
                self._compiled = described(shapes), self.blueprint.lower_loss(shapes).compile()

    def _loss(self, params: Params, other: Variables, batch: Batch) -> Any:
        assert self._compiled is not None, "examine compiles it"
        shapes, program = self._compiled
        return (program if shapes == described(batch) else self.blueprint.loss)(params, other, batch)

    def examine(self, params: Params, other: Variables, max_batches: int) -> dict[str, Any]:
        """Compute the mean held-out loss of parameters, and the other results of an evaluation.

        Args:
          other: the model's variables beside the parameters, from `settled`.
          max_batches: the most batches to read; a smaller split has fewer.

        Returns:
          A mapping with `loss` in nats per token, `bits_per_byte` (None if no tokenizer knows the tokens' text) and
          `tokens`; `sets`, with the same results for each further set by name; and `scores`, numbers by name: the
          model's metrics, and the results of the sets, such as "books loss".

        Raises:
          ValueError: there is no batch, or none of the batches has anything to predict.
        """
        self.warm_up()
        result = self._measured(params, other, max_batches)
        sets = {name: self._measured(params, other, max_batches, name) for name in self.source.evaluation}
        scores = {name: value for name, value in result.items() if name not in MEASURED}
        scores |= {
            f"{name} {key}": row[key] for name, row in sets.items() for key in MEASURED[:2] if row[key] is not None
        }
        return {**{key: result[key] for key in MEASURED}, "sets": sets, "scores": scores}

    def _measured(self, params: Params, other: Variables, max_batches: int, name: str = "") -> dict[str, Any]:
        """Return the mean of each metric that the model reports, on the held-out data or on a named set."""
        tokenizer, bytes_ = self.source.tokenizer, 0

        def counted() -> Iterator[Sample]:
            nonlocal bytes_
            for batch in eval_batches(self.source, self.batch_size, max_batches, name):
                bytes_ += tokenizer.bytes_of(batch) if tokenizer is not None else 0
                yield batch

        found = self.blueprint.mean_loss(params, other, counted(), self._loss)
        bits = found["loss"] * found["tokens"] / bytes_ / math.log(2) if bytes_ else None
        return {**found, "bits_per_byte": bits, "tokens": int(found["tokens"])}

    def settled(self, params: Params) -> Variables:
        """Return the model's variables beside these parameters: frozen ones, and other state, which is computed.

        Other state, such as batch statistics, is not sent by islands.
        """
        frozen = self.frozen()
        if not self.blueprint.state_shapes.other:
            return frozen
        batches = SampleOrder(self.source, self.shuffle_seed).batches(self.batch_size)
        # Starting from the initial state gives equal results for equal parameters.
        first = self.blueprint.draw_other()
        return {**self.blueprint.settled(params, first, islice(batches, self.settle_batches), frozen), **frozen}
