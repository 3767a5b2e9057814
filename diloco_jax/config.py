"""Text to RunConfig and back: YAML files, dotted overrides, one clear error for whatever is wrong.

config = load("configs/quickstart.yaml", ["--outer.learning_rate", "0.4"])
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro
import yaml
from pydantic import TypeAdapter, ValidationError

from diloco_jax.runtime.settings import RunConfig

CONFIG_BYTES_MAX = 1 << 20

_ADAPTER = TypeAdapter(RunConfig)


def load(path: str | Path, overrides: Sequence[str] = (), *, prog: str = "diloco") -> RunConfig:
    """Read a config file and apply overrides such as `--train.steps 100`.

    Args:
        path: YAML file; sections and keys are those of RunConfig. What it leaves out has its default.
        overrides: command-line words after the config; `--help` among them prints every setting and exits.
        prog: name that usage messages show.

    Raises:
        ValueError: the file is missing, is no YAML mapping, or a key or value is wrong; names it and the remedy.
        SystemExit: an override is wrong (status 2, after one message), or help was asked for (status 0).
    """
    config = parse(_read(Path(path)), str(path))
    if not overrides:
        return config
    return tyro.cli(
        RunConfig,
        default=config,
        args=list(overrides),
        prog=prog,
        config=(tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands),
    )


def parse(values: Mapping[str, Any], source: str) -> RunConfig:
    """Check plain values and build the RunConfig; `source` names their origin in errors."""
    unknown = _first_unknown_key(RunConfig, values, "")
    if unknown:
        raise ValueError(f"{source}: {unknown}")
    try:
        return _ADAPTER.validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "value_error":  # raised by our own checks, which name setting and remedy
            raise ValueError(f"{source}: {message}") from error
        raise ValueError(f"{source}: {where} is {first['input']!r}: {message}") from error


def dump(config: RunConfig) -> str:
    """The config as YAML, every setting written out; `parse` reads it back to an equal RunConfig."""
    return yaml.safe_dump(_ADAPTER.dump_python(config, mode="json"), sort_keys=False, allow_unicode=True)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > CONFIG_BYTES_MAX:
            raise ValueError(f"config {path} has more than {CONFIG_BYTES_MAX} bytes; is it a config?")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"config {path} cannot be read: {error.strerror}; name a YAML file, see configs/") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"config {path} is not UTF-8 text ({error.reason}); name a YAML file, see configs/") from error
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"config {path} is not valid YAML: {' '.join(str(error).split())}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ValueError(
            f"config {path} holds a {type(values).__name__}; it must be a mapping such as 'train: {{...}}'"
        )
    return values


def _first_unknown_key(cls: type, values: Mapping[str, Any], prefix: str) -> str:
    """In words, the first key that no section has, or an empty string."""
    hints = typing.get_type_hints(cls)
    for key, value in values.items():
        if key not in hints:
            near = difflib.get_close_matches(str(key), hints, n=1)
            advice = f"did you mean {prefix}{near[0]}?" if near else f"known are {', '.join(hints)}"
            return f"unknown setting {prefix}{key} (value {value!r}); {advice}"
        section, named = _section(hints[key])
        if section is None or (value is None and named is None):
            continue
        if not isinstance(value, Mapping):
            return f"{prefix}{key} is {value!r}, but it is a section; write its settings below it"
        for where, part in [(key, value)] if not named else [(f"{key}.{name}", each) for name, each in value.items()]:
            if not isinstance(part, Mapping):
                return f"{prefix}{where} is {part!r}, but it is a section; write its settings below it"
            found = _first_unknown_key(section, part, f"{prefix}{where}.")
            if found:
                return found
    return ""


def _section(hint: Any) -> tuple[type | None, bool | None]:
    """A setting's dataclass, None if it has none; and True: it maps names to such, None: it may be left empty."""
    arguments = typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return typing.cast(type, hint), False
    if typing.get_origin(hint) is dict and dataclasses.is_dataclass(arguments[1]):
        return typing.cast(type, arguments[1]), True
    if type(None) in arguments and dataclasses.is_dataclass(arguments[0]):
        return typing.cast(type, arguments[0]), None
    return None, False
