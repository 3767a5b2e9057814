"""The jobs of an experiment, with their order and their settings."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from experiments.records import Record, by_digest
from experiments.spec import Case, Experiment, Settings, flat, merged, sizes

Way = Literal["tapes", "run", "baseline"]
# The time until the first step, with cached compiled programs.
START_S: dict[Way, float] = {"tapes": 12.0, "run": 25.0, "baseline": 10.0}
COMMON: Settings = {
    "trackers": [],
    "islands": {"count": 4, "devices": 1},
    "train": {"steps": 0, "eval_every": 0, "final_eval_batches": 120},
    "protocol": {"sync_every": 6, "num_fragments": 6, "snapshot_every": 0},
    "adopt": {"mode": "rebase"},
}
RESUMABLE: Settings = {"protocol": {"snapshot_every": 200}}
LARGE: Settings = {"islands": {"devices": "auto"}}
# The arithmetic of data parallel as a run that can resume: the merge takes the values of one island unchanged.
ALONE: Settings = {
    "algorithm": None,
    "islands": {"count": 1},
    "protocol": {"sync_every": 24, "num_fragments": 1, "overlap_steps": 0, "quorum": 1},
    "outer": {"optimizer": "sgd", "learning_rate": 1.0},
    "wire": {"up": "float32", "down": "float32"},
}
TINY: Settings = {
    "model": {"args": {"dim": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "mlp_dim": 64}},
    "train": {"batch_size": 8, "seq_len": 32, "final_eval_batches": 2},
    "optimizer": {"warmup_steps": 5},
}
QUICK_TOKENS = 20_000
# A run with absent learners may make this many times the steps of a run with all learners.
STEPS_FACTOR_MAX = 4


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The part of an experiment that a command line selects."""

    seeds: tuple[int, ...] = ()
    arms: tuple[str, ...] = ()
    # A size that replaces the cases of the experiment.
    size: str = ""
    tokens: float = 0
    quick: bool = False


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training with its settings."""

    experiment: str
    case: Case
    arm: str
    seed: int
    # The settings of the grid, for a job of the tuning.
    point: Mapping[str, Any] | None
    # The config with the placeholders {work} and {root}.
    settings: Settings
    schedule: Settings
    way: Way
    expected_s: float
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        words = json.dumps([self.settings, self.schedule, self.way], sort_keys=True)
        object.__setattr__(self, "digest", hashlib.sha256(words.encode()).hexdigest()[:16])

    @property
    def title(self) -> str:
        point = f" ({', '.join(f'{k} {v}' for k, v in self.point.items())})" if self.point else ""
        return f"{self.case.name}, {self.arm}{point}, seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All jobs of an experiment; the jobs of the tuning are first."""

    jobs: tuple[Job, ...]
    # Jobs that wait for the tuning; until then they have the usual settings.
    untuned: tuple[Job, ...]
    # The best point by (size, arm).
    tuned: Mapping[tuple[str, str], Mapping[str, Any]]


def chosen(experiment: Experiment, choice: Choice) -> Experiment:
    """Return the experiment with the changes of a command line.

    Raises:
        ValueError: an arm or a size is unknown.
    """
    if unknown := sorted(set(choice.arms) - set(experiment.arms)):
        raise ValueError(f"{experiment.name} has no arm '{unknown[0]}'; choose from {', '.join(experiment.arms)}")
    if choice.size and choice.size not in sizes():
        raise ValueError(f"size '{choice.size}' is unknown; choose from {', '.join(sizes())}")
    arms, cases = choice.arms, experiment.cases
    changes: dict[str, Any] = {"seeds": choice.seeds or experiment.seeds}
    if choice.quick:
        quick = experiment.quick
        arms = choice.arms or tuple(quick.get("arms", ()))
        cases = (Case(size="0.25M", tokens=quick.get("tokens", QUICK_TOKENS), settings=experiment.cases[0].settings),)
        changes |= {"seeds": choice.seeds or (0,), "tuning": None}
        changes["base"] = merged(merged(experiment.base, TINY), quick.get("settings", {}))
        changes["schedule"] = merged(experiment.schedule, quick.get("schedule", {}))
    elif choice.size:
        cases = (Case(size=choice.size, tokens=sizes()[choice.size].tokens),)
    if choice.tokens:
        cases = tuple(replace(case, tokens=choice.tokens) for case in cases)
    kept = {name: arm for name, arm in experiment.arms.items() if not arms or name in arms}
    return replace(experiment, arms=kept, cases=cases, **changes)


def make_plan(experiment: Experiment, choice: Choice, records: Sequence[Record]) -> Plan:
    """Plan the selected jobs of an experiment.

    Args:
        records: records of finished jobs; those of the tuning decide the settings of the others.
    """
    asked, done = chosen(experiment, choice), by_digest(records)
    tuning, tuned = asked.tuning, {}
    jobs: list[Job] = []
    for size in dict.fromkeys(case.size for case in asked.cases):
        cases = [case for case in asked.cases if case.size == size]
        # The arms that some case of this size compares need their grids.
        needed = {
            arm.like or name
            for name, arm in asked.arms.items()
            if any(not case.arms or name in case.arms for case in cases)
        }
        for name in [arm for arm in tuning.grids if arm in needed] if tuning is not None else ():
            own = list(_tuning_jobs(experiment, size, name, choice))
            jobs += own
            losses = {job.digest: done[job.digest]["loss"] for job in own if job.digest in done}
            if len(losses) == len(own):
                best = min(own, key=lambda job: _finite(losses[job.digest]))
                assert best.point is not None
                tuned[size, name] = best.point
    untuned: list[Job] = []
    for case in asked.cases:
        for seed in choice.seeds or case.seeds or asked.seeds:
            for name, arm in asked.arms.items():
                if arm.waits or (case.arms and name not in case.arms):
                    continue
                grid = arm.like or name
                waits = tuning is not None and grid in tuning.grids and (case.size, grid) not in tuned
                job = make_job(asked, case, name, seed, choice, tuned=tuned.get((case.size, grid), {}))
                (untuned if waits else jobs).append(job)
    return Plan(jobs=tuple(jobs), untuned=tuple(untuned), tuned=tuned)


def _finite(loss: float | None) -> float:
    return loss if loss is not None and loss == loss else float("inf")


def _tuning_jobs(experiment: Experiment, size: str, arm: str, choice: Choice) -> Iterator[Job]:
    """Yield the jobs of an arm's grid at a size, also for an arm that is not selected."""
    tuning = experiment.tuning
    assert tuning is not None
    case = next((case for case in experiment.cases if case.size == size), Case(size=size))
    case = replace(case, tokens=min(tuning.tokens, choice.tokens or tuning.tokens))
    for point in tuning.points(arm):
        yield make_job(experiment, case, arm, tuning.seed, choice, tuned=point, point=point)


def make_job(
    experiment: Experiment,
    case: Case,
    arm: str,
    seed: int,
    choice: Choice,
    *,
    tuned: Mapping[str, Any],
    point: Mapping[str, Any] | None = None,
) -> Job:
    """Make the job of an arm in a case.

    Args:
        tuned: the best settings of the tuning.
        point: the settings that a job of the tuning tries.
    """
    size, own = sizes()[case.size], experiment.arms[arm]
    settings = merged(COMMON, size.settings)
    if size.text:
        store = {"data": {"format": "store", "path": f"{{work}}/text-{size.text}"}}
        settings = merged(merged(settings, LARGE), store)
    for changes in (experiment.base, case.settings, own.settings, tuned):
        settings = merged(settings, changes)
    settings = merged(settings, {"name": "experiment", "seed": seed, "train": {"tokens": round(case.tokens)}})
    schedule = merged(experiment.schedule, own.schedule or {})
    way: Way = "tapes"
    if size.text and settings.get("algorithm") == "data_parallel":
        settings = merged(settings, ALONE)
    if settings.get("algorithm") == "data_parallel":
        way, schedule = "baseline", {}
    elif schedule.get("real") or size.text:
        way, schedule, settings = "run", {}, merged(settings, RESUMABLE)
    expected_s = START_S[way] + case.tokens / 1e6 * size.seconds_per_mtoken * own.slower * case.slower
    if choice.quick:
        expected_s = START_S[way] + 5.0
    return Job(
        experiment=experiment.name,
        case=case,
        arm=arm,
        seed=seed,
        point=point,
        settings=settings,
        schedule=schedule,
        way=way,
        expected_s=expected_s,
    )


def differences(jobs: Mapping[str, Job]) -> dict[str, dict[str, Any]]:
    """Return the settings that differ between the jobs of several arms, by arm and path."""
    texts = {
        arm: flat({**job.settings, "schedule": job.schedule} if job.schedule else job.settings)
        for arm, job in jobs.items()
    }
    paths = sorted({path for text in texts.values() for path in text} - {"seed", "name"})
    differing = [path for path in paths if len({json.dumps(text.get(path)) for text in texts.values()}) > 1]
    return {arm: {path: text[path] for path in differing if path in text} for arm, text in texts.items()}
