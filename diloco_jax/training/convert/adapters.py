"""Adapters of a run (models/lora.py) in the files of PEFT, and merged into the public model below them.

PEFT has [r, in] and [out, r] for each layer, and this package [in, r] and [r, out], or stacks of them.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from safetensors.numpy import save

from diloco_jax.training.convert.tensors import tensors
from diloco_jax.training.convert.weights import ADAPTER_FILE, WRITTEN, Parameters, Weights
from diloco_jax.training.models.config import SEEING_DECODER, ModelConfig

ADAPTER_CONFIG_FILE = "adapter_config.json"
# In PEFT's files, the names of the model's tensors have this prefix.
PREFIX = "base_model.model."
KERNEL, FIRST, SECOND = "/kernel", "/adapter/a", "/adapter/b"
WEIGHT = ".weight"

# The two matrices of an adapter, or of a stack of adapters.
Pair = tuple[Float[np.ndarray, "*l i r"], Float[np.ndarray, "*l r o"]]


def pairs(parameters: Parameters) -> dict[str, Pair]:
    """Return the adapters of a run by the path of their linear map, such as blocks/0/q.

    Raises:
        ValueError: the parameters are not those of adapters.
    """
    found = dict(parameters)
    linears = [path.removesuffix(FIRST) for path in found if path.endswith(FIRST)]
    expected = {linear + part for linear in linears for part in (FIRST, SECOND)}
    if different := sorted(expected ^ found.keys()):
        raise ValueError(
            f"parameter '{different[0]}' is not one of a pair of matrices of an adapter; was the run trained with "
            "another model.lora?"
        )
    return {linear: (found[linear + FIRST], found[linear + SECOND]) for linear in linears}


def write_adapters(folder: Path, model: ModelConfig, parameters: Parameters, dtype: str, family: str = "") -> None:
    """Write the adapters of a run as a folder of PEFT.

    Args:
        parameters: (path, float32 array) of the adapters.
        dtype: a key of `WRITTEN`.
        family: a family that has such models; if empty, the nearest one.

    Raises:
        ValueError: the model has no public family, or the family has no separate tensor for an adapter's linear map.
    """
    # A tensor that holds several linear maps cannot have an adapter for each of them.
    names = {mapped.path: mapped.hf for mapped in tensors(model, family) if mapped.part is None}
    found, targets = dict[str, np.ndarray](), list[str]()
    for linear, (a, b) in pairs(parameters).items():
        theirs = names.get(linear + KERNEL, ())
        layers = a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:])
        if len(theirs) != len(layers[0]) or not all(name.endswith(WEIGHT) for name in theirs):
            raise ValueError(
                f"the linear map '{linear}' has no separate tensor in the model's family, so PEFT cannot adapt it; "
                "write the whole model with --merged"
            )
        for name, first, second in zip(theirs, *layers, strict=True):
            module = name.removesuffix(WEIGHT)
            for part, value in (("lora_A", first), ("lora_B", second)):
                found[f"{PREFIX}{module}.{part}{WEIGHT}"] = np.ascontiguousarray(value.T, WRITTEN[dtype][1])
            # The name within a layer, because the same name may stand for an expert elsewhere in the layer. A tower's
            # layers have the same names, so beside one the whole name is needed.
            targets.append(module if model.module == SEEING_DECODER else module.split(".", 3)[-1])
    # `save_file` would make a file that only its owner can read.
    (folder / ADAPTER_FILE).write_bytes(save(found, {"format": "pt"}))
    described = _config(model, list(dict.fromkeys(targets)))
    (folder / ADAPTER_CONFIG_FILE).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def _config(model: ModelConfig, targets: list[str]) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.weights,
        "r": model.lora.rank,
        "lora_alpha": model.lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def merged(model: ModelConfig, adapters: Mapping[str, Pair]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the public model's parameters with the adapters merged into them: (path, float32 array) by ascending path.

    Raises:
        ValueError: the folder `model.weights` is damaged or belongs to another model, or it lacks a linear map.
    """
    scale, left = np.float32(model.lora.alpha / model.lora.rank), dict(adapters)
    for path, value in Weights(model.weights).read(model):
        pair = left.pop(path.removesuffix(KERNEL), None) if path.endswith(KERNEL) else None
        yield path, value if pair is None else value + scale * (pair[0] @ pair[1])
    if left:
        raise ValueError(f"{model.weights} has no linear map '{next(iter(left))}', which the run has adapters for")
