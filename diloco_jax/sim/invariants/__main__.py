"""`./scripts/sweep`: rerun a seed and read it, sweep over seeds, measure the speed."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.engine import NEVER_S
from diloco_jax.sim.invariants.draw import random_scenario, with_norms
from diloco_jax.sim.invariants.verdict import Timeline, judge
from diloco_jax.sim.scenario import Scenario

BENCH_RUNS = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 when a rule was broken."""
    parser = argparse.ArgumentParser(prog="./scripts/sweep", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="random settings and faults are drawn from it")
    parser.add_argument("--count", type=int, default=1, help="so many seeds from --seed on, one line each")
    parser.add_argument("--hostile", action="store_true", help="each run has a learner that says anything")
    parser.add_argument("--norms", action="store_true", help="draw norms of the learners' values, and outliers")
    parser.add_argument("--tapes", type=Path, metavar="DIR", help="write the run's tapes there, for `diloco replay`")
    parser.add_argument("--quiet", action="store_true", help="print the verdict only")
    parser.add_argument("--bench", action="store_true", help="measure events per second without faults and checkers")
    parser.add_argument("--learners", type=int, default=8, help="for --bench")
    parser.add_argument("--steps", type=int, default=3000, help="global steps, for --bench")
    options = parser.parse_args(arguments)
    if options.bench:
        return _bench(options.learners, options.steps)
    if options.count > 1:
        return _sweep(range(options.seed, options.seed + options.count), options.hostile, options.norms)
    try:
        scenario = _drawn(options.seed, options.hostile, options.norms)
        return _show(scenario, quiet=options.quiet, tapes=options.tapes)
    except (OSError, ValueError) as error:
        parser.error(str(error))


def _drawn(seed: int, hostile: bool, norms: bool) -> Scenario:
    scenario = random_scenario(seed, hostile=hostile)
    return with_norms(scenario) if norms else scenario


def _show(scenario: Scenario, *, quiet: bool, tapes: Path | None) -> int:
    timeline = Timeline()
    verdict = judge(scenario, observers=[timeline], tapes=tapes)
    if not quiet:
        print(scenario.config)
        print(scenario.network)
        print(f"{scenario.learners} learners, {scenario.total_steps} global steps, {len(scenario.faults)} faults")
        print("\n".join(timeline.lines))
    print(verdict)
    return 1 if verdict.problem else 0


def _sweep(seeds: range, hostile: bool, norms: bool) -> int:
    failed = 0
    for seed in seeds:
        verdict = judge(_drawn(seed, hostile, norms))
        failed += bool(verdict.problem)
        print(verdict, flush=True)
    print(f"{len(seeds)} seeds, {failed} failed")
    return 1 if failed else 0


def _bench(learners: int, steps: int) -> int:
    """Print the middle one of several runs, and what they span."""
    scenario = Scenario(learners=learners, total_steps=steps, config=ProtocolConfig())
    speeds = sorted(events_per_s(scenario) for _ in range(BENCH_RUNS))
    print(
        f"{speeds[BENCH_RUNS // 2]:.0f} events/s of CPU time ({speeds[0]:.0f} to {speeds[-1]:.0f} in {BENCH_RUNS} "
        f"runs), {learners} learners, {steps} global steps"
    )
    return 0


def events_per_s(scenario: Scenario) -> float:
    """Simulate the scenario once; seconds are of this process's CPU time, so others on the machine do not count."""
    cluster = Cluster(scenario, taped=False)
    began_s = time.process_time()
    cluster.run(NEVER_S)
    return cluster.engine.events / (time.process_time() - began_s)


if __name__ == "__main__":
    sys.exit(main())
