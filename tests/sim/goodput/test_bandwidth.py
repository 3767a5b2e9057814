"""The formulas for rounds over a link, against rounds of the real machines on virtual time."""

from statistics import mean
from typing import Any

import pytest

from diloco_jax.protocol.effects import Effect
from diloco_jax.protocol.messages import LearnerMessage, StepReport
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.goodput.bandwidth import GBIT, Rounds
from diloco_jax.sim.network import NetworkOptions
from diloco_jax.sim.scenario import Scenario

RATE, SYNC_EVERY, STEPS = 1e6, 24, 200
# Steps of the simulation take 1 to 1.02 s.
MERGE_S, STEP_S = 0.01, 1.01


class TimedSyncer(Syncer):
    """The syncer's machine; it notes when rounds open and close, and when learners have their versions."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.opened_s: dict[int, float] = {}
        self.closed_s: dict[int, float] = {}
        self.arrived_s: dict[int, list[float]] = {}

    def on_merged(self, global_step: int, *arguments: Any) -> list[Effect]:
        this = self.rounds.flying[global_step]
        self.opened_s[global_step], self.closed_s[global_step] = this.opened_s, this.closed_s
        return super().on_merged(global_step, *arguments)

    def on_message(self, message: LearnerMessage, now_s: float) -> list[Effect]:
        if isinstance(message, StepReport):
            for _, version, ago_s in message.arrived:
                self.arrived_s.setdefault(version, []).append(now_s - ago_s)
        return super().on_message(message, now_s)


def simulated(
    travel_s: float, round_trip_s: float, overlap_steps: int, learners: int, fragments: int
) -> tuple[float, float]:
    """Return merged rounds per inner step, and the mean time from a round's opening to the arrival of its version."""
    protocol = ProtocolConfig(sync_every=SYNC_EVERY, num_fragments=fragments, overlap_steps=overlap_steps)
    size = int(travel_s * RATE)
    scenario = Scenario(
        config=protocol,
        learners=learners,
        total_steps=STEPS,
        network=NetworkOptions(delay_s=round_trip_s / 2, bandwidth_bytes_per_s=RATE),
        step_s=1.0,
        speed_spread=0.0,
        step_noise=0.02,
        merge_s=MERGE_S,
        payload_bytes=size,
        delta_bytes=size,
    )
    cluster = Cluster(scenario, make_syncer=TimedSyncer, taped=False)
    cluster.run(1e5)
    machine = cluster.syncer
    assert isinstance(machine, TimedSyncer) and cluster.complete
    # The averages of the pace are stable by then.
    late = [step for step in sorted(machine.opened_s) if STEPS // 4 < step < 0.9 * STEPS]
    span_s = machine.closed_s[late[-1]] - machine.closed_s[late[0]]
    took_s = [at_s - machine.opened_s[step] for step in late for at_s in machine.arrived_s[step]]
    return (len(late) - 1) / span_s * STEP_S, mean(took_s)


@pytest.mark.parametrize(
    ("travel_s", "round_trip_s", "overlap_steps", "learners", "fragments"),
    [
        (0.2, 0.0, 2, 2, 24),
        (0.2, 0.2, 2, 2, 24),
        (1.0, 0.0, 2, 2, 24),
        (1.3, 0.0, 2, 4, 24),
        (0.1, 1.0, 2, 2, 24),
        (0.1, 2.0, 6, 2, 24),
        (0.4, 0.0, 2, 2, 12),
        (0.1, 2.0, 6, 2, 12),
    ],
)
def test_rounds_are_those_of_the_machines(
    travel_s: float, round_trip_s: float, overlap_steps: int, learners: int, fragments: int
) -> None:
    size = travel_s * RATE
    rounds = Rounds(
        step_s=STEP_S,
        sync_every=SYNC_EVERY,
        num_fragments=fragments,
        overlap_steps=overlap_steps,
        up_bytes=size,
        down_bytes=size,
        up_total_bytes=fragments * size,
        down_total_bytes=fragments * size,
        round_trip_s=round_trip_s,
        merge_s=MERGE_S,
    )
    per_step, round_s = simulated(travel_s, round_trip_s, overlap_steps, learners, fragments)
    # The report about a version arrives half a round trip after it.
    told_s = rounds.round_s(RATE / GBIT) + round_trip_s / 2
    assert rounds.utilisation(RATE / GBIT) == pytest.approx(per_step * SYNC_EVERY / fragments, rel=0.05)
    assert told_s == pytest.approx(round_s, rel=0.09)
