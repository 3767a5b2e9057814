"""Connections of strangers that never say anything useful give their descriptors back."""

import os
import socket
import ssl
from pathlib import Path

import pytest

from diloco_jax.protocol.messages import Heartbeat
from diloco_jax.transport.session import calls
from diloco_jax.transport.trust import certificates
from tests.limits import HANGS_S
from tests.transport.ends import Ends, comes_true, greet

pytestmark = pytest.mark.net
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
STRANGERS = 40


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "GREETING_S", 0.3)
    monkeypatch.setattr(calls, "IDLE_S", 0.5)


def dial(address: str, words: bytes) -> socket.socket:
    """A stranger's connection."""
    host, port = address.split(":")
    found = socket.create_connection((host, int(port)), timeout=HANGS_S)
    found.sendall(words)
    return found


def hear_end(connection: socket.socket) -> bool:
    """Read until the other side closes."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize(
    "words",
    [b"", PREFACE[:10], PREFACE, PREFACE + SETTINGS],
    ids=["silent", "half of the preface", "preface", "no call"],
)
def test_a_connection_that_never_greets_is_closed(ends: Ends, words: bytes) -> None:
    listener = ends.listen()
    link = ends.connect(to=listener.address)
    greet(listener, link)
    with dial(listener.address, words) as stranger:
        assert hear_end(stranger)
    link.send(Heartbeat("a", 0))
    assert comes_true(lambda: listener.receive(0.01) is not None), "the learner's own connections stay"


def test_descriptors_of_many_strangers_come_back(ends: Ends) -> None:
    listener = ends.listen()
    before = len(os.listdir("/proc/self/fd"))
    strangers = [dial(listener.address, b"") for _ in range(STRANGERS)]
    assert all(hear_end(each) for each in strangers)
    for each in strangers:
        each.close()
    assert comes_true(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_a_half_open_connection_is_closed_under_tls_too(ends: Ends, tmp_path: Path) -> None:
    certificates.make(tmp_path, ["island-0"])
    listener = ends.listen(**certificates.settings(tmp_path))
    with dial(listener.address, b"") as silent:
        assert hear_end(silent)
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    context.load_cert_chain(tmp_path / "island-0.pem", tmp_path / "island-0.key")
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    # This peer has a certificate and stays silent.
    with context.wrap_socket(dial(listener.address, b"")) as encrypted:
        assert hear_end(encrypted)
