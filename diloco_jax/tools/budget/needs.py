"""The needs of a config, from the shapes of its model alone, for doctor, preflight, plan and launch."""

import math
from collections.abc import Iterator, Sequence
from itertools import repeat
from operator import mul
from typing import Any, NamedTuple

from diloco_jax.core.codec import Format
from diloco_jax.runtime.island.saved_states import SAVED_MAX
from diloco_jax.runtime.local.machine import EMULATED_DEVICES, look
from diloco_jax.settings.islands import IslandConfig
from diloco_jax.settings.resolved import ResolvedRun, resolve
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.slices import Topology
from diloco_jax.sim.goodput.bandwidth import QUORUM_STEPS, TRIPS, Rounds
from diloco_jax.tools.budget.memory import (
    Hbm,
    HostMemory,
    SyncerMemory,
    chip_memory,
    gradient_elements,
    host_memory,
    syncer_memory,
)
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.sharding import MESH_AXES


class LinkNeeds(NamedTuple):
    """The bytes that one learner moves, and how often."""

    # Encoded outer gradient of each fragment.
    up_bytes: tuple[int, ...]
    # Encoded answer for each fragment.
    down_bytes: tuple[int, ...]
    # The whole model, once.
    joining_bytes: int
    # Turns repeat after so many global steps, the longest period.
    sync_every: int
    # Inner steps that a round may take.
    overlap_steps: int
    # Turns of each fragment in `sync_every` steps; empty if each has one.
    turns: tuple[int, ...] = ()

    @property
    def per_step(self) -> dict[str, float]:
        """Return bytes per global step, and of the largest fragment up, under the names of `--json`."""
        return {
            "up_bytes_per_step": self._cycle(self.up_bytes) / self.sync_every,
            "down_bytes_per_step": self._cycle(self.down_bytes) / self.sync_every,
            "fragment_bytes_max": max(self.up_bytes),
        }

    def _cycle(self, sizes: Sequence[int]) -> int:
        """Add up the bytes of all turns until they repeat."""
        return sum(map(mul, sizes, self.turns or repeat(1)))

    def rounds(self, step_s: float, round_trip_s: float = 0.0, merge_s: float = 0.0, arrive_s: float = 0.0) -> Rounds:
        """Describe the rounds for inner steps of `step_s` seconds."""
        return Rounds(
            step_s=step_s,
            sync_every=self.sync_every,
            num_fragments=sum(self.turns) or len(self.up_bytes),
            overlap_steps=self.overlap_steps,
            up_bytes=max(self.up_bytes),
            down_bytes=max(self.down_bytes),
            up_total_bytes=self._cycle(self.up_bytes),
            down_total_bytes=self._cycle(self.down_bytes),
            round_trip_s=round_trip_s,
            merge_s=merge_s,
            arrive_s=arrive_s,
        )

    def round_s(self, up_per_s: float, down_per_s: float, rtt_s: float) -> float:
        """Return the seconds of the largest fragment's way up and back; rates in bytes per second."""
        return max(self.up_bytes) / up_per_s + max(self.down_bytes) / down_per_s + TRIPS * rtt_s

    def step_s(self, up_per_s: float, down_per_s: float, rtt_s: float) -> float:
        """Return the shortest inner step in seconds that the link can sustain.

        The link must carry the bytes of an average step, and bring a fragment up and back within `overlap_steps`, less
        the time until the quorum has reported.
        """
        carried_s = max(self._cycle(self.up_bytes) / up_per_s, self._cycle(self.down_bytes) / down_per_s)
        carried_s /= self.sync_every
        return max(carried_s, self.round_s(up_per_s, down_per_s, rtt_s) / (max(1, self.overlap_steps) - QUORUM_STEPS))


def link_needs(run: ResolvedRun, up: Format | None = None, down: Format | None = None) -> LinkNeeds:
    """Size the payloads of a run in these formats or the config's, for the phase of periods that moves most."""
    config = run.config
    sizes = [fragment.num_elements for fragment in run.fragments]
    cycles = []
    for phase in config.protocol.groups.phases:
        periods = [period for period, count in zip(phase.periods, run.plan.counts, strict=True) for _ in range(count)]
        turns = tuple(phase.cycle // period for period in periods)
        cycles.append((sum(map(mul, sizes, turns)) / phase.cycle, phase.cycle, turns))
    _, cycle, turns = max(cycles)
    return LinkNeeds(
        run.payload_bytes(up or config.wire.up),
        run.payload_bytes(down or config.wire.down),
        4 * sum(sizes),
        cycle,
        config.protocol.overlap_steps,
        turns,
    )


class IslandKind(NamedTuple):
    """Islands with equal settings; of an island of several slices they are those of each slice."""

    # Their common settings.
    island: IslandConfig
    # Their names.
    names: tuple[str, ...]
    # Slices of each island, which all have the whole model and share its batch.
    slices: int = 1

    @property
    def topology(self) -> Topology | None:
        """Return the TPU slice of each island, or of each of its slices; None if the config names none."""
        return self.island.slice

    @property
    def part_size(self) -> int:
        """Return the sequences of a step that each slice computes while none is missing."""
        return self.island.batch_size // self.slices

    @property
    def chips(self) -> int:
        """Count the devices of each, or of each slice; the fewest that the mesh allows if the config has no number."""
        if self.topology or self.island.devices:
            return self.topology.devices if self.topology else self.island.devices
        sizes = [getattr(self.island.mesh, axis) for axis in MESH_AXES]
        least = math.prod(size for size in sizes if size != -1)
        return least * math.ceil(max(EMULATED_DEVICES, self.island.hosts) / least) if -1 in sizes else least


class IslandNeeds(NamedTuple):
    """The needs of each island of a kind."""

    # Memory of each chip. The temporaries are only the gradients; `diloco preflight` computes them exactly.
    hbm: Hbm
    # Memory of each chip; None if no slice is named.
    hbm_limit_bytes: float | None
    # Memory that each host needs.
    host: HostMemory
    # Memory of each host; None if no slice is named.
    host_limit_bytes: float | None
    # Saved states in the run's folder on each host; 0 without snapshots.
    disk_bytes: int


class IslandOutline(NamedTuple):
    """A kind of islands with the shapes of its model."""

    kind: IslandKind
    # Shapes and shardings without devices.
    blueprint: Blueprint
    run: ResolvedRun
    links: LinkNeeds  # per learner
    needs: IslandNeeds  # per island

    @property
    def chips(self) -> int:
        """Count the chips of all islands of this kind, which may each be several devices for JAX."""
        topology, slices = self.kind.topology, self.kind.slices * len(self.kind.names)
        return (topology.chips if topology else self.kind.chips) * slices

    @property
    def gradient_elements(self) -> int:
        """Count the elements of a gradient on the devices of one host, each once."""
        return gradient_elements(self.blueprint, self.kind.island.hosts)

    def as_dict(self) -> dict[str, Any]:
        hbm, host = self.needs.hbm, self.needs.host
        parts = {"hbm": hbm._asdict(), "hbm_held_bytes": hbm.fixed, "host": host._asdict()}
        return {"islands": list(self.kind.names), **self.needs._asdict(), **parts}


def kinds_of(config: RunConfig) -> list[IslandKind]:
    """Group islands with equal settings, in the order of their first members."""
    found: dict[str, IslandKind] = {}
    for name in config.islands.names:
        island = config.island(name)
        alike = repr(island._replace(name="", zone=""))
        known = found.get(alike, IslandKind(island, (), config.islands.slices))
        found[alike] = known._replace(names=(*known.names, name))
    return list(found.values())


def outline(config: RunConfig, kind: IslandKind) -> IslandOutline:
    """Compute the needs of a kind of islands from shapes; ValueError if model, mesh and fragments do not fit."""
    blueprint = Blueprint(config.model, config.optimizer, kind.island.mesh, kind.chips, seed=config.seed)
    run = resolve(config, blueprint.shapes, blueprint.kinds)
    return IslandOutline(kind, blueprint, run, link_needs(run), island_needs(run, kind, blueprint))


def outlines(config: RunConfig) -> Iterator[IslandOutline]:
    """Yield the needs of all islands, kind by kind; raises as `outline`."""
    return (outline(config, kind) for kind in kinds_of(config))


def island_needs(run: ResolvedRun, kind: IslandKind, blueprint: Blueprint) -> IslandNeeds:
    """Return the needs of each island of a kind, on slices of TPUs or on this machine."""
    topology, emulated = kind.topology, 0 if kind.topology or not look({}).emulates else kind.chips
    hbm = chip_memory(run, blueprint)
    # A host saves the arrays of its chips, and only one copy of replicated arrays.
    saved = min((hbm.parameters + hbm.optimizer) * kind.chips / kind.island.hosts, blueprint.state_layout.num_bytes)
    return IslandNeeds(
        hbm,
        topology.generation.hbm_bytes if topology else None,
        host_memory(run, kind.island, blueprint, emulated, kind.slices),
        topology.host_bytes if topology else None,
        SAVED_MAX * round(saved) if run.config.protocol.snapshot_every else 0,
    )


def syncer_needs(run: ResolvedRun) -> tuple[SyncerMemory, int]:
    """Return the memory of the syncer's machine, and the bytes of its snapshots on disk, 0 without snapshots."""
    memory = syncer_memory(run)
    kept = run.config.checkpoints.keep + 1 if run.config.protocol.snapshot_every else 0
    return memory, round(kept * (memory.values + memory.outer_momentum + memory.left_out_by_rounding))
