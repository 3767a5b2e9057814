"""A self-contained page about a run, report.html, readable offline, made from what lies in the run's folder.

Read from metrics.jsonl, and where present summary.json (its numbers win over those counted here) and config.yaml. A run
that was stopped in the middle has no summary.json and gets a page with what its records say.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from diloco_jax.drawing import charts
from diloco_jax.drawing.charts import HALF, WIDE, Axis, Line, format_bytes, format_count
from diloco_jax.drawing.page import figure, legend, page
from diloco_jax.protocol.messages import SYNCER
from diloco_jax.protocol.watch.stats import WAITING, never_merged
from diloco_jax.runtime.records.files import CONFIG_FILE, METRICS_FILE, REPORT_FILE, SUMMARY_FILE
from diloco_jax.runtime.records.telemetry import replace_text
from diloco_jax.tools.report import plots
from diloco_jax.tools.report.live import format_duration
from diloco_jax.tools.report.plots import MARKS, smooth, style, thin
from diloco_jax.tools.report.story import Story, read_story, read_summary

METRICS_MAX = 8  # charts of what islands measured
METRICS_FIRST = ("grad_norm", "learning_rate", "tokens_per_s", WAITING, "mfu", "model_flops_per_s")


def _loss_charts(story: Story) -> str:
    """Draw loss over tokens and over time, islands and global model, on one scale of losses."""
    values = [
        loss
        for track in story.tracks.values()
        for _, loss in smooth([(step[0], step[2]) for step in track.steps if step[0] >= story.settled_s])
    ]
    values += [loss for t, _, loss in story.evals if t >= story.settled_s]
    if not values:
        return ""
    y_axis = charts.number_axis(values, "loss")
    note = (
        "Training loss of every island (moving average) against the tokens that all islands had trained on by "
        "then, and the evaluation of the global model on held-out data, in nats per token."
    )
    tokens = charts.count_axis(story.tokens, "tokens, all islands together")
    return _loss_chart(story, "Loss over tokens", note, 1, tokens, y_axis) + _loss_chart(
        story, "Loss over time", "The same losses against time.", 0, _time_axis(story), y_axis
    )


def _loss_chart(story: Story, title: str, note: str, column: int, x_axis: Axis, y_axis: Axis) -> str:
    lines = []
    for index, (name, track) in enumerate(story.tracks.items()):
        points = smooth([(step[column], step[2]) for step in track.steps])
        lines += [Line(name=name, points=points, style=style(index, len(story.tracks)))] if points else []
    entries = [(line.name, line.style) for line in lines]
    if len(story.tracks) > charts.NUM_COLOURS:
        entries = [(f"{len(lines)} islands", "many")]
    if story.evals:
        points = [(point[column], point[2]) for point in story.evals]
        lines.append(Line(name="global model (eval)", points=points, style="main", dots=True))
        entries.append(("global model (eval)", "main"))
    chart = charts.line_chart(title, lines, x_axis, y_axis, width=WIDE, height=340 if column else 280)
    return figure(title, note, chart, legend(entries))


def _time_axis(story: Story, ticks_max: int = 10) -> Axis:
    return charts.time_axis(story.end_s, "time since the run began", ticks_max)


def _timeline(story: Story) -> str:
    if not story.rounds and not story.marks:
        return ""
    note = (
        f"{len(story.rounds)} rounds merged, {story.abandoned} abandoned. A cell is full when the island was merged in "
        "every round of that stretch, pale when in few, empty when in none."
    )
    signs = "".join(
        f'<li><svg viewBox="-8 -8 16 16"><g class="mark">{plots.glyph(kind)}</g></svg>{words}</li>'
        for kind, words in MARKS.items()
        if any(mark.kind == kind for mark in story.marks)
    )
    title = "Rounds and their members"
    rows = [*story.tracks, *([SYNCER] if any(mark.learner == SYNCER for mark in story.marks) else [])]
    chart = plots.timeline(title, rows, story.rounds, story.marks, (story.begin_s, story.end_s))
    return figure(title, note, chart, f'<ul class="legend">{signs}</ul>')


def _wire_chart(story: Story, wire: Mapping[str, Any]) -> str:
    if not story.wire or story.wire[-1][1] + story.wire[-1][2] == 0:
        return ""
    up, down = wire["up_bytes"], wire["down_bytes"]
    lines = [
        Line(name=f"up, {format_bytes(up)}", points=thin([(t, u) for t, u, _ in story.wire if u]), style="k0"),
        Line(name=f"down, {format_bytes(down)}", points=thin([(t, d) for t, _, d in story.wire if d]), style="k4"),
    ]
    note = "Bytes moved between islands and syncer since the run began, on a logarithmic scale."
    data_parallel = wire.get("data_parallel_bytes")
    if data_parallel and story.tokens:
        scale = data_parallel / story.tokens
        points = thin([(t, tokens * scale) for t, tokens in story.progress])
        name = f"data parallel, {format_bytes(data_parallel)}"
        lines.append(Line(name=name, points=points, style="main dashed"))
        note += (
            " Averaging bfloat16 gradients in every step would have moved "
            f"{data_parallel / max(1, up + down):.0f} times as much, up and down together."
        )
    else:
        note += " The comparison with data parallel needs summary.json, which is written when a run ends."
    values = [y for line in lines for x, y in line.points if x >= story.settled_s]
    chart = charts.line_chart(
        "Bytes on the wire",
        [line for line in lines if line.points],
        _time_axis(story),
        charts.bytes_axis(values, "bytes"),
        width=WIDE,
        height=280,
    )
    return figure("Bytes on the wire", note, chart, legend([(line.name, line.style) for line in lines]))


def _metric_charts(story: Story) -> str:
    """Draw what islands measured, the best known first; the loss has its own charts."""
    rest, out = sorted(set(story.metrics) - {*METRICS_FIRST, "loss", "step_s"}), ""
    for name in [*(name for name in METRICS_FIRST if name in story.metrics), *rest][:METRICS_MAX]:
        curves = [(index, each, story.metrics[name].get(each)) for index, each in enumerate(story.tracks)]
        count = len(story.tracks)
        lines = [Line(name=each, points=thin(some), style=style(index, count)) for index, each, some in curves if some]
        if values := [value for line in lines for _, value in line.points]:
            axis = charts.number_axis(values, name)
            large = axis.high >= 10_000
            axis = replace(axis, ticks=tuple((x, format_count(x) if large else text) for x, text in axis.ticks))
            chart = charts.line_chart(name, lines, _time_axis(story, 6), axis, width=HALF, height=220)
            out += figure(name, "Of every island, about once per second.", chart, wide=False)
    return out


def _island_bars(learners: Mapping[str, Mapping[str, Any]]) -> str:
    def values(key: str) -> list[tuple[str, float, str]]:
        rows = [(name, row[key], style(index, len(learners))) for index, (name, row) in enumerate(learners.items())]
        return [row for row in rows if row[1] is not None]

    out = ""
    if participation := values("participation"):
        chart = plots.bars("Participation", participation, high=1.0, width=HALF)
        out += figure("Participation", "Share of the merged rounds that an island was in.", chart, wide=False)
    if overhead := values("step_overhead"):
        high = max(1, math.ceil(10 * max(value for _, value, _ in overhead))) / 10
        chart = plots.bars("Step overhead", overhead, high=high, width=HALF)
        note = f"Share of an island's time between two steps. A full bar is {high:.0%}."
        out += figure("Step overhead", note, chart, wide=False)
    return out


def _figures(summary: Mapping[str, Any]) -> str:
    """List the key figures; what a run does not have is left out."""
    wire, fates = summary["wire"], summary.get("samples", {"merged": 0, "overwritten": 0})
    settled = fates["merged"] + fates["overwritten"]
    cells: list[tuple[str, Any, Callable[[Any], str]]] = [
        ("eval loss", summary["eval_loss"], "{:.4f}".format),
        ("bits per byte", summary["eval_bits_per_byte"], "{:.4f}".format),
        *((escape(name), value, "{:.4g}".format) for name, value in summary["eval_scores"].items()),
        ("tokens", summary["tokens"], format_count),
        ("wall time", summary["wall_s"], format_duration),
        ("global steps", summary["global_steps"], str),
        ("goodput", summary.get("goodput"), "{:.1%}".format),
        ("uptime", summary.get("uptime"), "{:.1%}".format),
        ("waiting for data", summary.get(WAITING) or None, "{:.1%}".format),
        ("contributors per round", summary["contributors_per_round"], "{:.2f}".format),
        ("steps per round", summary.get("steps_per_round"), "{:.2f}".format),
        ("samples overwritten", fates["overwritten"] / settled if settled else None, "{:.1%}".format),
        ("wire, up", wire.get("up_bytes") or None, format_bytes),
        ("wire, down", wire.get("down_bytes") or None, format_bytes),
        ("wire, data parallel", wire.get("data_parallel_bytes") or None, format_bytes),
        ("restarts", sum(row["restarts"] for row in summary["learners"].values()), str),
    ]
    shown = (f"<div><dt>{name}</dt><dd>{form(value)}</dd></div>" for name, value, form in cells if value is not None)
    return f'<dl class="figures">{"".join(shown)}</dl>'


def _island_table(learners: Mapping[str, Mapping[str, Any]]) -> str:
    columns: list[tuple[str, str, Callable[[Any], str]]] = [
        ("local steps", "local_steps", str),
        ("tokens", "tokens", format_count),
        ("participation", "participation", "{:.1%}".format),
        ("step overhead", "step_overhead", "{:.1%}".format),
        ("restarts", "restarts", str),
    ]
    columns = [column for column in columns if any(row[column[1]] is not None for row in learners.values())]
    heads = "".join(f'<th scope="col">{head}</th>' for head in ("island", *(head for head, _, _ in columns)))
    rows = ""
    for name, row in learners.items():
        cells = "".join(f"<td>{form(row[key])}</td>" for _, key, form in columns)
        rows += f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>'
    return (
        f'<figure class="wide"><h2>Islands</h2><div class="scroll"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></figure>"
    )


def write_report(folder: Path) -> Path:
    """Write report.html into a run's folder and return its path.

    Raises:
        ValueError: the folder holds no metrics.jsonl, or one without a single record.
    """
    metrics = folder / METRICS_FILE
    if not metrics.is_file():
        raise ValueError(f"{metrics} does not exist; give the folder of a run, one that `diloco train` made")
    story = read_story(metrics)
    if not story.tracks and not story.evals:
        raise ValueError(f"{metrics} has no step of any learner yet; wait until the run has begun to train")
    summary = read_summary(story, folder / SUMMARY_FILE)
    config_file, name = folder / CONFIG_FILE, folder.resolve().name
    learners = f"{len(story.tracks)} learner{'s' if len(story.tracks) != 1 else ''}"
    steps, tokens = summary["global_steps"], format_count(summary["tokens"])
    subtitle = f"{steps} global steps, {tokens} tokens, {learners}, {format_duration(summary['wall_s'])}"
    if not summary["complete"]:
        subtitle += '. <b class="warning">Not complete: the numbers are those up to the last record.</b>'
    unmerged = never_merged(summary.get("unmerged_fragments", ()))  # unknown before the run has ended
    said = [*summary.get("alarms", []), *([f"Warning: {unmerged}"] if unmerged else [])]
    alarms = "".join(f'<p><b class="warning">{escape(alarm)}.</b></p>' for alarm in said)
    parts = [
        f"<header><h1>{escape(name)}</h1><p>{subtitle}</p>{alarms}</header>",
        _figures(summary),
        _loss_charts(story),
        _timeline(story),
        _metric_charts(story),
        _wire_chart(story, summary["wire"]),
        _island_bars(summary["learners"]),
        _island_table(summary["learners"]),
    ]
    if config_file.is_file():
        text = config_file.read_text(encoding="utf-8")
        parts.append(f"<details><summary>Configuration</summary><pre>{escape(text)}</pre></details>")
    target = folder / REPORT_FILE
    replace_text(target, page(name, parts))
    return target
