"""Steps of a few milliseconds: rounds wait for who is about to report, though the plan leaves no slack for it."""

import json
from collections.abc import Iterable
from dataclasses import replace

import pytest

from diloco_jax.protocol.closing import FIRST_TURN_S, LEAST_STEP_S, GraceWindow
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.syncer.round import Round
from diloco_jax.protocol.watch.alarms import Alarm, alarms_of
from diloco_jax.protocol.watch.signs import CROWD_MISSING, CROWD_SHARE, Crowd
from diloco_jax.protocol.watch.stats import RunStats
from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.network import NetworkOptions
from diloco_jax.sim.scenario import Scenario
from tests.protocol.pair import Pair
from tests.protocol.syncer_inputs import hello, new, report

QUICK = Scenario(
    config=ProtocolConfig(sync_every=6, num_fragments=6),
    learners=2,
    total_steps=300,
    network=NetworkOptions(delay_s=0.001, jitter_s=0.002),
    step_s=0.004,
    step_noise=2.0,
    merge_s=0.004,
    redials_s=(0.05,),
)


def quick(**settings: float) -> Scenario:
    return replace(QUICK, config=replace(QUICK.config, **settings))  # type: ignore[arg-type]


def contributors(scenario: Scenario) -> float:
    cluster = Cluster(scenario, taped=False)
    cluster.run(1000.0)
    assert cluster.complete
    return cluster.syncer.progress.merged_parts / cluster.syncer.merged_rounds


def test_rounds_of_steps_of_milliseconds_merge_both_islands() -> None:
    assert contributors(quick()) > 1.9
    assert contributors(quick(grace_steps_max=0.0)) < 1.5, "or the test shows nothing"


def reported(names: tuple[str, ...], steps_s: dict[str, float], steps: int, now_s: float, **settings: float) -> Pair:
    """Let learners finish their first steps together, so that the lengths of their steps are known."""
    it = Pair(sync_every=2, num_fragments=2, **settings)
    it.join(*names)
    it.now_s = now_s
    for _ in range(steps):
        it.wait(0.001)
        for name in names:
            it.step(name, step_s=steps_s[name])
    return it


def test_a_slow_island_does_not_hold_the_rounds_of_quick_ones() -> None:
    steps_s = {"a": 0.004, "b": 0.004, "c": 1.0}
    it = reported(("a", "b", "c"), steps_s, 6, 1.0)
    closed, began_s = len(it.contributors()), it.now_s
    for _ in range(6):
        it.wait(0.002)
        it.step("a", step_s=0.004)
        it.wait(0.001)
        it.step("b", step_s=0.004)
    found = [sorted(names) for names in it.contributors()[closed:]]
    assert len(found) >= 2 and all(names == ["a", "b"] for names in found), found
    assert it.now_s - began_s < 0.04, "nobody waited for c"


def test_a_quick_island_that_stops_holds_a_round_no_longer_than_the_least_wait() -> None:
    it = reported(("a", "b"), {"a": 0.004, "b": 0.004}, 6, 1.0)
    closed = len(it.contributors())
    it.step("a", step_s=0.004)
    it.wait(LEAST_STEP_S - 0.005)
    assert len(it.contributors()) == closed, "b may report yet"
    it.wait(0.01)
    assert [sorted(names) for names in it.contributors()[closed:]] == [["a"]]


def test_the_first_turn_waits_for_islands_that_still_start() -> None:
    it = Pair(sync_every=2, num_fragments=2)
    it.join("a", "b")
    it.now_s = 1.0
    it.step("a", step_s=0.004)
    it.wait(FIRST_TURN_S / 2)
    it.step("a", step_s=0.004)
    assert not it.contributors() and it.syncer.rounds.awaits_starters
    # The learner compiles within its first step.
    it.step("b", step_s=0.5)
    assert [sorted(names) for names in it.contributors()] == [["a", "b"]] and not it.syncer.rounds.awaits_starters


def test_a_start_that_lasts_holds_the_first_turn_alone() -> None:
    it = Pair(sync_every=2, num_fragments=2)
    it.join("a", "b")
    it.now_s = 1.0
    it.step("a", step_s=0.004)
    for _ in range(20):
        it.wait(FIRST_TURN_S)
        it.step("a", step_s=0.004)
    assert len(it.contributors()) >= 18 and it.now_s < 22.0
    assert {name for names in it.contributors() for name in names} == {"a"}


def test_decisions_of_such_rounds_are_replayed() -> None:
    it = reported(("a", "b"), {"a": 0.004, "b": 0.004}, 8, 1.0)
    it.step("a", step_s=0.004)
    it.wait(0.1)
    it.check_replay()


def test_the_window_of_an_older_snapshot_starts_again() -> None:
    window = GraceWindow(2.0, 2.0, 2.5, 3.0)
    plain = json.loads(json.dumps(Round(3, 1, 2.0, window=window).to_plain()))
    assert Round.from_plain(plain) == Round(3, 1, 2.0, window=window)
    del plain["window"]
    older = plain | {"met_s": 2.0, "closes_s": 2.5, "paced_s": 0.0, "slack_s": None}
    assert Round.from_plain(older) == Round(3, 1, 2.0)


def test_an_island_is_late_only_after_the_least_step() -> None:
    this = Round(3, 1, 2.0, closed_s=2.0, half_s=2.001)
    assert not this.waits_long(2.1) and this.waits_long(2.102)
    slow = Round(3, 1, 2.0, closed_s=2.0, half_s=2.5)
    assert not slow.waits_long(3.0) and slow.waits_long(3.1)


def crowd_of(scenario: Scenario) -> list[Alarm]:
    """Return the alarms of a run at whose messages the syncer's loop would look."""
    cluster, found = Cluster(scenario, taped=False), list[Alarm]()
    syncer, stats = cluster.syncer, RunStats(scenario.names, 100, cluster.syncer)
    original = syncer.on_message

    def on_message(message, now_s):  # type: ignore[no-untyped-def]
        effects = original(message, now_s)
        found.extend(alarm for alarm in alarms_of(syncer, stats, now_s) if alarm.kind == "few")
        return effects

    syncer.on_message = on_message  # type: ignore[method-assign]
    cluster.run(1000.0)
    assert cluster.complete
    return found


def test_rounds_that_merge_few_of_the_live_islands_raise_an_alarm() -> None:
    """With an overlap of one step Eq. 3 leaves no time for a grace window: rounds close with who came first."""
    hasty = replace(
        QUICK,
        config=ProtocolConfig(sync_every=2, num_fragments=1, overlap_steps=1, grace_steps_max=0.01),
        learners=6,
        network=NetworkOptions(delay_s=0.1, jitter_s=0.05),
        step_s=0.5,
        speed_spread=0.0,
        step_noise=0.05,
        merge_s=0.05,
    )
    alarm = crowd_of(hasty)[0]
    assert "learners on average, of" in alarm.text, alarm
    assert "protocol.quorum" in alarm.as_dict()["remedy"] and "grace" in alarm.as_dict()["remedy"]
    assert crowd_of(replace(hasty, config=replace(hasty.config, sync_every=3, overlap_steps=2))), "2.9 of 6"
    assert crowd_of(replace(hasty, total_steps=20)), "a run of ten rounds says it too"
    assert not crowd_of(replace(hasty, config=replace(hasty.config, grace_steps_max=1.0)))
    chosen = replace(hasty.config, grace_steps_max=0.0)
    assert not crowd_of(replace(hasty, config=chosen)), "somebody has turned the grace window off"
    assert not crowd_of(replace(quick(), total_steps=2000))


def crowd_of_two() -> tuple[Crowd, Syncer]:
    crowd, syncer = Crowd(), new(quorum=1, grace_steps_max=1.0)
    for name in ("a", "b"):
        syncer.on_message(hello(name), 0.0)
    for step, now_s in ((1, 1.0), (2, 2.0)):
        for name in ("a", "b"):
            syncer.on_message(report(name, step)._replace(step_s=1.0), now_s)
    crowd.look(syncer, ())
    return crowd, syncer


def troubles(crowd: Crowd, syncer: Syncer, merged: Iterable[int]) -> list[str]:
    """Return what is wrong after each round that merged so many learners."""
    found = []
    for parts in merged:
        syncer.progress.merged_rounds += 1
        syncer.progress.merged_parts += parts
        crowd.look(syncer, ())
        found.append(crowd.trouble)
    return found


def test_a_short_run_says_that_its_rounds_merged_few() -> None:
    crowd, syncer = crowd_of_two()
    first = CROWD_MISSING / (CROWD_SHARE - 1 / 2)
    found = troubles(crowd, syncer, [1] * 16)
    assert first == pytest.approx(15) and not any(found[:14])
    assert found[15] == "each of the last 16 rounds merged 1.0 learners on average, of 2.0 that could have been merged"
    assert all(troubles(crowd, syncer, [2] * 9)) and not troubles(crowd, syncer, [2, 2])[-1], "it ends with its cause"
    assert not any(troubles(crowd, syncer, [1, 2, 2, 1, 2] * 40)), "1.6 of 2 are usual on a busy machine"


def test_a_small_shortage_is_found_too() -> None:
    assert any(troubles(*crowd_of_two(), [1, 1, 2, 1] * 25)), "1.25 of 2"
    assert not any(troubles(*crowd_of_two(), [1, 2] * 200)), "1.5 of 2"


def test_an_island_that_restarts_is_not_missed() -> None:
    crowd, syncer = crowd_of_two()
    assert troubles(crowd, syncer, [1] * 20)[-1]
    syncer.on_disconnect("b", 1, "killed", 21.0)
    assert not any(troubles(crowd, syncer, [1] * 50)), "of one island that is left, one is merged"
