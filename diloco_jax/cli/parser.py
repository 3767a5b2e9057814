"""The parser of the `diloco` command: the type of a command, options that commands share, and help in groups.

`commands.py` lists the commands. A module with commands imports nothing heavy at its top, because `diloco --help`
imports them all; a command imports what it needs when it is called.
"""

from __future__ import annotations

import argparse
import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NoReturn

from diloco_jax.protocol.releases import RELEASE

OVERRIDES = "settings of the config may follow as --section.name value; `CONFIG --settings` lists them all"
CONFIG_HELP = "YAML file, or a packaged config such as quickstart"
SETTINGS_HELP = "list the settings with their meaning, and exit"
ALL_HELP = "with --settings: list those of clouds, GPU machines and TPU generations, too"


class Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line, and ends its help with examples."""

    examples: tuple[str, ...] = ()

    def error(self, message: str) -> NoReturn:
        if found := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)$", message):
            message += _nearest(found[1], re.findall(r"[^', ]+", found[2]))
        self.exit(2, f"{self.prog}: {message}; `{self.prog} --help` shows the options\n")

    def near_option(self, word: str) -> str:
        """Suggest the known option that is most like `word`; "" if none is similar."""
        word = word.partition("=")[0]
        near = _nearest(word, self._option_string_actions)
        return near and f"there is no option {word}{near}"

    def format_help(self) -> str:
        return super().format_help() + self.examples_text()

    def examples_text(self) -> str:
        if not self.examples:
            return ""
        title = "example:" if len(self.examples) == 1 else "examples:"
        return "\n".join(["", title, *(f"  {each}" for each in self.examples), ""])

    def takes_config(self, help: str = CONFIG_HELP, **how: Any) -> None:
        """Add the argument `config`, the option --settings, and settings of the config after them."""
        self.add_argument("config", help=help, **how)
        self.takes_settings(OVERRIDES, SETTINGS_HELP)
        self.add_argument("--all", action="store_true", help=ALL_HELP)

    def takes_settings(self, epilog: str, help: str) -> None:
        """Add --settings, and accept settings that this parser does not know; `epilog` describes them."""
        self.add_argument("--settings", action="store_true", help=help)
        self.set_defaults(takes_overrides=True)
        self.epilog = epilog

    def takes_run_dir(self) -> None:
        self.add_argument("--run-dir", help="folder of the run; default: a new one below runs_dir")

    def takes_json(self) -> None:
        self.add_argument("--json", action="store_true", help="print one JSON object")


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: the function that runs it, and the function that adds its arguments to a parser."""

    function: Callable[[argparse.Namespace], int]
    name: str
    # One line for `diloco --help`. Internal commands have none and are not listed.
    about: str
    options: Callable[[Parser], None] | None
    example: str
    trains: bool

    def __call__(self, arguments: argparse.Namespace) -> int:
        return self.function(arguments)

    @property
    def listed(self) -> bool:
        return bool(self.about)


def command(
    name: str,
    about: str = "",
    options: Callable[[Parser], None] | None = None,
    *,
    example: str = "",
    trains: bool = False,
) -> Callable[[Callable[[argparse.Namespace], int]], Command]:
    """Make the function below a command; `trains` if it uses accelerators, or starts processes that do."""
    return lambda function: Command(function, name, about, options, example, trains)


class _GroupedParser(Parser):
    """The parser of `diloco` itself; its help lists the commands in groups."""

    groups: Mapping[str, Sequence[Command]]

    def format_help(self) -> str:
        formatter = self.formatter_class(prog=self.prog)
        formatter.add_text(self.description)
        for title, commands in self.groups.items():
            formatter.start_section(title)
            listed = [each for each in commands if each.listed]
            formatter.add_arguments([argparse.Action([], each.name, help=each.about) for each in listed])
            formatter.end_section()
        formatter.start_section("options")
        formatter.add_arguments([each for each in self._actions if each.option_strings])
        formatter.end_section()
        return f"{self.format_usage()}\n{formatter.format_help()}{self.examples_text()}"


class _Versions(argparse.Action):
    """The option --version; it looks versions up only when it is given."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import version

        print(f"diloco-jax {RELEASE}, jax {version('jax')}, Python {platform.python_version()}")
        raise SystemExit(0)


def _nearest(word: str, known: Iterable[str]) -> str:
    near = get_close_matches(word, [*known], 1)
    return f"; did you mean {near[0]}?" if near else ""


def command_of(words: Sequence[str]) -> str | None:
    """Return the name of the command in a command line, None if there is none."""
    return next((word for word in words if not word.startswith("-")), None)


def check_command(parser: Parser, words: Sequence[str], known: Iterable[Command]) -> None:
    """Exit with a suggestion unless the first argument is a command."""
    name = command_of(words)
    if name is None and not {"-h", "--help", "--version"} & set(words):
        parser.error("name a command, such as train")
    if name is not None and name not in {each.name for each in known}:
        listed = [each.name for each in known if each.listed]
        parser.error(f"there is no command {name!r}{_nearest(name, listed)}")


def build_parser(
    groups: Mapping[str, Sequence[Command]], hidden: Sequence[Command], examples: Sequence[str], only: str | None = None
) -> Parser:
    """Build the parser of the command line from its commands.

    Args:
        only: the one command that gets its options, because the options of all take a tenth of a second; None for all.
    """
    parser = _GroupedParser(
        prog="diloco",
        description="Train one model on islands that never wait for each other (Decoupled DiLoCo in JAX).",
    )
    parser.groups, parser.examples = groups, tuple(examples)
    parser.add_argument("--version", action=_Versions, nargs=0, help="show the versions of this package and of JAX")
    parser.set_defaults(sub=parser, parser=parser, settings=False)
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=Parser)
    for each in [*(each for group in groups.values() for each in group), *hidden]:
        described: dict[str, Any] = {"help": each.about, "description": each.about} if each.listed else {}
        sub = subparsers.add_parser(each.name, **described)
        sub.set_defaults(name=each.name, command=each, takes_overrides=False, sub=sub)
        sub.examples = (each.example,) if each.example else ()
        if each.options is not None and only in (None, each.name):
            each.options(sub)
    return parser
