"""Formulas for the FLOPs that a model needs; model FLOPs utilisation (MFU) is measured against them.

They count as PaLM does (arXiv 2204.02311, App. B): 2 FLOPs per multiply-add of matrix products, three times the forward
pass, nothing for recomputation. Causal attention counts half, because half of its scores are masked.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from diloco_jax.training.models.config import ModelConfig
from diloco_jax.training.models.moe import MoeConfig, decoder_of
from diloco_jax.training.models.options import DecoderConfig
from diloco_jax.training.models.vision import VisionConfig

VISION = "diloco_jax.training.models.vision:"


class ModelFlops(NamedTuple):
    """FLOPs of one inner step."""

    # Forward and backward pass, summed over all chips.
    flops: float
    # FLOPs of masked attention scores: not in `flops`, although most programs compute them.
    masked: float
    # A phrase that names what was counted.
    how: str


def model_flops(model: ModelConfig, shapes: Mapping[str, tuple[int, ...]], batch: int, seq_len: int) -> ModelFlops:
    """Count the FLOPs of one inner step.

    Args:
      shapes: the shape of each parameter, by path.
      batch: sequences.
      seq_len: tokens that are predicted in each sequence.
    """
    config = VisionConfig(**model.args) if model.module.startswith(VISION) else decoder_of(model)
    if isinstance(config, VisionConfig):
        seq_len += config.patches
    tokens = batch * seq_len
    if config is not None:
        # Scores and mixing of values need 4 N H FLOPs per layer for each pair of a token and a token that it sees. On
        # average a token sees half of the sequence, or fewer tokens with a window.
        windows = [config.window if config.local(layer) else seq_len for layer in range(config.num_layers)]
        seen = [min(window, seq_len) * (1 - min(window, seq_len) / (2 * seq_len)) for window in windows]
        whole = 4.0 * tokens * config.num_heads * config.head_dim
        attention, masked = whole * sum(seen), whole * sum(seq_len - each for each in seen)
        forward = 2.0 * tokens * _decoder_weights(config) + attention
        return ModelFlops(3 * forward, 3 * masked, "matrix products and the attention scores that are not masked")
    parameters = sum(map(math.prod, shapes.values()))
    return ModelFlops(6.0 * tokens * parameters, 0.0, "6 per parameter and token; attention is not counted")


def _decoder_weights(config: DecoderConfig) -> int:
    """Count the weights that each token is multiplied with; the embedding counts once, as the output layer."""
    layer = 2 * config.dim * config.head_dim * (config.num_heads + config.num_kv_heads)
    mlp = 3 * config.dim * config.mlp_dim
    if isinstance(config, MoeConfig):
        # Only a token's experts and the router count; unused slots of experts do not.
        layer += config.experts_per_token * mlp + config.dim * config.num_experts
    else:
        layer += mlp
    return config.num_layers * layer + config.vocab_size * config.dim
