"""A language model of a run in two forms: as the tools use it, and by its own logits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from diloco_jax.runtime.model.evaluation import Evaluator
from diloco_jax.settings.text import parse
from diloco_jax.tools.inference.language import Language
from diloco_jax.training.models.protocol import join_model, load_model, split_model


class Known:
    """A model whose parameters are drawn here, far from an even beginning.

    A run's own beginning would be one more program, and so would be each tensor of a model that is built without one.

    Args:
        settings: the run's config.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings, self.config, rng = settings, parse(settings, "the test"), np.random.default_rng(3)
        self.parameters = {
            path: np.float32(("norm" in path) + 0.3 * rng.normal(size=shape))
            for path, shape in sorted(Evaluator(self.config).shapes.items())
        }
        self.language = Language(self.config, self.parameters)
        graphdefs: list[Any] = []

        def build() -> None:
            graphdefs.append(split_model(load_model(self.config.model.module, self.config.model.args, 0))[0])

        nnx.eval_shape(build)
        self._program = jax.jit(lambda params, tokens, arrays: join_model(graphdefs[0], params)(tokens, **arrays))

    def logits(self, ids: list[int], length: int, **arrays: np.ndarray) -> np.ndarray:
        """Return the logits of what follows each of the first tokens; padding to a length makes one program of many."""
        tokens = np.zeros((1, length), np.int32)
        tokens[0, : len(ids)] = ids
        placed = {path: jnp.asarray(value) for path, value in self.parameters.items()}
        return np.asarray(self._program(placed, tokens, arrays), np.float64)[0, : len(ids)]
