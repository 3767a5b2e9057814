"""Checkpoints on disk: named groups of arrays and a description, written by Orbax whole or not at all.

A folder of checkpoints holds `step_00000123`, named by global step. Orbax writes into a temporary folder, puts a commit
file into it and renames it, so a writer that dies leaves nothing that is taken for a checkpoint. Every group carries a
checksum of its own: a disk that lost bytes is noticed, not trained on.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from orbax.checkpoint import v1 as ocp

from diloco_jax.core import codec

PARAMETERS, META = "parameters", "meta"
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
    try:
        with _context():
            meta = dict(ocp.load_checkpointables(checkpoint.absolute(), {META: None})[META])
            checksums = meta.pop(_CHECKSUMS)
            described = meta.pop(_BARE)
            bare = {
                name: {k: np.zeros(shape, dtype) for k, (dtype, shape) in described[name].items()} for name in names
            }
            wanted = {name: None for name in names if checksums[name] != _checksum(bare[name])}
            loaded = ocp.load_checkpointables(checkpoint.absolute(), wanted) if wanted else {}
    except Exception as error:  # whatever Orbax and TensorStore raise for a folder that something happened to
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ValueError(f"checkpoint {checkpoint} cannot be read ({why}); use another") from error
    groups = {name: {path: np.asarray(v) for path, v in loaded.get(name, {}).items()} | bare[name] for name in names}
    found = {name: _checksum(arrays) for name, arrays in groups.items()} | {META: _checksum_of_meta(meta)}
    for name in found:
        if found[name] != checksums.get(name):
            raise ValueError(f"checkpoint {checkpoint} is damaged: the checksum of its {name} differs; use another")
    return groups, meta


def _context() -> Any:
    """Keep the description in one JSON file: as a tree of arrays every number in it would be a file of its own."""
    registry = ocp.handlers.local_registry()
    registry.add(ocp.handlers.JsonHandler, checkpointable_name=META)
    context = ocp.Context()
    context.checkpointables.registry = registry
    return context


def _checksum(arrays: Mapping[str, np.ndarray]) -> int:
    def pieces() -> Any:
        for name in sorted(arrays):
            value = arrays[name]
            yield f"{name} {value.dtype.str} {value.shape}\0".encode()
            yield np.ascontiguousarray(value).reshape(-1).view(np.uint8).data

    return codec.digest(pieces())


def _checksum_of_meta(meta: Mapping[str, Any]) -> int:
    return codec.digest(json.dumps(dict(meta), sort_keys=True).encode())


# ---- folders of checkpoints -----------------------------------------------------------------------------------------


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


# ---- the global model alone -----------------------------------------------------------------------------------------


def save_parameters(folder: Path, parameters: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> Path:
    """Write a checkpoint that holds parameters only, float32 arrays by path, unsharded; see `save`."""
    return save(folder, {PARAMETERS: parameters}, meta)


def load_parameters(checkpoint: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read parameters and description back, of a full snapshot too.

    Raises:
        ValueError: as `load`.
    """
    groups, meta = load(checkpoint, PARAMETERS)
    return groups[PARAMETERS], meta
