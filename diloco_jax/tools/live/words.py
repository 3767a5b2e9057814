"""Words for a run: the text of `diloco status`, and what it has in common with the live view.

Both read the status that the syncer writes about once a second, one JSON object:

    run, state (starting, running, complete, stopped; liveness.py has more), global_step, total_steps, left_s (seconds
    until the last global step, protocol/watch/time_left.py), num_parameters, waiting_for, wall_s, tokens, tokens_per_s,
    eval_loss, eval_scores (by name), contributors_per_round, wire: {up_bytes, down_bytes}, samples (their fates), epoch
    (life of the syncer), said: {machine, process, supervisor, unix_s (when)}, alarms: [{kind, who, text, remedy}
    (protocol/watch/alarms.py)], episodes (all alarms, those that ended included), learners: [
        {learner, state (joining, active, silent, gone), condition (protocol/watch/health.py), reason (for it),
         since_s (seconds in that condition), finished (whether it trained until the end of a complete run),
         local_step, tokens, tokens_per_s (now), mean_tokens_per_s (over all its steps), loss, step_s, staleness
         (global steps that it is behind), last_merged_round, participation, restarts, metrics: {name: value}
         (docs/metrics.md)}]

A learner's numbers may be null until it has reported a step.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from diloco_jax.protocol.watch.stats import FINISHING_S

NO_VALUE = "–"
ENDED_SHOWN = 4
FINISHED = "finished"  # shown for an island that trained until the end of a complete run


def format_count(value: float) -> str:
    """Return a count in at most four characters and a unit: 950, 1.23k, 45.6M."""
    units = ["", "k", "M", "G", "T"]
    while abs(value) >= 999.5 and len(units) > 1:
        value /= 1000
        del units[0]
    unit = units[0]
    return f"{value:.0f}{unit}" if not unit or abs(value) >= 100 else f"{value:.3g}{unit}"


def format_bytes(value: float) -> str:
    """Return a size in decimal units: 950 B, 1.23 MB."""
    text = format_count(value)
    number, unit = (text[:-1], text[-1]) if text[-1].isalpha() else (text, "")
    return f"{number} {unit}B"


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


def or_none(value: float | None, form: str) -> str:
    """Format a number that may not be known."""
    return NO_VALUE if value is None else format(value, form)


def share_done(status: Mapping[str, Any]) -> float:
    """Return the share of the run that is done, in [0, 1]."""
    return min(1.0, status["global_step"] / max(1, status["total_steps"]))


def time_left(status: Mapping[str, Any]) -> str:
    """Say how much time is left; empty when there is nothing to say."""
    left_s = status.get("left_s")
    return "" if status["state"] != "running" or left_s is None else f"about {format_duration(left_s)} left"


def shown_rows(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the islands of a status; those that finished with their mean rate, since they have none now."""
    told = {"condition": FINISHED, FINISHED: True}
    return [
        {**row, **told, "tokens_per_s": row.get("mean_tokens_per_s")} if _finished(status, row) else row
        for row in status["learners"]
    ]


def _finished(status: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    # statuses of older versions have no word on it
    left_last = status["state"] == "complete" and row["condition"] == "left" and row["since_s"] <= FINISHING_S
    return bool(row.get(FINISHED, left_last))


def describe(status: Mapping[str, Any]) -> str:
    """Say in plain text, for `diloco status`, which island is in which condition, and since when."""
    progress = f"global step {status['global_step']} of {status['total_steps']} ({share_done(status):.0%}) after "
    progress += format_duration(status["wall_s"])
    quiet = "said_s_ago" in status
    if quiet:
        progress = f"last word {format_duration(status['said_s_ago'])} ago, at {progress}"
    text = [f"{status['run']} is {status['state']}: {progress}"]
    if left := time_left(status):
        text[0] += f", {left}"
    text += [status["remedy"], "it said then:"] if quiet else []
    text += [
        f"waiting for: {status['waiting_for']}",
        f"tokens: {format_count(status['tokens'])}{_rate(status)}; eval loss: {or_none(status['eval_loss'], '.4f')}"
        + scores_text(status.get("eval_scores", {})),
        f"contributors per round: {status['contributors_per_round']:.2f}; moved up "
        f"{format_bytes(status['wire']['up_bytes'])}, down {format_bytes(status['wire']['down_bytes'])}",
    ]
    text += [alarm_line(alarm) for alarm in status["alarms"]]
    text += ended_lines(status.get("episodes", ()))
    if not status["learners"]:
        text.append("no island has connected yet")
    width = max((len(row["learner"]) for row in status["learners"]), default=0)
    text += [f"  {row['learner']:<{width}}  {_condition(row)}" for row in shown_rows(status)]
    return "\n".join(text)


def _rate(status: Mapping[str, Any]) -> str:
    over = all(_finished(status, row) for row in status["learners"])
    return "" if over and status["learners"] else f", now {format_count(status['tokens_per_s'])}/s"


def _condition(row: Mapping[str, Any]) -> str:
    merged = f"last merged in round {row['last_merged_round']}" if row["last_merged_round"] else "never merged yet"
    restarts = f", {row['restarts']} restart{'s' if row['restarts'] != 1 else ''}" if row["restarts"] else ""
    details = f" after step {row['local_step']}"
    if row["condition"] == FINISHED:
        rate = f", {format_count(row['tokens_per_s'])} tokens/s on average" if row["tokens_per_s"] else ""
        return f"{FINISHED}{details}{rate}; {merged}, participation {row['participation']:.0%}{restarts}"
    if row["state"] == "active":
        rate = f"{format_count(row['tokens_per_s'])} tokens/s"
        for name, form in (("grad_norm", "grad norm {:.3g}"), ("mfu", "MFU {:.1%}")):
            if (value := row.get("metrics", {}).get(name)) is not None:
                rate += f", {form.format(value)}"
        details = f": step {row['local_step']}, loss {or_none(row['loss'], '.3f')}, {rate}"
    reason = f"; {row['reason']}" if row["reason"] else ""
    condition = f"{row['condition']} for {format_duration(row['since_s'])}{details}{reason}"
    return f"{condition}; {merged}, participation {row['participation']:.0%}{restarts}"


def alarm_line(alarm: Mapping[str, Any]) -> str:
    """Write an alarm of a status or a summary that stands, or the line of one that ended."""
    if not stands(alarm):
        return ended_line(alarm)
    times = ""
    if "times" in alarm:
        several = f", {alarm['times']} times" if alarm["times"] > 1 else ""
        times = f" (for {format_duration(alarm['lasted_s'])}{several})"
    return f"alarm: {alarm['text']}{times}; {alarm['remedy']}"


def stands(alarm: Mapping[str, Any]) -> bool:
    """Return whether an alarm of a status or a summary has not ended."""
    return bool(alarm.get("stands", True))


def ended_line(alarm: Mapping[str, Any]) -> str:
    """Write an alarm that ended: what was wrong, for how long, and when in the run."""
    when = f"from {format_duration(alarm['from_s'])} to {format_duration(alarm['until_s'])} of the run"
    if alarm["times"] > 1:
        when = f"in all, {alarm['times']} times, most recently {when}"
    return f"ended: {alarm.get('past', alarm['text'])} for {format_duration(alarm['lasted_s'])}, {when}"


def ended_lines(alarms: Iterable[Mapping[str, Any]], most: int = ENDED_SHOWN) -> list[str]:
    """Write the alarms that ended, the newest last, and how many more there were before."""
    ended = sorted((alarm for alarm in alarms if not stands(alarm)), key=lambda alarm: alarm["until_s"])
    more = [f"ended before: {len(ended) - most} more alarms"] if len(ended) > most else []
    return more + [ended_line(alarm) for alarm in ended[-most:]]


def scores_text(scores: Mapping[str, float | None]) -> str:
    """Write the numbers of evaluation.module, to follow the loss."""
    return "".join(f", {name} {or_none(value, '.4g')}" for name, value in scores.items())
