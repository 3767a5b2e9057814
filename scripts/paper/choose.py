"""Choose the number of learners, and draw goodput, from the output of `diloco simulate --json`.

diloco simulate --chips 1.2m --fast --json > goodput.json
./scripts/paper/choose goodput.json [--penalty scavenging] [--plot goodput.svg] [--json]
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from diloco_jax.sim.goodput.methods import Row
from diloco_jax.sim.goodput.settings import number
from paper.choice import as_dict, choose, describe
from paper.penalty import PENALTIES
from paper.plot import drawing


def read_rows(text: str) -> list[Row]:
    """Read the rows of a simulation.

    Raises:
        ValueError: the text is not an output of `diloco simulate --json`.
    """
    try:
        return [Row(**{name: row[name] for name in Row._fields}) for row in json.loads(text)["rows"]]
    except (ValueError, KeyError, TypeError):
        raise ValueError("the file is not an output of `diloco simulate --json`; give a file with its output") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the choice for each number of chips, draw goodput with --plot, and return the exit status."""
    parser = argparse.ArgumentParser(prog="scripts/paper/choose", description=__doc__.splitlines()[0])
    parser.add_argument("goodput", type=Path, help="file with the output of `diloco simulate --json`")
    parser.add_argument("--penalty", default="scavenging", help=f"{', '.join(PENALTIES)}; default: scavenging")
    parser.add_argument(
        "--parameters", default="5g", help="parameters of the model, for --penalty scaling-laws; default: 5g"
    )
    about = "relative fall of the loss per relative growth of the compute; default: the penalty's"
    parser.add_argument("--loss-slope", type=float, help=about)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write goodput against chips to this SVG file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    try:
        rows = read_rows(options.goodput.read_text(encoding="utf-8"))
        parameters = number(options.parameters, "--parameters")
        choices = choose(rows, options.penalty, parameters=parameters, slope=options.loss_slope)
        if options.plot is not None:
            options.plot.write_text(drawing(rows), encoding="utf-8")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    chosen = [as_dict(choice) for choice in choices]
    print(json.dumps({"choice": chosen}) if options.json else "\n\n".join(map(describe, choices)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
