"""The command `python -m diloco_jax.maxtext`."""

import argparse
import sys

try:
    from diloco_jax.maxtext.launch import run
except ModuleNotFoundError as missing:
    if (missing.name or "").split(".")[0] in ("diloco_jax",):
        raise
    print(
        f"{missing}: install MaxText beside diloco-jax in an environment of Python 3.12 or newer "
        "(pip install 'maxtext[tpu]' diloco-jax; docs/maxtext.md)",
        file=sys.stderr,
    )
    raise SystemExit(2) from None


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m diloco_jax.maxtext",
        description="Train with MaxText as an island of a run. Options of the island start with two dashes, "
        "all other words are arguments of MaxText.",
    )
    parser.add_argument("--syncer", help="host:port of the syncer (default: DILOCO_SYNCER)")
    parser.add_argument("--name", help="name of the island (default: DILOCO_ISLAND)")
    parser.add_argument("--run-dir", help="folder for tapes and saved states (default: DILOCO_RUN_DIR)")
    parser.add_argument("--data", choices=("seed", "shard", "leased", "same"), default="seed", help="what the island reads")
    parser.add_argument("--shard", default="0/1", help="part of the data, for --data shard, such as 0/2")
    parser.add_argument("words", nargs="*", metavar="base.yml key=value", help="arguments of MaxText")
    options = parser.parse_intermixed_args()
    index, _, count = options.shard.partition("/")
    shard = (int(index), int(count))
    try:
        run(options.words, options.syncer, name=options.name, data=options.data, shard=shard, run_dir=options.run_dir)
    except (ValueError, ConnectionError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
