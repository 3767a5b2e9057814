"""Examiners: what parameters are worth on the held-out data, by one compiled program on the mesh of a blueprint.

Every process of an island reads whole batches and puts its own part on its devices. A batch that the mesh does not
divide is split as far as it goes, and several devices then do the same: so batches, and numbers, are those of any mesh.
"""

import math
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import jax

from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.data.corpus import Source
from diloco_jax.training.data.order import SampleOrder, eval_batches
from diloco_jax.training.data.sample import Sample, batch_shapes, described
from diloco_jax.training.models.protocol import Batch, Params
from diloco_jax.training.models.variables import Variables

MEASURED = ("loss", "bits_per_byte", "tokens")


@dataclass(eq=False)
class Examiner:
    """The held-out data of a run, and how a model is measured on it."""

    blueprint: Blueprint
    source: Source
    batch_size: int  # samples
    settle_batches: int  # of training, through a model whose state beside its parameters must become its own
    shuffle_seed: int  # of the order of the training data
    # for batches of this description
    _compiled: tuple[Any, jax.stages.Compiled] | None = field(default=None, init=False)
    _compiling: AbstractContextManager[Any] = field(default_factory=threading.Lock, init=False)

    def warm_up(self) -> None:
        """Compile the program. Any thread."""
        with self._compiling:
            if self._compiled is None:
                shapes = batch_shapes(self.source.train[0], self.batch_size)
                self._compiled = described(shapes), self.blueprint.lower_loss(shapes).compile()

    def _loss(self, params: Params, other: Variables, batch: Batch) -> Any:
        assert self._compiled is not None, "examine compiles it"
        shapes, program = self._compiled
        return (program if shapes == described(batch) else self.blueprint.loss)(params, other, batch)

    def examine(self, params: Params, other: Variables, max_batches: int) -> dict[str, Any]:
        """Compute the mean held-out loss of these parameters.

        Args:
          other: state of the model beside them.
          max_batches: batches; fewer when the split is smaller.

        Returns:
          loss in nats per token, bits_per_byte (None if nobody knows the text of the tokens) and tokens; these by the
          name of each further set (sets); and scores, named numbers: the model's metrics, and those of the sets such as
          "books loss".

        Raises:
          ValueError: there is no batch, or nothing to predict in any.
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
        """Return the mean of everything that the model reports, on the held-out data or a set."""
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
        """Return batch statistics and the like as those of the parameters: no island sent any."""
        if not self.blueprint.state_shapes.other:
            return {}
        batches = SampleOrder(self.source, self.shuffle_seed).batches(self.batch_size)
        first = self.blueprint.draw_other()  # equal parameters, equal result
        return self.blueprint.settled(params, first, islice(batches, self.settle_batches))
