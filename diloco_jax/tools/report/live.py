"""Views of a run that goes on: the live view of `diloco train` and the words of `diloco status`.

Both read the status that the syncer writes about once a second, one JSON object:

    run, state (starting, running, complete, stopped; liveness.py has more), global_step, total_steps, waiting_for,
    wall_s, tokens, tokens_per_s, eval_loss, eval_scores (by name), contributors_per_round, wire: {up_bytes,
    down_bytes}, samples (their fates), epoch (life of the syncer), said: {machine, process, supervisor, unix_s (when)},
    alarms: [{kind, who, text, remedy} (protocol/watch/alarms.py)], learners: [
        {learner, state (joining, active, silent, gone), condition (protocol/watch/health.py), reason (for it),
         since_s (seconds in that condition), local_step, tokens, tokens_per_s, loss, step_s, last_merged_round,
         participation, restarts, metrics: {name: value} (docs/metrics.md)}]

A learner's numbers may be null until it has reported a step.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from diloco_jax.drawing.charts import format_bytes, format_count
from diloco_jax.runtime.records.liveness import QUIET_S, SILENT

REFRESHES_PER_S = 4
LINE_EVERY_S = 10.0  # without a terminal: one line this often
RATE_WINDOW_S = 60.0  # of run time, for the time left
CONDITION_STYLES = {
    "joining": "cyan",
    "recovering": "cyan",
    "training": "green",
    "slow": "yellow",
    "unmerged": "yellow",
    "evaluating": "green",
    "striking": "yellow",
    "silent": "yellow",
    "left": "dim",
    "gone": "red",
    "expelled": "red",
}
RUN_STYLES = {
    "starting": "cyan",
    "running": "green",
    "evaluating": "green",
    "complete": "green",
    "stopped": "yellow",
    SILENT: "yellow",
}
NO_VALUE = "–"
SPEEDS = {"mfu": ("MFU", "{:.0%}".format), "model_flops_per_s": ("FLOP/s", format_count)}  # the first that is known


def format_duration(seconds: float) -> str:
    """Return a duration with its two largest units: 9 s, 2 min 05 s, 3 h 07 min, 2 d 04 h."""
    whole = round(max(0.0, seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def _or_none(value: float | None, form: str) -> str:
    return NO_VALUE if value is None else format(value, form)


def _share(status: Mapping[str, Any]) -> float:
    """Return the share of the run that is done, in [0, 1]."""
    return min(1.0, status["global_step"] / max(1, status["total_steps"]))


def _time_left(status: Mapping[str, Any], steps_per_s: float | None) -> str:
    """Say how much time is left; empty when there is nothing to say."""
    if status["state"] != "running" or status["global_step"] <= 0:
        return ""
    rate = steps_per_s if steps_per_s is not None else status["global_step"] / max(status["wall_s"], 1e-9)
    if rate <= 0:
        return "time left unknown: no round lately"
    return f"about {format_duration((status['total_steps'] - status['global_step']) / rate)} left"


def _learner_table(learners: list[Mapping[str, Any]]) -> Table:
    # headers may wrap and the space between columns is one, so that it fits into 80 columns
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for name in ("island", "condition"):
        table.add_column(name, no_wrap=True)
    speed = next((name for name in SPEEDS if any(name in row.get("metrics", {}) for row in learners)), "")
    names = ["step", "tokens/s", "loss", "merged in", "takes part", "restarts"]
    if speed:
        names.insert(2, SPEEDS[speed][0])
    for name in names:
        table.add_column(name, justify="right")
    for row in learners:
        condition, value = row["condition"], row.get("metrics", {}).get(speed)
        state = Text(condition, style=CONDITION_STYLES.get(condition, ""))
        if condition != "training":
            number, unit, *_ = format_duration(row["since_s"]).split()
            state.append(f" {number}{unit[0]}", style="dim")  # 80 columns are few
        restarts = Text(str(row["restarts"]), style="yellow" if row["restarts"] else "dim")
        table.add_row(
            Text(row["learner"]),
            state,
            str(row["local_step"]),
            format_count(row["tokens_per_s"]),
            *([NO_VALUE if value is None else SPEEDS[speed][1](value)] if speed else []),
            _or_none(row["loss"], ".3f"),
            str(row["last_merged_round"]) if row["last_merged_round"] else NO_VALUE,
            f"{row['participation']:.0%}",
            restarts,
        )
    return table


def render(status: Mapping[str, Any], *, steps_per_s: float | None = None) -> RenderableType:
    """Draw a run.

    Args:
        steps_per_s: recent global steps per second, for the time left; None takes the mean over the run.
    """
    state = Text(status["state"], style=f"bold {RUN_STYLES.get(status['state'], '')}")
    steps = f"{_share(status):.0%}, step {status['global_step']} of {status['total_steps']}"
    times = ", ".join(filter(None, (format_duration(status["wall_s"]), _time_left(status, steps_per_s))))
    progress = Table.grid(padding=(0, 2, 0, 0))
    progress.add_row(ProgressBar(total=1.0, completed=_share(status), width=16), Text(steps), Text(times, style="dim"))
    wire = status["wire"]
    facts = [
        f"{format_count(status['tokens'])} tokens, {format_count(status['tokens_per_s'])}/s",
        f"eval loss {_or_none(status['eval_loss'], '.4f')}",
        f"{status['contributors_per_round']:.2f} contributors per round",
        f"up {format_bytes(wire['up_bytes'])}, down {format_bytes(wire['down_bytes'])}",
    ]
    nobody = Text("no island has connected yet; the first step compiles, which may take a minute", style="dim")
    islands = _learner_table(status["learners"]) if status["learners"] else nobody
    waiting = Text.assemble(("waiting for: ", "dim"), status["waiting_for"])
    alarms = [Text(alarm_line(alarm), style="red") for alarm in status["alarms"]]
    title = Text.assemble((status["run"], "bold"), "  ", state)
    return Group(title, progress, Text(" · ".join(facts)), Text(), islands, Text(), waiting, *alarms)


def line(status: Mapping[str, Any], *, steps_per_s: float | None = None) -> str:
    """Say in one plain line, for logs, how a run is."""
    active = sum(row["state"] == "active" for row in status["learners"])
    parts = [
        f"{status['run']}: {status['state']}, step {status['global_step']} of {status['total_steps']}",
        f"{active} of {len(status['learners'])} islands active",
        f"{format_count(status['tokens'])} tokens at {format_count(status['tokens_per_s'])}/s",
        f"{status['contributors_per_round']:.2f} contributors per round",
        format_duration(status["wall_s"]),
        _time_left(status, steps_per_s),
        f"waiting for: {status['waiting_for']}",
        *(f"alarm: {alarm['text']}" for alarm in status["alarms"]),
    ]
    if status["eval_loss"] is not None:
        parts.insert(3, f"eval loss {status['eval_loss']:.4f}")
    return ", ".join(part for part in parts if part)


def describe(status: Mapping[str, Any]) -> str:
    """Say in plain text, for `diloco status`, which island is in which condition, and since when."""
    progress = f"global step {status['global_step']} of {status['total_steps']} ({_share(status):.0%}) after "
    progress += format_duration(status["wall_s"])
    quiet = "said_s_ago" in status
    if quiet:
        progress = f"last word {format_duration(status['said_s_ago'])} ago, at {progress}"
    text = [f"{status['run']} is {status['state']}: {progress}"]
    if left := _time_left(status, None):
        text[0] += f", {left}"
    text += [status["remedy"], "it said then:"] if quiet else []
    text += [
        f"waiting for: {status['waiting_for']}",
        f"tokens: {format_count(status['tokens'])}, now {format_count(status['tokens_per_s'])}/s; "
        f"eval loss: {_or_none(status['eval_loss'], '.4f')}" + scores_text(status.get("eval_scores", {})),
        f"contributors per round: {status['contributors_per_round']:.2f}; moved up "
        f"{format_bytes(status['wire']['up_bytes'])}, down {format_bytes(status['wire']['down_bytes'])}",
    ]
    text += [alarm_line(alarm) for alarm in status["alarms"]]
    if not status["learners"]:
        text.append("no island has connected yet")
    width = max((len(row["learner"]) for row in status["learners"]), default=0)
    text += [f"  {row['learner']:<{width}}  {_condition(row)}" for row in status["learners"]]
    return "\n".join(text)


def _condition(row: Mapping[str, Any]) -> str:
    merged = f"last merged in round {row['last_merged_round']}" if row["last_merged_round"] else "never merged yet"
    restarts = f", {row['restarts']} restart{'s' if row['restarts'] != 1 else ''}" if row["restarts"] else ""
    details = f" after step {row['local_step']}"
    if row["state"] == "active":
        rate = f"{format_count(row['tokens_per_s'])} tokens/s"
        for name, form in (("grad_norm", "grad norm {:.3g}"), ("mfu", "MFU {:.1%}")):
            if (value := row.get("metrics", {}).get(name)) is not None:
                rate += f", {form.format(value)}"
        details = f": step {row['local_step']}, loss {_or_none(row['loss'], '.3f')}, {rate}"
    reason = f"; {row['reason']}" if row["reason"] else ""
    condition = f"{row['condition']} for {format_duration(row['since_s'])}{details}{reason}"
    return f"{condition}; {merged}, participation {row['participation']:.0%}{restarts}"


def alarm_line(alarm: Mapping[str, Any]) -> str:
    """Write an alarm of a status or a summary."""
    times = f" (for {format_duration(alarm['lasted_s'])}, {alarm['times']} times)" if "times" in alarm else ""
    return f"alarm: {alarm['text']}{times}; {alarm['remedy']}"


def scores_text(scores: Mapping[str, float | None]) -> str:
    """Write the numbers of evaluation.module, to follow the loss."""
    return "".join(f", {name} {_or_none(value, '.4g')}" for name, value in scores.items())


class LiveView:
    """A view of a run's status file until the context ends: a live table on a terminal, a line now and then elsewhere.

    It only reads, from its own thread; a status file that is missing or unreadable leaves the last picture.
    """

    def __init__(self, status_path: Path, console: Console) -> None:
        self._path = status_path
        self._console = console
        self._status: dict[str, Any] | None = None
        self._heard_s = time.monotonic()
        self._history: deque[tuple[float, int]] = deque()  # (wall_s, global_step), newest last
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._live: Live | None = None

    def __enter__(self) -> LiveView:
        if self._console.is_terminal:
            self._live = Live(get_renderable=self.picture, console=self._console, refresh_per_second=REFRESHES_PER_S)
            self._live.start()
        else:
            self._thread = threading.Thread(target=self._print_lines, name="live-view", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._live is not None:
            self._live.stop()  # draws once more
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self.print_line()

    def _print_lines(self) -> None:
        while not self._stop.wait(LINE_EVERY_S):
            self.print_line()

    def print_line(self) -> None:
        """Print the newest status as one line, unless there is none."""
        self.poll()
        if (status := self._current()) is not None:
            text = line(status, steps_per_s=self.steps_per_s())
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def picture(self) -> RenderableType:
        self.poll()
        status = self._current()
        if status is None:
            return Text("starting: waiting for the syncer", style="dim")
        return render(status, steps_per_s=self.steps_per_s())

    def _current(self) -> dict[str, Any] | None:
        """Return the last status; when it has become old, with a word about that instead of an estimate."""
        quiet_s = time.monotonic() - self._heard_s
        if self._status is None or self._status["state"] != "running" or quiet_s < QUIET_S:
            return self._status
        waiting = f"the syncer, which has said nothing for {format_duration(quiet_s)}"
        return {**self._status, "state": SILENT, "waiting_for": waiting}

    def poll(self) -> None:
        """Read the status file; keep the last status when that fails."""
        try:
            status = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return
        if not isinstance(status, dict) or "learners" not in status:
            return
        if status != self._status:
            self._heard_s = time.monotonic()
        self._status = status
        now = (status["wall_s"], status["global_step"])
        if self._history and (now < self._history[-1] or now[1] < self._history[-1][1]):
            self._history.clear()  # a new run in the same place, or back to a snapshot
        if not self._history or now != self._history[-1]:
            self._history.append(now)
        while len(self._history) > 2 and self._history[1][0] < now[0] - RATE_WINDOW_S:
            self._history.popleft()

    def steps_per_s(self) -> float | None:
        """Return global steps per second of run time over the last minute; None before two readings."""
        if len(self._history) < 2:
            return None
        (begin_s, begin_step), (end_s, end_step) = self._history[0], self._history[-1]
        return (end_step - begin_step) / (end_s - begin_s) if end_s > begin_s else None
