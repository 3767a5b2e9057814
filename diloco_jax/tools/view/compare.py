"""Runs beside each other: what came of them, and the settings in which they differ."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from diloco_jax.tools.live.words import NO_VALUE, format_bytes, format_count, format_duration
from diloco_jax.tools.view.feed import RunFeed

Form = Callable[[Any], str]
RESULTS: dict[str, tuple[str, Form]] = {  # key of summary.json: its name and its form
    "eval_loss": ("eval loss", "{:.4f}".format),
    "eval_bits_per_byte": ("bits per byte", "{:.4f}".format),
    "tokens": ("tokens", format_count),
    "global_steps": ("global steps", str),
    "wall_s": ("wall time", format_duration),
    "goodput": ("goodput", "{:.1%}".format),
    "uptime": ("uptime", "{:.1%}".format),
    "contributors_per_round": ("contributors per round", "{:.2f}".format),
    "restarts": ("restarts", str),
    "up_bytes": ("moved up", format_bytes),
    "down_bytes": ("moved down", format_bytes),
}


def compare(folders: Sequence[Path]) -> dict[str, Any]:
    """Return a row per run, and the settings in which they differ, by name: a value per run, None where it has none."""
    rows, settings = [], []
    for folder in folders:
        feed = RunFeed(folder)
        while feed.look():
            pass
        told = feed.whole()
        summary, status = told["summary"], told["status"]
        known = {**summary, **summary["wire"], "goodput": summary.get("goodput", told["times"]["goodput"])}
        known["restarts"] = sum(row["restarts"] for row in summary["learners"].values())
        row = {"run": str(folder), "state": status["state"], "alarms": len(told["alarms"]) + len(told["ended"])}
        rows.append({**row, **{key: known.get(key) for key in RESULTS}})
        settings.append(told["settings"])
    names = dict.fromkeys(name for each in settings for name in each)
    values = {name: [each.get(name) for each in settings] for name in names}
    differ = {name: each for name, each in values.items() if any(value != each[0] for value in each)}
    return {"rows": rows, "settings": differ}


def describe(result: Mapping[str, Any], width: int) -> str:
    """Write the comparison as a table with a column per run."""
    rows = result["rows"]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for row in rows:
        table.add_column(Path(row["run"]).name, justify="right", overflow="fold")
    shown: dict[str, tuple[str, Form]] = {"state": ("state", str), **RESULTS, "alarms": ("alarms", str)}
    for key, (name, form) in shown.items():
        if any(row[key] is not None for row in rows):
            table.add_row(name, *(NO_VALUE if row[key] is None else form(row[key]) for row in rows))
    table.add_section()
    for name, values in result["settings"].items():
        table.add_row(name, *(NO_VALUE if value is None else str(value) for value in values))
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
