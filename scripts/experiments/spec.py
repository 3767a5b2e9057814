"""Experiments as described by experiment.yaml of each folder, and the sizes of models in sizes.yaml."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FILE = "experiment.yaml"
Settings = Mapping[str, Any]
T = TypeVar("T")
# Settings whose mapping or list is replaced as a whole.
REPLACED = ("patterns", "adam_paths", "each")


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model with its settings, its tokens and its speed."""

    settings: Settings
    tokens: float
    seconds_per_mtoken: float
    # The number of ids of the tokenizer for the large text; 0: bytes of Python's standard library.
    text: int = 0


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train, which is compared with others."""

    label: str = ""
    settings: Settings = field(default_factory=dict)
    # Changes of the simulated cluster. With `real: true` the arm is a run of processes.
    schedule: Settings | None = None
    # The arm with the tuned settings for this one; the default is the arm itself. An arm that merges otherwise, or at
    # another period, has another best rate, so this needs a reason.
    like: str = ""
    because: str = ""
    # The time of a job as a multiple of the size's.
    slower: float = 1.0
    # A feature that the package does not have yet. The arm is not run.
    waits: str = ""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and a budget for the comparison of arms."""

    size: str
    tokens: float = 0
    settings: Settings = field(default_factory=dict)
    # The arms of this case; an empty tuple means all arms.
    arms: tuple[str, ...] = ()
    # The seeds, if runs longer than 15 minutes have fewer; an empty tuple means the experiment's.
    seeds: tuple[int, ...] = ()
    label: str = ""
    # The time of a job as a multiple of the size's, for tokens of another kind.
    slower: float = 1.0

    @property
    def name(self) -> str:
        return self.label or f"{self.size}, {self.tokens / 1e6:g}M tokens"


@dataclass(frozen=True, kw_only=True)
class Check:
    """A part of the bar: the mean of a value over the seeds must be between `least` and `most`."""

    says: str
    arm: str
    # The other arm of the comparison, for the same seed and case. If empty, the value itself is checked.
    against: str = ""
    # A number of the records, such as loss, bytes, contributors, virtual_s, goodput, or of the model, such as accuracy.
    value: str = "loss"
    # percent: 100 (a / b - 1); ratio: a / b; difference: a - b; points: 100 (a - b).
    unit: str = "percent"
    # A pair of arms; the result of their comparison is subtracted for each seed.
    beyond: tuple[str, ...] = ()
    most: float | None = None
    least: float | None = None
    case: str = ""
    size: str = ""
    # `case`, `size` and `tokens` select the cases of the check. By default it covers all cases of its arms.
    tokens: float = 0
    # "tokens" or "size": instead of a limit, the comparison must fall from case to case along it.
    falls: str = ""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """A grid for each arm, with equal numbers of points, at a smaller budget."""

    tokens: float
    # By arm: values by setting, such as {optimizer.learning_rate: [1.0e-3, 2.0e-3]}.
    grids: Mapping[str, Mapping[str, tuple[Any, ...]]]
    seed: int = 100

    def points(self, arm: str) -> list[dict[str, Any]]:
        """List the settings of an arm's grid."""
        grid = self.grids.get(arm, {})
        return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())] if grid else []


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One claim of the paper with everything that decides it."""

    name: str
    title: str
    question: str
    # Tables and sections of the paper.
    where: str
    # The paper's figure.
    paper: str
    bar: str
    decides: str
    arms: Mapping[str, Arm]
    cases: tuple[Case, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    base: Settings = field(default_factory=dict)
    schedule: Settings = field(default_factory=dict)
    baseline: str = "baseline"
    tuning: Tuning | None = None
    checks: tuple[Check, ...] = ()
    # curves: loss over tokens of the first case; gap: distance from the baseline over parameters; arms: loss by arm;
    # scores: right answers by task.
    plot: str = "curves"
    # Further numbers of the records for the tables.
    columns: tuple[str, ...] = ()
    # The number of questions by score, for scores that are shares of right answers.
    questions: Mapping[str, int] = field(default_factory=dict)
    # The published line of a gap plot: a name, and [parameters, per cent] pairs.
    published: Mapping[str, Any] = field(default_factory=dict)
    # Commands of diloco that run once before the jobs; {work} is a folder that remains.
    prepare: tuple[tuple[str, ...], ...] = ()
    # Changes for --quick: arms, settings, tokens.
    quick: Settings = field(default_factory=dict)
    waits: str = ""
    untestable: str = ""
    notes: str = ""


def _made(kind: type[T], values: Mapping[str, Any], where: str, **more: Any) -> T:
    """Make an object of a dataclass from values of a file.

    Raises:
        ValueError: a key is unknown or missing; the message names it.
    """
    known = {each.name for each in fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(set(values) - known):
        raise ValueError(f"{where}: '{unknown[0]}' is unknown; use {', '.join(sorted(known))}")
    try:
        return kind(**{**values, **more})
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from None


@cache
def sizes() -> dict[str, Size]:
    """Return the models by name; the smallest is first."""
    text = yaml.safe_load((HERE / "sizes.yaml").read_text(encoding="utf-8"))
    return {name: _made(Size, values, f"sizes.yaml: {name}") for name, values in text.items()}


def names() -> list[str]:
    """List the names of all experiments."""
    order = yaml.safe_load((HERE / "order.yaml").read_text(encoding="utf-8"))
    return [str(name) for name in order]


def load(name: str, folder: Path = HERE) -> Experiment:
    """Read one experiment.

    Raises:
        ValueError: the name is unknown, or its file has a wrong key; the message names it.
    """
    path = folder / name / FILE
    if not path.exists():
        raise ValueError(f"experiment '{name}' does not exist; choose from {', '.join(names())}")
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    arms = {key: _made(Arm, each or {}, f"{name}: arm {key}") for key, each in values.pop("arms").items()}
    cases = [_made(Case, each, f"{name}: cases") for each in values.pop("cases")]
    made: dict[str, Any] = {"name": name, "arms": arms, "cases": tuple(map(_whole, cases))}
    made["checks"] = tuple(_made(Check, each, f"{name}: checks") for each in values.pop("checks", ()))
    if tuning := values.pop("tuning", None):
        made["tuning"] = _made(Tuning, tuning, f"{name}: tuning")
    if "seeds" in values:
        made["seeds"] = tuple(values.pop("seeds"))
    experiment = _made(Experiment, values, name, **made)
    for problem in problems(experiment):
        raise ValueError(f"{name}: {problem}")
    return experiment


def _whole(case: Case) -> Case:
    """Give a case the tokens of its size, if it has none."""
    tokens = case.tokens or (sizes()[case.size].tokens if case.size in sizes() else 0)
    return replace(case, tokens=tokens, arms=tuple(case.arms), seeds=tuple(case.seeds))


def problems(experiment: Experiment) -> Iterator[str]:
    """Yield the contradictions of an experiment."""
    arms, tuning = experiment.arms, experiment.tuning
    if experiment.baseline and experiment.baseline not in arms:
        yield f"the baseline '{experiment.baseline}' is not an arm"
    for case in experiment.cases:
        if case.size not in sizes():
            yield f"size '{case.size}' is unknown; use {', '.join(sizes())}"
        yield from (f"{case.name}: '{arm}' is not an arm" for arm in case.arms if arm not in arms)
    for name, arm in arms.items():
        if arm.like and arm.like not in arms:
            yield f"arm {name} is like '{arm.like}', which is not an arm"
        if arm.like and not (arm.because.strip() and tuning is not None and arm.like in tuning.grids):
            yield f"arm {name} is like '{arm.like}'; give it a separate grid, or say in `because` why that one fits"
        if arm.because and not arm.like:
            yield f"arm {name} has `because` without `like`; name the arm whose settings fit it, or remove `because`"
    for check in experiment.checks:
        named = (check.arm, check.against, *check.beyond)
        yield from (f"a check names '{arm}', which is not an arm" for arm in named if arm not in {*arms, ""})
        if len(check.beyond) not in (0, 2):
            yield f"check '{check.says}': beyond names {len(check.beyond)} arms; name two"
        if check.falls not in ("", "tokens", "size") or check.unit not in ("percent", "ratio", "difference", "points"):
            yield f"check '{check.says}': falls is '{check.falls}', unit '{check.unit}'"
        if not check.falls and check.most is None and check.least is None:
            yield f"check '{check.says}' has no limit; set most or least"
    if tuning is not None:
        yield from _grid_problems(arms, tuning)


def _grid_problems(arms: Mapping[str, Arm], tuning: Tuning) -> Iterator[str]:
    """Yield what is wrong with the grids. All must have equally many points."""
    yield from (f"tuning names '{arm}', which is not an arm" for arm in tuning.grids if arm not in arms)
    for name, arm in arms.items():
        if arm.like and name in tuning.grids:
            yield f"arm {name} has a grid, but is like '{arm.like}'; remove the grid or `like`"
        if not (arm.like or arm.waits or name in tuning.grids):
            yield f"arm {name} has no grid; give it one, or name in `like` the arm whose settings fit it"
    shaped = True
    for name, grid in tuning.grids.items():
        # Without these forms there are no points to count.
        if not isinstance(grid, Mapping) or not all(isinstance(values, list | tuple) for values in grid.values()):
            shaped = False
            yield f"the grid of {name} is {grid!r}; write a list of values for each setting"
        elif not tuning.points(name):
            yield f"the grid of {name} has no points; list values for at least one setting"
        elif any(map(_repeated, grid.values())):
            yield f"the grid of {name} has a value twice, so it has fewer points than the others: {grid}"
    counts = {arm: len(tuning.points(arm)) for arm in tuning.grids} if shaped else {}
    if len(set(counts.values())) > 1:
        yield f"grids differ in their numbers of points ({counts}), so one side is tuned harder"


def _repeated(values: Sequence[Any]) -> bool:
    """Return whether a list has a value twice, NaN included."""
    return len({json.dumps(value) for value in values}) < len(values)


def merged(base: Settings, changes: Settings) -> dict[str, Any]:
    """Return nested settings with nested changes; keys with dots are paths, and null removes a setting."""
    result = dict(base)
    for path, value in changes.items():
        key, _, rest = str(path).partition(".")
        if rest:
            value = {rest: value}
        if value is None:
            result.pop(key, None)
        else:
            before = result.get(key)
            nested = isinstance(value, Mapping) and key not in REPLACED
            result[key] = merged(before if isinstance(before, Mapping) else {}, value) if nested else value
    return result


def flat(settings: Settings, prefix: str = "") -> dict[str, Any]:
    """Return nested settings as a flat dict with dotted paths."""
    result: dict[str, Any] = {}
    for key, value in settings.items():
        nested = isinstance(value, Mapping) and value and key not in REPLACED
        result |= flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return result
