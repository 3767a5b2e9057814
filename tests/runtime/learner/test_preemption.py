"""A learner hears that its machine will be taken away."""

import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from diloco_jax.runtime.learner import preemption
from tests.limits import HANGS_S


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "POLL_S", 0.02)


class Metadata(HTTPServer):
    """Google Cloud's metadata server, as far as a preemption goes."""

    answer = b"FALSE"

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked = threading.Semaphore(0)


class Handler(BaseHTTPRequestHandler):
    server: Metadata

    def do_GET(self) -> None:
        known = self.path == "/computeMetadata/v1/instance/preempted"
        self.send_response(200 if known and self.headers["Metadata-Flavor"] == "Google" else 403)
        self.end_headers()
        self.wfile.write(self.server.answer)
        self.server.asked.release()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[Metadata]:
    server = Metadata()
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.net
def test_the_metadata_server_is_asked_until_it_says_so(metadata: Metadata) -> None:
    stop = threading.Event()
    preemption.watch("gce", stop)
    for _ in range(3):
        assert metadata.asked.acquire(timeout=HANGS_S)
    assert not stop.is_set()
    metadata.answer = b"TRUE"
    assert stop.wait(HANGS_S)


def test_a_file_is_a_notice(tmp_path: Path) -> None:
    stop = threading.Event()
    preemption.watch(str(tmp_path / "notice"), stop)
    assert not stop.wait(0.1)
    (tmp_path / "notice").touch()
    assert stop.wait(HANGS_S)


@pytest.mark.net
def test_a_server_that_cannot_be_asked_is_named_once_and_stops_nothing(
    metadata: Metadata, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{metadata.server_port}/wrong")
    stop = threading.Event()
    with caplog.at_level(logging.WARNING):
        preemption.watch("gce", stop)
        for _ in range(3):
            assert metadata.asked.acquire(timeout=HANGS_S)
    assert not stop.is_set() and len(caplog.records) == 1
    assert "no preemption notices: gce cannot be read (HTTP Error 403" in caplog.text
    stop.set()


def test_a_file_that_could_never_come_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        preemption.check_source(str(tmp_path / "missing" / "notice"))
    assert preemption.check_source("gce") == "gce"
