"""A rehearsal of a config for slices on this machine: ./scripts/rehearse [CONFIG] [--minutes 20] [--faults 40]."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from diloco_jax.runtime.records.files import SUMMARY_FILE, new_run_dir
from diloco_jax.runtime.records.signals import stop_on_signals
from diloco_jax.runtime.records.telemetry import read_object
from diloco_jax.settings.packed import find_config
from diloco_jax.settings.text import load
from diloco_jax.tools.chaos.driver import Driver
from diloco_jax.tools.chaos.ledger import table
from diloco_jax.tools.chaos.run import run_under
from rehearsal.cluster import Cluster
from rehearsal.faults import CARDS, Calamity, draw
from rehearsal.process import STEP_ENV
from rehearsal.services import Renewer, bucket
from rehearsal.shrink import changes, shrink

CONFIG = "configs/tpu/gemma_12b_4x_v5p.yaml"
TRACE = "Traceback (most recent call last)"
# Rounds close in this share of the minutes, because a start takes two minutes and a syncer's restart half a minute.
SHARE = 0.8
# Eight small programs share few cores, so threads within one product would cost more switches than they save.
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"


def main(arguments: Sequence[str] | None = None) -> int:
    """Rehearse, print, and return the exit status: 0 if an operator would have had nothing to do."""
    parser = argparse.ArgumentParser(prog="scripts/rehearse", description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", default=CONFIG, help=f"config for slices; default: {CONFIG}")
    parser.add_argument("--minutes", type=float, default=20.0, help="approximate length; default: 20")
    parser.add_argument("--faults", type=int, default=40, help="number of faults; default: 40")
    parser.add_argument("--kinds", default=",".join(CARDS), help="kinds of faults, separated by commas; default: all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the schedule; default: 0")
    parser.add_argument("--step-s", type=float, default=0.7, help="least seconds of an inner step; default: 0.7")
    parser.add_argument("--out", type=Path, help="folder; default: a new one, runs/rehearsal")
    parser.add_argument("--json", action="store_true", help="print one JSON object, and all other lines on stderr")
    options = parser.parse_args(arguments)
    root = (options.out or new_run_dir(Path("runs"), "rehearsal")).absolute()
    say = partial(print, file=sys.stderr if options.json else sys.stdout, flush=True)
    try:
        whole = load(find_config(options.config))
        config = shrink(whole, int(SHARE * options.minutes * 60 / options.step_s), root)
        schedule = draw(options.seed, config, options.faults, options.minutes, options.kinds)
        root.mkdir(parents=True)
    except (OSError, ValueError, KeyError) as error:
        parser.error(str(error))
    say(
        "\n  ".join(
            [f"{options.config} with these changes, and all other settings unchanged:", *changes(whole, config)]
        )
    )
    say(f"folder {root}, {config.train.steps} steps, {options.faults} faults")
    renewer, stop = Renewer(root / "certs", config.islands.names), stop_on_signals()
    with bucket(root) as found:
        kept = {name: str(root / "cache") for name in ("JAX_COMPILATION_CACHE_DIR", "NUMBA_CACHE_DIR", "DILOCO_CACHE")}
        kept[STEP_ENV] = str(options.step_s)
        kept["XLA_FLAGS"] = ONE_THREAD
        began_s, run_dir = time.monotonic(), root / "run"
        with closing(Cluster(config, root, say, stop, found | kept)) as cluster:
            calamity = Calamity(config, run_dir, cluster, renewer)
            steps, silence_s = config.planned_steps, config.protocol.silence_s
            driver = Driver(schedule, config.islands.names, steps, silence_s, run_dir, cluster, calamity, say)
            result = run_under(driver, cluster, config, run_dir, say, stop)
    result |= {"minutes": round((time.monotonic() - began_s) / 60, 1), "seed": options.seed, "folder": str(root)}
    summary = root / "run" / SUMMARY_FILE
    result["alarms"] = read_object(summary).get("alarms", []) if summary.exists() else []
    result["needed"] = [*result["problems"], *renewer.failures, *cluster.given_up()]
    # A stack trace alone needs no operator: a process that ended with another one prints it, and is restarted.
    result["stack_traces"] = sum(path.read_text(errors="replace").count(TRACE) for path in (root / "logs").iterdir())
    say(table(result))
    warned = "; ".join(each["text"] for each in result["alarms"]) or "none"
    say(f"{result['minutes']} minutes, {result['stack_traces']} stack traces, alarms: {warned}")
    say("\n".join(f"AN OPERATOR WOULD HAVE HAD TO  {each}" for each in result["needed"]) or "nothing was left to do")
    if options.json:
        print(json.dumps(result))
    return 1 if result["needed"] or result["skipped"] else 0


if __name__ == "__main__":
    sys.exit(main())
