"""A syncer's machine with two islands after a round, and its metrics for Prometheus."""

import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from diloco_jax.protocol.effects import Effect, Note
from diloco_jax.protocol.messages import Adopted, Arrived, StepReport
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.watch.alarms import Alarm
from diloco_jax.protocol.watch.stats import RunStats
from diloco_jax.runtime.records.status import compose_status
from diloco_jax.runtime.syncer.exposition import Exposition
from diloco_jax.settings.run import RunConfig
from tests.limits import HANGS_S
from tests.protocol.syncer_inputs import hello, merged, report, value

# Value by name and labels.
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Scraped:
    """A machine whose driver passes everything to an exposition that a syncer's driver does.

    Args:
        folder: the run's.
    """

    def __init__(self, folder: Path, config: RunConfig, syncer: Syncer, writer: Any = None) -> None:
        self.syncer, self.config, self.metrics = syncer, config, dict[str, dict[str, float]]()
        self.stats = RunStats(config.islands.names, 100, syncer)
        parts: Any = SimpleNamespace(config=config, run_dir=folder, machine=syncer, stats=self.stats)
        self.exposed = Exposition(parts, writer or SimpleNamespace(took_s=None, failures=0))  # type: ignore[arg-type]

    def hear(self, message: Any, now_s: float) -> None:
        """Take a message."""
        if isinstance(message, StepReport) and self.stats.on_report(message, now_s):
            self.exposed.on_report(message, now_s)
        self._execute(self.syncer.on_message(message, now_s))

    def merge(self, global_step: int, now_s: float, excluded: tuple[str, ...] = ()) -> None:
        """End a merge."""
        self.exposed.on_merged(global_step, excluded, now_s)
        self._execute(merged(self.syncer, global_step, now_s, excluded))

    def _execute(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Note):
                self.exposed.on_note(effect)
                if effect.kind == "merged":
                    self.stats.on_merged(effect.members, effect.global_step)

    def tell(self, now_s: float) -> dict[str, Any]:
        """Pass a status to the exposition, and return it."""
        told: dict[str, Any] = {"stopped": False, "blocked": "", "eval_loss": 2.25, "eval_scores": {"french loss": 2.5}}
        told |= {"alarms": [Alarm("tape", "", "a disk is full").as_dict()], "metrics": self.metrics, "left_s": None}
        told |= {"processes": {}}
        by_island = {name: {"up_bytes": 3, "down_bytes": 4} for name in self.syncer.membership.members}
        told |= {"wire": {"up_bytes": 7, "down_bytes": 9, "by_island": by_island}, "episodes": []}
        status = compose_status("run", self.syncer, self.stats, now_s, **told)
        self.exposed.tell(status, now_s)
        return status


def one_round(scraped: Scraped) -> None:
    """Round 1 of fragment 1: a quorum of two after 3 s, values after 1.5 s, the merge after 2 s, read 1 s later."""
    for name in ("island-0", "island-1"):
        scraped.hear(hello(name), 0.0)
    scraped.hear(report("island-0", 1), 1.0)
    scraped.hear(report("island-1", 1), 3.0)
    scraped.hear(value("island-0", 1, 1, 1), 4.0)
    scraped.hear(value("island-1", 1, 1, 1), 4.5)
    scraped.merge(1, 6.5)
    adopted = (Adopted(0), Adopted(1, 2), Adopted(0), Adopted(0))
    scraped.hear(report("island-0", 2, adopted, global_step=1, arrived=(Arrived(1, 1, 0.5),)), 8.0)


@contextmanager
def served(exposed: Exposition) -> Iterator[str]:
    """Listen at `syncer.metrics`; yields the URL."""
    exposed.open(0.0, threading.Event())
    assert exposed.url
    try:
        yield exposed.url
    finally:
        exposed.close()


def get(url: str) -> str:
    """Return the text of a scrape."""
    with urllib.request.urlopen(url, timeout=HANGS_S) as answer:
        text: str = answer.read().decode()
    return text


def samples(text: str) -> Samples:
    """Every sample of an exposition."""
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}
