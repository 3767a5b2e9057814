"""A session over several bulk connections: any number of them, cut in the middle, with a reader that does not read."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from diloco_jax.protocol.messages import FragmentValue, GlobalFragment, Heartbeat
from diloco_jax.tools.chaos.relay import Relay
from diloco_jax.transport import calls, grpc_link, wire
from diloco_jax.transport.grpc_link import GrpcLink, GrpcListener
from diloco_jax.transport.link import Delivery, LinkClosed, Rejected, TransportConfig, TransportError
from diloco_jax.transport.partials import Partials, payload_key
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.session import dialled
from diloco_jax.transport.session.inbox import Inbox
from diloco_jax.transport.session.outbox import Outbox, Outgoing, Pieces
from diloco_jax.transport.session.stream import StreamSession

pytestmark = pytest.mark.net
WAIT_S = 20.0
CONFIG = TransportConfig(payload_bytes_max=1 << 24, chunk_bytes=1 << 16)


@pytest.fixture
def listener() -> Iterator[GrpcListener]:
    made = grpc_link.listen(CONFIG, run_id="run")
    yield made
    made.close(1.0)


def connect(address: str, incarnation: int = 0, partials: Partials | None = None, **changes: Any) -> GrpcLink:
    config = dataclasses.replace(CONFIG, address=address, **changes)
    return grpc_link.connect(config, run_id="run", learner_id="a", incarnation=incarnation, partials=partials)


def hear(side: GrpcLink | GrpcListener) -> Delivery:
    delivery = side.receive(WAIT_S)
    assert delivery is not None, "nothing came"
    return delivery


def value(number: int, payload: bytes, incarnation: int = 0) -> FragmentValue:
    return FragmentValue("a", incarnation, number, 0, 9, 9, 9, 0, 9, len(payload))


@pytest.mark.parametrize("stripes", [1, 2, 16])
def test_payloads_and_their_order_survive_any_number_of_stripes(listener: GrpcListener, stripes: int) -> None:
    link = connect(listener.address, stripes=stripes)
    payloads = [os.urandom(size) for size in (3_000_000, 0, 1, 70_000, 2_000_000, 5)]
    for number, payload in enumerate(payloads):
        link.send(value(number, payload), payload)
    for number, payload in enumerate(payloads):
        delivery = hear(listener)
        assert delivery.message == value(number, payload) and delivery.payload == payload
        message = GlobalFragment(1, 0, number, len(payload), 1, 0)
        assert listener.send("a", message, payload)
    for payload in payloads:
        assert hear(link).payload == payload
    link.close(1.0)


def test_a_writer_that_is_slow_holds_up_its_own_chunk_only() -> None:
    outbox = Outbox(10)
    pieces = Pieces(outbox, 10)
    for _ in range(2):
        outbox.put(Outgoing(b"body", (memoryview(bytes(100)),)))
    slow = pieces.take()
    outbox.close("done", flush=True)
    others = list(iter(pieces.take, None))
    assert slow is not None and (slow.chunk.message, slow.chunk.offset) == (1, 0)
    assert [(each.chunk.message, each.chunk.offset) for each in others] == [
        (number, offset) for number in (1, 2) for offset in range(0, 100, 10)
    ][1:]


def test_writers_that_are_cut_stop_inside_a_payload_and_let_go_of_it() -> None:
    outbox = Outbox(10)
    pieces = Pieces(outbox, 10)
    outbox.put(Outgoing(b"body", (memoryview(bytes(100)),)))
    assert pieces.take() is not None
    outbox.close("lost", flush=False)
    assert pieces.take() is None and list(pieces._current) == []


def test_number_of_bulk_connections_is_checked(listener: GrpcListener) -> None:
    for fields, reason in (
        ({"stripes": 0}, "'a' wants 0 bulk connections: set transport.stripes to 1 to 16"),
        ({"stripes": 17}, "wants 17 bulk connections"),
        ({"stripes": 2, "stripe": 2, "lane": pb.LANE_BULK}, "opens connection 2 of 2"),
        ({"stripes": 2, "stripe": 1, "lane": pb.LANE_CONTROL}, "opens connection 1 of 2"),
    ):
        header = pb.Header(**{"run_id": "run", "sender": "a", "session": 1, "lane": pb.LANE_CONTROL, **fields})
        with pytest.raises(calls.Refused, match=reason):
            calls.read_header({calls.HEADER_KEY: header.SerializeToString()})
    link = connect(listener.address, stripes=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic_ns", lambda: link._session.lanes[pb.LANE_CONTROL, 0].ours.session)
        for stripes, reason in ((2, "has 3 bulk connections, not 2"), (3, "connection of the session is open already")):
            with pytest.raises(Rejected, match=reason):
                connect(listener.address, stripes=stripes)
    link.close(1.0)


# ---- a reader that does not read ----------------------------------------------------------------------------------


def test_memory_of_both_sides_is_bounded_when_nobody_reads(listener: GrpcListener) -> None:
    """The sender's queue fills and ends the session; until then the receiver takes what it said, and no more."""
    limit = CONFIG.payload_bytes_max
    link = connect(listener.address, queue_payloads_max=8)
    payload = os.urandom(limit // 4)
    queued = 0
    with pytest.raises(LinkClosed, match="the bulk queue to 'syncer' is full"):
        while True:
            before = len(link._session._outboxes[True]._waiting)
            assert before <= 8
            link.send(value(queued, payload), payload)
            queued += 1
            until_s = time.monotonic() + 0.05
            while len(link._session._outboxes[True]._waiting) > 4 and time.monotonic() < until_s:
                time.sleep(0.001)  # let the writers take what they can
            (session,) = [session for _, session in listener._book._newest.values()]
            assert session.waiting_bytes <= limit
            assert session._assembly.claimed_bytes <= 2 * limit
    in_sockets = (1 + CONFIG.stripes) * (64 << 20)  # windows of HTTP/2 and TCP
    assert queued * len(payload) <= 3 * limit + 9 * len(payload) + in_sockets
    link.close(0.0)


# ---- to be continued ----------------------------------------------------------------------------------------------

SIZE = 4 << 20
RATE = 5e5  # bytes per second and connection, so that a cut comes in the middle


def cut_in_the_middle(relay: Relay, session: StreamSession) -> None:
    """When the receiver has a quarter of the payload or more."""
    until_s = time.monotonic() + WAIT_S
    while not any(each.ranges.filled >= SIZE // 4 for each in list(session._assembly._open.values())):
        assert time.monotonic() < until_s
        time.sleep(0.005)
    assert relay.cut("rst") == 1 + CONFIG.stripes
    relay.change(bytes_per_s=0.0)


def held_bytes(partials: Partials) -> int:
    return sum(sum(each.stop) - sum(each.start) for each in partials.announce().partials)


@pytest.mark.parametrize("direction", ["up", "down"])
def test_next_session_moves_only_the_rest(listener: GrpcListener, direction: str) -> None:
    payload, ours = os.urandom(SIZE), Partials(CONFIG.payload_bytes_max, 60.0)
    with Relay(listener.address) as relay:

        def meet() -> GrpcLink:
            link = connect(relay.address, 1, ours)
            link.send(Heartbeat("a", 1))
            while hear(listener).message != Heartbeat("a", 1):
                pass
            return link

        def send(link: GrpcLink) -> None:
            if direction == "up":
                link.send(value(1, payload, 1), payload)
            else:
                assert listener.send("a", GlobalFragment(1, 0, 1, SIZE, 1, 0), payload)

        link = meet()
        relay.change(bytes_per_s=RATE)
        send(link)
        cut_in_the_middle(relay, listener._book._newest["a"][1] if direction == "up" else link._session)
        assert hear(link).kind == "disconnected"
        link.close(0.0)
        link = meet()
        theirs = listener._partials["a", 0][1] if direction == "up" else ours
        held = held_bytes(theirs)
        assert held >= SIZE // 4
        before = getattr(relay.counts, f"{direction}_bytes")
        send(link)
        receiver = listener if direction == "up" else link
        delivery = hear(receiver)
        assert delivery.kind == "message" and delivery.payload == payload
        moved = getattr(relay.counts, f"{direction}_bytes") - before
        assert moved < SIZE - held + 100_000, "only the rest, its frames and some of the protocols below"
        assert theirs.held_bytes == 0
        send(link)  # the same once more is sent whole
        assert hear(receiver).payload == payload
        link.close(1.0)


def leave_a_part(listener: GrpcListener, payload: bytes, incarnation: int = 1) -> None:
    """A session that ends inside of a payload."""
    with Relay(listener.address) as relay:
        link = connect(relay.address, incarnation)
        link.send(Heartbeat("a", incarnation))
        while hear(listener).kind != "message":
            pass
        relay.change(bytes_per_s=RATE)
        link.send(value(1, payload, incarnation), payload)
        cut_in_the_middle(relay, listener._book._newest["a"][1])
        assert hear(listener).kind == "disconnected"
        link.close(0.0)
    assert listener._partials["a", 0][1].held_bytes == len(payload)


def test_another_payload_and_a_newer_process_begin_anew(listener: GrpcListener) -> None:
    payload, other = os.urandom(SIZE), os.urandom(SIZE)
    leave_a_part(listener, payload)
    link = connect(listener.address, 1)
    link.send(value(1, other, 1), other)
    assert hear(listener).payload == other
    link.close(1.0)
    assert hear(listener).kind == "disconnected"
    assert listener._partials["a", 0][1].held_bytes == SIZE, "it may still come"
    link = connect(listener.address, 2)
    assert (
        listener._partials["a", 0] == (2, listener._partials["a", 0][1])
        and not listener._partials["a", 0][1].held_bytes
    )
    link.send(value(1, payload, 2), payload)
    assert hear(listener).payload == payload
    link.close(1.0)


def test_a_lie_about_a_payload_ends_the_session_and_the_next_one_sends_it_whole(
    listener: GrpcListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = os.urandom(SIZE)
    key = payload_key([memoryview(payload)])
    with monkeypatch.context() as patch:
        patch.setattr("diloco_jax.transport.session.outbox.payload_key", lambda parts: key)
        leave_a_part(listener, os.urandom(SIZE))  # under the key of the other
    link = connect(listener.address, 1)
    link.send(value(1, payload, 1), payload)
    delivery = hear(listener)
    assert delivery.kind == "disconnected" and "is not the one whose first part was kept" in delivery.reason
    link.close(0.0)
    assert listener._partials["a", 0][1].held_bytes == 0
    link = connect(listener.address, 1)
    link.send(value(1, payload, 1), payload)
    assert hear(listener).payload == payload
    link.close(1.0)


def test_syncer_that_says_what_it_cannot_hold_ends_the_session(
    listener: GrpcListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = pb.Holdings(partials=[pb.PartialPayload(key=1, payload_bytes=5, start=[0], stop=[6])])
    monkeypatch.setattr(
        "diloco_jax.transport.session.stream.StreamSession.ready_frame",
        lambda _, lane: wire.ready_frame(lane.header, wrong),
    )
    with pytest.raises(TransportError, match="unusable holdings: a partial payload of 5 bytes has ranges"):
        connect(listener.address)


def test_learner_that_says_what_it_cannot_hold_is_refused(
    listener: GrpcListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    for wrong, reason in ((b"\xff", "are unusable"), (bytes(5000), "has 5000 bytes, the limit is 4096")):
        monkeypatch.setattr(dialled, "holdings_metadata", lambda _, wrong=wrong: ((calls.HOLDINGS_KEY, wrong),))
        with pytest.raises(Rejected, match=reason):
            connect(listener.address)


# ---- several listeners --------------------------------------------------------------------------------------------


def test_learner_is_told_of_shards() -> None:
    listener = grpc_link.listen(CONFIG, run_id="run", shards=("other:5", ":7"))
    link = connect(listener.address)
    assert link.shards == ("other:5", "127.0.0.1:7")
    link.close(1.0)
    listener.close(1.0)


@pytest.mark.parametrize("shards", [("host",), ("host:1,",), ("a:1",) * 65, ("h" * 200 + ":1",) * 64, ("a b:1",)])
def test_shards_that_cannot_be_are_refused_on_both_sides(
    listener: GrpcListener, monkeypatch: pytest.MonkeyPatch, shards: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError, match=r"write host:port|use at most 64"):
        grpc_link.listen(CONFIG, run_id="run", shards=shards)
    if len(",".join(shards)) < calls.SHARDS_BYTES_MAX:
        monkeypatch.setattr(listener, "_shards", ",".join(shards))
        with pytest.raises(TransportError, match="the syncer names unusable shards"):
            connect(listener.address)


def test_links_that_share_an_inbox_are_told_apart(listener: GrpcListener) -> None:
    other, inbox = grpc_link.listen(CONFIG, run_id="run"), Inbox()
    links = [
        grpc_link.connect(
            dataclasses.replace(CONFIG, address=each.address),
            run_id="run",
            learner_id="a",
            incarnation=0,
            inbox=inbox,
            peer=name,
        )
        for name, each in (("shard-0", listener), ("shard-1", other))
    ]
    for number, (link, each) in enumerate(zip(links, (listener, other), strict=True)):
        link.send(Heartbeat("a", 0))
        assert hear(each).message == Heartbeat("a", 0)
        message = GlobalFragment(1, number, 1, 3, 1, 0)
        assert each.send("a", message, b"xyz")
        assert hear(links[0])._replace(session=0) == Delivery("message", f"shard-{number}", message, b"xyz")
    other.close(1.0)
    delivery = hear(links[0])
    assert (delivery.kind, delivery.peer) == ("disconnected", "shard-1")
    assert inbox.get(0) is None
    for link in links:
        link.close(1.0)
