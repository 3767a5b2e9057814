"""Does rounding on the wire cost quality? The same schedule, data and seeds with every format, so that only it differs.

A simulated run without faults gives the schedule: who made which step when, whose values were merged, what was adopted
after which step. `diloco replay` then trains configs/parity.yaml on real data as the tapes say, once per format and
seed. `value` is the mean over the seeds of the relative difference of evaluation loss; below 0 the format wins.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from invariants.verdict import judge
from jobs import JOB_TIMEOUT_S, ROOT
from rich.console import Console

from diloco_jax.settings.text import load
from diloco_jax.sim.scenario import Scenario

BASELINE = "float32"


def trained(config: dict[str, Any], tapes: Path, seed: int, format: str, folder: Path) -> float:
    """The evaluation loss after training as the tapes say.

    Raises:
        SystemExit: the replay failed; its message is on standard error.
    """
    folder.mkdir()
    path = folder / "config.yaml"
    settings = {"seed": seed, "trackers": [], "wire": {"up": format, "down": format}}
    path.write_text(yaml.safe_dump(config | settings), encoding="utf-8")
    command = [sys.executable, "-m", "diloco_jax", "replay", str(tapes), "--config", str(path)]
    command += ["--out", str(folder / "out"), "--json"]
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=JOB_TIMEOUT_S)
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with status {result.returncode}")
    loss: float = json.loads(result.stdout.splitlines()[-1])["eval_loss"]
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "parity.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1000, help="global steps")
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--format", default="int4", choices=("bfloat16", "int8", "int4"), help="of both directions")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    console = Console(stderr=True)
    config: dict[str, Any] = yaml.safe_load(options.config.read_text(encoding="utf-8"))
    protocol = load(options.config).protocol
    rows = []
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as folder:
        work = Path(folder)
        for seed in options.seeds:
            tapes = work / f"tapes-{seed}"
            scenario = Scenario(config=protocol, learners=options.learners, total_steps=options.steps, seed=seed)
            verdict = judge(scenario, tapes=tapes)
            if verdict.problem:
                raise SystemExit(f"the schedule breaks a rule of the protocol: {verdict}")
            losses = {
                format: trained(config, tapes, seed, format, work / f"{format}-{seed}")
                for format in (BASELINE, options.format)
            }
            rows.append(losses)
            console.print(f"seed {seed}: " + ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items()))
    differences = [row[options.format] / row[BASELINE] - 1 for row in rows]
    result = {
        "name": "wire",
        "value": statistics.mean(differences),
        "unit": f"relative difference of evaluation loss, {options.format} both ways against {BASELINE}",
        "low": min(differences),
        "high": max(differences),
        "runs": len(rows),
        "losses": rows,
        "steps": options.steps,
    }
    if options.json:
        sys.stdout.write(json.dumps(result) + "\n")
        return
    spread = (result["value"], result["low"], result["high"])
    Console().print(" ".join(f"{100 * x:+.2f} %" for x in spread) + f"  {result['unit']} (mean, lowest, highest)")


if __name__ == "__main__":
    main()
