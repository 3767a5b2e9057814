"""Prometheus gets the figures of a syncer over HTTP, with labels that cannot grow."""

import contextlib
import math
import os
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from diloco_jax.core.drift import Drift
from diloco_jax.protocol.watch.terms import CONDITIONS
from diloco_jax.runtime.syncer import exposition
from diloco_jax.runtime.syncer.exposition import ABSENT, ISLANDS_MAX, STATES, expiries
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import parse
from diloco_jax.transport.link import TransportConfig
from diloco_jax.transport.trust.certificates import make as make_certificates
from diloco_jax.transport.trust.certificates import settings as certificate_settings
from tests.protocol.syncer_inputs import hello, new, report, value
from tests.runtime.helpers import call, write_config
from tests.runtime.syncer.scraped import Samples, Scraped, get, one_round, samples, served
from tests.sockets import listening

pytestmark = pytest.mark.net


def config(islands: int = 2, metrics: str = "127.0.0.1:0") -> RunConfig:
    sizes = {"islands": {"count": islands}, "train": {"batch_size": 2 * islands}, "protocol": {"learners_max": 600}}
    return parse(sizes | {"syncer": {"metrics": metrics}}, "a test")


def scrape(scraped: Scraped, now_s: float = 9.0) -> Samples:
    with served(scraped.exposed) as url:
        scraped.tell(now_s)
        return samples(get(url))


def of_island(found: Samples, name: str) -> dict[str, float]:
    return {metric: value for (metric, labels), value in found.items() if labels == (("island", name),)}


def test_a_round_is_told_with_its_durations(tmp_path: Path) -> None:
    scraped = Scraped(tmp_path, config(), new(quorum=2))
    one_round(scraped)
    found = scrape(scraped)
    for phase, seconds in {"quorum": 3.0, "grace": 0.0, "pull": 1.5, "merge": 2.0}.items():
        assert found["diloco_round_phase_seconds_sum", (("phase", phase),)] == pytest.approx(seconds)
        assert found["diloco_round_phase_seconds_count", (("phase", phase),)] == 1
    assert found["diloco_broadcast_seconds_sum", ()] == pytest.approx(8.0 - 0.5 - 6.5)
    assert found["diloco_global_step", ()] == found["diloco_rounds_merged_total", ()] == 1
    assert found["diloco_values_merged_total", ()] == 2 and found["diloco_tokens_merged_total", ()] == 20
    assert found["diloco_received_bytes_total", ()] == 7 and found["diloco_sent_bytes_total", ()] == 9
    assert found["diloco_evaluation_loss", ()] == 2.25 and found["diloco_alarms", (("kind", "tape"),)] == 1
    own = of_island(found, "island-0")
    assert own["diloco_island_steps_total"] == 2 and own["diloco_island_tokens_total"] == 20
    assert own["diloco_island_received_bytes_total"] == 3 and own["diloco_island_sent_bytes_total"] == 4
    assert own["diloco_island_participation_ratio"] == own["diloco_island_last_merged_round"] == 1
    assert of_island(found, "island-1")["diloco_island_staleness_rounds"] == 1, "it has not heard of round 1"
    assert found["process_resident_memory_bytes", ()] > 1e6
    state = {labels[0][1]: value for (name, labels), value in found.items() if name == "diloco_run_state"}
    assert state == {each: float(each == "running") for each in STATES}


def test_the_wait_after_the_quorum_is_the_grace_window(tmp_path: Path) -> None:
    scraped = Scraped(tmp_path, config(), new(quorum=1, grace_steps_max=1.0))
    for name in ("island-0", "island-1"):
        scraped.hear(hello(name), 0.0)
    for name in ("island-0", "island-1"):
        scraped.hear(report(name, 1), 1.0)
    for name in ("island-0", "island-1"):
        scraped.hear(value(name, 1, 1, 1), 1.5)
    scraped.merge(1, 2.0)
    scraped.hear(report("island-0", 2), 2.0)
    scraped.hear(report("island-1", 2), 2.25)
    found = scrape(scraped)
    assert found["diloco_round_phase_seconds_count", (("phase", "grace"),)] == 2
    assert found["diloco_round_phase_seconds_sum", (("phase", "grace"),)] == pytest.approx(0.25)


def test_what_merges_leave_out_is_counted(tmp_path: Path) -> None:
    scraped = Scraped(tmp_path, config(), new(quorum=1))
    scraped.hear(hello("island-1"), 0.0)
    scraped.hear(report("island-1", 1), 1.0)
    scraped.hear(value("island-1", 1, 1, 1), 2.0)
    scraped.merge(1, 3.0, excluded=("island-1",))
    found = scrape(scraped)
    rejected = [found["diloco_values_rejected_total", (("island", f"island-{number}"),)] for number in (0, 1)]
    assert rejected == [0, 1]
    assert found["diloco_rounds_abandoned_total", ()] == 1 and found["diloco_rounds_merged_total", ()] == 0


def test_the_drift_of_an_island_is_scraped_once_it_has_one(tmp_path: Path) -> None:
    scraped = Scraped(tmp_path, config(islands=3), new(quorum=2))
    one_round(scraped)
    scraped.stats.drifts.on_round({"island-0": Drift(1.5, 0.25), "island-1": Drift(1.0, None)})
    found = scrape(scraped)
    names = {f"diloco_island_drift_{name}" for name in ("norm_ratio", "cosine")}
    own = [{key: each for key, each in of_island(found, f"island-{n}").items() if key in names} for n in range(3)]
    assert own == [
        {"diloco_island_drift_norm_ratio": 1.5, "diloco_island_drift_cosine": 0.25},
        {"diloco_island_drift_norm_ratio": 1.0},
        {},
    ]


def test_an_island_has_one_condition_and_only_islands_of_the_config_have_labels(tmp_path: Path) -> None:
    scraped = Scraped(tmp_path, config(islands=ISLANDS_MAX + 44), new(quorum=1, learners_max=600))
    for name in ("island-0", "somebody", f"island-{ISLANDS_MAX}"):
        scraped.hear(hello(name), 0.0)
    scraped.hear(report("island-0", 1, loss=math.nan), 1.0)
    scraped.metrics = {"island-0": {"grad_norm": 3.0, "made up by a model": 1.0, "participation": 7.0}}
    found = scrape(scraped)
    labelled = {value for _, labels in found for key, value in labels if key == "island"}
    assert labelled == {f"island-{number}" for number in range(ISLANDS_MAX)}
    assert found["diloco_unlisted_islands", ()] == 2
    told = [(dict(labels), on) for (name, labels), on in found.items() if name == "diloco_island_condition"]
    is_in = {labels["island"]: labels["condition"] for labels, on in told if on}
    assert (is_in["island-0"], is_in["island-1"]) == ("training", ABSENT)
    assert sum(on for _, on in told) == ISLANDS_MAX, "each is in one"
    assert {labels["condition"] for labels, _ in told} == {*CONDITIONS, ABSENT}
    own = of_island(found, "island-0")
    assert math.isnan(own["diloco_island_loss"]) and own["diloco_island_gradient_norm"] == 3.0
    assert own["diloco_island_participation_ratio"] == 0, "a value that the model measures does not replace it"
    assert not any("made" in name for name, _ in found)
    assert "diloco_island_loss" not in of_island(found, "island-1"), "it has not reported one"


def test_disk_snapshots_and_certificates(tmp_path: Path) -> None:
    make_certificates(tmp_path / "certs", ["island-0"], days=30)
    transport = TransportConfig(**certificate_settings(tmp_path / "certs"))
    made_s = (tmp_path / "certs" / "ca.pem").stat().st_mtime
    days = {name: (then - made_s) / 86400 for name, then in expiries(transport).items()}
    assert days == {"syncer": pytest.approx(30, abs=0.01), "authority": pytest.approx(3650, abs=0.01)}
    assert expiries(TransportConfig()) == {}
    for step in (40, 120):
        (tmp_path / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
    scraped = Scraped(tmp_path, config(), new(), SimpleNamespace(took_s=1.5, failures=2))
    found = scrape(scraped)
    assert found["diloco_snapshot_global_step", ()] == 120
    assert found["diloco_snapshot_duration_seconds", ()] == 1.5 and found["diloco_snapshot_failures_total", ()] == 2
    assert 0 < found["diloco_disk_free_bytes", ()] < found["diloco_disk_size_bytes", ()]


def test_nothing_listens_unless_asked(tmp_path: Path) -> None:
    scraped, before = Scraped(tmp_path, config(metrics=""), new(quorum=2)), listening(os.getpid())
    scraped.exposed.open(0.0, threading.Event())
    one_round(scraped)
    scraped.tell(9.0)
    assert listening(os.getpid()) == before
    scraped.exposed.close()


def test_bad_addresses_are_one_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        cases = [("train", where, f"cannot listen on syncer.metrics {where} (Address already in use)")]
        cases += [("syncer", "192.0.2.1:9464", "cannot listen on syncer.metrics 192.0.2.1:9464")]
        cases += [("syncer", ":9464", "syncer.metrics is ':9464': write host:port")]
        for role, address, words in cases:
            config = write_config(tmp_path, syncer={"metrics": address})
            result = call(role, config, "--run-dir", tmp_path / role)
            assert result.returncode == 2 and words in result.stderr, (role, result.stderr)
            assert "Traceback" not in result.stderr


def test_idle_connections_have_few_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each connection takes a thread and a descriptor of the syncer."""
    monkeypatch.setattr(exposition, "SCRAPERS_MAX", 2)
    scraped = Scraped(tmp_path, config(), new())
    with served(scraped.exposed) as url, contextlib.ExitStack() as idle:
        scraped.tell(9.0)
        where = ("127.0.0.1", int(url.rpartition(":")[2].partition("/")[0]))
        held = [idle.enter_context(socket.create_connection(where, 20)) for _ in range(2)]
        # A connection has its place once the server has accepted it, in their order.
        assert idle.enter_context(socket.create_connection(where, 20)).recv(1) == b"", "the places are taken"
        held[0].sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert held[0].recv(100).startswith(b"HTTP/1.0 200")
