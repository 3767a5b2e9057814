"""Conditions of learners in words, alarms, strikes, and who is told to leave."""

import ast
import inspect
import json
import random
from typing import Any

import pytest

from diloco_jax.protocol.effects import Effect, Note, Send
from diloco_jax.protocol.member import ACTIVE, JOINING, SILENT
from diloco_jax.protocol.messages import ON_PURPOSE, Adopted, Heartbeat, Leave, StateRequest, Stop
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.watch import health, terms
from diloco_jax.protocol.watch.health import conditions
from diloco_jax.protocol.watch.signs import EPISODES_MAX, FACTOR, SECONDS_MIN, STEPS_MIN, Episode, Outrun
from tests.protocol.pair import Pair
from tests.protocol.syncer_inputs import hello, merged, new, only, report, running, sent, value


def said(syncer: Syncer, name: str, now_s: float) -> tuple[str, float, str]:
    """Condition, since when, and why."""
    (found,) = [c for c in conditions(syncer, now_s) if c.learner_id == name]
    return found.condition, found.since_s, found.reason


def test_nobody_was_ever_seen() -> None:
    assert conditions(new(), 5.0) == []


def test_joining() -> None:
    syncer = new()
    syncer.on_message(hello("a", versions=(-1,) * 4), 2.0)
    syncer.on_message(Heartbeat("a", 1), 4.0)
    condition, since_s, reason = said(syncer, "a", 5.5)
    assert (condition, since_s) == ("joining", 2.0)
    assert reason == "alive, last heard 1.5 s ago; loads, compiles or downloads"


def test_recovering() -> None:
    syncer = running("a", quorum=2)
    syncer.on_message(hello("b"), 2.0)
    syncer.on_message(StateRequest("b", 1, 0, "", 0, 0), 2.0)
    assert said(syncer, "b", 3.0) == ("recovering", 2.0, "loads the state of a")


def test_training() -> None:
    assert said(running("a"), "a", 4.0) == ("training", 1.0, "last heard 3.0 s ago")


def test_slow() -> None:
    syncer = running("a", "b", "c", quorum=3)
    for step in range(2, 31):
        # The averages cover about ten steps, and are compared after thirty.
        assert {c.condition for c in conditions(syncer, float(step))} == {"training"}
        for name, step_s in (("a", 1.0), ("b", 1.0), ("c", 2.5)):
            syncer.on_message(report(name, step, step_s=step_s), float(step))
    assert [c.condition for c in conditions(syncer, 31.0)] == ["training", "training", "slow"]
    assert said(syncer, "c", 31.0)[2] == "steps take 2.500 s, 2.5 times the median"


def test_a_slow_learner_is_found_while_others_come_and_go() -> None:
    syncer = running("a", "b", "c", "d", quorum=3)
    for step in range(2, 31):
        for name, step_s in (("a", 1.0), ("b", 1.0), ("c", 2.5), ("d", 1.0)):
            syncer.on_message(report(name, step, step_s=step_s), float(step))
    syncer.on_disconnect("d", 1, "killed", 31.0)
    syncer.on_message(hello("d", incarnation=2, versions=tuple(syncer.versions)), 31.0)
    syncer.on_message(report("d", 1, incarnation=2, step_s=9.0), 31.5)
    syncer.on_message(report("d", 2, incarnation=2, step_s=9.0), 31.6)
    found = {c.learner_id: c.condition for c in conditions(syncer, 32.0)}
    assert found == {"a": "training", "b": "training", "c": "slow", "d": "training"}


def test_the_faster_of_two_is_not_slow_just_after_the_other_returned() -> None:
    """The other's start took processors from it: its average rose to 5 s, and falls again with each step."""
    syncer = running("a", "b")
    syncer.on_disconnect("b", 1, "killed", 1.0)
    for step in range(2, 6):
        syncer.on_message(report("a", step, step_s=5.0), 5.0 * step)
    returned_s = 25.0
    syncer.on_message(hello("b", incarnation=2, versions=tuple(syncer.versions)), returned_s)
    judged = []
    for step in range(1, 60):
        now_s = returned_s + step
        syncer.on_message(report("b", step, incarnation=2, step_s=1.0), now_s)
        syncer.on_message(report("a", 5 + step, step_s=0.9), now_s)
        member = syncer.membership.members
        judged.append((said(syncer, "a", now_s)[0], (member["a"].step_s or 0.0) > 2.0 * (member["b"].step_s or 9.0)))
    assert any(above for _, above in judged), "the average is above twice the median for a while"
    assert {condition for condition, _ in judged} == {"training"}


def test_silent() -> None:
    syncer = running("a")
    syncer.on_tick(9.0)  # silence_s = 8
    assert said(syncer, "a", 10.5) == ("silent", 9.0, "connected, but not heard for 9.5 s: stopped, or cut off")


@pytest.mark.parametrize("how", ["disconnect", "leave"])
def test_gone(how: str) -> None:
    syncer = running("a")
    if how == "leave":
        syncer.on_message(Leave("a", 1, "asked to"), 3.0)
    else:
        syncer.on_disconnect("a", 1, "broke", 3.0)
    assert said(syncer, "a", 9.0)[:2] == ("gone", 3.0)
    left_s = 3.0 + syncer.config.release_s - 9.0
    waits = said(syncer, "a", 9.0)[2] == f"no connection; its data goes to others in {left_s:.0f} s"
    assert waits == (how == "disconnect"), "who says goodbye gives it back at once"
    if waits:
        syncer.on_tick(3.0 + syncer.config.release_s + syncer.config.silence_s)
        assert said(syncer, "a", 99.0)[2] == "no connection; what it left undone goes to others"


def test_the_data_of_a_lost_learner_that_reads_its_own_goes_to_nobody() -> None:
    syncer = new()
    syncer.on_message(hello("a", step_samples=0), 0.0)
    syncer.on_disconnect("a", 1, "broke", 3.0)
    assert said(syncer, "a", 9.0)[2] == "no connection"


@pytest.mark.parametrize("reason", ON_PURPOSE)
def test_who_was_asked_to_leave_has_left(reason: str) -> None:
    syncer = running("a", "b")
    syncer.on_message(Leave("a", 1, reason), 3.0)
    told = ("left", 3.0, f"{reason}; what it left undone goes to others")
    assert said(syncer, "a", 9.0) == told
    restored = new()
    restored.restore(syncer.state())
    assert said(restored, "a", 9.0) == told
    syncer.on_message(hello("a"), 10.0)
    assert said(syncer, "a", 11.0)[0] == "joining"


def test_leaving_a_complete_run_is_not_a_loss() -> None:
    pair = Pair(total_steps=2)
    pair.join("a", "b")
    for _ in range(6):
        pair.wait(1.0)
        pair.step(*(name for name in ("a", "b") if pair.learners[name].state != "stopped"))
    assert pair.syncer.finished
    for name in ("a", "b"):
        condition, _, reason = said(pair.syncer, name, 99.0)
        assert (condition, reason) == ("left", "the run is complete")


def test_conditions_are_sorted_by_name() -> None:
    assert [c.learner_id for c in conditions(running("c", "a", "b"), 2.0)] == ["a", "b", "c"]


def test_a_joining_learner_that_falls_silent_is_noticed_and_may_come_back() -> None:
    syncer = new()
    syncer.on_message(hello("a", versions=(-1,) * 4), 0.0)
    effects = syncer.on_tick(8.0)
    assert only(effects, Note) == [Note("silent", 0, -1, ("a",), "not heard for 8.0 s")]
    assert "not heard for 8.0 s: compiles on an overloaded machine, was stopped" in said(syncer, "a", 8.0)[2]
    (note,) = only(syncer.on_message(Heartbeat("a", 1), 12.0), Note)
    assert note.kind == "back" and syncer.membership.members["a"].state == JOINING
    assert syncer.membership.live == 0


def unmerged(syncer: Syncer, rounds: int) -> list[Effect]:
    """Rounds of a alone while b reports, but never what a round can count: it holds no step since its adoption."""
    effects: list[Effect] = []
    first = syncer.membership.members["b"].local_step + 1
    for step in range(first, first + rounds):
        now_s = float(step)
        newest = tuple(Adopted(version) for version in syncer.versions)
        effects += syncer.on_message(report("b", step, tuple(Adopted(v, step, 0) for v in syncer.versions)), now_s)
        effects += syncer.on_message(report("a", step, newest), now_s)
        this = next(iter(syncer.rounds.flying.values()))
        base = syncer.versions[this.fragment_id]
        syncer.on_message(value("a", this.global_step, this.fragment_id, step, base_version=base), now_s)
        effects += merged(syncer, this.global_step, now_s)
    return effects


def live(unmerged_rounds_max: int) -> Syncer:
    syncer = new(quorum=1, overlap_steps=1, unmerged_rounds_max=unmerged_rounds_max, silence_s=1000.0)
    for name in ("a", "b"):
        syncer.on_message(hello(name), 0.0)
    syncer.on_message(report("b", 1, (Adopted(0, 1, 0),) * 4), 1.0)
    assert syncer.membership.live == 1 and syncer.global_step == 0
    return syncer


def test_an_island_that_is_never_merged_raises_an_alarm_once() -> None:
    syncer = live(5)
    effects = unmerged(syncer, 4)
    assert [note for note in only(effects, Note) if note.kind == "unmerged"] == []
    assert said(syncer, "b", 9.0)[0] == "training"
    effects = unmerged(syncer, 4)
    alarms = [note for note in only(effects, Note) if note.kind == "unmerged"]
    assert [note.members for note in alarms] == [("b",)], "once, and not for a"
    assert alarms[0].reason == "alive, but without a share in the last 5 merged rounds"
    condition, _, reason = said(syncer, "b", 9.0)
    assert condition == "unmerged" and "had no share in the last 8 rounds" in reason


def test_a_share_ends_the_alarm() -> None:
    syncer = live(3)
    unmerged(syncer, 4)
    assert said(syncer, "b", 9.0)[0] == "unmerged"
    held = tuple(Adopted(version) for version in syncer.versions)
    syncer.on_message(report("b", 50, held), 50.0)
    this = next(iter(syncer.rounds.flying.values()))
    base = syncer.versions[this.fragment_id]
    for name in sorted(this.asked):
        syncer.on_message(value(name, this.global_step, this.fragment_id, 50, base_version=base), 50.0)
    merged(syncer, this.global_step, 50.0)
    assert said(syncer, "b", 51.0)[0] == "training"


def test_a_strike_is_a_condition_until_a_value_can_be_used() -> None:
    pair = Pair(quorum=2, strikes_max=3)
    pair.join("a", "b")
    pair.poisoned = {"b"}
    pair.step("a", "b")
    assert [(c.condition, c.reason) for c in conditions(pair.syncer, 0.0)][1] == ("striking", "1 of 3 strikes")
    assert pair.notes("merged")[-1].members == ("a",)
    pair.poisoned = set()
    pair.rounds(1, "a", "b")
    assert pair.syncer.membership.members["b"].credit.strikes == 0


def test_drain_asks_one_learner_to_leave() -> None:
    syncer = running("a", "b")
    assert syncer.on_drain("b", 2.0) == [Send("b", Stop(1, "drained"))]
    assert syncer.membership.members["b"].state == ACTIVE, "until it says goodbye"


@pytest.mark.parametrize(
    ("names", "name", "words"),
    [(("a",), "ghost", "there are a"), ((), "ghost", "there are nobody"), (("a", "b"), "b", "there are a")],
)
def test_drain_of_an_unknown_island_names_the_known_ones(names: tuple[str, ...], name: str, words: str) -> None:
    syncer = running(*names) if names else new()
    syncer.on_disconnect("b", 1, "broke", 2.0)
    with pytest.raises(ValueError, match=f"no learner '{name}' is connected; {words}"):
        syncer.on_drain(name, 3.0)


def test_a_silent_learner_can_be_drained() -> None:
    syncer = running("a")
    syncer.on_tick(20.0)
    assert syncer.membership.members["a"].state == SILENT
    assert sent(syncer.on_drain("a", 21.0), "a") == [Stop(1, "drained")]


NAMES = ["a", "b", "c", "d"]


def walk(outrun: Outrun, steps: int, per_round: float, begin: float = 0.0) -> float:
    """So many steps of everybody, with a round after so many of them; returns the clock of rounds."""
    clock = begin
    for _ in range(steps):
        clock += 1 / per_round
        for name in NAMES:
            outrun.on_steps(name, 1, int(clock))
    return clock


def test_a_healthy_run_has_none() -> None:
    outrun = Outrun()
    walk(outrun, 1000, 1.0)
    assert not outrun.current and not outrun.episodes


def test_a_first_round_that_takes_long_is_an_episode_with_its_figures() -> None:
    outrun = Outrun()
    for _ in range(64):
        for name in NAMES:
            outrun.on_steps(name, 1, 0)
    assert outrun.current, "the alarm stays while the cause lasts"
    clock = walk(outrun, 200, 1.0)
    assert not outrun.current and len(outrun.episodes) == 1 and clock == 200
    assert str(outrun.episodes[0]) == "islands outran rounds: 64 steps each while 0 rounds closed, from global step 0"


@pytest.mark.parametrize(("per_round", "expected"), [(1.5, False), (FACTOR, True), (5.0, True)])
def test_twofold_is_the_limit(per_round: float, expected: bool) -> None:
    outrun = Outrun()
    walk(outrun, 40 * STEPS_MIN, per_round)
    assert outrun.current == expected and bool(outrun.episodes) == expected
    if expected:
        [episode] = outrun.episodes
        assert episode.steps / episode.rounds == pytest.approx(per_round, rel=0.05)


def test_islands_of_very_different_speed_count_as_their_mean() -> None:
    outrun = Outrun()
    # The clock of the others follows the fastest learner.
    for clock in range(1, 501):
        outrun.on_steps("fast", 1, clock)
        if clock % 10 == 0:
            outrun.on_steps("slow", 1, clock)
    assert not outrun.episodes


def test_steps_that_nobody_reported_count_when_they_are_heard_of() -> None:
    outrun = Outrun()
    walk(outrun, 100, 1.0)
    outrun.on_steps("a", 4 * STEPS_MIN * len(NAMES), 100)
    assert outrun.current


def test_short_steps_count_in_longer_windows() -> None:
    outrun = Outrun()
    for step in range(800):
        # A snapshot holds up the rounds for 16 steps.
        clock = 0 if step < STEPS_MIN else step
        outrun.on_steps("a", 1, clock, 2 * SECONDS_MIN / 400)
    assert not outrun.episodes
    for _ in range(400):
        outrun.on_steps("a", 1, 800, 2 * SECONDS_MIN / 400)
    assert outrun.current and outrun.episodes[0].steps == 400


def test_a_run_that_went_back_begins_a_new_window() -> None:
    outrun = Outrun()
    walk(outrun, 100, 1.0)
    walk(outrun, 100, 1.0, begin=50.0)
    assert not outrun.episodes


def test_it_continues_from_its_state() -> None:
    numbers = random.Random(3)
    events = [(numbers.choice(NAMES), numbers.randint(1, 3), step // 9) for step in range(2000)]
    whole, first = Outrun(), Outrun()
    for event in events:
        whole.on_steps(*event)
    for event in events[:1001]:
        first.on_steps(*event)
    second = Outrun()
    second.restore(json.loads(json.dumps(first.state())))
    for event in events[1001:]:
        second.on_steps(*event)
    assert second.state() == whole.state() and whole.episodes


def test_many_episodes_stay_few_records() -> None:
    outrun, clock = Outrun(), 0.0
    for _ in range(3 * EPISODES_MAX):
        clock = walk(outrun, 3 * STEPS_MIN, 4.0, clock)
        clock = walk(outrun, 3 * STEPS_MIN, 1.0, clock)
    assert len(outrun.episodes) == EPISODES_MAX
    last = outrun.episodes[-1]
    assert last.later == 2 * EPISODES_MAX and last.steps / last.rounds == pytest.approx(4.0, rel=0.3)
    assert "1 round closed, from global step 3, and 2 times later" in str(Episode(3, 1, 16.0, 2))


def test_every_condition_is_listed() -> None:
    """Dashboards have one series for each."""
    returned: list[Any] = [n.value for n in ast.walk(ast.parse(inspect.getsource(health))) if isinstance(n, ast.Return)]
    made = {value.elts[0].value for value in returned if isinstance(value, ast.Tuple)}
    assert made == set(terms.CONDITIONS)
