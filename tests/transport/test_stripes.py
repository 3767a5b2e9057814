"""A session over several bulk connections: any number of them, cut in the middle, with a reader that does not read."""

import os
import threading
from queue import SimpleQueue
from typing import Any

import pytest

from diloco_jax.core.codec import digest
from diloco_jax.protocol.messages import AnchorValue, FragmentValue, GlobalFragment, Heartbeat
from diloco_jax.tools.chaos.relay import Relay
from diloco_jax.transport import wire
from diloco_jax.transport.endpoints.grpc_link import GrpcListener
from diloco_jax.transport.link import Buffer, LinkClosed, Rejected, TransportError
from diloco_jax.transport.partials import SAMPLE_BYTES, Partials, key_of
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.session import calls, dialled
from diloco_jax.transport.session.stream import AT_ONCE_BYTES_MAX, Outbox, Outgoing, Pieces, StreamSession
from tests.limits import HANGS_S
from tests.transport.ends import CONFIG, LIMIT, Ends, comes_true, hear, hear_end, value

pytestmark = pytest.mark.net


@pytest.mark.parametrize("stripes", [1, 2, 16])
def test_payloads_and_their_order_survive_any_number_of_stripes(
    ends: Ends, listener: GrpcListener, stripes: int
) -> None:
    link = ends.connect(stripes=stripes)
    payloads = [os.urandom(size) for size in (3_000_000, 0, 1, 70_000, 2_000_000, 5)]
    for number, payload in enumerate(payloads):
        link.send(value(number, len(payload)), payload)
    for number, payload in enumerate(payloads):
        delivery = hear(listener)
        assert delivery.message == value(number, len(payload)) and delivery.payload == payload
        assert listener.send("a", GlobalFragment(1, 0, number, len(payload), 1, 0), payload)
    for payload in payloads:
        assert hear(link).payload == payload


def queue(payloads: int) -> tuple[Outbox, Pieces]:
    """Payloads of 100 bytes that wait to be cut into pieces of 10."""
    outbox = Outbox(10)
    for _ in range(payloads):
        outbox.put(Outgoing(value(), b"body", (memoryview(bytes(100)),)))
    return outbox, Pieces(outbox, 10)


def test_a_writer_that_is_slow_holds_up_its_own_chunk_only() -> None:
    outbox, pieces = queue(2)
    slow = pieces.take()
    outbox.close("done", flush=True)
    others = list(iter(pieces.take, None))
    assert slow is not None and (slow.chunk.message, slow.chunk.offset) == (1, 0)
    assert [(each.chunk.message, each.chunk.offset) for each in others] == [
        (number, offset) for number in (1, 2) for offset in range(0, 100, 10)
    ][1:]


def test_writers_that_are_cut_stop_inside_a_payload_and_let_go_of_it() -> None:
    outbox, pieces = queue(1)
    assert pieces.take() is not None
    outbox.close("lost", flush=False)
    assert pieces.take() is None and list(pieces._current) == []


def test_a_small_message_passes_writers_that_all_wait() -> None:
    outbox = Outbox(10)
    pieces = Pieces(outbox, 10, writers=2)
    small, large = (Outgoing(value(0, n), b, (memoryview(bytes(n)),)) for n, b in ((10, b"s"), (11, b"l")))
    assert pieces.take_only(small) is None, "no writer waits"
    got = SimpleQueue[wire.BulkPiece | None]()
    writers = [threading.Thread(target=lambda: got.put(pieces.take(HANGS_S))) for _ in range(2)]
    writers[0].start()
    assert comes_true(lambda: outbox._awaited) and pieces.take_only(small) is None, "the other one may have a piece"
    writers[1].start()
    assert comes_true(lambda: pieces._free == 2) and pieces.take_only(large) is None, "it needs two pieces"
    piece = pieces.take_only(small)
    assert piece is not None and (piece.body, piece.chunk.message, piece.chunk.payload_bytes) == (b"s", 1, 10)
    outbox.put(large)
    first, second = got.get(timeout=HANGS_S), got.get(timeout=HANGS_S)
    assert first is not None and second is not None and (first.chunk.message, second.chunk.message) == (2, 2)
    assert pieces.take_only(small) is None, "the writers have pieces of an earlier message"
    outbox.close("done", flush=True)
    assert pieces.take() is None and pieces.take_only(small) is None


def test_an_idle_connection_takes_small_messages_on_the_thread_of_the_sender(
    ends: Ends, listener: GrpcListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = ends.connect()
    assert comes_true(lambda: link._session.pieces._free == CONFIG.stripes)
    monkeypatch.setattr(Outbox, "put", lambda *_: False)
    for number in range(3):
        link.send(value(number, 2), b"ab")
    assert [hear(listener).message for _ in range(3)] == [value(number, 2) for number in range(3)]
    with pytest.raises(LinkClosed, match="the bulk queue"):
        link.send(value(3, AT_ONCE_BYTES_MAX + 1), bytes(AT_ONCE_BYTES_MAX + 1))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"stripes": 0}, "'a' wants 0 bulk connections: set transport.stripes to 1 to 16"),
        ({"stripes": 17}, "wants 17 bulk connections"),
        ({"stripes": 2, "stripe": 2, "lane": pb.LANE_BULK}, "opens connection 2 of 2"),
        ({"stripes": 2, "stripe": 1}, "opens connection 1 of 2"),
        ({"stripes": 1, "host": 1, "hosts": 0}, "'a' has host 1 of 0: use at most 4096"),
        ({"stripes": 1, "host": 1, "hosts": 1}, "'a' has host 1 of 1"),
        ({"stripes": 1, "host": 3, "hosts": 3}, "'a' has host 3 of 3"),
        ({"stripes": 1, "hosts": 4097}, "'a' has host 0 of 4097"),
    ],
)
def test_header_with_impossible_numbers_is_refused(fields: dict[str, Any], reason: str) -> None:
    header = pb.Header(**{"run_id": "run", "sender": "a", "session": 1, "lane": pb.LANE_CONTROL, **fields})
    with pytest.raises(calls.Refused, match=reason):
        calls.read_header({calls.HEADER_KEY: header.SerializeToString()})


def test_number_of_bulk_connections_is_that_of_the_session(ends: Ends, listener: GrpcListener) -> None:
    link = ends.connect(stripes=3)
    for stripes, reason in ((2, "has 3 bulk connections, not 2"), (3, "connection of the session is open already")):
        with pytest.raises(Rejected, match=reason):
            ends.connect(stripes=stripes, number=link.number)


@pytest.mark.parametrize("size", [1 << 22, AT_ONCE_BYTES_MAX])
def test_memory_of_both_sides_is_bounded_when_nobody_reads(ends: Ends, size: int) -> None:
    """The sender's queue fills and ends the session; until then the receiver takes what it said, and no more."""
    limit = 1 << 24
    listener = ends.listen(payload_bytes_max=limit)
    link = ends.connect(queue_payloads_max=8)
    payload, queued = os.urandom(size), 0
    with pytest.raises(LinkClosed, match="the bulk queue to 'syncer' is full"):
        while True:
            waiting = link._session._outboxes[True]._waiting
            assert len(waiting) <= 8
            link.send(value(queued, len(payload)), payload)
            queued += 1
            comes_true(lambda: len(waiting) <= 4, within_s=0.05)  # noqa: B023  # let the writers take what they can
            (session,) = listener._book._newest.values()
            assert session.waiting_bytes <= limit
            assert session.assembly.claimed_bytes <= 2 * limit
    # HTTP/2 and TCP have windows of this size.
    in_sockets = (1 + CONFIG.stripes) * (64 << 20)
    assert queued * len(payload) <= 3 * limit + 9 * len(payload) + in_sockets
    link.close(0.0)


SIZE = 4 << 20
# The rate in bytes per second and connection puts a cut into the middle.
RATE = 5e5


def cut_in_the_middle(relay: Relay, session: StreamSession) -> None:
    """Cut all connections when the receiver has a quarter of the payload or more."""
    assembly = session.assembly
    assert comes_true(lambda: any(each.ranges.filled >= SIZE // 4 for each in list(assembly._open.values())))
    assert relay.cut("rst") == 1 + CONFIG.stripes
    relay.change(bytes_per_s=0.0)


def held_bytes(partials: Partials) -> int:
    return sum(sum(each.stop) - sum(each.start) for each in partials.announce().partials)


@pytest.mark.parametrize("direction", ["up", "down"])
def test_next_session_moves_only_the_rest(ends: Ends, listener: GrpcListener, direction: str) -> None:
    payload, ours = os.urandom(SIZE), Partials(LIMIT, 60.0)
    with Relay(listener.address) as relay:

        def send() -> None:
            if direction == "up":
                link.send(value(1, SIZE), payload)
            else:
                assert listener.send("a", GlobalFragment(1, 0, 1, SIZE, 1, 0), payload)

        link = ends.meet(to=relay.address, partials=ours)
        relay.change(bytes_per_s=RATE)
        send()
        cut_in_the_middle(relay, listener._book._newest["a"] if direction == "up" else link._session)
        hear_end(link)
        link.close(0.0)
        hear_end(listener)
        theirs = listener._partials["a", 0][1] if direction == "up" else ours
        # The end of a session is delivered before its connections have kept what arrived.
        assert comes_true(lambda: theirs.held_bytes == SIZE)
        link = ends.meet(to=relay.address, partials=ours)
        held = held_bytes(theirs)
        assert held >= SIZE // 4
        before = relay.forwarded_bytes(direction)
        send()
        receiver = listener if direction == "up" else link
        delivery = hear(receiver)
        assert delivery.kind == "message" and delivery.payload == payload
        moved = relay.forwarded_bytes(direction) - before
        assert moved < SIZE - held + 100_000, "only the rest, its frames and some of the protocols below"
        assert theirs.held_bytes == 0
        # The same payload again is sent whole.
        send()
        assert hear(receiver).payload == payload
        link.close(1.0)


def leave_a_part(ends: Ends, payload: bytes) -> None:
    """Let a session end inside of a payload."""
    with Relay(ends.listener.address) as relay:
        link = ends.meet(to=relay.address)
        relay.change(bytes_per_s=RATE)
        link.send(value(1, SIZE), payload)
        cut_in_the_middle(relay, ends.listener._book._newest["a"])
        hear_end(ends.listener)
        link.close(0.0)
    # The end of a session is delivered before its connections have kept what arrived.
    assert comes_true(lambda: ends.listener._partials["a", 0][1].held_bytes == len(payload))


def test_a_damaged_version_arrives_and_the_session_stays_open_but_a_damaged_value_ends_it(
    ends: Ends, listener: GrpcListener
) -> None:
    """The receiver of a version finds the damage by its digest (runtime/learner)."""
    version, payload = GlobalFragment(1, 0, 1, SIZE, 1, 0), os.urandom(SIZE)
    with Relay(listener.address) as relay:
        link = ends.meet(to=relay.address, stripes=1)
        relay.damage("down", flip_after=100_000)
        for sent in (version, version._replace(version=2)):
            assert listener.send("a", sent, payload)
            came = hear(link)
            assert came.message == sent
            differ = [at for at, (ours, theirs) in enumerate(zip(payload, came.payload, strict=True)) if ours != theirs]
            assert len(differ) == (sent is version), "the first one has one damaged byte"
        relay.damage("up", flip_after=100_000)
        link.send(value(1, SIZE), payload)
        hear_end(listener, "corrupt chunk: its checksum differs")
        link.close(0.0)


@pytest.mark.parametrize("knows", [True, False], ids=["this-release", "release-0.3.0"])
def test_a_peer_of_an_older_release_gets_checksums(
    ends: Ends, listener: GrpcListener, monkeypatch: pytest.MonkeyPatch, knows: bool
) -> None:
    announce = Partials.announce

    def of_release(self: Partials) -> pb.Holdings:
        found = announce(self)
        found.digests = knows
        return found

    monkeypatch.setattr(Partials, "announce", of_release)
    link = ends.meet()
    checks = list[int]()
    right = wire.check_data

    def check(prefix: wire.Prefix, chunk: pb.Chunk, data: Buffer) -> None:
        checks.append(prefix.data_check)
        right(prefix, chunk, data)

    monkeypatch.setattr(wire, "check_data", check)
    listener.send("a", GlobalFragment(1, 0, 1, 9, 1, 0), b"some data")
    link.send(AnchorValue("a", 0, 0, 1, 0, 9), b"some data")
    assert hear(link).payload == hear(listener).payload == b"some data"
    assert checks == [0 if knows else digest(b"some data")] * 2


def test_another_payload_and_a_newer_process_start_again(ends: Ends, listener: GrpcListener) -> None:
    payload, other = os.urandom(SIZE), os.urandom(SIZE)
    leave_a_part(ends, payload)
    link = ends.connect()
    link.send(value(1, SIZE), other)
    assert hear(listener).payload == other
    link.close(1.0)
    hear_end(listener)
    assert listener._partials["a", 0][1].held_bytes == SIZE, "it may still come"
    link = ends.connect(incarnation=2)
    incarnation, left = listener._partials["a", 0]
    assert incarnation == 2 and not left.held_bytes
    link.send(value(1, SIZE, 2), payload)
    assert hear(listener).payload == payload


def test_a_payload_that_differs_only_between_its_samples_is_never_mixed(ends: Ends, listener: GrpcListener) -> None:
    payload = os.urandom(SIZE)
    leave_a_part(ends, payload)
    ((start, stop, *_),) = [(*each.start, *each.stop) for each in listener._partials["a", 0][1].announce().partials][:1]
    other = bytearray(payload)
    # The first sample ends before this byte, which the listener has already.
    assert start == 0 and stop > SAMPLE_BYTES
    other[SAMPLE_BYTES] ^= 1
    assert key_of([memoryview(other)]) == key_of([memoryview(payload)])
    link = ends.connect()
    link.send(value(1, SIZE), other)
    hear_end(listener, "is not the one whose first part was kept")
    link.close(1.0)
    link = ends.connect()
    link.send(value(1, SIZE), other)
    assert hear(listener).payload == bytes(other)


def test_syncer_that_says_what_it_cannot_hold_ends_the_session(
    ends: Ends, listener: GrpcListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = pb.Holdings(partials=[pb.PartialPayload(key=1, payload_bytes=5, start=[0], stop=[6])])
    monkeypatch.setattr(StreamSession, "ready_frame", lambda self: wire.ready_frame(self.control.header, wrong))
    with pytest.raises(TransportError, match="unusable holdings: a partial payload of 5 bytes has ranges"):
        ends.connect()


@pytest.mark.parametrize(
    ("wrong", "reason"), [(b"\xff", "are unusable"), (bytes(5000), "has 5000 bytes, the limit is 4096")]
)
def test_learner_that_says_what_it_cannot_hold_is_refused(
    ends: Ends, listener: GrpcListener, monkeypatch: pytest.MonkeyPatch, wrong: bytes, reason: str
) -> None:
    monkeypatch.setattr(dialled, "holdings_metadata", lambda _: ((calls.HOLDINGS_KEY, wrong),))
    with pytest.raises(Rejected, match=reason):
        ends.connect()


def test_a_heartbeat_does_not_wait_behind_payloads(ends: Ends) -> None:
    listener = ends.listen(queue_payloads_max=1)
    link = ends.meet(stripes=1)
    for number in range(3):
        link.send(value(number, 700_000), bytes(700_000))
    link.send(Heartbeat("a", 0))
    # Nobody reads, so there is room for one payload; the others wait within their connection.
    waiting = listener._inbox.waiting
    assert comes_true(lambda: {type(each.delivery.message) for each in [*waiting]} == {FragmentValue, Heartbeat})
    assert len(waiting) == 2
    assert {type(hear(listener).message) for _ in range(2)} == {FragmentValue, Heartbeat}
    assert [hear(listener).message for _ in range(2)] == [value(1, 700_000), value(2, 700_000)]


def test_a_link_tells_that_a_payload_arrives(ends: Ends, listener: GrpcListener) -> None:
    with Relay(listener.address) as relay:
        link = ends.meet(to=relay.address)
        assert not link.receiving
        relay.change(bytes_per_s=RATE)
        assert listener.send("a", GlobalFragment(1, 0, 1, SIZE, 1, 0), os.urandom(SIZE))
        assert comes_true(lambda: link.receiving)
        relay.change(bytes_per_s=0.0)
        # It has arrived, and nobody has read it.
        assert comes_true(lambda: link._session.waiting_bytes == SIZE) and link.receiving
        hear(link)
        assert comes_true(lambda: not link.receiving)
        link.close(1.0)
