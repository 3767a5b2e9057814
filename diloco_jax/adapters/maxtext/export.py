"""The command that writes the global model of a run as a checkpoint of parameters that MaxText loads.

    python -m diloco_jax.maxtext.export RUN FOLDER base.yml key=value ...

The arguments of MaxText describe the model. The command prints how MaxText trains on from the checkpoint, and how it
evaluates it.
"""

import argparse
import sys
from pathlib import Path

from diloco_jax.adapters.maxtext.arguments import own_command, read_arguments
from diloco_jax.adapters.maxtext.command import configs_folder
from diloco_jax.runtime.records.signals import WRONG_INPUT


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m diloco_jax.maxtext.export", description="Write the newest snapshot of a run for MaxText."
    )
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("folder", type=Path, help="folder for MaxText's checkpoint")
    parser.add_argument(
        "words", nargs="*", metavar="base.yml key=value", help="arguments of MaxText for the run's model"
    )
    options = parser.parse_args()
    try:
        if options.folder.exists() and (not options.folder.is_dir() or any(options.folder.iterdir())):
            raise ValueError(f"{options.folder} exists and is not an empty folder; name another one, or remove it")
        given = read_arguments(options.words, configs_folder())
        # The import takes half a minute.
        from diloco_jax.adapters.maxtext.snapshot import export

        step = export(options.run, options.folder, options.words)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return WRONG_INPUT
    sys.stdout.write(
        f"{options.folder.absolute()}: global model of step {step}. MaxText trains on from it, and evaluates it:\n"
        f"{own_command(given, options.folder)}\n{own_command(given, options.folder, evaluates=True)}\n"
    )
    return 0
