"""Alarms: what raises them, how long they must hold, and that healthy runs have none."""

import json
import re
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from random import Random

import pytest

from diloco_jax.protocol.messages import StepReport
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.watch.alarms import (
    CALM,
    HOLDS,
    KEPT_MAX,
    REMEDIES,
    Alarm,
    AlarmBook,
    Standing,
    alarms_of,
    starving,
)
from diloco_jax.protocol.watch.signs import REPORTS_MIN, STEPS_MIN, WAY_FACTOR, Losses
from diloco_jax.protocol.watch.stats import RunStats
from diloco_jax.protocol.watch.terms import CONDITIONS
from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.invariants.draw import random_scenario
from diloco_jax.sim.network import NetworkOptions
from diloco_jax.sim.scenario import Scenario
from tests.drawn import seeds
from tests.protocol.syncer_inputs import hello, new, report, value

SILENT, SLOW = Alarm("silent", "a", "a is silent"), Alarm("slow", "b", "b is slow")


def reported(losses: list[float]) -> str:
    watched = Losses()
    for step, loss in enumerate(losses, start=1):
        watched.on_report(StepReport("a", 1, step, step, 0, (), 1.0, loss, 1, 1, ()))
    return watched.trouble("a")


def falling(steps: int, noise: float) -> list[float]:
    random = Random(0)
    return [2.0 + 3.0 * 0.98**step + random.gauss(0.0, noise) for step in range(steps)]


@pytest.mark.parametrize("loss", [nan, inf, -inf])
def test_a_loss_that_is_not_finite(loss: float) -> None:
    assert reported([2.0, loss]) == f"its newest training loss is {loss}"
    assert reported([2.0, loss, 2.0]) == ""


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.3])
def test_a_loss_that_jumps(noise: float) -> None:
    curve = falling(400, noise)
    assert not any(reported(curve[:steps]) for steps in range(1, 400, 7)), "a loss that falls and scatters is healthy"
    told = reported([*curve, *(loss + 2.5 for loss in curve[-8:])])
    assert re.fullmatch(r"its training loss jumped to [34]\.\d+, from 2\.\d+ on average; alarm above [23]\.\d+", told)
    assert reported([*curve[: REPORTS_MIN - 9], *[9.0] * 8]) == "", "nobody knows yet how it scatters"


def test_a_jump_is_over_when_the_loss_is_back_or_the_new_one_is_usual() -> None:
    curve = falling(400, 0.05)
    jumped = [*curve, *[5.0] * 10]
    assert reported(jumped) and not reported([*jumped, *curve[-30:]]) and not reported([*jumped, *[5.0] * 300])


def two_islands(quorum: int = 2) -> tuple[Syncer, RunStats]:
    syncer = new(quorum=quorum, overlap_steps=2)
    stats = RunStats(("a", "b"), 100, syncer)
    for name in ("a", "b"):
        syncer.on_message(hello(name), 0.0)
    # The first report of a learner includes compilation, so its time is not the time of a step.
    for step, name in ((1, "a"), (1, "b"), (2, "a"), (2, "b")):
        told = report(name, step)._replace(step_s=1.0)
        stats.on_report(told, float(step))
        syncer.on_message(told, float(step))
    return syncer, stats


def test_a_link_that_needs_longer_than_the_overlap_hides() -> None:
    syncer, stats = two_islands()
    closed_s = syncer.rounds.flying[1].closed_s
    allowed_s = WAY_FACTOR * 2 * 1.0
    assert stats.on_value(value("a", 1, 1, 1), closed_s + allowed_s - 0.1) == pytest.approx(allowed_s - 0.1)
    assert alarms_of(syncer, stats, closed_s) == []
    stats.on_value(value("b", 1, 1, 1), closed_s + allowed_s + 0.1)
    (alarm,) = alarms_of(syncer, stats, closed_s)
    assert alarm == Alarm("link", "b", "a fragment takes 4.1 s to and from b; 4.0 s are hidden by steps")
    assert stats.on_value(value("b", 9, 1, 1), 5.0) is None, "no such round"


def test_a_value_that_never_comes_is_a_slow_link_too() -> None:
    syncer, stats = two_islands()
    assert [alarm.who for alarm in alarms_of(syncer, stats, syncer.rounds.flying[1].closed_s + 4.1)] == ["a", "b"]


def test_conditions_of_islands_are_alarms() -> None:
    assert {*CONDITIONS} - {*REMEDIES} == {"joining", "recovering", "training", "evaluating", "left", "banned"}
    syncer, stats = two_islands(quorum=1)
    syncer.on_disconnect("a", 1, "no connection", 2.0)
    stats.losses.on_report(report("b", 3)._replace(loss=nan))
    first, second = alarms_of(syncer, stats, 3.0)
    assert (first.kind, first.who) == ("gone", "a") and first.text.startswith("a is disconnected: no connection")
    assert second == Alarm("loss", "b", "b: its newest training loss is nan")
    assert first.as_dict() == {**first._asdict(), "remedy": REMEDIES["gone"]}


def test_a_quorum_that_is_away_is_not_blamed_on_the_syncer() -> None:
    syncer, stats = two_islands()
    syncer.on_disconnect("a", 1, "no connection", 2.0)
    for step in range(3, 3 + 10 * STEPS_MIN):
        stats.on_report(report("b", step)._replace(step_s=1.0), float(step))
    found = [alarm for alarm in alarms_of(syncer, stats, 200.0) if not alarm.who]
    assert found == [Alarm("quorum", "", "1 island is connected, fewer than protocol.quorum (2), so no round closes")]
    syncer.on_message(hello("a", 2), 201.0)
    assert [alarm for alarm in alarms_of(syncer, stats, 201.0) if not alarm.who] == []


def test_steps_without_a_syncer_are_not_blamed_on_the_rounds_after_its_return() -> None:
    syncer, stats = two_islands(quorum=1)
    for name in ("a", "b"):
        syncer.on_disconnect(name, 1, "the syncer restarted", 3.0)
    for name in ("a", "b"):
        syncer.on_message(hello(name), 60.0)
    away = 10 * STEPS_MIN
    for step in (away, away + 1):
        for name in ("a", "b"):
            told = report(name, step)._replace(step_s=1.0)
            stats.on_report(told, 61.0)
            syncer.on_message(told, 61.0)
    assert not stats.outruns
    for step in range(away + 2, away + 2 + 2 * STEPS_MIN):
        for name in ("a", "b"):
            told = report(name, step)._replace(step_s=1.0)
            stats.on_report(told, 62.0)
            syncer.on_message(told, 62.0)
    assert stats.outrun.startswith("islands outran rounds"), "rounds that stay away from then on are an alarm"


def test_islands_beyond_those_that_the_run_needs_may_be_away() -> None:
    syncer, stats = two_islands(quorum=1)
    stats.least = 1
    syncer.on_disconnect("a", 1, "no connection", 2.0)
    assert alarms_of(syncer, stats, 3.0) == []
    stats.least = 2
    missing, gone = alarms_of(syncer, stats, 3.0)
    assert missing == Alarm("missing", "", "1 island is connected, fewer than islands.least (2)")
    assert (gone.kind, gone.who) == ("gone", "a")
    book = AlarmBook()
    assert book.look([missing], 3.0) == ([], []) and book.look([missing], 602.0) == ([], [])
    assert book.look([missing], 603.0) == ([missing], []), "queues of ten minutes are usual"


def test_every_kind_is_told_of_in_the_past() -> None:
    told = [Alarm(kind, who, "").past for kind in REMEDIES for who in ("a", "")]
    assert not [text for text in told if "{" in text or " is " in text or " are " in text]
    assert Alarm("loss", "a", "").past == "a loss of a was not as it should be"


def test_the_documentation_has_every_kind() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    section = page.partition("## Alarms")[2].partition("\n## ")[0]
    assert re.findall(r"^\| ([a-z-]+) \|", section, re.MULTILINE)[1:] == [*REMEDIES]


def test_islands_that_wait_for_data() -> None:
    (alarm,) = starving({"a": {"waiting_for_data": 0.04}, "b": {"waiting_for_data": 0.4}, "c": {}})
    assert alarm == Alarm("starved", "b", "b waits for its data for 40% of its time")


def test_an_alarm_begins_holds_ends_and_comes_again() -> None:
    book = AlarmBook()
    assert book.look([SILENT], 1.0) == ([SILENT], [])
    later = SILENT._replace(text="a is silent for longer")
    assert book.look([later], 3.0) == ([], []) and book.standing == [later], "its text is the newest"
    assert book.look([], 3.5) == ([], [later]) and book.standing == [], "an alarm never outlives its cause"
    (over,) = book.as_dicts()
    assert over["past"] == "a was silent" and (over["from_s"], over["until_s"], over["stands"]) == (1.0, 3.0, False)
    book.look([SILENT], 19.0)
    (told,) = book.as_dicts()
    assert told == {**SILENT.as_dict(), "from_s": 19.0, "until_s": 19.0, "lasted_s": 2.0, "times": 2, "stands": True}


def test_alarms_outlive_the_syncer_that_told_them() -> None:
    book = AlarmBook()
    for now_s in (1.0, 3.0, 3.5, 20.0, 21.0):
        book.look([SILENT] if now_s != 3.5 else [], now_s)
    told = json.loads(json.dumps(book.as_dicts()))
    assert [(each["times"], each["lasted_s"]) for each in told] == [(2, 3.0)]
    after = AlarmBook(map(Standing.of, told))
    assert after.as_dicts() == told and after.standing == [SILENT]
    assert after.look([], 27.0) == ([], [SILENT]) and after.as_dicts()[0]["lasted_s"] == 3.0
    unknown = Standing(Alarm("weather", "", "rain"), 1.0, 2.0, stands=True)
    assert AlarmBook([unknown]).as_dicts() == [], "of another release"


def test_what_may_be_weather_must_hold_for_a_while() -> None:
    book, hold_s = AlarmBook(), HOLDS["slow"]
    assert book.look([SLOW], 1.0) == book.look([SLOW], 0.9 + hold_s) == ([], [])
    book.look([], hold_s + 1.0)
    assert book.look([SLOW], hold_s + 2.0) == ([], []), "it must hold for the whole time again"
    assert book.look([SLOW], 2 * hold_s + 2.0) == ([SLOW], [])


def test_a_link_that_breaks_again_and_again_is_told_of() -> None:
    gone = Alarm("gone", "a", "a is disconnected")
    book = AlarmBook()
    looks = [book.look([gone] if second % 3 == 0 else [], float(second)) for second in range(12)]
    assert looks[:6] == [([], [])] * 6 and looks[6:8] == [([gone], []), ([], [gone])], "it ends while the link holds"
    assert looks[8:] == [([], [])] * 4, "at most one alarm every CALM seconds"
    for second in range(12, 42):
        begun = book.look([gone] if second % 6 == 0 else [], float(second))[0]
        assert not begun, "each return restarts the count"


def test_an_alarm_that_comes_and_goes_does_not_fill_the_log() -> None:
    book = AlarmBook()
    looks = [book.look([SILENT] if half % 2 else [], half / 2) for half in range(40)]
    assert sum(len(begun) for begun, _ in looks) == 1
    begun = [second for second in range(20, 30) if book.look([SILENT], float(second))[0]]
    assert begun == [20 + CALM] and len(book.as_dicts()) == 1


def test_the_book_is_bounded() -> None:
    book = AlarmBook()
    book.look([Alarm("silent", str(number), "silent") for number in range(KEPT_MAX + 9)], 1.0)
    assert len(book.as_dicts()) == len(book.standing) == KEPT_MAX


class Watched:
    """Looks for alarms in a simulated run, as the syncer's loop does in a real one."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.begun = cluster, list[Alarm]()
        self._stats, self._book = RunStats(cluster.scenario.names, 100, cluster.syncer), AlarmBook()
        original = cluster.syncer.on_message

        def on_message(message, now_s):  # type: ignore[no-untyped-def]
            if isinstance(message, StepReport):
                self._stats.on_report(message, now_s)
            effects = original(message, now_s)
            begun, _ = self._book.look(alarms_of(cluster.syncer, self._stats, now_s), now_s)
            self.begun += begun
            return effects

        cluster.syncer.on_message = on_message  # type: ignore[method-assign]


def healthy(seed: int) -> Scenario:
    """Settings of any kind, on machines and links that do their work."""
    drawn, random = random_scenario(seed), Random(seed)
    every, tau = drawn.config.sync_every, drawn.config.overlap_steps
    # A larger tau would make a fragment wait for itself.
    tau = min(tau, every - 1) if isinstance(every, int) else tau
    # In lockstep learners always wait.
    waits = {"overlap_steps": tau, "wait_steps": drawn.config.wait_steps if tau else 0.0}
    return Scenario(
        config=replace(drawn.config, **waits, unmerged_rounds_max=96, silence_s=15.0, heartbeat_s=2.0),
        learners=drawn.learners,
        total_steps=60,
        network=NetworkOptions(delay_s=random.choice((0.001, 0.05, 0.1)), jitter_s=random.choice((0.0, 0.05))),
        step_s=drawn.step_s,
        speed_spread=random.choice((0.0, 0.1, 0.4)),
        step_noise=random.choice((0.0, 0.05, 0.2)),
        step_samples=drawn.step_samples,
        seed=seed,
    )


def test_healthy_runs_have_no_alarm() -> None:
    for seed in seeds(40):
        cluster = Cluster(healthy(seed), taped=False)
        watched = Watched(cluster)
        cluster.run(10_000.0)
        assert cluster.complete and watched.begun == [], f"seed {seed}"
