"""Weights of public models: folders that are read and written one tensor at a time.

config.json has the family and the sizes, and *.safetensors the tensors. If there are several of these files,
model.safetensors.index.json maps each tensor to its file.
"""

import json
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import EllipsisType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from diloco_jax.training.convert.families import family_name, from_hf
from diloco_jax.training.convert.mxfp4 import BLOCKS, MXFP4, SCALES, shape_of, unpack
from diloco_jax.training.convert.table import FAMILIES, MERGED, OUTSIDE
from diloco_jax.training.convert.tensors import Mapped, tensors, unread
from diloco_jax.training.models.config import SEEING_DECODER, ModelConfig
from diloco_jax.training.regular import check_regular

CONFIG_FILE, INDEX_FILE, SINGLE_FILE = "config.json", "model.safetensors.index.json", "model.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"
OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack")
EMBEDDING, HEAD = OUTSIDE["embed/embedding"], OUTSIDE["head"]
JSON_BYTES_MAX = 1 << 26
READ = ("F32", "BF16", "F16")
WRITTEN = {"float32": ("F32", np.dtype(np.float32)), "bfloat16": ("BF16", np.dtype(ml_dtypes.bfloat16))}
# Tensors that a model may have beyond those that we need: computed ones, a head that equals the embedding, and layers
# that predict several tokens (mtp), which transformers does not read either.
SPARE = re.compile(r".*\.rotary_emb\.inv_freq|lm_head\.weight|mtp\..*")
# In a model of images and text, the text model's tensors have this prefix. Those of SEEING are read only if our model
# has a tower too, and those of HEARING never.
TEXT = re.compile(r"(model\.)?language_model\.(model\.)?")
# A model that was saved without its head has names without the usual prefix.
BASE = re.compile(r"(embed_tokens|layers|norm)\.")
SEEING = re.compile(
    r"(model\.)?(vision_tower|visual|multi_modal_projector|embed_vision|audio_tower|embed_audio|vision_embedder)\."
)
HEARING = re.compile(r"model\.(audio_tower|embed_audio)\.")
# The largest file that is written, unless one tensor is larger.
SHARD_BYTES = 5_000_000_000
# Bytes that are transposed, rounded or compared at a time, and bytes whose exponents are.
COPY_BYTES, CHECKED_BYTES = 1 << 24, 1 << 18
# The bits of the exponent by type.
EXPONENTS = {"float32": 0x7F80_0000, "bfloat16": 0x7F80, "float16": 0x7C00}

log = logging.getLogger(__name__)

# The key of config.json for tensors of few bits.
QUANTIZATION = "quantization_config"

# (path, float32 array) in ascending order of the paths.
Parameters = Iterable[tuple[str, np.ndarray]]


class Stored(NamedTuple):
    """A tensor in a public model's folder."""

    path: Path
    # The name in the file.
    own: str
    shape: tuple[int, ...]
    dtype: str
    # The file of its scales and their name there, if the tensor is in MXFP4.
    scales: tuple[Path, str] | None = None


class Weights:
    """The tensors in a public model's folder, with their `shapes` by name; `config` is the content of config.json.

    Raises:
        ValueError: the folder has no model, or one of its files is missing or damaged; the message names the file.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.config = read_json(self.folder / CONFIG_FILE)

    def model(self, images: bool = False) -> ModelConfig:
        """Return our model for these weights: the one of config.json, with a separate head if the files have one.

        Args:
            images: whether to return the model with its vision tower, instead of its text alone.

        Raises:
            ValueError: as `from_hf`; or the files cannot be read.
        """
        config = self.config
        if self._is_packed():
            if not any(stored.scales for stored in self._tensors.values()):
                raise ValueError(
                    f"{self.folder / CONFIG_FILE} has {QUANTIZATION} for {MXFP4}, but no file has such tensors "
                    f"(*{BLOCKS} with *{SCALES}); remove {QUANTIZATION}, or copy the model again"
                )
            config = {key: value for key, value in config.items() if key != QUANTIZATION}
        model = from_hf(config, images)
        if self._has_own_head(model):
            return replace(model, args={**model.args, "tie_embeddings": False})
        return model

    def tensors(self, model: ModelConfig) -> list[Mapped]:
        """List a model's parameters with their tensors in these files; ValueError as in `tensors`."""
        # Some files have a layer's experts in one tensor, although the usual ones of the family do not.
        merged = any(name.endswith(MERGED["experts_up"]) for name in self._tensors)
        made = tensors(model, family_name(self.config), merged)
        return [replace(mapped, hf=tuple(map(_name_of, mapped.hf))) for mapped in made]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors by name."""
        return {name: stored.shape for name, stored in self._tensors.items()}

    @cached_property
    def _tensors(self) -> dict[str, Stored]:
        """Return each tensor by its name in transformers."""
        found: dict[str, Stored] = {}
        for path in self._listed():
            with _opened(path) as file:
                for own in file.keys():  # noqa: SIM118  (not a mapping)
                    part, name = file.get_slice(own), _name_of(own)
                    if name in found:
                        other, twin = found[name][:2]
                        raise ValueError(
                            f"tensor {own} of {path} is also in {other}, as {twin}; remove one of the two files"
                        )
                    found[name] = Stored(path, own, tuple(part.get_shape()), part.get_dtype())
        return _joined(found) if self._is_packed() else found

    def _is_packed(self) -> bool:
        """Return whether config.json announces tensors in MXFP4, in a family that has them."""
        found = self.config.get(QUANTIZATION)
        packed = isinstance(found, dict) and found.get("quant_method") == MXFP4.lower()
        return packed and FAMILIES[family_name(self.config)].packed

    def _listed(self) -> list[Path]:
        """Return the files with tensors: model.safetensors if it exists, as in transformers; else the index's files."""
        names = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if SINGLE_FILE in names:
            if (self.folder / INDEX_FILE).exists():
                log.warning(
                    f"{self.folder} has {SINGLE_FILE} beside {INDEX_FILE}; as in transformers, only {SINGLE_FILE} is "
                    "read; remove the one that is old"
                )
            return [self.folder / SINGLE_FILE]
        if (index := self.folder / INDEX_FILE).exists():
            listed = read_json(index).get("weight_map")
            if not isinstance(listed, dict) or not all(name == Path(str(name)).name for name in listed.values()):
                raise ValueError(f"{index} has no weight_map of tensors to files beside it; copy it again")
            wanted = sorted(set(listed.values()))
            if lost := sorted(set(wanted) - set(names)):
                raise ValueError(
                    f"{self.folder} lacks {len(lost)} of {len(wanted)} files, such as {lost[0]}; copy them too"
                )
            names = wanted
        elif names == [ADAPTER_FILE]:
            raise ValueError(f"{self.folder} has only an adapter; merge it into its model, and save the model")
        elif len(names) != 1:
            others = sorted(path.name for suffix in OTHER_FORMATS for path in self.folder.glob(suffix))
            if others and not names:
                raise ValueError(
                    f"{self.folder} has its tensors in {others[0]}, and only *.safetensors are read; open it with "
                    "transformers, and save it with save_pretrained"
                )
            raise ValueError(f"{self.folder} has {len(names)} *.safetensors and no {INDEX_FILE}; copy the whole model")
        return [self.folder / name for name in names]

    def _has_own_head(self, model: ModelConfig) -> bool:
        """Return whether the model shares its embedding with the head, but the files have a head with other values.

        transformers does not share them then, even if config.json asks for it.
        """
        if any(mapped.hf == (HEAD,) for mapped in self.tensors(model)) or not {EMBEDDING, HEAD} <= self._tensors.keys():
            return False
        embedding, head = self._tensors[EMBEDDING], self._tensors[HEAD]
        shape = embedding.shape
        if shape != head.shape or not {embedding.dtype, head.dtype} <= {*READ}:
            return shape != head.shape
        rows = max(1, COPY_BYTES * shape[0] // max(4 * math.prod(shape), 1))
        with _opened(embedding.path) as one, _opened(head.path) as two:
            left, right = one.get_slice(embedding.own), two.get_slice(head.own)
            parts = (slice(start, min(start + rows, shape[0])) for start in range(0, shape[0], rows))
            return not all(np.array_equal(left[part].astype("f4"), right[part].astype("f4")) for part in parts)

    def check(self, model: ModelConfig) -> list[Mapped]:
        """Check that the tensors fit a model; return the model's parameters with their tensors, by ascending path.

        Raises:
            ValueError: the model has no public family, or a tensor is missing, unknown, or of another shape or type.
        """
        made = sorted(self.tensors(model), key=lambda mapped: mapped.path)
        needed = {name: mapped.hf_shape for mapped in made for name in mapped.hf}
        shapes, shared = self.shapes, unread(model)
        skipped = HEARING if model.module == SEEING_DECODER else SEEING
        for name, stored in self._tensors.items():
            if stored.dtype not in READ and not (stored.scales or skipped.match(name)):
                raise ValueError(
                    f"tensor {stored.own} of {stored.path} is {stored.dtype}; only {', '.join(READ)} are read"
                )
        for name in sorted(needed.keys() | shapes):
            found, wanted = shapes.get(name), needed.get(name)
            spare = SPARE.fullmatch(name) or shared.fullmatch(name) or skipped.match(name)
            if found != wanted and not (wanted is None and spare):
                lacking = sum(other not in shapes for other in needed)
                raise ValueError(
                    f"{self.folder} does not fit the model: tensor {name} has shape {found or 'none at all'}, but the "
                    f"model needs {wanted or 'none'}, and {lacking} of {len(needed)} tensors are missing; check that "
                    "model.args are those of these weights, and that all files are there"
                )
        if self._has_own_head(model):
            log.warning(
                f"{self.folder} has a head that differs from its embedding, but model.args.tie_embeddings is true, so "
                "the head is not read; set it false, or import the folder again"
            )
        return made

    def read(self, model: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the parameters of a model as (path, new float32 array), by ascending path.

        Raises:
            ValueError: as `check`; or a value is not finite.
        """
        for mapped in self.check(model):
            ours = np.empty(mapped.shape, np.float32)
            for name, piece in zip(mapped.hf, mapped.to_hf(ours), strict=True):
                stored = self._tensors[name]
                for part, value in _parts(stored):
                    _check_finite(stored, value)
                    piece[part] = mapped.in_theirs(value.astype(np.float32, copy=False))
            yield mapped.path, ours

    def check_values(self, model: ModelConfig) -> Iterator[int]:
        """Check all values of a model's parameters as `read` does, and yield the size of each, by ascending path.

        This takes a fraction of the time, because the values are neither converted nor transposed.
        """
        known = set[str]()
        for mapped in self.check(model):
            # Several parameters may be parts of one tensor.
            for name in mapped.hf:
                if name not in known:
                    known.add(name)
                    for _, value in _parts(self._tensors[name]):
                        _check_finite(self._tensors[name], value)
            yield math.prod(mapped.shape)


def _joined(found: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return the tensors with one for each pair of blocks and scales of MXFP4."""
    joined = dict(found)
    for name in found:
        blocks, scales = found[name], found.get(name.removesuffix(BLOCKS) + SCALES)
        base = name.removesuffix(BLOCKS)
        if name.endswith(BLOCKS) and blocks.dtype == "U8" and scales is None:
            raise ValueError(
                f"{blocks.path} has {blocks.own} in {MXFP4}, but no file has its scales, {base + SCALES}; copy the "
                "model again"
            )
        if not name.endswith(BLOCKS) or scales is None or {blocks.dtype, scales.dtype} != {"U8"}:
            continue
        if twin := found.get(base):
            raise ValueError(
                f"{twin.path} has {twin.own} in {twin.dtype}, and {blocks.path} has it in {MXFP4} as {blocks.own}; "
                "remove one of them"
            )
        if (shape := shape_of(blocks.shape, scales.shape)) is None:
            raise ValueError(
                f"{blocks.own} of {blocks.path} has shape {blocks.shape}, and its scales {scales.shape}; blocks "
                "[E, out, n, 16] need scales [E, out, n]; copy the model again"
            )
        del joined[name], joined[base + SCALES]
        joined[base] = Stored(blocks.path, blocks.own, shape, MXFP4, (scales.path, scales.own))
    return joined


def _parts(stored: Stored) -> Iterator[tuple[int | EllipsisType, np.ndarray]]:
    """Yield a tensor in its type as (index, values): the whole tensor, or one expert after the other of MXFP4."""
    with _opened(stored.path) as file:
        if stored.scales is None:
            yield ..., file.get_tensor(stored.own)
            return
        path, own = stored.scales
        with _opened(path) as other:
            scales, blocks = other.get_tensor(own), file.get_slice(stored.own)
            for expert in range(stored.shape[0]):
                yield expert, unpack(blocks[expert], scales[expert])


def _check_finite(stored: Stored, values: np.ndarray) -> None:
    """Raise ValueError if a value is NaN or infinite; all bits of its exponent are set then."""
    exponent, flat = EXPONENTS[values.dtype.name], np.ascontiguousarray(values).reshape(-1)
    bits = flat.view(f"u{flat.itemsize}")
    step = CHECKED_BYTES // flat.itemsize
    # A block stays in the processor's cache.
    for block in (bits[start : start + step] for start in range(0, bits.size, step)):
        if ((block & exponent) == exponent).any():
            raise ValueError(f"tensor {stored.own} of {stored.path} holds NaN or infinity; copy the model again")


def _name_of(own: str) -> str:
    """Return the name that a tensor has in a model of text only, or that of a tower with its usual prefix."""
    if SEEING.match(own):
        return f"model.{own.removeprefix('model.')}"
    name = TEXT.sub("model.", own).replace(f"model.{HEAD}", HEAD)
    return f"model.{name}" if BASE.match(name) else name


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a public model; ValueError names the file."""
    try:
        check_regular(path)
        if path.stat().st_size > JSON_BYTES_MAX:
            raise ValueError(f"more than {JSON_BYTES_MAX} bytes")
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict):
            raise ValueError(f"a {type(found).__name__} instead of an object")
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"{path} cannot be read: {why}; name the whole folder of a public model; a run from one needs it "
            "whenever its syncer starts, or with model.lora whenever an island starts"
        ) from error
    return found


def _opened(path: Path) -> Any:
    try:
        check_regular(path)
        return safe_open(path, "numpy")
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged, or not a safetensors file ({error}); copy it again") from error


def write_weights(folder: Path, model: ModelConfig, parameters: Parameters, dtype: str, family: str = "") -> None:
    """Write a model's parameters as tensors of its family, one at a time.

    If a tensor of the family holds several parameters, they stay in memory until the tensor is complete.

    Args:
        folder: an existing folder.
        model: the model.
        parameters: (path, float32 array) by ascending path; each is written before the next one is requested.
        dtype: a key of WRITTEN.
        family: the family, as in `tensors`.

    Raises:
        ValueError: the model has no public family, or the parameters are not those of the model.
    """
    made = {mapped.path: mapped for mapped in sorted(tensors(model, family), key=lambda mapped: mapped.path)}
    code, kind = WRITTEN[dtype]
    shards = _shards(made.values(), kind.itemsize)
    theirs = _theirs(made, parameters)
    where: dict[str, str] = {}
    for number, shapes in enumerate(shards, 1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if shards[1:] else "model.safetensors"
        where |= dict.fromkeys(shapes, file_name)
        with (folder / file_name).open("wb") as file:
            file.write(_header(shapes, code, kind.itemsize))
            for _ in shapes:
                value = np.atleast_1d(next(theirs))
                rows = max(1, COPY_BYTES * len(value) // max(value.nbytes, 1))
                for start in range(0, len(value), rows):
                    file.write(np.ascontiguousarray(value[start : start + rows], kind).view(np.uint8).data)
                # The memory is freed before the next tensor is read.
                del value
    # After the last tensor, the generator checks that no parameter is missing.
    next(theirs, None)
    if shards[1:]:
        size = sum(math.prod(shape) for shapes in shards for shape in shapes.values()) * kind.itemsize
        index = {"metadata": {"total_size": size}, "weight_map": where}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _completed(made: Iterable[Mapped]) -> dict[str, str]:
    """Return the path of the parameter that completes each of their tensors, in the order of completion."""
    made = list(made)
    last = {name: mapped.path for mapped in made for name in mapped.hf}
    return {name: mapped.path for mapped in made for name in mapped.hf if last[name] == mapped.path}


def _shards(made: Iterable[Mapped], itemsize: int) -> list[dict[str, tuple[int, ...]]]:
    """Distribute tensors over files of at most SHARD_BYTES, in the order of their completion."""
    made = list(made)
    shapes = {name: mapped.hf_shape for mapped in made for name in mapped.hf}
    shards, size = [dict[str, tuple[int, ...]]()], 0
    for name in _completed(made):
        size += (more := math.prod(shapes[name]) * itemsize)
        if shards[-1] and size > SHARD_BYTES:
            shards.append({})
            size = more
        shards[-1][name] = shapes[name]
    return shards


def _theirs(made: Mapping[str, Mapped], parameters: Parameters) -> Iterator[np.ndarray]:
    """Yield the values of their tensors in the order of completion."""
    left, completed = list(made), _completed(made.values())
    # Tensors that hold several parameters, until the last of these is read.
    open_: dict[str, np.ndarray] = {}
    for path, value in parameters:
        if left[:1] != [path] or made[path].shape != value.shape:
            raise ValueError(
                f"parameter '{path}' of shape {value.shape} does not fit the model of the config; was it trained with "
                "another config?"
            )
        del left[0]
        mapped = made[path]
        for name, piece in zip(mapped.hf, mapped.to_hf(value), strict=True):
            if mapped.part is None:
                yield piece
                continue
            whole = open_.setdefault(name, np.empty(mapped.hf_shape, np.float32))
            mapped.in_theirs(whole)[...] = piece
            if completed[name] == path:
                yield open_.pop(name)
            del whole
        del value
    if left:
        raise ValueError(f"the parameter '{left[0]}', which the model of the config has, is missing; use its config")


def _header(shapes: Mapping[str, tuple[int, ...]], code: str, itemsize: int) -> bytes:
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * itemsize
        table[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
