"""The metrics of a run for Prometheus, over HTTP; docs/metrics.md lists them.

The syncer's loop passes its newest status, and durations as they end. A scrape turns these into text in a separate
thread, so the loop never waits for a scrape. Labels are bounded: islands are those that the config names. The table of
figures (runtime/figures) has the series of the run and of its islands; those of the syncer's process are here.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import prometheus_client as prometheus
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from diloco_jax.protocol.corpora import RUN
from diloco_jax.protocol.effects import Note
from diloco_jax.protocol.messages import StepReport
from diloco_jax.protocol.watch.alarms import REMEDIES
from diloco_jax.protocol.watch.terms import CONDITIONS
from diloco_jax.runtime.figures import table
from diloco_jax.runtime.figures.facts import IslandFacts, RunFacts
from diloco_jax.runtime.figures.table import Series
from diloco_jax.runtime.records.status import EVALUATING
from diloco_jax.runtime.syncer.context import SyncerContext
from diloco_jax.runtime.syncer.listening import patiently
from diloco_jax.runtime.syncer.machine_alarms import expiries, newest_snapshot
from diloco_jax.runtime.syncer.snapshots import SnapshotWriter
from diloco_jax.transport.endpoints.web import LimitedHandler, WebServer

# Connections of scrapers at the same time.
SCRAPERS_MAX = 16
# Number of islands that have separate metrics.
ISLANDS_MAX = 256
STATES = ("starting", "running", EVALUATING, "complete", "stopped")
# Condition of an island that has not connected yet.
ABSENT = "absent"
PHASES = ("quorum", "grace", "pull", "merge")
BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0)  # seconds
ROUND = ("diloco_round_phase_seconds", "a round's wait for its quorum, its grace window, and its pull and merge")
BROADCAST = ("diloco_broadcast_seconds", "from a merge until an island has read the new version")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """Facts about the syncer's process and its machine, which only Prometheus gets.

    Attributes:
        unix_s: time of the status, in seconds since 1970.
        states: 1 for the state of the run, 0 for the others.
        samples: samples that were leased, and their fates.
        epochs: epochs of each corpus that were leased, if islands have their own.
        losses: newest held-out loss on each of these corpora.
        rejected: values that merges of this process left out, by island.
        alarms: number of standing alarms, by kind.
        least: islands.least.
        unlisted: islands that have no separate metrics.
        snapshot_took_s: how long the newest snapshot took to write.
        expiries: ends of certificates, in seconds since 1970, by certificate.
    """

    unix_s: float
    states: Mapping[str, float]
    overlap_steps: int
    abandoned: int
    samples: Mapping[str, float]
    epochs: Mapping[str, float | None]
    losses: Mapping[str, float | None]
    rejected: Mapping[str, float]
    alarms: Mapping[str, float]
    least: int
    unlisted: int
    snapshot_every: int
    snapshot_step: int | None
    snapshot_unix_s: float | None
    snapshot_took_s: float | None
    snapshot_failures: int
    disk_free: int
    disk_size: int
    expiries: Mapping[str, float]


class ProcessRow(NamedTuple):
    """A series about the syncer's process, and the function that computes its value, or its values by label."""

    series: Series
    value: Callable[[ProcessFacts], float | Mapping[str, float | None] | None]


PROCESS_ROWS = (
    ProcessRow(
        Series("diloco_run_state", "gauge", "", "1 for the state that the run is in, else 0", "state"),
        lambda facts: facts.states,
    ),
    ProcessRow(
        Series(
            "diloco_status_timestamp_seconds",
            "gauge",
            "seconds",
            "when the syncer's loop last told of the run, since 1970",
        ),
        lambda facts: facts.unix_s,
    ),
    ProcessRow(
        Series("diloco_overlap_steps", "gauge", "steps", "inner steps that a round may take"),
        lambda facts: facts.overlap_steps,
    ),
    ProcessRow(
        Series("diloco_rounds_abandoned_total", "counter", "rounds", "rounds without a usable value, in this process"),
        lambda facts: facts.abandoned,
    ),
    ProcessRow(
        Series("diloco_samples", "gauge", "samples", "samples that were leased, and their fates", "fate"),
        lambda facts: facts.samples,
    ),
    ProcessRow(
        Series("diloco_corpus_epochs", "gauge", "", "epochs of each separate corpus", "corpus"),
        lambda facts: facts.epochs,
    ),
    ProcessRow(
        Series("diloco_corpus_loss", "gauge", "", "held-out loss on each separate corpus", "corpus"),
        lambda facts: facts.losses,
    ),
    ProcessRow(
        Series("diloco_values_rejected_total", "counter", "", "values that merges left out, in this process", "island"),
        lambda facts: facts.rejected,
    ),
    ProcessRow(Series("diloco_alarms", "gauge", "", "alarms of this moment", "kind"), lambda facts: facts.alarms),
    ProcessRow(
        Series("diloco_least_islands", "gauge", "islands", "islands that the run needs; 0: all of them"),
        lambda facts: facts.least,
    ),
    ProcessRow(
        Series(
            "diloco_unlisted_islands",
            "gauge",
            "islands",
            "islands of other names than the config's first 256",
        ),
        lambda facts: facts.unlisted,
    ),
    ProcessRow(
        Series(
            "diloco_snapshot_interval_rounds",
            "gauge",
            "rounds",
            "rounds between two snapshots; 0: only the last is saved",
        ),
        lambda facts: facts.snapshot_every,
    ),
    ProcessRow(
        Series("diloco_snapshot_global_step", "gauge", "", "global step of the newest snapshot"),
        lambda facts: facts.snapshot_step,
    ),
    ProcessRow(
        Series(
            "diloco_snapshot_timestamp_seconds",
            "gauge",
            "seconds",
            "when the newest snapshot was written, since 1970",
        ),
        lambda facts: facts.snapshot_unix_s,
    ),
    ProcessRow(
        Series(
            "diloco_snapshot_duration_seconds",
            "gauge",
            "seconds",
            "how long writing the newest snapshot took",
        ),
        lambda facts: facts.snapshot_took_s,
    ),
    ProcessRow(
        Series("diloco_snapshot_failures_total", "counter", "", "snapshots that this process could not write"),
        lambda facts: facts.snapshot_failures,
    ),
    ProcessRow(
        Series("diloco_disk_free_bytes", "gauge", "bytes", "free space where the run's folder is"),
        lambda facts: facts.disk_free,
    ),
    ProcessRow(
        Series("diloco_disk_size_bytes", "gauge", "bytes", "size of the disk with the run's folder"),
        lambda facts: facts.disk_size,
    ),
    ProcessRow(
        Series(
            "diloco_certificate_expiry_timestamp_seconds",
            "gauge",
            "seconds",
            "when the syncer's certificates expire, since 1970",
            "certificate",
        ),
        lambda facts: facts.expiries,
    ),
)
CONDITION = Series(
    "diloco_island_condition", "gauge", "", "1 for the condition that the island is in, else 0", "condition"
)


def all_series() -> Iterator[Series]:
    """Yield every series but the two histograms."""
    yield from (row.series for row in PROCESS_ROWS)
    yield CONDITION
    shown = [figure.series for figure in table.RUN_FIGURES] + [figure.series for figure in table.ISLAND_FIGURES]
    yield from (series for series in shown if series is not None)


class _Published(NamedTuple):
    """The newest status with what was counted until then."""

    status: Mapping[str, Any]
    facts: RunFacts
    unix_s: float
    abandoned: int
    rejected: Counter[str]


class Exposition(Collector):
    """The metrics of a syncer's process, and the server that answers scrapes at `url`; "" if there is no server."""

    def __init__(self, context: SyncerContext, writer: SnapshotWriter) -> None:
        self._context = context
        self._writer = writer
        self._names = context.config.islands.names[:ISLANDS_MAX]
        self._published: _Published | None = None
        self._abandoned = 0
        self._rejected: Counter[str] = Counter()
        # Nobody scrapes the times when series were created.
        prometheus.disable_created_metrics()
        self._registry = registry = prometheus.CollectorRegistry()
        for collector in (prometheus.ProcessCollector, prometheus.PlatformCollector, prometheus.GCCollector):
            collector(registry=registry)
        phases = prometheus.Histogram(*ROUND, ["phase"], buckets=BUCKETS, registry=registry)
        self._phases = [phases.labels(phase) for phase in PHASES]
        self._broadcast = prometheus.Histogram(*BROADCAST, buckets=BUCKETS, registry=registry)
        registry.register(self)
        self._server: WebServer | None = None
        self.url = ""

    def open(self, patience_s: float, stop: threading.Event) -> None:
        """Listen at `syncer.metrics` if it is set, as soon as an earlier process has released the port.

        Raises:
            ValueError: the port stays taken for longer than `patience_s`, or this machine has no such address.
        """
        if address := self._context.config.syncer.metrics:
            self._server = patiently(lambda: self._listen(address), patience_s, stop)
            threading.Thread(target=self._server.serve_forever, name="diloco-metrics", daemon=True).start()
            self.url = f"http://{address.rpartition(':')[0]}:{self._server.server_port}/metrics"
            log.info(f"metrics at {self.url}")

    def _listen(self, address: str) -> WebServer:
        answers = prometheus.MetricsHandler.factory(self._registry)
        handler: type[LimitedHandler] = type("Scrape", (LimitedHandler, answers), {})
        return WebServer(address, handler, setting="syncer.metrics", places=SCRAPERS_MAX)

    def close(self) -> None:
        """Stop the server."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def on_report(self, report: StepReport, now_s: float) -> list[tuple[int, float]]:
        """Observe the broadcasts that a report confirms, before the machine takes it; return versions and seconds."""
        took = []
        sent = self._context.machine.membership.members[report.learner_id].down.sent
        for fragment_id, version, ago_s in report.arrived:
            way = sent.get(fragment_id)
            if way is not None and way.version == version and way.broadcast_s is not None:
                took.append((version, max(0.0, now_s - max(0.0, ago_s) - way.broadcast_s)))
                self._broadcast.observe(took[-1][1])
        return took

    def on_note(self, note: Note) -> None:
        """Observe how long a round waited when it closes, and count abandoned rounds."""
        this = self._context.machine.rounds.flying.get(note.global_step)
        if note.kind == "closed" and this is not None:
            self._observe(0, this.opened_s, this.met_s, this.closed_s)
        self._abandoned += note.kind == "abandoned"

    def on_merged(self, global_step: int, excluded: Iterable[str], now_s: float) -> None:
        """Observe a merge and count the values that it left out, before the machine takes its result."""
        this = self._context.machine.rounds.flying[global_step]
        self._observe(2, this.closed_s, this.pulled_s, now_s)
        self._rejected.update(list(excluded))

    def _observe(self, first: int, *times_s: float) -> None:
        for phase, (start_s, end_s) in zip(self._phases[first:], pairwise(times_s), strict=False):
            phase.observe(max(0.0, end_s - start_s))

    def tell(self, status: Mapping[str, Any], now_s: float) -> None:
        """Take the newest status for the scrapes that follow."""
        if self._server is not None:
            progress = self._context.machine.progress
            merged = {"merged_rounds": progress.merged_rounds, "merged_parts": progress.merged_parts}
            facts = RunFacts.of(self._context.stats.summary(status["wire"], now_s), status, merged)
            self._published = _Published(status, facts, time.time(), self._abandoned, Counter(self._rejected))

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of one scrape."""
        if self._published is None:
            return
        process = self._process_facts(self._published)
        for row in PROCESS_ROWS:
            value = row.value(process)
            values = {(key,): each for key, each in value.items()} if isinstance(value, Mapping) else {(): value}
            yield _metric(row.series, [row.series.label] * bool(row.series.label), values)
        run = self._published.facts
        for figure in table.RUN_FIGURES:
            if figure.series is not None:
                yield _metric(figure.series, [], {(): figure.value(run)})
        islands = {island.learner: island for island in run.islands}
        listed = [islands.get(name, IslandFacts(learner=name, condition=ABSENT)) for name in self._names]
        conditions = (*CONDITIONS, ABSENT)
        several = {(each.learner, one): float(one == each.condition) for each in listed for one in conditions}
        yield _metric(CONDITION, ["island", CONDITION.label], several)
        for each in table.ISLAND_FIGURES:
            if each.series is not None:
                yield _metric(each.series, ["island"], {(island.learner,): each.value(island) for island in listed})

    def _process_facts(self, published: _Published) -> ProcessFacts:
        """Return the facts that the status, the settings, the disk and the writer of snapshots give at this moment."""
        config, writer, status = self._context.config, self._writer, published.status
        disk, snapshot = shutil.disk_usage(self._context.run_dir), newest_snapshot(self._context.run_dir)
        newest, newest_s = snapshot[:2] if snapshot is not None else (None, None)
        return ProcessFacts(
            unix_s=published.unix_s,
            states={each: float(each == status["state"]) for each in STATES},
            overlap_steps=config.protocol.overlap_steps,
            abandoned=published.abandoned,
            samples=status["samples"],
            epochs={row["corpus"] or RUN: row["epochs"] for row in status["corpora"]},
            losses={row["corpus"] or RUN: row["loss"] for row in status["corpora"]},
            rejected={name: published.rejected[name] for name in self._names},
            alarms={kind: sum(each["kind"] == kind for each in status["alarms"]) for kind in REMEDIES},
            least=config.islands.least,
            unlisted=sum(each["learner"] not in self._names for each in status["learners"]),
            snapshot_every=config.protocol.snapshot_every,
            snapshot_step=newest,
            snapshot_unix_s=newest_s,
            snapshot_took_s=writer.took_s,
            snapshot_failures=writer.failures,
            disk_free=disk.free,
            disk_size=disk.total,
            expiries=expiries(config.transport),
        )


def _metric(series: Series, labels: Sequence[str], values: Mapping[Any, float | None]) -> Metric:
    """Return a metric with a sample for each value that is known; the keys are tuples of the labels' values."""
    metric = Metric(series.name.removesuffix("_total"), series.help, series.kind)
    for key, value in values.items():
        if value is not None:
            metric.add_sample(series.name, dict(zip(labels, key, strict=True)), value)
    return metric
