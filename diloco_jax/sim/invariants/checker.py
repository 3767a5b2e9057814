"""Common parts of the observers that hold a run to its invariants. Each knows one rule and believes no machine.

A checker keeps its own books from messages, effects and steps. It never asks a machine for a decision, so a bug that a
machine and its own state agree on is still found. The numbers of the rules are those of docs/protocol.md.
"""

from diloco_jax.protocol.syncer.comeback import REPETITIONS_MAX
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.holdings import Value
from diloco_jax.sim.network import LinkFaults
from diloco_jax.sim.node import LearnerProcess, Observer
from diloco_jax.sim.scenario import Scenario


class Violation(AssertionError):
    """A rule of the protocol was broken."""


class Checker(Observer):
    """An observer of one cluster that raises Violation."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.config = cluster.scenario.config
        hostile = [fault for fault in cluster.scenario.faults if fault.kind == "hostile"]
        # The reports of these learners prove nothing.
        self.hostile = {name for fault in hostile for name in fault.learners}
        # Number of the syncer's current process.
        self.epoch = 1
        # Number of rewinds to a snapshot.
        self.lineage = 0
        # Number of the syncer's process -> lineage.
        self.lineages = {1: 0}

    @property
    def values(self) -> list[Value]:
        """The values of all fragments that the syncer's process holds."""
        return self.cluster.syncer_node.process.values

    def check(self, ok: bool, text: str) -> None:
        if not ok:
            raise Violation(f"{type(self).__name__} at {self.cluster.engine.now_s:.3f} s: {text}")

    def on_syncer_back(self, machine: Syncer, rewound_to: int, now_s: float) -> None:
        self.epoch += 1
        self.lineage += rewound_to >= 0
        self.lineages[self.epoch] = self.lineage


def longest_step_s(scenario: Scenario) -> float:
    """Return the upper bound of a healthy learner's step, and of its wait for a fragment."""
    return (1 + scenario.config.wait_steps) * scenario.step_s * (1 + scenario.speed_spread) * (1 + scenario.step_noise)


class HealthyChecker(Checker):
    """A checker whose rule holds only from a time on: when nothing goes wrong any more.

    healed_s is that time; bound_s the longest way from one closed round to the next: the learners' own pace, and every
    timeout of the protocol; way_s the longest way of a message.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        scenario, network, config = cluster.scenario, cluster.scenario.network, self.config
        link_faults = network.faults or LinkFaults()
        self.messages_heal_s = link_faults.heals_s
        self.healed_s = max([link_faults.heals_s, *(fault.over_s for fault in scenario.faults)])
        if scenario.norms is not None:
            self.healed_s = max(self.healed_s, scenario.norms.ends_s)
        self.lossless = not link_faults.loss or link_faults.heals_s > 0
        steps = config.groups.gap_max + 2 if config.lockstep else config.overlap_steps + 3
        transfer_s = 0.0
        # All payloads may be under way at once.
        if network.bandwidth_bytes_per_s:
            payloads = 3 * config.num_fragments + scenario.state_parts
            transfer_s = payloads * scenario.payload_bytes / network.bandwidth_bytes_per_s
        reorder_s = link_faults.reorder_s if link_faults.reorder else 0.0
        self.way_s = network.delay_s + network.jitter_s + reorder_s + transfer_s
        pace_s = (steps + config.grace_steps_max) * longest_step_s(scenario) + 2 * scenario.merge_s
        timeouts_s = 3 * config.silence_s + config.heartbeat_s + config.pull_timeout_s + 2 * config.resend_s
        if any(fault.kind in ("syncer_crash", "rewind") for fault in scenario.faults):
            timeouts_s += config.restore_s + 2**REPETITIONS_MAX * config.resend_s
        # An island that evaluates makes no step, and all live ones may be asked before the first has answered.
        timeouts_s += 3 * scenario.eval_s
        self.bound_s = (pace_s + 10 * self.way_s + timeouts_s) * (1 if self.lossless else 4)

    def on_step(self, process: LearnerProcess, began: bool, now_s: float) -> None:
        # A slow step, or one without some slices, continues after the end of the fault.
        longer = process.node.factor * process.node.parts_each(process.step.samples)
        if began and longer > 1:
            ends_s = now_s + longest_step_s(self.cluster.scenario) * longer
            self.healed_s = max(self.healed_s, ends_s)
