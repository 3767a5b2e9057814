"""Weights of a public model: a folder with config.json and safetensors, read and written one tensor at a time.

config.json                          the family and its sizes
model.safetensors                    all tensors; or of several files
model.safetensors.index.json         says in which of them each tensor lies
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from diloco_jax.training.convert.families import Mapped, tensors
from diloco_jax.training.models.config import ModelConfig

CONFIG_FILE, INDEX_FILE, ONE_FILE = "config.json", "model.safetensors.index.json", "model.safetensors"
JSON_BYTES_MAX = 1 << 26
DTYPES = ("F32", "BF16", "F16")  # of tensors that are read
SPARE = re.compile(
    r".*\.rotary_emb\.inv_freq|lm_head\.weight"
)  # computed; or the embedding once more, if no model asks
SHARD_BYTES = 5_000_000_000  # of one file that is written, unless one tensor is larger
COPY_BYTES = 1 << 24  # that are turned and rounded at a time while they are written

WRITTEN = {"float32": ("F32", np.dtype(np.float32)), "bfloat16": ("BF16", np.dtype(ml_dtypes.bfloat16))}


class Weights:
    """Tensors of a public model as they lie in its folder.

    Args:
        folder: with config.json and safetensors.

    Attributes:
        config: what config.json says.
        shapes: of every tensor, by its name.

    Raises:
        ValueError: the folder holds no model, or a file of it is missing or damaged; names it.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ValueError(f"{folder} is no folder; name one with {CONFIG_FILE} and *.safetensors of a public model")
        self.config = read_json(self.folder / CONFIG_FILE)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Path] = {}
        listed = self._listed()
        for name in sorted(set(listed.values())) or self._alone():
            self._read_header(self.folder / name)
        if lost := sorted(set(listed) - set(self.shapes)):
            raise ValueError(
                f"{self.folder / listed[lost[0]]} lacks tensor {lost[0]}, which {INDEX_FILE} says it has; copy it again"
            )

    def _listed(self) -> dict[str, str]:
        """Return the file of every tensor, as the index says; nothing if there is no index."""
        index = self.folder / INDEX_FILE
        if not index.exists():
            return {}
        listed = read_json(index).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(n, str) and n == Path(n).name for n in listed.values()):
            raise ValueError(f"{index} has no weight_map of tensors to files beside it; copy it again")
        names = sorted(set(listed.values()))
        if lost := [name for name in names if not (self.folder / name).is_file()]:
            raise ValueError(
                f"{self.folder} lacks {len(lost)} of {len(names)} files that {INDEX_FILE} names, such as {lost[0]}; "
                "copy all files of the model"
            )
        return listed

    def _alone(self) -> list[str]:
        found = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if len(found) != 1:
            have = f"{len(found)} files *.safetensors and no {INDEX_FILE}" if found else "no *.safetensors"
            raise ValueError(f"{self.folder} has {have}; copy all files of the model")
        return found

    def _read_header(self, path: Path) -> None:
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118  (it is no mapping)
                part = file.get_slice(name)
                if part.get_dtype() not in DTYPES:
                    raise ValueError(
                        f"tensor {name} of {path} is {part.get_dtype()}; only {', '.join(DTYPES)} are read"
                    )
                self._files[name], self.shapes[name] = path, tuple(part.get_shape())

    def check(self, model: ModelConfig) -> list[Mapped]:
        """Compare names and shapes with those of a model; returns how its parameters are made of these tensors.

        Raises:
            ValueError: the model is of no public family, or a tensor is missing, of another shape, or too many.
        """
        made = sorted(tensors(model), key=lambda mapped: mapped.path)
        wanted = {name: shape for mapped in made for name, shape in hf_shapes(mapped).items()}
        if missing := sorted(set(wanted) - set(self.shapes)):
            raise ValueError(
                f"{self.folder} lacks {len(missing)} of the {len(wanted)} tensors that the model needs, such as "
                f"{missing[0]}; correct model.args, or copy the files again"
            )
        for name, shape in wanted.items():
            if self.shapes[name] != shape:
                raise ValueError(
                    f"tensor {name} of {self.folder} has shape {self.shapes[name]}, but the model needs {shape}; "
                    "are model.args those of these weights?"
                )
        if surplus := sorted(name for name in self.shapes.keys() - wanted if not SPARE.fullmatch(name)):
            raise ValueError(
                f"{self.folder} has {len(surplus)} tensors that the model does not use, such as {surplus[0]}; correct "
                "model.args, or name the weights of this model"
            )
        return made

    def read(self, model: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the model's parameters in ascending order of their paths: (path, new float32 array).

        Raises:
            ValueError: as `check`; or a value is not finite.
        """
        for mapped in self.check(model):
            made = mapped.to_ours([self._tensor(name) for name in mapped.hf])
            yield mapped.path, np.ascontiguousarray(made, np.float32)

    def _tensor(self, name: str) -> np.ndarray:
        with _opened(self._files[name]) as file:
            value: np.ndarray = file.get_tensor(name).astype(np.float32, copy=False)
        if value.size and not (math.isfinite(value.min()) and math.isfinite(value.max())):
            raise ValueError(f"tensor {name} of {self.folder} holds NaN or infinity; copy the files again")
        return value


def hf_shapes(mapped: Mapped) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that are made of one of our parameters, without its values."""
    like = mapped.to_hf(np.broadcast_to(np.float32(0), mapped.shape))
    return {name: tuple(value.shape) for name, value in zip(mapped.hf, like, strict=True)}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a model's folder.

    Raises:
        ValueError: it is missing, too large, or no JSON object.
    """
    try:
        if path.stat().st_size > JSON_BYTES_MAX:
            raise ValueError(f"it has more than {JSON_BYTES_MAX} bytes")
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"it holds a {type(found).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise ValueError(f"{path} cannot be read as a JSON object: {why}; copy the model's files again") from error
    return found


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, "numpy")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged, or no safetensors file ({error}); copy it again") from error


# ---- writing ----------------------------------------------------------------------------------------------------


class Shard(NamedTuple):
    """One file of tensors that will be written."""

    name: str
    shapes: dict[str, tuple[int, ...]]


def plan_shards(made: Iterable[Mapped], itemsize: int) -> list[Shard]:
    """Distribute tensors over files of at most SHARD_BYTES, in their order."""
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for mapped in made:
        for name, shape in hf_shapes(mapped).items():
            more = math.prod(shape) * itemsize
            if groups[-1] and size + more > SHARD_BYTES:
                groups.append({})
                size = 0
            groups[-1][name] = shape
            size += more
    count = len(groups)
    names = [ONE_FILE] if count == 1 else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    return [Shard(name, shapes) for name, shapes in zip(names, groups, strict=True)]


def write_weights(
    folder: Path, model: ModelConfig, parameters: Iterable[tuple[str, np.ndarray]], dtype: str
) -> list[str]:
    """Write a model's parameters as tensors of its family, while they come; returns the names of the files.

    Args:
        folder: where the files go.
        model: of a public family.
        parameters: (path, float32 array) in ascending order of the paths.
        dtype: of what is written, a key of WRITTEN.

    Raises:
        ValueError: the model is of no public family, or these are not its parameters.
    """
    made = {mapped.path: mapped for mapped in sorted(tensors(model), key=lambda mapped: mapped.path)}
    code, kind = WRITTEN[dtype]
    shards = plan_shards(made.values(), kind.itemsize)
    theirs = _theirs(made, parameters)
    for shard in shards:
        with (folder / shard.name).open("wb") as file:
            file.write(_header(shard.shapes, code, kind.itemsize))
            for name, shape in shard.shapes.items():
                found, value = next(theirs)
                assert (found, value.shape) == (name, shape), f"{found} {value.shape} in place of {name} {shape}"
                rows = value.reshape(1) if not value.ndim else value
                step = max(1, COPY_BYTES * len(rows) // max(rows.nbytes, 1))
                for start in range(0, len(rows), step):
                    file.write(np.ascontiguousarray(rows[start : start + step], kind).view(np.uint8).data)
    for _ in theirs:  # what follows the last tensor is a check of all of them
        pass
    if len(shards) > 1:
        where = {name: shard.name for shard in shards for name in shard.shapes}
        size = sum(math.prod(shape) for shard in shards for shape in shard.shapes.values()) * kind.itemsize
        index = {"metadata": {"total_size": size}, "weight_map": where}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return [shard.name for shard in shards]


def _theirs(
    made: Mapping[str, Mapped], parameters: Iterable[tuple[str, np.ndarray]]
) -> Iterator[tuple[str, np.ndarray]]:
    """Turn our parameters into theirs, one by one."""
    left = list(made)
    for path, value in parameters:
        if not left or left.pop(0) != path or made[path].shape != value.shape:
            raise ValueError(
                f"parameter '{path}' of shape {value.shape} is none of the model; is it of another config?"
            )
        yield from zip(made[path].hf, made[path].to_hf(value), strict=True)
    if left:
        raise ValueError(f"{len(left)} parameters of the model are missing, such as '{left[0]}'")


def _header(shapes: Mapping[str, tuple[int, ...]], code: str, itemsize: int) -> bytes:
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * itemsize
        table[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
