"""Models whose parameters a test chooses: the structure is traced, and no initial value is drawn or compiled."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from diloco_jax.training.models.protocol import GraphDef, logical_axes, split_model
from diloco_jax.training.sharding import LogicalAxes


class Outline(NamedTuple):
    """A module without values."""

    graphdef: GraphDef
    # Shape and type of every parameter, and the axis names of every variable, by path.
    params: dict[str, jax.ShapeDtypeStruct]
    axes: dict[str, LogicalAxes]


def outline(make: Callable[[], nnx.Module]) -> Outline:
    """Return the outline of the module that `make` builds."""
    found: list[tuple[GraphDef, dict[str, LogicalAxes]]] = []

    def build() -> dict[str, jax.Array]:
        with nnx.use_eager_sharding(False):
            model = make()
        graphdef, params = split_model(model)
        found.append((graphdef, logical_axes(model)))
        return params

    params = jax.eval_shape(build)
    return Outline(found[0][0], params, found[0][1])


# What parameters of these names start from; all others start from 0. A state of gated DeltaNet keeps most of itself.
STARTS = {"scale": 1.0, "layer_scale": 1.0, "router_scale": 1.0, "expert_scale": 1.0, "a_log": 1.7, "dt_bias": -4.5}
WITHOUT_FAN_IN = ("bias", "embedding", "table", "scale", "sinks", "a_log")


def drawn(params: Mapping[str, Any], *, seed: int = 5, noise: float = 0.3, **starts: float) -> dict[str, np.ndarray]:
    """Return random float32 values, all of them away from initial ones: what the parameters start from, and noise.

    Args:
      params: something with a shape for each path.
      starts: changes of STARTS, such as scale=0.0 for a model whose parameters are scale - 1.
    """
    rng, found = np.random.default_rng(seed), dict[str, np.ndarray]()
    for path, value in sorted(params.items()):
        if path.endswith("bounds"):
            # Of inputs and outputs of a clipped map: most values are between them.
            found[path] = np.broadcast_to(np.float32([-2, 2.5, -1.5, 2]), value.shape)
            continue
        name, spread = path.rpartition("/")[2], noise
        if not name.endswith(WITHOUT_FAN_IN):
            # The second axis from the end is the input of a map, and the last one that of a convolution.
            *_, inner, outer = value.shape
            spread = float(np.hypot(noise, (inner if inner > 1 else outer) ** -0.5))
        found[path] = np.float32((STARTS | starts).get(name, 0.0) + spread * rng.normal(size=value.shape))
    return found
