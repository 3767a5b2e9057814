"""Links over real connections: they break, carry wrong messages, or lead to another process."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from diloco_jax.protocol.messages import Advance, Heartbeat
from diloco_jax.transport import wire
from diloco_jax.transport.endpoints.grpc_link import GrpcLink, GrpcListener
from diloco_jax.transport.link import Rejected, TransportConfig, TransportError, split_address
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.session import calls
from diloco_jax.transport.session.entrance import Entrance
from diloco_jax.transport.session.stripe import GREETING, TICKET_BYTES
from tests.limits import HANGS_S
from tests.transport.ends import CONFIG, LIMIT, Ends, bulk_bytes, greet, hear, hear_end, hear_message, value

pytestmark = pytest.mark.net

CHILD = """
import sys
from diloco_jax.protocol.messages import Advance, Heartbeat
from diloco_jax.transport.endpoints import grpc_link
from diloco_jax.transport.link import TransportConfig
role, address = sys.argv[1:]
if role == "learner":
    side = grpc_link.connect(TransportConfig(address=address), run_id="run", learner_id="a", incarnation=0)
    side.send(Heartbeat("a", 0))
else:
    side = grpc_link.listen(TransportConfig(address=address), run_id="run", epoch=1)
    print(side.address, flush=True)
    side.receive(60)
    side.send("a", Advance(1))
side.receive(60)
"""


class Child:
    """The other side as a separate process, to be killed."""

    def __init__(self, role: str, address: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, role, address], stdout=subprocess.PIPE, text=True, cwd=os.getcwd()
        )

    def __enter__(self) -> subprocess.Popen[str]:
        return self.process

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


class RawLearner:
    """Learner that sends raw bytes on its one bulk connection, so that it can send what the package never sends."""

    def __init__(self, address: str, **names: Any) -> None:
        self.hold = threading.Event()
        self.channel = grpc.insecure_channel(address)
        self.header = header(**names)
        self.call = call_with(self.channel, self.header, (b"" for _ in iter(self.hold.wait, True)))
        self.ticket = dict(self.call.initial_metadata())[calls.TICKET_KEY]
        self.bulk = greeted(address, self.ticket)
        # The syncer has both lanes now.
        assert pb.Frame.FromString(next(self.call)).HasField("holdings")

    def say(self, frames: list[bytes]) -> None:
        self.bulk.sendall(b"".join(frames))

    def end(self) -> None:
        """End the bulk connection without a Goodbye."""
        self.bulk.shutdown(socket.SHUT_WR)

    def close(self, grace_s: float = 0.0) -> None:
        del grace_s
        self.hold.set()
        self.bulk.close()
        self.channel.close()


def greeted(address: str, ticket: bytes, stripe: int = 0) -> socket.socket:
    """Open a bulk connection."""
    found = socket.create_connection(split_address(address), timeout=HANGS_S)
    found.sendall(GREETING + ticket + bytes((stripe,)))
    return found


def bulk_frames(payload: bytes, chunk_bytes: int, **changes: Any) -> list[bytes]:
    """Return the frames of a value; `changes` are those of the chunks' fields."""
    made = []
    for piece in wire.pieces(1, wire.pack_body(value(1, len(payload))), [memoryview(payload)], chunk_bytes):
        for name, new in changes.items():
            setattr(piece.chunk, name, new)
        made.append(bulk_bytes(piece))
    return made


def header(**names: Any) -> pb.Header:
    return pb.Header(**{"run_id": "run", "sender": "a", "session": 1, "stripes": 1, "lane": pb.LANE_CONTROL, **names})


def call_with(channel: grpc.Channel, said: pb.Header | bytes | None, frames: Iterator[bytes], to: str = "Open") -> Any:
    """The call that opens a control stream, with this header in its metadata."""
    raw = said.SerializeToString() if isinstance(said, pb.Header) else said
    metadata = () if raw is None else (("diloco-header-bin", raw),)
    return channel.stream_stream(f"/diloco.v1.Syncer/{to}")(frames, metadata=metadata, timeout=HANGS_S)


@pytest.fixture
def raw(ends: Ends, listener: GrpcListener) -> RawLearner:
    return ends.keep(RawLearner(listener.address))


def test_killed_learner_is_noticed(ends: Ends, listener: GrpcListener) -> None:
    with Child("learner", listener.address) as process:
        # A Python process starts, perhaps on a busy machine.
        assert hear(listener, HANGS_S).message == Heartbeat("a", 0)
        process.send_signal(signal.SIGKILL)
        hear_end(listener, "connection to 'a' was lost")
    assert listener.receive(0) is None and not listener.send("a", Advance(1))
    # The incarnation is not stale; only its connection ended.
    ends.meet()


def test_killed_syncer_is_noticed(ends: Ends) -> None:
    with Child("syncer", "127.0.0.1:0") as process:
        assert process.stdout is not None
        link = ends.connect(to=process.stdout.readline().strip())
        link.send(Heartbeat("a", 0))
        assert hear_message(link) == Advance(1)
        process.send_signal(signal.SIGKILL)
        assert hear_end(link, "connection to 'syncer' was lost").peer == "syncer"
        assert link.receive(0) is None


def test_one_broken_connection_ends_both(ends: Ends, listener: GrpcListener) -> None:
    link = ends.meet()
    link._session.lanes[pb.LANE_BULK, 0].cancel()
    for side in (link, listener):
        hear_end(side, "bulk connection")
    for ended in link._streams._ended:
        assert ended.wait(HANGS_S)
    link.close(1.0)
    assert link.receive(0) is None and listener.receive(0) is None


def test_close_gives_up_after_its_grace_when_nobody_reads(ends: Ends, listener: GrpcListener) -> None:
    link = ends.connect(queue_payloads_max=1000)
    payload = bytes(1 << 24)
    # This is more than the syncer's inbox and the sockets hold.
    for _ in range(TransportConfig().queue_payloads_max + 40):
        link.send(value(1, len(payload)), payload[:1])
    for _ in range(4):
        link.send(value(1, len(payload)), payload)
    link.close(0.05)
    while (heard := hear(listener)).kind == "message":
        pass
    assert "connection to 'a' was lost" in heard.reason


def test_corrupt_chunk_ends_the_session_and_the_reason_reaches_both(listener: GrpcListener, raw: RawLearner) -> None:
    good, bad = bulk_frames(b"0123456789abcdef", 8)
    raw.say([good, bad[:-1] + b"?"])
    hear_end(listener, "'a' sent on the bulk connection what cannot be used: corrupt chunk: its checksum differs")
    (last,) = list(raw.call)
    assert "its checksum differs at offset 8" in pb.Frame.FromString(last).goodbye.reason
    assert listener.receive(0) is None


NOISE = b"".join(wire.bulk_frame(b"\xff\x00noise", (), checked=True))
HUGE = b"".join(wire.bulk_frame(b"", [memoryview(bytes(wire.CHUNK_BYTES_MAX + 1))], checked=True))
GRPC_HEAD = pb.Frame(header=header(), chunk=pb.Chunk(message=1)).SerializeToString()
TWICE = wire.pack_body(value(1)) + pb.Frame(chunk=pb.Chunk(message=1)).SerializeToString()


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        pytest.param(bulk_frames(b"0123", 8, payload_bytes=1 << 50), f"the limit here is {LIMIT}", id="size"),
        pytest.param(bulk_frames(b"0123", 8, offset=1), "at 1 of 4 of message 1 is out of place", id="offset"),
        pytest.param([NOISE], "malformed frame", id="noise"),
        pytest.param([b"\xff" * wire.PREFIX_BYTES], "a frame announces 4294967295 bytes beside", id="large-head"),
        pytest.param([HUGE[: wire.PREFIX_BYTES]], "beside 4194305 bytes of data, the limits are", id="large-chunk"),
        pytest.param([b"".join(wire.bulk_frame(GRPC_HEAD, (), checked=True))], "of the control lane", id="header"),
        pytest.param([b"".join(wire.bulk_frame(TWICE, (), checked=False))], "corrupt frame", id="no-checksum"),
        pytest.param(
            [b"".join(wire.bulk_frame(TWICE, [memoryview(b"x")], checked=True))], "is out of place", id="no-room"
        ),
    ],
)
def test_wrong_bytes_on_a_bulk_connection_end_the_session(
    listener: GrpcListener, raw: RawLearner, said: list[bytes], reason: str
) -> None:
    raw.say(said)
    hear_end(listener, reason)
    assert listener.receive(0) is None


def test_stream_that_ends_without_goodbye_is_a_loss(listener: GrpcListener, raw: RawLearner) -> None:
    raw.say(bulk_frames(b"0123456789", 4)[:2])
    raw.end()
    hear_end(listener, "connection to 'a' was lost")


def answer(stream: socket.socket) -> bytes:
    """Return all that the listener sends until it closes the connection."""
    with stream, stream.makefile("rb") as file:
        return file.read()


@pytest.mark.parametrize(
    ("other", "stripe", "reason"),
    [
        (b"?" * TICKET_BYTES, 0, b"no session here waits for this bulk connection"),
        (b"", 1, b"no session here waits for this bulk connection"),
        (b"", 0, b"this bulk connection of the session is open already"),
    ],
    ids=["unknown-ticket", "unknown-stripe", "taken-stripe"],
)
def test_bulk_connection_that_belongs_to_no_session_is_refused(
    listener: GrpcListener, raw: RawLearner, other: bytes, stripe: int, reason: bytes
) -> None:
    assert reason in answer(greeted(listener.address, other or raw.ticket, stripe))
    raw.say(bulk_frames(b"0123456789", 4))
    assert hear(listener).payload == b"0123456789", "the session is open"


def test_greeting_that_changes_its_mind_is_closed(ends: Ends, listener: GrpcListener) -> None:
    with socket.create_connection(split_address(listener.address), timeout=HANGS_S) as stream:
        stream.sendall(GREETING + b"too short")
        stream.shutdown(socket.SHUT_WR)
        assert answer(stream) == b""
    ends.meet()


def test_releases_whose_payloads_travel_in_grpc_are_refused_on_both_sides(
    ends: Ends, listener: GrpcListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    with grpc.insecure_channel(listener.address) as channel, pytest.raises(grpc.RpcError) as raised:
        next(call_with(channel, header(), iter(()), to="Connect"))
    assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "speaks protocol 1, the syncer protocol 2: upgrade the learner" in raised.value.details()
    monkeypatch.setattr(calls, "OPEN", "NoSuchMethod")
    with pytest.raises(Rejected, match=r"of another release .* speaks protocol 2: upgrade the syncer first"):
        ends.connect()


@pytest.mark.parametrize("said", [None, b"\xff", b""])
def test_call_without_a_header_is_refused(listener: GrpcListener, said: bytes | None) -> None:
    with grpc.insecure_channel(listener.address) as channel, pytest.raises(grpc.RpcError) as raised:
        next(call_with(channel, said, iter(())))
    assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "names no lane" in raised.value.details()
    assert listener.receive(0) is None


def test_half_a_session_is_given_up(ends: Ends) -> None:
    listener = ends.listen(connect_timeout_s=0.05)
    hold = threading.Event()
    with grpc.insecure_channel(listener.address) as channel:
        call = call_with(channel, header(), (b"" for _ in iter(hold.wait, True)))
        frame = pb.Frame.FromString(next(call))
        hold.set()
    assert "not all connections came within 0.05 s" in frame.goodbye.reason
    assert listener.receive(0) is None


def test_half_a_session_of_a_newer_incarnation_ends_nobodys(
    ends: Ends, listener: GrpcListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, admitted, right = ends.meet(), threading.Event(), GrpcListener._admit

    def admit(self: GrpcListener, book: Any, context: Any) -> Any:
        made = right(self, book, context)
        admitted.set()
        return made

    monkeypatch.setattr(GrpcListener, "_admit", admit)
    with grpc.insecure_channel(listener.address) as channel:
        call = call_with(channel, header(incarnation=9), iter(()))
        assert admitted.wait(HANGS_S)
        greet(listener, link)
        call.cancel()
    assert listener.send("a", Advance(1)) and hear_message(link) == Advance(1)


def test_port_in_use_names_the_address_and_the_remedy(ends: Ends, listener: GrpcListener) -> None:
    with pytest.raises(ValueError, match=rf"cannot listen on transport.address {listener.address}.*in use.*choose"):
        ends.listen(address=listener.address)
    with pytest.raises(ValueError, match=r"cannot listen on transport.address 192\.0\.2\.1:0"):
        ends.listen(address="192.0.2.1:0", allow_plaintext=True)


def test_unreachable_syncer_names_address_time_and_remedy(ends: Ends) -> None:
    with socket.socket() as free:
        # The port is bound without a listener: no other process gets it, and nothing answers there.
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(TransportError, match=rf"no syncer answered at {address} within 0\.2 s: start it"):
            ends.connect(to=address, connect_timeout_s=0.2)


def test_learner_that_starts_first_waits_for_the_syncer(ends: Ends) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    links: list[GrpcLink] = []
    thread = threading.Thread(target=lambda: links.append(ends.connect(to=address)), daemon=True)
    thread.start()
    listener = ends.listen(address=address)
    thread.join(HANGS_S)
    (link,) = links
    greet(listener, link)


def test_a_connection_for_each_stream_and_the_real_port(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    peers, bulk = set[str](), list[socket.socket]()
    right, serve_bulk = GrpcListener._admit, Entrance._serve_bulk

    def admit(self: GrpcListener, book: Any, context: Any) -> Any:
        peers.add(context.peer())
        return right(self, book, context)

    def count(self: Entrance, stream: socket.socket) -> None:
        bulk.append(stream)
        serve_bulk(self, stream)

    monkeypatch.setattr(GrpcListener, "_admit", admit)
    monkeypatch.setattr(Entrance, "_serve_bulk", count)
    host, port = split_address(ends.listen().address)
    assert host == "127.0.0.1" and port > 0
    ends.connect()
    assert len(peers) == 1 and len(bulk) == CONFIG.stripes, "no two streams may share a connection"
