"""The text that `diloco preflight` prints."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from diloco_jax.sim.goodput.bandwidth import STEP_TIMES_MAX
from diloco_jax.tools.budget.figures import size
from diloco_jax.tools.preflight.compile import MFU

Row = Mapping[str, Any]


def describe(result: Mapping[str, Any]) -> str:
    """Format the result of `preflight` as text."""
    lines: list[str] = []
    rows = list(result["rows"])
    for island in result["islands"]:
        count = _count(rows)
        lines += [*_heading(island), "", *_table(rows[:count]), "", *_island(island), ""]
        rows = rows[count:]
    slow, fast = result["syncer_gbit_per_s"]
    whom = "the compiled islands" if result["not_compiled"] else "all islands"
    lines.append(f"syncer        {slow:.3g} to {fast:.3g} Gbit/s each way for {whom} together")
    lines += [
        f"not compiled  {', '.join(one['islands'])} on {one['on']}: {one['why']}" for one in result["not_compiled"]
    ]
    for name in ("problems", "advice"):
        if result[name]:
            lines += ["", f"{name}:", *(f"  {line}" for line in result[name])]
    fits = "everything that was compiled fits" if result["not_compiled"] else "everything fits"
    lines += ["", fits if result["ok"] else "does not fit as it is"]
    return "\n".join(lines)


def _count(rows: Sequence[Row]) -> int:
    """Return the number of rows of the first island, which end before the next program that creates a state."""
    later = [number for number, row in enumerate(rows) if number and row["program"] == "create"]
    return later[0] if later else len(rows)


def _heading(island: Row) -> list[str]:
    names = island["islands"]
    which = names[0] if len(names) == 1 else f"{len(names)} islands, {names[0]} to {names[-1]}"
    axes = ", ".join(f"{axis} {chips}" for axis, chips in island["mesh"].items() if chips > 1) or "one chip"
    which += f", each of {island['slices']} slices" if island["slices"] > 1 else ""
    return [
        f"{island['topology']}   {which}",
        f"  {island['chips']} chips, {island['hosts']} hosts; mesh {axes}; {island['part_size']} sequences of "
        f"{island['seq_len']} tokens; {island['parameters'] / 1e9:.3g} B parameters",
    ]


def _table(rows: Sequence[Row]) -> list[str]:
    lines = ["  program                     compiled      cpu   per chip      of     FLOPs   collectives"]
    for kind in dict.fromkeys(row["program"].split()[0] for row in rows):
        same = [row for row in rows if row["program"].split()[0] == kind]
        worst = max(same, key=lambda row: float(row["hbm_bytes"]))
        fragments = sum(len(row["fragments"]) for row in same)
        found: Counter[str] = Counter()
        for row in same:
            found.update(row["collectives"] or {})
        spelled = ", ".join(f"{times} {each}" for each, times in found.items()) or "none"
        name = f"{kind} ({fragments} by {len(same)} programs)" if fragments else kind
        compile_s, cpu_s = (sum(row[taken] for row in same) for taken in ("compile_s", "cpu_s"))
        refused = worst["flops"] is None
        flops, collectives = ("", "unknown: does not fit") if refused else (f"{worst['flops']:.3g}", spelled)
        lines.append(
            f"  {name:<26}{compile_s:>8.1f} s{cpu_s:>7.1f} s{size(worst['hbm_bytes']):>11}"
            f"{size(worst['hbm_limit_bytes']):>8}{flops:>10}   {collectives}"
        )
    return lines


def _island(island: Row) -> list[str]:
    lines = [f"  chip memory   in the inner step: {_sizes(island['hbm'])}", *_flops(island)]
    slow, fast = island["step_s"]
    lines.append(f"  step time     {slow:.3g} to {fast:.3g} s at {MFU[0]:.0%} to {MFU[1]:.0%} of the chips' peak (MFU)")
    if exchange := island["exchange"]:
        least, most = exchange["gbit_per_s"]
        lines.append(
            f"  slices        each host exchanges {size(exchange['bytes'])} of gradients per step each way; at most "
            f"{STEP_TIMES_MAX - 1:.0%} of a step with {least:.3g} to {most:.3g} Gbit/s"
        )
    if gather := island["largest_all_gather"]:
        lines.append(
            f"  gathering     most weights at once: {size(gather['bytes'])}, {gather['share_of_parameters']:.1%} of "
            f"the parameters, with {gather['kind']}"
        )
    if island["weight_all_reduces"]:
        lines.append(
            f"                {island['weight_all_reduces']} all-reduces give chips whole weights or their gradients, "
            "with about twice the traffic of gathers"
        )
    if island["collective_bytes"]:
        loops = island["loop_collectives"]
        lines += [
            f"  collectives   results per chip and step: {_sizes(island['collective_bytes'])}",
            f"                in loops {loops['synchronous']} that chips wait for, {island['synchronous_gathers']} of "
            "them gathers",
            f"                of weights or all-reduces of whole ones, and {loops['overlapped']} that overlap with "
            "computation",
        ]
    wire = island["wire"]
    slow, fast = wire["gbit_per_s"]
    return [
        *lines,
        f"  CPU memory    {size(island['host_bytes'])} of {size(island['host_limit_bytes'])} on each host for the "
        "process, the global model in float32, what arrives and what leaves",
        f"  WAN           per step {size(wire['up_bytes_per_step'])} up, {size(wire['down_bytes_per_step'])} down: "
        f"{slow:.3g} to {fast:.3g} Gbit/s for these times",
    ]


def _sizes(of: Mapping[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {size(one)}" for name, one in of.items())


def _flops(island: Row) -> list[str]:
    compiled, masked = island["compiled_flops"], island["masked_flops"]
    head = f"  FLOPs         model {island['model_flops']:.3g} per step ({island['model_flops_are']})"
    if compiled is None:
        return [head]
    lines = [f"{head}, compiled {compiled:.3g}: {island['flops_ratio']:.0%} of the compiled ones are needed"]
    if island["kernels"]:
        lines.append(
            f"                without attention, because the FLOPs of its {island['kernels']} kernel runs are unknown"
        )
    elif masked:
        other = max(0.0, 1 - (island["model_flops"] + masked) / compiled)
        lines.append(
            f"                the rest: {masked / compiled:.1%} masked attention, {other:.1%} recomputation and other"
        )
    if island["unread_loops"]:
        lines.append(
            f"                {len(island['unread_loops'])} loops counted once, because their number of runs is unknown"
        )
    return lines
