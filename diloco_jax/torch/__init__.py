"""Islands in training loops of PyTorch: `diloco_jax.torch.attach`; docs/pytorch.md explains it with an example."""

from diloco_jax.adapters.torch import attach as attach
from diloco_jax.adapters.torch import like_flax as like_flax
