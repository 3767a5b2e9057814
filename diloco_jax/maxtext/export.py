"""The global model of a run as a checkpoint of parameters that MaxText loads.

python -m diloco_jax.maxtext.export RUN FOLDER
python -m maxtext.trainers.pre_train.train base.yml load_parameters_path=FOLDER/items ...
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from maxtext.common.checkpointing import save_params_to_path

from diloco_jax.runtime.records.checkpoint import complete, load_parameters
from diloco_jax.runtime.records.signals import WRONG_INPUT


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


def export(run: Path, folder: Path) -> int:
    """Write the newest snapshot of a run for MaxText; return its global step.

    Raises:
        ValueError: The run has no snapshot.
    """
    snapshots = complete(run / "checkpoints")
    if not snapshots:
        raise ValueError(
            f"{run} has no snapshot; set protocol.snapshot_every, or give the folder of a run that has one"
        )
    parameters, about = load_parameters(snapshots[0])
    # MaxText's trees of weights begin with the name of Flax's collection.
    save_params_to_path(str(folder.absolute()), {"params": nested(parameters)})
    return int(about["global_step"])


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m diloco_jax.maxtext.export", description=export.__doc__)
    parser.add_argument("run", type=Path, help="folder of the run, or of a copy of its snapshots")
    parser.add_argument("folder", type=Path, help="folder for MaxText's checkpoint")
    options = parser.parse_args()
    try:
        step = export(options.run, options.folder)
    except ValueError as error:
        print(error, file=sys.stderr)
        return WRONG_INPUT
    print(f"{options.folder}: global model of step {step}; use load_parameters_path={options.folder}/items")
    return 0


if __name__ == "__main__":
    sys.exit(main())
