"""A config that begins with the weights of a public model: its folder is checked whole, then the config is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from diloco_jax.settings.text import parse, read_values
from diloco_jax.tools.export.write import Watch
from diloco_jax.training.convert.families import from_hf
from diloco_jax.training.convert.weights import Weights


def begin(folder: Path, base: Path | None, out: Path, watch: Watch) -> dict[str, Any]:
    """Check a public model's folder, all values of it too, and write a config whose run begins with them.

    Args:
        folder: with config.json and safetensors.
        base: config for all but the model; None for the defaults.
        out: the new config.
        watch: shows how far it is.

    Returns:
        config, module, args, parameters.

    Raises:
        ValueError: the folder or the config cannot be used; or `out` is there already.
    """
    if out.exists():
        raise ValueError(f"{out} is there already; choose another --out, or move it away")
    weights = Weights(folder)
    model = replace(from_hf(weights.config), weights=str(folder.resolve()))
    values: Mapping[str, Any] = read_values(base) if base else {"name": folder.resolve().name}
    written = {**values, "model": {"module": model.module, "args": model.args, "weights": model.weights}}
    parse(written, str(base or folder))
    count = sum(value.size for _, value in watch(weights.read(model), len(weights.check(model))))
    with out.open("x", encoding="utf-8") as file:
        file.write(yaml.safe_dump(written, sort_keys=False, allow_unicode=True))
    return {"config": str(out), "module": model.module, "args": model.args, "parameters": count}
