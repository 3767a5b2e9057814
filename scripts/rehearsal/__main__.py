"""A rehearsal of a config for slices on this machine: ./scripts/rehearse [CONFIG] [--minutes 20] [--faults 40]."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from diloco_jax.runtime.records.files import new_run_dir
from diloco_jax.runtime.records.signals import stop_on_signals
from diloco_jax.settings.packed import find_config
from diloco_jax.settings.text import load
from diloco_jax.tools.chaos.run import run_under
from diloco_jax.tools.chaos.verdict import table
from rehearsal.bucket import bucket
from rehearsal.certificates import Renewer
from rehearsal.cluster import Cluster
from rehearsal.faults import Calamity, RehearsalDriver, draw
from rehearsal.needs import needs
from rehearsal.shrink import shrink

CONFIG = "configs/tpu/gemma_12b_4x_v5p.yaml"


def main(arguments: Sequence[str] | None = None) -> int:
    """Rehearse, print, and return the exit status: 0 if nobody would have had to do anything."""
    parser = argparse.ArgumentParser(prog="scripts/rehearse", description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", default=CONFIG, help=f"what would run on slices; default: {CONFIG}")
    parser.add_argument("--minutes", type=float, default=20.0, help="about how long; default: 20")
    parser.add_argument("--faults", type=int, default=40, help="how many; default: 40")
    parser.add_argument("--seed", type=int, default=0, help="of the schedule; default: 0")
    parser.add_argument("--step-s", type=float, default=0.5, help="seconds that a global step takes here; default: 0.5")
    parser.add_argument("--out", type=Path, help="folder; default: a new one, runs/rehearsal")
    parser.add_argument("--dry-run", action="store_true", help="print rules and schedule, and exit")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    root = (options.out or new_run_dir(Path("runs"), "rehearsal")).absolute()
    say = partial(print, file=sys.stderr if options.json else sys.stdout, flush=True)
    try:
        config, rules = shrink(load(find_config(options.config)), int(options.minutes * 60 / options.step_s), root)
        schedule = draw(options.seed, config, options.faults, options.minutes)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    say("\n".join([f"{options.config}, shrunk by these rules; all else is as it says:", *(f"  {r}" for r in rules)]))
    if options.dry_run:
        say("\n".join(map(str, schedule)))
        return 0
    root.mkdir(parents=True)
    stop = stop_on_signals()
    renewer = Renewer(root / "certs", config.islands.names)
    with bucket(root) as environment:
        programs = {"JAX_COMPILATION_CACHE_DIR": str(root / "programs"), "DILOCO_CACHE": str(root / "cache")}
        cluster = Cluster(config, root, say, stop, environment | programs)
        try:
            calamity = Calamity(config, root / "run", cluster, renewer)
            islands, lease_s = config.islands.names, config.protocol.lease_s
            driver = RehearsalDriver(
                config, schedule, islands, config.planned_steps, lease_s, root / "run", cluster, calamity, say=say
            )
            say(f"folder {root}, {len(schedule)} faults, seed {options.seed}")
            result = run_under(driver, cluster, config, root / "run", say, stop)
            renewer.close()
            wanted = needs(root, result, cluster.given_up, renewer.failures)
        finally:
            _unmount(cluster, root)
    result = {"folder": str(root), "config": options.config, "seed": options.seed, "rules": rules, **result, **wanted}
    say(json.dumps(result) if options.json else "\n".join([table(result), *_told(wanted)]))
    return 1 if result["needed"] or result["skipped"] else 0


def _told(wanted: Mapping[str, Any]) -> list[str]:
    lines = [f"alarms                {'; '.join(wanted['alarms']) or 'none'}", ""]
    lines += [f"AN OPERATOR WOULD HAVE HAD TO  {each}" for each in wanted["needed"]]
    return [*lines, *(() if wanted["needed"] else ("an operator would have had nothing to do",))]


def _unmount(cluster: Cluster, root: Path) -> None:
    """Keep what the volume holds in the folder, and give the memory back."""
    if not cluster.mounted:
        return
    kept = root / "kept"
    subprocess.run(["cp", "-a", str(cluster.volumes), str(kept)], check=False)
    subprocess.run(["umount", "-l", str(cluster.volumes)], check=False)
    cluster.volumes.rmdir()
    kept.rename(cluster.volumes)


if __name__ == "__main__":
    sys.exit(main())
