"""A job without training for tests of the runner: `python -m experiments.tests.slow_job FOLDER`.

The job records its start and ends; the job of one seed first waits for a file. `python -m experiments.tests.slow_job
--runner WORK [MINUTES]` runs three of these jobs one after another.
"""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from experiments import ways
from experiments.plan import Choice, Job
from experiments.runner import Runner, TimeIsUp, alone
from experiments.tests.made import EXPERIMENT

# The job of this seed waits for the file `go`.
HELD = 1


def job(folder: Path) -> None:
    """Wait for the file `go` if this is the second seed, then write a result."""
    work, seed = folder.parents[1], int((folder / "seed").read_text())
    with (work / "starts").open("a") as starts:
        starts.write(f"{seed} {os.getpid()}\n")
    try:
        while seed == HELD and not (work / "go").exists():
            time.sleep(0.02)
    except KeyboardInterrupt:
        # An interrupted run saves, too.
        (work / "saved").touch()
        sys.exit(130)
    (folder / "result.json").write_text(json.dumps({"loss": 1.0 + seed, "tokens": 5, "scores": {}}))


def command(job: Job, folder: Path, config: Path) -> list[str]:
    """Return the command of this job, in place of ways.command."""
    (folder / "seed").write_text(str(job.seed))
    return ["experiments.tests.slow_job", str(folder)]


def run(work: Path, minutes: float) -> None:
    """Run three seeds of one arm."""
    ways.command = command
    own = replace(EXPERIMENT, tuning=None, seeds=(0, 1, 2), cases=EXPERIMENT.cases[:1], schedule={"real": True})
    with alone(work, own.name) as lock:
        try:
            Runner(own, Choice(arms=("m4",)), work, work / "records" / "made.jsonl", lock, minutes).run()
        except TimeIsUp as left:
            sys.exit(f"time is up: {left}")


if __name__ == "__main__":
    if sys.argv[1] == "--runner":
        run(Path(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 0.0)
    else:
        job(Path(sys.argv[1]))
