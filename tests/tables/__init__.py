"""Tables of wrong inputs and expected texts, one row a line, for tests that try each row."""

from pathlib import Path
from typing import Any

import yaml


def rows(table: str) -> list[Any]:
    """Read a table, FILE.TABLE; each row has a value for each name that its test gives to the columns."""
    file, _, name = table.partition(".")
    return yaml.safe_load((Path(__file__).parent / f"{file}.yaml").read_text(encoding="utf-8"))[name]
