"""Metrics of a run for Prometheus, over HTTP; docs/metrics.md has the table.

The syncer's loop hands over what its status says, and durations as they end. A scrape makes its text of that in a
thread of its own, so the loop never waits for one. Labels are bounded: islands are those that the config names.
"""

import logging
import shutil
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
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
from diloco_jax.transport.calls import cannot_listen
from diloco_jax.transport.link import split_address

ISLANDS_MAX = 256  # that have metrics of their own
STATES = ("starting", "running", EVALUATING, "complete", "stopped")
ABSENT = "absent"  # condition of an island that nobody has seen yet
PHASES = ("quorum", "grace", "pull", "merge")
BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0)  # in seconds
METRICS = tomllib.loads(Path(__file__).with_name("metrics.toml").read_text("utf-8"))  # each with its help and its key
ROUND = ("diloco_round_phase_seconds", "a round's wait for its quorum, its grace window, and its pull and merge")
BROADCAST = ("diloco_broadcast_seconds", "from a merge until an island has read the new version")

log = logging.getLogger(__name__)


class Exposition(Collector):
    """Metrics of one process of a syncer, and the server that tells them at `url`; empty if nowhere."""

    def __init__(self, parts: Parts, writer: SnapshotWriter) -> None:
        self._parts = parts
        self._writer = writer
        self._names = parts.config.islands.names[:ISLANDS_MAX]
        self._told: dict[str, Any] = {}  # what the loop said last
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
        for name, (words, key, *label) in METRICS["run"].items():
            value = told[key]
            values = {(key,): each for key, each in value.items()} if isinstance(value, Mapping) else {(): value}
            yield _metric(name, words, label, values)
        rows = {row["learner"]: {**row["metrics"], **row} for row in told["learners"]}
        for name, (words, key) in METRICS["island"].items():
            found = {each: rows.get(each, {"condition": ABSENT}).get(key) for each in self._names}
            if key == "condition":
                several = {(each, one): float(one == found[each]) for each in found for one in (*CONDITIONS, ABSENT)}
                yield _metric(name, words, ("island", key), several)
            else:
                yield _metric(name, words, ("island",), {(each,): value for each, value in found.items()})

    def _found(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the loop need not tell: from its words, the settings, the disk, and who writes snapshots."""
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


def _metric(name: str, words: str, labels: Sequence[str], values: Mapping[Any, float | None]) -> Metric:
    """Return a metric with a sample for each value that is known; the keys are tuples of the labels' values."""
    metric = Metric(name.removesuffix("_total"), words, "counter" if name.endswith("_total") else "gauge")
    for key, value in values.items():
        if value is not None:
            metric.add_sample(name, dict(zip(labels, key, strict=True)), value)
    return metric
