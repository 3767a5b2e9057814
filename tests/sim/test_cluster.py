"""The cluster as a driver: pacing as the paper describes it, and each fault does what it says."""

from dataclasses import replace

import pytest

from diloco_jax.protocol.effects import Send
from diloco_jax.protocol.messages import GlobalFragment, LearnerMessage, Lease
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.engine import NEVER_S, Engine
from diloco_jax.sim.fault import KINDS, SYNCER_KINDS, Fault
from diloco_jax.sim.invariants.draw import WEIGHTS, random_faults
from diloco_jax.sim.invariants.verdict import Timeline, judge
from diloco_jax.sim.network import NetworkOptions
from diloco_jax.sim.node import Effects, LearnerProcess
from diloco_jax.sim.scenario import Scenario
from tests.sim.watching import Watch, judged, watched

SMALL = ProtocolConfig(sync_every=4, num_fragments=4, silence_s=4.0, heartbeat_s=1.0, resend_s=0.5, pull_timeout_s=5.0)


@pytest.mark.parametrize("learners", [4, 8])
def test_grace_gathers_learners_and_paces_the_syncer(learners: int) -> None:
    verdict = judged(Scenario(learners=learners, total_steps=150, config=ProtocolConfig(quorum=1)))
    assert verdict.contributors_per_round >= 0.9 * learners
    assert 0.95 < verdict.steps_per_global_step < 1.1


@pytest.mark.parametrize("learners", [4, 8])
def test_without_grace_one_learner_is_merged_at_a_time(learners: int) -> None:
    config = ProtocolConfig(quorum=1, grace_steps_max=0.0)
    verdict = judged(Scenario(learners=learners, total_steps=150, config=config))
    assert verdict.contributors_per_round < 0.5 * learners
    assert verdict.steps_per_global_step < 0.5


@pytest.mark.parametrize("overlap_steps", [0, 2])
def test_a_quorum_of_all_needs_no_grace(overlap_steps: int) -> None:
    config = ProtocolConfig(quorum=4, grace_steps_max=0.0, overlap_steps=overlap_steps)
    verdict = judged(Scenario(learners=4, total_steps=150, config=config))
    assert verdict.contributors_per_round == 4
    assert 0.95 < verdict.steps_per_global_step < 1.1


def run(*faults: Fault, config: ProtocolConfig = SMALL) -> Watch:
    """Simulate three learners with faults."""
    return watched(Scenario(config=config, learners=3, total_steps=60, faults=faults))


ALL = {"island-0", "island-1", "island-2"}


def test_a_crash_costs_the_others_nothing_and_the_next_incarnation_starts_from_the_syncer() -> None:
    steps = run(Fault(10.0, "crash", ("island-1",), 15.0, notice_s=0.05))
    assert steps.mergers(11.0, 25.0) == ALL - {"island-1"} and steps.mergers(30.0, 99.0) == ALL
    assert max(steps.gaps_s("island-0")) < 1.2
    fragments, versions = zip(*steps.adopted["island-1", 2][:4], strict=True)
    assert sorted(fragments) == [0, 1, 2, 3] and min(versions) > 1, "everything, and newer than the initial model"


def test_an_unnoticed_crash_ends_with_the_lease() -> None:
    steps = run(Fault(10.0, "crash", ("island-1",), 25.0), config=replace(SMALL, quorum=3))
    (silent,) = [at_s for at_s, note in steps.notes if note.kind == "silent"]
    assert 10.0 + 4.0 - 1.0 <= silent <= 10.0 + 4.0 + 1.0
    assert not steps.mergers(silent + 1.0, 35.0), "two live learners are below the quorum"
    assert steps.mergers(40.0, 99.0) == ALL


def test_a_disconnected_learner_continues_and_returns_as_it_was() -> None:
    steps = run(Fault(10.0, "disconnect", ("island-2",), 15.0, notice_s=0.05))
    assert ("island-2", 2) not in steps.adopted
    assert len([s for s in steps.ended["island-2"] if 10 < s < 25]) >= 13
    assert steps.mergers(11.0, 25.0) == ALL - {"island-2"} and steps.mergers(28.0, 99.0) == ALL


def test_a_pause_stops_one_and_a_partition_is_silence() -> None:
    paused = run(Fault(10.0, "pause", ("island-0",), 8.0))
    assert not [s for s in paused.ended["island-0"] if 10 < s < 18] and paused.mergers(20.0, 99.0) == ALL
    parted = run(Fault(10.0, "partition", ("island-0", "island-1"), 8.0))
    assert parted.mergers(12.0, 18.0) == {"island-2"} and parted.mergers(22.0, 99.0) == ALL


def test_slow_phase() -> None:
    steps = run(Fault(10.0, "slow", ("island-0",), 20.0, factor=5.0))
    assert 3 <= len([s for s in steps.ended["island-0"] if 10 < s < 30]) <= 5
    assert len([s for s in steps.ended["island-1"] if 10 < s < 30]) >= 17


def test_leave_and_late_join() -> None:
    steps = run(Fault(20.0, "leave", ("island-0",)), Fault(30.0, "join", ("island-2",)))
    assert steps.mergers(0.0, 20.0) == {"island-0", "island-1"}
    assert steps.mergers(22.0, 30.0) == {"island-1"}
    assert steps.mergers(32.0, 99.0) == {"island-1", "island-2"}
    left = [note for _, note in steps.notes if note.kind == "left" and note.members == ("island-0",)]
    assert [note.reason for note in left] == ["stopped from outside"]


class Capacity(Watch):
    """Also records who was given and who read each sample, and the schedule at each global step."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[int, str] = {}
        self.read: set[int] = set()
        self.schedule: dict[int, int] = {}

    def on_step(self, process: LearnerProcess, began: bool, now_s: float) -> None:
        super().on_step(process, began, now_s)
        self.read |= {sample for first, last in process.step.batch[0] for sample in range(first, last)}

    def on_syncer(self, given: LearnerMessage | None, effects: Effects, now_s: float) -> None:
        super().on_syncer(given, effects, now_s)
        for send in (effect for effect in effects if isinstance(effect, Send)):
            if isinstance(send.message, Lease):
                self.given |= dict.fromkeys(range(send.message.start, send.message.stop), send.peer)
            elif isinstance(send.message, GlobalFragment):
                self.schedule[send.message.global_step] = send.message.global_step + send.message.schedule_lead


def test_islands_come_and_go_with_capacity_and_neither_samples_nor_the_schedule_notice() -> None:
    """Two islands are there, six are for a while, and three at the end; extra ones leave politely or vanish."""
    config = replace(SMALL, release_s=5.0)
    scenario = Scenario(config=config, learners=6, total_steps=400, tokens=6 * 44 * 1024, speed_spread=0.0)
    joins = (Fault(12.0, "join", (name,)) for name in scenario.names[2:])
    ends = (
        Fault(28.0, kind, (name,), notice_s=0.05)
        for kind, name in zip(("leave", "crash", "drain"), scenario.names[3:], strict=True)
    )
    watch = Capacity()
    judged(replace(scenario, faults=(*joins, *ends)), watch)
    # M follows the machines.
    members = [watch.mergers(from_s, to_s) for from_s, to_s in ((0.0, 12.0), (16.0, 27.0), (40.0, 999.0))]
    assert members == [{*scenario.names[:count]} for count in (2, 6, 3)]
    # An island that holds a sample that nobody read is there, and reads it next.
    unread = {watch.given[sample] for sample in watch.given.keys() - watch.read}
    assert unread <= {*scenario.names[:3]} and {*range(max(watch.read))} <= watch.given.keys()
    # A step of the schedule is six steps of islands, so it advances by M / 6 in a global step.
    at_s = watch.times_s("closed")
    for count, (from_s, to_s) in ((2, (3.0, 12.0)), (6, (18.0, 27.0)), (3, (40.0, 80.0))):
        steps = [step for step, closed_s in at_s.items() if from_s <= closed_s < to_s and step in watch.schedule]
        passed = watch.schedule[steps[-1]] - watch.schedule[steps[0]]
        assert passed == pytest.approx((steps[-1] - steps[0]) * count / 6, abs=1.0)
    assert max(watch.schedule.values()) == scenario.tokens // scenario.budget.step_tokens == 44


@pytest.mark.parametrize("kind", ["disconnect", "partition", "pause"])
@pytest.mark.parametrize("at_s", [10.05, 11.5, 12.15])
def test_lockstep_continues_after_a_fault(kind: str, at_s: float) -> None:
    # a learner that waits makes no new step, so its old report must count again when it is back
    config = replace(SMALL, sync_every=2, num_fragments=1, overlap_steps=0, quorum=3)
    run(Fault(at_s, kind, ("island-1",), 12.0, notice_s=0.02), config=config)


def test_a_learner_that_was_taken_for_gone_greets_again() -> None:
    # the end of the old link is noticed only after the new one stands, so the syncer forgets a connected learner
    steps = run(Fault(10.0, "disconnect", ("island-1",), 0.5, notice_s=2.0))
    assert "island-1" not in steps.mergers(13.0, 15.0) and steps.mergers(24.0, 99.0) == ALL
    # One more if the deltas that wait for it are of versions that it does not hold.
    assert 3 + 1 + 1 <= steps.greetings.total() <= 3 + 1 + 2


def test_steps_longer_than_every_timeout_need_no_repetition() -> None:
    # what arrives lies in the inbox for a whole step: it must not be asked for once more
    slow = Scenario(
        config=SMALL,
        learners=2,
        step_s=60.0,
        total_steps=12,
        faults=(Fault(200.0, "disconnect", ("island-1",), 1.0, notice_s=0.1),),
    )
    assert watched(slow).greetings.total() == 2 + 1


def test_merges_may_end_out_of_turn() -> None:
    config = replace(SMALL, overlap_steps=4, sync_every=8, num_fragments=8)
    ends = list(watched(Scenario(config=config, total_steps=200, merge_s=2.0)).times_s("merged"))
    assert ends != sorted(ends) and sorted(ends) == list(range(1, 201))


def test_repetitions_thin_out_on_a_slow_link() -> None:
    """Fragments need four times resend_s: answered at every repetition, pulls would fill the link for good."""
    config = ProtocolConfig(sync_every=12, num_fragments=2, resend_s=0.5, quorum=2)
    network = NetworkOptions(bandwidth_bytes_per_s=1e6)
    scenario = Scenario(config=config, total_steps=60, network=network, payload_bytes=2_000_000, learners=2)
    verdict = judged(scenario, watch := Watch())
    assert verdict.merged_parts < watch.values < 4 * verdict.merged_parts


@pytest.mark.parametrize(("turns", "seed"), [(4, 0), (10, 0), (10, 1), (10, 2)])
def test_a_state_may_be_on_its_way_for_many_turns_of_all_fragments(turns: int, seed: int) -> None:
    """It takes five: with less time than that, nobody gets it; a link that breaks on the way loses no part."""
    names = ("island-1",)
    watch = watched(
        Scenario(
            config=replace(SMALL, recovery_turns=turns),
            learners=3,
            total_steps=160,
            network=NetworkOptions(delay_s=0.2),
            faults=(Fault(20.0, "crash", names, 2.0, notice_s=0.05), Fault(30.0, "disconnect", names, 1.0, 0.1)),
            # Up to 64 parts at a time travel for 0.8 s.
            state_parts=1600,
            seed=seed,
        )
    )
    asked = [(at_s, note) for at_s, note in watch.notes if note.kind == "recovering"]
    had = [(at_s, note) for at_s, note in watch.notes if note.kind == "recovered"]
    if turns == 4:
        assert not had and len(asked) == 3, "recovery_attempts"
        return
    ((from_s, _),), ((to_s, _),) = asked, had
    rounds = [at_s for at_s in watch.times_s("merged").values() if from_s <= at_s < to_s]
    assert 5 * SMALL.sync_every <= len(rounds) <= 7 * SMALL.sync_every, "rounds continued meanwhile"
    assert not [at_s for at_s in watch.began["island-1"] if from_s <= at_s < to_s - 0.5]
    assert max(watch.gaps_s("island-0")) < 1.2 and watch.mergers(to_s + 2, to_s + 9) == ALL


def test_random_faults_heal_in_time() -> None:
    engine = Cluster(Scenario(learners=5)).engine
    faults = random_faults(engine.random, [f"island-{n}" for n in range(5)], 200, 50.0)
    assert list(faults) == sorted(faults) and len(faults) == 200
    assert {fault.kind for fault in faults} == set(WEIGHTS)
    assert all(0 <= fault.at_s <= fault.over_s <= 50.0 for fault in faults)
    assert str(Fault(1.0, "crash", ("a",), 2.0)) == "crash of a for 2.00 s, unnoticed"


def test_the_timeline_reads_as_a_story() -> None:
    timeline = Timeline()
    slow = Fault(0.5, "slow", ("island-0",), 1.0, 2.0)
    judge(Scenario(config=SMALL, total_steps=2, learners=1, faults=(slow,)), observers=[timeline])
    words = [" ".join(line.split()[1:]) for line in timeline.lines]
    assert words[0] == "syncer joined round 0 island-0: incarnation 1"
    assert "fault slow of island-0 for 1.00 s, 2.0 times slower" in words
    assert "syncer merges round 1 fragment 1: island-0 1 steps from 0" in words
    assert words[-1] == "island-0 finishes run complete"


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_survives_a_fault_of_every_kind(kind: str) -> None:
    names = () if kind in SYNCER_KINDS or kind == "donor_crash" else ("island-2",)
    duration_s = NEVER_S if kind in ("leave", "drain", "join") else 3.0
    fault = Fault(8.0, kind, names, duration_s, 1e6 if kind == "narrow" else 2.0)
    timeline = Timeline()
    config = replace(SMALL, snapshot_every=4)
    verdict = judge(Scenario(config=config, learners=3, total_steps=30, faults=(fault,)), observers=[timeline])
    assert not verdict.problem and any(str(fault) in line for line in timeline.lines)


@pytest.mark.parametrize(
    ("fault", "taped", "text"),
    [
        (Fault(1.0, "earthquake", ("island-0",)), True, "the fault 'earthquake' is unknown; use one of crash, "),
        (Fault(1.0, "crash", ("island-9",)), True, "hits 'island-9'; the learners are island-0, island-1"),
        (Fault(1.0, "syncer_crash"), False, "needs the syncer's tape; build the cluster with taped=True"),
    ],
)
def test_impossible_faults(fault: Fault, taped: bool, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Cluster(Scenario(learners=2, faults=(fault,)), taped=taped)
    with pytest.raises(ValueError, match=text):
        Cluster(Scenario(learners=2), taped=taped).plan(fault)


@pytest.mark.parametrize(("name", "value"), [("learners", 0), ("step_s", 0.0)])
def test_impossible_scenarios(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        Scenario(**{name: value})  # type: ignore[arg-type]


def test_events_run_by_time_then_in_order() -> None:
    engine = Engine(0)
    seen: list[tuple[float, str]] = []

    def note(name: str) -> None:
        seen.append((engine.now_s, name))
        if name == "b":
            engine.at(engine.now_s, note, "b again")

    for time_s, name in ((2.0, "c"), (1.0, "a"), (1.0, "b"), (2.0, "d"), (9.0, "later")):
        engine.at(time_s, note, name)
    engine.run(2.0)
    assert seen == [(1.0, "a"), (1.0, "b"), (1.0, "b again"), (2.0, "c"), (2.0, "d")]
    assert engine.events == 5
    engine.run(NEVER_S)
    assert seen[-1] == (9.0, "later") and engine.events == 6


def test_stop_leaves_the_rest_for_the_next_run() -> None:
    engine = Engine(0)
    seen: list[str] = []
    engine.at(1.0, lambda _: engine.stop())
    engine.at(2.0, seen.append, "rest")
    engine.run(NEVER_S)
    assert (engine.now_s, seen) == (1.0, [])
    engine.run(NEVER_S)
    assert seen == ["rest"]


def test_the_past_is_over() -> None:
    engine = Engine(0)
    engine.at(5.0, lambda _: engine.at(4.0, lambda _: None))
    with pytest.raises(AssertionError, match=r"an event for 4.0 s was planned at 5.0 s"):
        engine.run(NEVER_S)
