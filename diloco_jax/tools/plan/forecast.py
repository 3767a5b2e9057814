"""`diloco plan`: a forecast of the links, machines and money that a config needs, and of its goodput.

Sizes come from the codec and the fragment plan, rates from sim/goodput/bandwidth.py, goodput from methods.py beside it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from diloco_jax.core.codec import FORMATS
from diloco_jax.protocol.learner.recovery import PART_S, PARTS_IN_FLIGHT_MAX, PARTS_IN_FLIGHT_MIN
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.runtime.island.adoptions import STATE_PART_BYTES
from diloco_jax.sim.goodput.bandwidth import (
    GBIT,
    UTILISATIONS,
    Rounds,
    data_parallel_gbit_per_s,
    data_parallel_utilisation,
    ring_factor,
)
from diloco_jax.sim.goodput.hardware import Hardware
from diloco_jax.sim.goodput.methods import Cell, Wan, expected
from diloco_jax.sim.goodput.settings import YEAR_S
from diloco_jax.tools.budget.memory import moments_on_host
from diloco_jax.tools.budget.needs import link_needs, syncer_memory, syncer_needs
from diloco_jax.tools.plan.bucket import BucketTraffic, CopiedSnapshots, request_figures
from diloco_jax.tools.plan.case import PAYLOAD_SHARE, Case, changed
from diloco_jax.tools.plan.growth import growth
from diloco_jax.tools.plan.prices import prices
from diloco_jax.tools.plan.slices import FOUND_S, RETURNED_S, slices_rows
from diloco_jax.tools.plan.verdict import verdict
from diloco_jax.training.whole_state.moving import MovingLayout

# A version that has arrived waits half a step on average for the gap between two steps.
GAP_STEPS = 0.5
# On a narrow link a state takes this many times as long as its bytes alone, because few of its parts are on their way;
# docs/log.md, 2026-11-27.
STATE_TURNS = 1.3
DAY_S = 86400.0
ROUND_TRIPS_MS = (1.0, 10.0, 50.0, 100.0, 200.0)
POLLS_S = (0.1, 0.5, 1.0, 2.0, 5.0)
# The seed of the simulated failures.
SEED = 0
# The simulated failures, on average.
FAILURES = 2000
# The least steps of a learner between two failures. With fewer, the failure's place in a step would change the result.
STEPS_PER_FAILURE = 50
# The same in mean times until a lost slice is back, for learners of several slices. With fewer, failures overlap.
RETURNS_PER_FAILURE = 20
# The least simulated steps until a lost slice is back. With fewer, the end of its absence is known less exactly.
STEPS_PER_RETURN = 10
# The mean time until a lost slice is back, with the default shapes and scale of `Hardware`.
RETURN_S = 64.5
# The least and the most simulated steps of a learner.
STEPS_MIN, STEPS_MAX = 1000, 200_000


def wire_bytes(case: Case) -> dict[str, Any]:
    """Return the bytes of the largest and of the mean round for each format, up or down, and for data parallel."""
    found: dict[str, Any] = {}
    for way in FORMATS:
        needs = link_needs(case.run, way, way)
        sizes, per_step = needs.up_bytes, needs.per_step["up_bytes_per_step"]
        rounds = needs.rounds(case.step_s)
        mean = rounds.up_total_bytes / rounds.num_fragments
        found[way] = {"round_max": max(sizes), "round_mean": mean, "per_step": per_step}
        found[way]["peak_to_mean"] = max(sizes) / per_step
    gradient = 2 * case.parameters
    found["data_parallel"] = {"gradient": gradient, "per_step": gradient * ring_factor(case.sites)}
    return found


def rate_rows(case: Case) -> list[dict[str, Any]]:
    """Return Gbit/s per site, each way, by format and utilisation; None where no rate is enough."""
    rows = []
    for way in (None, *FORMATS):
        for share in UTILISATIONS:
            if way is None:
                rate = data_parallel_gbit_per_s(2 * case.parameters, case.step_s, case.sites, share)
            else:
                rate = case.per_site * case.rounds(way, way).gbit_per_s(share)
            cell = {"wire": way or "data_parallel", "sites": case.sites, "step_s": case.step_s, "utilisation": share}
            rows.append({**cell, "gbit_per_s": rate if math.isfinite(rate) else None})
    return rows


def latency_rows(case: Case) -> list[dict[str, Any]]:
    """Return the steps of overlap that each round trip needs, over the given link and over an infinitely fast one.

    Through a bucket the rows are for poll intervals, with the given time of a request.
    """
    if case.by_bucket:
        what, own, others = "poll_s", case.config.transport.poll_s, POLLS_S
    else:
        what, own, others = "round_trip_ms", case.assumed.round_trip_ms, ROUND_TRIPS_MS
    rows = []
    for each in sorted({*others, own}):
        if case.by_bucket:
            there = changed(case, transport={what: each})
        else:
            there = replace(case, assumed=replace(case.assumed, round_trip_ms=each))
        rounds, rate = there.rounds(), there.usable_gbit_per_s()
        rows.append(
            {
                what: each,
                "given": each == own,
                "overlap_steps": rounds.overlap_needed(math.inf),
                "overlap_steps_over_link": rounds.overlap_needed(rate),
                "round_s_over_link": rounds.round_s(rate),
            }
        )
    return rows


def link_state(case: Case) -> dict[str, Any]:
    """Return rates, round time and utilisation over the given link, for the config and for data parallel.

    `times_data_parallel` is how many times as many tokens islands train in the same time, without failures:

        share of their time that islands are in steps / share that data parallel computes
    """
    config, assumed = case.config, case.assumed
    rounds, rate = case.rounds(), case.usable_gbit_per_s()
    made, waits = min(rounds.utilisation(rate), 1 / case.syncer_busy), wait(case, rounds, rate)
    alone = data_parallel_utilisation(
        2 * case.parameters, case.step_s, case.sites, assumed.link_gbit_per_s * PAYLOAD_SHARE
    )
    # With overlap a narrow link costs rounds and no steps, unless islands wait for fragments.
    overlaps = config.protocol.overlap_steps > 0
    in_steps = case.step_s / (case.step_s + waits["per_step_s"]) if overlaps else made
    return {
        "gbit_per_s": assumed.link_gbit_per_s,
        "learners_per_site": case.per_site,
        "payload_gbit_per_s_per_learner": rate,
        "planned_gbit_per_s_per_learner": rounds.planned_gbit_per_s,
        "utilisation": made,
        "round_s": rounds.round_s(rate),
        "age_s": rounds.age_s(rate),
        "overlap_s": config.protocol.overlap_steps * case.step_s,
        "reports_s": rounds.reports_s(rate),
        "up_s": rounds.up_s(rate),
        "merge_s": rounds.merge_s,
        "down_s": rounds.down_s(rate),
        "arrive_s": rounds.arrive_s,
        "adopt_s": GAP_STEPS * case.step_s if overlaps else 0.0,
        "wait": waits,
        "data_parallel_utilisation": alone,
        "times_data_parallel": in_steps / alone,
    }


def wait(case: Case, rounds: Rounds, rate: float) -> dict[str, float]:
    """Return what `protocol.wait_steps` costs over a link of `rate` Gbit/s, in seconds.

    The fastest island waits longest: until the slowest one has reported, and its fragment has made its way. If that
    takes longer than the limit, learners soon stop waiting.

    Returns:
        `limit_s`, the longest wait; `needs_s`, the time that the fragment takes; `per_step_s`, the mean wait.
    """
    steps_s = [kind.step_s for kind in case.kinds]
    limit_s = case.config.protocol.wait_steps * min(steps_s)
    needs_s = rounds.fragment_s(rate) + max(steps_s) - min(steps_s)
    due = rounds.num_fragments / rounds.sync_every
    return {"limit_s": limit_s, "needs_s": needs_s, "per_step_s": due * needs_s if needs_s <= limit_s else 0.0}


def syncer_load(case: Case) -> dict[str, Any]:
    """Return processor time and traffic of the syncer, and the share of what its process can carry."""
    assumed, rounds = case.assumed, case.rounds()
    rounds_per_s = rounds.num_fragments / rounds.sync_every / case.step_s
    up_mean = rounds.up_total_bytes / rounds.num_fragments
    cpu_s = assumed.syncer_ms_per_mb * 1e-3 * case.learners * up_mean / 1e6
    return {
        "cpu_s_per_round": cpu_s,
        "rounds_per_s": rounds_per_s,
        "cores": cpu_s * rounds_per_s,
        "merge_s": rounds.merge_s,
        "gbit_per_s_each_way": case.learners * rounds.planned_gbit_per_s,
        "busy": case.syncer_busy,
    }


def _state_rate(case: Case, rate: float, state_bytes: float) -> float:
    """Return the bytes of a state per second, from its request to its arrival, over links of `rate` bytes/s."""
    donor = max(rate - GBIT * case.rounds().planned_gbit_per_s, rate / 2)
    trips_s = 2 * case.round_trip_s
    few_bytes = PARTS_IN_FLIGHT_MIN * STATE_PART_BYTES
    if state_bytes > few_bytes and few_bytes * (1 / rate + 1 / donor) + trips_s > PART_S:
        return donor / STATE_TURNS
    return min(donor, PARTS_IN_FLIGHT_MAX * STATE_PART_BYTES / trips_s) if trips_s else donor


def recovery(case: Case) -> dict[str, Any]:
    """Return the time until a learner trains again after a restart: processes, global model, a neighbour's state.

    The learner's link is free for the global model, because it has no rounds yet. The donor's link carries rounds
    beside the state. A part of the state makes two round trips, from its request to its arrival through the syncer, and
    the parts on their way are limited: on a narrow link to so few that the two links take turns.
    """
    assumed = case.assumed
    rate = GBIT * case.usable_gbit_per_s()
    layout = case.blueprint.state_layout
    moving = MovingLayout(layout, case.config.wire.states)
    model_bytes, state_bytes = 4 * case.parameters, moving.bytes.num_bytes
    model_s, state_s = model_bytes / rate + case.arrive_all_s, state_bytes / _state_rate(case, rate, state_bytes)
    # Once it is there, the leader sends every other host of its island its moments, unpacked.
    outlines = [each.outline for each in case.kinds]
    hosts = [each.kind.island.hosts for each in outlines]
    spread_bytes = max(
        (count - 1) * moments_on_host(each.blueprint, count) for count, each in zip(hosts, outlines, strict=True)
    )
    spread_s = spread_bytes * assumed.island_s_per_gb * 1e-9
    protocol = case.config.protocol
    limit_s = protocol.transfer_steps_max * case.step_s
    arrives = state_s <= limit_s
    waits_s = state_s + spread_s if arrives else protocol.recovery_attempts * limit_s
    from_peer = protocol.recover_from_peers and case.learners > 1
    return {
        "restart_s": assumed.restart_s,
        "global_model_bytes": model_bytes,
        "global_model_s": model_s,
        "state_bytes": state_bytes if from_peer else 0,
        "state_s": state_s if from_peer else 0.0,
        "state_spread_s": spread_s if from_peer and arrives else 0.0,
        "state_limit_s": limit_s,
        "state_arrives": from_peer and arrives,
        "attempts": protocol.recovery_attempts,
        "seconds": assumed.restart_s + model_s + (waits_s if from_peer else 0.0),
    }


def expected_goodput(case: Case, away_s: float) -> dict[str, Any]:
    """Simulate goodput and uptime when single chips fail, for this config and for one job over all chips.

    Args:
      away_s: seconds until a returning learner trains again.

    Raises:
      ValueError: there are fewer slices than learners, or fewer chips than slices.
    """
    assumed, learners = case.assumed, case.learners
    slices = assumed.slices or learners * case.config.islands.slices
    if slices < learners:
        raise ValueError(f"--slices is {slices}, but each of {learners} islands has at least one; raise it")
    if case.chips < slices:
        raise ValueError(
            f"{case.chips} chips cannot be cut into {slices} slices; raise --chips, or lower --slices or islands.count"
        )
    between_s = assumed.mtbi_years * YEAR_S / case.chips
    hardware, rarer = _simulated(case, slices, between_s)
    observed_s = max(FAILURES * between_s / rarer, STEPS_MIN * case.step_s)
    # A learner that loses its only slice restarts.
    if slices == learners:
        hardware = replace(hardware, down_s=0.0, up_s=min(away_s, observed_s))
    lockstep, step_s = case.config.protocol.lockstep, hardware.step_s
    wan, hours = Wan(), observed_s / 3600
    if lockstep:
        hours = min(hours, STEPS_MAX * step_s / 3600)
        wan = Wan(delay_s=0.0, merge_s=case.rounds().round_s(case.usable_gbit_per_s()))
    every = max(1, case.rounds().sync_every // case.rounds().num_fragments)
    protocol = ProtocolConfig(sync_every=every, num_fragments=1)
    method = "sync" if lockstep else "decoupled"
    own = expected(Cell(hardware, method, learners, case.chips, hours, SEED, wan, protocol))
    alone = Hardware(
        step_s=max(case.step_s, between_s / STEPS_PER_FAILURE),
        slices=slices,
        mtbi_chip_s=assumed.mtbi_years * YEAR_S,
        down_s=0.0,
        up_s=assumed.restart_s,
    )
    rigid = expected(Cell(alone, "rigid", 1, case.chips, observed_s * rarer / 3600, SEED))
    return {
        "slices": slices,
        "hours_between_failures": between_s / 3600,
        "simulated_hours": hours,
        "goodput": 1 - (1 - own.goodput) / rarer,
        "uptime": 1 - (1 - own.uptime) / rarer,
        "rigid_goodput": rigid.goodput,
    }


def _simulated(case: Case, slices: int, between_s: float) -> tuple[Hardware, float]:
    """Return hardware whose simulation takes few steps, and how many times as rare failures are in truth.

    If failures are far apart, longer steps give the same result for learners of one slice. Learners of several slices
    notice only between two steps that a slice is back, so for them failures come closer together instead, and each
    costs as much as before. A synchronous run keeps its true step, because its rounds have a fixed number of steps.
    """
    islands, learner_s, mtbi_s = case.config.islands, case.learners * between_s, case.assumed.mtbi_years * YEAR_S
    hardware = Hardware(step_s=case.step_s, slices=slices, mtbi_chip_s=mtbi_s)
    if islands.slices > 1:
        keep = islands.slices_batch == "keep"
        hardware = replace(hardware, down_s=islands.straggler_s + FOUND_S, up_s=RETURNED_S, keep_batch=keep)
    if case.config.protocol.lockstep:
        return hardware, 1.0
    if slices == case.learners:
        return replace(hardware, step_s=max(case.step_s, learner_s / STEPS_PER_FAILURE)), 1.0
    step_s = max(case.step_s, RETURN_S / STEPS_PER_RETURN)
    rarer = max(1.0, learner_s / max(STEPS_PER_FAILURE * step_s, RETURNS_PER_FAILURE * RETURN_S))
    return replace(hardware, step_s=step_s, mtbi_chip_s=max(1.0, mtbi_s / rarer)), rarer


def bucket_traffic(case: Case) -> BucketTraffic:
    """Return what the processes of a case say to each other, for the model of requests to a bucket."""
    transport, needs = case.config.transport, link_needs(case.run)
    turns = needs.turns or (1,) * len(needs.up_bytes)
    up, down = (
        [size for size, n in zip(sizes, turns, strict=True) for _ in range(n)]
        for sizes in (needs.up_bytes, needs.down_bytes)
    )
    rounds, hosts = case.rounds(), [kind.outline.kind.island.hosts for kind in case.kinds]
    made = rounds.utilisation(case.usable_gbit_per_s())
    # In lockstep an island waits for every round.
    step_s, round_s = rounds.step_s if rounds.overlap_steps else rounds.step_s / made, rounds.due_s / made
    idle = rounds.sync_every / rounds.num_fragments - 1
    return BucketTraffic(
        poll_s=transport.poll_s,
        keepalive_s=transport.keepalive_s,
        heartbeat_s=case.config.protocol.heartbeat_s,
        request_s=case.request_s,
        islands=case.learners,
        hosts=max(hosts),
        step_s=step_s,
        round_s=round_s,
        idle_steps=idle,
        up_bytes=up,
        down_bytes=down,
        versions=(1 in hosts) + sum(number for number in hosts if number > 1),
        copied=_copied(case, round_s / (1 + idle)),
    )


def _copied(case: Case, global_step_s: float) -> CopiedSnapshots | None:
    """Return what a standby gets of the syncer's snapshots; None without a standby."""
    if not case.config.syncer.standby:
        return None
    memory, every = syncer_memory(case.run), case.config.protocol.snapshot_every
    return CopiedSnapshots(every * global_step_s, memory.values + memory.outer_momentum + memory.left_out_by_rounding)


def cost(case: Case, goodput: float) -> dict[str, Any]:
    """Return the traffic per day, and the costs per day of everything that has a price."""
    assumed, steps = case.assumed, DAY_S / case.step_s
    rounds = case.rounds()
    moved = case.learners * (rounds.up_total_bytes + rounds.down_total_bytes) / rounds.sync_every * steps
    ring = 2 * case.parameters * ring_factor(case.sites) * case.sites * steps
    found: dict[str, Any] = {"egress_gb_per_day": moved / 1e9, "data_parallel_egress_gb_per_day": ring / 1e9}
    if priced := prices(case):
        found |= priced
        found["chips_wasted_per_day"] = (1 - goodput) * found["chips_per_day"]
    if assumed.price_per_egress_gb:
        found["egress_per_day"] = moved / 1e9 * assumed.price_per_egress_gb
        found["data_parallel_egress_per_day"] = ring / 1e9 * assumed.price_per_egress_gb
    return found


def forecast(case: Case, advice: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the whole forecast, in the form that `diloco plan --json` prints."""
    load, back = syncer_load(case), recovery(case)
    goodput = expected_goodput(case, back["seconds"])
    protocol, wire = case.config.protocol, case.config.wire
    result = {
        "rows": rate_rows(case),
        "run": {
            "name": case.config.name,
            "parameters": case.parameters,
            "base_parameters": case.base_parameters,
            "learners": case.learners,
            "sites": case.sites,
            "chips": case.chips,
            "unit": case.unit,
            "sync_every": protocol.sync_every,
            "sync_later": protocol.sync_later,
            "num_fragments": len(case.run.fragments),
            "fewer_fragments": case.run.fewer_fragments(protocol.num_fragments),
            "class_fragments": dict(zip(map("+".join, protocol.groups.classes), case.run.plan.counts, strict=True)),
            "overlap_steps": protocol.overlap_steps,
            "up": wire.up,
            "down": wire.down,
            "steps": [
                {"islands": list(kind.outline.kind.names), "step_s": kind.step_s, "from": kind.step_from}
                for kind in case.kinds
            ],
        },
        "bytes": wire_bytes(case),
        "link": link_state(case),
        "slices": slices_rows(case),
        "latency": latency_rows(case),
        "syncer": load,
        "growth": growth(case),
        "memory": {
            "islands": [kind.outline.as_dict() for kind in case.kinds],
            "syncer": syncer_needs(case.run)[0]._asdict(),
        },
        "recovery": back,
        "goodput": goodput,
        "bucket": request_figures(case.config.transport.address, bucket_traffic(case)) if case.by_bucket else None,
        "cost": cost(case, goodput["goodput"]),
        "advice": list(advice),
    }
    return {"verdict": verdict(result), **result}
