"""The parser of the `diloco` command, made from words.toml: its subcommands, their arguments and help texts."""

from __future__ import annotations

import argparse
import platform
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from diloco_jax.protocol.releases import RELEASE
from diloco_jax.settings.packed import packed
from diloco_jax.sim.goodput.settings import Assumptions

CHAOS_LEARNER, COMPILE = "chaos-learner", "compile"
OVERRIDES = "settings of the config may follow as --section.name value; `CONFIG --settings` lists them all"
TYPES = {"int": int, "float": float}


class Parser(argparse.ArgumentParser):
    """A parser that says in one line what is wrong with a command line."""

    def error(self, message: str) -> NoReturn:
        if found := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)$", message):
            message += _nearest(found[1], re.findall(r"[^', ]+", found[2]))
        self.exit(2, f"{self.prog}: {message}; `{self.prog} --help` says more\n")

    def near_option(self, word: str) -> str:
        """Say which option people may have meant; "" if none is like it."""
        word = word.partition("=")[0]
        near = _nearest(word, self._option_string_actions)
        return near and f"there is no option {word}{near}"


def _nearest(word: str, known: Iterable[str]) -> str:
    near = get_close_matches(word, [*known], 1)
    return f"; did you mean {near[0]}?" if near else ""


class _Versions(argparse.Action):
    """The answer to --version, looked up only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import version

        print(f"diloco-jax {RELEASE}, jax {version('jax')}, Python {platform.python_version()}")
        raise SystemExit(0)


def read_words() -> dict[str, dict[str, Any]]:
    """Return the commands of words.toml by name, with what only the program knows; `words` has those of each."""
    known = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
    shared = known.pop("shared")
    known["init"]["config"] |= {"choices": tuple(packed()), "help": ", ".join(packed())}
    for each in fields(Assumptions):
        text, source = each.metadata["help"], each.metadata["source"]
        if each.default:
            text += f"; default: {each.default:g}" + (f" ({source})" if source else "")
        kind = "int" if isinstance(each.default, int) else "float"
        word = {"type": kind, "metavar": "N", "help": text.replace("%", "%%")}
        known["plan"][f"--{each.name.replace('_', '-')}"] = word
    for entry in known.values():
        own = {name: word for name, word in entry.items() if isinstance(word, dict)}
        words = entry["words"] = {name: word for group in entry.get("with", ()) for name, word in shared[group].items()}
        words |= {name: words.get(name, {}) | word for name, word in own.items()}
    return known


def check_command(parser: Parser, words: Sequence[str], known: Mapping[str, Mapping[str, Any]]) -> None:
    """End with a word about what people may have meant, unless the first word is a command; some are not listed."""
    name = next((word for word in words if not word.startswith("-")), None)
    if name is None and not {"-h", "--help", "--version"} & set(words):
        parser.error("name a command, such as train")
    if name is not None and name not in known:
        listed = [each for each, entry in known.items() if "about" in entry]
        parser.error(f"there is no command {name!r}{_nearest(name, listed)}")


def make_parser(known: Mapping[str, Mapping[str, Any]]) -> Parser:
    """Make the command line's parser from what `read_words` returns."""
    parser = Parser(
        prog="diloco",
        description="Train one model on islands that never wait for each other (Decoupled DiLoCo in JAX).",
    )
    parser.add_argument("--version", action=_Versions, nargs=0, help="show the versions of this package and of JAX")
    parser.set_defaults(sub=parser, parser=parser, settings=False)
    commands, made = parser.add_subparsers(title="commands", required=True, metavar="COMMAND"), dict[str, Parser]()
    for name, entry in known.items():
        like = [made[entry["like"]]] if "like" in entry else []
        told = {"help": entry["about"], "description": entry["about"]} if "about" in entry else {}
        sub = made[name] = commands.add_parser(name, parents=like, add_help=not like, **told)
        sub.epilog = entry.get("epilog", OVERRIDES if "config" in entry.get("with", ()) else None)
        overrides = bool(like or sub.epilog)
        sub.set_defaults(name=name, calls=entry["calls"], takes_overrides=overrides, sub=sub)
        for word, how in entry["words"].items():
            kind = {"type": TYPES[how["type"]]} if "type" in how else {}
            sub.add_argument(word, **{"help": argparse.SUPPRESS, **how, **kind})
    return parser


def function_of(calls: str) -> Callable[[argparse.Namespace], int]:
    """Import the function of a command, such as runs.train."""
    module, name = calls.split(".")
    function: Callable[[argparse.Namespace], int] = getattr(import_module(f"diloco_jax.cli.{module}"), name)
    return function
