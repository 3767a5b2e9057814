"""Settings of the model, separate from its code, because a syncer whose islands bring the model needs no Flax."""

import difflib
import math
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from diloco_jax.training.named import check_setting

DECODER = "diloco_jax.training.models.decoder:Decoder"
MOE = "diloco_jax.training.models.moe:MoeDecoder"
IMAGE_TEXT = "diloco_jax.training.models.vision:ImageTextDecoder"
SEEING_DECODER = "diloco_jax.training.models.seeing:SeeingDecoder"
# The built-in models that read token ids.
OF_TOKENS = (DECODER, MOE, IMAGE_TEXT, SEEING_DECODER)
# The `module` of a run whose islands bring the model.
OWN = "own"


@cache
def presets() -> dict[str, dict[str, Any]]:
    """Return the arguments of public models by name, including `module` if it is not the decoder."""
    return yaml.safe_load(Path(__file__).with_name("presets.yaml").read_text("utf-8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Adapters of low rank (LoRA), which are trained and exchanged in place of the model; its weights are frozen."""

    rank: int = 0
    """Rank r of the adapters: a linear map x W becomes x W + (alpha / r) x A B, where A has r columns and B has r rows.
    0: no adapters, and the whole model is trained. Raise it if the adapters cannot learn the task; more parameters are
    then trained and exchanged."""
    alpha: float = 16.0
    """The adapters' results are multiplied by alpha / rank. A larger alpha lets a step change the model more. Change it
    together with rank, so that alpha / rank stays the same. Otherwise tune the learning rate again for the new rank."""
    targets: tuple[str, ...] = ("all",)
    """Linear maps of a layer that get adapters: q, k, v, out, gate, up, down and others that the model has, or all.
    Experts and routers of a mixture get none. Set it to fewer maps, such as q and v, if the adapters are too large for
    the link; the model then adapts less."""
    base_dtype: Literal["float32", "bfloat16", "int8", "int4"] = "float32"
    """Type of the frozen weights on an island. bfloat16: of every matrix; nothing is lost if the files have it. int8
    and int4: of the layers' linear maps, in blocks of 64 with a scale each; other matrices are bfloat16. These two save
    memory only with model.args.scan_layers and a model.args.remat other than none. Set it to bfloat16 if the files have
    that type. Set it to int8 or int4 if the frozen weights do not fit into memory; these two change the model's values
    slightly."""

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"model.lora.rank is {self.rank}; use 0 (no adapters) or more")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"model.lora.alpha is {self.alpha}; it must be above 0, and finite")
        if self.rank and not self.targets:
            raise ValueError("model.lora.targets is empty; name linear maps of a layer, such as q and v, or all")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model to train, and the arguments that its `from_config` receives."""

    module: str = DECODER
    """Import path of the model as `package.module:Class`. "own": the islands' own loops bring it (diloco_jax.join); the
    syncer takes shapes and initial values from the first island, and evaluates nothing. Set it for your own model or
    your own loop."""
    preset: str = ""
    """Name of a public model that provides module and arguments, such as qwen3-0.6b or llama3-tiny (docs/models.md
    lists all); `args` replace single arguments. Set it to train a public model from random values."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the class; for the built-in decoder the fields of DecoderConfig. Set it to choose the model's size
    and kind. An island with other arguments is refused, and so is a resumed run."""
    weights: str = ""
    """A folder with config.json and safetensors of a public family, for the initial values. Only the syncer reads it,
    at every start; with `lora`, every island reads it instead, and the syncer does not. `diloco import` writes module,
    args and weights. Set it to continue from a public model instead of random values. The folder must be readable
    wherever the syncer may start; with lora, on every island."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters that are trained in place of the model."""

    @property
    def own(self) -> bool:
        """Return whether the islands' own loops bring the model."""
        return self.module == OWN

    @property
    def initial(self) -> str:
        """Return the folder with the initial values; "" if they are drawn, as those of adapters are."""
        return "" if self.lora.rank else self.weights

    def __post_init__(self) -> None:
        if not self.module:
            raise ValueError("model.module is ''; write it as package.module:Name, or own")
        if self.own and self.weights:
            raise ValueError(f"model.weights is '{self.weights}', but the islands bring the initial values; remove it")
        if self.preset:
            self._apply_preset()
        if not self.own:
            check_setting("model", self.module, self.args)
        if self.lora.rank and not self.weights:
            raise ValueError(
                f"model.lora.rank is {self.lora.rank}, but model.weights names no folder with the weights below the "
                "adapters; import a public model (diloco import), or set the rank 0"
            )

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
