"""Dashboard, alerts and the table in docs/metrics.md name metrics that there are; a real Prometheus takes all of it."""

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from diloco_jax.protocol.corpora import Corpus
from diloco_jax.runtime.syncer.exposition import all_series
from diloco_jax.settings.packed import packed
from diloco_jax.settings.text import parse
from diloco_jax.transport.trust.certificates import make as make_certificates
from diloco_jax.transport.trust.certificates import settings as certificate_settings
from tests.limits import HANGS_S
from tests.protocol.syncer_inputs import new
from tests.runtime.helpers import wait_for
from tests.runtime.syncer.scraped import Scraped, get, one_round, served
from tests.sockets import free_port

pytestmark = pytest.mark.net
ROOT = Path(__file__).resolve().parents[3]
MONITORING = ROOT / "configs" / "monitoring"
UNITS = {series.name: series.unit for series in all_series()}
# Names of what islands measure themselves.
MEASURED = ("loss", "step_s", "grad_norm", "learning_rate", "waiting_for_data", "mfu", "device_bytes", "host_bytes")
FROM_SYNCER = ("broadcast_s", "last_merged_round", "local_step", "participation", "restarts", "staleness", "tokens")
METRIC = re.compile(r"\b(?:diloco|process)_\w+")
real = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="needs prometheus and promtool, for example of Debian's package prometheus",
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A syncer that can be scraped."""
    folder, where = tmp_path_factory.mktemp("run"), f"127.0.0.1:{free_port()}"
    make_certificates(folder / "certs", ["island-0"])
    transport = certificate_settings(folder / "certs")
    config = parse({"islands": {"count": 2}, "syncer": {"metrics": where}, "transport": transport}, "a test")
    scraped = Scraped(folder, config, new(quorum=2))
    scraped.metrics = {"island-0": dict.fromkeys((*MEASURED, *FROM_SYNCER), 0.5)}
    one_round(scraped)
    scraped.syncer.membership.corpora.known["french"] = Corpus("9 tokens", 400)
    scraped.stats.drifts.on_round({"island-0": (1.0, 0.5), "island-1": (1.0, 0.5)})
    with served(scraped.exposed):
        scraped.tell(9.0)
        yield f"http://{where}/metrics"


def expressions() -> dict[str, str]:
    """What the dashboard and the alerts ask for."""
    board = json.loads((MONITORING / "grafana.json").read_text(encoding="utf-8"))
    found = {f"{p['title']} {t['refId']}": t["expr"] for p in board["panels"] for t in p.get("targets", ())}
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text(encoding="utf-8"))["groups"][0]["rules"]
    return found | {rule["alert"]: rule["expr"] for rule in rules}


def row(name: str, kind: str, labels: list[str], words: str) -> str:
    # The histograms, which are not in the tables, are of seconds.
    return f"| `{name}` | {kind} | {UNITS.get(name, 'seconds')} | {', '.join(labels)} | {words} |"


def test_the_table_is_that_of_what_is_served(url: str) -> None:
    text = get(url)
    labels: dict[str, list[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels.setdefault(family.name, sorted({*sample.labels} - {"le"}))
    helps, kinds = (dict(re.findall(rf"^# {what} (diloco_\w+) (.+)$", text, re.M)) for what in ("HELP", "TYPE"))
    rows = [row(name, kinds[name], labels.get(name.removesuffix("_total"), []), helps[name]) for name in helps]
    table = "\n".join(["| metric | type | unit | labels | is |", "|---|---|---|---|---|", *sorted(rows)])
    assert table in (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"), f"write into docs/metrics.md:\n{table}"


def test_dashboard_and_alerts_name_metrics_that_are_served(url: str) -> None:
    served_names = set(re.findall(r"^# TYPE (\w+)", get(url), re.MULTILINE))
    asked = {re.sub(r"_bucket$", "", name) for each in expressions().values() for name in METRIC.findall(each)}
    assert len(asked) > 35 and asked <= served_names


def test_nobody_takes_them_for_configs_of_runs() -> None:
    assert not [name for name in packed() if "monitoring" in name]


def promtool(*words: object, text: str = "") -> str:
    done = subprocess.run(["promtool", *map(str, words)], input=text, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@real
def test_promtool_takes_metrics_and_rules(url: str) -> None:
    ours = "".join(f"{line}\n" for line in get(url).splitlines() if "diloco_" in line)
    assert promtool("check", "metrics", text=ours) == ""
    assert "15 rules found" in promtool("check", "config", MONITORING / "prometheus.yml")


@real
def test_alerts_come_when_they_should_and_only_then() -> None:
    assert "SUCCESS" in promtool("test", "rules", Path(__file__).with_name("alerts_test.yml"))


@real
def test_a_real_prometheus_answers_every_question(url: str, tmp_path: Path) -> None:
    where, target = f"127.0.0.1:{free_port()}", url.split("/")[2]
    settings = yaml.safe_load((MONITORING / "prometheus.yml").read_text(encoding="utf-8"))
    settings["global"] = {"scrape_interval": "200ms", "scrape_timeout": "200ms", "evaluation_interval": "200ms"}
    settings["rule_files"] = [str(MONITORING / "alerts.yml")]
    settings["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    words = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]

    def ask(path: str, **asked: str) -> Any:
        try:
            return json.loads(get(f"http://{where}/api/v1/{path}?{urllib.parse.urlencode(asked)}"))["data"]
        # Prometheus is not ready yet, or refused the question.
        except OSError:
            return {}

    def value(expression: str) -> Any:
        asked = expression.replace("$instance", target).replace("$__rate_interval", "1m")
        return ask("query", query=asked).get("result")

    def rules() -> list[dict[str, Any]]:
        found = [rule for group in ask("rules").get("groups", ()) for rule in group["rules"]]
        return found if all(rule["health"] != "unknown" for rule in found) else []

    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(["prometheus", *words, f"--web.listen-address={where}"], stdout=log, stderr=log)
    try:
        wait_for(lambda: value("count_over_time(diloco_global_step[1m]) > 5"), "a few scrapes")
        shown = {name: value(expression) for name, expression in expressions().items()}
        assert not [name for name, found in shown.items() if found is None], "Prometheus does not understand it"
        needs_more = {"Age of the newest snapshot A", "Age of the newest snapshot B", "Contributors per round A"}
        empty = {name for name, found in shown.items() if not found and not name.startswith("Diloco")}
        assert empty <= needs_more | {name for name in shown if name.startswith(("Phases", "Broadcasts"))}
        found = wait_for(rules, "an evaluation")
        assert {rule["health"] for rule in found} == {"ok"} and len(found) == 15
    finally:
        server.terminate()
        server.wait(HANGS_S)
