"""The page in one piece: served with a stream of news, or as the report of a run that contains all its data."""

import base64
import hashlib
import json
import time
from pathlib import Path
from typing import Any

from diloco_jax.runtime.records.files import METRICS_FILE, REPORT_FILE
from diloco_jax.runtime.records.telemetry import replace_text
from diloco_jax.tools.page.board import planned
from diloco_jax.tools.page.feed import RunFeed
from diloco_jax.tools.page.story import against

FOLDER = Path(__file__).parent
# They are one script, so the later ones use what the earlier ones define.
SCRIPTS = ("elements", "charts", "page")
# A report is for an archive, so it has more events than the page of a running run.
REPORT_EVENTS = 5000


def compose_page(data: Any = None) -> tuple[str, str]:
    """Return the page and its content security policy, which allows no other script; `data` is for a report."""
    parts = {name: (FOLDER / f"page.{name}").read_text(encoding="utf-8") for name in ("html", "css")}
    parts["js"] = "".join((FOLDER / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    page = parts["html"].replace("/*style*/", parts["css"]).replace("/*script*/", parts["js"])
    page = page.replace("/*data*/", json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"))
    hashes = {name: base64.b64encode(hashlib.sha256(parts[name].encode()).digest()).decode() for name in ("css", "js")}
    policy = f"default-src 'none'; img-src data:; connect-src 'self'; script-src 'sha256-{hashes['js']}'; "
    policy += f"style-src 'sha256-{hashes['css']}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return page, policy


def write_report(folder: Path, baseline: Path | None = None) -> Path:
    """Write a run's report.html, with a comparison if there is a baseline, and return its path.

    Raises:
        ValueError: the run has no step yet.
    """
    runs = [read_report(each) for each in (folder, baseline) if each is not None]
    if baseline is not None:
        loss, other = (run["summary"].get("eval_loss") for run in runs)
        runs[0]["verdict"] += against(loss, other, runs[1]["name"])
    target = folder / REPORT_FILE
    replace_text(target, compose_page({"runs": runs})[0])
    return target


def read_report(folder: Path) -> dict[str, Any]:
    """Return everything that a report shows of a run.

    Raises:
        ValueError: the run has no step yet.
    """
    metrics = folder / METRICS_FILE
    if not metrics.is_file():
        raise ValueError(f"{metrics} does not exist; give the folder of a run, one that `diloco train` made")
    feed = RunFeed(folder, events_kept=REPORT_EVENTS)
    while feed.look():
        pass
    if not feed.story.tracks and not feed.story.evals.last:
        raise ValueError(f"{metrics} has no step of any learner yet; wait until the run has begun to train")
    return {**feed.whole(still=True), "plan": planned(feed.config), "logs": [], "written_unix_s": time.time()}
