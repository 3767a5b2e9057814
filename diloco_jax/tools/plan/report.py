"""The output of `diloco plan` for people."""

from collections.abc import Mapping
from textwrap import fill
from typing import Any

from diloco_jax.sim.goodput.bandwidth import UTILISATIONS
from diloco_jax.tools.budget.memory import size

Row = Mapping[str, Any]
_INDENT = " " * 14


def describe(result: Row) -> str:
    parts = [_run, _bytes, _rates, _link, _latency, _syncer, _memory, _recovery, _goodput, _cost, _advice]
    return "\n\n".join("\n".join(part(result)) for part in parts)


def _run(result: Row) -> list[str]:
    run = result["run"]
    later = "".join(f", from step {step} on {_periods(each)}" for step, each in run["sync_later"].items())
    lines = [
        f"{run['name']}: {_count(run['parameters'])} parameters, {run['learners']} learners at "
        f"{run['sites']} sites, {run['chips']} chips",
        f"{_name('schedule')}H = {_periods(run['sync_every'])}{later}, P = {_periods(run['class_fragments'])}, "
        f"tau = {run['overlap_steps']}; {run['up']} up, {run['down']} down",
    ]
    for each in run["steps"]:
        names = each["islands"]
        whose = f" on {names[0]}" + (f" and {len(names) - 1} like it" if len(names) > 1 else "")
        lines.append(f"{_name('step')}{each['step_s']:.3g} s{whose} ({each['from']})")
    return lines


def _periods(numbers: int | Mapping[str, int]) -> str:
    """Write one number, or those of classes of tensors."""
    if isinstance(numbers, int):
        return str(numbers)
    if len(numbers) == 1:
        return str(*numbers.values())
    return ", ".join(f"{number} ({name})" for name, number in numbers.items())


def _bytes(result: Row) -> list[str]:
    step_s = min(each["step_s"] for each in result["run"]["steps"])
    lines = [
        f"{'bytes of a learner, each way':<30}{'largest round':>14}{'mean round':>14}{'per step':>12}"
        f"{'peak/mean':>11}{'per day':>12}"
    ]
    for wire, each in result["bytes"].items():
        day = size(each["per_step"] * 86400 / step_s)
        if wire == "data_parallel":
            lines.append(
                f"  {'all-reduce, bfloat16, a site':<28}{'':>14}{'':>14}{size(each['per_step']):>12}{'':>11}{day:>12}"
            )
        else:
            sizes = (each["round_max"], each["round_mean"])
            lines.append(
                f"  {wire:<28}"
                + "".join(f"{size(one):>14}" for one in sizes)
                + f"{size(each['per_step']):>12}{each['peak_to_mean']:>11.2f}{day:>12}"
            )
    return lines


def _rates(result: Row) -> list[str]:
    rates = {(row["wire"], row["utilisation"]): row["gbit_per_s"] for row in result["rows"]}
    lines = [f"{'Gbit/s of a site, each way, for':<32}" + "".join(f"{share:>9.0%}" for share in UTILISATIONS)]
    for wire in dict.fromkeys(row["wire"] for row in result["rows"]):
        cells = (rates[wire, share] for share in UTILISATIONS)
        lines.append(f"  {wire:<30}" + "".join(f"{'never':>9}" if rate is None else f"{rate:>9.3g}" for rate in cells))
    what = (
        "of the time in steps; with tau = 0 learners wait"
        if not result["run"]["overlap_steps"]
        else "of the rounds made in time; steps never wait, over any link"
    )
    return [
        *lines,
        f"  formats, the same both ways: {what}",
        "  data_parallel: of the time in steps. All without headers, which take 4 to 9 % more",
    ]


def _link(result: Row) -> list[str]:
    link, tau = result["link"], result["run"]["overlap_steps"]
    rate, planned = link["payload_gbit_per_s_per_learner"], link["planned_gbit_per_s_per_learner"]
    made = "of the rounds in time" if tau else "of the time in steps"
    within = f" of its {link['overlap_s']:.3g} s" if tau else ""
    return [
        f"{_name('this link')}{link['gbit_per_s']:.3g} Gbit/s per site: {rate:.3g} of payload for each of its "
        f"{link['learners_per_site']} learners, who send {planned:.3g}",
        f"{_INDENT}a round takes {link['round_s']:.3g} s{within} ({link['merge_s']:.2g} s of "
        f"it to merge): {link['utilisation']:.1%} {made}",
        f"{_INDENT}data parallel over it would compute {link['data_parallel_utilisation']:.2%} of the time",
    ]


def _latency(result: Row) -> list[str]:
    lines = [f"{'round trip, ms':<18}{'tau at any rate':>18}{'tau on this link':>18}{'a round there':>18}"]
    for row in result["latency"]:
        mark = " <" if row["given"] else ""
        lines.append(
            f"  {row['round_trip_ms']:<16g}{row['overlap_steps']:>18}{row['overlap_steps_over_link']:>18}"
            f"{row['round_s_over_link']:>16.3g} s{mark}"
        )
    return lines


def _syncer(result: Row) -> list[str]:
    load = result["syncer"]
    shards = f"{load['shards']} merge shards" if load["shards"] else "no merge shards needed"
    return [
        f"{_name('syncer')}{load['cpu_s_per_round']:.3g} processor seconds per round, {load['rounds_per_s']:.3g} "
        f"rounds per second: {load['cores']:.2g} cores; {shards}",
        f"{_INDENT}{load['gbit_per_s_each_way']:.3g} Gbit/s each way for all learners together",
    ]


def _memory(result: Row) -> list[str]:
    memory, lines = result["memory"], []
    for each in memory["islands"]:
        limit = f" of {size(each['hbm_limit_bytes'])}" if each["hbm_limit_bytes"] else ""
        parts = ", ".join(
            f"{'gradients' if name == 'temporaries' else name} {size(one)}" for name, one in each["hbm"].items()
        )
        lines += [
            f"{_name('chip memory')}{size(sum(each['hbm'].values()))}{limit} and activations on each chip of "
            f"{each['islands'][0]}",
            f"{_INDENT}{parts}",
            f"{_INDENT}an estimate from shapes; `diloco preflight` compiles the programs and is exact",
        ]
        limit = f" of {size(each['host_limit_bytes'])}" if each["host_limit_bytes"] else ""
        lines.append(
            f"{_name('host memory')}{size(sum(each['host'].values()))}{limit} on each host: {_parts(each['host'])}"
        )
    lines.append(f"{_name('syncer host')}{size(sum(memory['syncer'].values()))}: {_parts(memory['syncer'])}")
    return lines


def _recovery(result: Row) -> list[str]:
    back = result["recovery"]
    lines = [
        f"{_name('recovery')}{_duration(back['seconds'])} until a returning learner trains: restart "
        f"{_duration(back['restart_s'])}, global model of {size(back['global_model_bytes'])} in "
        f"{_duration(back['global_model_s'])}"
    ]
    if back["state_bytes"]:
        state = f"{_INDENT}a neighbour's state of {size(back['state_bytes'])} in {_duration(back['state_s'])}"
        limit = f"a transfer may take recovery_turns x H steps, {_duration(back['state_limit_s'])}"
        if back["state_arrives"]:
            lines.append(f"{state}; {limit}")
        else:
            lines.append(f"{state}, but {limit}: it is tried {back['attempts']} times and then left out")
    return lines


def _goodput(result: Row) -> list[str]:
    found = result["goodput"]
    return [
        f"{_name('failures')}one of {result['run']['chips']} chips fails every "
        f"{_duration(3600 * found['hours_between_failures'])} and takes one of {found['slices']} slices with it",
        f"{_INDENT}expected goodput {found['goodput']:.2%}, uptime {found['uptime']:.2%}",
        f"{_INDENT}one rigid job over all chips {found['rigid_goodput']:.2%}, less what links and lost steps cost it",
    ]


def _cost(result: Row) -> list[str]:
    cost = result["cost"]
    lines = [
        f"{_name('per day')}{size(1e9 * cost['egress_gb_per_day'])} leave sites, "
        f"{size(1e9 * cost['data_parallel_egress_gb_per_day'])} with data parallel at full speed"
    ]
    if "chips_per_day" in cost:
        lines.append(
            f"{_INDENT}chips cost {cost['chips_per_day']:,.2f}, of which {cost['chips_wasted_per_day']:,.2f} for "
            "steps that failures take"
        )
    if "egress_per_day" in cost:
        lines.append(
            f"{_INDENT}traffic costs {cost['egress_per_day']:,.2f}, with data parallel "
            f"{cost['data_parallel_egress_per_day']:,.2f}"
        )
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


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.3g} B" if parameters >= 1e8 else f"{parameters / 1e6:.3g} M"


def _name(text: str) -> str:
    return f"{text:<14}"


def _duration(seconds: float) -> str:
    """Write a time with three digits: 23.4 min."""
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} s"
