"""Build the initial model and evaluate global parameters on the held-out split, in one process without a mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from diloco_jax.runtime.settings import RunConfig
from diloco_jax.training.data import eval_batches, load_source
from diloco_jax.training.island import Island
from diloco_jax.training.sharding import MeshConfig


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
