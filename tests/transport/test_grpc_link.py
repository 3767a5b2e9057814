"""What only a real connection can do: break, lie, be somewhere else."""

from __future__ import annotations

import dataclasses
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

from diloco_jax.protocol.messages import Advance, FragmentValue, GlobalFragment, Heartbeat
from diloco_jax.transport import grpc_link, wire
from diloco_jax.transport.grpc_link import GrpcLink, GrpcListener
from diloco_jax.transport.link import Delivery, TransportConfig, TransportError, split_address
from diloco_jax.transport.proto import diloco_pb2 as pb

pytestmark = pytest.mark.net
WAIT_S = 20.0
CONFIG = TransportConfig(payload_bytes_max=1 << 24, chunk_bytes=1 << 16)

CHILD = """
import sys
from diloco_jax.protocol.messages import Advance, Heartbeat
from diloco_jax.transport import grpc_link
from diloco_jax.transport.link import TransportConfig
role, address = sys.argv[1:]
if role == "learner":
    side = grpc_link.connect(TransportConfig(address=address), run_id="run", learner_id="a", incarnation=0)
    side.send(Heartbeat("a", 0))
else:
    side = grpc_link.listen(TransportConfig(address=address), run_id="run")
    print(side.address, flush=True)
    side.receive(60)
    side.send("a", Advance(1))
side.receive(60)
"""


@pytest.fixture
def listener() -> Iterator[GrpcListener]:
    made = grpc_link.listen(CONFIG, run_id="run")
    yield made
    made.close(1.0)


def connect(address: str, **changes: Any) -> GrpcLink:
    config = dataclasses.replace(CONFIG, address=address, **changes)
    return grpc_link.connect(config, run_id="run", learner_id="a", incarnation=0)


def hear(side: GrpcLink | GrpcListener) -> Delivery:
    delivery = side.receive(WAIT_S)
    assert delivery is not None, "nothing came"
    return delivery


class Child:
    """The other side in a process of its own, to be killed."""

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
    """A learner that speaks frames by hand, so that it can say what our own code never would."""

    def __init__(self, address: str, **names: Any) -> None:
        self.channels: list[grpc.Channel] = []
        self.release, self.hold = threading.Event(), threading.Event()
        self.said: dict[int, list[bytes]] = {pb.LANE_CONTROL: [], pb.LANE_BULK: []}
        self.headers: dict[int, pb.Header] = {}
        self.calls: dict[int, Any] = {}
        fields: dict[str, Any] = {"run_id": "run", "sender": "a", "session": 1, "stripes": 1, **names}
        for lane in (pb.LANE_CONTROL, pb.LANE_BULK):
            self.headers[lane] = pb.Header(lane=lane, **fields)
            channel = grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
            self.channels.append(channel)
            self.calls[lane] = channel.stream_stream("/diloco.v1.Syncer/Connect")(
                self._frames(lane),
                metadata=(("diloco-header-bin", self.headers[lane].SerializeToString()),),
                timeout=WAIT_S,
            )

    def _frames(self, lane: int) -> Iterator[bytes]:
        self.release.wait(WAIT_S)
        yield from self.said[lane]
        self.hold.wait(WAIT_S)

    def say(self, lane: int, frames: list[bytes]) -> None:
        self.said[lane] = frames
        for call in self.calls.values():
            assert wire.split(next(call))[1] == b""  # the syncer has both lanes
        self.release.set()

    def value_frames(self, payload: bytes, chunk_bytes: int) -> list[bytes]:
        body = wire.pack_body(FragmentValue("a", 0, 1, 0, 9, 9, 9, 0, 9, len(payload)))
        header = wire.pack_header(self.headers[pb.LANE_BULK])
        pieces = wire.pieces(1, body, [memoryview(payload)], chunk_bytes)
        return [wire.piece_frame(header, piece) for piece in pieces]

    def close(self) -> None:
        self.release.set()
        self.hold.set()
        for channel in self.channels:
            channel.close()


@pytest.fixture
def raw(listener: GrpcListener) -> Iterator[RawLearner]:
    made = RawLearner(listener.address)
    yield made
    made.close()


def test_killed_learner_is_noticed(listener: GrpcListener) -> None:
    with Child("learner", listener.address) as process:
        assert hear(listener).message == Heartbeat("a", 0)
        process.send_signal(signal.SIGKILL)
        delivery = hear(listener)
        assert delivery.kind == "disconnected" and "connection to 'a' was lost" in delivery.reason
    assert listener.receive(0) is None and not listener.send("a", Advance(1))
    link = connect(listener.address)  # the incarnation is not stale: only its connection died
    link.send(Heartbeat("a", 0))
    assert hear(listener).message == Heartbeat("a", 0)
    link.close(1.0)


def test_killed_syncer_is_noticed() -> None:
    with Child("syncer", "127.0.0.1:0") as process:
        assert process.stdout is not None
        link = connect(process.stdout.readline().strip())
        link.send(Heartbeat("a", 0))
        assert hear(link).message == Advance(1)
        process.send_signal(signal.SIGKILL)
        delivery = hear(link)
        assert (delivery.kind, delivery.peer) == ("disconnected", "syncer")
        assert "connection to 'syncer' was lost" in delivery.reason
        assert link.receive(0) is None
        link.close(1.0)


def test_one_broken_connection_ends_both(listener: GrpcListener) -> None:
    link = connect(listener.address)
    link.send(Heartbeat("a", 0))
    assert hear(listener).message == Heartbeat("a", 0)
    link._streams._channels[1].close()  # bulk
    for side in (link, listener):
        delivery = hear(side)
        assert delivery.kind == "disconnected" and "bulk connection" in delivery.reason
    for ended in link._streams._ended:
        assert ended.wait(WAIT_S)
    link.close(1.0)
    assert link.receive(0) is None and listener.receive(0) is None


def test_close_gives_up_after_its_grace_when_nobody_reads(listener: GrpcListener) -> None:
    link = connect(listener.address, queue_payloads_max=1000)
    payload = bytes(1 << 24)
    for _ in range(TransportConfig().queue_payloads_max + 40):  # more than the syncer's inbox and the sockets hold
        link.send(FragmentValue("a", 0, 1, 0, 9, 9, 9, 0, 9, len(payload)), payload[:1])
    for _ in range(4):
        link.send(FragmentValue("a", 0, 1, 0, 9, 9, 9, 0, 9, len(payload)), payload)
    link.close(0.05)
    heard = hear(listener)
    while heard.kind == "message":
        heard = hear(listener)
    assert "connection to 'a' was lost" in heard.reason


def test_corrupt_chunk_ends_the_session_and_the_reason_reaches_both(listener: GrpcListener, raw: RawLearner) -> None:
    good, bad = raw.value_frames(b"0123456789abcdef", 8)
    raw.say(pb.LANE_BULK, [good, bad[:-1] + b"?"])
    delivery = hear(listener)
    assert delivery.kind == "disconnected"
    assert "'a' sent on the bulk connection what cannot be used: corrupt chunk: crc32c differs" in delivery.reason
    (last,) = list(raw.calls[pb.LANE_CONTROL])
    assert "crc32c differs" in pb.Frame.FromString(last).goodbye.reason
    assert listener.receive(0) is None


def test_corrupt_chunk_from_the_syncer_ends_the_session(
    listener: GrpcListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = connect(listener.address)
    link.send(Heartbeat("a", 0))
    assert hear(listener).message == Heartbeat("a", 0)
    right = wire.piece_frame

    def wrong(*args: Any) -> bytes:
        frame = right(*args)
        return frame[:-1] + bytes((frame[-1] ^ 1,))

    monkeypatch.setattr(wire, "piece_frame", wrong)
    assert listener.send("a", GlobalFragment(1, 0, 1, 1, 99, 200_000), bytes(200_000))
    for side in (link, listener):
        delivery = hear(side)
        assert delivery.kind == "disconnected" and "crc32c differs" in delivery.reason
    link.close(1.0)


def test_oversize_claim_and_foreign_frame_and_noise_end_the_session(listener: GrpcListener) -> None:
    cases = {
        "the limit here is 16777216": b"",
        "run_id is 'other', not 'run'": b"",
        "malformed frame": b"\xff\x00noise",
    }
    for number, (reason, frame) in enumerate(cases.items()):
        raw = RawLearner(listener.address, session=number)
        if not frame:
            made = pb.Frame.FromString(raw.value_frames(b"0123", 8)[0])
            if "limit" in reason:
                made.chunk.payload_bytes = 1 << 50
            else:
                made.header.run_id = "other"
            frame = made.SerializeToString()
        raw.say(pb.LANE_BULK, [frame])
        delivery = hear(listener)
        assert delivery.kind == "disconnected" and reason in delivery.reason
        raw.close()
    assert listener.receive(0) is None


def test_stream_that_ends_without_goodbye_is_a_loss(listener: GrpcListener, raw: RawLearner) -> None:
    raw.hold.set()
    raw.say(pb.LANE_BULK, raw.value_frames(b"0123456789", 4)[:2])
    delivery = hear(listener)
    assert delivery.kind == "disconnected" and "connection to 'a' was lost" in delivery.reason


def test_call_without_a_header_is_refused(listener: GrpcListener) -> None:
    for metadata in ((), (("diloco-header-bin", b"\xff"),), (("diloco-header-bin", b""),)):
        with grpc.insecure_channel(listener.address) as channel:
            call = channel.stream_stream("/diloco.v1.Syncer/Connect")(iter(()), metadata=metadata, timeout=WAIT_S)
            with pytest.raises(grpc.RpcError) as raised:
                next(call)
        assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "names no lane" in raised.value.details()
    assert listener.receive(0) is None


def test_half_a_session_is_given_up() -> None:
    listener = grpc_link.listen(dataclasses.replace(CONFIG, connect_timeout_s=0.05), run_id="run")
    header = pb.Header(run_id="run", sender="a", session=1, lane=pb.LANE_CONTROL, stripes=1).SerializeToString()
    hold = threading.Event()
    with grpc.insecure_channel(listener.address) as channel:
        call = channel.stream_stream("/diloco.v1.Syncer/Connect")(
            (b"" for _ in iter(hold.wait, True)), metadata=(("diloco-header-bin", header),), timeout=WAIT_S
        )
        frame = pb.Frame.FromString(next(call))
        hold.set()
    assert "not all connections came within 0.05 s" in frame.goodbye.reason
    assert listener.receive(0) is None
    listener.close(1.0)


def test_half_a_session_of_a_newer_incarnation_ends_nobodys(
    listener: GrpcListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = connect(listener.address)
    link.send(Heartbeat("a", 0))
    assert hear(listener).message == Heartbeat("a", 0)
    admitted = threading.Event()
    right = GrpcListener._open_lane

    def open_lane(self: GrpcListener, context: Any) -> Any:
        made = right(self, context)
        admitted.set()
        return made

    monkeypatch.setattr(GrpcListener, "_open_lane", open_lane)
    header = pb.Header(run_id="run", sender="a", incarnation=9, session=1, lane=pb.LANE_CONTROL, stripes=1)
    with grpc.insecure_channel(listener.address) as channel:
        call = channel.stream_stream("/diloco.v1.Syncer/Connect")(
            iter(()), metadata=(("diloco-header-bin", header.SerializeToString()),), timeout=WAIT_S
        )
        assert admitted.wait(WAIT_S)
        link.send(Heartbeat("a", 0))
        assert hear(listener).message == Heartbeat("a", 0)
        call.cancel()
    assert listener.send("a", Advance(1)) and hear(link).message == Advance(1)
    link.close(1.0)


def test_port_in_use_names_the_address_and_the_remedy(listener: GrpcListener) -> None:
    with pytest.raises(ValueError, match=rf"cannot listen on transport.address {listener.address}.*in use.*choose"):
        grpc_link.listen(TransportConfig(address=listener.address), run_id="other")
    with pytest.raises(ValueError, match=r"cannot listen on transport.address 192\.0\.2\.1:0"):
        grpc_link.listen(TransportConfig(address="192.0.2.1:0", allow_plaintext=True), run_id="other")


def test_unreachable_syncer_names_address_time_and_remedy() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound, not listening: nobody else gets the port, and it answers nobody
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(TransportError, match=rf"no syncer answered at {address} within 0\.2 s: start it"):
            connect(address, connect_timeout_s=0.2)


def test_learner_that_starts_first_waits_for_the_syncer() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    links: list[GrpcLink] = []
    thread = threading.Thread(target=lambda: links.append(connect(address)), daemon=True)
    thread.start()
    listener = grpc_link.listen(TransportConfig(address=address), run_id="run")
    thread.join(WAIT_S)
    (link,) = links
    link.send(Heartbeat("a", 0))
    assert hear(listener).message == Heartbeat("a", 0)
    link.close(1.0)
    listener.close(1.0)


def test_a_connection_for_each_stream_and_the_real_port(monkeypatch: pytest.MonkeyPatch) -> None:
    peers: set[str] = set()
    right = GrpcListener._open_lane

    def open_lane(self: GrpcListener, context: Any) -> Any:
        peers.add(context.peer())
        return right(self, context)

    monkeypatch.setattr(GrpcListener, "_open_lane", open_lane)
    listener = grpc_link.listen(CONFIG, run_id="run")
    host, port = split_address(listener.address)
    assert host == "127.0.0.1" and port > 0
    connect(listener.address).close(1.0)
    listener.close(1.0)
    assert len(peers) == 1 + CONFIG.stripes, "no two streams may share a connection"
