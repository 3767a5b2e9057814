"""How many small faults in the package the default tests find: ./scripts/check --mutants N --seed S

Draws N mutants of protocol, core, runtime and transport, notes in one run of the suite which tests reach each, and runs
these tests against it until one fails. Prints the survivors. `--tests CHECKOUT` takes the tests of another checkout, to
compare two states of the suite on the same mutants; `--only FILE` takes the mutants of an earlier result that survived.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT)]

from mutants.draw import Mutant, draw  # noqa: E402
from mutants.judge import copy_tree, killed_by, reaching  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw mutants, run their tests, print survivors, and return 0: survivors are a finding, no failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=60, metavar="N", help="number of mutants (60)")
    parser.add_argument("--seed", type=int, default=0, help="seed that draws them (0)")
    parser.add_argument("--tests", type=Path, default=ROOT, metavar="CHECKOUT", help="checkout whose tests run")
    parser.add_argument("--only", type=Path, metavar="FILE", help="earlier result: only its survivors")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutants" / "result.json", help="result file")
    options = parser.parse_args(arguments)
    mutants = draw(ROOT, options.mutants, options.seed)
    if options.only is not None:
        kept = {row["mutant"] for row in json.loads(options.only.read_text())["mutants"] if not row["killed_by"]}
        mutants = [mutant for mutant in mutants if str(mutant) in kept]
    rows = judge(mutants, options.tests.resolve(), ROOT / "build" / "mutants")
    survivors = [row for row in rows if not row["killed_by"]]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"seed": options.seed, "mutants": rows}, indent=1))
    for row in survivors:
        print(f"survives {row['tests']:5d} tests: {row['mutant']}")
    print(f"{len(rows) - len(survivors)} of {len(rows)} mutants killed (seed {options.seed}); {options.out}")
    return 0


def judge(mutants: Sequence[Mutant], tests: Path, folder: Path) -> list[dict[str, object]]:
    """Return one row per mutant: the test that kills it, the number of tests that reach it, and seconds."""
    begun_s = time.monotonic()
    reached, seconds = reaching(copy_tree(ROOT, tests, folder / "noted"), mutants, folder / "notes.txt")
    print(f"{len(seconds)} tests pass, noted in {time.monotonic() - begun_s:.0f} s", flush=True)
    trees: SimpleQueue[Path] = SimpleQueue()
    workers = min(2, os.cpu_count() or 1)
    for number in range(workers):
        trees.put(copy_tree(ROOT, tests, folder / f"tree-{number}"))

    def one(number: int) -> dict[str, object]:
        tree, begun_s = trees.get(), time.monotonic()
        try:
            chosen = sorted(reached[number], key=lambda test: (seconds[test], test))
            killer = killed_by(tree, mutants[number], chosen, seconds)
        finally:
            trees.put(tree)
        row = {"mutant": str(mutants[number]), "killed_by": killer, "tests": len(chosen)}
        print(f"{time.monotonic() - begun_s:6.1f} s  {killer or 'SURVIVES'}  <-  {mutants[number]}", flush=True)
        return row

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(one, range(len(mutants))))


if __name__ == "__main__":
    sys.exit(main())
