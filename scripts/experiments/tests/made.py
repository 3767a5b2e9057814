"""An invented experiment with invented records, for tests of plans, tables and pages."""

from typing import Any

from experiments.plan import Job
from experiments.spec import Arm, Case, Check, Experiment, Tuning

RATES = (1e-3, 2e-3)
EXPERIMENT = Experiment(
    name="made",
    title="Made up",
    question="?",
    where="Table 0",
    paper="equal",
    bar="at most 1 %",
    decides="nothing",
    seeds=(0, 1),
    arms={
        "baseline": Arm(label="data parallel", settings={"algorithm": "data_parallel"}),
        "m4": Arm(label="M = 4"),
        "m2": Arm(settings={"islands": {"count": 2}}, like="m4", because="it is made up"),
        "later": Arm(waits="a setting"),
    },
    cases=(Case(size="1M", tokens=1e6), Case(size="1M", tokens=2e6, arms=("baseline", "m4"))),
    tuning=Tuning(
        tokens=5e5,
        grids={arm: {"optimizer.learning_rate": RATES} for arm in ("baseline", "m4")},
    ),
    checks=(
        Check(says="m4 behind", arm="m4", against="baseline", tokens=2e6, most=1.0),
        Check(says="falls", arm="m4", against="baseline", falls="tokens"),
    ),
)


def record(job: Job, loss: float, **more: Any) -> dict[str, Any]:
    """Return the record of a job with this loss."""
    return {
        "experiment": job.experiment,
        "size": job.case.size,
        "budget": job.case.tokens,
        "arm": job.arm,
        "seed": job.seed,
        "point": dict(job.point) if job.point is not None else None,
        "digest": job.digest,
        "way": job.way,
        "commit": "0123456789",
        "machine": "2 cores",
        "date": "2026-01-01",
        "loss": loss,
        "scores": {},
        "curve": [[1000 * n, loss + 1 / n] for n in range(1, 61)],
        "tokens": round(job.case.tokens),
        "steps": 10,
        "up_bytes": 1_000_000,
        "down_bytes": 500_000,
        "contributors": 3.5,
        "parameters": 1_016_960,
        "seconds": 12.0,
        **more,
    }
