"""Real local runs for the comparison: islands that mostly sleep, with and without faults.

A run whose folder has a summary is not made again, so a measurement that was interrupted resumes.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[2]
# The folder of `_paced_model`, the model whose steps sleep.
BENCH = ROOT / "scripts" / "bench"
MODEL = {"vocab_size": 256, "dim": 64, "mlp_dim": 256}
SILENCE_S = 3.0
# A restart has to cost more than the differences that the comparison looks for.
RESTART_S = 10.0
# Kills in a run of the calibration.
KILLS = 6


class Job(NamedTuple):
    """Settings that all runs have in common."""

    islands: int
    step_s: float
    steps: int
    faults: int


class RunFailed(RuntimeError):
    """A run did not end as it should; the message names the file to look at."""


def make_calm(folder: Path, job: Job) -> Path:
    """Make a shorter run without faults below `folder`; it shows how long steps and merges take."""
    return _make(folder / "calm", job._replace(steps=max(100, job.steps // 4)), ["train"], ["--quiet"])


def make_kills(folder: Path, job: Job, seed: int) -> Path:
    """Make a shorter run with kills of islands and syncer below `folder`; it shows how long restarts take.

    Args:
        folder: parent of the run's folder.
        job: settings of the run.
        seed: seed of the chaos run that this one calibrates; the two have different schedules.
    """
    arguments = ["--faults", str(KILLS), "--seed", str(1000 + seed), "--kinds", "kill,kill-syncer"]
    return _make(folder / f"kills-{seed}", job._replace(steps=max(300, job.steps // 2)), ["chaos"], arguments)


def make_chaos(folder: Path, job: Job, kinds: Sequence[str], seed: int) -> Path:
    """Make a chaos run of these kinds of faults below `folder`; its schedule is drawn from `seed`."""
    arguments = ["--faults", str(job.faults), "--seed", str(seed), "--kinds", ",".join(kinds)]
    return _make(folder / f"seed-{seed}", job, ["chaos"], arguments)


def _make(folder: Path, job: Job, command: Sequence[str], arguments: Sequence[str]) -> Path:
    run_dir = folder / "run"
    if (run_dir / "summary.json").exists():
        return run_dir
    if run_dir.exists():
        raise RunFailed(f"{folder} holds a run that was interrupted; remove that folder")
    folder.mkdir(parents=True, exist_ok=True)
    corpus = folder / "corpus.txt"
    corpus.write_text("".join(f"{n} times {n + 1} is {n * (n + 1)}\n" for n in range(40_000)), encoding="utf-8")
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(config_of(job, corpus)), encoding="utf-8")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_"))}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([str(ROOT), str(BENCH)])}
    line = [sys.executable, "-m", "diloco_jax", *command, str(config), "--run-dir", str(run_dir), *arguments]
    with (folder / "output.log").open("wb") as log:
        # Status 1 of a chaos run is a verdict on recovery; the run itself may be complete.
        subprocess.run(line, stdout=log, stderr=log, env=environment, cwd=ROOT, check=False)
    if not (run_dir / "summary.json").exists():
        raise RunFailed(f"{' '.join(command)} ended without a summary; read {folder / 'output.log'}")
    return run_dir


def config_of(job: Job, corpus: Path) -> dict[str, Any]:
    """Return the config of a run."""
    return {
        "name": "reality",
        "islands": {"count": job.islands, "devices": 1, "restart_delay_s": RESTART_S},
        "train": {"steps": job.steps, "batch_size": 4 * job.islands, "seq_len": 8}
        | {"eval_batch_size": 4, "final_eval_batches": 1},
        "model": {"module": "_paced_model:PacedModel", "args": MODEL | {"step_s": job.step_s}},
        "optimizer": {"name": "adamw", "learning_rate": 0.001, "warmup_steps": 10},
        "data": {"path": str(corpus)},
        "protocol": {"sync_every": 8, "num_fragments": 4, "overlap_steps": 2, "snapshot_every": 50}
        | {"silence_s": SILENCE_S, "heartbeat_s": 0.5, "resend_s": 0.5, "pull_timeout_s": 2, "release_s": 20},
        "transport": {"connect_timeout_s": 5, "keepalive_s": 2, "keepalive_timeout_s": 2},
        "trackers": [],
    }
