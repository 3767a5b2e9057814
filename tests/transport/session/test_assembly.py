"""Chunks over several connections, or in two sessions, become whole messages in order, within bounds, or an error."""

import itertools
import random
import threading
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_jax.core.codec import digest
from diloco_jax.protocol.messages import FragmentValue
from diloco_jax.transport import partials as partials_module
from diloco_jax.transport import wire
from diloco_jax.transport.partials import Partial, Partials, PeerHoldings, Ranges, key_of
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.session import assembly as assembly_module
from diloco_jax.transport.session.assembly import MESSAGES_MAX, RANGES_MAX, Assembly
from tests.limits import HANGS_S
from tests.transport.ends import add, bulk_bytes, comes_true, value

HEADER = pb.Header(run_id="run", sender="a", session=7, lane=pb.LANE_BULK, stripes=1)
LIMIT = 1000


class Receiver:
    """Receiving end of a session."""

    def __init__(self, partials: Partials | None = None, limit: int = LIMIT) -> None:
        self.partials = partials or Partials(limit, 60.0)
        self.assembly = Assembly(limit, self.partials)
        self.came: list[tuple[int, bytes]] = []

    def has_room(self, piece: wire.BulkPiece) -> bool:
        return self.assembly.has_room(piece.chunk, data_bytes(piece))

    def feed(self, *pieces: wire.BulkPiece) -> None:
        for piece in pieces:
            assert self.has_room(piece), "it would wait forever"
            self.add(piece)
            self.deliver()

    def add(self, piece: wire.BulkPiece) -> None:
        add(self.assembly, wire.Reader(HEADER, (FragmentValue,)), bulk_bytes(piece))

    def deliver(self) -> None:
        self.assembly.deliver(lambda message, payload: self.came.append((message.global_step, bytes(payload))))


def data_bytes(piece: wire.BulkPiece) -> int:
    return sum(view.nbytes for view in piece.views)


def pieces(number: int, payload: bytes, chunk_bytes: int = 10, **resume: Any) -> list[wire.BulkPiece]:
    body = wire.pack_body(value(number, len(payload)))
    return list(wire.pieces(number, body, [memoryview(payload)] if payload else [], chunk_bytes, **resume))


def changed(piece: wire.BulkPiece, **fields: Any) -> wire.BulkPiece:
    """Return the piece with other fields in its chunk."""
    for name, new in fields.items():
        setattr(piece.chunk, name, new)
    return piece


@settings(max_examples=150, deadline=None)
@given(
    payloads=st.lists(st.binary(max_size=120), min_size=1, max_size=12),
    stripes=st.integers(1, 5),
    seed=st.integers(0, 1 << 20),
)
def test_any_spread_over_stripes_gives_all_messages_in_order(payloads: list[bytes], stripes: int, seed: int) -> None:
    """Check that no connection waits forever when each one that is free takes the next chunk, at any speed."""
    number, receiver = random.Random(seed), Receiver(limit=150)
    queues: list[list[wire.BulkPiece]] = [[] for _ in range(stripes)]
    for index, payload in enumerate(payloads, 1):
        for piece in pieces(index, payload):
            number.choice(queues).append(piece)
    while any(queues):
        ready = [queue for queue in queues if queue and receiver.has_room(queue[0])]
        assert ready, "every connection waits"
        receiver.feed(number.choice(ready).pop(0))
        assert receiver.assembly.claimed_bytes <= 2 * 150
    assert receiver.came == list(enumerate(payloads, 1))
    assert receiver.assembly.claimed_bytes == 0


def test_newer_messages_wait_for_memory_and_the_oldest_never_does() -> None:
    receiver = Receiver()
    for number in (3, 4):
        receiver.feed(pieces(number, bytes(500))[0])
    assert not receiver.has_room(pieces(2, bytes(500))[0])
    assert receiver.has_room(pieces(2, b"")[0])
    receiver.feed(*pieces(1, bytes(1000)))
    assert [number for number, _ in receiver.came] == [1]
    assert receiver.has_room(pieces(2, bytes(500))[0]), "it is the oldest now"


def test_number_of_open_messages_is_bounded() -> None:
    receiver = Receiver()
    for number in range(2, 2 + MESSAGES_MAX):
        receiver.feed(pieces(number, b"x")[0])
    assert not receiver.has_room(pieces(2 + MESSAGES_MAX, b"x")[0])
    receiver.feed(pieces(1, b"x")[0])
    assert len(receiver.came) == 1 + MESSAGES_MAX


def test_number_of_holes_is_bounded_and_what_closes_one_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RANGES_MAX > 4
    monkeypatch.setattr(assembly_module, "RANGES_MAX", 4)
    receiver, made = Receiver(), pieces(1, bytes(200))
    for at in (1, 3, 5, 7):
        receiver.feed(made[at])
    assert not receiver.has_room(made[9])
    for at in (8, 0, 2, 9):
        receiver.feed(made[at])


def test_a_waiting_sender_continues_when_there_is_room_or_the_session_ends() -> None:
    for end in (False, True):
        receiver = Receiver()
        receiver.feed(pieces(2, bytes(1000), 1000)[0])
        done = threading.Event()

        def add(receiver: Receiver = receiver, done: threading.Event = done) -> None:
            receiver.add(pieces(3, b"later")[0])
            done.set()

        threading.Thread(target=add, daemon=True).start()
        assert not done.is_set()
        if end:
            receiver.assembly.close()
        else:
            receiver.feed(pieces(1, b"first")[0])
        assert done.wait(HANGS_S)
        receiver.deliver()
        assert [number for number, _ in receiver.came] == ([] if end else [1, 2, 3])


def test_who_waits_hears_of_the_room_that_a_delivery_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    receiver, looked, done = Receiver(), threading.Semaphore(0), threading.Event()
    receiver.add(pieces(1, bytes(1000), 900)[0])
    right = Assembly.has_room

    def has_room(self: Assembly, chunk: pb.Chunk, size: int) -> bool:
        looked.release()
        return right(self, chunk, size)

    monkeypatch.setattr(Assembly, "has_room", has_room)

    def add() -> None:
        receiver.add(pieces(2, bytes(10))[0])
        done.set()

    threading.Thread(target=add, daemon=True).start()
    assert looked.acquire(timeout=HANGS_S)
    # This call checks for room, and wakes the other thread to check too.
    receiver.add(pieces(1, bytes(1000), 900)[1])
    assert looked.acquire(timeout=HANGS_S) and looked.acquire(timeout=HANGS_S)
    assert not done.is_set()
    receiver.deliver()
    assert done.wait(HANGS_S)


def test_one_delivers_and_the_others_continue() -> None:
    receiver, began, go_on = Receiver(), threading.Event(), threading.Event()
    heard: list[int] = []

    def slow(message: Any, payload: memoryview) -> None:
        began.set()
        go_on.wait(HANGS_S)
        heard.append(message.global_step)

    receiver.add(pieces(1, b"x")[0])
    first = threading.Thread(target=receiver.assembly.deliver, args=(slow,), daemon=True)
    first.start()
    assert began.wait(HANGS_S)
    receiver.feed(pieces(2, b"y")[0])
    assert heard == [] and receiver.came == []
    go_on.set()
    first.join(HANGS_S)
    assert heard == [1, 2]


def test_oversize_payload_is_refused_before_allocation() -> None:
    # An attempt to allocate so much would raise another error.
    huge = changed(pieces(1, b"0123")[0], payload_bytes=1 << 62)
    with pytest.raises(wire.WireError, match=r"payload of 4611686018427387904 bytes, the limit here is 1000: raise"):
        Receiver().feed(huge)
    Receiver(limit=4).feed(pieces(1, b"0123")[0])
    with pytest.raises(wire.WireError, match="the limit here is 3"):
        Receiver(limit=3).feed(pieces(1, b"0123")[0])


@pytest.mark.parametrize(
    ("early", "late", "reason"),
    [
        pytest.param([1], 1, "bytes 10 to 20 are empty or there already", id="bytes-that-came-before"),
        pytest.param([0], 0, "message 1 came twice", id="message-that-came-before"),
        pytest.param(
            [0, 1, 2], 2, "a chunk of message 1, which is complete: 2 is the next", id="message-that-is-complete"
        ),
        pytest.param([0], {"payload_bytes": 31}, "at 10 of 31 of message 1 is out of place", id="another-length"),
        pytest.param([0], {"offset": 21}, "at 21 of 30 of message 1 is out of place", id="beyond-the-end"),
        pytest.param([0], {"offset": 15}, "", id="between-two-chunks"),
        pytest.param([0], {"key": 5}, "is out of place", id="another-key"),
        pytest.param([0], {"resumed": True}, "is out of place", id="resumed-in-the-middle"),
        pytest.param(
            [],
            {"resumed": True},
            "leaves out bytes of a payload, but nothing of it is kept here",
            id="resumed-and-unknown",
        ),
    ],
)
def test_chunks_out_of_place_are_refused(early: list[int], late: int | dict[str, Any], reason: str) -> None:
    made, receiver = pieces(1, bytes(30)), Receiver()
    for at in early:
        receiver.feed(made[at])
    piece = made[late] if isinstance(late, int) else changed(made[1], **late)
    if not reason:
        receiver.feed(piece)
        return
    with pytest.raises(wire.WireError, match=reason):
        receiver.feed(piece)


def test_chunk_without_data_is_refused() -> None:
    for fields in ({"payload_bytes": 5}, {"offset": 1}):
        with pytest.raises(wire.WireError, match="chunk of 0 bytes"):
            Receiver().feed(changed(pieces(1, b"")[0], **fields))


@pytest.fixture
def _small_payloads_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly_module, "RESUME_BYTES_MIN", 10)


PAYLOAD = random.Random(0).randbytes(100)
KEY = digest(PAYLOAD)


def continued(receiver: Receiver, payload: bytes = PAYLOAD, key: int = KEY) -> list[wire.BulkPiece]:
    """Return the pieces of a sender that knows which bytes the receiver holds."""
    held = PeerHoldings(receiver.partials.announce()).claim((key, len(payload)))
    return pieces(1, payload, key=key, held=held)


@pytest.mark.usefixtures("_small_payloads_resume")
@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.sets(st.integers(0, 9)), min_size=1, max_size=4))
def test_any_number_of_cuts_and_every_byte_moves_once(cuts: list[set[int]]) -> None:
    partials, moved = Partials(LIMIT, 60.0), 0
    for cut in cuts:
        receiver = Receiver(partials)
        for at, piece in enumerate(continued(receiver)):
            if at in cut and not receiver.came:
                receiver.feed(piece)
                moved += data_bytes(piece)
        receiver.assembly.close()
        if receiver.came:
            break
    else:
        receiver = Receiver(partials)
        for piece in continued(receiver):
            receiver.feed(piece)
            moved += data_bytes(piece)
    assert receiver.came == [(1, PAYLOAD)] and moved == len(PAYLOAD)
    assert partials.held_bytes == 0


@pytest.mark.usefixtures("_small_payloads_resume")
def test_payload_that_is_not_what_was_begun_is_dropped_and_forgotten() -> None:
    receiver = Receiver()
    # A peer sends these bytes under the key of another payload.
    forged = bytes(100)
    receiver.feed(*pieces(1, forged, key=KEY)[:6])
    receiver.assembly.close()
    again = Receiver(receiver.partials)
    *early, last = continued(again)
    assert len(early) == 3
    again.feed(*early)
    with pytest.raises(wire.WireError, match="the payload of message 1 is not the one whose first part was kept"):
        again.feed(last)
    again.assembly.close()
    assert again.came == [] and again.partials.held_bytes == 0
    third = Receiver(again.partials)
    third.feed(*continued(third))
    assert third.came == [(1, PAYLOAD)]


@pytest.mark.usefixtures("_small_payloads_resume")
def test_payload_that_had_arrived_but_was_not_delivered_needs_only_its_message() -> None:
    receiver = Receiver()
    receiver.feed(*pieces(2, PAYLOAD, key=KEY))
    receiver.assembly.close()
    again = Receiver(receiver.partials)
    (only,) = continued(again)
    assert data_bytes(only) == 0
    again.feed(only)
    assert again.came == [(1, PAYLOAD)]


def test_small_payloads_and_those_without_a_key_are_not_kept() -> None:
    size = partials_module.RESUME_BYTES_MIN
    for payload, key in ((bytes(size), 1), (bytes(size + 1), 0), (bytes(size + 1), 1)):
        receiver = Receiver(limit=1 << 22)
        receiver.feed(pieces(1, payload, 1 << 18, key=key)[0])
        receiver.assembly.close()
        assert receiver.partials.held_bytes == (len(payload) if key and len(payload) > size else 0)


@settings(max_examples=30, deadline=None)
@given(
    size=st.integers((1 << 20) + 1, (1 << 20) + 9999),
    edges=st.lists(st.integers(0, 1 << 20), max_size=8).map(sorted),
    changed_at=st.integers(0, 63),
)
def test_a_key_is_that_of_64_samples_of_4_kib_however_a_payload_is_divided(
    size: int, edges: list[int], changed_at: int
) -> None:
    payload = random.Random(size).randbytes(size)
    samples = b"".join(payload[at : at + 4096] for at in range(0, size, size // 64))
    bounds = itertools.pairwise([0, *edges, size])
    assert key_of([memoryview(payload)[a:b] for a, b in bounds]) == xxhash.xxh3_64_intdigest(samples)
    other = bytearray(payload)
    other[changed_at * (size // 64) + 4095] ^= 1
    assert key_of([memoryview(other)]) != key_of([memoryview(payload)])


def kept(key: int, size: int, *pairs: tuple[int, int]) -> Partial:
    return Partial((key, size), np.empty(size, np.uint8), Ranges(pairs or [(0, 1)]))


def test_what_is_kept_is_bounded_and_the_oldest_goes_first() -> None:
    partials = Partials(250, 60.0)
    partials.put([kept(1, 100), kept(2, 100), kept(3, 100)])
    assert partials.held_bytes == 200 and partials.claim((1, 100)) is None
    partials.put([kept(4, 251)])
    assert partials.claim((4, 251)) is None and partials.held_bytes == 200
    many = Partials(1 << 20, 60.0)
    many.put([kept(number, 1) for number in range(partials_module.PARTIALS_MAX + 5)])
    assert many.held_bytes == partials_module.PARTIALS_MAX and many.claim((4, 1)) is None
    pairs = [(100 * each, 101 * each + 1) for each in range(50)]
    many.put([kept(99, 5000, *pairs)])
    claimed = many.claim((99, 5000))
    assert claimed is not None and list(claimed.ranges) == pairs[-partials_module.RANGES_KEPT :], "the largest"


def test_announcement_fits_into_metadata() -> None:
    partials = Partials(1 << 60, 60.0)
    far = 1 << 40
    pairs = [(far + 10 * start, far + 10 * start + 1) for start in range(partials_module.RANGES_KEPT)]
    one = np.empty(1, np.uint8)
    partials.put([Partial((2**64 - n - 1, 1 << 41), one, Ranges(pairs)) for n in range(partials_module.PARTIALS_MAX)])
    holdings = partials.announce()
    assert len(holdings.partials) == partials_module.PARTIALS_MAX
    assert holdings.ByteSize() <= partials_module.HOLDINGS_BYTES_MAX
    assert PeerHoldings(holdings).claim((2**64 - 1, 1 << 41)) is not None


def test_what_nobody_continues_is_dropped_by_one_timer_and_not_relied_on() -> None:
    before = set(threading.enumerate())
    partials = Partials(1000, 0.1)
    for key in range(5):
        partials.put([kept(key, 100)])
    held = PeerHoldings(partials.announce())
    (timer,) = set(threading.enumerate()) - before
    assert comes_true(lambda: not partials.held_bytes)
    timer.join(HANGS_S)
    assert held.claim((1, 100)) is None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"start": [0], "stop": []}, "has ranges"),
        ({"start": [], "stop": []}, "has ranges"),
        ({"start": [5], "stop": [5]}, "are empty"),
        ({"start": [0, 3], "stop": [5, 9]}, "there already"),
        ({"start": [0], "stop": [101]}, "a partial payload of 100 bytes has ranges"),
        ({"start": list(range(0, 80, 2)), "stop": list(range(1, 81, 2))}, "has ranges"),
    ],
)
def test_holdings_that_cannot_be_are_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        PeerHoldings(pb.Holdings(partials=[pb.PartialPayload(key=1, payload_bytes=100, valid_s=1.0, **fields)]))
    with pytest.raises(ValueError, match="the limit is 16"):
        PeerHoldings(pb.Holdings(partials=[pb.PartialPayload()] * 17))
    with pytest.raises(ValueError, match="no duration"):
        PeerHoldings(
            pb.Holdings(partials=[pb.PartialPayload(payload_bytes=9, start=[0], stop=[1], valid_s=float("nan"))])
        )
