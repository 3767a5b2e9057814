"""The global model of a run's snapshot in the form that MaxText stores.

A snapshot has the axes of layers in front, MaxText has them at `param_scan_axis`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from maxtext.common.checkpointing import save_params_to_path
from maxtext.configs import pyconfig
from maxtext.utils.maxtext_utils import get_mesh_from_config
from maxtext.utils.model_creation_utils import create_nnx_abstract_model

from diloco_jax.core.kinds import as_stored
from diloco_jax.maxtext.arguments import read_arguments, with_defaults
from diloco_jax.maxtext.command import configs_folder
from diloco_jax.nnx import VariableHolder
from diloco_jax.runtime.records.checkpoint import complete, load_parameters
from diloco_jax.training.sharding import LogicalAxes


def model_axes(words: Sequence[str]) -> Mapping[str, LogicalAxes]:
    """Return the names of the axes of each parameter of MaxText's model, by path.

    Args:
        words: Arguments of MaxText: a config file, and `key=value`.

    Raises:
        ValueError: An argument is wrong.
    """
    given = read_arguments(words, configs_folder())
    arguments = with_defaults(given, run="export", island="export", steps=1, hosts=1, data="same")
    config = pyconfig.initialize([__file__, *arguments.as_words()])
    _, model = create_nnx_abstract_model(config, get_mesh_from_config(config))
    return VariableHolder(nnx.state(model)).axes


def nested(parameters: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return parameters by path as nested dicts, as MaxText stores them."""
    tree: dict[str, Any] = {}
    for path, value in parameters.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree


def export(run: Path, folder: Path, words: Sequence[str]) -> int:
    """Write the newest snapshot of a run for MaxText; return its global step.

    Args:
        run: Folder of the run.
        folder: Folder of MaxText's checkpoint; an older one there is replaced.
        words: Arguments of MaxText for the run's model.

    Raises:
        ValueError: The run has no snapshot, or an argument is wrong.
    """
    snapshots = complete(run / "checkpoints")
    if not snapshots:
        raise ValueError(
            f"{run} has no snapshot; set protocol.snapshot_every, or give the folder of a run that has one"
        )
    parameters, about = load_parameters(snapshots[0])
    axes = model_axes(words)
    stored = as_stored(parameters, {path: names for path, names in axes.items() if path in parameters})
    # MaxText's trees of weights begin with the name of Flax's collection.
    save_params_to_path(str(folder.absolute()), {"params": nested(stored)})
    return int(about["global_step"])
