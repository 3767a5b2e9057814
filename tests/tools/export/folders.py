"""Small public models and runs on disk, made without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from diloco_jax.runtime.records.checkpoint import save_parameters
from diloco_jax.runtime.records.files import CHECKPOINTS, CONFIG_FILE
from diloco_jax.training.convert.families import from_hf, tensors
from diloco_jax.training.models.config import ModelConfig

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
}


def drawn(model: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Values for all parameters of a model of a public family."""
    rng = np.random.default_rng(seed)
    return {m.path: rng.normal(0, 0.2, m.shape).astype(np.float32) for m in tensors(model)}


def make_run(folder: Path, model: ModelConfig, parameters: dict[str, np.ndarray], step: int = 7, **config: Any) -> Path:
    """The folder of a run with one snapshot more."""
    folder.mkdir(exist_ok=True)
    settings = {"name": "made", "model": {"module": model.module, "args": dict(model.args)}, **config}
    (folder / CONFIG_FILE).write_text(yaml.safe_dump(settings), encoding="utf-8")
    save_parameters(folder / CHECKPOINTS, parameters, {"global_step": step})
    return folder


def make_public(folder: Path, config: dict[str, Any] = LLAMA, shards: int = 1) -> Path:
    """A public model's folder, as the safetensors library writes it."""
    from safetensors.numpy import save_file

    model = from_hf(config)
    values = drawn(model)
    theirs = {name: value for m in tensors(model) for name, value in zip(m.hf, m.to_hf(values[m.path]), strict=True)}
    names = sorted(theirs)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    where = {name: f"model-{number % shards:05d}.safetensors" for number, name in enumerate(names)}
    for file in sorted(set(where.values())):
        mine = {name: np.ascontiguousarray(theirs[name]) for name in names if where[name] == file}
        save_file(mine, folder / file)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder
