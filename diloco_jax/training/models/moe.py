"""The decoder with a mixture of experts in every layer, and which models are built-in decoders of tokens."""

from dataclasses import dataclass

from diloco_jax.training.models.config import DECODER, MOE, SEEING_DECODER, ModelConfig
from diloco_jax.training.models.decoder import Decoder
from diloco_jax.training.models.options import DecoderConfig
from diloco_jax.training.models.protocol import config_from_args
from diloco_jax.training.models.seeing import SeeingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig(DecoderConfig):
    """The decoder's options, with a mixture unless its number of experts is set to 0."""

    num_experts: int = 8
    """Experts of a layer; a multiple of the mesh axis `expert`."""


class MoeDecoder(Decoder):
    """The decoder with experts; implements `TrainableModel`."""

    config_class = MoeConfig


def decoder_of(model: ModelConfig) -> DecoderConfig | None:
    """Return the configuration of a built-in decoder; None for other models."""
    configs = {DECODER: DecoderConfig, MOE: MoeConfig, SEEING_DECODER: SeeingConfig}
    return config_from_args(configs[model.module], model.args) if model.module in configs else None
