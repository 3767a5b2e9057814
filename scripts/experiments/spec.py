"""Experiments as their files say: experiment.yaml of each folder, and the sizes of models that they name."""

from collections.abc import Iterator, Mapping
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
REPLACED = ("patterns", "adam_paths", "each")  # settings that are mappings or lists as a whole


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model by name."""

    settings: Settings
    tokens: float
    seconds_per_mtoken: float
    text: int = 0
    """Ids of the tokenizer for the large text; 0: Python's standard library as bytes."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train."""

    label: str = ""
    settings: Settings = field(default_factory=dict)
    schedule: Settings | None = None
    """What the simulated cluster has differently; `real: true` in it: a run of processes, whatever the default."""
    like: str = ""
    """The arm whose tuned settings this one takes; its own name by default."""
    slower: float = 1.0
    """Times the seconds of the size."""
    waits: str = ""
    """What the package does not have yet; the arm is not run."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and a budget, in which all arms are compared."""

    size: str
    tokens: float = 0
    settings: Settings = field(default_factory=dict)
    arms: tuple[str, ...] = ()
    """Those that are run in it; none named: all."""
    seeds: tuple[int, ...] = ()
    """Fewer than the experiment's, where a run is longer than 15 minutes; none named: the experiment's."""
    label: str = ""
    slower: float = 1.0
    """Times the seconds of the size, for tokens of another kind."""

    @property
    def name(self) -> str:
        return self.label or f"{self.size}, {self.tokens / 1e6:g}M tokens"


@dataclass(frozen=True, kw_only=True)
class Check:
    """A part of the bar: of what the seeds say, the mean must lie between `least` and `most`."""

    says: str
    arm: str
    against: str = ""
    """Arm of the same seed and case with which it is compared; none: the value itself."""
    value: str = "loss"
    """A number of the records, such as loss, bytes, contributors, virtual_s, goodput, or of the model, as accuracy."""
    unit: str = "percent"
    """percent: 100 (a / b - 1); ratio: a / b; difference: a - b; points: 100 (a - b)."""
    beyond: tuple[str, ...] = ()
    """A pair of arms: what they show, one against the other, is taken off for each seed."""
    most: float | None = None
    least: float | None = None
    case: str = ""
    size: str = ""
    tokens: float = 0
    """Cases in which it must hold, by label, size or budget; none named: all in which the arms run."""
    falls: str = ""
    """tokens or size: the comparison must fall along it, from case to case; no limit then."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """A grid for the baseline and one for the method, with equal numbers of points, at a smaller budget."""

    tokens: float
    grids: Mapping[str, Mapping[str, tuple[Any, ...]]]
    """By arm: values by setting, as in {optimizer.learning_rate: [1.0e-3, 2.0e-3]}."""
    seed: int = 100

    def points(self, arm: str) -> list[dict[str, Any]]:
        """List the settings of an arm's grid."""
        grid = self.grids.get(arm, {})
        return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())] if grid else []


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One claim."""

    name: str
    title: str
    question: str
    where: str
    """Tables and sections of the paper."""
    paper: str
    """The paper's figure."""
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
    plot: str = "curves"
    """curves: loss over tokens of the first case; gap: distance from the baseline over parameters; arms: over arms."""
    columns: tuple[str, ...] = ()
    """Further numbers of the records that the tables show."""
    published: Mapping[str, Any] = field(default_factory=dict)
    """The published line of a gap plot: a name, and [parameters, per cent] pairs."""
    prepare: tuple[tuple[str, ...], ...] = ()
    """Commands of diloco that run once before; {work} is a folder that stays."""
    quick: Settings = field(default_factory=dict)
    """Differences of --quick: arms, settings, tokens."""
    waits: str = ""
    untestable: str = ""
    notes: str = ""


def _made(kind: type[T], values: Mapping[str, Any], where: str, **more: Any) -> T:
    """Make one of the dataclasses above.

    Raises:
        ValueError: a key that it has not, or one that is missing; names it.
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
    """Return the models by name, smallest first."""
    text = yaml.safe_load((HERE / "sizes.yaml").read_text(encoding="utf-8"))
    return {name: _made(Size, values, f"sizes.yaml: {name}") for name, values in text.items()}


def names() -> list[str]:
    """List all experiments."""
    order = yaml.safe_load((HERE / "order.yaml").read_text(encoding="utf-8"))
    return [str(name) for name in order]


def load(name: str, folder: Path = HERE) -> Experiment:
    """Read one experiment.

    Raises:
        ValueError: there is none of this name, or its file says what cannot be; names the key.
    """
    path = folder / name / FILE
    if not path.exists():
        raise ValueError(f"there is no experiment '{name}'; choose from {', '.join(names())}")
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
    """Yield what contradicts itself."""
    arms, tuning = experiment.arms, experiment.tuning
    if experiment.baseline and experiment.baseline not in arms:
        yield f"the baseline '{experiment.baseline}' is no arm"
    for case in experiment.cases:
        if case.size not in sizes():
            yield f"size '{case.size}' is unknown; use {', '.join(sizes())}"
        yield from (f"{case.name}: '{arm}' is no arm" for arm in case.arms if arm not in arms)
    for name, arm in arms.items():
        if arm.like and arm.like not in arms:
            yield f"arm {name} is like '{arm.like}', which is no arm"
    for check in experiment.checks:
        named = (check.arm, check.against, *check.beyond)
        yield from (f"a check names '{arm}', which is no arm" for arm in named if arm not in {*arms, ""})
        if len(check.beyond) not in (0, 2):
            yield f"check '{check.says}': beyond names {len(check.beyond)} arms; name two"
        if check.falls not in ("", "tokens", "size") or check.unit not in ("percent", "ratio", "difference", "points"):
            yield f"check '{check.says}': falls is '{check.falls}', unit '{check.unit}'"
        if not check.falls and check.most is None and check.least is None:
            yield f"check '{check.says}' has no limit; set most or least"
    if tuning is not None:
        yield from (f"tuning names '{arm}', which is no arm" for arm in tuning.grids if arm not in arms)
        counts = {arm: len(tuning.points(arm)) for arm in tuning.grids}
        if len(set(counts.values())) > 1:
            yield f"grids differ in their numbers of points ({counts}), so one side is tuned harder"


def merged(base: Settings, changes: Settings) -> dict[str, Any]:
    """Return nested settings with nested changes; keys with dots are paths, and null removes what was there."""
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
    """Return settings by path with dots."""
    result: dict[str, Any] = {}
    for key, value in settings.items():
        nested = isinstance(value, Mapping) and value and key not in REPLACED
        result |= flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return result
