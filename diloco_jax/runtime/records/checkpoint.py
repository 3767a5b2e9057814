"""Checkpoints on disk: named groups of arrays and a description, written by Orbax whole or not at all.

A folder of checkpoints holds `step_00000123`, named by global step. Orbax writes into a temporary folder, puts a commit
file into it and renames it, so a writer that dies leaves nothing that is taken for a checkpoint. Every group carries a
checksum of its own: a disk that lost bytes is noticed, not trained on.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash
from orbax.checkpoint import v1 as ocp

from diloco_jax.core import codec

PARAMETERS, META = "parameters", "meta"
CHUNK_BYTES = 1 << 26
_CHECKSUMS = "checksums"  # key of the description: group -> checksum
_BARE = "without_elements"  # likewise: group -> name -> dtype and shape of arrays without elements
_UNREADABLE = "unreadable_"  # prefix of a checkpoint that was set aside

Arrays = dict[str, np.ndarray]
T = TypeVar("T")

log = logging.getLogger(__name__)


def save(folder: Path, groups: Mapping[str, Mapping[str, np.ndarray]], meta: Mapping[str, Any]) -> Path:
    """Write one checkpoint; another one of the same global step is replaced.

    Args:
        folder: where checkpoints of this kind lie; made when missing.
        groups: arrays by group and name; an empty group is allowed.
        meta: plain JSON values; `global_step` names the checkpoint.

    Returns:
        The checkpoint's folder.
    """
    target = folder.absolute() / f"step_{int(meta['global_step']):08d}"
    folder.mkdir(parents=True, exist_ok=True)
    if target.exists():
        shutil.rmtree(target)
    checksums = {name: _checksum(arrays) for name, arrays in groups.items()} | {META: _checksum_of_meta(meta)}
    # Orbax refuses arrays without elements, and groups without arrays.
    bare = {
        group: {name: [value.dtype.name, list(value.shape)] for name, value in arrays.items() if not value.size}
        for group, arrays in groups.items()
    }
    filled = {group: {k: v for k, v in arrays.items() if v.size} for group, arrays in groups.items()}
    full = {group: arrays for group, arrays in filled.items() if arrays}
    described = {**json.loads(json.dumps(dict(meta))), _CHECKSUMS: checksums, _BARE: bare}
    with _context():
        ocp.save_checkpointables(target, {**full, META: described})
    return target


def load(checkpoint: Path, *names: str) -> tuple[dict[str, Arrays], dict[str, Any]]:
    """Read groups and the description back, and compare the checksums.

    Args:
        names: of the groups to read.

    Raises:
        ValueError: this is no checkpoint with these groups, or it is damaged; names it.
    """
    meta, checksums, bare = _described(checkpoint)
    with _reading(checkpoint):
        filled = {name: None for name in names if checksums[name] != _checksum(_without_elements(bare[name]))}
        loaded = ocp.load_checkpointables(checkpoint.absolute(), filled) if filled else {}
    groups = {
        name: {path: np.asarray(v) for path, v in loaded.get(name, {}).items()} | _without_elements(bare[name])
        for name in names
    }
    for name, arrays in groups.items():
        _compare(checkpoint, name, _checksum(arrays), checksums)
    return groups, meta


def _described(checkpoint: Path) -> tuple[dict[str, Any], dict[str, int], dict[str, dict[str, Any]]]:
    """Return the description, checksums by group, and the arrays without elements by group and name."""
    with _reading(checkpoint):
        meta = dict(ocp.load_checkpointables(checkpoint.absolute(), {META: None})[META])
        checksums, bare = meta.pop(_CHECKSUMS), meta.pop(_BARE)
    _compare(checkpoint, META, _checksum_of_meta(meta), checksums)
    return meta, checksums, bare


def _without_elements(described: Mapping[str, Any]) -> Arrays:
    return {name: np.zeros(shape, dtype) for name, (dtype, shape) in described.items()}


def _compare(checkpoint: Path, name: str, found: int, checksums: Mapping[str, int]) -> None:
    if found != checksums.get(name):
        raise ValueError(f"checkpoint {checkpoint} is damaged: the checksum of its {name} differs; use another")


@contextmanager
def _reading(checkpoint: Path) -> Iterator[None]:
    try:
        with _context():
            yield
    except Exception as error:  # whatever Orbax and TensorStore raise for a folder that something happened to
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ValueError(f"checkpoint {checkpoint} cannot be read ({why}); use another") from error


def _context() -> Any:
    """Keep the description in one JSON file: as a tree of arrays every number in it would be a file of its own.

    Large arrays are cut into chunks, so that whoever reads one need not hold all of it compressed too.
    """
    registry = ocp.handlers.local_registry()
    registry.add(ocp.handlers.JsonHandler, checkpointable_name=META)
    context = ocp.Context()
    context.checkpointables.registry = registry
    context.array_options.saving.storage_options.chunk_byte_size = CHUNK_BYTES
    return context


def _checksum(arrays: Mapping[str, np.ndarray]) -> int:
    return codec.digest(piece for name in sorted(arrays) for piece in _pieces(name, arrays[name]))


def _pieces(name: str, value: np.ndarray) -> tuple[codec.Bytes, codec.Bytes]:
    return f"{name} {value.dtype.str} {value.shape}\0".encode(), codec.as_bytes(value)


def _checksum_of_meta(meta: Mapping[str, Any]) -> int:
    return codec.digest(json.dumps(dict(meta), sort_keys=True).encode())


def complete(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder whose writer came to its end, newest first."""
    steps = [p for p in folder.glob("step_*") if p.is_dir() and p.name.removeprefix("step_").isdigit()]
    return sorted(steps, key=global_step_of, reverse=True)


def global_step_of(checkpoint: Path) -> int:
    """Return the global step that a checkpoint's name says."""
    return int(checkpoint.name.removeprefix("step_"))


def newest_readable(folder: Path, read: Callable[[Path], T]) -> tuple[Path, T] | None:
    """Return the newest checkpoint that can be read, with what was read; the log names each one that cannot.

    Args:
        read: reads one; its ValueError means that this one cannot be used, and says why.
    """
    for checkpoint in complete(folder):
        try:
            return checkpoint, read(checkpoint)
        except ValueError as error:
            log.warning(f"skipped {checkpoint.name}, trying the one before: {error}")
    return None


def prune(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, and what dead writers left. Only the folder's writer may call it.

    What cannot be deleted stays until the next time.
    """
    left = [p for p in folder.glob("step_*") if p.is_dir() and not p.name.removeprefix("step_").isdigit()]
    for path in [*complete(folder)[keep:], *left]:
        shutil.rmtree(path, ignore_errors=True)


def set_aside(checkpoint: Path) -> None:
    """Rename a checkpoint so that nobody takes it for one, replacing what was set aside of the same step before."""
    target = checkpoint.with_name(_UNREADABLE + checkpoint.name)
    shutil.rmtree(target, ignore_errors=True)
    checkpoint.rename(target)


def save_parameters(folder: Path, parameters: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> Path:
    """Write a checkpoint that holds parameters only, float32 arrays by path, unsharded; see `save`."""
    return save(folder, {PARAMETERS: parameters}, meta)


def each_parameter(checkpoint: Path) -> tuple[int, Iterator[tuple[str, np.ndarray]]]:
    """Count the parameters of a checkpoint, and return them one at a time: (path, array) by ascending path.

    Raises:
        ValueError: as `load`; for another checksum when all have been read.
    """
    _, checksums, bare = _described(checkpoint)
    folder, empty = checkpoint.absolute(), _without_elements(bare[PARAMETERS])
    with _reading(checkpoint):
        stored = ocp.checkpointables_metadata(folder).metadata.get(PARAMETERS, {})

    def read(path: str) -> np.ndarray:
        alone = {other: kept if other == path else ocp.PLACEHOLDER for other, kept in stored.items()}
        with _reading(checkpoint):
            return np.asarray(ocp.load_checkpointables(folder, {PARAMETERS: alone})[PARAMETERS][path])

    def all_of_them() -> Iterator[tuple[str, np.ndarray]]:
        hasher = xxhash.xxh3_64()
        for path in sorted(stored.keys() | empty):
            value = empty[path] if path in empty else read(path)
            for piece in _pieces(path, value):
                hasher.update(piece)
            yield path, value
            del value, piece  # before the next one is read: there may be no room for two
        _compare(checkpoint, PARAMETERS, hasher.intdigest(), checksums)

    return len(stored) + len(empty), all_of_them()


def load_parameters(checkpoint: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read parameters and description back, of a full snapshot too.

    Raises:
        ValueError: as `load`.
    """
    groups, meta = load(checkpoint, PARAMETERS)
    return groups[PARAMETERS], meta
