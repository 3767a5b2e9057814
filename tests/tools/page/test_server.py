"""The page over HTTP: nothing of a run without the token, no way out of its folder, and one way to change something."""

import http.client
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from diloco_jax.tools.page import server as module
from diloco_jax.tools.page.feed import RunFeed
from diloco_jax.tools.page.server import PageServer
from diloco_jax.transport.link import TransportConfig
from diloco_jax.transport.session.operator_requests import DRAIN, OperatorRequest
from diloco_jax.transport.trust.certificates import make, settings
from tests.limits import HANGS_S
from tests.runtime.helpers import call
from tests.tools.page.made import MADE, append, lost, made_run

pytestmark = pytest.mark.net


@contextmanager
def served(*folders: Path, address: str = "127.0.0.1:0", **kwargs: Any) -> Iterator[PageServer]:
    with PageServer([RunFeed(folder) for folder in folders], address, **kwargs) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server: PageServer, path: str, body: object = None, **headers: str) -> tuple[int, str, dict[str, str]]:
    """Ask with the token where {token} is written."""
    link = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=HANGS_S)
    headers = {name.replace("_", "-"): value.format(token=server.token) for name, value in headers.items()}
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    link.request("GET" if body is None else "POST", path.format(token=server.token), data, headers)
    answer = link.getresponse()
    found = answer.status, answer.read().decode(), {name.lower(): value for name, value in answer.getheaders()}
    link.close()
    return found


def test_the_page_is_one_file_that_runs_its_own_script_only(tmp_path: Path) -> None:
    with served(made_run(tmp_path)) as server:
        status, page, headers = ask(server, "/")
        assert status == 200 and headers["content-type"] == "text/html; charset=utf-8"
        assert (
            "/*" + "script*/" not in page
            and "EventSource" in page
            and "src=" not in page
            and "http:" not in page.replace("http://www.w3.org/2000/svg", "")
        )
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and headers["referrer-policy"] == "no-referrer"
        assert tmp_path.name not in page and server.token not in page and server.url.endswith(f"/#{server.token}")


def test_nothing_of_the_run_is_told_without_the_token(tmp_path: Path) -> None:
    with served(made_run(tmp_path)) as server:
        for path in ("/events", "/state?token=", "/state?token=wrong", "/log?run=0&name=a&token=é"):
            status, text, _ = ask(server, path.encode("ascii", "ignore").decode())
            assert status == 403 and "token" in text
        assert ask(server, "/drain", {"run": 0, "learner": "a"})[0] == 403
        assert ask(server, "/drain?token={token}", {"run": 0, "learner": "a"})[0] == 404
        status, text, _ = ask(server, "/state?token={token}")
        assert status == 200 and json.loads(text)["runs"][0]["rounds"] == [MADE]


def test_logs_of_the_folder_are_told_and_nothing_else(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run")
    (tmp_path / "secret.log").write_text("secret")
    (folder / "logs/long.log").write_text("x" * module.LOG_BYTES + "\nlast\n")
    with served(folder) as server:
        assert ask(server, "/log?run=0&name=a&token={token}")[1] == "first line\n<b>last line</b>\n"
        _, text, headers = ask(server, "/log?run=0&name=long&token={token}")
        assert text == "last\n"
        assert headers["content-type"].startswith("text/plain") and headers["x-content-type-options"] == "nosniff"
        for name in ("../../secret", "..%2f..%2fsecret", "/etc/passwd", "a.log", "", "a%00"):
            assert ask(server, f"/log?run=0&name={name}&token={{token}}")[0] == 404
        for run in ("1", "-1", "x", "", "²"):
            assert ask(server, f"/log?run={run.encode('ascii', 'ignore').decode()}&name=a&token={{token}}")[0] == 404
        for path in ("/page.js", "/../feed.py", "//etc/passwd", "/logs/a.log"):
            assert ask(server, path)[0] == 404


def test_an_island_is_drained_with_the_token_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, asked = made_run(tmp_path), list[tuple[str, str]]()

    def operate(config: TransportConfig, request: OperatorRequest) -> tuple[bool, str]:
        action, learner, _ = request
        assert action == DRAIN
        asked.append((config.address, learner))
        return learner == "a", f"{learner} leaves" if learner == "a" else "there is no such learner"

    monkeypatch.setattr(module, "ask_operator", operate)
    with served(folder) as server:
        status, text, _ = ask(server, "/drain", {"run": 0, "learner": "a"}, X_Token="{token}")
        # The folder has no address.
        assert (status, json.loads(text)["ok"]) == (409, False) and "never listened" in text
        (folder / "syncer.address").write_text("127.0.0.1:7\n")
        status, text, _ = ask(server, "/drain", {"run": 0, "learner": "a"}, X_Token="{token}")
        assert (status, json.loads(text)) == (200, {"ok": True, "message": "a leaves"})
        assert ask(server, "/drain", {"run": 0, "learner": "b"}, X_Token="{token}")[0] == 409
        for body in (b"", b"{", b"[]", {"run": 1, "learner": "a"}, {"run": 0}, b"9" * 9999, b"[" * 4000):
            assert ask(server, "/drain", body, X_Token="{token}")[0] == 400
        assert asked == [("127.0.0.1:7", "a"), ("127.0.0.1:7", "b")]


def test_events_come_as_they_happen(tmp_path: Path) -> None:
    folder = made_run(tmp_path)
    with served(folder) as server:
        link = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=HANGS_S)
        link.request("GET", f"/events?token={server.token}")
        answer = link.getresponse()
        assert answer.headers["Content-Type"] == "text/event-stream"
        assert answer.readline() == b"event: whole\n"
        append(folder, lost("b", 7.0))
        while b'"kind":"disconnected"' not in (line := answer.readline()):
            assert line, "the stream has ended"
        link.close()


def test_there_is_room_for_so_many_and_not_for_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "VIEWERS_MAX", 1)
    with served(made_run(tmp_path)) as server:
        link = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=HANGS_S)
        link.request("GET", f"/events?token={server.token}")
        assert link.getresponse().readline() == b"event: whole\n"
        with pytest.raises((ConnectionError, http.client.BadStatusLine)):
            ask(server, "/")
        link.close()


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0"])
def test_other_machines_see_it_only_encrypted(address: str, tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run")
    found = call("view", folder, "--listen", address)
    assert found.returncode == 2 and "diloco certs" in found.stderr and "--allow-plaintext" in found.stderr
    make(tmp_path / "certs", ["a"])
    transport = TransportConfig(**settings(tmp_path / "certs"))
    with served(folder, address="0.0.0.0:0", transport=transport) as server:
        assert server.url.startswith("https://")
        context = ssl.create_default_context(cafile=transport.tls_ca)
        context.check_hostname = False
        link = http.client.HTTPSConnection("127.0.0.1", server.server_port, context=context, timeout=HANGS_S)
        link.request("GET", f"/state?token={server.token}")
        assert json.loads(link.getresponse().read())["runs"][0]["rounds"] == [MADE]
        link.close()


def test_addresses_that_will_not_do_are_one_clear_error(tmp_path: Path) -> None:
    folder = made_run(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        found = call("view", folder, "--listen", address)
        assert found.returncode == 2 and address in found.stderr and "--listen" in found.stderr
    found = call("view", folder, "--listen", "nonsense")
    assert found.returncode == 2 and "--listen is 'nonsense'" in found.stderr
