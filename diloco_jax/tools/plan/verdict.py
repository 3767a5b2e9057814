"""The verdict of `diloco plan`: whether a config fits its machines and its link, and which settings to change."""

from collections.abc import Mapping
from shlex import quote
from typing import Any

from diloco_jax.sim.goodput.bandwidth import STEP_TIMES_MAX
from diloco_jax.tools.budget.figures import size

Row = Mapping[str, Any]
# The least share of due rounds, or of the time of data parallel, that must be made over a link that is called enough.
MADE_MIN = 0.95


def verdict(result: Row) -> dict[str, Any]:
    """Judge a forecast.

    Args:
        result: Link, growth, memory and advice, as `forecast` returns them.

    Returns:
        `fits`, whether chips and hosts have the memory that is known to be needed, None where no limit is known;
        `link_enough`, whether nearly all due rounds are made; `slices_enough`, whether the network between the slices
        of an island is enough, None where it is unknown; `slices_need`, its rate for each host in Gbit/s, None for
        islands of one slice; `data_parallel`, the share of its time that one data-parallel job over the same link would
        compute, failures included; `problems`, in words; `change`, the settings that the advice changes, with their new
        values.
    """
    problems, limits = [], 0
    for each in result["memory"]["islands"]:
        name = each["islands"][0]
        for what, needs, limit in (
            ("chip", each["hbm"], each["hbm_limit_bytes"]),
            ("host", each["host"], each["host_limit_bytes"]),
        ):
            if limit:
                limits += 1
                needed = sum(needs.values())
                if needed > limit:
                    problems.append(f"a {what} of {name} needs {size(needed)} and has {size(limit)}")
    fits = None if not limits else not problems
    link = result["link"]
    enough = link["utilisation"] >= MADE_MIN
    if not enough:
        unit = "of the due rounds are made" if result["run"]["overlap_steps"] else "of the time is left for steps"
        problems.append(f"over this link only {link['utilisation']:.0%} {unit}")
    grown = result["growth"]
    if grown["given"] and grown["share"] > 1:
        enough = False
        link_rate = f"{grown['syncer_link_gbit_per_s']:.3g} Gbit/s"
        problems.append(f"rounds would fill {grown['share']:.0%} of the syncer's link of {link_rate}")
    slow = [row for row in result["slices"] if (row["step_times"] or 1) > STEP_TIMES_MAX]
    known = any(row["step_times"] for row in result["slices"])
    problems += [
        f"steps of {row['islands'][0]} take {row['step_times']:.2f} times their computation, because slices exchange "
        f"gradients at {row['gbit_per_s']:.3g} Gbit/s for each host, which needs {row['gbit_per_s_needed']:.3g}"
        for row in slow
    ]
    changed = {each["setting"]: each["value"] for each in result["advice"] if each["change"]}
    alone = link["data_parallel_utilisation"] * result["goodput"]["rigid_goodput"]
    return {
        "fits": fits,
        "link_enough": enough,
        "slices_enough": not slow if known else None,
        "slices_need": max((row["gbit_per_s_needed"] for row in result["slices"]), default=None),
        "data_parallel": alone,
        "problems": problems,
        "change": changed,
    }


def describe_verdict(found: Row) -> list[str]:
    """Format a verdict as lines of text."""
    known = found["fits"] is not None
    if found["problems"]:
        lines = [f"verdict       no: {'; '.join(found['problems'])}"]
    else:
        memory = "memory is enough, before activations" if known else "no chip is named, so memory is not judged"
        lines = [f"verdict       yes: the link is enough; {memory}"]
        if found["data_parallel"] >= MADE_MIN:
            share = f"it would compute {found['data_parallel']:.1%} of the time over this link,"
            lines.append(f"              but data parallel alone would lose nothing: {share}")
            lines.append("              failures included, so you do not need islands")
    if found["slices_need"] and found["slices_enough"] is None:
        lines.append(
            f"              if each host has {found['slices_need']:.3g} Gbit/s to the other slices of its island"
        )
    if found["change"]:
        wanted = " ".join(f"--{setting} {quote(str(value))}" for setting, value in found["change"].items())
        lines.append(f"              to change: {wanted}   (reasons below)")
    return lines
