"""A rehearsal of a config for slices on this machine: ./scripts/rehearse [CONFIG] [--minutes 20] [--faults 40]."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from diloco_jax.runtime.records.files import new_run_dir
from diloco_jax.runtime.records.signals import stop_on_signals
from diloco_jax.settings.packed import find_config
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import load
from diloco_jax.tools.chaos.run import run_under
from diloco_jax.tools.chaos.verdict import table
from rehearsal.bucket import bucket
from rehearsal.certificates import Renewer
from rehearsal.cluster import Cluster
from rehearsal.faults import Calamity, RehearsalDriver, draw
from rehearsal.needs import needs, pace_s
from rehearsal.shrink import changes, shrink

CONFIG = "configs/tpu/gemma_12b_4x_v5p.yaml"
CALM_STEPS = 72  # of a run before, which tells how long a step takes here, and leaves the compiled programs


def main(arguments: Sequence[str] | None = None) -> int:
    """Rehearse, print, and return the exit status: 0 if nobody would have had to do anything."""
    options = _options().parse_args(arguments)
    root = (options.out or new_run_dir(Path("runs"), "rehearsal")).absolute()
    say = partial(print, file=sys.stderr if options.json else sys.stdout, flush=True)
    kinds = options.kinds.split(",") if options.kinds else ()
    try:
        whole = load(find_config(options.config))
        config = shrink(whole, CALM_STEPS, root)
        draw(options.seed, config, options.faults, options.minutes, kinds)
    except (OSError, ValueError) as error:
        _options().error(str(error))
    if root.exists():
        _options().error(f"{root} is there already; name another folder with --out")
    root.mkdir(parents=True)
    renewer = Renewer(root / "certs", config.islands.names)
    with bucket(root) as environment:
        programs = {"JAX_COMPILATION_CACHE_DIR": str(root / "programs"), "DILOCO_CACHE": str(root / "cache")}
        start = partial(Cluster, say=say, stop=stop_on_signals(), environment=environment | programs)
        step_s = options.step_s or _calm_step_s(start, config, root / "calm")
        config = shrink(whole, int(options.minutes * 60 / step_s), root)
        rules = changes(whole, config)
        say("\n".join([f"{options.config} with these changes, all else is as it says:", *(f"  {r}" for r in rules)]))
        schedule = draw(options.seed, config, options.faults, options.minutes, kinds)
        say(f"{config.train.steps} steps of {step_s:.2f} s, {len(schedule)} faults, seed {options.seed}, folder {root}")
        result = _rehearse(start, config, schedule, root, renewer, say)
    result = {"config": options.config, "seed": options.seed, "rules": rules, **result}
    say("\n".join([table(result), *_told(result)]))
    if options.json:
        print(json.dumps(result))
    return 1 if result["needed"] or result["skipped"] else 0


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/rehearse", description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", default=CONFIG, help=f"what would run on slices; default: {CONFIG}")
    parser.add_argument("--minutes", type=float, default=20.0, help="about how long; default: 20")
    parser.add_argument("--faults", type=int, default=40, help="how many; default: 40")
    parser.add_argument("--kinds", help="kinds of faults, separated by commas; default: all")
    parser.add_argument("--seed", type=int, default=0, help="of the schedule; default: 0")
    parser.add_argument("--step-s", type=float, help="seconds of a global step here; default: a calm run tells")
    parser.add_argument("--out", type=Path, help="folder; default: a new one, runs/rehearsal")
    parser.add_argument("--json", action="store_true", help="print one JSON object, and all else on stderr")
    return parser


def _calm_step_s(start: Callable[..., Cluster], config: RunConfig, root: Path) -> float:
    root.mkdir()
    cluster = start(replace(config, name="calm"), root)
    try:
        cluster.run()
    finally:
        cluster.close()
        cluster.unmount()
    return pace_s(root / "run")


def _rehearse(
    start: Callable[..., Cluster],
    config: RunConfig,
    schedule: Sequence[Any],
    root: Path,
    renewer: Renewer,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Run the config under the schedule, and judge."""
    cluster, began_s = start(config, root), time.monotonic()
    try:
        run_dir, islands, lease_s = root / "run", config.islands.names, config.protocol.lease_s
        calamity = Calamity(config, run_dir, cluster, renewer)
        driver = RehearsalDriver(
            config, schedule, islands, config.planned_steps, lease_s, run_dir, cluster, calamity, say=say
        )
        result = run_under(driver, cluster, config, run_dir, say, cluster.stop)
        renewer.close()
        wanted = needs(root, result, cluster.given_up, renewer.failures)
    finally:
        cluster.unmount()
    return {"folder": str(root), "minutes": round((time.monotonic() - began_s) / 60, 1), **result, **wanted}


def _told(result: Mapping[str, Any]) -> list[str]:
    lines = [f"{result['minutes']} minutes; alarms: {'; '.join(result['alarms']) or 'none'}", ""]
    lines += [f"AN OPERATOR WOULD HAVE HAD TO  {each}" for each in result["needed"]]
    return [*lines, *(() if result["needed"] else ("an operator would have had nothing to do",))]


if __name__ == "__main__":
    sys.exit(main())
