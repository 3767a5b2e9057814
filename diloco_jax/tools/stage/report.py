"""The text that `diloco stage` prints."""

import math
from collections.abc import Mapping
from textwrap import fill
from typing import Any

from diloco_jax.tools.budget.figures import size
from diloco_jax.tools.plan.case import BUSY_MAX
from diloco_jax.tools.plan.growth import MANY

Row = Mapping[str, Any]
WIDTH = 112
_INDENT = " " * 15


def describe(result: Row) -> str:
    """Format the result of `stage` as text: the gates, the next stage, and the way back."""
    sites, now = result["sites"], result["now"]
    lines = [f"{sites} sites, in the stage of {result['stage']}"]
    if max(sites, result["next"]["sites"]) > result["islands_of_config"]:
        lines.append(f"islands beyond the {result['islands_of_config']} of the config are planned like island-0")
    lines += ["", "before the next stage:"]
    for gate in result["gates"]:
        lines += ["", *_gate(gate)]
    lines += ["", *_verdict(result), "", *_growth(now, f"with {sites} sites"), ""]
    lines += [*_growth(result["next"], f"the next stage, with {result['next']['sites']} sites"), ""]
    return "\n".join([*lines, "to go back:", *(f"  {each}" for each in result["back"])])


def _gate(gate: Row) -> list[str]:
    measured = f": {gate['measured']}" if gate["measured"] else ""
    return [
        f"{gate['gate']:<15}{gate['about']}",
        fill(f"bar: {gate['bar']}", WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT),
        f"{_INDENT}{gate['state']}{measured}",
        f"{_INDENT}{gate['command']}",
    ]


def _verdict(result: Row) -> list[str]:
    states = [gate["state"] for gate in result["gates"]]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    words = {True: "add sites", False: "add no site yet", None: "measure the rest before you add sites"}
    lines = [f"{counts}: {words[result['ready']]}"]
    return lines if result["run"] else [*lines, "no run is given; --run RUN judges the figures of one"]


def _growth(found: Row, title: str) -> list[str]:
    grown, sites = found["growth"], found["sites"]
    share, most = grown["share"], grown["link_learners_max"]
    assumed = "" if grown["given"] else " (assumed: --syncer-link-gbit-per-s)"
    lines = [
        f"{title}:",
        f"  rounds      {found['utilisation']:.1%} of the due ones are made over each island's link, expected goodput "
        f"{found['goodput']:.2%}",
        f"  syncer      rounds fill {share:.0%} of its link of {grown['syncer_link_gbit_per_s']:.3g} Gbit/s{assumed}, "
        f"which serves up to M = {_islands(most)}",
    ]
    if sites > most:
        enough = [f"{name} (M = {_islands(count)})" for name, count in grown["remedies"].items() if count >= sites]
        longer = f"every H times {math.ceil(share / BUSY_MAX)}"
        lines.append(f"              it would be enough with {', '.join([*enough, longer])} or a faster link")
    outside = ", outside of the sizes or M that it was fitted to" if found["law_extrapolated"] else ""
    lines.append(f"  loss        {found['law']:+.1%} against data parallel by the published law{outside}")
    cost = found["cost"]
    money = [f"{cost[name]:,.2f} for {what}" for name, what in _PAID.items() if name in cost]
    moved = f"{size(1e9 * cost['egress_gb_per_day'])} leave sites per day"
    return [*lines, f"  cost        {moved}" + (f"; per day {' and '.join(money)}" if money else "")]


_PAID = {"chips_per_day": "chips", "egress_per_day": "traffic"}


def _islands(count: int) -> str:
    return f"{count} or more" if count >= MANY else str(count)
