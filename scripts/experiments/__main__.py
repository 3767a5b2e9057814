"""One claim of the paper, repeated: what is on record is not run again, what was cut short goes on."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments import page
from experiments.plan import Choice
from experiments.records import read
from experiments.runner import Runner, TimeIsUp, alone, describe, say
from experiments.spec import ROOT, load, names
from experiments.text import make_text
from experiments.ways import JobFailed

NOT_DONE = 3  # exit status: the same command goes on


def parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    made = argparse.ArgumentParser(prog="scripts/experiments/run", description=__doc__)
    made.add_argument("name", nargs="?", choices=names(), metavar="NAME", help=", ".join(names()))
    made.add_argument("--seeds", type=int, nargs="+", default=[], help="default: those of the experiment")
    made.add_argument("--arms", nargs="+", default=[], help="only these")
    made.add_argument("--size", default="", help="one model in place of the experiment's, such as 35M; see sizes.yaml")
    made.add_argument("--tokens", type=float, default=0, help="another budget than the experiment's")
    made.add_argument("--quick", action="store_true", help="a tiny model: does the machinery work? No evidence")
    made.add_argument("--max-minutes", type=float, default=0, help="stop after so long; the same command goes on")
    made.add_argument("--plan", action="store_true", help="print the jobs and what they take, run nothing")
    made.add_argument("--page", action="store_true", help="write the page again from the records, run nothing")
    made.add_argument("--index", action="store_true", help="write all pages and the table of all claims")
    made.add_argument("--out", type=Path, default=None, help="folder of pages and records; default: docs/results")
    made.add_argument("--work", type=Path, default=ROOT / "runs" / "experiments", help="folder of what is under way")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status is 0: all done, 1: a job failed, 2: bad input, 3: something is left."""
    options = parser().parse_args(arguments)
    work = options.work.resolve() / ("quick" if options.quick else "")
    out = (options.out or (work if options.quick else ROOT / "docs" / "results")).resolve()
    try:
        if options.index:
            for name in names():
                page.write(load(name), out)
            say(f"{page.write_all(out)}")
            return 0
        if options.name is None:
            raise ValueError(f"name an experiment: {', '.join(names())}")
        return run(options, out, work)
    except ValueError as error:
        parser().error(str(error))
    except JobFailed as error:
        say(f"failed: {error}")
        return 1
    except KeyboardInterrupt:
        say("stopped; the same command goes on")
        return 130


def run(options: argparse.Namespace, out: Path, work: Path) -> int:
    """Run, or show, one experiment."""
    experiment = load(options.name)
    choice = Choice(
        seeds=tuple(options.seeds),
        arms=tuple(options.arms),
        size=options.size,
        tokens=options.tokens,
        quick=options.quick,
    )
    records = out / page.RECORDS / f"{experiment.name}.jsonl"
    if options.plan:
        print(describe(experiment, choice, read(records)))
        return 0
    status = 0
    if not options.page:
        if experiment.waits or experiment.untestable:
            say(f"{experiment.name} cannot run: {experiment.waits or experiment.untestable}")
        else:
            try:
                with alone(work, experiment.name) as lock:
                    make_text(experiment, choice, work)
                    Runner(experiment, choice, work, records, lock, options.max_minutes).run()
            except TimeIsUp as left:
                say(f"time is up before: {left}; the same command goes on")
                status = NOT_DONE
            finally:
                _pages(experiment.name, out, quick=options.quick)
            return status
    _pages(experiment.name, out, quick=options.quick)
    return status


def _pages(name: str, out: Path, *, quick: bool) -> None:
    """Write what the records say by now."""
    written = page.write(load(name), out, quick=quick)
    if not quick:
        page.write_all(out)
    say(str(written))


if __name__ == "__main__":
    sys.exit(main())
