"""The output of `diloco preflight` for people."""

from collections.abc import Mapping, Sequence
from typing import Any

from diloco_jax.tools.budget.memory import size
from diloco_jax.tools.preflight.compile import MFU

_INDENT = " " * 16
Row = Mapping[str, Any]


def describe(result: Mapping[str, Any]) -> str:
    """Write the result of `preflight` as text."""
    lines: list[str] = []
    rows = list(result["rows"])
    for island in result["islands"]:
        count = _count(rows)
        lines += [*_heading(island), "", *_table(rows[:count]), "", *_island(island), ""]
        rows = rows[count:]
    slow, fast = result["syncer_gbit_per_s"]
    lines.append(f"syncer        {slow:.3g} to {fast:.3g} Gbit/s each way for all islands together")
    for name in ("problems", "advice"):
        if result[name]:
            lines += ["", f"{name}:", *(f"  {line}" for line in result[name])]
    lines += ["", "everything fits" if result["ok"] else "does not fit as it is"]
    return "\n".join(lines)


def _count(rows: Sequence[Row]) -> int:
    """Count the rows of the first island: up to the next program that creates a state."""
    later = [number for number, row in enumerate(rows) if number and row["program"] == "create"]
    return later[0] if later else len(rows)


def _heading(island: Row) -> list[str]:
    names = island["islands"]
    which = names[0] if len(names) == 1 else f"{len(names)} islands, {names[0]} to {names[-1]}"
    mesh = ", ".join(f"{axis} {size}" for axis, size in island["mesh"].items() if size > 1) or "one chip"
    return [
        f"{island['topology']}   {which}",
        f"  {island['chips']} chips, {island['hosts']} hosts; mesh {mesh}; {island['batch_size']} sequences of "
        f"{island['seq_len']} tokens; {island['parameters'] / 1e9:.3g} B parameters",
    ]


def _table(rows: Sequence[Row]) -> list[str]:
    head = f"  {'program':<26}{'compiled':>10}{'cpu':>9}{'per chip':>11}{'of':>8}{'FLOPs':>10}   collectives"
    lines = [head]
    for kind in dict.fromkeys(row["program"].split()[0] for row in rows):
        same = [row for row in rows if row["program"].split()[0] == kind]
        worst = max(same, key=lambda row: float(row["hbm_bytes"]))
        fragments = sum(len(row["fragments"]) for row in same)
        name = f"{kind} ({fragments} by {len(same)} programs)" if fragments else kind
        flops = "" if worst["flops"] is None else f"{worst['flops']:.3g}"
        found: dict[str, int] = {}
        for row in same:
            for each, times in (row["collectives"] or {}).items():
                found[each] = found.get(each, 0) + times
        spelled = ", ".join(f"{times} {each}" for each, times in found.items()) or "none"
        lines.append(
            f"  {name:<26}{sum(row['compile_s'] for row in same):>8.1f} s{sum(row['cpu_s'] for row in same):>7.1f} s"
            f"{size(worst['hbm_bytes']):>11}{size(worst['hbm_limit_bytes']):>8}{flops:>10}   "
            + ("unknown: does not fit" if worst["flops"] is None else spelled)
        )
    return lines


def _island(island: Row) -> list[str]:
    parts = ", ".join(f"{name} {size(one)}" for name, one in island["hbm"].items())
    lines = [f"  chip memory   in the inner step: {parts}", *_flops(island)]
    slow, fast = island["step_s"]
    lines.append(f"  step time     {slow:.3g} to {fast:.3g} s at {MFU[0]:.0%} to {MFU[1]:.0%} of the chips' peak (MFU)")
    gather = island["largest_all_gather"]
    if gather:
        share = f"{gather['share_of_parameters']:.1%} of the parameters"
        lines.append(f"  gathering     most weights at once: {size(gather['bytes'])}, {share}, by {gather['kind']}")
    if island["weight_all_reduces"]:
        lines.append(
            f"{_INDENT}{island['weight_all_reduces']} all-reduces give chips whole weights or their gradients, with "
            "about twice the traffic of gathers"
        )
    if island["collective_bytes"]:
        moved = ", ".join(f"{kind} {size(one)}" for kind, one in island["collective_bytes"].items())
        lines.append(f"  collectives   results per chip and step: {moved}")
        waits, beside = island["loop_collectives"].values()
        lines += [
            f"{_INDENT}in loops {waits} that chips wait for, {island['synchronous_gathers']} of them gathers",
            f"{_INDENT}of weights or all-reduces of whole ones, and {beside} beside which they compute",
        ]
    lines.append(
        f"  host memory   {size(island['host_bytes'])} of {size(island['host_limit_bytes'])} on each host for "
        "the process, the global model in float32, what arrives and what leaves"
    )
    up, down = (size(island["wire"][f"{way}_bytes_per_step"]) for way in ("up", "down"))
    slow, fast = island["wire"]["gbit_per_s"]
    lines.append(f"  WAN           per step {up} up, {down} down: {slow:.3g} to {fast:.3g} Gbit/s for these times")
    return lines


def _flops(island: Row) -> list[str]:
    if island["compiled_flops"] is None:
        return [f"  FLOPs         model {island['model_flops']:.3g} per step ({island['model_flops_are']})"]
    model, compiled, masked = island["model_flops"], island["compiled_flops"], island["masked_flops"]
    lines = [
        f"  FLOPs         model {model:.3g} per step ({island['model_flops_are']}), compiled {compiled:.3g}: "
        f"{island['flops_ratio']:.0%} of what is computed is needed"
    ]
    if island["kernels"]:
        lines.append(f"{_INDENT}without attention, whose {island['kernels']} runs of kernels nobody can count")
    elif masked:
        rest = max(0.0, 1 - (model + masked) / compiled)
        lines.append(f"{_INDENT}the rest: {masked / compiled:.1%} masked attention, {rest:.1%} recomputation and other")
    if island["unread_loops"]:
        lines.append(f"{_INDENT}{len(island['unread_loops'])} loops counted once, as their number of runs is not known")
    return lines
