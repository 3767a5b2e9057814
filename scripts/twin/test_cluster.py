"""Local runs on virtual time: restarts take what they take, and goodput is counted as for a real run."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from diloco_jax.protocol.effects import Note
from diloco_jax.protocol.messages import LearnerMessage, StepReport
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.syncer.tape import replay
from diloco_jax.protocol.watch.stats import RunStats
from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.fault import Fault
from diloco_jax.sim.node import FINGERPRINT, Effects, LearnerProcess, Observer
from twin.cluster import LocalRun, Meter
from twin.driver import ScheduleDriver
from twin.faults import check_kinds, simulated
from twin.local_runs import CALIBRATION, NAMES, SETTINGS, fault
from twin.real_run import RealFault

DELAY_S = CALIBRATION.delay_s


class Steps(Observer):
    """Observer that keeps starts and ends of steps, and the notes of the syncer."""

    def __init__(self) -> None:
        self.began: dict[tuple[str, int], list[float]] = {}
        self.ended: dict[tuple[str, int], list[float]] = {}
        self.notes: list[tuple[float, Note]] = []

    def on_step(self, process: LearnerProcess, began: bool, now_s: float) -> None:
        (self.began if began else self.ended).setdefault(process.key, []).append(now_s)

    def on_syncer(self, given: LearnerMessage | None, effects: Effects, now_s: float) -> None:
        self.notes += [(now_s, effect) for effect in effects if isinstance(effect, Note)]


def run(*faults: Fault, schedule: Sequence[RealFault] = ()) -> tuple[Cluster, Steps, Meter]:
    local = LocalRun(SETTINGS, CALIBRATION, faults)
    steps, meter = Steps(), Meter(local)
    local.cluster.watch(steps, meter)
    if schedule:
        local.cluster.watch(ScheduleDriver(local, schedule))
    local.cluster.run(10_000.0)
    return local.cluster, steps, meter


def planned(*faults: RealFault) -> list[Fault]:
    return [each for one in faults for each in simulated(one, one.at_s, SETTINGS, CALIBRATION)]


def test_goodput_is_the_time_inside_steps_over_the_time_of_all_islands() -> None:
    cluster, steps, meter = run()
    busy_s = sum(
        end_s - begin_s
        for incarnation, ends in steps.ended.items()
        for begin_s, end_s in zip(steps.began[incarnation], ends, strict=False)
    )
    began_s = min(begun[0] for begun in steps.began.values())
    # The syncer counts from the first report that arrives.
    window_s = cluster.finished_s - (began_s + DELAY_S)
    measured = meter.measured()
    # Each island's last step may end too late for the syncer.
    one_step = 0.5 / (3 * window_s)
    assert busy_s / (3 * window_s) - 3 * one_step <= measured["goodput"] <= busy_s / (3 * window_s)
    assert measured["rounds"] == 60 and measured["rounds_per_s"] == pytest.approx(60 / (cluster.finished_s - began_s))


def test_the_gap_between_steps_is_not_counted() -> None:
    local = LocalRun(SETTINGS, replace(CALIBRATION, gap_s=0.125))
    meter = Meter(local)
    local.cluster.watch(meter)
    local.cluster.run(10_000.0)
    _, _, without = run()
    assert meter.measured()["goodput"] == pytest.approx(0.75 * without.measured()["goodput"], abs=0.01)


def test_a_real_run_would_count_the_same_tape_alike() -> None:
    """The count from the tape, across a restart of the syncer, equals the count of the simulation."""
    faults = (fault("kill", "island-1", 12.0), fault("kill-syncer", "syncer", 30.0), fault("stop", "island-2", 40.0))
    cluster, _, meter = run(*planned(faults[0], faults[1], faults[2]._replace(duration_s=4.5)))
    machine = Syncer(SETTINGS.protocol, SETTINGS.total_steps, FINGERPRINT)
    stats = RunStats(NAMES, 0, machine)

    def counted() -> Iterator[str]:
        for line in cluster.syncer_node.tape:
            if line.startswith('["StepReport"'):
                _, then_s, *fields = json.loads(line)
                stats.on_report(StepReport(*fields), then_s)
            yield line

    for effects in replay(counted(), machine, {}):
        for effect in effects:
            if isinstance(effect, Note) and effect.kind == "merged":
                stats.on_merged(effect.members, effect.global_step)
    replayed = stats.summary({}, cluster.finished_s)
    measured = meter.measured()
    assert {name: measured[name] for name in ("goodput", "uptime", "contributors_per_round")} == {
        name: replayed[name] for name in ("goodput", "uptime", "contributors_per_round")
    }
    assert measured["goodput"] < 0.97 and measured["uptime"] == 1.0


def test_a_run_that_stands_still_is_an_error() -> None:
    local = LocalRun(SETTINGS, CALIBRATION)
    meter = Meter(local)
    local.cluster.watch(meter)
    local.cluster.run(20.0)
    with pytest.raises(ValueError, match="stood still at global step"):
        meter.measured()


def test_a_killed_island_returns_after_supervisor_python_and_loading() -> None:
    _, steps, _ = run(*planned(fault("kill", "island-1", 20.0)))
    away_s = CALIBRATION.notice_s + SETTINGS.restart_delay_s + CALIBRATION.boot_s
    assert max(steps.ended["island-1", 1]) < 20.0
    assert steps.began["island-1", 2][0] == pytest.approx(20.0 + away_s + CALIBRATION.ready_s, abs=0.01)


def test_an_island_that_starts_while_no_syncer_answers_ends_and_is_started_again() -> None:
    settings = replace(SETTINGS, syncer_restart_delay_s=12.0)
    kills = [fault("kill", "island-1", 20.0), fault("kill-syncer", "syncer", 21.0)]
    faults = [each for one in kills for each in simulated(one, one.at_s, settings, CALIBRATION)]
    cluster = LocalRun(settings, CALIBRATION, faults).cluster
    steps = Steps()
    cluster.watch(steps)
    cluster.run(10_000.0)
    assert ("island-1", 2) not in steps.began
    again_s = CALIBRATION.notice_s + settings.restart_delay_s + CALIBRATION.boot_s
    greeted_s = 20.0 + again_s + settings.connect_timeout_s + again_s
    assert steps.began["island-1", 3][0] == pytest.approx(greeted_s + CALIBRATION.ready_s, abs=0.01)


def test_steps_continue_without_rounds_while_the_syncer_restarts() -> None:
    _, steps, _ = run(*planned(fault("kill-syncer", "syncer", 20.0)))
    back_s = 20.0 + CALIBRATION.notice_s + SETTINGS.syncer_restart_delay_s + CALIBRATION.syncer_boot_s
    merged = [at_s for at_s, note in steps.notes if note.kind == "merged"]
    assert not [at_s for at_s in merged if 20.6 < at_s < back_s]
    assert [at_s for at_s in merged if back_s < at_s < back_s + 3.0]
    ends = steps.ended["island-0", 1]
    assert max(b - a for a, b in pairwise(ends)) < 0.6


def test_a_black_hole_keeps_what_it_holds() -> None:
    _, steps, _ = run(*planned(fault("black-hole", "island-2", 20.0, duration_s=2.0, direction="up")))
    merged = [(at_s, note.members) for at_s, note in steps.notes if note.kind == "merged"]
    assert not [at_s for at_s, members in merged if 21.0 < at_s < 22.0 and "island-2" in members]
    assert [at_s for at_s, members in merged if 22.0 < at_s < 24.0 and "island-2" in members]
    assert not [note for _, note in steps.notes if note.kind == "silent"], "shorter than the lease"


def test_the_fault_says_how_many_bad_values_are_excluded() -> None:
    _, steps, _ = run(*planned(fault("nan", "island-1", 20.0, amount=2)))
    strikes = [note for _, note in steps.notes if note.kind == "strike"]
    assert [note.members for note in strikes] == [("island-1",), ("island-1",)]


KINDS = {
    "kill": [Fault(7.0, "crash", ("island-0",), 6.125, notice_s=0.005)],
    "kill-donor": [Fault(7.0, "crash", ("island-0",), 6.125, notice_s=0.005)],
    "kill-syncer": [Fault(7.0, "syncer_crash", (), 1.875)],
    "stop": [Fault(7.0, "pause", ("island-0",), 1.5)],
    "stop-syncer": [Fault(7.0, "hold", NAMES, 1.5)],
    "cut": [Fault(7.0, "disconnect", ("island-0",), 0.2, notice_s=0.005)],
    "corrupt": [Fault(7.0, "disconnect", ("island-0",), 0.2, notice_s=0.005)],
    "duplicate": [Fault(7.0, "disconnect", ("island-0",), 0.2, notice_s=0.005)],
    "black-hole": [Fault(7.0, "hold", ("island-0",), 1.5, direction="down")],
    "slow-link": [Fault(7.0, "narrow", ("island-0",), 1.5, 3.0)],
    "nan": [Fault(7.0, "bad_values", ("island-0",), factor=3.0)],
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_its_counterpart(kind: str) -> None:
    real = fault(kind, "island-0", duration_s=1.5, direction="down", amount=3)
    assert list(simulated(real, 7.0, SETTINGS, CALIBRATION)) == KINDS[kind]


def test_unsupported_faults_are_refused_by_name() -> None:
    donor, disk = fault("kill-donor", "island-0"), fault("full-disk", "syncer")
    check_kinds([donor], timed=True)
    with pytest.raises(ValueError, match="kill-donor: its second target"):
        check_kinds([donor], timed=False)
    for timed in (True, False):
        with pytest.raises(ValueError, match="full-disk: the simulator has no disk"):
            check_kinds([disk], timed=timed)
    with pytest.raises(ValueError, match="has no global steps of its faults"):
        check_kinds([fault("kill", "island-0", at_step=-1)], timed=False)
    with pytest.raises(ValueError, match="has the kind flood, which has no simulation"):
        list(simulated(fault("flood", "island-0"), 0.0, SETTINGS, CALIBRATION))


def driven(*schedule: RealFault) -> list[tuple[float, int]]:
    """Run a schedule, and return the time and the number of each inflicted fault."""
    local = LocalRun(SETTINGS, CALIBRATION)
    driver = ScheduleDriver(local, schedule)
    local.cluster.watch(driver)
    local.cluster.run(10_000.0)
    assert local.cluster.complete
    return [(at_s, each.number) for at_s, each in driver.inflicted]


def test_a_fault_happens_at_its_global_step_when_all_have_been_merged() -> None:
    ((first_s, _),) = driven(fault("cut", "island-0", at_step=0))
    assert 0.5 < first_s < 3.0, "not before everybody's first merge"
    ((later_s, _),) = driven(fault("cut", "island-0", at_step=60))
    assert later_s == pytest.approx(60 * 0.5, abs=2.0)


def test_a_fault_waits_until_its_target_has_recovered() -> None:
    kill, cut = fault("kill", "island-1", number=1, at_step=20), fault("cut", "island-1", number=2, at_step=21)
    (killed_s, _), (cut_s, _) = driven(kill, cut)
    away_s = CALIBRATION.notice_s + SETTINGS.restart_delay_s + CALIBRATION.boot_s + CALIBRATION.ready_s
    assert away_s + 1.0 < cut_s - killed_s < away_s + 5.0


def test_one_island_always_stays_well() -> None:
    kills = [fault("kill", name, number=number, at_step=20) for number, name in enumerate(NAMES)]
    first, second, third = (at_s for at_s, _ in driven(*kills))
    assert second - first < 0.1 and third - second > 6.0


def test_a_fault_with_another_target_does_not_wait() -> None:
    (first_s, _), (second_s, _) = driven(
        fault("stop", "island-1", number=1, at_step=20, duration_s=5.0),
        fault("kill-syncer", "syncer", number=2, at_step=20),
    )
    assert second_s == first_s
