"""The connections of the slices of an island: what arrives, who is refused, and how a slice leaves and returns."""

import contextlib
import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from diloco_jax.transport.connection import Connection
from diloco_jax.transport.link import TransportConfig, split_address
from diloco_jax.transport.session.refusals import REFUSALS
from diloco_jax.transport.slices import peer
from diloco_jax.transport.slices.admission import GREETINGS, RELEASE_STAMP, SliceGreeting, encoded
from diloco_jax.transport.slices.frames import FrameReader, send_frame
from diloco_jax.transport.slices.links import Item, SliceJoined, SliceLinks
from diloco_jax.transport.trust import certificates
from tests.limits import HANGS_S
from tests.sockets import free_port
from tests.transport.ends import comes_true

pytestmark = pytest.mark.net


class Part(NamedTuple):
    number: int
    name: str = ""


class Island:
    """Slices in one process; all are closed at the end of the test."""

    def __init__(self, slices: int) -> None:
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in range(slices)]
        self.config = TransportConfig()
        self.links: list[SliceLinks] = []

    def open(self, own: int, **changes: Any) -> SliceLinks:
        names = {"run_id": "run", "learner_id": "island-0", "addresses": self.addresses} | changes
        config = names.pop("config", self.config)
        self.links.append(SliceLinks(config, own=own, messages=(Part,), **names))
        return self.links[-1]

    def meet(self, slices: Sequence[int], **changes: Any) -> list[SliceLinks]:
        """Open slices, and wait until each has received that the others joined."""
        found = [self.open(number, **changes) for number in slices]
        for link, number in zip(found, slices, strict=True):
            joined = {hear(link, SliceJoined()).slice for _ in slices[1:]}
            assert joined == set(slices) - {number}
        return found


@pytest.fixture(autouse=True)
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each refusal have a line: tests before this one may have had some of the same caller in the last minute."""
    monkeypatch.setattr(REFUSALS, "_pairs", {})


@pytest.fixture
def island() -> Iterator[Island]:
    made = Island(3)
    yield made
    for each in made.links:
        each.close(1.0)


def hear(link: SliceLinks, message: object = ...) -> Item:
    item = link.receive(HANGS_S)
    assert item is not None, "nothing came"
    assert message is ... or item.message == message, item
    return item


def hear_end(link: SliceLinks, number: int, words: str) -> None:
    item = hear(link, None)
    assert item.slice == number and words in item.reason, item


def test_messages_arrive_in_order_with_the_same_bits(island: Island) -> None:
    zero, one, two = island.meet((0, 1, 2))
    assert zero.connected == {1: one.session, 2: two.session} and two.connected == {0: zero.session, 1: one.session}
    random = np.random.default_rng(0)
    # Not a number among them: the bits must be the same, not the values. The last one has several pieces.
    arrays = [random.integers(0, 1 << 32, size, np.uint32).view(np.float32) for size in (0, 1, 1000, 1_000_003)]
    for sender in (zero, two):
        for number, array in enumerate(arrays):
            assert sender.send(1, Part(number, "x"), array)
    found = [hear(one) for _ in range(2 * len(arrays))]
    for sender in (0, 2):
        own = [item for item in found if item.slice == sender]
        assert [item.message for item in own] == [Part(number, "x") for number in range(len(arrays))]
        assert [bytes(item.payload) for item in own] == [array.tobytes() for array in arrays]
    assert all(link.receive(0) is None for link in (zero, one, two))
    with pytest.raises(ValueError, match="no other slice 3"):
        zero.send(3, Part(0))


def test_a_slice_that_was_lost_returns(island: Island) -> None:
    zero, one, two = island.meet((0, 1, 2))
    first = one.session
    one.send(0, Part(1), bytes(3_000_000))
    one.close(HANGS_S)
    hear(zero, Part(1))
    for link in (zero, two):
        hear_end(link, 1, "slice 1 ended the connection: the slice closed")
        assert link.silent_s(1) == 0.0 and not link.send(1, Part(2))
    again = island.open(1)
    assert again.session != first
    for link in (zero, two):
        assert hear(link, SliceJoined())[:2] == (1, again.session)
        assert link.send(1, Part(3))
    assert {hear(again).message for _ in range(4)} == {SliceJoined(), Part(3)}


def test_a_dropped_slice_may_return(island: Island) -> None:
    zero, one = island.meet((0, 1))
    for link, other in ((zero, 1), (one, 0)):
        link.drop(other, "it was late")
        link.drop(other, "it was late")
        assert not link.send(other, Part(1))
        hear_end(link, other, "dropped: it was late")
        hear_end(zero if link is one else one, 1 - other, "dropped: it was late")
        assert hear(zero, SliceJoined()).slice == 1 and hear(one, SliceJoined()).slice == 0


def test_beats_show_that_a_slice_runs(island: Island, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "BEAT_S", 0.01)
    zero, one = island.meet((0, 1))
    began_s = time.monotonic()
    for link, other in ((zero, 1), (one, 0)):
        assert comes_true(lambda link=link, other=other: link.silent_s(other) < time.monotonic() - began_s)
    assert zero.silent_s(2) == 0.0


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_process_that_ends_does_not_listen_any_more(island: Island, tmp_path: Path, encrypted: bool) -> None:
    if encrypted:
        certificates.make(tmp_path, ["island-0"])
        island.config = replace(TransportConfig(), **certificates.settings(tmp_path))
    zero, one = island.meet((0, 1))
    assert zero.listens(1, 0.2) and one.listens(0, 0.2)
    assert not zero.listens(2, HANGS_S), "nobody has opened this port"
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(zero.listens, 1, HANGS_S)
        assert comes_true(lambda: bool(one._port._strangers) or found.done())
        one.close(HANGS_S)
        assert not found.result(HANGS_S)
    assert not zero.listens(1, HANGS_S)


def test_a_slice_that_does_not_read_loses_its_connection(island: Island) -> None:
    limit = 1 << 20
    zero, one = island.meet((0, 1), queue_bytes_max=limit)
    zero.send(1, Part(0))
    hear(one, Part(0))
    # Both sockets and both queues take a bounded part of these messages.
    sent = 1
    while zero.send(1, Part(sent), bytes(limit)):
        sent += 1
        assert sent < 1000
    hear_end(zero, 1, "too slow: more than 1048576 bytes wait for slice 1")
    # What was received before stays in order, and ends with the end.
    for number in range(1, sent + 1):
        if (item := hear(one)).message is None:
            break
        assert item.message == Part(number)
    assert item.message is None


def test_close_leaves_no_thread(island: Island) -> None:
    before = set(threading.enumerate())
    links = island.meet((0, 1, 2))
    assert len(set(threading.enumerate()) - before) >= 6
    for link in links:
        link.close(HANGS_S)
        link.close(HANGS_S)
    assert comes_true(lambda: not set(threading.enumerate()) - before)
    assert links[0].connected == {} and not links[0].send(1, Part(1))


OURS = SliceGreeting("run", "island-0", 1, 3, 0, RELEASE_STAMP, "", 7, 0, 1, encoded(b"secret"))
STRANGERS = {
    "no token": (OURS._replace(token=""), "the token was not sent"),
    "wrong token": (OURS._replace(token=encoded(b"secreT")), "the token is not"),
    "no base64": (OURS._replace(token="??"), "the token was not sent"),
    "another run": (OURS._replace(run_id="old"), "the run 'old'"),
    "another island": (OURS._replace(learner_id="island-1"), "the island 'island-1'"),
    "another release": (OURS._replace(release="0/0/0"), "the release '0/0/0'"),
    "other settings": (OURS._replace(settings="ab"), "the digest of settings, data and devices 'ab'"),
    "another count": (OURS._replace(slices=4), "the number of slices 4"),
    "another host": (OURS._replace(host=1), "the host number 1"),
    "a lower number": (OURS._replace(slice=0), "slice 0 dials slice 0"),
    "no slice": (OURS._replace(slice=3), "slice 3 dials slice 0"),
    "another address": (OURS._replace(dials=1), "dials slice 1 at the address of slice 0"),
}


@pytest.fixture
def guarded(island: Island, tmp_path: Path) -> SliceLinks:
    """Return slice 0 of a run with a token."""
    (tmp_path / "token").write_text("secret\n")
    island.config = TransportConfig(token_file=str(tmp_path / "token"))
    return island.open(0)


@contextlib.contextmanager
def dialled(island: Island, number: int = 0) -> Iterator[Connection]:
    stream = socket.create_connection(split_address(island.addresses[number]))
    connection = Connection(stream, HANGS_S)
    try:
        yield connection
    finally:
        connection.close()


def greet(connection: Connection, greeting: SliceGreeting) -> Any:
    send_frame(connection, GREETINGS.pack(greeting))
    return GREETINGS.unpack(FrameReader(connection).read()[0])


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_is_refused_with_a_reason(
    island: Island, guarded: SliceLinks, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    greeting, words = STRANGERS[name]
    with dialled(island) as connection:
        assert words in greet(connection, greeting).reason
        with pytest.raises(EOFError):
            FrameReader(connection).read()
    assert comes_true(lambda: f"refused 127.0.0.1: {words}" in caplog.text or words in caplog.text)
    assert guarded.receive(0) is None
    # A slice of this island is admitted afterwards.
    island.open(1)
    assert hear(guarded, SliceJoined()).slice == 1


@pytest.mark.parametrize(
    "raw",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", struct.pack("<IQQ", 1 << 20, 0, 0), struct.pack("<IQQ", 0, 1 << 30, 0)],
)
def test_garbage_ends_its_connection_only(
    island: Island, guarded: SliceLinks, raw: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with dialled(island) as connection:
        connection.send([memoryview(raw)])
        with pytest.raises((EOFError, ConnectionResetError)):
            connection.fill(memoryview(bytearray(1)))
    assert comes_true(lambda: "refused 127.0.0.1" in caplog.text)
    assert guarded.receive(0) is None and guarded.connected == {}


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (struct.pack("<IQQ", (1 << 20) + 1, 0, 0), "announces 1048577 bytes"),
        (struct.pack("<IQQ", 0, (1 << 34) + 1, 0), "a payload of 17179869185"),
        (b'["Part",["1","x"]]', "Part.number is '1', not int"),
        (b'["SliceGreeting",[]]', "'SliceGreeting' is not expected here"),
    ],
)
def test_a_wrong_frame_ends_its_connection_only(island: Island, guarded: SliceLinks, head: bytes, words: str) -> None:
    two = island.open(2)
    assert hear(guarded, SliceJoined()).slice == 2
    with dialled(island) as connection:
        assert isinstance(greet(connection, OURS), SliceGreeting)
        assert hear(guarded, SliceJoined())[:2] == (1, OURS.session)
        connection.send([memoryview(head)]) if head[:1] != b"[" else send_frame(connection, head)
        hear_end(guarded, 1, words)
        reader = FrameReader(connection)
        while not (last := reader.read()[0]):
            pass
        assert words.encode() in last
    assert guarded.connected == {2: two.session} and two.send(0, Part(5)) and hear(guarded, Part(5)).slice == 2


def test_the_newest_connection_of_a_slice_counts(island: Island, guarded: SliceLinks) -> None:
    with dialled(island) as first, dialled(island) as second, dialled(island) as late:
        greet(first, OURS._replace(attempt=2))
        hear(guarded, SliceJoined())
        assert "a later connection" in greet(late, OURS).reason
        greet(second, OURS._replace(session=8))
        hear_end(guarded, 1, "replaced by a newer connection")
        assert hear(guarded, SliceJoined()).session == 8 and guarded.connected == {1: 8}


def test_a_slice_reports_why_it_was_refused(
    island: Island, guarded: SliceLinks, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        island.open(1, run_id="old")
        words = "slice 0 at 127.0.0.1"
        assert comes_true(lambda: words in caplog.text and "this slice 'run'" in caplog.text)
    assert guarded.connected == {}


@pytest.mark.parametrize(
    ("own", "addresses", "words"),
    [
        (2, ["127.0.0.1:1", "127.0.0.1:2"], "slice 2 of an island of 2"),
        (0, [], "island of 0 slices"),
        (0, ["127.0.0.1:1", "127.0.0.1:1"], "two slices have one address"),
        (0, ["127.0.0.1:0"], "a port above 0"),
        (0, ["127.0.0.1:1", "10.0.0.1:2"], "transport.allow_plaintext"),
    ],
)
def test_places_that_cannot_be(own: int, addresses: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SliceLinks(TransportConfig(), "run", "island-0", own, addresses, (Part,))


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.1", "nobody.invalid"])
def test_an_address_that_is_not_free_yet_is_worth_another_start(host: str) -> None:
    """The earlier process may still have the port, and a new machine may not have its name yet."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address, config = f"{host}:{taken.getsockname()[1]}", TransportConfig(allow_plaintext=True)
        with pytest.raises(ConnectionError, match="cannot listen on the slice's address"):
            SliceLinks(config, "run", "island-0", 0, [address], (Part,))


def test_certificates_protect_the_connections(island: Island, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    certificates.make(tmp_path, ["island-0", "island-1"])
    island.config = replace(TransportConfig(), **certificates.settings(tmp_path))
    zero, one = island.meet((0, 1))
    payload = np.arange(700_000, dtype=np.float32)
    for sender, receiver in ((zero, one), (one, zero)):
        assert sender.send(receiver._own, Part(1), payload)
        assert bytes(hear(receiver, Part(1)).payload) == payload.tobytes()
    # Another island's certificate cannot be used for this one.
    own = {
        name: str(tmp_path / f"island-1.{ending}") for name, ending in (("tls_certificate", "pem"), ("tls_key", "key"))
    }
    with pytest.raises(ValueError, match="island-1"):
        island.open(2, config=replace(island.config, **own))
    # Nor can a caller without a certificate join.
    with dialled(island) as connection, contextlib.suppress(OSError, EOFError):
        greet(connection, OURS)
    assert comes_true(lambda: "refused 127.0.0.1" in caplog.text)
    assert zero.receive(0) is None
