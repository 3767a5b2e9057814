"""The needs of a config, from the shapes of its model alone: one answer for doctor, preflight, plan and launch."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.runtime.island.saved_states import SAVED_MAX
from diloco_jax.runtime.local.machine import EMULATED_DEVICES, look
from diloco_jax.settings.cutting import cut
from diloco_jax.settings.islands import IslandConfig
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.slices import Topology
from diloco_jax.tools.budget.links import LinkNeeds, link_needs
from diloco_jax.tools.budget.memory import Hbm, HostMemory, SyncerMemory, chip_memory, host_memory, syncer_memory
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.sharding import MESH_AXES


class IslandKind(NamedTuple):
    """Islands that are alike."""

    island: IslandConfig  # what they have
    names: tuple[str, ...]  # of them

    @property
    def topology(self) -> Topology | None:
        """Return the TPU slice of each, if one is named."""
        return self.island.slice

    @property
    def chips(self) -> int:
        """Count the devices of each; as few as the mesh takes where the config has no number."""
        if self.topology or self.island.devices:
            return self.topology.devices if self.topology else self.island.devices
        sizes = [getattr(self.island.mesh, axis) for axis in MESH_AXES]
        least = math.prod(size for size in sizes if size != -1)
        return least * math.ceil(max(EMULATED_DEVICES, self.island.hosts) / least) if -1 in sizes else least


class IslandNeeds(NamedTuple):
    """The needs of each island of a kind."""

    hbm: Hbm  # of each chip; of the temporaries only the gradients, which `diloco preflight` makes exact
    hbm_limit_bytes: float | None  # memory of each chip, None if no slice is named
    host: HostMemory  # of each host
    host_limit_bytes: float | None  # memory of each host, None if no slice is named
    disk_bytes: int  # of the folder of the run on a host, for the states that are kept there; 0 without snapshots


class IslandOutline(NamedTuple):
    """A kind of islands with the shapes of its model."""

    kind: IslandKind  # of the islands
    blueprint: Blueprint  # of each, without devices
    plan: FragmentPlan
    links: LinkNeeds  # of each learner
    needs: IslandNeeds  # of each

    @property
    def chips(self) -> int:
        """Count the chips of all islands of this kind: what is paid for and fails, not what JAX calls a device."""
        topology = self.kind.topology
        return (topology.chips if topology else self.kind.chips) * len(self.kind.names)

    def as_dict(self) -> dict[str, Any]:
        hbm, host = self.needs.hbm, self.needs.host
        parts = {"hbm": hbm._asdict(), "hbm_held_bytes": hbm.fixed, "host": host._asdict()}
        return {"islands": list(self.kind.names), **self.needs._asdict(), **parts}


def kinds_of(config: RunConfig) -> list[IslandKind]:
    """Group the islands that are alike, in the order of their first ones."""
    found: dict[str, IslandKind] = {}
    for name in config.islands.names:
        island = config.island(name)
        alike = repr(island._replace(name="", zone=""))
        known = found.get(alike, IslandKind(island, ()))
        found[alike] = known._replace(names=(*known.names, name))
    return list(found.values())


def plan_of(config: RunConfig, blueprint: Blueprint) -> FragmentPlan:
    """Cut the model of a config into fragments.

    Raises:
      ValueError: it cannot be cut into so many.
    """
    return cut(config, blueprint.shapes, blueprint.kinds)


def outline(config: RunConfig, kind: IslandKind) -> IslandOutline:
    """Work out the needs of a kind of islands; nothing is allocated and nothing compiled.

    Raises:
      ValueError: the model cannot be loaded or cut, or does not fit the mesh.
    """
    blueprint = Blueprint(config.model, config.optimizer, kind.island.mesh, kind.chips, seed=config.seed)
    plan = plan_of(config, blueprint)
    return IslandOutline(kind, blueprint, plan, link_needs(config, plan), island_needs(config, kind, blueprint, plan))


def outlines(config: RunConfig) -> Iterator[IslandOutline]:
    """Work out the needs of all islands, kind by kind. Raises as `outline` does."""
    return (outline(config, kind) for kind in kinds_of(config))


def island_needs(config: RunConfig, kind: IslandKind, blueprint: Blueprint, plan: FragmentPlan) -> IslandNeeds:
    """Add up the needs of each island of a kind, on slices of TPUs or on this machine."""
    topology, emulated = kind.topology, 0 if kind.topology or not look({}).emulates else kind.chips
    hbm = chip_memory(config, blueprint, plan)
    # a host saves what its own chips hold, once where several hold the same
    saved = min((hbm.parameters + hbm.optimizer) * kind.chips / kind.island.hosts, blueprint.state_layout.num_bytes)
    return IslandNeeds(
        hbm,
        topology.generation.hbm_bytes if topology else None,
        host_memory(config, kind.island, blueprint, plan, emulated),
        topology.host_bytes if topology else None,
        SAVED_MAX * round(saved) if config.protocol.snapshot_every else 0,
    )


def syncer_needs(config: RunConfig, plan: FragmentPlan) -> tuple[SyncerMemory, int]:
    """Add up the memory of the syncer's host, and the bytes of the snapshots that are kept; 0 without snapshots."""
    memory = syncer_memory(config, plan)
    kept = config.checkpoints.keep + 1 if config.protocol.snapshot_every else 0
    return memory, round(kept * (memory.values + memory.outer_momentum + memory.left_out_by_rounding))
