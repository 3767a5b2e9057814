"""Settings of the model, separate from its code, because a syncer whose islands bring the model needs no Flax."""

import difflib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from diloco_jax.training.named import check_setting

DECODER = "diloco_jax.training.models.decoder:Decoder"
MOE = "diloco_jax.training.models.moe:MoeDecoder"
IMAGE_TEXT = "diloco_jax.training.models.vision:ImageTextDecoder"
# The built-in models that read token ids.
OF_TOKENS = (DECODER, MOE, IMAGE_TEXT)
# The `module` of a run whose islands bring the model.
OWN = "own"


@cache
def presets() -> dict[str, dict[str, Any]]:
    """Return the arguments of public models by name, including `module` if it is not the decoder."""
    return yaml.safe_load(Path(__file__).with_name("presets.yaml").read_text("utf-8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model to train, and the arguments that its `from_config` receives."""

    module: str = DECODER
    """Import path of the model as `package.module:Class`. "own": the islands' own loops bring it (diloco_jax.join); the
    syncer takes shapes and initial values from the first island, and evaluates nothing."""
    preset: str = ""
    """Name of a public model that provides module and arguments, such as qwen3-0.6b or llama3-tiny (docs/models.md
    lists all); `args` replace single arguments."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the class; for the built-in decoder the fields of DecoderConfig."""
    weights: str = ""
    """A folder with config.json and safetensors of a public family, for the initial values. Only the syncer reads it,
    at every start. `diloco import` writes module, args and weights."""

    @property
    def own(self) -> bool:
        """Return whether the islands' own loops bring the model."""
        return self.module == OWN

    def __post_init__(self) -> None:
        if not self.module:
            raise ValueError("model.module is ''; write it as package.module:Name, or own")
        if self.own and self.weights:
            raise ValueError(f"model.weights is '{self.weights}', but the islands bring the initial values; remove it")
        if self.preset:
            self._apply_preset()
        if not self.own:
            check_setting("model", self.module, self.args)

    def _apply_preset(self) -> None:
        if self.preset not in presets():
            near = difflib.get_close_matches(self.preset, presets(), n=1, cutoff=0)[0]
            raise ValueError(f"model.preset is '{self.preset}'; did you mean {near}? There are {', '.join(presets())}")
        if self.own:
            raise ValueError(f"model.preset is '{self.preset}', but the islands bring the model; remove one of them")
        args = {**presets()[self.preset]}
        module = args.pop("module", DECODER)
        object.__setattr__(self, "args", {**args, **self.args})
        if self.module == DECODER:
            object.__setattr__(self, "module", module)
