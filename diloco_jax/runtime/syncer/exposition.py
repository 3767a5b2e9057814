"""Metrics of a run for Prometheus, over HTTP; docs/metrics.md has the table.

The syncer's loop hands over what its status says, and durations as they end. A scrape makes its text of that in a
thread of its own, so the loop never waits for one. Labels are bounded: islands are those that the config names.
"""

import logging
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple
from wsgiref.simple_server import WSGIServer

import prometheus_client as prometheus
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from diloco_jax.protocol.effects import Note
from diloco_jax.protocol.messages import StepReport
from diloco_jax.protocol.watch.alarms import REMEDIES
from diloco_jax.protocol.watch.health import CONDITIONS
from diloco_jax.protocol.watch.stats import WAITING
from diloco_jax.runtime.records.status import EVALUATING
from diloco_jax.runtime.syncer.host_alarms import expiries, newest_snapshot
from diloco_jax.runtime.syncer.parts import Parts
from diloco_jax.runtime.syncer.sharded_listener import patiently
from diloco_jax.runtime.syncer.snapshots import SnapshotWriter
from diloco_jax.transport.calls import cannot_listen
from diloco_jax.transport.link import split_address

ISLANDS_MAX = 256  # that have metrics of their own
STATES = ("starting", "running", EVALUATING, "complete", "stopped")
ABSENT = "absent"  # condition of an island that nobody has seen yet
PHASES = ("quorum", "grace", "pull", "merge")
BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0)  # in seconds
EXPIRY = "diloco_certificate_expiry_timestamp_seconds"
ISLAND = (  # name, help, and the key in an island's row of the status, or among what it measures
    ("diloco_island_condition", "1 for the condition that the island is in, else 0", "condition"),
    ("diloco_island_steps_total", "inner steps", "local_step"),
    ("diloco_island_tokens_total", "tokens trained on", "tokens"),
    ("diloco_island_restarts_total", "starts after the first one", "restarts"),
    ("diloco_island_step_seconds", "seconds of an inner step, moving average", "step_s"),
    ("diloco_island_loss", "training loss of the newest step; may be NaN or infinite", "loss"),
    ("diloco_island_participation_ratio", "rounds in which it was merged, over rounds merged", "participation"),
    ("diloco_island_last_merged_round", "global step of the newest round that merged it", "last_merged_round"),
    ("diloco_island_staleness_rounds", "rounds closed since the newest that it had heard of", "staleness"),
    ("diloco_island_broadcast_seconds", "way of a new version to it, moving average, at most tau steps", "broadcast_s"),
    ("diloco_island_gradient_norm", "norm of its gradient before clipping", "grad_norm"),
    ("diloco_island_learning_rate", "learning rate of its inner optimizer", "learning_rate"),
    ("diloco_island_data_wait_ratio", "share of the time in steps for which it waited for data", WAITING),
    ("diloco_island_mfu_ratio", "model FLOPs utilisation, if the peak of its devices is known", "mfu"),
    ("diloco_island_device_memory_bytes", "memory in use on its fullest device", "device_bytes"),
    ("diloco_island_host_memory_bytes", "memory of its process; of several, the leader's", "host_bytes"),
)
ROUND = ("diloco_round_phase_seconds", "a round's wait for its quorum, its grace window, and its pull and merge")
BROADCAST = ("diloco_broadcast_seconds", "from a merge until an island has read the new version")

log = logging.getLogger(__name__)


class Latest(NamedTuple):
    """The facts that the loop told last."""

    unix_s: float
    status: Mapping[str, Any]
    summary: Mapping[str, Any]
    merged: tuple[int, int]  # rounds, and values in them
    abandoned: int
    rejected: Mapping[str, float]


class Exposition(Collector):
    """Metrics of one process of a syncer, and the server that tells them at `url`; empty if nowhere."""

    def __init__(self, parts: Parts, writer: SnapshotWriter) -> None:
        self._parts = parts
        self._writer = writer
        self._names = parts.config.islands.names[:ISLANDS_MAX]
        self._moment: Latest | None = None
        self._abandoned = 0
        self._rejected: Counter[str] = Counter()
        prometheus.disable_created_metrics()  # series that nobody asks for
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
        """Listen at `syncer.metrics`, if it is set, once a process before this one has left the port.

        ValueError if that takes longer than `patience_s`, or this machine has no such address.
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
        """Take the durations of broadcasts from a report that its member is about to get; return versions with them."""
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
        """Take what came out of a merge that the machine is about to hear of."""
        this = self._parts.machine.rounds.flying[global_step]
        self._observe(2, this.closed_s, this.pulled_s, now_s)
        self._rejected.update(list(left_out))

    def _observe(self, first: int, *times_s: float) -> None:
        for phase, (start_s, end_s) in zip(self._phases[first:], pairwise(times_s), strict=False):
            phase.observe(max(0.0, end_s - start_s))

    def tell(self, status: Mapping[str, Any], now_s: float) -> None:
        if self._server is not None:
            progress, rejected = self._parts.machine.progress, {name: self._rejected[name] for name in self._names}
            summary = self._parts.stats.summary(status["wire"], now_s)
            merged = progress.merged_rounds, progress.merged_parts
            self._moment = Latest(time.time(), status, summary, merged, self._abandoned, rejected)

    def collect(self) -> Iterator[Metric]:
        now = self._moment
        if now is None:
            return
        for name, words, value, *label in self._of_run(now):
            values = {(key,): each for key, each in value.items()} if isinstance(value, Mapping) else {(): value}
            yield _metric(name, words, label, values)
        rows = {row["learner"]: {**row["metrics"], **row} for row in now.status["learners"]}
        for name, words, key in ISLAND:
            found = {each: rows.get(each, {"condition": ABSENT}).get(key) for each in self._names}
            if key == "condition":
                several = {(each, one): float(one == found[each]) for each in found for one in (*CONDITIONS, ABSENT)}
                yield _metric(name, words, ("island", key), several)
            else:
                yield _metric(name, words, ("island",), {(each,): value for each, value in found.items()})

    def _of_run(self, now: Latest) -> list[tuple[Any, ...]]:
        """Return name, help and value of each metric of the run; or values, by those of the label that follows."""
        status, summary, config, writer = now.status, now.summary, self._parts.config, self._writer
        tau, every = config.protocol.overlap_steps, config.protocol.snapshot_every
        disk, snapshot = shutil.disk_usage(self._parts.run_dir), newest_snapshot(self._parts.run_dir)
        newest, newest_s = snapshot[:2] if snapshot is not None else (None, None)
        alarms = {kind: sum(each["kind"] == kind for each in status["alarms"]) for kind in REMEDIES}
        state = {each: float(each == status["state"]) for each in STATES}
        unlisted = sum(each["learner"] not in self._names for each in status["learners"])
        return [
            ("diloco_run_state", "1 for the state that the run is in, else 0", state, "state"),
            ("diloco_status_timestamp_seconds", "when the syncer's loop last told of the run, since 1970", now.unix_s),
            ("diloco_global_step", "rounds that have closed", status["global_step"]),
            ("diloco_expected_global_steps", "rounds of the whole run", status["total_steps"]),
            ("diloco_overlap_steps", "inner steps that a round may take", tau),
            ("diloco_rounds_merged_total", "rounds that made a new version of a fragment", now.merged[0]),
            ("diloco_rounds_abandoned_total", "rounds without a usable value, in this process", now.abandoned),
            ("diloco_values_merged_total", "values in merged rounds: per round, its contributors", now.merged[1]),
            ("diloco_values_rejected_total", "values that merges left out, in this process", now.rejected, "island"),
            ("diloco_tokens_total", "tokens trained on", status["tokens"]),
            ("diloco_tokens_merged_total", "tokens merged, each once", summary["merged_tokens"]),
            ("diloco_samples", "samples that were leased, and their fates", summary["samples"], "fate"),
            ("diloco_received_bytes_total", "bytes from islands", status["wire"]["up_bytes"]),
            ("diloco_sent_bytes_total", "bytes to islands", status["wire"]["down_bytes"]),
            ("diloco_evaluation_loss", "loss of the newest evaluation", status["eval_loss"]),
            ("diloco_goodput_ratio", "goodput since the run began", summary["goodput"]),
            ("diloco_uptime_ratio", "uptime since the run began", summary["uptime"]),
            ("diloco_alarms", "alarms of this moment", alarms, "kind"),
            ("diloco_unlisted_islands", f"islands of other names than the config's first {ISLANDS_MAX}", unlisted),
            ("diloco_snapshot_interval_rounds", "rounds between two snapshots; 0: only the last is saved", every),
            ("diloco_snapshot_global_step", "global step of the newest snapshot", newest),
            ("diloco_snapshot_timestamp_seconds", "when the newest snapshot was written, since 1970", newest_s),
            ("diloco_snapshot_duration_seconds", "how long writing the newest snapshot took", writer.took_s),
            ("diloco_snapshot_failures_total", "snapshots that this process could not write", writer.failures),
            ("diloco_disk_free_bytes", "free space where the run's folder is", disk.free),
            ("diloco_disk_size_bytes", "size of the disk with the run's folder", disk.total),
            (EXPIRY, "when the syncer's certificates expire, since 1970", expiries(config.transport), "certificate"),
        ]


def _metric(name: str, words: str, labels: Sequence[str], values: Mapping[Any, float | None]) -> Metric:
    """Return a metric with a sample for each value that is known; the keys are tuples of the labels' values."""
    metric = Metric(name.removesuffix("_total"), words, "counter" if name.endswith("_total") else "gauge")
    for key, value in values.items():
        if value is not None:
            metric.add_sample(name, dict(zip(labels, key, strict=True)), value)
    return metric
