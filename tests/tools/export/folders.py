"""Small models of public families, and runs of them on disk that nobody trained."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from diloco_jax.runtime.records.checkpoint import save_parameters
from diloco_jax.runtime.records.files import CHECKPOINTS, CONFIG_FILE
from diloco_jax.training.convert.families import to_hf
from diloco_jax.training.convert.table import FAMILIES
from diloco_jax.training.convert.tensors import tensors
from diloco_jax.training.convert.weights import CONFIG_FILE as HF_CONFIG
from diloco_jax.training.convert.weights import write_weights
from diloco_jax.training.data.config import DataConfig
from diloco_jax.training.data.corpus import load_source
from diloco_jax.training.data.order import eval_batches
from diloco_jax.training.models.config import MOE, ModelConfig

SIZES = {"vocab_size": 300, "dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
SIZES |= {"mlp_dim": 48, "seq_len_max": 128}
EXPERTS = {"num_experts": 4, "experts_per_token": 2, "routing": "dropless"}


def model_of(family: str = "llama", **args: Any) -> ModelConfig:
    """A small model of a public family."""
    found = FAMILIES[family]
    shared = {"shared_dim": 40} if "shared_dim" in found.keys else {}
    clamped = {"glu_limit": 7.0, "activation": "silu"} if "glu_limit" in found.keys else {}
    # In transformers, the convolution of gated DeltaNet has the activation of the MLP.
    linear = {"activation": "silu"} if found.linear else {}
    sizes = SIZES | (EXPERTS if found.mixture else {}) | shared | clamped | linear | dict(found.args) | args
    return ModelConfig(module=MOE if found.mixture else ModelConfig().module, args=sizes)


def drawn(model: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Values for all parameters of a model."""
    rng = np.random.default_rng(seed)
    return {m.path: rng.normal(0, 0.2, m.shape).astype(np.float32) for m in tensors(model)}


def public(folder: Path, model: ModelConfig, seed: int = 0) -> ModelConfig:
    """Write the folder of a public model with drawn values; return the model that starts from it."""
    folder.mkdir(exist_ok=True)
    write_weights(folder, model, sorted(drawn(model, seed).items()), "float32")
    (folder / HF_CONFIG).write_text(json.dumps(to_hf(model)), encoding="utf-8")
    return replace(model, weights=str(folder))


def loss_of_theirs(theirs: Any, data: DataConfig, size: int, count: int) -> float:
    """The loss of a model of transformers on so many batches of the held-out part."""
    import torch

    batches = eval_batches(load_source(data, 32), size, count)
    tokens = torch.tensor(np.concatenate([batch["tokens"] for batch in batches]), dtype=torch.int64)
    with torch.no_grad():
        logits = theirs(tokens[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()


def make_run(folder: Path, model: ModelConfig, parameters: dict[str, np.ndarray], step: int = 7, **config: Any) -> Path:
    """The folder of a run, with one snapshot more."""
    folder.mkdir(exist_ok=True)
    settings = {"name": "made", "model": {"module": model.module, "args": dict(model.args)}, **config}
    if model.lora.rank:
        lora = asdict(model.lora) | {"targets": [*model.lora.targets]}
        settings["model"] |= {"weights": model.weights, "lora": lora}
    (folder / CONFIG_FILE).write_text(yaml.safe_dump(settings), encoding="utf-8")
    save_parameters(folder / CHECKPOINTS, parameters, {"global_step": step})
    return folder
