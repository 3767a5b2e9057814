"""One port for gRPC and bulk connections: what the first bytes say, certificates of bulk connections, and silence."""

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from diloco_jax.transport.connection import Connection
from diloco_jax.transport.endpoints.grpc_link import GrpcLink
from diloco_jax.transport.link import TransportConfig, split_address
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.session import calls, front
from diloco_jax.transport.session.front import LOOK_BYTES_MAX, is_bulk
from diloco_jax.transport.session.stripe import GREETING, TICKET_BYTES
from diloco_jax.transport.trust import certificates
from diloco_jax.transport.trust.security import (
    BULK_PROTOCOL,
    bulk_context,
    credentials,
    dial,
    dial_listener,
    proxy_of,
)
from tests.limits import HANGS_S
from tests.transport.ends import CONFIG, Ends, greet, hear, hear_end, value

pytestmark = pytest.mark.net


def first_message(protocols: list[str]) -> bytes:
    """Return the first message of a TLS client that offers these protocols."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(protocols)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="syncer.diloco").do_handshake()
    return outgoing.read()


@pytest.mark.parametrize(
    ("protocols", "bulk"), [(["h2"], False), ([BULK_PROTOCOL], True), (["x", BULK_PROTOCOL], True)]
)
def test_first_message_of_tls_tells_once_it_is_whole(protocols: list[str], bulk: bool) -> None:
    message = first_message(protocols)
    for size in range(1, len(message)):
        assert is_bulk(message[:size], encrypted=True) is None
    assert is_bulk(message, encrypted=True) is bulk
    assert is_bulk(message + b"more", encrypted=True) is bulk


def test_first_bytes_of_plaintext_tell_as_soon_as_they_differ() -> None:
    for size in range(1, len(GREETING)):
        assert is_bulk(GREETING[:size], encrypted=False) is None
        assert is_bulk(GREETING[:size] + b"?", encrypted=False) is False
    assert is_bulk(GREETING + b"more", encrypted=False) is True
    # A connection that ended is for gRPC, and so is one without TLS, or with TLS where none is expected.
    for encrypted in (False, True):
        assert is_bulk(b"", encrypted=encrypted) is False
        assert is_bulk(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", encrypted=encrypted) is False
    assert is_bulk(first_message([BULK_PROTOCOL]), encrypted=False) is False
    # A message that announces more than TLS allows is not waited for.
    assert is_bulk(b"\x16\x03\x01\xff\xff" + bytes(LOOK_BYTES_MAX - 5), encrypted=True) is False


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    certificates.make(tmp_path, ["a", "b"])
    return tmp_path


def control(folder: Path, config: TransportConfig) -> Iterator[bytes]:
    """Open learner a's control call, and yield its ticket while it is open."""
    own, hold = credentials(config, "a"), threading.Event()
    header = pb.Header(run_id="run", sender="a", session=1, stripes=1, lane=pb.LANE_CONTROL)
    with calls.open_channel(config, own) as channel:
        metadata = (calls.header_metadata(header), *own.metadata)
        call = channel.stream_stream(f"/{calls.SERVICE}/{calls.OPEN}")(
            (b"" for _ in iter(hold.wait, True)), metadata=metadata
        )
        yield dict(call.initial_metadata())[calls.TICKET_KEY]
        hold.set()


def test_ticket_counts_with_the_certificate_of_its_learner_only(ends: Ends, folder: Path) -> None:
    files = certificates.settings(folder)
    listener = ends.listen(**files)
    config = TransportConfig(address=listener.address, **files)
    opened = control(folder, config)
    ticket = next(opened)
    assert len(ticket) == TICKET_BYTES
    for name, answer in (("b", b"the certificate is that of 'b'"), ("a", b"")):
        with dial(config.address, bulk_context(config, name), HANGS_S) as stream:
            assert isinstance(stream, ssl.SSLSocket) and stream.selected_alpn_protocol() == BULK_PROTOCOL
            stream.sendall(GREETING + ticket + b"\0")
            heard = stream.recv(1000)
            # The learner's own connection is opened: its first frame is longer than its prefix.
            assert answer in heard and len(heard) > 24
    next(opened, None)


def test_bulk_connection_without_a_certificate_is_closed(ends: Ends, folder: Path) -> None:
    listener = ends.listen(**certificates.settings(folder))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols([BULK_PROTOCOL])
    with pytest.raises(OSError), dial(listener.address, context, HANGS_S) as stream:
        stream.sendall(GREETING + bytes(TICKET_BYTES + 1))
        while stream.recv(1000):
            pass


def test_silent_bulk_connection_ends_the_session_and_idle_ones_beat(ends: Ends) -> None:
    """Neither side sends anything for several times the limit; then one side's beats no longer arrive."""
    short = {"keepalive_s": 0.1, "keepalive_timeout_s": 1.0}
    listener = ends.listen(**short)
    link: GrpcLink = ends.connect(**short)
    greet(listener, link)
    assert listener.receive(3.0) is None and link.receive(0) is None
    link.send(value(1, 3), b"abc")
    assert hear(listener).payload == b"abc"
    # The writers wait for this lock until the end of the test.
    with link._session.pieces._lock:
        link._session.config = TransportConfig(keepalive_s=60.0)
        hear_end(listener, "nothing came for 1.1 s")


def pair() -> tuple[Connection, Connection]:
    a, b = socket.socketpair()
    return Connection(a, HANGS_S), Connection(b, HANGS_S)


def test_views_arrive_whole_whatever_the_socket_takes_at_once() -> None:
    sender, receiver = pair()
    parts = [bytes([number]) * (1 + 7919 * number) for number in range(100)]
    thread = threading.Thread(target=sender.send, args=([memoryview(part) for part in parts],))
    thread.start()
    whole = bytearray(sum(map(len, parts)))
    receiver.fill(memoryview(whole))
    thread.join(HANGS_S)
    assert whole == b"".join(parts)
    sender.finish()
    with pytest.raises(EOFError):
        receiver.fill(memoryview(bytearray(1)))
    for each in (sender, receiver):
        each.close()


def test_cut_ends_a_read_and_a_write_at_once() -> None:
    sender, receiver = pair()
    ended: list[BaseException] = []

    def use(connection: Connection, fill: bool) -> None:
        try:
            if fill:
                connection.fill(memoryview(bytearray(1)))
            else:
                connection.send([memoryview(bytes(1 << 24))])
        except (OSError, EOFError) as error:
            ended.append(error)

    threads = [threading.Thread(target=use, args=(sender, fill)) for fill in (True, False)]
    for thread in threads:
        thread.start()
    sender.cut()
    for thread in threads:
        thread.join(HANGS_S)
        assert not thread.is_alive()
    assert len(ended) == 2
    for each in (sender, receiver):
        each.close()


def test_grpc_calls_reach_the_same_port(ends: Ends) -> None:
    listener = ends.listen()
    with grpc.insecure_channel(listener.address) as channel:
        reply = channel.unary_unary(f"/{calls.SERVICE}/{calls.STATUS}")(b"", timeout=HANGS_S)
    assert pb.StatusReply.FromString(reply).json == "{}"
    assert split_address(listener.address)[1] > 0 and CONFIG.stripes > 1


def serve_proxy(listener: socket.socket, target: tuple[str, int], answers: list[bytes], asked: list[bytes]) -> None:
    """Answer one CONNECT each; after "200" forward what comes to the target, and what it answers."""
    for answer in answers:
        stream, _ = listener.accept()
        with stream:
            asked.append(stream.recv(1000))
            stream.sendall(answer)
            if b"200" in answer:
                with socket.create_connection(target) as inner:
                    inner.sendall(stream.recv(1000))
                    while piece := inner.recv(1000):
                        stream.sendall(piece)


def test_bulk_connections_take_grpcs_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answers = list[bytes](), [b"HTTP/1.1 200 ok\r\nVia: x\r\n\r\n", b"HTTP/1.1 403 no\r\n\r\n", b"HTTP/1.1 2"]
    with socket.create_server(("127.0.0.1", 0)) as proxy, socket.create_server(("127.0.0.1", 0)) as target:
        arguments = (proxy, target.getsockname(), answers, asked)
        thread = threading.Thread(target=serve_proxy, args=arguments, daemon=True)
        thread.start()
        monkeypatch.setenv("https_proxy", "http://user:secret@{}:{}".format(*proxy.getsockname()))
        with dial_listener("syncer.example:7", None, HANGS_S) as stream:
            stream.sendall(b"hello")
            inner, _ = target.accept()
            with inner:
                assert inner.recv(100) == b"hello"
                inner.sendall(b"answer")
            assert stream.recv(100) == b"answer"
        for reason in ("refused syncer.example:7", "ended the connection"):
            with pytest.raises(ConnectionError, match=reason):
                dial_listener("syncer.example:7", None, HANGS_S)
        thread.join(HANGS_S)
    lines = asked[0].split(b"\r\n")
    assert lines[:2] == [b"CONNECT syncer.example:7 HTTP/1.1", b"Host: syncer.example:7"]
    assert lines[2:] == [b"Proxy-Authorization: Basic dXNlcjpzZWNyZXQ=", b"", b""]
    assert proxy_of("127.0.0.1:7") == ""
    monkeypatch.setenv("no_proxy", "other, .example")
    assert proxy_of("syncer.example:7") == "" and proxy_of("syncer.example.org:7") != ""


def test_an_incomplete_message_is_looked_at_less_and_less_often(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look takes time of the thread that accepts all connections."""
    pauses: list[float] = []
    done = threading.Event()

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 9:
            done.set()
            await asyncio.Event().wait()

    listener = ends.listen()
    monkeypatch.setattr("diloco_jax.transport.session.front.asyncio.sleep", pause)
    with socket.create_connection(split_address(listener.address), HANGS_S) as stream:
        stream.sendall(GREETING[:1])
        assert done.wait(HANGS_S)
    assert pauses == [0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 1.28, 1.28]


def test_one_host_keeps_few_connections_that_do_not_show_what_they_are_for(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The honest caller has several connections, which a busy machine sorts late.
    monkeypatch.setattr(front, "UNSORTED_MAX", 16)
    listener = ends.listen()
    idle = [socket.create_connection(split_address(listener.address), HANGS_S) for _ in range(18)]
    for stream in idle[:2]:
        stream.settimeout(HANGS_S)
        assert stream.recv(1) == b"", "the oldest ones end"
    # An honest caller shows at once what it is for.
    greet(listener, ends.connect())
    for stream in idle:
        stream.close()
