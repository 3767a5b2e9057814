"""The text that `diloco plan` prints."""

from collections.abc import Mapping
from textwrap import fill
from typing import Any

from diloco_jax.sim.goodput.bandwidth import STEP_TIMES_MAX, UTILISATIONS
from diloco_jax.tools.budget.figures import count, duration, size
from diloco_jax.tools.plan.growth import MANY
from diloco_jax.tools.plan.verdict import describe_verdict

Row = Mapping[str, Any]
_INDENT = " " * 14


def describe(result: Row, why: bool = False) -> str:
    """Format the result of `forecast` as text, one paragraph per subject: the verdict first, costs last.

    Args:
        result: what `forecast` returned.
        why: also print why settings that plan has judged stay as they are.
    """
    tau = result["run"]["overlap_steps"]
    paragraphs = [
        describe_verdict(result["verdict"]),
        _run(result["run"]),
        _bytes(result),
        _rates(result),
        _link(result["link"], tau),
        *([_slices(result["slices"])] if result["slices"] else []),
        _latency(result["latency"]),
        _syncer(result["syncer"]) + _growth(result["growth"]),
        _memory(result["memory"]),
        _recovery(result["recovery"]),
        _goodput(result["goodput"], result["run"]),
        _advice(result["advice"], why),
        *([_bucket(result["bucket"])] if result["bucket"] else []),
        _cost(result["cost"]),
    ]
    return "\n\n".join("\n".join(lines) for lines in paragraphs)


def _run(run: Row) -> list[str]:
    later = "".join(f", from step {step} on {_periods(each)}" for step, each in run["sync_later"].items())
    above = f" of adapters above {count(run['base_parameters'])} frozen ones" if run["base_parameters"] else ""
    lines = [
        f"{run['name']}: {count(run['parameters'])} parameters{above}, {run['learners']} islands at {run['sites']} "
        f"sites, {run['chips']} {run['unit']}",
        f"schedule      H = {_periods(run['sync_every'])}{later}, P = {_periods(run['class_fragments'])}, "
        f"tau = {run['overlap_steps']}; {run['up']} up, {run['down']} down",
    ]
    if run["fewer_fragments"]:
        lines.append(fill(run["fewer_fragments"], 112, initial_indent=_INDENT, subsequent_indent=_INDENT))
    for each in run["steps"]:
        names = each["islands"]
        whose = names[0] + (f" and {len(names) - 1} like it" if len(names) > 1 else "")
        lines.append(f"step          {each['step_s']:.3g} s on {whose} ({each['from']})")
    return lines


def _periods(numbers: int | Mapping[str, int]) -> str:
    """Format one number, or one for each class of tensors."""
    if isinstance(numbers, int):
        return str(numbers)
    if len(numbers) == 1:
        return str(*numbers.values())
    return ", ".join(f"{number} ({name})" for name, number in numbers.items())


def _bytes(result: Row) -> list[str]:
    step_s = min(each["step_s"] for each in result["run"]["steps"])
    lines = ["bytes of an island, each way   largest round    mean round    per step  peak/mean     per day"]
    for wire, each in result["bytes"].items():
        per_step, day = size(each["per_step"]), size(each["per_step"] * 86400 / step_s)
        if wire == "data_parallel":
            lines.append(f"  {'all-reduce, bfloat16, a site':<56}{per_step:>12}{'':11}{day:>12}")
        else:
            largest, mean = size(each["round_max"]), size(each["round_mean"])
            lines.append(f"  {wire:<28}{largest:>14}{mean:>14}{per_step:>12}{each['peak_to_mean']:>11.2f}{day:>12}")
    return lines


def _rates(result: Row) -> list[str]:
    rates = {(row["wire"], row["utilisation"]): row["gbit_per_s"] for row in result["rows"]}
    share, waits = "of the time in steps", "with tau = 0 islands wait"
    if result["run"]["overlap_steps"]:
        share = "of the due rounds that are made"
        waits = "steps wait a little" if result["link"]["wait"]["limit_s"] else "steps never wait, over any link"
    lines = [
        f"Gbit/s of a site, each way, for a share {share}, with one format both ways ({waits}),",
        "and with data_parallel for a share of the time in steps; without headers, which add 4 to 9 %",
        f"{'':<32}" + "".join(f"{share:>9.0%}" for share in UTILISATIONS),
    ]
    for wire in dict.fromkeys(row["wire"] for row in result["rows"]):
        cells = (rates[wire, share] for share in UTILISATIONS)
        lines.append(f"  {wire:<30}" + "".join(f"{'never':>9}" if rate is None else f"{rate:>9.3g}" for rate in cells))
    return lines


def _link(link: Row, tau: int) -> list[str]:
    made = "of the due rounds are made" if tau else "of the time in steps"
    free, sent = link["payload_gbit_per_s_per_learner"], link["planned_gbit_per_s_per_learner"]
    adopted = [f"              islands adopt it in the gap after a step, {link['adopt_s']:.3g} s later on average"]
    return [
        f"this link     {link['gbit_per_s']:.3g} Gbit/s per site: {_of_site(link['learners_per_site'])} can send "
        f"{free:.3g} Gbit/s of payload, and sends {sent:.3g} ({sent / free:.1%})",
        f"              a round takes {link['round_s']:.3g} s until islands have its version: "
        f"{link['reports_s']:.3g} s open, {link['up_s']:.2g} s up, {link['merge_s']:.2g} s to merge, "
        f"{link['down_s']:.2g} s down, {link['arrive_s']:.2g} s to read",
        *(adopted if tau else []),
        f"              {link['utilisation']:.1%} {made}",
        *_wait(link["wait"]),
        *_data_parallel(link),
    ]


def _of_site(islands: int) -> str:
    return "its island" if islands == 1 else f"each of its {islands} islands"


def _slices(rows: list[Row]) -> list[str]:
    """Format what slices of an island exchange, and its steps without one of them."""
    lines = []
    for row in rows:
        names, lost = row["islands"], row["one_lost"]
        whose = names[0] + (f" and {len(names) - 1} like it" if len(names) > 1 else "")
        each = f"for each of the {row['hosts']} hosts of a slice" if row["hosts"] > 1 else "for each slice"
        rate, needed = row["gbit_per_s"], f"{row['gbit_per_s_needed']:.3g} Gbit/s {each}"
        over = f"; over {rate:.3g} Gbit/s it takes {row['step_times']:.3g} times" if rate else ""
        lines += [
            f"slices        {whose}: {row['slices']} slices, each computes {row['part_size']} of {row['batch_size']} "
            f"sequences in {row['compute_s']:.3g} s",
            f"              gradients per step {size(row['exchange_bytes'])} each way {each}, in float32",
            f"              a step takes at most {STEP_TIMES_MAX:g} times its computation with {needed}{over}",
            f"              without one slice: keep {lost['keep']['step_s']:.3g} s per step of all sequences, shrink "
            f"{lost['shrink']['step_s']:.3g} s of {lost['shrink']['batch_size']}; the config has {row['slices_batch']}",
        ]
    return lines


def _data_parallel(link: Row) -> list[str]:
    ratio = link["times_data_parallel"]
    times = f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}"
    return [
        f"              data parallel over it would compute {link['data_parallel_utilisation']:.2%} of the time;",
        f"              islands train {times} times as many tokens in the same time, failures aside",
    ]


def _wait(wait: Row) -> list[str]:
    if not wait["limit_s"]:
        return []
    if wait["per_step_s"]:
        return [f"              islands wait {wait['per_step_s']:.3g} s per step for fragments (protocol.wait_steps)"]
    return [
        f"              a fragment takes {wait['needs_s']:.3g} s, longer than protocol.wait_steps allows "
        f"({wait['limit_s']:.3g} s): nobody waits for it"
    ]


def _latency(rows: list[Row]) -> list[str]:
    name = "poll_s" if "poll_s" in rows[0] else "round_trip_ms"
    title = "poll interval, s" if name == "poll_s" else "round trip, ms"
    return [f"{title:<16}     tau at any rate  tau on this link     a round there"] + [
        f"  {row[name]:<16g}{row['overlap_steps']:>18}{row['overlap_steps_over_link']:>18}"
        f"{row['round_s_over_link']:>16.3g} s{'   (yours)' if row['given'] else ''}"
        for row in rows
    ]


def _syncer(load: Row) -> list[str]:
    return [
        f"syncer        {load['cpu_s_per_round']:.3g} processor seconds per round, {load['rounds_per_s']:.3g} rounds "
        f"per second: {load['cores']:.2g} cores",
        f"              {load['gbit_per_s_each_way']:.3g} Gbit/s each way for all islands together, "
        f"{load['busy']:.0%} of what one process can carry",
    ]


def _growth(found: Row) -> list[str]:
    link, most, process = found["syncer_link_gbit_per_s"], found["link_learners_max"], found["process_learners_max"]
    rates = (
        f"each island sends it {found['from_each_gbit_per_s']:.3g} and gets {found['to_each_gbit_per_s']:.3g} Gbit/s"
    )
    assumed = "" if found["given"] else " (assumed: --syncer-link-gbit-per-s)"
    instead = ", ".join(f"{name} {_islands(count)}" for name, count in found["remedies"].items())
    return [
        f"              {rates}",
        f"              its link of {link:.3g} Gbit/s{assumed} serves up to M = {_islands(most)}, its process "
        f"{_islands(process)}",
        f"              the link serves up to M, with one change: {instead}",
    ]


def _islands(count: int) -> str:
    return f"{count} or more" if count >= MANY else str(count)


def _memory(memory: Row) -> list[str]:
    lines: list[str] = []
    for each in memory["islands"]:
        hbm = {("gradients" if name == "temporaries" else name): one for name, one in each["hbm"].items()}
        hbm = {name: one for name, one in hbm.items() if one or name != "base"}
        # Only a slice of a TPU has a known limit.
        unit = "chip" if each["hbm_limit_bytes"] else "device"
        chip, host = size(sum(hbm.values())), size(sum(each["host"].values()))
        chip += " without activations"
        chip += f", of {size(limit)}" if (limit := each["hbm_limit_bytes"]) else ""
        host += f" of {size(limit)}" if (limit := each["host_limit_bytes"]) else ""
        lines += [
            f"{unit + ' memory':<14}{chip}, on each {unit} of {each['islands'][0]}",
            f"              {_parts(hbm)}",
            "              an estimate from shapes; `diloco preflight` compiles the programs and is exact",
            f"CPU memory    {host} on each host: {_parts(each['host'])}",
        ]
    return [*lines, f"syncer memory {size(sum(memory['syncer'].values()))}: {_parts(memory['syncer'])}"]


def _recovery(back: Row) -> list[str]:
    lines = [
        f"recovery      {duration(back['seconds'])} until a returning island trains: restart "
        f"{duration(back['restart_s'])}, global model of {size(back['global_model_bytes'])} in "
        f"{duration(back['global_model_s'])}"
    ]
    if back["state_bytes"]:
        left_out = "" if back["state_arrives"] else f": it is tried {back['attempts']} times and then skipped"
        lines.append(
            f"              a neighbour's state of {size(back['state_bytes'])} in {duration(back['state_s'])}"
            f"{'; a' if back['state_arrives'] else ', but a'} transfer may take recovery_turns x H steps, "
            f"{duration(back['state_limit_s'])}{left_out}"
        )
    if back["state_spread_s"]:
        spread = duration(back["state_spread_s"])
        lines.append(f"              its leader then passes the state on to its other hosts in {spread}")
    return lines


def _goodput(found: Row, run: Row) -> list[str]:
    chips, every = f"{run['chips']} {run['unit']}", duration(3600 * found["hours_between_failures"])
    return [
        f"failures      one of {chips} fails every {every} and takes one of {found['slices']} slices with it",
        f"              expected goodput {found['goodput']:.2%}, uptime {found['uptime']:.2%}",
        f"              one rigid job over all {run['unit']} {found['rigid_goodput']:.2%}, less what links and lost "
        "steps cost it",
    ]


def _bucket(bucket: Row) -> list[str]:
    lines = [f"bucket        {bucket['address']}: a message takes {bucket['hop_s']:.3g} s through it on average"]
    for who, name in (("island", "each island"), ("syncer", "the syncer"), ("standby", "the standby")):
        each = bucket[who]
        if each is None:
            continue
        writes, reads = each["puts"] + each["lists"], each["gets"] + each["misses"]
        lines.append(
            f"              {name}: {writes:,.0f} writes and listings, "
            f"{reads:,.0f} reads per day, {each['misses']:,.0f} of them in vain"
        )
    price = bucket["price_per_day"]
    known = "" if price is None else f": {price:,.2f} dollars ({bucket['price_source']})"
    return [*lines, f"              together {bucket['requests_per_day']:,.0f} requests per day{known}"]


def _cost(cost: Row) -> list[str]:
    moved, ring = size(1e9 * cost["egress_gb_per_day"]), size(1e9 * cost["data_parallel_egress_gb_per_day"])
    lines = [f"per day       {moved} leave sites, {ring} with data parallel at full speed"]
    if "chips_per_day" in cost:
        lines.append(
            f"              chips cost {cost['chips_per_day']:,.2f}, including {cost['chips_wasted_per_day']:,.2f} for "
            "steps lost to failures"
        )
        lines += _of_islands(cost["islands"])
    if "egress_per_day" in cost:
        lines.append(
            f"              traffic costs {cost['egress_per_day']:,.2f}, with data parallel "
            f"{cost['data_parallel_egress_per_day']:,.2f}"
        )
    return lines


def _of_islands(rows: list[Row]) -> list[str]:
    """Format the price of each island, if islands differ."""
    if len(rows) < 2:
        return []
    lines = []
    for row in rows:
        names, where = row["islands"], f" in {row['where']}" if row["where"] else ""
        whose = names[0] + (f" and {len(names) - 1} like it" if len(names) > 1 else "")
        at = f" at {row['provider']}" if row["provider"] else ""
        unknown = row["price_per_chip_hour"] is None
        price = "no price, not counted" if unknown else f"{row['per_day']:,.2f}"
        lines.append(f"                {whose}: {row['machine']}{at}{where}: {price}")
    return lines


def _advice(advice: list[Row], why: bool) -> list[str]:
    changes, compared, kept = ([each for each in advice if each["change"] is said] for said in (True, None, False))
    lines: list[str] = []
    for title, found in (("change:", changes), ("compare:", compared), ("keep:", kept if why else [])):
        lines += [title] if found else []
        for each in found:
            now = f"   (now {each['now']})" if each["change"] else ""
            reason = fill(each["why"], 112, initial_indent=_INDENT, subsequent_indent=_INDENT)
            lines += [f"  --{each['setting']} {each['value']}{now}", reason]
    if kept and not why:
        names = ", ".join(each["setting"] for each in kept)
        lines += fill(
            f"keep          {names}: nothing to change (--why prints reasons)", 112, subsequent_indent=_INDENT
        ).splitlines()
    return lines


def _parts(sizes: Mapping[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {size(one)}" for name, one in sizes.items() if one)
