"""Islands in training loops that use Flax NNX; docs/nnx.md explains them with an example."""

from diloco_jax.adapters.nnx import NnxIsland as NnxIsland
from diloco_jax.adapters.nnx import VariableHolder as VariableHolder
from diloco_jax.adapters.nnx import attach as attach
