"""Import of public weights into a config, and export of a run's model to the formats of other libraries:

hf       config.json, safetensors, tokenizer and generation settings of a public family, for `transformers`; of adapters
         the same without config.json, for `peft`
orbax    a checkpoint {path: array} for `orbax.checkpoint.v1.load`
npz      parameters.npz for numpy.load
"""

import json
import logging
import os
import shutil
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from orbax.checkpoint import v1 as ocp

from diloco_jax.runtime.local.check_input import check_tokenizer
from diloco_jax.runtime.records import checkpoint
from diloco_jax.runtime.records.files import CHECKPOINTS
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import parse, read_values
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.convert.adapters import merged, pairs, write_adapters
from diloco_jax.training.convert.companions import (
    GENERATION_FILE,
    folders_of,
    licences_of,
    token_ids,
    turn_end,
    with_ends,
)
from diloco_jax.training.convert.families import HOW, family_name, to_hf
from diloco_jax.training.convert.tensors import tensors
from diloco_jax.training.convert.weights import CONFIG_FILE, Parameters, Weights, read_json, write_weights
from diloco_jax.training.data.config import PLAIN
from diloco_jax.training.data.corpus import tokenizer_of
from diloco_jax.training.data.tokenizer import SETTINGS_FILE, TOKENIZER_FILE, Tokenizer, has_tokenizer, open_tokenizer
from diloco_jax.training.sharding import MeshConfig

OF_TOKENIZER = (
    TOKENIZER_FILE, SETTINGS_FILE, "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "tokenizer.model",
)  # fmt: skip
OF_USE = (
    GENERATION_FILE, "chat_template.jinja", "chat_template.json", "additional_chat_templates", "processor_config.json",
    "preprocessor_config.json",
)  # fmt: skip
# Several attempts are needed, because a running run may delete the snapshot that is being read.
ATTEMPTS = 3

log = logging.getLogger(__name__)
# Passes on the given number of items, one for each parameter, and shows the progress.
Watch = Callable[[Iterable[Any], int], Iterable[Any]]


def begin_with(folder: Path, base: Path | None, out: Path, watch: Watch, *, images: bool = False) -> dict[str, Any]:
    """Check a public model's folder, including every value, and write a config for a run that starts from it.

    Other settings are those of the config `base`, its adapters included; without one, the data is text and the rest has
    its defaults.

    Args:
      images: whether the model has its vision tower; otherwise it is the text model alone.

    Raises:
      ValueError: `out` exists, or the folder or the config cannot be used, such as adapters of unknown linear maps.
    """
    if out.exists():
        raise ValueError(f"{out} already exists; choose another --out, or move it away")
    weights, where = Weights(folder), str(folder.resolve())
    model = weights.model(images)
    try:
        tensors(model, to_hf(model, family_name(weights.config))["model_type"])
    except ValueError as error:
        raise ValueError(
            f"{folder}: a run from this model could not be exported for transformers ({error}); import a model with "
            "another config.json"
        ) from error
    tokenizer = open_tokenizer(folder) if has_tokenizer(folder) else None
    have = model.args.get("vocab_size", 256)
    if tokenizer and tokenizer.vocab_size > have:
        ids = f"has ids below {tokenizer.vocab_size}, config.json only {have}"
        raise ValueError(f"{folder}: the tokenizer {ids}; copy both from one model")
    fresh = {"name": folder.resolve().name, "data": {"format": "text", "path": "texts"}}
    values: dict[str, Any] = {**(read_values(base) if base else fresh)}
    data = dict(values.get("data") or {})
    of_text = data.get("mixture") or data.get("format", "bytes") not in (*PLAIN, "store")
    if tokenizer and of_text:
        values["data"] = {"tokenizer": where, **data}
    own = values.get("model") or {}
    how = {name: value for name, value in (own.get("args") or {}).items() if name in HOW}
    values["model"] = {"module": model.module, "args": {**model.args, **how}, "weights": where}
    if "lora" in own:
        values["model"]["lora"] = own["lora"]
    mixture = data.get("mixture")
    parts = mixture.values() if isinstance(mixture, dict) else [data]
    if not (tokenizer or data.get("tokenizer")) and any(_needs_tokenizer(part) for part in parts):
        raise ValueError(
            f"{folder} has no {TOKENIZER_FILE}, and text needs one: write it with transformers "
            "(AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)), or name data.tokenizer in --config"
        )
    config = parse(values, str(base or folder))
    if not of_text:
        check_tokenizer(config)
    if config.model.lora.rank:
        # This adds the adapters to the model's shapes, and refuses targets that the model does not have.
        Blueprint(config.model, config.optimizer, MeshConfig(), 1, seed=config.seed)
    made = weights.check(config.model)
    count = sum(watch(weights.check_values(config.model), len(made)))
    with out.open("x", encoding="utf-8") as file:
        file.write(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
    return {"config": str(out), "module": model.module, "args": dict(config.model.args), "parameters": count}


def _needs_tokenizer(part: Any) -> bool:
    return isinstance(part, dict) and part.get("format", "store") not in (*PLAIN, "store")


def export(
    config: RunConfig, run_dir: Path, form: str, out: Path, dtype: str, watch: Watch, *, whole_model: bool = False
) -> dict[str, Any]:
    """Export the model of a run's newest readable snapshot; `out` appears only when it is complete.

    Args:
      whole_model: of a run with adapters, write the public model with the adapters merged into it.

    Raises:
      ValueError: `out` has content, the format or dtype does not fit, or the run has no readable snapshot.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder; choose another --out, or remove it")
    writer = ModelWriter(config, form, dtype, whole_model=whole_model)
    part = out.absolute().with_name(f".{out.absolute().name}.partial")
    whole = part / "whole"

    def write(path: Path) -> None:
        shutil.rmtree(part, ignore_errors=True)
        whole.mkdir(parents=True)
        count, parameters = checkpoint.each_parameter(path)
        writer.write(whole, parameters, count, watch, path)

    # Why each snapshot was refused; a folder that the run needs beside its snapshots may be the reason, too.
    refusals: dict[Path, ValueError] = {}
    try:
        for _ in range(ATTEMPTS):
            if (found := checkpoint.newest_readable(run_dir / CHECKPOINTS, write, refusals.__setitem__)) is not None:
                break
        else:
            raise ValueError(_no_snapshot(config, run_dir, refusals))
        files = sorted(path.name for path in whole.iterdir())
        os.replace(whole, out)
    except shutil.Error as error:
        # The error lists several files; the reason for the first one is enough.
        raise OSError(f"{out} cannot be written: {error.args[0][0][2]}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return {"format": form, "out": str(out), "files": files, "global_step": checkpoint.global_step_of(found[0])}


def _no_snapshot(config: RunConfig, run_dir: Path, refusals: Mapping[Path, ValueError]) -> str:
    every = config.protocol.snapshot_every
    if refusals:
        newest = max(refusals, key=checkpoint.global_step_of)
        return f"{run_dir} has no snapshot that can be exported; {newest.name}, the newest one: {refusals[newest]}"
    first = f"at global step {every} (protocol.snapshot_every), or" if every else "(protocol.snapshot_every is 0)"
    return f"{run_dir} has no snapshot yet: the first one is written {first} at the end of the run; export it then"


class ModelWriter:
    """Writes models of one run in one format.

    Args:
      whole_model: of a run with adapters, write the public model with the adapters merged into it.

    Raises:
      ValueError: the format or dtype does not fit the run.
    """

    def __init__(self, config: RunConfig, form: str, dtype: str, *, whole_model: bool = False) -> None:
        if whole_model and (not config.model.lora.rank or form == "orbax"):
            raise ValueError(
                "--merged merges the adapters of a run with model.lora into its model, for --format hf and npz; leave "
                "it out"
            )
        self._config, self._form, self._dtype, self._whole_model = config, form, dtype, whole_model
        self._described: dict[str, Any] = {}
        if form == "hf":
            try:
                self._described = to_hf(config.model, _family(config))
                tensors(config.model, self._described["model_type"])
            except ValueError as error:
                raise ValueError(f"{error}; --format orbax and npz work for any model") from error
        elif dtype != "float32":
            raise ValueError(f"--dtype {dtype} is for --format hf; leave it out, {form} has the run's float32 values")

    def write(self, folder: Path, parameters: Parameters, count: int, watch: Watch, snapshot: Path) -> None:
        """Write a model into an empty folder.

        Args:
          parameters: by ascending path.
          count: number of the parameters.
          snapshot: checkpoint that has the same parameters, whose files become those of orbax.
        """
        config, form = self._config, self._form
        if self._whole_model:
            adapters = pairs(parameters)
            count, parameters = len(tensors(config.model)), merged(config.model, adapters)
        if form == "hf" and config.model.lora.rank and not self._whole_model:
            write_adapters(folder, config.model, watch(parameters, count), self._dtype, self._described["model_type"])
            # With config.json, transformers would take the folder for a whole model.
            _write_companions(folder, config)
        elif form == "hf":
            _write_hf(folder, config, watch(parameters, count), self._described | {"dtype": self._dtype})
        elif form == "npz":
            _write_npz(folder, watch(parameters, count))
        else:
            _write_orbax(folder, watch(parameters, count), snapshot)
        for path in licences_of(config.model):
            shutil.copyfile(path, folder / path.name)


def _family(config: RunConfig) -> str:
    """Return the family of the public model that the run started from, as far as it is known."""
    try:
        return family_name(Weights(config.model.weights).config) if config.model.weights else ""
    except ValueError:
        # The folder may be only on the syncer's machine.
        return ""


def _write_hf(folder: Path, config: RunConfig, parameters: Parameters, described: dict[str, Any]) -> None:
    write_weights(folder, config.model, parameters, described["dtype"], described["model_type"])
    described |= _write_companions(folder, config)
    (folder / CONFIG_FILE).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def _write_companions(folder: Path, config: RunConfig) -> dict[str, Any]:
    """Write tokenizer, chat template and generation settings; return the special tokens for config.json."""
    tokenizer = _tokenizer(config)
    sources = folders_of(config.model, config.data, tokenizer)
    end = {"eos_token_id": tokenizer.end} if tokenizer and tokenizer.end is not None else {}
    ends = turn_end(config.data, tokenizer)
    (folder / GENERATION_FILE).write_text(json.dumps(end, indent=2) + "\n", encoding="utf-8")
    for name in (*OF_TOKENIZER, *OF_USE):
        for source in sources:
            # Tokenizer files in a folder without tokenizer.json may belong to another tokenizer.
            if name in OF_TOKENIZER and tokenizer and tokenizer.folder and not has_tokenizer(source):
                continue
            if (source / name).is_dir():
                shutil.copytree(source / name, folder / name)
            elif (source / name).exists():
                shutil.copy(source / name, folder)
            else:
                continue
            break
    said = read_json(folder / GENERATION_FILE)
    if (wanted := with_ends(said, ends)) != said:
        (folder / GENERATION_FILE).write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
    return with_ends(token_ids(config.model, sources, tokenizer), ends)


def _tokenizer(config: RunConfig) -> Tokenizer | None:
    """Return the tokenizer of the data, or of the weights that the run started from; None if there is none."""
    for folder in (config.data.tokenizer, config.model.weights):
        if folder and has_tokenizer(folder):
            return open_tokenizer(folder)
    try:
        return tokenizer_of(config.data)
    except ValueError as error:
        # The data may be only on other machines.
        log.warning(f"written without a tokenizer: {error}")
        return None


def _write_orbax(folder: Path, parameters: Parameters, snapshot: Path) -> None:
    """Copy the files of the snapshot's parameters into a separate checkpoint.

    The files are copied because saving the arrays with Orbax would keep most of them in memory.
    """
    # Reading all parameters compares their checksums.
    deque(parameters, maxlen=0)
    # Orbax creates the folder itself.
    folder.rmdir()
    ocp.save(folder, {"frame": np.zeros(1, np.float32)})
    (inside,) = (path for path in folder.iterdir() if path.is_dir())
    shutil.rmtree(inside)
    shutil.copytree(snapshot / checkpoint.PARAMETERS, inside)


def _write_npz(folder: Path, parameters: Parameters) -> None:
    with zipfile.ZipFile(folder / "parameters.npz", "w", zipfile.ZIP_STORED) as file:
        for path, value in parameters:
            with file.open(f"{path}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, value, allow_pickle=False)
            del value
