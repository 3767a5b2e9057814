"""The output of `diloco plan` for people; its texts are in report.toml."""

from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

from diloco_jax.sim.goodput.bandwidth import UTILISATIONS
from diloco_jax.tools.budget.memory import size
from diloco_jax.tools.budget.texts import Texts

Row = Mapping[str, Any]
_INDENT = " " * 14
_say = Texts(Path(__file__).with_suffix(".toml")).lines


def describe(result: Row) -> str:
    link, load = result["link"], result["syncer"]
    merging = f"{load['shards']} merge shards" if load["shards"] else "no merge shards needed"
    tau = result["run"]["overlap_steps"]
    within = f" of its {link['overlap_s']:.3g} s" if tau else ""
    parts = [
        _run(result["run"]),
        _bytes(result),
        _rates(result),
        _say("link", **link, within=within, made="of the rounds in time" if tau else "of the time in steps"),
        _latency(result),
        _say("syncer", **load, merging=merging),
        _memory(result["memory"]),
        _recovery(result["recovery"]),
        _goodput(result),
        _cost(result["cost"]),
        _advice(result),
    ]
    return "\n\n".join("\n".join(part) for part in parts)


def _run(run: Row) -> list[str]:
    later = "".join(f", from step {step} on {_periods(each)}" for step, each in run["sync_later"].items())
    fragments = _periods(run["class_fragments"])
    lines = _say("run", **run, periods=_periods(run["sync_every"]), later=later, fragments=fragments)
    for each in run["steps"]:
        names = each["islands"]
        whose = names[0] + (f" and {len(names) - 1} like it" if len(names) > 1 else "")
        lines += _say("step", **each, whose=whose)
    return lines


def _periods(numbers: int | Mapping[str, int]) -> str:
    """Write one number, or those of classes of tensors."""
    if isinstance(numbers, int):
        return str(numbers)
    if len(numbers) == 1:
        return str(*numbers.values())
    return ", ".join(f"{number} ({name})" for name, number in numbers.items())


def _bytes(result: Row) -> list[str]:
    step_s, lines = min(each["step_s"] for each in result["run"]["steps"]), _say("bytes_head")
    for wire, each in result["bytes"].items():
        text = "bytes_data_parallel" if wire == "data_parallel" else "bytes"
        lines += _say(text, **each, wire=wire, day=each["per_step"] * 86400 / step_s)
    return lines


def _rates(result: Row) -> list[str]:
    rates = {(row["wire"], row["utilisation"]): row["gbit_per_s"] for row in result["rows"]}
    lines = [f"{'Gbit/s of a site, each way, for':<32}" + "".join(f"{share:>9.0%}" for share in UTILISATIONS)]
    for wire in dict.fromkeys(row["wire"] for row in result["rows"]):
        cells = (rates[wire, share] for share in UTILISATIONS)
        lines.append(f"  {wire:<30}" + "".join(f"{'never':>9}" if rate is None else f"{rate:>9.3g}" for rate in cells))
    lines += _say("rates_of_rounds" if result["run"]["overlap_steps"] else "rates_of_time")
    return lines + _say("rates_data_parallel")


def _latency(result: Row) -> list[str]:
    rows = (_say("latency", **row, mark=" <" if row["given"] else "") for row in result["latency"])
    return _say("latency_head") + [line for lines in rows for line in lines]


def _memory(memory: Row) -> list[str]:
    lines: list[str] = []
    for each in memory["islands"]:
        hbm, host = each["hbm"], each["host"]
        of_chip, of_host = (
            f" of {size(most)}" if (most := each[f"{of}_limit_bytes"]) else "" for of in ("hbm", "host")
        )
        gradients = {("gradients" if name == "temporaries" else name): one for name, one in hbm.items()}
        chip_parts = ", ".join(f"{name} {size(one)}" for name, one in gradients.items())
        totals = {"chip": sum(hbm.values()), "host": sum(host.values())}
        named = {"name": each["islands"][0], "of_chip": of_chip, "of_host": of_host}
        lines += _say("memory", **totals, **named, chip_parts=chip_parts, host_parts=_parts(host))
    return lines + _say("memory_syncer", total=sum(memory["syncer"].values()), parts=_parts(memory["syncer"]))


def _recovery(back: Row) -> list[str]:
    state = ("state_arrives" if back["state_arrives"] else "state_left_out") if back["state_bytes"] else ""
    return _say("recovery", **back) + (_say(state, **back) if state else [])


def _goodput(result: Row) -> list[str]:
    found = result["goodput"]
    return _say("goodput", **found, chips=result["run"]["chips"], between_s=3600 * found["hours_between_failures"])


def _cost(cost: Row) -> list[str]:
    lines = _say("cost", moved=1e9 * cost["egress_gb_per_day"], ring=1e9 * cost["data_parallel_egress_gb_per_day"])
    for text, needed in (("cost_chips", "chips_per_day"), ("cost_traffic", "egress_per_day")):
        lines += _say(text, **cost) if needed in cost else []
    return lines


def _advice(result: Row) -> list[str]:
    lines: list[str] = []
    for change, title in ((True, "change:"), (False, "keep:")):
        found = [each for each in result["advice"] if each["change"] is change]
        lines += [title] if found else []
        for each in found:
            now = f"   (now {each['now']})" if change else ""
            why = fill(each["why"], 112, initial_indent=_INDENT, subsequent_indent=_INDENT)
            lines += [f"  --{each['setting']} {each['value']}{now}", why]
    return lines


def _parts(sizes: Mapping[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {size(one)}" for name, one in sizes.items() if one)
