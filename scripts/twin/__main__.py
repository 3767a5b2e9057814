"""The simulator beside a real chaos run: ./scripts/twin/compare RUN --calibrate CALM KILLS [--seeds 5] [--json].

Settings come from the run's config.yaml, faults and times from its records.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from diloco_jax.runtime.records.files import CONFIG_FILE
from diloco_jax.settings.text import load
from twin.like import compare, describe
from twin.real_run import RealRun, RunSettings, read_run


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print, and return the exit status."""
    parser = argparse.ArgumentParser(prog="scripts/twin/compare", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a run of `diloco chaos`: its faults are simulated")
    parser.add_argument(
        "--calibrate",
        nargs="+",
        type=Path,
        required=True,
        metavar="RUN",
        help="runs of the same config that tell how long things take: one without faults, then one with kills",
    )
    parser.add_argument("--seeds", type=int, default=5, help="simulated runs of each kind; default: 5")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    try:
        result = compare(_read(options.run), [_read(folder) for folder in options.calibrate], options.seeds)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(json.dumps({"run": str(options.run), **result}) if options.json else describe(result))
    return 0


def _read(folder: Path) -> RealRun:
    if not (folder / CONFIG_FILE).exists():
        raise ValueError(f"{folder} has no {CONFIG_FILE}; name the folder of a run that has ended")
    config = load(folder / CONFIG_FILE)
    settings = RunSettings(
        protocol=config.protocol,
        names=config.islands.names,
        total_steps=config.planned_steps,
        restart_delay_s=config.islands.restart_delay_s,
        syncer_restart_delay_s=config.syncer.restart_delay_s,
        connect_timeout_s=config.transport.connect_timeout_s,
    )
    return read_run(folder, settings)


if __name__ == "__main__":
    sys.exit(main())
