"""A config under the assumptions of a forecast, with everything that follows from the shapes of its model.

No program is compiled, and no parameter is allocated.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from diloco_jax.core.codec import Format
from diloco_jax.core.fragments import Fragment
from diloco_jax.runtime.island.adoptions import THREADS_MAX
from diloco_jax.settings.resolved import ResolvedRun, resolve
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.slices import gpu_peak_flops
from diloco_jax.sim.goodput.bandwidth import GBIT, Rounds, exchange_bytes
from diloco_jax.sim.goodput.settings import Assumptions
from diloco_jax.tools.budget.memory import base_parameters, held_elements, num_parameters
from diloco_jax.tools.budget.needs import IslandOutline, link_needs, outlines
from diloco_jax.tools.plan.bucket import hop_s
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.flops import model_flops
from diloco_jax.transport.link import bucket_scheme
from diloco_jax.transport.store.store import PIECE_BYTES

# Share of a link's rate that payloads reach: 1 Gbit/s, 60 ms, 8 stripes; docs/log.md, 2026-11-21.
PAYLOAD_SHARE = 0.92
# Share of a window per round trip that one connection moves in practice; docs/benchmarks.md.
WINDOW_SHARE = 2 / 3
# The share of a link that rounds may fill on average, because joins, repairs and states need the rest.
BUSY_MAX = 0.7
# Bits of a byte.
BITS = 8
# Inner step for unknown chips, from the paper's Table 13.
ASSUMED_STEP_S = 1.0


class TimedKind(NamedTuple):
    """Islands with equal settings, and the time of their inner step."""

    outline: IslandOutline
    step_s: float
    # The origin of `step_s`, in words.
    step_from: str
    # The part of `step_s` when slices exchange gradients; 0 for islands of one slice, or over an unknown network.
    exchange_s: float = 0.0

    @property
    def compute_s(self) -> float:
        """Return the time that a slice needs to compute its part of a step."""
        return self.step_s - self.exchange_s


@dataclass(frozen=True)
class Case:
    """A config under assumptions, with everything that follows from shapes alone."""

    # As it was written; advice varies it.
    config: RunConfig
    assumed: Assumptions
    # Kinds of islands, in the order of their first members.
    kinds: tuple[TimedKind, ...]
    # `config`, resolved.
    run: ResolvedRun

    @property
    def learners(self) -> int:
        """Return the number of learners, M."""
        return self.config.islands.count

    @property
    def sites(self) -> int:
        return self.assumed.sites or self.learners

    @property
    def per_site(self) -> int:
        """Return the number of learners of the largest site."""
        return math.ceil(self.learners / self.sites)

    @property
    def chips(self) -> int:
        return self.assumed.chips or sum(each.outline.chips for each in self.kinds)

    @property
    def unit(self) -> str:
        """Return what `chips` counts, in words: the config of a machine without TPU names only devices."""
        named = self.assumed.chips or any(each.outline.kind.topology for each in self.kinds)
        return "chips" if named else "devices"

    @property
    def step_s(self) -> float:
        """Return the inner step of the fastest island, because links must keep up with it."""
        return min(kind.step_s for kind in self.kinds)

    @property
    def blueprint(self) -> Blueprint:
        """Return the shapes of the model, on the first islands."""
        return self.kinds[0].outline.blueprint

    @property
    def parameters(self) -> int:
        return num_parameters(self.blueprint)

    @property
    def base_parameters(self) -> int:
        """Return the number of frozen weights below adapters; 0 if the whole model is trained."""
        return base_parameters(self.blueprint)

    @property
    def by_bucket(self) -> bool:
        """Return whether islands and syncer meet in a bucket."""
        return bool(bucket_scheme(self.config.transport.address))

    @property
    def request_s(self) -> float:
        """Return the time of a request: to the syncer and back, or to the bucket."""
        return self.assumed.round_trip_ms * 1e-3

    @property
    def round_trip_s(self) -> float:
        """Return the mean time of a message to the syncer and back, twice that of a hop through a bucket."""
        return 2 * hop_s(self.config.transport.poll_s, self.request_s) if self.by_bucket else self.request_s

    @property
    def stripe_gbit_per_s(self) -> float:
        """Return the rate of one connection: most of a window per round trip."""
        round_trip_s = self.request_s
        return WINDOW_SHARE * self.assumed.tcp_window_mb * 8e-3 / round_trip_s if round_trip_s else math.inf

    def usable_gbit_per_s(self, stripes: int | None = None) -> float:
        """Return a learner's payload rate over its share of the link, with `stripes` or the config's connections.

        Through a bucket it makes one request after the other, each for a piece of a payload. The rate is at most its
        part of what the syncer's process moves when all learners send at once, in one direction.
        """
        stripes = stripes or self.config.transport.stripes
        link = self.assumed.link_gbit_per_s / self.per_site * PAYLOAD_SHARE
        if self.by_bucket:
            link = PIECE_BYTES / GBIT / (PIECE_BYTES / GBIT / link + self.request_s)
        else:
            link = min(link, stripes * self.stripe_gbit_per_s)
        return min(link, 2 * self.assumed.syncer_gb_per_s * BITS / self.learners)

    @property
    def syncer_busy(self) -> float:
        """Return the mean traffic of all rounds over what the syncer's process can carry."""
        return self.learners * self.rounds().planned_gbit_per_s / BITS / self.assumed.syncer_gb_per_s

    @property
    def syncer_link_busy(self) -> float:
        """Return the mean traffic of all rounds over what the syncer's own link carries; 0 if no link was given."""
        usable = self.assumed.syncer_link_gbit_per_s * PAYLOAD_SHARE
        return self.learners * self.rounds().planned_gbit_per_s / usable if usable else 0.0

    def rounds(self, up: Format | None = None, down: Format | None = None) -> Rounds:
        """Describe one learner's rounds, in the given formats or the config's."""
        assumed = self.assumed
        largest = max(fragment.num_elements for fragment in self.run.fragments)
        threads = self.config.syncer.merge_threads or assumed.syncer_cores
        return link_needs(self.run, up, down).rounds(
            self.step_s,
            self.round_trip_s,
            assumed.merge_ns * 1e-9 * largest * self.learners / min(threads, assumed.syncer_cores),
            self.arrive_s,
        )

    @property
    def arrive_s(self) -> float:
        """Return the longest time from a version's arrival on the hosts of an island until it can be adopted."""
        run, down = self.run, self.config.wire.down
        widths = [size / each.num_elements for size, each in zip(run.payload_bytes(down), run.fragments, strict=True)]
        return max(
            self._arrive_s(kind, fragment, width)
            for kind in self.kinds
            for fragment, width in zip(run.fragments, widths, strict=True)
        )

    @property
    def arrive_all_s(self) -> float:
        """Return the time that a joining island needs to read all fragments in float32, one after the other."""
        return max(sum(self._arrive_s(kind, fragment, 4.0) for fragment in self.run.fragments) for kind in self.kinds)

    def _arrive_s(self, kind: TimedKind, fragment: Fragment, width: float) -> float:
        """Return the time to pass on, decode and check a fragment of `width` bytes per element, and to place it.

        A host sends to others as much as it gets from them, in the same time.
        """
        assumed, outline = self.assumed, kind.outline
        held = held_elements(outline.blueprint, fragment, outline.kind.island.hosts)
        read_s = held.on_host * (assumed.arrival_ns / THREADS_MAX + assumed.place_ns) * 1e-9
        return read_s + held.passed * width * assumed.island_s_per_gb * 1e-9


def case_of(config: RunConfig, assumed: Assumptions) -> Case:
    """Outline a config's islands; ValueError if it has none, or if model, sites or mesh do not fit."""
    if config.algorithm != "decoupled":
        raise ValueError(
            f"algorithm is {config.algorithm!r}, which sends nothing between islands; plan a decoupled run, with data "
            "parallel beside it: --algorithm decoupled"
        )
    if assumed.sites > config.islands.count:
        raise ValueError(
            f"--sites is {assumed.sites}, but there are only {config.islands.count} islands; use 2 to "
            f"{config.islands.count}, or raise islands.count"
        )
    kinds = tuple(_timed(config, each, assumed) for each in outlines(config))
    return Case(config, assumed, kinds, kinds[0].outline.run)


def changed(case: Case, **sections: Mapping[str, Any]) -> Case:
    """Return the case with settings of some sections changed; ValueError if they conflict with other settings."""
    now = case.config
    config = replace(now, **{name: replace(getattr(now, name), **new) for name, new in sections.items()})
    then, before = config.protocol, now.protocol
    cut = then.num_fragments != before.num_fragments or (then.by_class and then.groups != before.groups)
    shapes, kinds = case.blueprint.shapes, case.blueprint.kinds
    run = resolve(config, shapes, kinds) if cut else ResolvedRun.of_plan(config, case.run.plan)
    return replace(case, config=config, run=run)


def _timed(config: RunConfig, each: IslandOutline, assumed: Assumptions) -> TimedKind:
    """Return a kind of islands with the time of its step: computation, then the exchange over a known network."""
    found, rate = _computed(config, each, assumed), GBIT * assumed.slices_gbit_per_s
    if not rate:
        return found
    exchange_s = exchange_bytes(each.gradient_elements, each.kind.slices) / rate
    return found._replace(step_s=found.step_s + exchange_s, exchange_s=exchange_s)


def _computed(config: RunConfig, each: IslandOutline, assumed: Assumptions) -> TimedKind:
    if assumed.step_s:
        return TimedKind(each, assumed.step_s, "given")
    topology, seq_len, gpu = each.kind.topology, config.train.seq_len, each.kind.island.accelerator
    gpu_flops = gpu_peak_flops(gpu) if gpu and not topology else None
    if topology is None and gpu_flops is None:
        unnamed = f"the peak of {gpu} is unknown" if gpu else "no chips are named"
        return TimedKind(each, ASSUMED_STEP_S, f"assumed, as {unnamed}; say --step-s")
    if topology is not None:
        peak_flops, chips = topology.peak_flops, str(topology)
    else:
        peak_flops, chips = (gpu_flops or 0.0) * each.kind.chips, f"{each.kind.chips} {gpu}"
    # Slices compute their parts at the same time.
    shapes, batch = each.blueprint.shapes, each.kind.part_size
    flops = model_flops(config.model, shapes, batch, seq_len, config.data.soft_tokens).flops
    how = f"model FLOPs at {assumed.mfu:.0%} of the peak of {chips}"
    return TimedKind(each, flops / (peak_flops * assumed.mfu), how)
