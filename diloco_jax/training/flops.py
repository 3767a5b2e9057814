"""Formulas for the FLOPs that a model needs; model FLOPs utilisation (MFU) is measured against them.

They count as PaLM does (arXiv 2204.02311, App. B): 2 FLOPs per multiply-add of matrix products, three times the forward
pass, nothing for recomputation. Causal attention counts half, because half of its scores are masked.
"""

import math
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from diloco_jax.training.models.config import ModelConfig
from diloco_jax.training.models.moe import decoder_of
from diloco_jax.training.models.options import DecoderConfig
from diloco_jax.training.models.seeing import SeeingConfig
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


def model_flops(
    model: ModelConfig, shapes: Mapping[str, tuple[int, ...]], batch: int, seq_len: int, soft_tokens: int = 0
) -> ModelFlops:
    """Count the FLOPs of one inner step.

    Args:
      shapes: the shape of each parameter, by path.
      batch: sequences.
      seq_len: tokens that are predicted in each sequence.
      soft_tokens: soft tokens that the image of each sequence is padded to, for a model with a vision tower.
    """
    config = VisionConfig(**model.args) if model.module.startswith(VISION) else decoder_of(model)
    if isinstance(config, VisionConfig):
        seq_len += config.patches
    tokens = batch * seq_len
    if config is not None:
        kinds = Counter(config.kind(layer) for layer in range(config.num_layers))
        attention = masked = 0.0
        weights = config.vocab_size * config.dim
        for kind, layers in kinds.items():
            layer = config.of_kind(kind)
            weights += layers * _layer_weights(layer)
            if layer.mixer == "delta":
                # The state of each value head is read, corrected and read again for each token.
                size = layer.delta_value_heads * layer.delta_key_dim * layer.delta_value_dim
                attention += 6.0 * tokens * size * layers
                continue
            # Scores and mixing of values need 4 N H FLOPs for each pair of a token and a token that it sees. On average
            # a token sees half of the sequence, or fewer tokens with a window.
            window = min(layer.window or seq_len, seq_len)
            seen = window * (1 - window / (2 * seq_len))
            pairs = 4.0 * tokens * layer.num_heads * layer.head_dim * layers
            attention, masked = attention + pairs * seen, masked + pairs * (seq_len - seen)
        if config.per_layer_dim:
            weights += config.num_layers * 3 * config.dim * config.per_layer_dim
        how = "matrix products and the attention scores that are not masked"
        products, adapters = 2.0 * tokens * weights, 0.0
        if model.lora.rank:
            # Frozen weights have no gradient, which is a third of a product's work. All of `shapes` are adapters.
            products *= 2 / 3
            adapters = 2.0 * tokens * sum(map(math.prod, shapes.values()))
        # A frozen tower has no backward pass, because nothing before it is trained.
        tower = (1 if model.lora.rank else 3) * batch * _tower_flops(config, soft_tokens)
        return ModelFlops(3 * (products + adapters + attention) + tower, 3 * masked, how)
    parameters = sum(map(math.prod, shapes.values()))
    return ModelFlops(6.0 * tokens * parameters, 0.0, "6 per parameter and token; attention is not counted")


def _tower_flops(config: DecoderConfig, soft_tokens: int) -> float:
    """Count the FLOPs of the vision tower's forward pass on one image; 0 without a tower."""
    if not isinstance(config, SeeingConfig):
        return 0.0
    c = config.tower_config()
    heads, patches = c.num_heads * c.head_dim, soft_tokens * c.pool**2
    weights = 3 * c.patch_size**2 * c.dim + c.num_layers * c.dim * (4 * heads + 3 * c.mlp_dim)
    # All patches of an image see each other.
    attention = 4.0 * c.num_layers * patches**2 * heads
    return 2.0 * (patches * weights + soft_tokens * c.dim * c.text_dim) + attention


def _layer_weights(c: DecoderConfig) -> int:
    """Count the weights that a layer multiplies each token with; of a mixture those of the token's experts."""
    if c.mixer == "delta":
        keys, values = c.delta_key_heads * c.delta_key_dim, c.delta_value_heads * c.delta_value_dim
        weights = c.dim * (2 * keys + 3 * values + 2 * c.delta_value_heads)
    else:
        queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        key_matrices = 0 if c.kv_from else 1 if c.keys_as_values else 2
        weights = c.dim * (queries * (3 if c.attention_gate else 2) + keys * key_matrices)
    if not c.num_experts or c.dense_beside:
        weights += 3 * c.dim * c.mlp_dim
    if c.num_experts:
        # Unused slots of experts do not count.
        weights += 3 * c.dim * (c.expert_dim or c.mlp_dim) * c.experts_per_token + c.dim * c.num_experts
        weights += c.dim * (3 * c.shared_dim + 1 if c.shared_dim else 0)
    return weights
