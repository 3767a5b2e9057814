"""Numbers that a loop of the user's own returns: of a step, and of the global model."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from diloco_jax.protocol.messages import Score
from diloco_jax.runtime.island.evaluation import make_score
from diloco_jax.training.models.protocol import Params


class OwnEvaluation:
    """The evaluation of the global model by a function of the user's own.

    It takes the parameters as the loop's tree, which `tree` makes, and returns a loss, or numbers by name with `loss`.
    """

    def __init__(self, function: Callable[[Any], Any], tree: Callable[[Params], Any]) -> None:
        self._function = function
        self._tree = tree

    def warm_up(self) -> None:
        """Compile nothing: the function compiles what it needs when it is first called."""

    def __call__(self, params: Params, global_step: int, final: bool) -> Score:
        """Call the function; on every process of the island."""
        found: dict[str, float | None] = {**scalars(self._function(self._tree(params)))}
        loss, bits, tokens = found.pop("loss"), found.pop("bits_per_byte", None), found.pop("tokens", None)
        assert loss is not None, "scalars checks it"
        return make_score(loss, bits, int(tokens or 1), found, [])


def scalars(metrics: Any) -> dict[str, float]:
    """Return what a loop reports as floats by name; ValueError if no loss is among them, or one is no scalar."""
    named = metrics if isinstance(metrics, Mapping) else {"loss": metrics}
    if "loss" not in named:
        raise ValueError(
            f"metrics has no 'loss' ({', '.join(map(str, named)) or 'nothing'}); give a scalar of that name"
        )
    found: dict[str, float] = {}
    for name, value in named.items():
        try:
            found[str(name)] = float(np.asarray(jax.device_get(value)).reshape(()))
        except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: it was donated
            raise ValueError(f"metric {str(name)[:80]!r} is no scalar ({error}); give one, such as its mean") from error
    return found
