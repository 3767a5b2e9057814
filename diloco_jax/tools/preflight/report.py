"""The output of `diloco preflight` for people; its texts are in report.toml."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco_jax.tools.budget.memory import size
from diloco_jax.tools.budget.texts import Texts
from diloco_jax.tools.preflight.compile import MFU

Row = Mapping[str, Any]
_say = Texts(Path(__file__).with_suffix(".toml")).lines


def describe(result: Mapping[str, Any]) -> str:
    """Write the result of `preflight` as text."""
    lines: list[str] = []
    rows = list(result["rows"])
    for island in result["islands"]:
        count = _count(rows)
        lines += [*_heading(island), "", *_table(rows[:count]), "", *_island(island), ""]
        rows = rows[count:]
    slow, fast = result["syncer_gbit_per_s"]
    lines += _say("syncer", slow=slow, fast=fast)
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
    axes = ", ".join(f"{axis} {size}" for axis, size in island["mesh"].items() if size > 1) or "one chip"
    return _say("heading", **island, which=which, axes=axes, billions=island["parameters"] / 1e9)


def _table(rows: Sequence[Row]) -> list[str]:
    lines = _say("table_head")
    for kind in dict.fromkeys(row["program"].split()[0] for row in rows):
        same = [row for row in rows if row["program"].split()[0] == kind]
        worst = max(same, key=lambda row: float(row["hbm_bytes"]))
        fragments = sum(len(row["fragments"]) for row in same)
        found: Counter[str] = Counter()
        for row in same:
            found.update(row["collectives"] or {})
        spelled = ", ".join(f"{times} {each}" for each, times in found.items()) or "none"
        refused = worst["flops"] is None
        told = {
            "name": f"{kind} ({fragments} by {len(same)} programs)" if fragments else kind,
            "flops": "" if refused else f"{worst['flops']:.3g}",
            "collectives": "unknown: does not fit" if refused else spelled,
            **{taken: sum(row[taken] for row in same) for taken in ("compile_s", "cpu_s")},
        }
        lines += _say("table", **{**worst, **told})
    return lines


def _island(island: Row) -> list[str]:
    lines = _say("chip", parts=_sizes(island["hbm"])) + _flops(island)
    slow, fast = island["step_s"]
    lines += _say("step", slow=slow, fast=fast, low=MFU[0], high=MFU[1])
    if gather := island["largest_all_gather"]:
        lines += _say("gathering", **gather)
    if island["weight_all_reduces"]:
        lines += _say("reduces", **island)
    if island["collective_bytes"]:
        moved = _sizes(island["collective_bytes"])
        lines += _say("collectives", **island, **island["loop_collectives"], moved=moved)
    slow, fast = island["wire"]["gbit_per_s"]
    return lines + _say("host", **island) + _say("wan", **island["wire"], slow=slow, fast=fast)


def _sizes(of: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {size(one)}" for name, one in of.items())


def _flops(island: Row) -> list[str]:
    compiled, masked = island["compiled_flops"], island["masked_flops"]
    if compiled is None:
        return _say("flops", **island)
    lines = _say("flops_compiled", **island)
    if island["kernels"]:
        lines += _say("kernels", **island)
    elif masked:
        other = max(0.0, 1 - (island["model_flops"] + masked) / compiled)
        lines += _say("rest", masked=masked / compiled, other=other)
    if island["unread_loops"]:
        lines += _say("loops", count=len(island["unread_loops"]))
    return lines
