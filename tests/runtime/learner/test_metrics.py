"""An island's metrics are means with a bound, and what several islands measured is one record."""

import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from diloco_jax.core.drift import Drift
from diloco_jax.protocol.effects import Merge, Note
from diloco_jax.protocol.messages import METRICS_MAX, OWN_MACHINE, OWN_PROCESS, Metric, MetricsReport, StepReport
from diloco_jax.protocol.watch.alarms import REMEDIES, Alarm
from diloco_jax.protocol.watch.drift import DriftWatch
from diloco_jax.runtime.learner.metrics import NAMES_MAX, IslandMetrics, memory
from diloco_jax.runtime.records.earlier import NOTHING_EARLIER
from diloco_jax.runtime.records.liveness import machine_number, tell_restart
from diloco_jax.runtime.records.telemetry import read_metrics
from diloco_jax.runtime.syncer.watch import REFUSAL_LENGTH_MAX, Watch, merged_metrics

STEPS: list[tuple[Any, ...]] = []


class Notes:
    def on_step(self, *arguments: Any) -> None:
        STEPS.append(arguments)


def test_means_rates_and_callbacks() -> None:
    STEPS.clear()
    metrics = IslandMetrics("a", flops_per_token=1e6, peak_flops=1e9, callbacks={"notes": Notes})
    assert metrics.due(0.0) is None, "there was no step"
    metrics.step(1, {"loss": 3.0, "rare": 5}, 0.5, 100)
    metrics.step(2, {"loss": 2.0}, 1.5, 100)
    told = metrics.due(10.0)
    assert told is not None and told.pop("host_bytes") > 1e6
    rates = {"tokens_per_s": 100.0, "model_flops_per_s": 1e8, "mfu": 0.1}
    assert told == {"loss": 2.5, "rare": 5.0, "step_s": 1.0, **rates}
    metrics.step(3, {"loss": 7.0}, 1.0, 100)
    assert metrics.due(10.9) is None
    assert metrics.due(11.0).items() >= {"loss": 7.0, "step_s": 1.0}.items()  # type: ignore[union-attr]
    metrics.close()
    assert STEPS[0] == ("a", 1, {"loss": 3.0, "rare": 5.0, "step_s": 0.5}) and len(STEPS) == 3


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"x" * 65: 1.0}, "its name has 65 characters, use 1 to 64"),
        ({f"loss_{n}": 1.0 for n in range(NAMES_MAX + 1)}, f"at most {NAMES_MAX} names, use fewer"),
        ({"text": "much", "list": [1.0]}, "it is not a scalar"),
    ],
)
def test_names_are_bounded_and_that_is_told_once(
    bad: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = IslandMetrics("a", flops_per_token=1.0, peak_flops=1.0)
    for number in range(3):
        metrics.step(number, bad, 1.0, 1)
    told = metrics.due(0.0)
    assert told is not None and len(told) <= METRICS_MAX and all(len(name) <= 64 for name in told)
    assert len(caplog.records) == 1 and says in caplog.text


def test_memory_is_that_of_the_fullest_device_where_it_is_known() -> None:
    full, empty = ({"bytes_in_use": n, "peak_bytes_in_use": 2 * n} for n in (9, 4))
    found = memory([SimpleNamespace(memory_stats=lambda stats=stats: stats) for stats in (empty, full)])
    assert (found["device_bytes"], found["device_bytes_peak"]) == (9.0, 18.0)
    assert memory([SimpleNamespace(memory_stats=lambda: None)]).keys() <= {"host_bytes"}


def test_islands_together() -> None:
    values = [{"loss": 1.0, "tokens_per_s": 10.0}, {"loss": 2.0, "tokens_per_s": 30.0, "own": 4.0}]
    assert merged_metrics(values) == {"loss": 1.5, "tokens_per_s": 40.0, "own": 4.0}


def _watch(tmp_path: Any) -> Watch:
    """The reports about a run with incarnation 2 of each island."""
    members = SimpleNamespace(get=lambda name, incarnation: incarnation == 2 or None)
    config = SimpleNamespace(name="run", trackers=(), callbacks=())
    parts: Any = SimpleNamespace(run_dir=tmp_path, machine=SimpleNamespace(membership=members, global_step=5))
    parts.config, parts.stats = config, SimpleNamespace(on_waiting=lambda name, share: None)
    others: Any = (lambda: (), SimpleNamespace(), SimpleNamespace(), SimpleNamespace())
    return Watch(parts, NOTHING_EARLIER, *others)


def test_drift_is_counted_and_recorded_for_each_contribution(tmp_path: Any) -> None:
    watch, drifts = _watch(tmp_path), DriftWatch()
    watch.context.stats.drifts = drifts
    found = {"a": Drift(1.0, None), "b": Drift(1.23456789, 0.0)}
    watch.on_drift(Merge(7, 2, ()), found, 3.0)
    watch._telemetry.flush()
    assert drifts.of("b") == (1.2346, 0.0)
    when = {"kind": "drift", "t": 3.0, "global_step": 7, "fragment_id": 2}
    assert list(read_metrics(tmp_path / "metrics.jsonl")) == [
        when | {"learner": "a", "values": {"drift_norm_ratio": 1.0, "drift_cosine": None}},
        when | {"learner": "b", "values": {"drift_norm_ratio": 1.234568, "drift_cosine": 0.0}},
    ]


def test_another_incarnation_is_not_heard(tmp_path: Any) -> None:
    watch = _watch(tmp_path)
    for incarnation, value in ((1, 1.0), (2, 2.0), (3, 3.0)):
        watch.on_metrics(MetricsReport("a", incarnation, 7, (Metric("loss", value),)), 1.5)
    assert watch._metrics == {"a": {"loss": 2.0}}


@pytest.mark.parametrize(("machine", "told"), [(machine_number(), 1234), (machine_number() + 1, None)])
def test_the_process_of_an_island_is_known_on_its_machine(tmp_path: Any, machine: int, told: int | None) -> None:
    watch = _watch(tmp_path)
    values = (Metric("loss", 1.0), Metric(OWN_PROCESS, 1234.0), Metric(OWN_MACHINE, float(machine)))
    watch.on_metrics(MetricsReport("a", 2, 7, values), 1.5)
    assert (watch._metrics, watch._processes) == ({"a": {"loss": 1.0}}, {"a": told})


def test_the_newest_refusal_of_an_island_is_kept_until_it_joins_and_of_no_stranger(tmp_path: Any) -> None:
    watch = _watch(tmp_path)
    members = watch.context.machine.membership
    members.members, members.bans = {"a": None, "c": None, "x": None}, {"x"}
    # Another process greets with the name of a connected member, which may be lost later for another reason.
    members.connected = lambda: [SimpleNamespace(learner_id="c")]
    watch.context.config.islands = SimpleNamespace(names=("b",))
    watch.context.clock, watch.exposed, watch._time_left = SimpleNamespace(now_s=lambda: 1.0), MagicMock(), MagicMock()
    for name in ("a", "b", "c", "x", "stranger"):
        watch.on_refused(name, "first")
        watch.on_refused(name, "steps\n" + 1000 * "9")
    assert watch._refused == dict.fromkeys("ab", "steps " + (REFUSAL_LENGTH_MAX - 6) * "9")
    watch.on_note(Note("joined", 1, -1, ("a",), "incarnation 2"))
    assert watch._refused.keys() == {"b"}


def test_a_refusal_of_another_process_is_forgotten_when_the_island_trains_on(tmp_path: Any) -> None:
    """Otherwise it would explain a later failure of the island."""
    watch = _watch(tmp_path)
    watch._refused = {"a": "an old incarnation", "b": "steps differ"}
    members = watch.context.machine.membership
    members.members = {"a": SimpleNamespace(past_tokens=0)}  # type: ignore[misc]
    watch.context.stats.on_report = lambda report, now_s: report.learner_id == "a"  # type: ignore[method-assign]
    watch.exposed = SimpleNamespace(on_report=lambda report, now_s: ())  # type: ignore[assignment]
    for name in ("a", "b"):
        watch.on_report(StepReport(name, 2, 1, 10, 0, (), 1.0, 2.0, 0, 0, ()), 1.0)
    assert watch._refused == {"b": "steps differ"}


def test_the_process_of_an_island_that_left_is_forgotten(tmp_path: Any) -> None:
    watch = _watch(tmp_path)
    watch.context.clock = SimpleNamespace(now_s=lambda: 1.0)  # type: ignore[misc]
    watch.exposed = SimpleNamespace(on_note=lambda note: None)  # type: ignore[assignment]
    watch._processes = {"a": 1234, "b": 5678}
    watch.on_note(Note("closed", 5, 0, ("a", "b"), ""))
    assert watch._processes == {"a": 1234, "b": 5678}
    watch.on_note(Note("disconnected", 5, -1, ("a",), "no connection"))
    assert watch._processes == {"b": 5678}


def test_the_alarm_about_an_ended_process_says_what_its_supervisor_does(tmp_path: Any) -> None:
    watch, gone = _watch(tmp_path), Alarm("gone", "a", "a is disconnected: no connection")
    member = SimpleNamespace(since_s=10.0, state="gone")
    watch.context.machine.membership.members = {"a": member}  # type: ignore[misc]
    assert watch._with_restart(gone, 15.0)["remedy"] == REMEDIES["gone"]
    tell_restart(tmp_path, "a", "`diloco train` restarts it by itself")
    assert watch._with_restart(gone, 15.0)["remedy"] == "`diloco train` restarts it by itself"
    assert watch._with_restart(gone._replace(kind="slow"), 15.0)["remedy"] == REMEDIES["slow"]
    path = tmp_path / "health" / "a.restart"
    os.utime(path, (0, path.stat().st_mtime - 60.0))
    assert watch._with_restart(gone, 15.0)["remedy"] == REMEDIES["gone"], "an earlier end of the process"
    assert watch._with_restart(gone, 75.0)["remedy"] != REMEDIES["gone"]
