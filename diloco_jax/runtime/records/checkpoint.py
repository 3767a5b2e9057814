"""Checkpoints on disk: named groups of arrays with a description, readable by Orbax, and written whole or not at all.

A folder of checkpoints holds `step_00000123`, named by global step. A writer fills another folder and renames it at the
end, so a writer that is killed never leaves a folder with the name of a checkpoint. Every piece has a checksum, so that
lost bytes of a disk are noticed before anything trains on them.

Orbax writes the description of the arrays. TensorStore writes the arrays to Orbax's places, piece by piece, because
Orbax itself would copy all of them before it writes one. So a writer or reader holds one piece at a time.
"""

import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tensorstore as ts
from orbax.checkpoint import v1 as ocp

from diloco_jax.core import codec
from diloco_jax.core.fragments import WHOLE, Slice, whole
from diloco_jax.runtime.records import files

PARAMETERS, META = "parameters", "meta"
CHUNK_BYTES = 1 << 26  # per chunk
# Key of the description: group -> path, axis, start, stop and checksum of each piece.
_PIECES = "pieces"
# Key of the description: the checksum of the rest of the description.
_ITSELF = "checksum"
# Prefix of a checkpoint that was set aside because it cannot be read.
_UNREADABLE = "unreadable_"
# Prefix of a checkpoint that was set aside because it belongs to another run or to lost rounds.
OTHER_HISTORY = "other_history_"
# Number of chunks that are copied, or written, at a time.
_AT_ONCE = 2

T = TypeVar("T")

log = logging.getLogger(__name__)
# Orbax warns at every save that arrays in separate files need not be merged.
logging.getLogger("absl").addFilter(lambda record: "Skipping merge of OCDBT" not in record.getMessage())


class SavedPart(NamedTuple):
    """An array of a checkpoint, or a slice of one."""

    group: str
    where: Slice
    shape: tuple[int, ...]  # whole array
    value: np.ndarray


def save(folder: Path, groups: Mapping[str, Mapping[str, np.ndarray]], meta: Mapping[str, Any]) -> Path:
    """Write one checkpoint, in place of one of the same global step, and return its folder.

    Args:
        folder: Folder of checkpoints; created if missing.
        groups: Arrays by group and name; an empty group is allowed.
        meta: Plain JSON values; `global_step` names the checkpoint.
    """
    named = ((group, name, value) for group, arrays in groups.items() for name, value in arrays.items())
    pieces = (SavedPart(group, whole(name), value.shape, value) for group, name, value in named)
    return save_pieces(folder, groups, pieces, meta)


def save_pieces(folder: Path, groups: Iterable[str], pieces: Iterable[SavedPart], meta: Mapping[str, Any]) -> Path:
    """Write one checkpoint as `save` does, from pieces of all arrays of these groups, in any order."""
    target = folder.resolve() / f"step_{int(meta['global_step']):08d}"
    part, arrays = target.with_name(f"{target.name}.part"), target.with_name(f"{target.name}.arrays")
    for old in (part, arrays):
        shutil.rmtree(old, ignore_errors=True)
    arrays.mkdir(parents=True)
    written: dict[str, list[list[Any]]] = {group: [] for group in groups}
    for piece in pieces:
        _write(arrays / piece.group / piece.where.path, piece)
        written[piece.group].append([*piece.where, _checksum(piece.where, piece.value)])
        # This frees the piece before the next one is made.
        del piece
    plain = json.loads(json.dumps(dict(meta)))
    described = {**plain, _ITSELF: _checksum_of(plain, written), _PIECES: written}
    one = np.zeros(1, np.float32)
    outline = {group: {row[0]: one for row in rows} for group, rows in written.items() if rows}
    with _context():
        ocp.save_checkpointables(part, {**outline, META: described})
    for group in outline:
        # The arrays replace Orbax's placeholders of one element.
        os.replace(part / group / "_METADATA", arrays / group / "_METADATA")
        shutil.rmtree(part / group)
        os.replace(arrays / group, part / group)
    shutil.rmtree(arrays)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(part, target)
    return target


def _write(path: Path, piece: SavedPart) -> None:
    """Write a piece in blocks of a few chunks, which bounds the memory for copies."""
    value, where = np.atleast_1d(piece.value), piece.where
    shape = piece.shape or (1,)
    chunks = _chunks(shape, where, value.itemsize)
    if where.axis == WHOLE or not (path / "zarr.json").exists():
        grid = {"name": "regular", "configuration": {"chunk_shape": chunks[: len(piece.shape)]}}
        codecs = [{"name": "bytes", "configuration": {"endian": "little"}}]
        about = {"shape": piece.shape, "data_type": value.dtype.name, "chunk_grid": grid, "codecs": codecs}
        store = _open(path, create=True, metadata=about)
    else:
        store = _open(path)
    if not (piece.shape and value.size):
        store.write(piece.value).result()
        return
    target = store[where.at].translate_to[(0,) * value.ndim]
    step = chunks[0] * max(1, _AT_ONCE * CHUNK_BYTES * len(value) // value.nbytes // chunks[0])
    first, start = where.start if where.axis == 0 else 0, 0
    while start < len(value):
        stop = min(len(value), ((first + start) // step + 1) * step - first)
        target[start:stop].write(value[start:stop]).result()
        start = stop


def _chunks(shape: tuple[int, ...], where: Slice, itemsize: int) -> list[int]:
    """Return the shape of a file's chunk: that of the slice, cut to at most CHUNK_BYTES."""
    chunks = [max(1, size) for size in shape]
    if where.axis != WHOLE:
        chunks[where.axis] = where.stop - where.start
    for axis in range(len(chunks)):
        chunks[axis] = max(1, min(chunks[axis], chunks[axis] * CHUNK_BYTES // (itemsize * math.prod(chunks))))
    return chunks


def _open(path: Path, **options: Any) -> ts.TensorStore:
    spec: dict[str, Any] = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}}
    if "metadata" in options:
        spec["metadata"] = options.pop("metadata")
    return ts.open(spec, context=_few_at_once(), **options).result()


@cache
def _few_at_once() -> ts.Context:
    """Return this process's only context, because its threads must outlive all arrays that they wrote."""
    return ts.Context({name: {"limit": _AT_ONCE} for name in ("data_copy_concurrency", "file_io_concurrency")})


class CheckpointReader:
    """A checkpoint that is read piece by piece; `meta` is its description. ValueError if it is missing or damaged."""

    def __init__(self, checkpoint: Path) -> None:
        # TensorStore accepts no "..", and absolute() would keep it.
        self._folder = checkpoint.resolve()
        with _reading(checkpoint):
            meta = dict(ocp.load_checkpointables(self._folder, {META: None})[META])
            known, pieces = meta.pop(_ITSELF), meta.pop(_PIECES)
            self._pieces = {group: {Slice(*row[:4]): int(row[4]) for row in rows} for group, rows in pieces.items()}
        self.meta: dict[str, Any] = meta
        self._compare(META, known, _checksum_of(meta, pieces))

    def names(self, group: str) -> list[str]:
        """Return the names of a group's arrays, ascending; ValueError if there is no such group."""
        if group not in self._pieces:
            raise ValueError(f"checkpoint {self._folder} has no {group}; use another")
        return sorted({where.path for where in self._pieces[group]})

    def piece(self, group: str, where: Slice) -> np.ndarray:
        """Read a piece as it was written; ValueError if there is no such piece, or it is damaged."""
        if where not in self._pieces.get(group, {}):
            raise ValueError(f"checkpoint {self._folder} is of another model or another config: no {where.key} in it")
        value = self._read(group, where)
        self._compare(group, self._pieces[group][where], _checksum(where, value))
        return value

    def array(self, group: str, name: str) -> np.ndarray:
        """Read an array with all its pieces; raises as `piece`."""
        value = self._read(group, whole(name))
        for where, known in self._pieces[group].items():
            if where.path == name:
                self._compare(group, known, _checksum(where, value[where.at]))
        return value

    def _read(self, group: str, where: Slice) -> np.ndarray:
        with _reading(self._folder):
            return np.asarray(_open(self._folder / group / where.path)[where.at].read().result())

    def _compare(self, what: str, known: int, found: int) -> None:
        if found != known:
            raise ValueError(f"checkpoint {self._folder} is damaged: the checksum of its {what} differs; use another")


@contextmanager
def _reading(checkpoint: Path) -> Iterator[None]:
    try:
        with _context():
            yield
    # Orbax and TensorStore raise many kinds of errors for a damaged folder.
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ValueError(f"checkpoint {checkpoint} cannot be read ({why}); use another") from error


def _context() -> Any:
    """Return Orbax's settings: the description is one JSON file, because a tree would need a file per number."""
    registry = ocp.handlers.local_registry()
    registry.add(ocp.handlers.JsonHandler, checkpointable_name=META)
    context = ocp.Context()
    context.checkpointables.registry = registry
    # Otherwise arrays have no separate files.
    context.array_options.saving.use_ocdbt = False
    return context


def _checksum(where: Slice, value: np.ndarray) -> int:
    return codec.digest([f"{where.key} {value.dtype.str} {value.shape}\0".encode(), codec.as_bytes(np.asarray(value))])


def _checksum_of(*described: Any) -> int:
    return codec.digest(json.dumps(described, sort_keys=True).encode())


complete, global_step_of = files.complete_checkpoints, files.global_step_of


def newest_readable(
    folder: Path, read: Callable[[Path], T], on_refused: Callable[[Path, ValueError], None] = lambda *_: None
) -> tuple[Path, T] | None:
    """Return the newest readable checkpoint and the result of `read`; None if there is none.

    The log names each checkpoint that raised a ValueError, and `on_refused` gets it with its error.
    """
    for checkpoint in complete(folder):
        try:
            return checkpoint, read(checkpoint)
        except ValueError as error:
            log.warning(f"skipped {checkpoint.name}, trying the one before: {error}")
            on_refused(checkpoint, error)
    return None


def prune(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, and incomplete folders; only the folder's writer may call it.

    A folder that cannot be deleted stays until the next call.
    """
    left = [p for p in folder.glob("step_*") if p.is_dir() and not p.name.removeprefix("step_").isdigit()]
    for path in [*complete(folder)[keep:], *left]:
        shutil.rmtree(path, ignore_errors=True)


def set_aside(checkpoint: Path, prefix: str = _UNREADABLE) -> None:
    """Rename a checkpoint so that readers ignore it, in place of one of the same step that was set aside before."""
    target = checkpoint.with_name(prefix + checkpoint.name)
    shutil.rmtree(target, ignore_errors=True)
    checkpoint.rename(target)


def save_parameters(folder: Path, parameters: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> Path:
    """Write a checkpoint with parameters only, unsharded float32 arrays by path, as `save` does."""
    return save(folder, {PARAMETERS: parameters}, meta)


def each_parameter(checkpoint: Path) -> tuple[int, Iterator[tuple[str, np.ndarray]]]:
    """Return the number of a checkpoint's parameters, and an iterator of (path, array) by ascending path."""
    reader = CheckpointReader(checkpoint)
    names = reader.names(PARAMETERS)
    return len(names), ((name, reader.array(PARAMETERS, name)) for name in names)


def load_parameters(checkpoint: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read parameters and description of a checkpoint or a full snapshot; ValueError if missing or damaged."""
    reader = CheckpointReader(checkpoint)
    return {name: reader.array(PARAMETERS, name) for name in reader.names(PARAMETERS)}, reader.meta
