"""The model of a run in formats that others read, written from a snapshot one parameter at a time.

hf       config.json, safetensors and tokenizer of the family, as `transformers` opens them
orbax    a checkpoint {path: array} that `orbax.checkpoint.v1.load` reads
npz      parameters.npz, for numpy.load
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from orbax.checkpoint import v1 as ocp

from diloco_jax.runtime.records import checkpoint
from diloco_jax.runtime.records.files import CHECKPOINTS
from diloco_jax.settings.run import RunConfig
from diloco_jax.training.convert.families import tensors, to_hf
from diloco_jax.training.convert.weights import CONFIG_FILE, Parameters, write_weights
from diloco_jax.training.data.corpus import tokenizer_of
from diloco_jax.training.data.tokenizer import SETTINGS_FILE, TOKENIZER_FILE, Tokenizer, open_tokenizer

FORMATS = HF, ORBAX, NPZ = "hf", "orbax", "npz"
GENERATION_FILE = "generation_config.json"
BESIDE = (TOKENIZER_FILE, SETTINGS_FILE, "special_tokens_map.json", "chat_template.jinja", GENERATION_FILE)
ATTEMPTS = 3  # a run that is under way may delete the snapshot that is being read

log = logging.getLogger(__name__)
Watch = Callable[[Parameters, int], Parameters]  # passes parameters on, and shows how many of so many came


def export(config: RunConfig, run_dir: Path, form: str, out: Path, dtype: str, watch: Watch) -> dict[str, Any]:
    """Write the newest readable snapshot's model into a new folder, whole or not at all.

    Args:
        config: of the run.
        run_dir: its folder; the run may be under way.
        form: one of FORMATS.
        out: the new folder.
        dtype: of the tensors, a key of WRITTEN; another than float32 for hf alone.
        watch: shows how far it is.

    Returns:
        format, out, files, global_step, parameters.

    Raises:
        ValueError: there is no snapshot that can be read, `out` is not empty, or the model is of no public family.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists, and is no empty folder; choose another --out, or remove it")
    if form != HF and dtype != "float32":
        raise ValueError(f"--dtype {dtype} is for --format {HF}; leave it out, {form} has the run's float32 values")
    if form == HF:
        _check_family(config)
    folder, part = run_dir / CHECKPOINTS, out.absolute().with_name(f".{out.absolute().name}.partial")
    inner = part / "whole"

    def write(path: Path) -> dict[str, Any]:
        shutil.rmtree(part, ignore_errors=True)
        inner.mkdir(parents=True)
        stored = checkpoint.StoredParameters(path)
        parameters = watch(stored, len(stored.shapes))
        if form == HF:
            _write_hf(inner, config, parameters, dtype)
        elif form == ORBAX:
            _write_orbax(inner, parameters)
        else:
            _write_npz(inner, parameters)
        count = sum(math.prod(shape) for shape in stored.shapes.values())
        return {"global_step": int(stored.meta["global_step"]), "parameters": count}

    try:
        for _ in range(ATTEMPTS):
            if (found := checkpoint.newest_readable(folder, write)) is not None:
                break
        else:
            raise ValueError(f"{run_dir} holds no snapshot that can be read; give the folder of a run that has some")
        files = sorted(path.name for path in inner.iterdir())
        os.replace(inner, out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return {"format": form, "out": str(out), "files": files, **found[1]}


def _check_family(config: RunConfig) -> None:
    try:
        tensors(config.model)
    except ValueError as error:
        raise ValueError(f"{error}; --format {ORBAX} and {NPZ} take any model") from error


def _write_hf(folder: Path, config: RunConfig, parameters: Parameters, dtype: str) -> None:
    write_weights(folder, config.model, parameters, dtype)
    described = to_hf(config.model) | {"dtype": dtype}
    tokenizer = _tokenizer(config)
    end = {"eos_token_id": tokenizer.end} if tokenizer and tokenizer.end is not None else {}
    for name, content in ((CONFIG_FILE, described | end), (GENERATION_FILE, end)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for name in BESIDE:
        if tokenizer and tokenizer.folder and (tokenizer.folder / name).exists():
            shutil.copy(tokenizer.folder / name, folder)


def _tokenizer(config: RunConfig) -> Tokenizer | None:
    """Find the tokenizer of the data, or of the weights with which the run began."""
    for folder in (config.data.tokenizer, config.model.weights):
        if folder and (Path(folder) / TOKENIZER_FILE).exists():
            return open_tokenizer(folder)
    try:
        return tokenizer_of(config.data)
    except ValueError as error:  # the data may be on other machines only
        log.warning(f"written without a tokenizer: {error}")
        return None


def _write_orbax(folder: Path, parameters: Parameters) -> None:
    folder.rmdir()  # Orbax makes it
    for path, value in parameters:
        if value.size:  # Orbax refuses the others
            ocp.partial.save(folder, {path: value})
    ocp.partial.finalize(folder)


def _write_npz(folder: Path, parameters: Parameters) -> None:
    with zipfile.ZipFile(folder / "parameters.npz", "w", zipfile.ZIP_STORED) as file:
        for path, value in parameters:
            with file.open(f"{path}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, value, allow_pickle=False)
