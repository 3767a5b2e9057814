"""Rounds whose merges or links leave no time by Eq. 3 still merge the learners that are as fast as the others."""

import random
from dataclasses import replace
from typing import Any

import pytest

from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.round import Pace
from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.network import NetworkOptions
from diloco_jax.sim.scenario import Scenario
from tests.protocol.pair import Pair

# A pull and a merge take 1.7 steps of the two that a fragment has.
LABOURED = Scenario(
    config=ProtocolConfig(sync_every=24, num_fragments=4),
    learners=2,
    total_steps=400,
    network=NetworkOptions(delay_s=0.01, jitter_s=0.01),
    step_s=0.2,
    step_noise=0.05,
    speed_spread=0.0,
    merge_s=0.34,
    redials_s=(0.05,),
)


def ended(scenario: Scenario, **settings: Any) -> Cluster:
    cluster = Cluster(replace(scenario, config=replace(scenario.config, **settings)))
    cluster.run(10_000.0)
    assert cluster.complete
    return cluster


def contributors(cluster: Cluster) -> float:
    return cluster.syncer.progress.merged_parts / cluster.syncer.merged_rounds


@pytest.mark.parametrize("learners", [2, 4])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rounds_without_slack_merge_all_that_keep_pace(learners: int, seed: int) -> None:
    scenario = replace(LABOURED, learners=learners, seed=seed)
    hasty, patient = ended(scenario, grace_steps_max=0.0), ended(scenario)
    assert contributors(hasty) < 0.7 * learners, "or the test shows nothing"
    assert contributors(patient) > 0.95 * learners


def laboured(**settings: Any) -> Pair:
    """Two learners of equal speed, half a step apart. Rounds have merged only one of them again and again."""
    it = Pair(sync_every=2, num_fragments=2, **settings)
    it.join("a", "b")
    it.now_s = 1.0
    for _ in range(4):
        for name in ("a", "b"):
            it.wait(0.5)
            it.step(name, step_s=1.0)
    it.syncer.rounds.pace = Pace(1.0, 2.0)
    return it


def merged_share(cluster: Cluster) -> float:
    """Return how much of the tokens of all learners was merged."""
    members = cluster.syncer.membership.members.values()
    return cluster.syncer.progress.merged_tokens / sum(member.total_tokens for member in members)


def drawn(seed: int) -> Scenario:
    """Draw learners, fragments, links and merges; merges and links take from next to nothing to all of tau steps."""
    draw = random.Random(seed)
    learners, step_s = draw.choice((2, 3, 4, 8)), draw.choice((0.05, 0.2, 1.0))
    periods = {"sync_every": draw.choice((6, 24)), "num_fragments": draw.choice((2, 4, 6))}
    delay_s, jitter_s = draw.choice((0.01, 0.1, 0.4)) * step_s, draw.choice((0.01, 0.2)) * step_s
    return Scenario(
        config=ProtocolConfig(**periods, overlap_steps=draw.choice((1, 2, 3))),
        learners=learners,
        total_steps=240,
        network=NetworkOptions(delay_s=delay_s, jitter_s=jitter_s),
        step_s=step_s,
        step_noise=draw.choice((0.02, 0.2, 1.0)),
        speed_spread=draw.choice((0.0, 0.1, 0.5, 1.0)),
        merge_s=draw.choice((0.02, 0.3, 0.8, 1.5)) * step_s,
        redials_s=(0.05,),
        seed=seed,
    )


@pytest.mark.parametrize("seed", range(12))
def test_no_drawn_run_merges_less_of_its_work(seed: int) -> None:
    hasty, patient = ended(drawn(seed), grace_steps_max=0.0), ended(drawn(seed))
    assert contributors(patient) > contributors(hasty) - 0.1 and merged_share(patient) > merged_share(hasty) - 0.02


def test_a_round_waits_for_a_learner_that_keeps_pace() -> None:
    it = laboured()
    closed = len(it.contributors())
    it.wait(0.5)
    it.step("a", step_s=1.0)
    it.wait(0.4)
    assert len(it.contributors()) == closed, "b is about to report"
    it.step("b", step_s=1.0)
    assert sorted(it.contributors()[closed]) == ["a", "b"]
    it.check_replay()


def test_a_learner_that_stops_is_not_waited_for_after_three_of_its_steps() -> None:
    it = laboured()
    closed = len(it.contributors())
    waits_s = []
    for _ in range(4):
        it.wait(0.5)
        began_s, before = it.now_s, len(it.contributors())
        it.step("a", step_s=1.0)
        while len(it.contributors()) == before and it.now_s < began_s + 5.0:
            it.wait(0.1)
        waits_s.append(it.now_s - began_s)
    assert {name for names in it.contributors()[closed:] for name in names} == {"a"}
    # A wait that begins before the other learner's report is three steps old may last for its whole step.
    assert waits_s == pytest.approx([1.0, 1.0, 0.0, 0.0], abs=0.11)


def test_a_round_with_enough_learners_in_time_does_not_wait_for_the_last() -> None:
    it = Pair(sync_every=2, num_fragments=2)
    names = ("a", "b", "c", "d")
    it.join(*names)
    it.now_s = 1.0
    for _ in range(4):
        it.wait(1.0)
        for name in names:
            it.step(name, step_s=1.0)
    it.syncer.rounds.pace = Pace(1.0, 2.0)
    closed = len(it.contributors())
    it.wait(1.0)
    for name in ("a", "b"):
        it.step(name, step_s=1.0)
    # Eq. 3 leaves no time: the first report meets the quorum, and the round waits because too few came with it.
    assert len(it.contributors()) == closed
    it.wait(0.5)
    it.step("c", step_s=1.0)
    it.wait(0.4)
    assert len(it.contributors()) == closed
    it.wait(0.2)
    assert sorted(it.contributors()[closed]) == ["a", "b", "c"], "the least wait is over"


def test_a_learner_whose_values_never_count_is_not_waited_for_after_its_alarm() -> None:
    it = laboured()
    members = it.syncer.membership
    assert [member.learner_id for member in members.keeping_pace(it.now_s)] == ["a", "b"]
    members.members["b"].credit.alarmed = True
    assert [member.learner_id for member in members.keeping_pace(it.now_s)] == ["a"]


def test_a_slow_learner_is_not_waited_for() -> None:
    it = laboured()
    it.join("c")
    for _ in range(2):
        for name, step_s in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
            it.wait(0.3)
            it.step(name, step_s=step_s)
    closed = len(it.contributors())
    for _ in range(3):
        for name in ("a", "b"):
            it.wait(0.5)
            it.step(name, step_s=1.0)
    # The first of these rounds counts a step that c had reported before.
    assert it.contributors()[closed + 1 :] == [("a", "b")] * 2


def test_averages_of_an_older_snapshot_have_a_share() -> None:
    it = laboured()
    state = it.syncer.rounds.state()
    assert state["pace"][:2] == [1.0, 2.0]
    it.syncer.rounds.restore(state | {"pace": [1.0, 2.0, 0.8, False, 7.0]})
    assert it.syncer.rounds.pace == Pace(1.0, 2.0) and it.syncer.rounds.closed_s == 7.0


@pytest.mark.parametrize(
    ("steps_s", "paced"), [((0.004, 0.004, 0.03), "abc"), ((0.01, 0.01, 0.09), "ab"), ((0.1, 0.1, 0.2), "ab")]
)
def test_who_keeps_pace_depends_on_short_steps(steps_s: tuple[float, ...], paced: str) -> None:
    """Learners with steps below 33 ms keep pace with each other; one of 90 ms would slow rounds of 10 ms down."""
    it = Pair(sync_every=2, num_fragments=2)
    it.join("a", "b", "c")
    it.now_s = 1.0
    for _ in range(3):
        it.wait(0.01)
        for name, step_s in zip("abc", steps_s, strict=True):
            it.step(name, step_s=step_s)
    assert "".join(member.learner_id for member in it.syncer.membership.keeping_pace(it.now_s)) == paced


@pytest.mark.parametrize(("step_s", "waits"), [(0.004, True), (0.1, False)])
def test_only_rounds_of_short_steps_wait_for_a_learner_that_compiles(step_s: float, waits: bool) -> None:
    it = Pair(sync_every=20, num_fragments=2)
    it.join("a", "b")
    it.now_s = 1.0
    for _ in range(4):
        it.wait(1.5)
        it.step("a", step_s=step_s)
    assert it.syncer.rounds.awaits_starters is waits
    assert (it.syncer.global_step == 4) is not waits


@pytest.mark.parametrize("step_s", [0.01, 0.3])
def test_lockstep_below_all_learners_waits_for_those_that_keep_pace(step_s: float) -> None:
    """In lockstep the work of a missed step is lost."""
    config = replace(LABOURED.config, sync_every=6, num_fragments=1, overlap_steps=0, quorum=3)
    network = NetworkOptions(delay_s=0.0005, jitter_s=0.0005)
    scenario = replace(
        LABOURED, config=config, learners=4, step_s=step_s, speed_spread=0.2, merge_s=0.002, network=network
    )
    assert merged_share(ended(scenario)) > 0.97
