"""The command line of `python -m diloco_jax.maxtext`."""

import argparse
import sys
import traceback

from diloco_jax.adapters.maxtext.arguments import DATA, read_arguments
from diloco_jax.adapters.maxtext.command import configs_folder
from diloco_jax.runtime.own_loop.environment import place_of
from diloco_jax.runtime.records.signals import FAILED, WRONG_INPUT


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m diloco_jax.maxtext",
        description="Train with MaxText as an island of a run. Options with two dashes are for the island; all other "
        "arguments go to MaxText.",
    )
    parser.add_argument("--syncer", help="host:port of the syncer (default: DILOCO_SYNCER)")
    parser.add_argument("--name", help="name of the island (default: DILOCO_ISLAND)")
    parser.add_argument("--run-dir", help="folder for tapes and saved states (default: DILOCO_RUN_DIR)")
    parser.add_argument("--data", choices=DATA, default=DATA[0], help="what the island reads (default: %(default)s)")
    parser.add_argument("words", nargs="*", metavar="base.yml key=value", help="arguments of MaxText")
    options = parser.parse_intermixed_args()
    try:
        read_arguments(options.words, configs_folder())
        place_of(options.syncer, options.name)
        # The import takes half a minute.
        from diloco_jax.adapters.maxtext.launch import run

        run(options.words, options.syncer, name=options.name, data=options.data, run_dir=options.run_dir)
    except (ValueError, ConnectionError, RuntimeError) as error:
        if not _is_ours(error):
            raise
        sys.stderr.write(f"{error}\n")
        return WRONG_INPUT if isinstance(error, ValueError) else FAILED
    return 0


def _is_ours(error: BaseException) -> bool:
    """Tell whether this package raised the error with a message for people, and not MaxText or JAX."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return "diloco_jax" in last.filename
