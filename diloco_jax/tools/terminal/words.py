"""Texts about a run: the answer of `diloco status`, and the texts that it shares with the live view.

Both read the status that the syncer writes about once a second, one JSON object. Besides the facts of
runtime/figures/facts.py it has these keys:

    run             name of the run
    state           starting, running, evaluating, complete or stopped; runtime/records/liveness.py adds others
    left_s          seconds until the last global step (protocol/watch/time_left.py)
    num_parameters  of the model
    waiting_for     what the run waits for, as a text
    eval_step       global step of the newest evaluated model
    eval_scores     numbers of the newest evaluation, by name
    samples         fates of the samples
    epoch           number of the syncer's process, counted over the run
    said            {machine, process, supervisor, unix_s}: who wrote the status, and when
    alarms          [{kind, who, text, remedy}]: alarms that stand (protocol/watch/alarms.py)
    episodes        all alarms, those that ended included
    learners        facts of each island, and `process`: its number, if it runs on the syncer's machine
    bans            [{learner, reason}]: banned names (protocol/bans.py)
    refused         [{learner, reason}]: islands that are not connected because their newest greeting was refused
    wire            {up_bytes, down_bytes, by_island: {NAME: {up_bytes, down_bytes}}}: bytes over all processes of the
                    syncer; in a bucket, versions that many islands read are once in the first two, and in each island's
    requests        requests to a bucket by kind, and their bytes, over all processes of the syncer; {} without one
    requests_per_s  of them, since the syncer's process listens
    subscribers     [{subscriber, lacks}]: processes that only receive the model, and the newest values that each lacks

An island's numbers may be null until it has reported a step.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from diloco_jax.protocol.watch.terms import FINISHING_S, shown
from diloco_jax.runtime.figures import table
from diloco_jax.runtime.figures.facts import IslandFacts, RunFacts
from diloco_jax.runtime.figures.forms import NO_VALUE, format_count, format_duration
from diloco_jax.runtime.records.liveness import ENDED, StartPhase
from diloco_jax.transport.store.counts import requests_text

ENDED_SHOWN = 4
# Condition that is shown for an island that trained until the end of a complete run.
FINISHED = "finished"
FIGURES_PER_LINE = 2


def or_none(value: float | None, form: str) -> str:
    """Format a number; a dash if it is None."""
    return NO_VALUE if value is None else format(value, form)


def share_done(status: Mapping[str, Any]) -> float:
    """Return the share of the run that is done, in [0, 1]."""
    return min(1.0, status["global_step"] / max(1, status["total_steps"]))


def percent_done(status: Mapping[str, Any]) -> str:
    """Return the share of the run that is done, with decimals while it is small."""
    percent = 100 * share_done(status)
    return f"{percent:.{0 if percent >= 10 or not percent else 1 if percent >= 1 else 2}f}%"


def steps_done(status: Mapping[str, Any]) -> str:
    """Return the number of global steps made and planned."""
    return f"step {status['global_step']:,} of {status['total_steps']:,}"


def time_left(status: Mapping[str, Any]) -> str:
    """Return a text about the time that is left; "" if it is not known."""
    left_s = status.get("left_s")
    return "" if status["state"] != "running" or left_s is None else f"about {format_duration(left_s)} left"


def shown_rows(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the islands of a status; those that finished have their mean speed as their speed."""
    changes = {"condition": FINISHED, FINISHED: True}
    return [
        {**row, **changes, "tokens_per_s": row.get("mean_tokens_per_s")} if _finished(status, row) else row
        for row in status["learners"]
    ]


def _finished(status: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    # Statuses of older versions do not have the key.
    left_last = status["state"] == "complete" and row["condition"] == "left" and row["since_s"] <= FINISHING_S
    return bool(row.get(FINISHED, left_last))


def describe(status: Mapping[str, Any], phases: Iterable[StartPhase] = ()) -> str:
    """Return the text of `diloco status`: progress, figures, alarms, and the condition of each island.

    Args:
        phases: of processes that do not train yet.
    """
    progress = f"global {steps_done(status)} ({percent_done(status)}) after {format_duration(status['wall_s'])}"
    quiet = "said_s_ago" in status
    if quiet:
        progress = f"last status {format_duration(status['said_s_ago'])} ago, at {progress}"
    text = [f"{status['run']} is {status['state']}: {progress}"]
    if left := time_left(status):
        text[0] += f", {left}"
    text += [status["remedy"], "that status:"] if quiet else []
    text.append(f"waiting for: {status['waiting_for']}")
    text += _figures(status)
    text += [alarm_line(alarm) for alarm in status["alarms"]]
    text += ended_lines(status.get("episodes", ()))
    if not status["learners"]:
        text.append("no island has connected yet")
    width = max((len(row["learner"]) for row in status["learners"]), default=0)
    text += [f"  {row['learner']:<{width}}  {_condition(row, quiet=quiet)}" for row in shown_rows(status)]
    quiet = quiet or status["state"] in ENDED
    text += [] if quiet else [f"  {each.name}: {each.words}, for {format_duration(each.ago_s)}" for each in phases]
    # Statuses of older versions do not have these keys.
    text += [corpus_line(row) for row in status.get("corpora", ())]
    if requests := status.get("requests"):
        text.append(f"bucket: {status['requests_per_s']:.1f} requests/s of the syncer; {requests_text(requests)}")
    if bans := status.get("bans"):
        text.append(f"banned: {'; '.join('{learner} ({reason})'.format_map(ban) for ban in bans)}")
    known = {row["learner"] for row in status["learners"]}
    text += [
        f"refused: {each['learner']}: {each['reason']}"
        for each in status.get("refused", ())
        if each["learner"] not in known
    ]
    if found := status.get("subscribers"):
        rows = [f"{row['subscriber']} (lacks {row['lacks']} of the newest values)" for row in found]
        text.append(f"subscribers, which only receive the model: {', '.join(rows)}")
    return "\n".join(text)


def corpus_line(row: Mapping[str, Any]) -> str:
    """Return a line about a corpus of a status or a summary: who reads it, and how far."""
    readers = ", ".join(row["islands"]) or "nobody"
    epochs = "" if row["epochs"] is None else f", {row['epochs']:.2f} epochs of {format_count(row['samples'])} samples"
    loss = "" if row["loss"] is None else f", loss {row['loss']:.4f}"
    return f"corpus {row['corpus'] or 'of the run'}: read by {readers}{epochs}{loss}"


def _figures(status: Mapping[str, Any]) -> list[str]:
    """Return the figures of the run in lines of two."""
    rows = status["learners"]
    over = bool(rows) and all(_finished(status, row) for row in rows)
    scores = {"eval_loss": scores_text(status.get("eval_scores", {}))}
    facts = RunFacts.of(status)
    texts = table.texts(table.RUN_FIGURES, facts, lambda figure: figure.status, over=over, more=scores)
    return ["; ".join(texts[at : at + FIGURES_PER_LINE]) for at in range(0, len(texts), FIGURES_PER_LINE)]


def _condition(row: Mapping[str, Any], *, quiet: bool) -> str:
    """Return an island's condition with its figures; `quiet` if the status is an old one, so that this is past."""
    facts = IslandFacts.of(row)
    always = ", ".join(table.texts(table.ISLAND_FIGURES, facts, lambda figure: figure.always))
    details = f" after inner step {row['local_step']}"
    if row["condition"] == FINISHED:
        rate = f", {format_count(row['tokens_per_s'])} tokens/s on average" if row["tokens_per_s"] else ""
        return f"{FINISHED}{details}{rate}; {always}"
    if row["state"] == "active":
        details = ": " + ", ".join(table.texts(table.ISLAND_FIGURES, facts, lambda figure: figure.status))
    reason = f"; {row['reason']}" if row["reason"] else ""
    process = f"; process {row['process']}" if row.get("process") else ""
    condition = f"{shown(row['condition'])} for {format_duration(row['since_s'])}"
    if quiet:
        # The island may train on without a syncer, or have ended.
        condition = f"was {shown(row['condition'])}"
    return f"{condition}{details}{reason}; {always}{process}"


def alarm_line(alarm: Mapping[str, Any]) -> str:
    """Return a line about an alarm of a status or a summary, with its remedy if it stands."""
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
    """Return a line about an alarm that ended: what was wrong, for how long, and when in the run."""
    when = f"from {format_duration(alarm['from_s'])} to {format_duration(alarm['until_s'])} of the run"
    if alarm["times"] > 1:
        when = f"in all, {alarm['times']} times, most recently {when}"
    return f"ended: {alarm.get('past', alarm['text'])} for {format_duration(alarm['lasted_s'])}, {when}"


def ended_lines(alarms: Iterable[Mapping[str, Any]], most: int = ENDED_SHOWN) -> list[str]:
    """Return a line for each alarm that ended, the newest last, and how many ended before those."""
    ended = sorted((alarm for alarm in alarms if not stands(alarm)), key=lambda alarm: alarm["until_s"])
    more = [f"ended before: {len(ended) - most} more alarms"] if len(ended) > most else []
    return more + [ended_line(alarm) for alarm in ended[-most:]]


def scores_text(scores: Mapping[str, float | None]) -> str:
    """Return the numbers of `evaluation.module` as a text that follows the loss."""
    return "".join(f", {name} {or_none(value, '.4g')}" for name, value in scores.items())
