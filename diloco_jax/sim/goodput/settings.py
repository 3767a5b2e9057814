"""Settings of a simulation, read from arguments `--section.name value`, and the assumptions of a forecast."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from difflib import get_close_matches
from typing import Any

YEAR_S = 31_536_000.0
CHIPS_MAX = 1e12
SLICES_MAX = 1_000_000
MEASURED = "measured, docs/log.md of 2026-11-21"
READ = "measured, docs/plan.md"
COMPUTED = "computed, docs/plan.md"


def setting(default: Any, text: str, source: str) -> Any:
    """Make a field of a settings class with the help and the source that `--settings` prints."""
    return field(default=default, metadata={"help": text, "source": source})


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Links, machines and prices of a forecast, options of `diloco plan`; 0 means that an option is not given."""

    link_gbit_per_s: float = setting(5.0, "rate of each site's link, each way", "the paper: 2 to 5")
    syncer_link_gbit_per_s: float = setting(0.0, "rate of the syncer's link, each way; 0: as that of a site", "")
    round_trip_ms: float = setting(60.0, "round trip between a learner and the syncer", "a continent")
    tcp_window_mb: float = setting(4.0, "what one connection may have under way", "Linux's default")
    slices_gbit_per_s: float = setting(
        0.0, "rate of a host's network to other slices of its island, each way; 0: unknown, and not judged", ""
    )
    sites: int = setting(0, "data centres among which the learners are dealt out; 0: one for each learner", "")
    step_s: float = setting(0.0, "seconds of computation per inner step; 0: from model FLOPs and --mfu, if known", "")
    mfu: float = setting(0.4, "share of the chips' peak that model FLOPs reach", "between preflight's 0.3 and 0.5")
    chips: int = setting(0, "chips of all learners together; 0: those of the config's islands", "")
    slices: int = setting(0, "slices of all learners together that fail one by one; 0: those of the config", "")
    mtbi_years: float = setting(1.0, "mean time between two failures of one chip", "the paper: 1")
    restart_s: float = setting(60.0, "from the return of a slice until its processes ask to join", "assumed")
    syncer_cores: int = setting(16, "cores of the syncer's machine", "assumed")
    syncer_ms_per_mb: float = setting(2.43, "processor time per megabyte that learners send, int4", MEASURED)
    merge_ns: float = setting(0.7, "processor time of a merge per parameter and learner, int4", MEASURED)
    syncer_gb_per_s: float = setting(4.3, "gigabytes per second, each way, that a syncer with TLS can carry", COMPUTED)
    arrival_ns: float = setting(0.75, "time of a thread to decode, add and check an element", READ)
    place_ns: float = setting(0.74, "time to copy an element that arrived to a host's devices", READ)
    island_s_per_gb: float = setting(0.55, "time of a host to send one gigabyte to other hosts of its island", READ)
    price_per_chip_hour: float = setting(0.0, "of one chip, of islands without their own price", "yours")
    price_per_egress_gb: float = setting(0.0, "of 1e9 bytes that leave a site", "yours")

    def __post_init__(self) -> None:
        positive = ("link_gbit_per_s", "tcp_window_mb", "mtbi_years", "syncer_cores", "syncer_gb_per_s")
        for name in self.__slots__:
            value = getattr(self, name)
            option = f"--{name.replace('_', '-')}"
            if not math.isfinite(value) or value < 0 or (name in positive and value == 0):
                raise ValueError(
                    f"{option} is {value}; use a number {'above' if name in positive else 'of at least'} 0"
                )
        if not 0 < self.mfu <= 1:
            raise ValueError(f"--mfu is {self.mfu}; use a share above 0 and at most 1")
        if self.mtbi_years * YEAR_S < 1:
            raise ValueError(f"--mtbi-years is {self.mtbi_years}, less than a second; use at least {1 / YEAR_S:.1e}")
        for name, most in (("slices", SLICES_MAX), ("chips", CHIPS_MAX)):
            if getattr(self, name) > most:
                raise ValueError(f"--{name} is {getattr(self, name)}; use at most {most:g}")
        if self.sites == 1:
            raise ValueError("--sites is 1: one site needs no wide-area link; use at least 2")


def number(text: str, option: str) -> float:
    """Read a number such as 150k, 1.2m or 2400000; ValueError for other text."""
    scale = {"k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}.get(text[-1:].lower(), 1.0)
    try:
        return float(text[:-1] if scale != 1.0 else text) * scale
    except ValueError:
        raise ValueError(f"{option} is {text!r}, but must be a number; write 150000, 150k, 1.2m or 5g") from None


def compact(value: float) -> str:
    """Write a number as 150k, 1.2m or 192."""
    for scale, unit in ((1e9, "g"), (1e6, "m"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:g}{unit}"
    return f"{value:g}"


def read(words: Sequence[str], sections: Mapping[str, type]) -> dict[str, Any]:
    """Read the settings of sections from arguments such as `--hardware.step-s 2.5`; ValueError names a wrong one."""
    known = {
        f"--{name}.{each.name.replace('_', '-')}": (name, each)
        for name, made in sections.items()
        for each in _numbers(made)
    }
    given: dict[str, dict[str, Any]] = {name: {} for name in sections}
    left = list(words)
    while left:
        word, _, value = left.pop(0).partition("=")
        option = word.replace("_", "-")
        if option not in known:
            near = get_close_matches(option, known, 1)
            hint = f"; do you mean {near[0]}?" if near else "; --settings lists them all"
            raise ValueError(f"the setting {word} does not exist{hint}")
        if not value and not left:
            raise ValueError(f"{word} needs a value")
        section, each = known[option]
        given[section][each.name] = _value(option, each, value or left.pop(0))
    return {name: made(**given[name]) for name, made in sections.items()}


def _numbers(made: type) -> list[Field[Any]]:
    """Return the settings that an argument can set: numbers and booleans."""
    return [each for each in fields(made) if isinstance(each.default, int | float)]


def _value(option: str, each: Field[Any], text: str) -> Any:
    default: object = each.default
    kind = type(default)
    if kind is bool:
        words = {"true": True, "false": False}
        if text.lower() not in words:
            raise ValueError(f"{option} is {text!r}; use true or false")
        return words[text.lower()]
    value = number(text, option)
    if kind is int:
        if value != value or value in (float("inf"), float("-inf")) or value != int(value):
            raise ValueError(f"{option} is {text}, but must be a whole number")
        return int(value)
    return value


def describe(sections: Mapping[str, type]) -> str:
    """Return a list of all settings with default, meaning and source."""
    lines = []
    for name, made in sections.items():
        for each in _numbers(made):
            option = f"--{name}.{each.name.replace('_', '-')}"
            lines.append(f"{option}  (default: {each.default})")
            if each.metadata:
                lines.append(f"      {each.metadata['help']}; source: {each.metadata['source']}")
    return "\n".join(lines)
