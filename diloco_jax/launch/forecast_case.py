"""A config with the assumptions of a forecast, and what follows from the shapes of its model alone.

Nothing is compiled and no parameter allocated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from diloco_jax.core.codec import Format, encoded_size
from diloco_jax.core.fragments import FragmentPlan, plan_fragments
from diloco_jax.launch.preflight_budget import num_parameters
from diloco_jax.launch.preflight_flops import model_flops
from diloco_jax.runtime.islands import IslandConfig
from diloco_jax.runtime.settings import RunConfig
from diloco_jax.sim.assumptions import Assumptions
from diloco_jax.sim.bandwidth import Rounds
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.topology import Topology

PAYLOAD_SHARE = 0.92  # of a link's rate: 1 Gbit/s, 60 ms, 8 stripes; docs/log.md, 2026-11-21
WINDOW_SHARE = 2 / 3  # of a window per round trip that one connection moves in practice; docs/benchmarks.md
ASSUMED_STEP_S = 1.0  # where nothing is known of the chips; the paper's Table 13


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
        return min(self.given.link_gbit_per_s / self.per_site * PAYLOAD_SHARE, stripes * self.stripe_gbit_per_s)

    @property
    def stripe_gbit_per_s(self) -> float:
        """What one connection moves: most of a window per round trip."""
        round_trip_s = self.given.round_trip_ms * 1e-3
        return WINDOW_SHARE * self.given.tcp_window_mb * 8e-3 / round_trip_s if round_trip_s else math.inf

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
