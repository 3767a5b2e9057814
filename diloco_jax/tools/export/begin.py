"""A config that begins with the weights of a public model, written after everything in its folder was checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from diloco_jax.runtime.local.check_input import check_tokenizer
from diloco_jax.settings.text import parse, read_values
from diloco_jax.tools.export.write import Watch
from diloco_jax.training.convert.families import from_hf
from diloco_jax.training.convert.weights import Weights
from diloco_jax.training.data.config import PLAIN
from diloco_jax.training.data.tokenizer import TOKENIZER_FILE, open_tokenizer


def begin(folder: Path, base: Path | None, out: Path, watch: Watch) -> dict[str, Any]:
    """Check a public model's folder, every value of it too, and write a config whose run begins with it.

    Args:
        folder: with config.json and safetensors.
        base: config for all but the model; None for text and the defaults.
        out: the new config.
        watch: shows how far it is.

    Returns:
        config, module, args, parameters.

    Raises:
        ValueError: the folder, its tokenizer or the config cannot be used; or `out` is there already.
    """
    if out.exists():
        raise ValueError(f"{out} is there already; choose another --out, or move it away")
    weights, where = Weights(folder), str(folder.resolve())
    model = from_hf(weights.config)
    tokenizer = open_tokenizer(folder) if (folder / TOKENIZER_FILE).exists() else None
    have = model.args.get("vocab_size", 256)
    if tokenizer and tokenizer.vocab_size > have:
        raise ValueError(f"{folder}: the tokenizer has ids below {tokenizer.vocab_size}, config.json only {have}")
    fresh = {"name": folder.resolve().name, "data": {"format": "text", "path": "texts"}}
    values: dict[str, Any] = {**(read_values(base) if base else fresh)}
    data = dict(values.get("data") or {})
    of_text = data.get("mixture") or data.get("format", "bytes") not in (*PLAIN, "store")
    if tokenizer and of_text:
        values["data"] = {"tokenizer": where, **data}
    values["model"] = {"module": model.module, "args": dict(model.args), "weights": where}
    config = parse(values, str(base or folder))
    if not of_text:
        check_tokenizer(config)
    made = weights.check(config.model)
    count = sum(value.size for _, value in watch(weights.read(config.model), len(made)))
    with out.open("x", encoding="utf-8") as file:
        file.write(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
    return {"config": str(out), "module": model.module, "args": dict(model.args), "parameters": count}
