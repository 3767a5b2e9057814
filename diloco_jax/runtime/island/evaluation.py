"""Evaluation of the global model by an island: of its anchors, on its own mesh, between two steps."""

import logging
from collections.abc import Callable, Mapping, Sequence
from math import inf, nan
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from diloco_jax.core.codec import Bytes
from diloco_jax.protocol.messages import SCORE_LENGTH_MAX, SCORES_MAX, Metric, Score
from diloco_jax.training.state import Params
from diloco_jax.transport.limits import REASON_LENGTH_MAX

log = logging.getLogger(__name__)


class Change(NamedTuple):
    """A change of the global model that is evaluated beside it: what is added to the value of one fragment."""

    fragment_id: int
    # The fragment's elements in float32.
    payload: Bytes


class Evaluation(Protocol):
    """An evaluation of the global model."""

    def warm_up(self) -> None:
        """Compile the evaluation's programs; any thread may call it."""

    def __call__(self, params: Params, global_step: int, final: bool) -> Score:
        """Return the score of the model; `final` marks the model at the end of the run."""

    def loss(self, params: Params) -> float:
        """Return only the loss of other parameters, on the data of an evaluation during the run."""


def make_score(
    loss: float, bits_per_byte: float | None, tokens: int, scores: Mapping[str, float | None], reasons: Sequence[str]
) -> Score:
    """Make the score of an evaluation; None stands for a missing number, and `reasons` explain missing scores."""
    told = [(name, value) for name, value in scores.items() if 0 < len(name) <= SCORE_LENGTH_MAX][:SCORES_MAX]
    words = [*reasons]
    if missing := len(scores) - len(told):
        words.append(f"{missing} scores are left out: use at most {SCORES_MAX}, of {SCORE_LENGTH_MAX} characters")
    values = tuple(Metric(name, nan if value is None else value) for name, value in told)
    bits = nan if bits_per_byte is None else bits_per_byte
    return Score("", 0, 0, 0, (), loss, bits, max(0, tokens), values, 0.0, "; ".join(words)[:REASON_LENGTH_MAX])


def failed_score(error: Exception) -> Score:
    words = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
    log.warning(f"the global model could not be evaluated: {words}", exc_info=error)
    return make_score(inf, None, 0, {}, [words])


class OwnEvaluation:
    """Evaluation of the global model by a user's function.

    The function takes the parameters as the loop's tree, which `tree` makes, and returns a loss, or numbers by name
    including `loss`.
    """

    def __init__(self, function: Callable[[Any], Any], tree: Callable[[Params], Any]) -> None:
        self._function = function
        self._tree = tree

    def warm_up(self) -> None:
        """Do nothing: the function compiles its programs at its first call."""

    def __call__(self, params: Params, global_step: int, final: bool) -> Score:
        """Call the function; every process of the island calls it."""
        found: dict[str, float | None] = {**scalars(self._function(self._tree(params)))}
        loss, bits, tokens = found.pop("loss"), found.pop("bits_per_byte", None), found.pop("tokens", None)
        assert loss is not None, "scalars checks it"
        return make_score(loss, bits, int(tokens or 1), found, [])

    def loss(self, params: Params) -> float:
        """Call the function for its loss."""
        return scalars(self._function(self._tree(params)))["loss"]


def scalars(metrics: Any) -> dict[str, float]:
    """Convert a loop's metrics to floats by name; ValueError if there is no loss, or one is not a scalar."""
    named = metrics if isinstance(metrics, Mapping) else {"loss": metrics}
    if "loss" not in named:
        raise ValueError(
            f"metrics has no 'loss' ({', '.join(map(str, named)) or 'nothing'}); give a scalar of that name"
        )
    found: dict[str, float] = {}
    for name, value in named.items():
        try:
            found[str(name)] = float(np.asarray(jax.device_get(value)).reshape(()))
        # JAX raises RuntimeError for a donated array.
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"metric {str(name)[:80]!r} is not a scalar ({error}); give one, such as its mean"
            ) from error
    return found
