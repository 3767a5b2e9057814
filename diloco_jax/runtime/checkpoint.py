"""The global parameters on disk: one Orbax checkpoint with its description, written whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from orbax.checkpoint import v1 as ocp

PARAMETERS, META = "parameters", "meta"


def save_parameters(folder: Path, parameters: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> Path:
    """Write a checkpoint of the global model.

    Args:
        folder: the run's `checkpoints` folder; made when missing.
        parameters: float32 arrays by path, unsharded.
        meta: plain values; `global_step` names the checkpoint.

    Returns:
        The checkpoint's folder.
    """
    target = folder.absolute() / f"step_{int(meta['global_step']):08d}"
    folder.mkdir(parents=True, exist_ok=True)
    if target.exists():
        shutil.rmtree(target)
    # Orbax writes into a temporary folder and renames it at the end: a killed writer leaves no half checkpoint.
    ocp.save_checkpointables(target, {PARAMETERS: dict(parameters), META: json.loads(json.dumps(dict(meta)))})
    return target


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint in a folder, or None."""
    steps = sorted(p for p in folder.glob("step_*") if p.is_dir() and p.name.removeprefix("step_").isdigit())
    return steps[-1] if steps else None


def load_parameters(checkpoint: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read parameters and description back.

    Raises:
        ValueError: the folder holds no readable checkpoint; names it.
    """
    try:
        loaded = ocp.load_checkpointables(checkpoint.absolute())
    except (ValueError, OSError, KeyError) as error:
        raise ValueError(f"checkpoint {checkpoint} cannot be read ({error}); choose another one") from error
    return {path: np.asarray(value) for path, value in loaded[PARAMETERS].items()}, dict(loaded[META])
