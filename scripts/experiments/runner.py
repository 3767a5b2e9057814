"""The runner of an experiment: it runs its jobs one after another, resumes, and estimates the remaining time."""

import fcntl
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from experiments import ways
from experiments.plan import Choice, Job, Plan, make_plan
from experiments.records import Record, append, by_digest, elsewhere, read
from experiments.spec import Experiment

SAY_EVERY_S = 15.0
# A job whose runner was killed has this time to save and end.
PATIENCE_S = 60.0
# The part of --max-minutes that a stopped job has to save.
MARGIN_S = 45.0


class TimeIsUp(Exception):
    """The minutes of this call are over; the same command resumes."""


def say(line: str) -> None:
    """Print a line to standard error."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def in_words(seconds: float) -> str:
    """Write a time with a suitable unit: 40 s, 12 min, 3.4 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextmanager
def alone(work: Path, name: str) -> Iterator[int]:
    """Lock the work of one experiment against other runners, and yield the lock for its processes.

    Raises:
        ValueError: another runner has the lock.
    """
    folder = work / name
    folder.mkdir(parents=True, exist_ok=True)
    ends_s = time.monotonic() + PATIENCE_S
    with (folder / "lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > ends_s:
                    raise ValueError(
                        f"another process runs {name} in {folder}; end it, or name another --work"
                    ) from None
                time.sleep(ways.POLL_S)
        yield lock.fileno()


class Estimate:
    """Estimate of the time of jobs, corrected by the times of finished jobs."""

    def __init__(self) -> None:
        self._ratios: list[float] = []

    def learn(self, job: Job, seconds: float) -> None:
        """Record the time of a finished job."""
        self._ratios.append(seconds / job.expected_s)

    def of(self, expected_s: float) -> float:
        """Return the estimated time for this many expected seconds."""
        return expected_s * (statistics.median(self._ratios) if self._ratios else 1.0)


class Runner:
    """One call of the program; it runs the jobs that have no record.

    Args:
        work: folder of unfinished jobs.
        records: file of the experiment's records.
        lock: lock of the work.
        max_minutes: the running job is stopped after this time; 0: never.
    """

    def __init__(
        self, experiment: Experiment, choice: Choice, work: Path, records: Path, lock: int, max_minutes: float
    ) -> None:
        self._experiment = experiment
        self._choice = choice
        self._work = work
        self._lock = lock
        self._records = records
        self._whole_s = max_minutes * 60 - MARGIN_S if max_minutes else float("inf")
        self._ends_s = time.monotonic() + self._whole_s
        self._estimate = Estimate()

    def run(self) -> None:
        """Run all jobs that have no record.

        Raises:
            TimeIsUp: jobs are left.
            JobFailed: a job has no result.
            ValueError: a job that cannot resume takes longer than a whole call.
            KeyboardInterrupt: the user interrupted the call; the running job was stopped cleanly.
        """
        commands = self._experiment.quick.get("prepare", ()) if self._choice.quick else self._experiment.prepare
        if commands and (job := self._next()) is not None:
            say("    preparing")
            if not ways.prepare(self._experiment.name, commands, self._work, self._lock, self._wait):
                raise TimeIsUp(job.title)
        while (job := self._next()) is not None:
            self._check_time(job)
            self._do(job)

    def _check_time(self, job: Job) -> None:
        """Refuse a job that would lose its work by a stop, because only runs of processes resume."""
        left_s, needs_s = self._ends_s - time.monotonic(), self._estimate.of(job.expected_s)
        resumable = job.way == "run"
        if not resumable and needs_s > self._whole_s:
            minutes = (needs_s + MARGIN_S) / 60
            raise ValueError(
                f"{job.title} takes about {in_words(needs_s)} and cannot resume after a stop; raise --max-minutes to "
                f"{minutes:.0f} or more, or leave it out"
            )
        if left_s <= 0 or (not resumable and needs_s > left_s):
            raise TimeIsUp(job.title)

    def _plan(self) -> tuple[Plan, list[Job]]:
        records = read(self._records)
        plan = make_plan(self._experiment, self._choice, records)
        done = by_digest(records)
        return plan, [job for job in plan.jobs if job.digest not in done]

    def _next(self) -> Job | None:
        plan, left = self._plan()
        others = elsewhere(self._records)
        if found := [others[job.digest] for job in left if job.digest in others]:
            for record in found:
                append(self._records, {**record, "experiment": self._experiment.name, "from": record["experiment"]})
            say(f"    {len(found)} jobs of equal settings are copied from other experiments")
            return self._next()
        if not left:
            return None
        seconds = self._estimate.of(sum(job.expected_s for job in [*left, *plan.untuned]))
        total = len(plan.jobs) + len(plan.untuned)
        number = total - len(left) - len(plan.untuned) + 1
        say(f"[{number}/{total}] {self._experiment.name}: {left[0].title}; {in_words(seconds)} left")
        return left[0]

    def _wait(self, process: subprocess.Popen[bytes], share: Callable[[], float]) -> bool:
        began_s = said_s = time.monotonic()
        try:
            while process.poll() is None:
                if time.monotonic() > self._ends_s:
                    ways.stop(process)
                    return False
                if time.monotonic() - said_s > SAY_EVERY_S:
                    said_s = time.monotonic()
                    say(f"    {share():.0%} after {in_words(said_s - began_s)}")
                time.sleep(ways.POLL_S)
        except KeyboardInterrupt:
            say("    stopping")
            ways.stop(process)
            raise
        return True

    def _do(self, job: Job) -> None:
        began_s = time.monotonic()
        record = ways.execute(job, self._work, self._lock, self._wait)
        if record is None:
            raise TimeIsUp(job.title)
        append(self._records, record)
        ways.forget(job, self._work)
        took_s = time.monotonic() - began_s
        self._estimate.learn(job, took_s)
        loss = "not finite" if record["loss"] is None else f"{record['loss']:.4f}"
        say(f"    loss {loss}, {record['tokens']:,} tokens, {in_words(took_s)}")


def describe(experiment: Experiment, choice: Choice, records: Sequence[Record]) -> str:
    """Return the plan as text."""
    plan, done = make_plan(experiment, choice, records), by_digest(records)
    lines = [f"{experiment.name}: {experiment.title}"]
    for job in plan.jobs:
        state = "done" if job.digest in done else f"about {in_words(job.expected_s)}"
        lines.append(f"  {'tuning: ' if job.point is not None else ''}{job.title}  [{job.way}, {job.digest}] {state}")
    lines += [f"  after the tuning: {job.title}" for job in plan.untuned]
    left_s = sum(job.expected_s for job in [*plan.jobs, *plan.untuned] if job.digest not in done)
    waiting = [f"{name} waits for {arm.waits}" for name, arm in experiment.arms.items() if arm.waits]
    return "\n".join(
        [*lines, f"  {in_words(left_s)} left on two idle cores, or one accelerator", *map("  {}".format, waiting)]
    )
