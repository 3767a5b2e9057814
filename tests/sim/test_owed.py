"""Learners that report steps but do not answer pulls, or answer late: the others keep their rounds."""

from functools import cache

import pytest

from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.watch.health import conditions
from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.fault import Fault
from diloco_jax.sim.network import NetworkOptions
from diloco_jax.sim.scenario import Scenario

# Three islands train for so many steps; after FAULT_S one of them has its fault until the end.
STEPS, FAULT_S, LATE_S = 1000, 10.0, 4.0


@cache
def run(
    step_s: float, num_fragments: int, kind: str, learners: int = 3, over_s: float = 0.0, late_s: float = LATE_S
) -> Cluster:
    until_s = STEPS * step_s + FAULT_S
    fault = Fault(FAULT_S, kind, (f"island-{min(1, learners - 1)}",), (over_s or until_s) - FAULT_S, late_s)
    scenario = Scenario(
        config=ProtocolConfig(sync_every=max(num_fragments, 8), num_fragments=num_fragments),
        learners=learners,
        total_steps=10**6,
        step_s=step_s,
        merge_s=step_s / 4,
        network=NetworkOptions(delay_s=0.005),
        faults=(fault,) if kind else (),
        save_s=0.0,
        seed=1,
    )
    cluster = Cluster(scenario, taped=False)
    cluster.run(until_s)
    return cluster


@pytest.mark.parametrize("kind", ["mute", "late", "pause"])
@pytest.mark.parametrize(("step_s", "num_fragments"), [(0.05, 2), (0.05, 8), (0.15, 8), (1.0, 2), (1.0, 24)])
def test_the_others_keep_nine_of_ten_rounds(step_s: float, num_fragments: int, kind: str) -> None:
    healthy, faulty = run(step_s, num_fragments, ""), run(step_s, num_fragments, kind)
    assert faulty.syncer.merged_rounds >= 0.9 * healthy.syncer.merged_rounds


@pytest.mark.parametrize("late_s", [0.2, 0.5, 0.9])
def test_answers_that_come_before_their_pulls_are_repeated_hold_nobody_up(late_s: float) -> None:
    """On a link that needs many steps for a value, all answers come, and each comes late for the next round."""
    healthy, faulty = run(0.05, 2, ""), run(0.05, 2, "late", late_s=late_s)
    assert faulty.syncer.merged_rounds >= 0.9 * healthy.syncer.merged_rounds


def test_an_answer_that_holds_nobody_up_is_in_time() -> None:
    """With fragments that are due seldom, rounds pass a learner that answers late, and it stays in every third."""
    healthy, faulty = run(0.5, 24, ""), run(0.5, 24, "late", late_s=1.75)
    assert faulty.syncer.merged_rounds >= 0.9 * healthy.syncer.merged_rounds
    assert not faulty.syncer.rounds.owing


def test_the_alarm_names_who_does_not_answer() -> None:
    cluster = run(0.05, 8, "mute")
    found = {each.learner_id: each for each in conditions(cluster.syncer, cluster.engine.now_s)}
    assert [found[name].condition for name in sorted(found)] == ["training", "unanswered", "training"]
    assert "it is asked in every 64th round" in found["island-1"].reason


def shares_after(syncer: Syncer, name: str, global_step: int) -> int:
    """Return how many fragments hold a value that a learner gave after a global step."""
    return sum(version > global_step for version in syncer.membership.members[name].credit.merged_round.values())


def test_one_answer_in_time_ends_it() -> None:
    cluster = run(0.05, 8, "mute", over_s=20.0)
    assert not cluster.syncer.rounds.owing
    assert shares_after(cluster.syncer, "island-1", cluster.syncer.global_step - 20) == 8


def test_the_only_learner_is_asked_again_and_again() -> None:
    """A learner that nobody can replace owes answers, and rounds still need it."""
    cluster = run(0.15, 8, "late", learners=1)
    # A value arrives every 4 s, so rounds are few, but they are merged.
    assert cluster.syncer.merged_rounds > 40
