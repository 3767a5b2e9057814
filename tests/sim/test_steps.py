"""Steps and overlapping rounds in simulated runs: what travels, what a thin link costs, and whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from diloco_jax.protocol.effects import Merge, Note, Send
from diloco_jax.protocol.messages import NO_VERSION, GlobalFragment, Hello, LearnerMessage
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.sim.checks.verdict import judge
from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.faults import Fault
from diloco_jax.sim.network import NetworkOptions
from diloco_jax.sim.node import Effects, LearnerProcess, Observer
from diloco_jax.sim.scenario import Scenario

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
    """Messages by receiver, times at which rounds closed and were merged, and ends of steps."""

    def __init__(self) -> None:
        self.whole: Counter[str] = Counter()
        self.steps: Counter[str] = Counter()
        self.greetings: Counter[str] = Counter()
        self.closed_s: dict[int, float] = {}
        self.merged_s: dict[int, float] = {}
        self.merges: list[Merge] = []
        self.ended: dict[str, list[float]] = {}

    def on_syncer(self, given: LearnerMessage | None, effects: Effects, now_s: float) -> None:
        if isinstance(given, Hello):
            self.greetings[given.learner_id] += 1
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, GlobalFragment):
                (self.whole if effect.message.base == NO_VERSION else self.steps)[effect.peer] += 1
            elif isinstance(effect, Merge):
                self.merges.append(effect)
            elif isinstance(effect, Note) and effect.kind in ("closed", "merged"):
                (self.closed_s if effect.kind == "closed" else self.merged_s)[effect.global_step] = now_s

    def on_step(self, process: LearnerProcess, began: bool, now_s: float) -> None:
        if not began:
            self.ended.setdefault(process.name, []).append(now_s)


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


# ---- the way of a broadcast ------------------------------------------------------------------------------------------


class Ways(Watch):
    """Adds when each learner had read each round's result, and how long steps took."""

    def __init__(self) -> None:
        super().__init__()
        self.read_s: dict[tuple[int, str], float] = {}
        self._began_s: dict[str, float] = {}
        self._steps_s: dict[str, list[float]] = {}

    def on_read(self, process: LearnerProcess, message: GlobalFragment, ok: bool, now_s: float) -> None:
        self.read_s.setdefault((message.version, process.name), now_s)

    def on_step(self, process: LearnerProcess, began: bool, now_s: float) -> None:
        if began:
            self._began_s[process.name] = now_s
        else:
            self._steps_s.setdefault(process.name, []).append(now_s - self._began_s[process.name])

    @property
    def step_s(self) -> float:
        """Return a step's time as the syncer takes it: the lower median of the learners."""
        means = sorted(sum(times) / len(times) for times in self._steps_s.values())
        return means[(len(means) - 1) // 2]

    def takes_s(self, names: Sequence[str]) -> list[float]:
        """Return the seconds from a round's opening, when the one before closed, until each member had its result."""
        members = {merge.global_step: [part.learner_id for part in merge.parts] for merge in self.merges}
        rounds = range(60, max(members) - 5)  # the averages have settled, and learners have not begun to leave
        return sorted(
            self.read_s[r, name] - self.closed_s[r - 1] for r in rounds for name in names if name in members[r]
        )

    @property
    def contributors(self) -> float:
        return sum(len(merge.parts) for merge in self.merges) / len(self.merges)


def on_its_way(down_s: float, spread: float, slow: tuple[str, ...] = (), jitter_s: float | None = None) -> Ways:
    """A run in which a step to a new version takes so long on the downlink, for all learners or for some.

    With a jitter every message also waits for the versions before it: as on a shaped link, so do requests.
    """
    thin = tuple((name, 1e6) for name in slow)
    network = NetworkOptions(
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
    ways, cluster = Ways(), Cluster(scenario, taped=False)
    cluster.watch(ways)
    cluster.run(10_000.0)
    assert cluster.complete
    return ways


@pytest.mark.parametrize(
    ("down_s", "spread"), [(0.5, 0.5), (0.95, 0.1), (0.95, 0.5), (1.1, 0.5), (0.95, 1.0), (1.1, 1.0)]
)
def test_on_a_slow_downlink_rounds_end_within_tau(down_s: float, spread: float) -> None:
    """The window used to forget the way down: of (1.1, 0.5) 58 % of the values came later than tau steps."""
    ways = on_its_way(down_s, spread)
    takes_s, limit_s = ways.takes_s(CALM.names), CALM.config.overlap_steps * ways.step_s
    late = [took_s for took_s in takes_s if took_s > 1.03 * limit_s]
    assert len(late) <= 0.07 * len(takes_s), f"{len(late)} of {len(takes_s)} after more than {limit_s:.2f} s"
    assert takes_s[-1] <= 1.1 * limit_s
    assert ways.contributors > 3.3, "and the window is not closed for it"


@pytest.mark.parametrize("jitter_s", [0.0, 0.1])
@pytest.mark.parametrize(("down_s", "spread"), [(0.5, 0.5), (0.95, 0.5), (0.95, 1.0), (1.1, 1.0)])
def test_a_queue_on_a_slow_downlink_drains(down_s: float, spread: float, jitter_s: float) -> None:
    """Requests wait behind versions: two rounds then merge at once, their results share the link, and so it went on.

    Without slowing down for waits 93 % of the values of (0.95, 0.5) came later than tau steps, the last after 4.2 s.
    """
    ways = on_its_way(down_s, spread, jitter_s=jitter_s)
    takes_s, limit_s = ways.takes_s(CALM.names), CALM.config.overlap_steps * ways.step_s
    late = [took_s for took_s in takes_s if took_s > 1.03 * limit_s]
    assert len(late) <= 0.1 * len(takes_s), f"{len(late)} of {len(takes_s)} after more than {limit_s:.2f} s"
    assert takes_s[-1] <= 1.2 * limit_s
    assert ways.contributors > 3.2, "and the window is not closed for it"


def test_a_downlink_that_carries_less_than_a_round_per_step_does_not_fall_behind() -> None:
    """Rounds keep to its pace, so nothing piles up: at 7 s and growing it did."""
    ways = on_its_way(1.1, 0.1)
    assert ways.takes_s(CALM.names)[-1] < 2.6
    assert ways.contributors == pytest.approx(4.0, abs=0.1)


def test_one_slow_downlink_closes_nobody_elses_window() -> None:
    ways = on_its_way(2.5, 0.1, slow=("island-3",))
    others = ways.takes_s(CALM.names[:3])
    assert others[len(others) * 9 // 10] <= 1.3, "as with four fast links"
    assert ways.contributors > 2.9
