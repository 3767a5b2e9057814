"""Metrics of a run for Prometheus, over HTTP; docs/metrics.md has the table.

The syncer's loop hands over its status, and each duration when it ends. A separate thread answers scrapes from that, so
the loop never waits for a scrape. Labels are bounded: islands are the islands that the config names.
"""

import logging
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any, Literal, NamedTuple
from wsgiref.simple_server import WSGIServer

import prometheus_client as prometheus
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from diloco_jax.protocol.effects import Note
from diloco_jax.protocol.messages import StepReport
from diloco_jax.protocol.watch.alarms import REMEDIES
from diloco_jax.protocol.watch.health import CONDITIONS
from diloco_jax.runtime.records.status import EVALUATING
from diloco_jax.runtime.syncer.host_alarms import expiries, newest_snapshot
from diloco_jax.runtime.syncer.parts import Parts
from diloco_jax.runtime.syncer.sharded_listener import patiently
from diloco_jax.runtime.syncer.snapshots import SnapshotWriter
from diloco_jax.transport.link import split_address
from diloco_jax.transport.session.calls import cannot_listen

# Only so many islands have separate metrics.
ISLANDS_MAX = 256
STATES = ("starting", "running", EVALUATING, "complete", "stopped")
# The condition of an island before its first hello.
ABSENT = "absent"
PHASES = ("quorum", "grace", "pull", "merge")
BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0)  # in seconds
ROUND = ("diloco_round_phase_seconds", "a round's wait for its quorum, its grace window, and its pull and merge")
BROADCAST = ("diloco_broadcast_seconds", "from a merge until an island has read the new version")

log = logging.getLogger(__name__)


class MetricRow(NamedTuple):
    """A metric: how it is described to Prometheus, and the function that reads its value."""

    name: str
    kind: Literal["counter", "gauge"]
    unit: str
    help: str
    value: Callable[[Mapping[str, Any]], Any]
    # Label of several values; "" for a metric with one value.
    label: str = ""


def _if_known(key: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda row: row.get(key)


# Each getter reads the newest status of the loop with the additions of `Exposition._found`.
RUN_METRICS = (
    MetricRow(
        "diloco_run_state", "gauge", "", "1 for the state that the run is in, else 0", itemgetter("states"), "state"
    ),
    MetricRow(
        "diloco_status_timestamp_seconds",
        "gauge",
        "seconds",
        "when the syncer's loop last told of the run, since 1970",
        itemgetter("unix_s"),
    ),
    MetricRow("diloco_global_step", "gauge", "", "rounds that have closed", itemgetter("global_step")),
    MetricRow("diloco_expected_global_steps", "gauge", "steps", "rounds of the whole run", itemgetter("total_steps")),
    MetricRow(
        "diloco_overlap_steps", "gauge", "steps", "inner steps that a round may take", itemgetter("overlap_steps")
    ),
    MetricRow(
        "diloco_rounds_merged_total",
        "counter",
        "rounds",
        "rounds that made a new version of a fragment",
        itemgetter("merged_rounds"),
    ),
    MetricRow(
        "diloco_rounds_abandoned_total",
        "counter",
        "rounds",
        "rounds without a usable value, in this process",
        itemgetter("abandoned"),
    ),
    MetricRow(
        "diloco_values_merged_total",
        "counter",
        "",
        "values in merged rounds: per round, its contributors",
        itemgetter("merged_parts"),
    ),
    MetricRow(
        "diloco_values_rejected_total",
        "counter",
        "",
        "values that merges left out, in this process",
        itemgetter("rejected"),
        "island",
    ),
    MetricRow("diloco_tokens_total", "counter", "tokens", "tokens trained on", itemgetter("tokens")),
    MetricRow(
        "diloco_tokens_merged_total", "counter", "tokens", "tokens merged, each once", itemgetter("merged_tokens")
    ),
    MetricRow(
        "diloco_samples", "gauge", "samples", "samples that were leased, and their fates", itemgetter("samples"), "fate"
    ),
    MetricRow("diloco_received_bytes_total", "counter", "bytes", "bytes from islands", itemgetter("up_bytes")),
    MetricRow("diloco_sent_bytes_total", "counter", "bytes", "bytes to islands", itemgetter("down_bytes")),
    MetricRow("diloco_evaluation_loss", "gauge", "", "loss of the newest evaluation", itemgetter("eval_loss")),
    MetricRow("diloco_goodput_ratio", "gauge", "ratio", "goodput since the run began", itemgetter("goodput")),
    MetricRow("diloco_uptime_ratio", "gauge", "ratio", "uptime since the run began", itemgetter("uptime")),
    MetricRow("diloco_alarms", "gauge", "", "alarms of this moment", itemgetter("alarms_by_kind"), "kind"),
    MetricRow(
        "diloco_unlisted_islands",
        "gauge",
        "islands",
        "islands of other names than the config's first 256",
        itemgetter("unlisted"),
    ),
    MetricRow(
        "diloco_snapshot_interval_rounds",
        "gauge",
        "rounds",
        "rounds between two snapshots; 0: only the last is saved",
        itemgetter("snapshot_every"),
    ),
    MetricRow(
        "diloco_snapshot_global_step", "gauge", "", "global step of the newest snapshot", itemgetter("snapshot_step")
    ),
    MetricRow(
        "diloco_snapshot_timestamp_seconds",
        "gauge",
        "seconds",
        "when the newest snapshot was written, since 1970",
        itemgetter("snapshot_unix_s"),
    ),
    MetricRow(
        "diloco_snapshot_duration_seconds",
        "gauge",
        "seconds",
        "how long writing the newest snapshot took",
        itemgetter("snapshot_took_s"),
    ),
    MetricRow(
        "diloco_snapshot_failures_total",
        "counter",
        "",
        "snapshots that this process could not write",
        itemgetter("snapshot_failures"),
    ),
    MetricRow(
        "diloco_disk_free_bytes", "gauge", "bytes", "free space where the run's folder is", itemgetter("disk_free")
    ),
    MetricRow(
        "diloco_disk_size_bytes", "gauge", "bytes", "size of the disk with the run's folder", itemgetter("disk_size")
    ),
    MetricRow(
        "diloco_certificate_expiry_timestamp_seconds",
        "gauge",
        "seconds",
        "when the syncer's certificates expire, since 1970",
        itemgetter("expiries"),
        "certificate",
    ),
)
# Each getter reads an island's row of the status with the island's own metrics. All of them have the label `island`.
ISLAND_METRICS = (
    MetricRow(
        "diloco_island_condition",
        "gauge",
        "",
        "1 for the condition that the island is in, else 0",
        _if_known("condition"),
        "condition",
    ),
    MetricRow("diloco_island_steps_total", "counter", "steps", "inner steps", _if_known("local_step")),
    MetricRow("diloco_island_tokens_total", "counter", "tokens", "tokens trained on", _if_known("tokens")),
    MetricRow("diloco_island_restarts_total", "counter", "", "starts after the first one", _if_known("restarts")),
    MetricRow(
        "diloco_island_step_seconds",
        "gauge",
        "seconds",
        "seconds of an inner step, moving average",
        _if_known("step_s"),
    ),
    MetricRow(
        "diloco_island_loss", "gauge", "", "training loss of the newest step; may be NaN or infinite", _if_known("loss")
    ),
    MetricRow(
        "diloco_island_participation_ratio",
        "gauge",
        "ratio",
        "rounds that merged it, over rounds merged",
        _if_known("participation"),
    ),
    MetricRow(
        "diloco_island_last_merged_round",
        "gauge",
        "",
        "global step of the newest round that merged it",
        _if_known("last_merged_round"),
    ),
    MetricRow(
        "diloco_island_staleness_rounds",
        "gauge",
        "rounds",
        "rounds closed since the newest that it had heard of",
        _if_known("staleness"),
    ),
    MetricRow(
        "diloco_island_broadcast_seconds",
        "gauge",
        "seconds",
        "way of a new version to it, moving average, at most tau steps",
        _if_known("broadcast_s"),
    ),
    MetricRow(
        "diloco_island_gradient_norm", "gauge", "", "norm of its gradient before clipping", _if_known("grad_norm")
    ),
    MetricRow(
        "diloco_island_learning_rate", "gauge", "", "learning rate of its inner optimizer", _if_known("learning_rate")
    ),
    MetricRow(
        "diloco_island_data_wait_ratio",
        "gauge",
        "ratio",
        "share of the time in steps that it waited for data",
        _if_known("waiting_for_data"),
    ),
    MetricRow(
        "diloco_island_mfu_ratio",
        "gauge",
        "ratio",
        "model FLOPs utilisation, if the peak of its devices is known",
        _if_known("mfu"),
    ),
    MetricRow(
        "diloco_island_device_memory_bytes",
        "gauge",
        "bytes",
        "memory in use on its fullest device",
        _if_known("device_bytes"),
    ),
    MetricRow(
        "diloco_island_host_memory_bytes",
        "gauge",
        "bytes",
        "memory of its process; of several, the leader's",
        _if_known("host_bytes"),
    ),
)


class Exposition(Collector):
    """Metrics of one process of a syncer, and their server at `url`; "" without a server."""

    def __init__(self, parts: Parts, writer: SnapshotWriter) -> None:
        self._parts = parts
        self._writer = writer
        self._names = parts.config.islands.names[:ISLANDS_MAX]
        # The newest status of the loop.
        self._told: dict[str, Any] = {}
        self._abandoned = 0
        self._rejected: Counter[str] = Counter()
        # The series of creation times are not used.
        prometheus.disable_created_metrics()
        self._registry = registry = prometheus.CollectorRegistry()
        for collector in (prometheus.ProcessCollector, prometheus.PlatformCollector, prometheus.GCCollector):
            collector(registry=registry)
        phases = prometheus.Histogram(*ROUND, ["phase"], buckets=BUCKETS, registry=registry)
        self._phases = [phases.labels(phase) for phase in PHASES]
        self._broadcast = prometheus.Histogram(*BROADCAST, buckets=BUCKETS, registry=registry)
        registry.register(self)
        self._server: WSGIServer | None = None
        self.url = ""

    def open(self, patience_s: float, stop: threading.Event) -> None:
        """Listen at `syncer.metrics`, if it is set, as soon as an earlier process has freed the port.

        ValueError if that takes longer than `patience_s`, or if this machine does not have the address.
        """
        if address := self._parts.config.syncer.metrics:
            self._server = patiently(lambda: self._listen(address), patience_s, stop)
            self.url = f"http://{address.rpartition(':')[0]}:{self._server.server_port}/metrics"
            log.info(f"metrics at {self.url}")

    def _listen(self, address: str) -> WSGIServer:
        host, port = split_address(address)
        try:
            return prometheus.start_http_server(port, host, self._registry)[0]
        except OSError as error:
            raise cannot_listen(address, error.strerror, "syncer.metrics") from None

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def on_report(self, report: StepReport, now_s: float) -> list[tuple[int, float]]:
        """Measure broadcasts from a report before the machine gets it; return (version, seconds) of each."""
        took = []
        sent = self._parts.machine.membership.members[report.learner_id].down.sent
        for fragment_id, version, ago_s in report.arrived:
            way = sent.get(fragment_id)
            if way is not None and way.version == version and way.broadcast_s is not None:
                took.append((version, max(0.0, now_s - max(0.0, ago_s) - way.broadcast_s)))
                self._broadcast.observe(took[-1][1])
        return took

    def on_note(self, note: Note) -> None:
        this = self._parts.machine.rounds.flying.get(note.global_step)
        if note.kind == "closed" and this is not None:
            self._observe(0, this.opened_s, this.met_s, this.closed_s)
        self._abandoned += note.kind == "abandoned"

    def on_merged(self, global_step: int, left_out: Iterable[str], now_s: float) -> None:
        """Measure a merge before the machine gets its result."""
        this = self._parts.machine.rounds.flying[global_step]
        self._observe(2, this.closed_s, this.pulled_s, now_s)
        self._rejected.update(list(left_out))

    def _observe(self, first: int, *times_s: float) -> None:
        for phase, (start_s, end_s) in zip(self._phases[first:], pairwise(times_s), strict=False):
            phase.observe(max(0.0, end_s - start_s))

    def tell(self, status: Mapping[str, Any], now_s: float) -> None:
        if self._server is not None:
            progress = self._parts.machine.progress
            self._told = {
                **self._parts.stats.summary(status["wire"], now_s),
                **status,
                "unix_s": time.time(),
                "merged_rounds": progress.merged_rounds,
                "merged_parts": progress.merged_parts,
                "abandoned": self._abandoned,
                "rejected": {name: self._rejected[name] for name in self._names},
            }

    def collect(self) -> Iterator[Metric]:
        if not self._told:
            return
        told = self._told | self._found(self._told)
        for row in RUN_METRICS:
            value = row.value(told)
            values = {(key,): each for key, each in value.items()} if isinstance(value, Mapping) else {(): value}
            yield _metric(row, [row.label] if row.label else [], values)
        rows = {each["learner"]: {**each["metrics"], **each} for each in told["learners"]}
        for row in ISLAND_METRICS:
            found = {each: row.value(rows.get(each, {"condition": ABSENT})) for each in self._names}
            if row.label:
                several = {(each, one): float(one == found[each]) for each in found for one in (*CONDITIONS, ABSENT)}
                yield _metric(row, ["island", row.label], several)
            else:
                yield _metric(row, ["island"], {(each,): value for each, value in found.items()})

    def _found(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """Return further values: derived from the status, the settings, the disk and the writer of snapshots."""
        config, writer = self._parts.config, self._writer
        disk, snapshot = shutil.disk_usage(self._parts.run_dir), newest_snapshot(self._parts.run_dir)
        newest, newest_s = snapshot[:2] if snapshot is not None else (None, None)
        return {
            **told["wire"],
            "states": {each: float(each == told["state"]) for each in STATES},
            "alarms_by_kind": {kind: sum(each["kind"] == kind for each in told["alarms"]) for kind in REMEDIES},
            "unlisted": sum(each["learner"] not in self._names for each in told["learners"]),
            "overlap_steps": config.protocol.overlap_steps,
            "snapshot_every": config.protocol.snapshot_every,
            "snapshot_step": newest,
            "snapshot_unix_s": newest_s,
            "snapshot_took_s": writer.took_s,
            "snapshot_failures": writer.failures,
            "disk_free": disk.free,
            "disk_size": disk.total,
            "expiries": expiries(config.transport),
        }


def _metric(row: MetricRow, labels: Sequence[str], values: Mapping[Any, float | None]) -> Metric:
    """Return a metric with a sample for each known value; keys are tuples of the labels' values."""
    metric = Metric(row.name.removesuffix("_total"), row.help, row.kind)
    for key, value in values.items():
        if value is not None:
            metric.add_sample(row.name, dict(zip(labels, key, strict=True)), value)
    return metric
