"""Steps and overlapping rounds in simulated runs: what travels, what a thin link costs, and whom."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from diloco_jax.protocol.effects import Effect, Merge, Note, Send
from diloco_jax.protocol.messages import NO_VERSION, GlobalFragment, Hello, LearnerMessage
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.faults import Fault
from diloco_jax.sim.network import NetworkOptions
from diloco_jax.sim.node import Node, Observer
from diloco_jax.sim.scenario import Scenario
from diloco_jax.sim.verdict import judge

FRAGMENTS = 8
CALM = Scenario(
    config=ProtocolConfig(sync_every=FRAGMENTS, num_fragments=FRAGMENTS, overlap_steps=2, quorum=2),
    learners=4,
    total_steps=160,
    network=NetworkOptions(bandwidth_bytes_per_s=1e6),
    payload_bytes=80_000,
    step_bytes=10_000,
)


class Watch(Observer):
    """What was sent to whom, when rounds closed and were merged, and when steps ended."""

    def __init__(self) -> None:
        self.whole: Counter[str] = Counter()
        self.steps: Counter[str] = Counter()
        self.greetings: Counter[str] = Counter()
        self.closed_s: dict[int, float] = {}
        self.merged_s: dict[int, float] = {}
        self.merges: list[Merge] = []
        self.ended: dict[str, list[float]] = {}

    def on_effects(self, source: str, incarnation: int, effects: list[Effect], now_s: float) -> None:
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, GlobalFragment):
                (self.whole if effect.message.base == NO_VERSION else self.steps)[effect.peer] += 1
            elif isinstance(effect, Merge):
                self.merges.append(effect)
            elif isinstance(effect, Note) and effect.kind in ("closed", "merged"):
                (self.closed_s if effect.kind == "closed" else self.merged_s)[effect.global_step] = now_s

    def on_delivery(self, message: LearnerMessage, now_s: float) -> None:
        self.greetings[message.learner_id] += isinstance(message, Hello)

    def on_step(self, node: Node, began: bool, now_s: float) -> None:
        if not began:
            self.ended.setdefault(node.name, []).append(now_s)


def watched(scenario: Scenario) -> Watch:
    """Simulate; every rule must hold, whatever else a test looks at."""
    verdict = judge(scenario)
    assert not verdict.problem, verdict
    watch, cluster = Watch(), Cluster(scenario)
    cluster.watch(watch)
    cluster.run(10_000.0)
    assert cluster.complete and cluster.syncer.global_step == scenario.total_steps
    return watch


@pytest.mark.parametrize("overlap_steps", [0, 1, 2, 4])
def test_without_faults_only_the_beginning_is_whole(overlap_steps: int) -> None:
    config = replace(CALM.config, overlap_steps=overlap_steps, quorum=4)
    watch = watched(replace(CALM, config=config))
    assert watch.whole == dict.fromkeys(CALM.names, FRAGMENTS)
    assert watch.steps == dict.fromkeys(CALM.names, 160)
    assert watch.greetings == dict.fromkeys(CALM.names, 1)


def test_who_joins_late_gets_whole_values_once() -> None:
    watch = watched(replace(CALM, faults=(Fault(40.0, "join", ("island-3",)),)))
    assert watch.whole == dict.fromkeys(CALM.names, FRAGMENTS)
    assert 0 < watch.steps["island-3"] < watch.steps["island-0"] == 160


def test_a_reconnection_costs_whole_values_of_what_was_missed_twice_only() -> None:
    short = watched(replace(CALM, faults=(Fault(40.0, "disconnect", ("island-1",), 4.0, notice_s=0.02),)))
    assert short.whole["island-1"] <= FRAGMENTS + 1, "every fragment has had one turn at most"
    long = watched(replace(CALM, faults=(Fault(40.0, "disconnect", ("island-1",), 40.0, notice_s=0.02),)))
    assert 2 * FRAGMENTS <= long.whole["island-1"] <= 2 * FRAGMENTS + 2


def test_damaged_steps_are_asked_for_with_bounded_traffic() -> None:
    scenario = replace(CALM, faults=(Fault(20.0, "corrupt", ("island-2",), 80.0),))
    watch = watched(scenario)
    assert watch.greetings["island-2"] <= 1 + 80 / scenario.config.resend_s
    extra = watch.whole["island-2"] + watch.steps["island-2"] - FRAGMENTS - 160
    assert 0 < extra <= FRAGMENTS * watch.greetings["island-2"]
    assert watch.whole["island-0"] == FRAGMENTS


def test_rounds_pass_one_that_waits_for_a_thin_link_and_nobody_steps_later() -> None:
    thin = NetworkOptions(bandwidth_bytes_per_s=1e6, thin_links=(("island-3", 45_000.0),))
    calm, slow = watched(CALM), watched(replace(CALM, network=thin))
    late = [merge.global_step for merge in slow.merges if "island-3" in [part.learner_id for part in merge.parts]]
    assert len(late) >= 10, "its values take more than a step, and count all the same"
    passed = [r for r in late if slow.merged_s.get(r + 1, 1e9) < slow.merged_s[r]]
    assert len(passed) >= 0.8 * len(late), "the next round closed and was merged before it"
    for name in CALM.names[:3]:
        gaps = [after - before for before, after in zip(slow.ended[name], slow.ended[name][1:], strict=False)]
        assert max(gaps) <= CALM.longest_step_s + 1e-9
    ends = [max(watch.merged_s.values()) for watch in (calm, slow)]
    assert ends[1] < 1.2 * ends[0], f"rounds of both runs end after {ends} s"
