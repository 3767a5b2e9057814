"""What a config asks of links, memory and disks, from the shapes of its model alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from diloco_jax.core import codec
from diloco_jax.core.fragments import plan_fragments
from diloco_jax.runtime.learner_state import SAVED_KEPT
from diloco_jax.runtime.settings import RunConfig, fingerprint
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.sharding import MeshConfig

PROCESS_BYTES = 1 << 30  # Python, JAX and its compiler
STEPS_BYTES = 2  # an inner step's gradients and activations, as multiples of the state; only of emulated devices


class Traffic(NamedTuple):
    """What one learner moves.

    Attributes:
      up_bytes: outer gradient of each fragment, encoded.
      down_bytes: step of each fragment, encoded.
      joining_bytes: whole model, once.
      sync_every: global steps in which each fragment has one turn.
      overlap_steps: inner steps that a round may take.
    """

    up_bytes: tuple[int, ...]
    down_bytes: tuple[int, ...]
    joining_bytes: int
    sync_every: int
    overlap_steps: int

    def round_s(self, up_per_s: float, down_per_s: float, rtt_s: float) -> float:
        """Seconds in which the largest fragment goes up and comes back; rates in bytes per second."""
        return max(self.up_bytes) / up_per_s + max(self.down_bytes) / down_per_s + 2 * rtt_s

    def step_s(self, up_per_s: float, down_per_s: float, rtt_s: float) -> float:
        """The shortest inner step, in seconds, with which the link keeps up.

        It must carry what a step moves on average, and bring a fragment up and back within `overlap_steps`.
        """
        carried_s = max(sum(self.up_bytes) / up_per_s, sum(self.down_bytes) / down_per_s) / self.sync_every
        return max(carried_s, self.round_s(up_per_s, down_per_s, rtt_s) / max(1, self.overlap_steps))


class Needs(NamedTuple):
    """What one process needs.

    Attributes:
      parameters: of the model.
      settings: what both sides must agree on, by name.
      traffic: of one learner.
      memory_bytes: of this process on its host, estimated.
      disk_bytes: of the run's folder on this host; 0 without snapshots.
    """

    parameters: int
    settings: Mapping[str, str]
    traffic: Traffic
    memory_bytes: int
    disk_bytes: int


def needs(config: RunConfig, island: str = "") -> Needs:
    """What an island's process needs, or the syncer's.

    Args:
        config: the run.
        island: name of the island; "" for the syncer.

    Raises:
        ValueError: the model cannot be loaded.
    """
    device = jax.local_devices(backend="cpu")[0]
    blueprint = Blueprint(config.model, config.optimizer, MeshConfig(), [device], seed=config.seed)
    shapes, state_bytes = blueprint.shapes, blueprint.state_layout.num_bytes
    plan = plan_fragments(shapes, config.protocol.num_fragments, split_axis=config.fragments.axes(shapes))
    traffic = Traffic(
        tuple(codec.encoded_size(fragment.shapes, config.wire.up) for fragment in plan.fragments),
        tuple(codec.encoded_size(fragment.shapes, config.wire.down) for fragment in plan.fragments),
        4 * sum(fragment.num_elements for fragment in plan.fragments),
        config.protocol.sync_every,
        config.protocol.overlap_steps,
    )
    parameters = sum(math.prod(shape) for shape in shapes.values())
    if island:
        memory, disk = _learner_bytes(config, island, 4 * parameters, state_bytes)
    else:
        memory, disk = _syncer_bytes(config, 4 * parameters, traffic.up_bytes)
    settings = dict(fingerprint(config, plan.fingerprint))
    return Needs(parameters, settings, traffic, PROCESS_BYTES + memory, disk if config.protocol.snapshot_every else 0)


def _learner_bytes(config: RunConfig, island: str, model_bytes: int, state_bytes: int) -> tuple[int, int]:
    """Memory: the newest value of every fragment, those that come with a welcome, a state on its way out or in."""
    own = config.island(island)
    memory = 2 * model_bytes + state_bytes
    if own.devices:  # emulated: their memory is this host's
        memory += (1 + STEPS_BYTES) * state_bytes
    return memory, (SAVED_KEPT + 1) * state_bytes


class SyncerMemory(NamedTuple):
    """What the syncer holds, bytes.

    Attributes:
      values: newest version of every fragment, float32.
      outer: state of the outer optimizer.
      residuals: what rounding the steps has left out so far.
      anchors: older versions that learners may still refer to.
      initial: parameters that the run began with.
      capture: values, outer state and residuals of a snapshot that is being written.
      payloads: of learners, waiting to be merged.
    """

    values: int
    outer: int
    residuals: int
    anchors: int
    initial: int
    capture: int
    payloads: int


def syncer_memory(config: RunConfig, model_bytes: int, up_bytes: Sequence[int]) -> SyncerMemory:
    """What the syncer of a run holds.

    Args:
        config: the run.
        model_bytes: float32 parameters.
        up_bytes: outer gradient of each fragment, encoded.
    """
    protocol = config.protocol
    residuals = model_bytes if config.wire.down != "float32" else 0
    state = 2 * model_bytes + residuals
    payloads = max(1, protocol.overlap_steps) * max(up_bytes) * config.islands.count
    anchors = protocol.anchor_history * model_bytes
    return SyncerMemory(model_bytes, model_bytes, residuals, anchors, model_bytes, state, payloads)


def _syncer_bytes(config: RunConfig, model_bytes: int, up_bytes: Sequence[int]) -> tuple[int, int]:
    memory = syncer_memory(config, model_bytes, up_bytes)
    state = memory.values + memory.outer + memory.residuals
    return sum(memory), (config.checkpoints.keep + 1) * state
