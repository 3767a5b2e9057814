"""The bytes that one learner moves, and the link that they need."""

from collections.abc import Sequence
from itertools import repeat
from operator import mul
from typing import NamedTuple

from diloco_jax.core.codec import Format
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.settings.run import RunConfig
from diloco_jax.sim.goodput.bandwidth import QUORUM_STEPS, TRIPS, Rounds
from diloco_jax.tools.budget.memory import payload_bytes


class LinkNeeds(NamedTuple):
    """The bytes that one learner moves, and when."""

    up_bytes: tuple[int, ...]  # outer gradient of each fragment, encoded
    down_bytes: tuple[int, ...]  # step of each fragment, encoded
    joining_bytes: int  # whole model, once
    sync_every: int  # global steps after which turns repeat themselves: the longest period
    overlap_steps: int  # inner steps that a round may take
    turns: tuple[int, ...] = ()  # of each fragment in so many steps; nothing where each has one

    @property
    def per_step(self) -> dict[str, float]:
        """Return bytes per global step and of the largest fragment up, as `--json` names them."""
        return {
            "up_bytes_per_step": self._cycle(self.up_bytes) / self.sync_every,
            "down_bytes_per_step": self._cycle(self.down_bytes) / self.sync_every,
            "fragment_bytes_max": max(self.up_bytes),
        }

    def _cycle(self, sizes: Sequence[int]) -> int:
        """Add up the bytes of all turns until they repeat themselves."""
        return sum(map(mul, sizes, self.turns or repeat(1)))

    def rounds(self, step_s: float, round_trip_s: float = 0.0, merge_s: float = 0.0) -> Rounds:
        """Describe the rounds for inner steps of this length, in seconds."""
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
        )

    def round_s(self, up_per_s: float, down_per_s: float, rtt_s: float) -> float:
        """Return the seconds in which the largest fragment goes up and comes back; rates in bytes per second."""
        return max(self.up_bytes) / up_per_s + max(self.down_bytes) / down_per_s + TRIPS * rtt_s

    def step_s(self, up_per_s: float, down_per_s: float, rtt_s: float) -> float:
        """Return the shortest inner step, in seconds, with which the link keeps up.

        It must carry what a step moves on average, and bring a fragment up and back within `overlap_steps`, less the
        time until the quorum has reported.
        """
        carried_s = max(self._cycle(self.up_bytes) / up_per_s, self._cycle(self.down_bytes) / down_per_s)
        carried_s /= self.sync_every
        return max(carried_s, self.round_s(up_per_s, down_per_s, rtt_s) / (max(1, self.overlap_steps) - QUORUM_STEPS))


def link_needs(
    config: RunConfig, plan: FragmentPlan, up: Format | None = None, down: Format | None = None
) -> LinkNeeds:
    """Size the payloads of a run, in the phase of its periods that moves the most.

    Args:
      up: format in place of the config's.
      down: the same for the way back.
    """
    sizes = [fragment.num_elements for fragment in plan.fragments]
    cycles = []
    for phase in config.protocol.groups.phases:
        periods = [period for period, count in zip(phase.periods, plan.counts, strict=True) for _ in range(count)]
        turns = tuple(phase.cycle // period for period in periods)
        cycles.append((sum(map(mul, sizes, turns)) / phase.cycle, phase.cycle, turns))
    _, cycle, turns = max(cycles)
    return LinkNeeds(
        payload_bytes(plan, up or config.wire.up),
        payload_bytes(plan, down or config.wire.down),
        4 * sum(sizes),
        cycle,
        config.protocol.overlap_steps,
        turns,
    )
