"""Results of configs/parity.yaml under other settings: one table of evaluation losses per grid.

Grids: outer (learning rate x momentum), adopt (overwrite, blend, rebase), merge (RDA against average), schedule (P
and H). Variants run one after the other; --seeds repeats all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping

from jobs import train
from rich.console import Console
from rich.table import Table

Overrides = Mapping[str, object]

GRIDS: dict[str, list[Overrides]] = {
    "outer": [
        {"outer.learning_rate": rate, "outer.momentum": momentum}
        for rate, momentum in ((0.4, 0.9), (0.7, 0.9), (0.9, 0.9), (0.7, 0.8), (1.0, 0.5), (0.7, 0.5), (1.0, 0.0))
    ],
    "adopt": [
        {"adopt.mode": "overwrite"},
        {"adopt.mode": "rebase"},
        {"adopt.mode": "blend", "adopt.alpha": 0.25},
        {"adopt.mode": "blend", "adopt.alpha": 0.5},
    ],
    "merge": [
        {"merge.method": "rda"},
        {"merge.method": "average"},
        {"merge.method": "average", "outer.learning_rate": 1.0},
    ],
    "schedule": [
        {"protocol.sync_every": 24, "protocol.num_fragments": 24},
        {"protocol.sync_every": 12, "protocol.num_fragments": 12},
        {"protocol.sync_every": 48, "protocol.num_fragments": 24},
        {"protocol.sync_every": 24, "protocol.num_fragments": 4},
        {"protocol.sync_every": 24, "protocol.num_fragments": 1},
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--grid", choices=sorted(GRIDS), nargs="+", default=sorted(GRIDS))
    parser.add_argument("--steps", type=int, default=600, help="global steps of every run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object per variant instead of tables")
    arguments, common = parser.parse_known_args()
    progress = Console(stderr=True)
    for grid in arguments.grid:
        table = Table("settings", "loss", "spread", "contributors", title=f"{grid}, {arguments.steps} steps")
        for variant in GRIDS[grid]:
            words = [word for key, value in variant.items() for word in (f"--{key}", value)]
            words += ["--train.eval_every", 0, "--train.steps", arguments.steps, *common]
            runs = [train("parity", "--seed", seed, *words) for seed in arguments.seeds]
            losses = [run["eval_loss"] for run in runs]
            name = ", ".join(f"{key.split('.')[1]} {value}" for key, value in variant.items())
            contributors = statistics.mean(run["contributors_per_round"] for run in runs)
            mean, spread = statistics.mean(losses), max(losses) - min(losses)
            progress.print(f"{grid}: {name}: {mean:.4f} ({contributors:.2f} contributors)", highlight=False)
            table.add_row(name, f"{mean:.4f}", f"{spread:.4f}", f"{contributors:.2f}")
            if arguments.json:
                result = {"name": f"sweep {grid}: {name}", "value": mean, "unit": "evaluation loss, nats per byte"}
                result |= {"low": min(losses), "high": max(losses), "runs": len(losses), "contributors": contributors}
                sys.stdout.write(json.dumps(result) + "\n")
        if not arguments.json:
            Console().print(table)


if __name__ == "__main__":
    main()
