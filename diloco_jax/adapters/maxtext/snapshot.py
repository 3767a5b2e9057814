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

from diloco_jax.adapters.maxtext.arguments import read_arguments, refusal_named, with_defaults
from diloco_jax.adapters.maxtext.command import configs_folder
from diloco_jax.adapters.nnx import VariableHolder
from diloco_jax.core.kinds import as_stored
from diloco_jax.runtime.records.checkpoint import complete, load_parameters


def model_of(words: Sequence[str]) -> VariableHolder:
    """Return MaxText's model, with the shapes and the names of the axes of its parameters instead of values.

    Args:
        words: Arguments of MaxText: a config file, and `key=value`.

    Raises:
        ValueError: An argument is wrong.
    """
    given = read_arguments(words, configs_folder())
    arguments = with_defaults(given, run="export", island="export", steps=1, hosts=1, data="same")
    with refusal_named():
        config = pyconfig.initialize([__file__, *arguments.as_words()])
    _, model = create_nnx_abstract_model(config, get_mesh_from_config(config))
    return VariableHolder(nnx.state(model))


def check_same(found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], run: Path) -> None:
    """Refuse a snapshot that does not have the parameters of MaxText's model.

    Args:
        found: Shapes of the snapshot by path, in the order of axes that MaxText stores.
        wanted: Shapes of the model by path.
        run: Folder of the run, for the message.

    Raises:
        ValueError: A parameter is missing, superfluous or of another shape.
    """
    for path in sorted(found.keys() | wanted.keys()):
        if found.get(path) != wanted.get(path):
            there, here = (shapes.get(path, "missing") for shapes in (found, wanted))
            raise ValueError(
                f"the snapshot of {run} is of another model: parameter '{path}' is {there} there and {here} in the "
                "model of these arguments; give the arguments that the run's islands got"
            )


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
        ValueError: The run has no snapshot, it is of another model, or an argument is wrong.
    """
    snapshots = complete(run / "checkpoints")
    if not snapshots:
        raise ValueError(
            f"{run} has no snapshot; set protocol.snapshot_every, or give the folder of a run that has one"
        )
    parameters, about = load_parameters(snapshots[0])
    model = model_of(words)
    stored = as_stored(parameters, {path: names for path, names in model.axes.items() if path in parameters})
    wanted = {path: tuple(value.shape) for path, value in model.params.items()}
    check_same({path: tuple(value.shape) for path, value in stored.items()}, wanted, run)
    # MaxText's trees of weights begin with the name of Flax's collection.
    save_params_to_path(str(folder.absolute()), {"params": nested(stored)})
    return int(about["global_step"])
