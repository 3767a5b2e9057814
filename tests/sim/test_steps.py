"""Steps and overlapping rounds in simulated runs: what travels, what a thin link costs, and whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import pytest
from faulty.cluster import FaultyCluster
from faulty.faults import Fault
from faulty.network import TroubledOptions
from faulty.scenario import FaultyScenario
from invariants.checker import longest_step_s

from diloco_jax.protocol.pacing import ProtocolConfig
from tests.sim.watching import Watch, watched

FRAGMENTS = 8
CALM = FaultyScenario(
    config=ProtocolConfig(sync_every=FRAGMENTS, num_fragments=FRAGMENTS, overlap_steps=2, quorum=2),
    learners=4,
    total_steps=160,
    network=TroubledOptions(bandwidth_bytes_per_s=1e6),
    payload_bytes=80_000,
    step_bytes=10_000,
)


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
    thin = TroubledOptions(bandwidth_bytes_per_s=1e6, thin_links=(("island-3", 45_000.0),))
    calm, slow = watched(CALM), watched(replace(CALM, network=thin))
    late = [merge.global_step for _, merge in slow.merges if "island-3" in [part.learner_id for part in merge.parts]]
    assert len(late) >= 10, "its values take more than a step, and count all the same"
    merged_s = slow.times_s("merged")
    passed = [r for r in late if merged_s.get(r + 1, 1e9) < merged_s[r]]
    assert len(passed) >= 0.8 * len(late), "the next round closed and was merged before it"
    for name in CALM.names[:3]:
        assert max(slow.gaps_s(name)) <= longest_step_s(CALM) + 1e-9
    ends = [max(watch.times_s("merged").values()) for watch in (calm, slow)]
    assert ends[1] < 1.2 * ends[0], f"rounds of both runs end after {ends} s"


def step_s(watch: Watch) -> float:
    """Return a step's time as the syncer takes it: the lower median of the learners."""
    steps = {name: zip(watch.began[name], ended, strict=False) for name, ended in watch.ended.items()}
    means = sorted(fmean(end_s - begin_s for begin_s, end_s in each) for each in steps.values())
    return means[(len(means) - 1) // 2]


def takes_s(watch: Watch, names: Sequence[str]) -> list[float]:
    """Return the seconds from a round's opening, when the one before closed, until each member had its result."""
    members = {merge.global_step: [part.learner_id for part in merge.parts] for _, merge in watch.merges}
    rounds = range(60, max(members) - 5)  # the averages have settled, and learners have not begun to leave
    closed_s = watch.times_s("closed")
    return sorted(watch.read_s[r, name] - closed_s[r - 1] for r in rounds for name in names if name in members[r])


def contributors(watch: Watch) -> float:
    """Return the learners in the mean merge."""
    return sum(len(merge.parts) for _, merge in watch.merges) / len(watch.merges)


def on_its_way(down_s: float, spread: float, slow: tuple[str, ...] = (), jitter_s: float | None = None) -> Watch:
    """A run in which a step to a new version takes so long on the downlink, for all learners or for some.

    With a jitter every message also waits for the versions before it: as on a shaped link, so do requests.
    """
    thin = tuple((name, 1e6) for name in slow)
    network = TroubledOptions(
        bandwidth_bytes_per_s=0.0 if slow else 1e6,
        thin_links=thin,
        one_queue=jitter_s is not None,
        jitter_s=jitter_s or 0.0,
    )
    scenario = replace(
        CALM,
        config=replace(CALM.config, quorum=1),
        total_steps=200,
        network=network,
        payload_bytes=20_000,
        step_bytes=int(1e6 * down_s),
        speed_spread=spread,
    )
    watch, cluster = Watch(), FaultyCluster(scenario)
    cluster.watch(watch)
    cluster.run(10_000.0)
    assert cluster.complete
    return watch


@pytest.mark.parametrize(
    ("down_s", "spread"), [(0.5, 0.5), (0.95, 0.1), (0.95, 0.5), (1.1, 0.5), (0.95, 1.0), (1.1, 1.0)]
)
def test_on_a_slow_downlink_rounds_end_within_tau(down_s: float, spread: float) -> None:
    """The window used to forget the way down: of (1.1, 0.5) 58 % of the values came later than tau steps."""
    ends_in_time(on_its_way(down_s, spread), late_max=0.07, longest=1.1, contributors_min=3.3)


@pytest.mark.parametrize("jitter_s", [0.0, 0.1])
@pytest.mark.parametrize(("down_s", "spread"), [(0.5, 0.5), (0.95, 0.5), (0.95, 1.0), (1.1, 1.0)])
def test_a_queue_on_a_slow_downlink_drains(down_s: float, spread: float, jitter_s: float) -> None:
    """Requests wait behind versions: two rounds then merge at once, their results share the link, and so it went on.

    Without slowing down for waits 93 % of the values of (0.95, 0.5) came later than tau steps, the last after 4.2 s.
    """
    ends_in_time(on_its_way(down_s, spread, jitter_s=jitter_s), late_max=0.1, longest=1.2, contributors_min=3.2)


def ends_in_time(watch: Watch, *, late_max: float, longest: float, contributors_min: float) -> None:
    """Check that nearly all results came within tau steps, and that the window is not closed for it."""
    took_s, limit_s = takes_s(watch, CALM.names), CALM.config.overlap_steps * step_s(watch)
    late = [each_s for each_s in took_s if each_s > 1.03 * limit_s]
    assert len(late) <= late_max * len(took_s), f"{len(late)} of {len(took_s)} after more than {limit_s:.2f} s"
    assert took_s[-1] <= longest * limit_s
    assert contributors(watch) > contributors_min


def test_a_downlink_that_carries_less_than_a_round_per_step_does_not_fall_behind() -> None:
    """Rounds keep to its pace, so nothing piles up: at 7 s and growing it did."""
    watch = on_its_way(1.1, 0.1)
    assert takes_s(watch, CALM.names)[-1] < 2.6
    assert contributors(watch) == pytest.approx(4.0, abs=0.1)


def test_one_slow_downlink_closes_nobody_elses_window() -> None:
    watch = on_its_way(2.5, 0.1, slow=("island-3",))
    others = takes_s(watch, CALM.names[:3])
    assert others[len(others) * 9 // 10] <= 1.3, "as with four fast links"
    assert contributors(watch) > 2.9
