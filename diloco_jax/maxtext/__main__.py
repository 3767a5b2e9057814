"""The command `python -m diloco_jax.maxtext`."""

import argparse
import importlib.util
import sys
import traceback

from diloco_jax.runtime.records.signals import FAILED, WRONG_INPUT

if importlib.util.find_spec("maxtext") is None:
    sys.stderr.write(
        "MaxText is not installed here: install maxtext and diloco_jax into one environment of Python 3.12 or newer "
        "(docs/maxtext.md)\n"
    )
    raise SystemExit(WRONG_INPUT)

from diloco_jax.maxtext.arguments import DATA
from diloco_jax.maxtext.launch import run


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


if __name__ == "__main__":
    sys.exit(main())
