"""Islands in training loops that use Flax NNX; docs/nnx.md explains them with an example."""

from diloco_jax.adapters.nnx.attach import NnxIsland as NnxIsland
from diloco_jax.adapters.nnx.attach import attach as attach
from diloco_jax.adapters.nnx.holder import VariableHolder as VariableHolder
