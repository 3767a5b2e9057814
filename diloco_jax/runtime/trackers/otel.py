"""OpenTelemetry traces of rounds: a span per round with its parts below it, in wall-clock time, by OTLP over HTTP.

Where they go is said by the standard variables, such as OTEL_EXPORTER_OTLP_ENDPOINT.
"""

import importlib
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

PARTS = ("quorum", "grace", "pull", "merge")
NANOSECONDS = 1_000_000_000


class OpenTelemetryTracker:
    """A tracker of rounds; it has no use for values."""

    def begin(self, run: str, config: Mapping[str, Any], folder: Path) -> None:
        trace, resources = (importlib.import_module(f"opentelemetry.sdk.{name}") for name in ("trace", "resources"))
        export = importlib.import_module("opentelemetry.sdk.trace.export")
        resource = resources.Resource.create({"service.name": "diloco", "diloco.run": run})
        self._provider = trace.TracerProvider(resource=resource)
        self._provider.add_span_processor(export.BatchSpanProcessor(self.exporter()))
        self._tracer = self._provider.get_tracer("diloco")
        self._within = importlib.import_module("opentelemetry.trace").set_span_in_context
        self._began_s: float | None = None  # of the run, since 1970

    def exporter(self) -> Any:
        """Return what sends the spans."""
        return importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter").OTLPSpanExporter()

    def log(self, step: int, values: Mapping[str, float], group: str) -> None:
        """Drop them: they are metrics."""

    def round(self, record: Mapping[str, Any]) -> None:
        """Trace a round: the wait for its quorum, its grace window, its pull and its merge, and each island's value."""
        closed_s, ends_s = record["closed_s"], record["t"]
        if self._began_s is None:
            self._began_s = time.time() - ends_s  # a record is of this moment
        times_s = [record[name] for name in ("opened_s", "met_s", "closed_s", "pulled_s")] + [ends_s]
        told = {"diloco.global_step": record["global_step"], "diloco.fragment": record["fragment_id"]}
        whole = self._tracer.start_span("round", attributes=told, start_time=self._ns(times_s[0]))
        inside = self._within(whole)

        def part(name: str, from_s: float, until_s: float, **told: str) -> None:
            span = self._tracer.start_span(name, inside, attributes=told, start_time=self._ns(from_s))
            span.end(self._ns(max(from_s, until_s)))

        for name, (from_s, until_s) in zip(PARTS, pairwise(times_s), strict=True):
            part(name, from_s, until_s)
        for island, took_s in record["values"].items():
            part("value", closed_s, closed_s + took_s, island=island)
        whole.end(self._ns(ends_s))

    def _ns(self, run_s: float) -> int:
        return round(((self._began_s or 0.0) + run_s) * NANOSECONDS)

    def close(self) -> None:
        self._provider.shutdown()
