"""Text to RunConfig and back: YAML files, dotted overrides, and one clear error for each mistake.

config = load("configs/quickstart.yaml", ["--outer.learning_rate", "0.4"])
"""

import contextlib
import copy
import dataclasses
import difflib
import functools
import logging
import os
import re
import reprlib
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError
from yaml.composer import ComposerError

from diloco_jax.protocol.pacing import LEARNERS_MAX_LIMIT
from diloco_jax.protocol.releases import RELEASE
from diloco_jax.settings.packed import packed
from diloco_jax.settings.run import RunConfig

log = logging.getLogger(__name__)

CONFIG_BYTES_MAX = 1 << 20
# The first line of the config in a run's folder has these words and a release.
WRITTEN_BY = "# diloco-jax"
# The config in a run's folder lists all settings of its release. Configs of older releases lack the settings of this
# table. With the values here, such a run decides as its release did.
BEFORE: Mapping[str, Any] = {
    "merge.pairs_max": LEARNERS_MAX_LIMIT,
}
# Settings without an effect, which this release still accepts, and why they are gone.
_CLOSING = "rounds wait up to a step for islands that keep pace, and protocol.grace_steps_max 0 ends all waits"
REMOVED: Mapping[str, str] = {
    "protocol.grace_steps_min": _CLOSING,
    "protocol.grace_min_s": _CLOSING,
    "protocol.grace_safety": "gamma of Eq. 3 is 0.9",
}
# Settings of older releases that this one refuses, and what to write instead.
REFUSED: Mapping[str, str] = {
    "protocol.lease_s": "write protocol.silence_s, its new name",
    "syncer.shards": "delete it, because the syncer is one process",
}
# Former defaults of settings in REMOVED, which the folders of older runs list and which need no warning.
USUAL = (None, 0, 1, 0.1, 0.9)
# Pydantic's words for the type of a value, and the words of this project.
PLAINER = {
    "Input should be": "it must be",
    "a valid string": "text, in quotes",
    "a valid tuple": "a list such as [a, b]",
    "a valid dictionary": "a mapping such as {a: 1}",
}

# Errors of one config that a message shows.
PROBLEMS_SHOWN = 16

# A message shows a large or deep value in one line.
_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = 200
_BRIEF.maxlevel = 2
_ADAPTER = TypeAdapter(RunConfig)


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a config file and apply overrides such as `--train.steps 100`.

    Args:
        path: YAML file with the sections and keys of RunConfig. Keys that it leaves out have their defaults.
        overrides: arguments after the config, such as `--islands.count 3`, `--data.patterns *.md *.txt` or
            `--islands.each.island-0.devices=4`.

    Raises:
        ValueError: the file is missing or not a YAML mapping, or a key or value is wrong; it names the remedy.
    """
    values = read_settings(Path(path), warn=True)
    try:
        config = parse(values, str(path))
    except ValueError as error:
        first = _first_line(Path(path))
        wrote = first.removeprefix(WRITTEN_BY).strip()
        if not first.startswith(WRITTEN_BY) or wrote == RELEASE:
            raise
        raise ValueError(
            f"{error}. diloco-jax {wrote} wrote it, this is {RELEASE}: use {wrote} for this run"
        ) from error
    return parse(_overridden(values, overrides), "command line") if overrides else config


def read_settings(path: Path, *, warn: bool = False) -> Mapping[str, Any]:
    """Read the values of a config file without settings that are gone, and with those that a run of its release used.

    Args:
        warn: whether to log a warning for each removed name, once per file.

    Raises:
        ValueError: the file is missing or not a YAML mapping.
    """
    values = _without_removed(read_values(path), str(path), warn=warn)
    return _as_it_was(values) if _first_line(path).startswith(WRITTEN_BY) else values


def _first_line(path: Path) -> str:
    return path.read_text(encoding="utf-8").partition("\n")[0]


@functools.cache
def _warn_of_removed(source: str, name: str) -> None:
    """Log that a setting has no effect, once for each source."""
    log.warning(f"{source}: {name} has no effect: {REMOVED[name]}; delete it, the next release does not accept it")


def _without_removed(values: Mapping[str, Any], source: str, *, warn: bool = False) -> Mapping[str, Any]:
    """Leave out the settings in `REMOVED`."""
    for name in REMOVED:
        section, _, key = name.partition(".")
        here = values.get(section)
        if isinstance(here, Mapping) and key in here:
            # A run's folder of the release before lists every setting.
            if warn and here[key] not in USUAL:
                _warn_of_removed(source, name)
            values = {**values, section: {each: value for each, value in here.items() if each != key}}
    return values


def _as_it_was(values: Mapping[str, Any]) -> dict[str, Any]:
    """Add the settings that the config of an older run lacks, with their values in `BEFORE`."""
    result = copy.deepcopy(dict(values))
    for name, value in BEFORE.items():
        section, _, key = name.partition(".")
        if isinstance(here := result.setdefault(section, {}), dict):
            here.setdefault(key, value)
    return result


def as_begun(config: RunConfig, began: RunConfig) -> RunConfig:
    """Return a config with the run's values (`began`) of the settings in `BEFORE` in place of defaults.

    A run of an earlier release may be resumed with the user's file, which does not name these settings. A value that
    differs from the default was chosen by the user and stays.
    """
    for name in BEFORE:
        section, _, key = name.partition(".")
        ours, theirs, usual = (getattr(each, section) for each in (config, began, RunConfig()))
        if getattr(ours, key) == getattr(usual, key):
            kept = dataclasses.replace(ours, **{key: getattr(theirs, key)})
            config = dataclasses.replace(config, **{section: kept})
    return config


def _overridden(values: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """Replace the values of a file by the values of a command line, without checking either."""
    result, left = copy.deepcopy(dict(values)), list(words)
    lists = set[str]()
    while left:
        word, equals, first = left.pop(0).partition("=")
        if not word.startswith("--") or word == "--":
            raise ValueError(f"{word!r} is not a setting; settings follow the config as --section.name value")
        arguments = [first] if equals else []
        while not equals and left and not left[0].startswith("--"):
            arguments.append(left.pop(0))
        dotted = word.removeprefix("--").replace("-", "_")
        if dotted in REMOVED:
            _warn_of_removed("command line", dotted)
            continue
        *sections, name = word.removeprefix("--").split(".")
        here, hint = result, RunConfig
        for part in sections:
            part, hint = _step(hint, part)
            if not isinstance(here.get(part), dict):
                here[part] = {}
            here = here[part]
        name, hint = _step(hint, name)
        if typing.get_origin(hint) is tuple:
            if dotted in lists:
                raise ValueError(f"{word} is given twice; a list takes several words after one name: {word} A B")
            lists.add(dotted)
        here[name] = _value(word, arguments, hint)
    return result


def _step(hint: Any, part: str) -> tuple[str, Any]:
    """Return how a file spells one part of a dotted name, and the type of the setting or section that it names."""
    section, arguments = section_of(hint), typing.get_args(hint)
    if typing.get_origin(hint) is dict:
        return part, arguments[1]
    if section is None:
        return part, Any
    part = part.replace("-", "_")
    return part, typing.get_type_hints(section).get(part, Any)


def _value(word: str, arguments: list[str], hint: Any) -> Any:
    """Read the value of a setting from its arguments; a value that is not plain text is YAML."""
    if typing.get_origin(hint) is tuple:
        # A shell without quotes gives a list as in a YAML file in several words. A pattern such as [ab]*.txt is plain.
        listed = " ".join(arguments)
        return _as_yaml(word, listed) if listed.startswith("[") and listed.endswith("]") else arguments
    if len(arguments) != 1:
        raise ValueError(
            f"{word} takes one value, not {len(arguments)} ({' '.join(arguments)})"
            if arguments
            else f"{word} needs a value"
        )
    (text,) = arguments
    if type(None) in typing.get_args(hint) and text in ("None", "null"):
        return None
    holds = (hint, *typing.get_args(hint))
    if hint is not Any and not any(typing.get_origin(h) is dict or dataclasses.is_dataclass(h) for h in holds):
        return text
    if hint is Any and re.fullmatch(r"[-+]?[0-9.]+[eE][-+]?[0-9]+", text):
        with contextlib.suppress(ValueError):
            return float(text)
    return _as_yaml(word, text)


def _as_yaml(word: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{word} is {text!r}, which is not valid YAML: {' '.join(str(error).split())}") from error


def parse(values: Mapping[str, Any], source: str) -> RunConfig:
    """Check plain values and build the RunConfig; `source` names their origin in errors.

    Raises:
        ValueError: the message has all misspelt settings and values of a wrong type. A value that breaks a rule between
            settings is shown only if there are none, one for each section.
    """
    values = _without_removed(values, source)
    problems: list[str] = []
    known = _known_keys(RunConfig, values, "", problems)
    try:
        config = _ADAPTER.validate_python(known)
    except ValidationError as error:
        # Without a misspelt setting, rules may be broken that the file keeps, and what it names may be missing.
        ignored = ("value_error", "missing") if problems else ()
        shown: list[str] = []
        for each in error.errors():
            where = _where(each["loc"])
            # A setting of several types has an error for each, and errors of its parts.
            if each["type"] not in ignored and not any(f"{where}.".startswith(f"{above}.") for above in shown):
                shown.append(where)
                problems.append(_problem(where, each))
        raise _refusal(source, problems) from error
    if problems:
        raise _refusal(source, problems)
    return config


def _refusal(source: str, problems: Sequence[str]) -> ValueError:
    if len(problems) == 1:
        return ValueError(f"{source}: {problems[0]}")
    shown = [*problems[:PROBLEMS_SHOWN], *(f"and {n} more" for n in [len(problems) - PROBLEMS_SHOWN] if n > 0)]
    return ValueError("\n  ".join([f"{source} has {len(problems)} errors:", *shown]))


def _where(place: Sequence[int | str]) -> str:
    # Pydantic adds the name of a type where a setting has several types. The user did not write that.
    return ".".join(str(part) for part in place if part != "int" and not str(part).startswith("dict["))


def _problem(where: str, error: Any) -> str:
    """Describe an error of pydantic in this project's words."""
    message = error["msg"].removeprefix("Value error, ")
    # The checks of this package name setting and remedy in their message.
    if error["type"] == "value_error":
        return str(message)
    near = _nearest(error["input"], re.findall("'([^']+)'", message))
    for theirs, ours in PLAINER.items():
        message = message.replace(theirs, ours)
    return f"{where} is {_BRIEF.repr(error['input'])}; {re.sub(', (unable|got) .*', '', message)}{near}"


def parse_text(text: str, source: str) -> RunConfig:
    """Read a config from text, such as the text that `dump` writes; `source` names its origin in errors."""
    if len(text) > CONFIG_BYTES_MAX:
        raise ValueError(f"{source} has {len(text)} characters, the limit is {CONFIG_BYTES_MAX}; is it a config?")
    return parse(_mapping(text, source), source)


def as_plain(config: RunConfig) -> dict[str, Any]:
    """Return the config as nested dicts of plain values, every setting in full."""
    return typing.cast(dict[str, Any], _ADAPTER.dump_python(config, mode="json"))


def dump(config: RunConfig) -> str:
    """Write the config as YAML with every setting; `parse` reads it back to an equal RunConfig."""
    return yaml.safe_dump(as_plain(config), sort_keys=False, allow_unicode=True)


def dump_chosen(config: RunConfig) -> str:
    """Return as YAML only the settings that differ from their defaults; `parse` turns them into an equal RunConfig.

    A reader of another release then needs to know only the settings that were changed.
    """
    chosen = _differences(as_plain(config), as_plain(RunConfig()))
    return yaml.safe_dump(chosen, sort_keys=False, allow_unicode=True)


def _differences(values: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that differ from the usual ones; a mapping with other keys is returned whole."""
    differences: dict[str, Any] = {}
    for key, value in values.items():
        default = usual.get(key)
        if key in usual and value == default:
            continue
        same_keys = isinstance(value, Mapping) and isinstance(default, Mapping) and value.keys() == default.keys()
        differences[key] = _differences(value, default) if same_keys else value  # type: ignore[arg-type]
    return differences


def save(config: RunConfig, path: Path) -> None:
    """Write the config into a run's folder, with the release that wrote it."""
    draft = path.with_name(f"{path.name}.new")
    draft.write_text(f"{WRITTEN_BY} {RELEASE}\n{dump(config)}", encoding="utf-8")
    # A process that is killed here leaves the old config, not an empty one.
    os.replace(draft, path)


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested settings as (dotted name, value)."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def read_values(path: Path) -> Mapping[str, Any]:
    """Read the plain values of a config file for `parse`; ValueError if it is missing or not a YAML mapping."""
    try:
        # A device such as /dev/zero has no end.
        with path.open("rb") as file:
            content = file.read(CONFIG_BYTES_MAX + 1)
    except OSError as error:
        raise ValueError(f"config {path} cannot be read: {error.strerror}{_choices(path)}") from error
    if len(content) > CONFIG_BYTES_MAX:
        raise ValueError(f"config {path} has more than {CONFIG_BYTES_MAX} bytes, the limit{_choices(path)}")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"config {path} is not UTF-8 text ({error.reason}){_choices(path)}") from error
    return _mapping(text, f"config {path}")


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses a key that occurs twice in a mapping, since the first value would be lost."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise ComposerError(None, None, f"{key.value} is there twice", key.start_mark)
            seen.add(key.value)
        return node


def _mapping(text: str, source: str) -> Mapping[str, Any]:
    try:
        values = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        why = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ValueError(f"{source} is not valid YAML{where}: {why}; correct it there") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ValueError(f"{source} holds a {type(values).__name__}; it must be a mapping such as 'train: {{...}}'")
    return values


def _choices(path: Path) -> str:
    others = f"; name a YAML file, or a config of the package: {', '.join(packed())}"
    return _nearest(path.stem, packed()) or others


def _nearest(word: object, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(word), [*known], n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _known_keys(cls: type, values: Mapping[str, Any], prefix: str, problems: list[str]) -> dict[str, Any]:
    """Return the values of keys that a section has; describe in `problems` every key that no section has."""
    hints, known = typing.get_type_hints(cls), dict[str, Any]()
    for key, value in values.items():
        if key not in hints:
            near = difflib.get_close_matches(str(key), hints, n=1)
            similar = f"did you mean {prefix}{near[0]}?" if near else f"known are {', '.join(hints)}"
            advice = REFUSED.get(f"{prefix}{key}", similar)
            problems.append(f"unknown setting {prefix}{str(key)[:100]} (value {_BRIEF.repr(value)}); {advice}")
            continue
        kinds = {hints[key], *typing.get_args(hints[key])}
        # Pydantic would convert true to 1.
        if isinstance(value, bool) and bool not in kinds and kinds & {int, float}:
            problems.append(f"{prefix}{key} is {str(value).lower()}; it must be a number")
            continue
        section = section_of(hints[key])
        if section is None or (value is None and type(None) in typing.get_args(hints[key])):
            known[key] = value
        elif typing.get_origin(hints[key]) is dict and isinstance(value, Mapping):
            parts = {name: _section(section, each, f"{prefix}{key}.{name}", problems) for name, each in value.items()}
            known[key] = {name: part for name, part in parts.items() if part is not None}
        elif (part := _section(section, value, f"{prefix}{key}", problems)) is not None:
            known[key] = part
    return known


def _section(cls: type, part: Any, where: str, problems: list[str]) -> dict[str, Any] | None:
    if isinstance(part, Mapping):
        return _known_keys(cls, part, f"{where}.", problems)
    problems.append(f"{where} is {_BRIEF.repr(part)}, but it is a section; write its settings below it")
    return None


def section_of(hint: Any) -> type | None:
    """Return the dataclass that a setting holds or may hold, alone or by name; None if it holds none."""
    section = next((each for each in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(each)), None)
    return typing.cast(type | None, section)
