"""Results of the WAN benches, as a JSON object or as a table."""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def result(name: str, values: Sequence[float], unit: str, **more: Any) -> dict[str, Any]:
    """Return the median of some runs with its spread, and further figures."""
    rounded = [float(f"{value:.5g}") for value in values]
    middle = float(f"{statistics.median(values):.5g}")
    figures = {"name": name, "value": middle, "unit": unit, "low": min(rounded), "high": max(rounded)}
    return {**figures, "runs": len(rounded), "values": rounded, **more}


def rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a table with four significant digits."""
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()}


def show(outcome: Mapping[str, Any], as_json: bool) -> None:
    """Print a result as JSON or as text; its "rows" become a table."""
    if as_json:
        sys.stdout.write(json.dumps(outcome) + "\n")
        return
    console = Console(width=None if sys.stdout.isatty() else 160)
    title = f"{outcome['name']}: {outcome['value']:g} {outcome['unit']}"
    if outcome["runs"] > 1:
        title += f" ({outcome['low']:g} to {outcome['high']:g}, {outcome['runs']} runs)"
    console.print(title, highlight=False)
    rows = outcome.get("rows", [])
    if rows:
        keys = list(dict.fromkeys(key for row in rows for key in row))
        table = Table(*(key.replace("_", " ") for key in keys))
        for row in rows:
            values = (row.get(key, "") for key in keys)
            table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in values))
        console.print(table)
    for key, value in outcome.items():
        if key not in ("name", "value", "unit", "low", "high", "runs", "values", "rows"):
            console.print(f"{key.replace('_', ' ')}: {value}", highlight=False)
