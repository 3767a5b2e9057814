"""The result of every way of launching: files, and the commands that use them in their order."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HEADER = "#!/usr/bin/env bash\n"
PIECES = Path(__file__).with_name("pieces.txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run's launch, as data."""

    files: dict[str, str]  # relative path -> text. Those that begin with "#!" are made executable.
    create: tuple[str, ...]  # command lines of bash, run in the folder of the files, one by one
    delete: tuple[str, ...]  # the same, to take away what they made


def piece(name: str, /, **values: object) -> str:
    """Return a part of a script from pieces.txt, with values in place of their names between two @.

    A list has other parts, which take the place of a line.
    """
    text = re.split(rf"(?m)^#= {name}\n", PIECES.read_text(encoding="utf-8"))[1].partition("\n#= ")[0].rstrip() + "\n"
    for key, value in values.items():
        if isinstance(value, list):
            text = text.replace(f"@{key}@\n", "".join(value))
        text = text.replace(f"@{key}@", str(value))
    return text


def script(comment: str, body: str, *, depth: int = 0) -> str:
    """Write a script that runs in the folder of the files and stops at the first failure.

    One that has functions is called as SCRIPT VERB, and the verb is one of them.
    """
    names = " | ".join(re.findall(r"(?m)^(\w+)\(\) \{$", body))
    about = "".join(f"# {line}\n" for line in comment.splitlines())
    choice = piece("choice", names=names) if names else ""
    return HEADER + piece("script", about=[about], up="/.." * depth, body=[body.rstrip() + "\n"], choice=[choice])


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
