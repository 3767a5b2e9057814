"""The paper's tables beside our figures: ./scripts/paper/tables table1|table5|table13|day|scale [--seed 0] [--json].

Further arguments are settings of the simulation, as for `diloco simulate`: --hardware.step-s 1.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from diloco_jax.sim.goodput.simulate import read_shared, run_cells
from paper import table13
from paper.goodput import TABLES, Settings


def simulate(table: str, settings: Settings, workers: int | None = None) -> tuple[dict[str, Any], str]:
    """Simulate the cells of a table, and return the object of `--json` and the table as text."""
    which = TABLES[table]
    cells = which.cells(settings)
    results = run_cells(cells, which.workers if workers is None else workers, _say)
    rows = [result.row._asdict() | {"hours": result.cell.hours} for result in results]
    return {"rows": rows, "seed": settings["seed"], **which.facts(results)}, which.describe(results)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compute one table, print it, and return the exit status."""
    parser = argparse.ArgumentParser(prog="scripts/paper/tables", description=__doc__.splitlines()[0])
    parser.add_argument("table", choices=(*TABLES, "table13"))
    parser.add_argument("--hours", type=float, help="simulated time; default: the time that the table needs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, help="processes; default: one on each core, one for day and scale")
    parser.add_argument("--fast", action="store_true", help="do not run the protocol's machines")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options, overrides = parser.parse_known_args(arguments)
    began_s = time.monotonic()
    try:
        if options.table == "table13":
            result, text = {"rows": table13.rows()}, table13.describe()
        else:
            settings = read_shared(overrides, seed=options.seed, fast=options.fast, hours=options.hours)
            result, text = simulate(options.table, settings, options.workers)
    except ValueError as error:
        parser.error(str(error))
    print(json.dumps(result) if options.json else f"{text}\n{time.monotonic() - began_s:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
