"""The arrays of a training step, by path: batches, parameters, metrics, and the state that an inner step changes.

The module needs no library of models, because islands in users' loops hold these arrays, too.
"""

from collections.abc import Mapping
from typing import NamedTuple

import optax
from jaxtyping import Array, Float, Shaped

# For example {"tokens": int32 [batch, length + 1]}.
Batch = Mapping[str, Shaped[Array, "..."]]
Metrics = dict[str, Float[Array, ""]]
# Trained arrays by path.
Params = dict[str, Float[Array, "..."]]
# Arrays of a model beside its parameters, by path (variables.py).
Variables = dict[str, Shaped[Array, "..."]]


class TrainState(NamedTuple):
    """Everything an inner step changes."""

    # The parameters, which are trained and exchanged with other islands.
    params: Params
    # The inner optimizer's state.
    opt_state: optax.OptState
    # The model's state beside the parameters, by path.
    other: Variables = {}
