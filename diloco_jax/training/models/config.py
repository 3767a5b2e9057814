"""Settings of the model, apart from what builds it: a syncer whose islands bring the model needs no module library."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from diloco_jax.training.named import check_setting

OWN = "own"  # the model of a run whose islands bring it


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model to train, and the arguments that its `from_config` receives."""

    module: str = "diloco_jax.training.models.decoder:Decoder"
    """Import path of the model as `package.module:Class`. "own": the islands' own loops bring it (diloco_jax.join); the
    syncer takes shapes and initial values from the first of them, and evaluates nothing."""

    args: dict[str, Any] = field(default_factory=dict)
    """Passed to the class unchanged, for the built-in decoder the fields of DecoderConfig."""

    weights: str = ""
    """A folder with config.json and safetensors of a public family: the initial values. Only the syncer reads it,
    whenever it starts. `diloco import` writes module, args and this."""

    @property
    def own(self) -> bool:
        """Tell whether the islands' own loops bring the model."""
        return self.module == OWN

    def __post_init__(self) -> None:
        if not self.module:
            raise ValueError("model.module is ''; write it as package.module:Name, or own")
        if self.own and self.weights:
            raise ValueError(f"model.weights is '{self.weights}', but the islands bring the initial values; remove it")
        if not self.own:
            check_setting("model", self.module, self.args)
