"""Is the islands' global model as good as data parallel on the same tokens? Several seeds, both sides interleaved.

For every seed: configs/parity.yaml, then the baseline, configs/data_parallel.yaml, with as many steps as make the
number of tokens that the islands really trained on. `value` is the mean of the seeds' relative differences of
evaluation loss; below 0 the islands win.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys

from jobs import ROOT, train
from rich.console import Console
from rich.table import Table

from diloco_jax.settings.text import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="global steps; default: those of the config")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments, overrides = parser.parse_known_args()
    console = Console(stderr=True)
    shape = load(ROOT / "configs" / "data_parallel.yaml", overrides).train
    rows = []
    for seed in arguments.seeds:
        common = ["--seed", seed, "--train.eval_every", 0, *overrides]
        steps = ["--train.steps", arguments.steps] if arguments.steps else []
        islands = train("parity", *common, *steps)
        baseline_steps = round(islands["tokens"] / (shape.batch_size * shape.seq_len))
        baseline = train("data_parallel", *common, "--train.steps", baseline_steps)
        rows.append({"seed": seed, "islands": islands, "baseline": baseline})
        console.print(
            f"seed {seed}: islands {islands['eval_loss']:.4f} ({islands['tokens']:,} tokens, "
            f"{islands['contributors_per_round']:.2f} contributors, {islands['wall_s']:.0f} s), "
            f"data parallel {baseline['eval_loss']:.4f} ({baseline['tokens']:,} tokens, {baseline['wall_s']:.0f} s)"
        )
    ours = [row["islands"]["eval_loss"] for row in rows]
    theirs = [row["baseline"]["eval_loss"] for row in rows]
    differences = [a / b - 1 for a, b in zip(ours, theirs, strict=True)]
    result = {
        "name": "parity",
        "value": statistics.mean(differences),
        "unit": "relative difference of evaluation loss, islands against data parallel",
        "low": min(differences),
        "high": max(differences),
        "runs": len(rows),
        "islands": ours,
        "data_parallel": theirs,
        "tokens": [row["islands"]["tokens"] for row in rows],
        "contributors_per_round": [row["islands"]["contributors_per_round"] for row in rows],
    }
    if arguments.json:
        sys.stdout.write(json.dumps(result) + "\n")
        return
    table = Table("", "mean", "lowest", "highest", title="evaluation loss, nats per byte")
    for name, values in (("islands", ours), ("data parallel", theirs)):
        table.add_row(name, f"{statistics.mean(values):.4f}", f"{min(values):.4f}", f"{max(values):.4f}")
    spread = (result["value"], result["low"], result["high"])
    table.add_row("difference", *(f"{100 * x:+.2f} %" for x in spread))
    Console().print(table)


if __name__ == "__main__":
    main()
