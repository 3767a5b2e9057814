"""The result of every way of launching: files, and the commands that use them in their order."""

import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

HEADER = "#!/usr/bin/env bash\n"
WIDTH = 110
PIECES = Path(__file__).with_name("pieces.txt")
IN_PROJECT = ("--project", "$PROJECT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run's launch, as data."""

    files: dict[str, str]  # relative path -> text. Those that begin with "#!" are made executable.
    create: tuple[str, ...]  # command lines of bash, run in the folder of the files, one by one
    delete: tuple[str, ...]  # the same, to take away what they made


def piece(name: str, /, **values: object) -> str:
    """Return a part of a script from pieces.txt, with values in place of their names between two @."""
    text = re.split(rf"(?m)^#= {name}\n", PIECES.read_text(encoding="utf-8"))[1].partition("\n#= ")[0].rstrip() + "\n"
    for key, value in values.items():
        text = text.replace(f"@{key}@", str(value))
    return text


def word(text: str) -> str:
    """Write a word of a command line, quoted where it must be; "$NAME" and "$(...)" in it stay to be expanded."""
    if "$" not in text:
        return shlex.quote(text)
    return '"' + text + '"'


def command(*words: str) -> str:
    """Write a command line; long ones go on in the next line, but not between a flag and its value."""
    parts: list[str] = []
    for each in words:
        if parts and parts[-1].startswith("-") and " " not in parts[-1] and "=" not in parts[-1] and each[:1] != "-":
            parts[-1] += " " + word(each)
        else:
            parts.append(word(each))
    lines: list[str] = [""]
    for part in parts:
        if lines[-1] and len(lines[-1]) + len(part) > WIDTH - 2:
            lines.append("    " + part)
        else:
            lines[-1] += (" " if lines[-1] else "") + part
    return " \\\n".join(lines)


class Resource(NamedTuple):
    """Something on Google Cloud that one of gcloud's groups makes, describes and deletes."""

    group: tuple[str, ...]  # words of the group, such as gcloud compute disks
    name: str  # of the thing
    place: tuple[str, ...] = ()  # flags that say where it is, in the project

    def look(self, *flags: str) -> str:
        """Write the command that describes it, and fails when it is not there."""
        return command(*self.group, "describe", self.name, *self.place, *IN_PROJECT, *flags)

    def make(self, *flags: str, kind: tuple[str, ...] = (), place: tuple[str, ...] = (), after: str = "") -> str:
        """Write a command that makes it if it is not there, so that a script can be run again.

        Args:
            flags: besides those of its place.
            kind: words before the name.
            place: more flags that say where it is to be.
            after: a command line whose output the making reads.
        """
        made = after + command(*self.group, "create", *kind, self.name, *self.place, *place, *IN_PROJECT, *flags)
        return f"have {self.look()} ||\n{textwrap.indent(made, '  ')}"

    def delete(self, *flags: str) -> str:
        """Write a command that deletes it if it is there."""
        gone = command(*self.group, "delete", self.name, *self.place, *IN_PROJECT, *flags, "--quiet")
        return f"if have {self.look()}; then\n  {gone}\nfi"


def script(comment: str, body: str, *, depth: int = 0) -> str:
    """Write a script that runs in the folder of the files and stops at the first failure."""
    up = "/.." * depth
    top = "".join(f"# {line}\n" for line in comment.splitlines())
    where = f'cd "$(dirname "${{BASH_SOURCE[0]}}"){up}"\nsource variables.sh\n'
    return f"{HEADER}{top}set -euo pipefail\n{where}\n{body.rstrip()}\n"


def verbs(functions: Mapping[str, Sequence[str]]) -> str:
    """Write the body of a script that is called as SCRIPT VERB: a function for each, and the choice."""
    text = ""
    for name, commands in functions.items():
        text += f"{name}() {{\n" + textwrap.indent("\n".join(commands), "  ") + "\n}\n\n"
    names = " | ".join(functions)
    return (
        text + f'case "${{1:-}}" in\n  {names}) "$1" ;;\n'
        f'  *)\n    echo "usage: $0 {names}" >&2\n    exit 2\n    ;;\nesac'
    )


def sequence_files(create: Sequence[str], delete: Sequence[str]) -> dict[str, str]:
    """Write create.sh and delete.sh, which run a plan's commands."""
    keeps = "Takes away what create.sh made, but for the disk with the run's folder, clusters and certificates.\n"
    return {
        "create.sh": script("Makes and starts everything. May be run again: what is there stays.", "\n".join(create)),
        # one that cannot be deleted must not keep the others
        "delete.sh": script(
            keeps + "Goes on after a failure, and ends with status 1 if there was one.",
            "failed=0\n" + "\n".join(f"{{ {line}; }} || failed=1" for line in delete) + '\nexit "$failed"',
        ),
    }
