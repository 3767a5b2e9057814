"""`diloco plan`: what a config asks of links, machines and money, and what comes of it, before anything is paid for.

Nothing is compiled and no parameter allocated: the sizes are those of the codec and of the fragment plan, the rates
those of sim/bandwidth.py, goodput that of sim/goodput.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from diloco_jax.core.codec import Format, encoded_size
from diloco_jax.core.fragments import FragmentPlan, plan_fragments
from diloco_jax.launch.forecast_memory import island_memory, syncer_bytes
from diloco_jax.launch.preflight_budget import num_parameters
from diloco_jax.launch.preflight_flops import model_flops
from diloco_jax.runtime.islands import IslandConfig
from diloco_jax.runtime.settings import SHARDS_MAX, RunConfig
from diloco_jax.sim.assumptions import Assumptions
from diloco_jax.sim.bandwidth import (
    GBIT,
    UTILISATIONS,
    Rounds,
    data_parallel_gbit_per_s,
    data_parallel_utilisation,
    ring_factor,
)
from diloco_jax.sim.goodput import expected
from diloco_jax.sim.hardware import YEAR_S, Hardware
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.topology import Topology

FORMATS: tuple[Format, ...] = ("float32", "bfloat16", "int8", "int4")  # from wide to narrow
DAY_S = 86400.0
ROUND_TRIPS_MS = (1.0, 10.0, 50.0, 100.0, 200.0)
PAYLOAD_SHARE = 0.92  # of a link's rate: 1 Gbit/s, 60 ms, 8 stripes; docs/log.md, 2026-11-21
WINDOW_SHARE = 2 / 3  # of a window per round trip that one connection moves in practice; docs/benchmarks.md
ASSUMED_STEP_S = 1.0  # where nothing is known of the chips; the paper's Table 13
SEED = 0  # of the simulated failures


class Kind(NamedTuple):
    """Islands that are alike.

    Attributes:
      island: what they have.
      names: of them.
      chips: of each.
      blueprint: of each, without devices.
      step_s: of an inner step.
      step_from: where that time comes from.
    """

    island: IslandConfig
    names: tuple[str, ...]
    chips: int
    blueprint: Blueprint
    step_s: float
    step_from: str


@dataclass(frozen=True)
class Case:
    """A config under assumptions, with what follows from shapes alone.

    Attributes:
      config: of the run.
      given: the assumptions.
      kinds: of islands, in the order of their first ones.
      plan: of the fragments.
    """

    config: RunConfig
    given: Assumptions
    kinds: tuple[Kind, ...]
    plan: FragmentPlan

    @property
    def learners(self) -> int:
        """M."""
        return self.config.islands.count

    @property
    def sites(self) -> int:
        """Data centres."""
        return self.given.sites or self.learners

    @property
    def per_site(self) -> int:
        """Learners of the fullest site."""
        return math.ceil(self.learners / self.sites)

    @property
    def chips(self) -> int:
        """Of all learners."""
        return self.given.chips or sum(kind.chips * len(kind.names) for kind in self.kinds)

    @property
    def step_s(self) -> float:
        """Of the fastest island: links must keep up with it."""
        return min(kind.step_s for kind in self.kinds)

    @property
    def parameters(self) -> int:
        """Of the model."""
        return num_parameters(self.kinds[0].blueprint)

    def usable_gbit_per_s(self, stripes: int) -> float:
        """Payload that a learner gets over its share of the link with so many connections."""
        window_s = self.given.round_trip_ms * 1e-3
        windows = stripes * self.stripe_gbit_per_s if window_s else math.inf
        return min(self.given.link_gbit_per_s / self.per_site * PAYLOAD_SHARE, windows)

    @property
    def stripe_gbit_per_s(self) -> float:
        """What one connection moves: most of a window per round trip."""
        return WINDOW_SHARE * self.given.tcp_window_mb * 8e-3 / (self.given.round_trip_ms * 1e-3)

    def rounds(self, up: Format, down: Format, *, round_trip_ms: float | None = None) -> Rounds:
        """What one learner's rounds ask of its link in these formats."""
        protocol, given = self.config.protocol, self.given
        sizes = {way: [encoded_size(each.shapes, way) for each in self.plan.fragments] for way in (up, down)}
        largest = max(fragment.num_elements for fragment in self.plan.fragments)
        threads = self.config.syncer.merge_threads or given.syncer_cores
        return Rounds(
            step_s=self.step_s,
            sync_every=protocol.sync_every,
            num_fragments=protocol.num_fragments,
            overlap_steps=protocol.overlap_steps,
            up_bytes=max(sizes[up]),
            down_bytes=max(sizes[down]),
            up_total_bytes=sum(sizes[up]),
            down_total_bytes=sum(sizes[down]),
            round_trip_s=1e-3 * (given.round_trip_ms if round_trip_ms is None else round_trip_ms),
            merge_s=given.merge_ns * 1e-9 * largest * self.learners / min(threads, given.syncer_cores),
        )


def case_of(config: RunConfig, given: Assumptions) -> Case:
    """Look at a config's islands.

    Args:
      config: of the run.
      given: links, machines and prices.

    Raises:
      ValueError: the run has no islands, the model cannot be loaded, or sites or mesh do not fit.
    """
    if config.algorithm != "decoupled":
        raise ValueError(
            f"algorithm is {config.algorithm!r}, which sends nothing between islands; plan a decoupled run, with data "
            "parallel beside it: --algorithm decoupled"
        )
    if given.sites > config.islands.count:
        raise ValueError(
            f"--sites is {given.sites}, but there are only {config.islands.count} islands; use 2 to "
            f"{config.islands.count}, or raise islands.count"
        )
    found: dict[str, Kind] = {}
    for name in config.islands.names:
        island = config.island(name)
        alike = repr(island._replace(name="", zone=""))
        if alike in found:
            found[alike] = found[alike]._replace(names=(*found[alike].names, name))
        else:
            found[alike] = _kind(config, island, given)
    kinds = tuple(found.values())
    return Case(config, given, kinds, plan_of(config, kinds[0].blueprint))


def plan_of(config: RunConfig, blueprint: Blueprint) -> FragmentPlan:
    """The fragments of a config.

    Raises:
      ValueError: the model cannot be cut into so many.
    """
    axes = config.fragments.axes(blueprint.shapes)
    return plan_fragments(blueprint.shapes, config.protocol.num_fragments, split_axis=axes)


def changed(case: Case, *, sync_every: int, num_fragments: int, overlap_steps: int) -> Case:
    """The same with another schedule.

    Raises:
      ValueError: the model cannot be cut into so many fragments, or another setting forbids it.
    """
    protocol = replace(
        case.config.protocol, sync_every=sync_every, num_fragments=num_fragments, overlap_steps=overlap_steps
    )
    config = replace(case.config, protocol=protocol)
    cut = num_fragments != case.config.protocol.num_fragments
    return replace(case, config=config, plan=plan_of(config, case.kinds[0].blueprint) if cut else case.plan)


def _kind(config: RunConfig, island: IslandConfig, given: Assumptions) -> Kind:
    topology = Topology.parse(island.topology) if island.topology else None
    chips = topology.chips if topology else max(1, island.devices)
    blueprint = Blueprint(config.model, config.optimizer, island.mesh, chips, seed=config.seed)
    step_s, step_from = given.step_s, "given"
    if not step_s and topology:
        flops = model_flops(config.model, blueprint.shapes, island.batch_size, config.train.seq_len).flops
        step_s = flops / (topology.peak_flops * given.mfu)
        step_from = f"model FLOPs at {given.mfu:.0%} of the peak of {topology}"
    elif not step_s:
        step_s, step_from = ASSUMED_STEP_S, "assumed, as no chips are named; say --step-s"
    return Kind(island, (island.name,), chips, blueprint, step_s, step_from)


# ---- the parts of the answer ----------------------------------------------------------------------------------------


def wire_bytes(case: Case) -> dict[str, Any]:
    """Per learner and format: bytes of the largest and the mean round, up, and as many down; beside data parallel."""
    found: dict[str, Any] = {}
    for way in FORMATS:
        sizes = [encoded_size(each.shapes, way) for each in case.plan.fragments]
        per_step = sum(sizes) / case.config.protocol.sync_every
        found[way] = {"round_max": max(sizes), "round_mean": sum(sizes) / len(sizes), "per_step": per_step}
    gradient = 2 * case.parameters
    found["data_parallel"] = {"gradient": gradient, "per_step": gradient * ring_factor(case.sites)}
    return found


def rate_rows(case: Case) -> list[dict[str, Any]]:
    """Gbit/s per site, each way, by format and utilisation; None where no rate is enough."""
    rows = []
    for wire in ("data_parallel", *FORMATS):
        for share in UTILISATIONS:
            if wire == "data_parallel":
                rate = data_parallel_gbit_per_s(2 * case.parameters, case.step_s, case.sites, share)
            else:
                rate = case.per_site * case.rounds(wire, wire).gbit_per_s(share)
            cell = {"wire": wire, "sites": case.sites, "step_s": case.step_s, "utilisation": share}
            rows.append({**cell, "gbit_per_s": rate if math.isfinite(rate) else None})
    return rows


def latency_rows(case: Case) -> list[dict[str, Any]]:
    """How many steps of overlap a round trip needs, over the given link and over one of any rate."""
    own = case.given.round_trip_ms
    wire, rate = case.config.wire, case.usable_gbit_per_s(case.config.transport.stripes)
    rows = []
    for round_trip_ms in sorted({*ROUND_TRIPS_MS, own}):
        there = replace(case, given=replace(case.given, round_trip_ms=round_trip_ms))
        rounds = there.rounds(wire.up, wire.down)
        stripes = there.usable_gbit_per_s(case.config.transport.stripes) if round_trip_ms else rate
        rows.append(
            {
                "round_trip_ms": round_trip_ms,
                "given": round_trip_ms == own,
                "overlap_steps": rounds.overlap_needed(math.inf),
                "overlap_steps_over_link": rounds.overlap_needed(stripes),
                "round_s_over_link": rounds.round_s(stripes),
            }
        )
    return rows


def link_state(case: Case) -> dict[str, Any]:
    """What the config does over the given link, and data parallel beside it."""
    config, given = case.config, case.given
    rounds = case.rounds(config.wire.up, config.wire.down)
    rate = case.usable_gbit_per_s(config.transport.stripes)
    return {
        "gbit_per_s": given.link_gbit_per_s,
        "learners_per_site": case.per_site,
        "payload_gbit_per_s_per_learner": rate,
        "planned_gbit_per_s_per_learner": rounds.planned_gbit_per_s,
        "utilisation": rounds.utilisation(rate),
        "round_s": rounds.round_s(rate),
        "overlap_s": config.protocol.overlap_steps * case.step_s,
        "merge_s": rounds.merge_s,
        "data_parallel_utilisation": data_parallel_utilisation(
            2 * case.parameters, case.step_s, case.sites, given.link_gbit_per_s * PAYLOAD_SHARE
        ),
    }


def syncer_load(case: Case) -> dict[str, Any]:
    """Processor time, traffic, and shards of the syncer."""
    protocol, given = case.config.protocol, case.given
    wire = case.config.wire
    rounds = case.rounds(wire.up, wire.down)
    rounds_per_s = protocol.num_fragments / protocol.sync_every / case.step_s
    in_mb_per_s = case.learners * rounds.planned_gbit_per_s * GBIT / 1e6
    up_mean = rounds.up_total_bytes / protocol.num_fragments
    cpu_s = given.syncer_ms_per_mb * 1e-3 * case.learners * up_mean / 1e6
    shards = min(SHARDS_MAX, math.ceil(in_mb_per_s / given.shard_mb_per_s))
    return {
        "cpu_s_per_round": cpu_s,
        "rounds_per_s": rounds_per_s,
        "cores": cpu_s * rounds_per_s,
        "merge_s": rounds.merge_s,
        "gbit_per_s_each_way": case.learners * rounds.planned_gbit_per_s,
        "mb_per_s_in": in_mb_per_s,
        "shards": shards if shards > 1 else 0,
    }


def recovery(case: Case) -> dict[str, Any]:
    """How long a learner that starts anew is away: its processes, the global model, and a neighbour's state."""
    given = case.given
    rate = GBIT * max(
        case.usable_gbit_per_s(case.config.transport.stripes)
        - case.rounds(case.config.wire.up, case.config.wire.down).planned_gbit_per_s,
        0.0,
    )
    model_bytes, state_bytes = 4 * case.parameters, case.kinds[0].blueprint.state_layout.num_bytes
    moved_s = [size / rate if rate else math.inf for size in (model_bytes, state_bytes)]
    from_peer = case.config.protocol.recover_from_peers
    return {
        "restart_s": given.restart_s,
        "global_model_bytes": model_bytes,
        "global_model_s": moved_s[0],
        "state_bytes": state_bytes if from_peer else 0,
        "state_s": moved_s[1] if from_peer else 0.0,
        "state_limit_s": case.config.protocol.sync_every * case.step_s,
        "seconds": given.restart_s + moved_s[0] + (moved_s[1] if from_peer else 0.0),
    }


def expected_goodput(case: Case, away_s: float) -> dict[str, Any]:
    """Goodput and uptime under failures of single chips, of this config and of one job over all chips.

    Args:
      case: config and assumptions.
      away_s: how long a returning learner takes to train again.
    """
    given = case.given
    slices = max(given.slices, case.learners)
    hardware = Hardware(step_s=case.step_s, slices=slices, mtbi_chip_s=given.mtbi_years * YEAR_S)
    if slices == case.learners:  # a learner that loses its only slice begins anew
        hardware = replace(hardware, down_s=0.0, up_s=min(away_s, given.hours * 3600))
    method = "sync" if case.config.protocol.lockstep else "decoupled"
    own = expected(hardware, method, case.learners, case.chips, hours=given.hours, seed=SEED)
    rigid = expected(replace(hardware, slices=slices), "rigid", 1, case.chips, hours=given.hours, seed=SEED)
    return {
        "chips": case.chips,
        "slices": slices,
        "hours_between_failures": given.mtbi_years * YEAR_S / case.chips / 3600,
        "goodput": own.goodput,
        "uptime": own.uptime,
        "contributors_per_round": own.contributors_per_round,
        "rigid_goodput": rigid.goodput,
    }


def cost(case: Case, goodput: float) -> dict[str, Any]:
    """Per day; only what has a price.

    Args:
      case: config and assumptions.
      goodput: share of the chips' time in useful steps.
    """
    given, wire, steps = case.given, case.config.wire, DAY_S / case.step_s
    rounds = case.rounds(wire.up, wire.down)
    moved = case.learners * (rounds.up_total_bytes + rounds.down_total_bytes) / case.config.protocol.sync_every * steps
    ring = 2 * case.parameters * ring_factor(case.sites) * case.sites * steps
    found: dict[str, Any] = {"egress_gb_per_day": moved / 1e9, "data_parallel_egress_gb_per_day": ring / 1e9}
    if given.price_per_chip_hour:
        found["chips_per_day"] = 24 * case.chips * given.price_per_chip_hour
        found["chips_wasted_per_day"] = (1 - goodput) * found["chips_per_day"]
    if given.price_per_egress_gb:
        found["egress_per_day"] = moved / 1e9 * given.price_per_egress_gb
        found["data_parallel_egress_per_day"] = ring / 1e9 * given.price_per_egress_gb
    return found


def forecast(case: Case, advice: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Everything, as `diloco plan --json` prints it.

    Args:
      case: config and assumptions.
      advice: on it.
    """
    load, back = syncer_load(case), recovery(case)
    shards = case.config.syncer.shards
    goodput = expected_goodput(case, back["seconds"])
    protocol, wire = case.config.protocol, case.config.wire
    return {
        "rows": rate_rows(case),
        "run": {
            "name": case.config.name,
            "parameters": case.parameters,
            "learners": case.learners,
            "sites": case.sites,
            "chips": case.chips,
            "sync_every": protocol.sync_every,
            "num_fragments": protocol.num_fragments,
            "overlap_steps": protocol.overlap_steps,
            "up": wire.up,
            "down": wire.down,
            "steps": [
                {"islands": list(kind.names), "step_s": kind.step_s, "from": kind.step_from} for kind in case.kinds
            ],
        },
        "bytes": wire_bytes(case),
        "link": link_state(case),
        "latency": latency_rows(case),
        "syncer": load,
        "memory": {
            "islands": [
                {"islands": list(kind.names), **island_memory(case.config, kind.island, kind.blueprint, case.plan)}
                for kind in case.kinds
            ],
            "syncer": syncer_bytes(case.config, case.plan, shards),
        },
        "recovery": back,
        "goodput": goodput,
        "cost": cost(case, goodput["goodput"]),
        "advice": list(advice),
    }
