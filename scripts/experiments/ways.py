"""Start, stop and resume the processes of one job, and make the job's record."""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from experiments.plan import Job
from experiments.records import Record, here, thinned
from experiments.spec import ROOT, Settings

POLL_S = 0.2
# An interrupted run has this time to save and end.
STOP_S = 150.0


class JobFailed(Exception):
    """A job ended without a result; the message names the file to look at."""


def environment(job: Job | None, work: Path) -> dict[str, str]:
    """Return the environment of a job's processes; they share compiled programs, and small models use the CPU."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_NUM", "XLA_"))}
    paths = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "docs" / "examples")]
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(work / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    kept = cache | kept | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    if job is None or not accelerated(job):
        kept["JAX_PLATFORMS"] = "cpu"
    if job is not None and job.way == "tapes":
        kept["JAX_NUM_CPU_DEVICES"] = "1"
    return kept


def accelerated(job: Job) -> bool:
    """Return whether a job uses an accelerator if there is one; small models always use the CPU."""
    return bool(job.settings["islands"].get("devices") == "auto")


def placed(settings: Settings, work: Path) -> Any:
    """Replace {work}, {root} and {purelib} (installed packages) by these folders, and {seed} by the seed."""
    words = {"work": work, "root": ROOT, "purelib": sysconfig.get_paths()["purelib"]}
    return _filled(settings, words | ({"seed": settings.get("seed")} if isinstance(settings, Mapping) else {}))


def _filled(settings: Any, words: Mapping[str, Any]) -> Any:
    if isinstance(settings, Mapping):
        return {key: _filled(value, words) for key, value in settings.items()}
    if isinstance(settings, str):
        for name, value in words.items():
            settings = settings.replace(f"{{{name}}}", str(value))
    return settings


def start(command: list[str], log: Path, around: Mapping[str, str], lock: int) -> subprocess.Popen[bytes]:
    """Start a process that ignores the terminal's Ctrl-C, and gets SIGTERM if this process ends.

    Args:
        lock: file descriptor of a lock that both processes hold; other runners wait until both have ended.
    """

    def follow_parent() -> None:
        if sys.platform.startswith("linux"):
            # 1 is PR_SET_PDEATHSIG.
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)

    with log.open("ab") as stream:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env=dict(around),
            cwd=ROOT,
            start_new_session=True,
            preexec_fn=follow_parent,
            pass_fds=(lock,),
        )


Wait = Callable[[subprocess.Popen[bytes], Callable[[], float]], bool]


def execute(job: Job, work: Path, lock: int, wait: Wait) -> Record | None:
    """Run or resume a job.

    Args:
        work: folder of all jobs.
        lock: file descriptor of the runner's lock.
        wait: function that waits for a process, given a getter of its progress; it returns False after a stop.

    Returns:
        The record; None if the job was stopped.

    Raises:
        JobFailed: the job ended without a result.
    """
    folder = work / job.experiment / job.digest
    folder.mkdir(parents=True, exist_ok=True)
    config, log = folder / "config.yaml", folder / "output.log"
    config.write_text(yaml.safe_dump(placed(job.settings, work), sort_keys=False), encoding="utf-8")
    result = folder / "result.json"
    if not result.exists() and not _complete(folder / "run"):
        words = [sys.executable, "-m", *command(job, folder, config)]
        process = start(words, log, environment(job, work), lock)
        ended = wait(process, lambda: progress(job, folder))
        done = result.exists() or _complete(folder / "run")
        if not done and not ended:
            return None
        if not done:
            raise JobFailed(f"{job.title} ended with status {process.returncode}; read {log}")
    found = json.loads(result.read_text(encoding="utf-8")) if result.exists() else from_run(folder / "run")
    record = {
        "experiment": job.experiment,
        "size": job.case.size,
        "budget": job.case.tokens,
        "arm": job.arm,
        "seed": job.seed,
        "point": dict(job.point) if job.point is not None else None,
        "digest": job.digest,
        "way": job.way,
        **here(accelerated=accelerated(job)),
        **found,
    }
    return record


def command(job: Job, folder: Path, config: Path) -> list[str]:
    """Return the module and the arguments that run or resume a job; a run that cannot resume is removed."""
    if job.way == "tapes":
        (folder / "schedule.json").write_text(json.dumps(job.schedule), encoding="utf-8")
        return ["experiments.taped", str(config), str(folder / "schedule.json"), str(folder)]
    words = ["diloco_jax", "train", str(config), "--run-dir", str(folder / "run"), "--quiet", "--json"]
    if job.way == "run" and any((folder / "run" / "checkpoints").glob("*")):
        return [*words, "--resume"]
    shutil.rmtree(folder / "run", ignore_errors=True)
    return words


def forget(job: Job, work: Path) -> None:
    """Remove the files of a recorded job."""
    shutil.rmtree(work / job.experiment / job.digest, ignore_errors=True)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a job, and kill it if it does not stop."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def progress(job: Job, folder: Path) -> float:
    """Return the finished share of a job from its files; 0 if unknown."""
    try:
        if job.way == "tapes":
            return float((folder / "progress").read_text(encoding="utf-8"))
        status = json.loads((folder / "run" / "status.json").read_text(encoding="utf-8"))
        return float(min(1.0, status["global_step"] / max(1, status["total_steps"])))
    except (OSError, ValueError, KeyError):
        return 0.0


def _complete(run: Path) -> bool:
    try:
        return bool(json.loads((run / "summary.json").read_text(encoding="utf-8")).get("complete"))
    except (OSError, ValueError):
        return False


def from_run(run: Path) -> dict[str, Any]:
    """Return the figures of a run from its files."""
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    losses = sorted(_losses(run / "metrics.jsonl"))
    trained, points = 0, []
    for _, tokens, loss in losses:
        trained += tokens
        points.append((trained, loss))
    return {
        "loss": summary["eval_loss"],
        "scores": summary["eval_scores"],
        "curve": thinned(points),
        "tokens": summary["merged_tokens"],
        "steps": summary["global_steps"],
        "up_bytes": summary["wire"]["up_bytes"],
        "down_bytes": summary["wire"]["down_bytes"],
        "contributors": summary["contributors_per_round"],
        "goodput": summary["goodput"],
        "parameters": summary["num_parameters"],
        "seconds": summary["wall_s"],
    }


def _losses(metrics: Path) -> Iterator[tuple[float, int, float]]:
    """Yield (time, tokens, loss) of the steps of all islands."""
    before: dict[str, int] = {}
    with metrics.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                # The run was killed while it wrote this line.
                continue
            if row.get("kind") == "step" and row.get("loss") is not None:
                tokens = row["tokens"] - before.get(row["learner"], 0)
                before[row["learner"]] = row["tokens"]
                yield row["t"], max(0, tokens), row["loss"]


def prepare(name: str, commands: Sequence[Sequence[str]], work: Path, lock: int, wait: Wait) -> bool:
    """Run the commands that an experiment needs once before its jobs; return False after a stop.

    Raises:
        JobFailed: a command failed.
    """
    folder = work / name / "prepared"
    folder.mkdir(parents=True, exist_ok=True)
    for number, words in enumerate(commands):
        mark, log = folder / f"{number}.done", folder / f"{number}.log"
        if mark.exists():
            continue
        line = [sys.executable, "-m", *(placed(word, work) for word in words)]
        process = start(line, log, environment(None, work), lock)
        if not wait(process, lambda: 0.0):
            return False
        if process.returncode:
            raise JobFailed(f"`{' '.join(line)}` ended with status {process.returncode}; read {log}")
        mark.touch()
    return True
