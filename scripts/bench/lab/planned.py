"""`wan planned`: what `diloco plan` computes for a run over shaped links, beside what the run's records show."""

import argparse
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lab.expected import StepBytes, sustained_rate
from lab.network import Lab, Wan
from lab.results import result, rounded
from lab.run import Mark, WanRun, job
from lab.traffic import add_wire_words, formats, island_names, wire_section

from diloco_jax.sim.goodput.settings import Assumptions
from diloco_jax.tools.plan.case import Case, case_of
from diloco_jax.tools.plan.forecast import link_state, recovery, wire_bytes

# A model of 2.9 million parameters in 12 fragments: the value of each fills a link for a while, and steps stay cheap.
MODEL = {"vocab_size": 256, "dim": 640, "mlp_dim": 2048}
FRAGMENTS = 12  # P = H
HOSTS, DEVICES = 2, 4
JOIN_S = 600.0


def add_words(parser: argparse.ArgumentParser) -> None:
    add_wire_words(parser)
    parser.set_defaults(islands=2)
    parser.add_argument(
        "--multiples", nargs="+", type=float, default=(5.0, 2.0, 1.0), help="rates as multiples of the planned rate"
    )
    parser.add_argument("--join-multiple", type=float, default=10.0, help="rate while an island returns; 0: no join")
    parser.add_argument("--step-s", type=float, default=1.0, help="seconds of an inner step; mostly asleep")
    parser.add_argument(
        "--fsdp", type=int, choices=(1, 2, 4), default=2, help="devices of an island per copy; 4: hosts share no block"
    )
    parser.add_argument("--overlap-steps", type=int, default=2, help="tau")
    parser.add_argument("--steps", type=int, default=24, help="measured global steps at each rate")
    parser.add_argument("--round-trip-ms", type=float, default=0.0)


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure rounds, bytes and a join of islands of two hosts, and compare them with the figures of `diloco plan`.

    The planned rate carries one fragment per step in the busier direction. `value` is the worst ratio of a planned
    and a measured time of a whole round, above or below 1.
    """
    args = {**MODEL, "step_s": arguments.step_s}
    mesh = {"data": DEVICES // arguments.fsdp, "fsdp": arguments.fsdp}
    islands = {"count": arguments.islands, "devices": DEVICES, "hosts": HOSTS, "mesh": mesh}
    settings = job(
        islands,
        {"module": "_paced_model:PacedModel", "args": args},
        train={"batch_size": DEVICES * arguments.islands, "seq_len": 8},
        protocol={"sync_every": FRAGMENTS, "num_fragments": FRAGMENTS, "overlap_steps": arguments.overlap_steps},
        wire=wire_section(arguments),
    )
    rows: list[dict[str, Any]] = []
    with Lab(island_names(arguments), Wan(one_way_s=arguments.round_trip_ms / 2e3)) as lab:
        run = WanRun(lab, folder / "run", settings)
        run.start()
        case = case_of(run.config, Assumptions(step_s=arguments.step_s, round_trip_ms=arguments.round_trip_ms))
        sizes = wire_bytes(case)
        moved = StepBytes(*(sizes[way]["per_step"] for way in formats(run.config).values()))
        planned = sustained_rate(moved, arguments.step_s)
        run.await_everybody(FRAGMENTS)
        for multiple in sorted(arguments.multiples, reverse=True):
            lab.shape(multiple * planned)
            # After these steps the rounds of the previous rate have ended.
            run.await_steps(FRAGMENTS // 2, 600)
            begin = run.mark()
            run.await_steps(arguments.steps, 3600)
            rows += _show(multiple, _round_rows(run, begin, run.mark(), arguments, multiple * planned))
        if arguments.join_multiple:
            lab.shape(arguments.join_multiple * planned)
            run.await_steps(FRAGMENTS, 600)
            rows += _show(arguments.join_multiple, _join_rows(lab, run, arguments, arguments.join_multiple * planned))
    whole = [row["planned/measured"] for row in rows if row["what"] == "whole round, s"]
    return result(
        "wan_planned",
        [max(whole, key=lambda ratio: max(ratio, 1 / ratio))],
        "planned over measured time of a whole round, at the worst of these rates",
        rows=rows,
        planned_mbit=round(planned / 1e6, 3),
        step_s=arguments.step_s,
        round_trip_ms=arguments.round_trip_ms,
        islands=arguments.islands,
        hosts=HOSTS,
        devices=DEVICES,
        fsdp=arguments.fsdp,
        parameters=case.parameters,
        **formats(run.config),
    )


def _show(multiple: float, found: Iterable[tuple[str, float, float]]) -> list[dict[str, Any]]:
    """Return rows of a table from names, planned and measured figures, and print them while the bench continues."""
    rows = []
    for what, planned, measured in found:
        row = {"times_planned": multiple, "what": what, "planned": planned, "measured": measured}
        rows.append(rounded({**row, "planned/measured": planned / measured if measured else float("inf")}))
        sys.stderr.write(f"{rows[-1]}\n")
    return rows


def _case(run: WanRun, arguments: argparse.Namespace, rate_bit_s: float, step_s: float) -> Case:
    """Return the run's config under the assumptions that its owner could know."""
    link = {"link_gbit_per_s": rate_bit_s / 1e9, "round_trip_ms": arguments.round_trip_ms}
    return case_of(run.config, Assumptions(**link, step_s=step_s))


def _round_rows(
    run: WanRun, begin: Mark, end: Mark, arguments: argparse.Namespace, rate_bit_s: float
) -> list[tuple[str, float, float]]:
    """Compare the rounds between two marks with the plan for links of this rate."""
    records, window = run.records(begin, end), run.window(begin, end)
    rounds = {r["global_step"]: r for r in records if r["kind"] == "round"}
    # A step's record is written at the report, which is followed by the adoption.
    came = [
        (rounds[version], took_s, r["t"])
        for r in records
        if r["kind"] == "step"
        for version, took_s in r.get("arrived", ())
        if version in rounds
    ]
    steps = window.inner_steps / arguments.islands
    case = _case(run, arguments, rate_bit_s, window.seconds / steps)
    link, sizes, way = link_state(case), wire_bytes(case), formats(run.config)
    shares = window.global_steps * arguments.islands
    middle = statistics.median
    parts = {
        "reports, s": [r["closed_s"] - r["opened_s"] for r in rounds.values()],
        "way up, s": [r["pulled_s"] - r["closed_s"] for r in rounds.values()],
        "merge, s": [r["t"] - r["pulled_s"] for r in rounds.values()],
        "way down and arrival, s": [took_s for _, took_s, _ in came],
        "whole round, s": [r["t"] + took_s - r["opened_s"] for r, took_s, _ in came],
        "wait for the gap between steps, s": [t - r["t"] - took_s for r, took_s, t in came],
    }
    planned = {
        "reports, s": link["reports_s"],
        "way up, s": link["up_s"],
        "merge, s": link["merge_s"],
        "way down and arrival, s": link["down_s"] + link["arrive_s"],
        "whole round, s": link["round_s"],
        "wait for the gap between steps, s": link["adopt_s"],
    }
    return [
        *((what, planned[what], middle(values)) for what, values in parts.items()),
        ("rounds per inner step", link["utilisation"], len(window.merged) / steps),
        ("contributors", arguments.islands, window.contributors),
        ("bytes up per step", sizes[way["up"]]["per_step"], window.up_bytes / shares),
        ("bytes down per step", sizes[way["down"]]["per_step"], window.down_bytes / shares),
    ]


def _join_rows(
    lab: Lab, run: WanRun, arguments: argparse.Namespace, rate_bit_s: float
) -> list[tuple[str, float, float]]:
    """Let the last island leave and return, and compare its join with the plan for links of this rate."""
    name = lab.islands[-1]
    case = _case(run, arguments, rate_bit_s, arguments.step_s)
    back = recovery(case)
    run.stop_island(name)
    begin = run.mark()
    run.start_island(name, incarnation=2)
    run.await_incarnation(name, 2, JOIN_S)
    end = run.mark()
    records = run.records(begin, end)
    # The first record of each kind counts.
    notes = {r["kind"]: r["t"] for r in reversed(records) if r["kind"] in ("joined", "recovered")}
    stepped_s = next(r["t"] for r in records if r["kind"] == "step" and r["learner"] == name)
    moved = back["global_model_s"] + back["state_s"] + back["state_spread_s"]
    down = end.traffic[name].down - begin.traffic[name].down
    # Versions of the rounds that close meanwhile come too.
    merged = sum(r["kind"] == "merged" and notes["joined"] < r["t"] < notes["recovered"] for r in records)
    version_bytes = wire_bytes(case)[formats(run.config)["down"]]["round_mean"]
    joined_bytes = back["global_model_bytes"] + back["state_bytes"] + merged * version_bytes
    return [
        ("join with moments, s", moved, notes["recovered"] - notes["joined"]),
        ("join until the first step, s", moved, stepped_s - notes["joined"]),
        ("bytes of the join", joined_bytes, down),
    ]
