"""Tables of wrong inputs and expected texts, one row a line, for tests that try each row."""

from pathlib import Path
from typing import Any

import yaml


def rows(name: str) -> list[Any]:
    """Read the table of this name; each row is as long as the names that its test gives to the columns."""
    return yaml.safe_load((Path(__file__).parent / f"{name}.yaml").read_text(encoding="utf-8"))
