"""Runs beside each other: their results, and the settings that differ."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from diloco_jax.runtime.figures import table as figures
from diloco_jax.runtime.figures.forms import NO_VALUE, PLAIN
from diloco_jax.tools.page.feed import RunFeed


def compare(folders: Sequence[Path]) -> dict[str, Any]:
    """Return a row per run, and the settings that differ, by name: a value per run; None if the run lacks it."""
    rows, settings = [], []
    for folder in folders:
        feed = RunFeed(folder)
        while feed.look():
            pass
        facts = feed.whole()
        row = {
            "run": str(folder),
            "state": facts["status"]["state"],
            "alarms": len(facts["alarms"]) + len(facts["ended"]),
        }
        rows.append({**row, **{each["name"]: each["value"] for each in facts["compared"]}})
        settings.append(facts["settings"])
    names = dict.fromkeys(name for each in settings for name in each)
    values = {name: [each.get(name) for each in settings] for name in names}
    differ = {name: each for name, each in values.items() if any(value != each[0] for value in each)}
    return {"rows": rows, "settings": differ}


def describe(result: Mapping[str, Any], width: int) -> str:
    """Return the comparison as a table with a column per run."""
    rows = result["rows"]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for row in rows:
        table.add_column(Path(row["run"]).name, justify="right", overflow="fold")
    shown: list[tuple[str, str, Callable[[Any], str]]] = [("state", "state", str)]
    shown += [(figure.name, figure.words, figure.form.write) for figure in figures.compared()]
    for key, words, write in [*shown, ("alarms", "alarms", PLAIN.write)]:
        if any(row[key] is not None for row in rows):
            table.add_row(words, *(NO_VALUE if row[key] is None else write(row[key]) for row in rows))
    table.add_section()
    for name, values in result["settings"].items():
        table.add_row(name, *(NO_VALUE if value is None else str(value) for value in values))
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
