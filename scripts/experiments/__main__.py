"""Repeat one claim of the paper: recorded jobs are not run again, and interrupted jobs resume."""

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

# Exit status after --max-minutes; the same command resumes.
NOT_DONE = 3


def parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    made = argparse.ArgumentParser(prog="scripts/experiments/run", description=__doc__)
    made.add_argument("name", nargs="?", choices=names(), metavar="NAME", help=", ".join(names()))
    made.add_argument("--seeds", type=int, nargs="+", default=[], help="default: the seeds of the experiment")
    made.add_argument("--arms", nargs="+", default=[], help="run only these arms")
    made.add_argument("--size", default="", help="one model in place of the experiment's, such as 35M; see sizes.yaml")
    made.add_argument("--tokens", type=float, default=0, help="budget in place of the experiment's")
    about = "try the machinery with a tiny model; the result is not evidence"
    made.add_argument("--quick", action="store_true", help=about)
    made.add_argument("--max-minutes", type=float, default=0, help="stop after this time; the same command resumes")
    made.add_argument("--plan", action="store_true", help="print the jobs and their expected times, run nothing")
    made.add_argument("--page", action="store_true", help="write the page again from the records, run nothing")
    made.add_argument("--index", action="store_true", help="write all pages and the table of all claims")
    made.add_argument("--out", type=Path, default=None, help="folder of pages and records; default: docs/results")
    made.add_argument("--work", type=Path, default=ROOT / "runs" / "experiments", help="folder of unfinished jobs")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; exit status 0: complete, 1: a job failed, 2: bad input, 3: jobs are left."""
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
        say("stopped; the same command resumes")
        return 130


def run(options: argparse.Namespace, out: Path, work: Path) -> int:
    """Run one experiment, or print its plan."""
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
                say(f"time is up before: {left}; the same command resumes")
                status = NOT_DONE
            finally:
                _pages(experiment.name, out, quick=options.quick)
            return status
    _pages(experiment.name, out, quick=options.quick)
    return status


def _pages(name: str, out: Path, *, quick: bool) -> None:
    """Write the pages from the present records."""
    written = page.write(load(name), out, quick=quick)
    if not quick:
        page.write_all(out)
    say(str(written))


if __name__ == "__main__":
    sys.exit(main())
