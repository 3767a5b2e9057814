"""The first look of a process that starts at the address of the syncer."""

import socket
import threading

import pytest

from diloco_jax.transport.endpoints.reach import await_listener
from diloco_jax.transport.link import TransportConfig, TransportError
from tests.sockets import free_port


def config(address: str, timeout_s: float = 0.3) -> TransportConfig:
    return TransportConfig(address=address, connect_timeout_s=timeout_s, allow_plaintext=True)


def test_a_listener_is_found_without_a_word() -> None:
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await_listener(config(f"127.0.0.1:{listener.getsockname()[1]}"), "--syncer", said.append)
    assert not said


def test_an_address_at_which_nobody_listens_is_named_at_once_and_waited_for() -> None:
    address, said = f"127.0.0.1:{free_port()}", list[str]()
    words = (
        rf"no syncer answered at {address} within 0\.3 s \(nobody listens .*\): start it, correct --syncer, or raise"
    )
    with pytest.raises(TransportError, match=words):
        await_listener(config(address), "--syncer", said.append)
    first, _, rest = said.pop().partition("; ")
    assert first == f"--syncer is {address}, and nobody listens there (connection refused)" and not said
    assert rest == "waiting up to 0.3 s for the syncer to start"


def test_a_name_that_does_not_resolve_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", unknown)
    with pytest.raises(TransportError, match=r"the name syncr is not known here \(Name or service not known\)"):
        await_listener(config("syncr:50051"), "DILOCO_SYNCER", lambda line: None)


def test_a_syncer_that_starts_meanwhile_is_found() -> None:
    port, listeners = free_port(), list[socket.socket]()

    def begin(line: str) -> None:
        listeners.append(socket.create_server(("127.0.0.1", port)))

    try:
        await_listener(config(f"127.0.0.1:{port}", 30.0), "--syncer", begin)
    finally:
        listeners[0].close()


def test_a_stop_and_a_proxy_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    stop.set()
    await_listener(config(f"127.0.0.1:{free_port()}", 30.0), "--syncer", pytest.fail, stop)
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    await_listener(config("syncer.example:50051", 30.0), "--syncer", pytest.fail)


def test_a_wrong_address_is_refused_by_the_name_of_its_option() -> None:
    bad = TransportConfig(address="127.0.0.1:1")
    object.__setattr__(bad, "address", "127.0.0.1")
    with pytest.raises(ValueError, match=r"--syncer is '127\.0\.0\.1': write host:port"):
        await_listener(bad, "--syncer", pytest.fail)
