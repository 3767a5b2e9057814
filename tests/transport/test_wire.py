"""Frames and messages: every message arrives as it was sent, and every wrong frame is refused."""

import dataclasses
import importlib.util
import math
import os
import re
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_jax.protocol import messages as m
from diloco_jax.protocol.texts import REASON_LENGTH_MAX as REASON_KEPT_MAX
from diloco_jax.protocol.texts import clean
from diloco_jax.transport import wire
from diloco_jax.transport.commands import COMMANDS, REPLIES
from diloco_jax.transport.limits import COUNTER_MAX, PAIR_LENGTH_MAX, PARTS_MAX, REASON_LENGTH_MAX
from diloco_jax.transport.link import LEARNER_TYPES
from diloco_jax.transport.partials import Partials, Ranges
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.session.assembly import Assembly
from tests.limits import HANGS_S

HEADER = pb.Header(run_id="run", epoch=3, sender="a", incarnation=2, session=7, lane=pb.LANE_BULK)
VALUE = m.FragmentValue("a", 2, 5, 1, 40, 24, 9000, -1, 80, 10)
MESSAGES: tuple[type, ...] = tuple(dict.fromkeys((*typing.get_args(m.Message), *COMMANDS, *REPLIES)))
METRICS = m.MetricsReport("a", 2, 7, ())
SCORE = m.Score("a", 2, 1, 5, (4,), math.nan, math.inf, 0, (), 0.5, "no number, but for people")
# Texts that a receiver keeps unchanged.
TEXTS = st.text(st.characters(exclude_categories=("C", "Z"), include_characters=" "), max_size=20)
ARRIVED = st.builds(m.Arrived, st.integers(0, 99), st.integers(0, 1 << 40), st.floats(0, 1e300))


def message_strategy(kind: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for messages of a class, built from its annotations."""
    hints = typing.get_type_hints(kind)
    version, digest = st.integers(-1, COUNTER_MAX), st.integers(0, 2**64 - 1)
    special = {"version": version, "base_version": version, "versions": st.lists(version, max_size=4).map(tuple)}
    special |= {"rate": st.floats(0, 1e300)}
    special |= {"digest": digest, "step_s": st.floats(0, 1e300), "arrived": st.lists(ARRIVED, max_size=4).map(tuple)}
    special |= {"took_s": st.floats(0, 1e300)}
    made = st.builds(kind, *(special.get(name, strategy_of(hint)) for name, hint in hints.items()))
    # A Hello has a digest for each version.
    if kind is m.Hello:
        digests = st.lists(digest, min_size=4, max_size=4)
        return st.builds(lambda hello, d: hello._replace(digests=tuple(d[: len(hello.versions)])), made, digests)
    if kind is m.StateChunk:
        return st.builds(lambda part, n: part._replace(part=part.part % n, parts=n), made, st.integers(1, PARTS_MAX))
    return made


def strategy_of(hint: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for values of a field's type, built from its annotation alone."""
    if typing.get_origin(hint) is tuple:
        first, *rest = typing.get_args(hint)
        if rest == [Ellipsis]:
            return st.lists(strategy_of(first), max_size=4).map(tuple)
        return st.tuples(*(strategy_of(part) for part in (first, *rest)))
    if hint in MESSAGES:
        return message_strategy(hint)
    if hasattr(hint, "_fields"):
        return st.builds(hint, *(strategy_of(part) for part in typing.get_type_hints(hint).values()))
    return {
        bool: st.booleans(),
        int: st.integers(0, COUNTER_MAX),
        str: TEXTS,
        float: st.floats(allow_nan=False),
    }[hint]


def reader(allowed: tuple[type, ...] = MESSAGES) -> wire.Reader:
    return wire.Reader(HEADER, allowed)


def frames(message: m.Message, *parts: bytes, chunk_bytes: int = 4, number: int = 1) -> list[bytes]:
    views = [memoryview(part) for part in parts]
    pieces = wire.pieces(number, wire.pack_body(message), views, chunk_bytes)
    return [wire.piece_frame(wire.pack_header(HEADER), piece) for piece in pieces]


def assemble(frames: list[bytes]) -> list[tuple[m.Message, memoryview]]:
    """Return the messages that a receiver assembles from frames of the bulk lane."""
    assembly, came = Assembly(1 << 20, Partials(1 << 20, 60.0)), list[tuple[m.Message, memoryview]]()
    for frame in frames:
        event = reader().read(frame)
        assert isinstance(event, wire.Incoming)
        assembly.add(event)
        assembly.deliver(lambda message, payload: came.append((message, payload)))
    return came


def control(message: m.Message) -> tuple[wire.Reader, bytes]:
    """Return a reader of the control lane, and a frame for it."""
    header = pb.Header()
    header.CopyFrom(HEADER)
    header.lane = pb.LANE_CONTROL
    return wire.Reader(header, MESSAGES), wire.pack_header(header) + wire.pack_body(message)


def in_texts(value: Any) -> list[str]:
    """Yield every text that a message holds, at any depth."""
    if isinstance(value, str):
        return [value]
    return [text for each in value for text in in_texts(each)] if isinstance(value, tuple) else []


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_every_message_comes_back_equal(kind: type, data: st.DataObject) -> None:
    message = data.draw(message_strategy(kind))
    frame = pb.Frame.FromString(wire.pack_body(message))
    again = wire.unpack_body(frame, typing.cast(str, frame.WhichOneof("body")))
    assert type(again) is kind and again == message
    assert [type(value) for value in again] == [type(value) for value in message]


NASTY = st.sampled_from([chr(n) for n in (*range(32), *range(127, 160), 0x2028, 0x202E, 0x2066, 0x200F, 0xFEFF)])


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@settings(max_examples=15, deadline=None)
@given(data=st.data(), nasty=st.text(NASTY, min_size=1, max_size=9), size=st.sampled_from([0, 3000]))
def test_no_text_of_an_unpacked_message_has_a_control_character(
    kind: type, data: st.DataObject, nasty: str, size: int
) -> None:
    message = data.draw(message_strategy(kind))
    body_name = wire._BODY_NAMES[kind.__name__]
    frame = pb.Frame.FromString(wire.pack_body(message))
    body = getattr(frame, body_name)
    for field in body.DESCRIPTOR.fields:
        if field.type == field.TYPE_STRING and field.name not in wire._OWN_NAMES:
            if field.is_repeated:
                body_texts = getattr(body, field.name)
                body_texts[:] = [nasty] * len(body_texts)
            else:
                setattr(body, field.name, nasty + "x" * size * (field.name == "reason") + nasty)
    again = wire.unpack_body(frame, body_name)
    own = [getattr(again, name) for name in wire._OWN_NAMES if hasattr(again, name)]
    for text in in_texts(again):
        assert text.isprintable() or text in own
        assert len(text) <= REASON_KEPT_MAX or text in own


def test_a_name_that_is_cleaned_is_not_the_name_of_another() -> None:
    assert clean("island-0\x00") != "island-0" != clean("\u202eisland-0")


def sealed(message: m.Message, payload: bytes = b"") -> tuple[pb.Header, bytes]:
    """Return a frame as a peer of this release sends it, and its header."""
    header = pb.Header()
    header.CopyFrom(HEADER)
    if isinstance(message, m.GlobalFragment):
        header.sender = m.SYNCER
    if message.__class__ in wire.BULK_TYPES:
        (piece,) = wire.pieces(1, wire.pack_body(message), [memoryview(payload)], 1 << 20)
        return header, wire.piece_frame(wire.pack_header(header), piece)
    header.lane = pb.LANE_CONTROL
    return header, wire.control_frame(wire.pack_header(header), wire.pack_body(message))


FLIPPED = [
    m.StepReport("a", 2, 7, 9000, 6, (m.Adopted(5, 4, 4096), m.Adopted(-1, 0, 0)), 0.25, 2.5, 56, 64),
    VALUE,
    m.GlobalFragment(9, 1, 8, 3, 1 << 63, 10, 2, 7, -1),
    m.PullRequest(9, 1, 40),
    m.Lease(64, 128, 192),
]


@pytest.mark.parametrize("message", FLIPPED, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("first", [True, False], ids=["first frame", "later frame"])
def test_a_flipped_bit_is_never_taken_for_another_value(message: m.Message, first: bool) -> None:
    """Flip each bit of a frame: the frame is refused, or the message is the one that was sent."""
    payload = b"0123456789" * (type(message) in wire.BULK_TYPES)
    header, raw = sealed(message, payload)
    taken = 0
    for bit in range(8 * len(raw)):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        receiver = wire.Reader(header, MESSAGES)
        if not first:
            receiver.read(raw)
        try:
            came = come_out(receiver, bytes(flipped))
        except wire.WireError:
            continue
        taken += 1
        assert came == [(message, payload)], f"bit {bit}"
    assert taken <= 16 * first, "only the tag of the checksum itself may be damaged, and only before one was seen"


def come_out(receiver: wire.Reader, raw: bytes) -> list[tuple[m.Message, bytes]]:
    """Return the event that one frame becomes."""
    event, came = receiver.read(raw), list[tuple[m.Message, bytes]]()
    assert isinstance(event, wire.Incoming)
    if not receiver._bulk:
        return [(typing.cast(m.Message, event.message), b"")]
    assembly = Assembly(1 << 20, Partials(1 << 20, 60.0))
    assembly.add(event)
    assembly.deliver(lambda message, payload: came.append((message, bytes(payload))))
    return came


def test_peers_that_know_no_checksum_are_understood_and_understand() -> None:
    """Check frames of release 0.2.0 with protocol 1, which sends no checksum and skips unknown fields."""
    header, raw = sealed(FLIPPED[0])
    receiver = wire.Reader(header, MESSAGES)
    bare = wire.pack_header(header) + wire.pack_body(FLIPPED[0])
    assert raw.startswith(bare) and receiver.read(bare) == receiver.read(bare) == wire.Incoming(
        FLIPPED[0], pb.Chunk(), memoryview(b"")
    )
    position = len(bare)
    assert raw[position] & 7 == 2, "its readers take length-delimited fields only"
    assert wire.Reader(header, MESSAGES).read(raw) == wire.Incoming(FLIPPED[0], pb.Chunk(), memoryview(b""))


def test_a_peer_that_sends_checksums_sends_them_always() -> None:
    header, raw = sealed(FLIPPED[0])
    receiver = wire.Reader(header, MESSAGES)
    receiver.read(raw)
    with pytest.raises(wire.WireError, match="without a checksum"):
        receiver.read(wire.pack_header(header) + wire.pack_body(FLIPPED[0]))


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(st.binary(max_size=50), max_size=4), chunk_bytes=st.integers(1, 60))
def test_payload_of_any_parts_comes_back_through_chunks_of_any_size(parts: list[bytes], chunk_bytes: int) -> None:
    whole = b"".join(parts)
    made = frames(VALUE, *parts, chunk_bytes=chunk_bytes)
    assert len(made) == max(1, -(-len(whole) // chunk_bytes))
    events = [reader().read(frame) for frame in made]
    assert all(isinstance(event, wire.Incoming) for event in events)
    assert [event.message for event in events] == [VALUE, *[None] * (len(made) - 1)]
    assert b"".join(event.data for event in events) == whole
    assert [event.chunk.offset for event in events] == [number * chunk_bytes for number in range(len(made))]
    assert {(event.chunk.message, event.chunk.payload_bytes) for event in events} == {(1, len(whole))}


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(st.binary(max_size=50), max_size=4),
    chunk_bytes=st.integers(1, 60),
    edges=st.lists(st.integers(0, 200), max_size=6, unique=True).map(sorted),
)
def test_what_the_peer_holds_is_left_out(parts: list[bytes], chunk_bytes: int, edges: list[int]) -> None:
    whole = b"".join(parts)
    pairs = [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=False) if stop <= len(whole)]
    views = [memoryview(part) for part in parts]
    pieces = list(wire.pieces(1, b"body", views, chunk_bytes, 7, Ranges(pairs)))
    assert [piece.body for piece in pieces] == [b"body", *[b""] * (len(pieces) - 1)]
    sent = bytearray()
    merged = bytearray(len(whole))
    for start, stop in pairs:
        merged[start:stop] = whole[start:stop]
    for piece in pieces:
        data = b"".join(piece.views)
        merged[piece.chunk.offset : piece.chunk.offset + len(data)] = data
        sent += data
        assert piece.chunk.resumed and piece.chunk.key == 7 and len(data) <= chunk_bytes
        assert piece.chunk.digest == xxhash.xxh3_64_intdigest(whole)
    assert merged == whole and len(sent) == len(whole) - sum(stop - start for start, stop in pairs)


def test_frames_are_ordinary_protobuf() -> None:
    first, second, third = (pb.Frame.FromString(raw) for raw in frames(VALUE, b"0123456789"))
    assert [first.data, second.data, third.data] == [b"0123", b"4567", b"89"]
    assert first.fragment_value.tokens == 9000 and not second.HasField("fragment_value")
    assert (third.chunk.offset, third.chunk.payload_bytes) == (8, 10)
    assert third.chunk.crc32c == google_crc32c.value(b"89")
    assert first.header == second.header == HEADER


def test_frame_whose_writer_does_not_put_data_last_is_read() -> None:
    raw = frames(VALUE, b"0123")[0]
    head, data = wire.split(raw)
    moved = raw[len(head) :] + head
    assert moved != raw and wire.split(moved) == (head, data) and bytes(data) == b"0123"


def test_numpy_memory_is_sent_and_a_payload_handed_out_cannot_be_written() -> None:
    values = np.arange(4, dtype=np.float32)
    # The view is writable, and the checksum library alone would refuse it.
    view = memoryview(values).cast("B")
    for chunk_bytes in (7, 100):
        ((_, payload),) = assemble(frames(VALUE, view, chunk_bytes=chunk_bytes))  # type: ignore[arg-type]
        assert payload.readonly and np.array_equal(np.frombuffer(payload, np.float32), values)


def test_value_that_does_not_fit_is_refused_before_it_travels() -> None:
    with pytest.raises(ValueError, match=r"Heartbeat\.incarnation = 9223372036854775808 cannot be sent"):
        wire.pack_body(m.Heartbeat("a", 2**63))
    with pytest.raises(ValueError, match=r"Stop\.reason"):
        wire.pack_body(m.Stop(1, typing.cast(str, 5)))
    pairs = tuple((str(number), "x" * PAIR_LENGTH_MAX) for number in range(9))
    with pytest.raises(ValueError, match="the limit is 524288"):
        wire.pack_body(m.Hello("a", 0, pairs, (), (), 0, 1, 0))


def test_long_reason_is_shortened_rather_than_refused() -> None:
    """Check that a reason can always be sent, because reasons quote bytes of other peers."""
    frame = pb.Frame.FromString(wire.pack_body(m.Stop(1, "x" * 10_000)))
    assert wire.unpack_body(frame, "stop") == m.Stop(1, "x" * REASON_KEPT_MAX)
    assert len(frame.stop.reason) == REASON_LENGTH_MAX
    assert reader().read(wire.goodbye_frame(wire.pack_header(HEADER), "y" * 10_000)) == wire.Goodbye(
        "y" * REASON_KEPT_MAX
    )


HELLO = m.Hello("a", 2, (("run", "r"),), (1, 2), (3, 4), 1, 8, 16)
REPORT = m.StepReport("a", 2, 1, 1, 1, (), 0.5, 1.0, 1, 1)
PART = m.StateChunk("a", 2, "b", 1, 0, 1, 5, 0)


@pytest.mark.parametrize(
    ("message", "changes", "reason"),
    [
        (HELLO, {"learner_id": "a" * 101}, "Hello.learner_id has 101 characters, the limit is 100"),
        (HELLO, {"fingerprint": (("k", "v"),) * 257}, "Hello.fingerprint_key has 257 elements, the limit is 256"),
        (HELLO, {"fingerprint": (("k" * 101, "v"),)}, "fingerprint_key has 101 characters"),
        (HELLO, {"fingerprint": (("k", "v" * 65537),)}, "fingerprint_value has 65537 characters, the limit is 65536"),
        (HELLO, {"versions": (0,) * 16385}, "Hello.versions has 16385 elements, the limit is 16384"),
        (HELLO, {"versions": (0, -2)}, "Hello.versions is -2, it must be -1 to"),
        (HELLO, {"digests": (0,)}, "Hello has 2 versions but 1 digests"),
        (HELLO, {"epoch": -1}, "Hello.epoch is -1, it must be 0 to"),
        (HELLO, {"incarnation": COUNTER_MAX + 1}, "Hello.incarnation is 4611686018427387905"),
        (REPORT, {"step_s": math.nan}, "StepReport.step_s is nan, no duration"),
        (REPORT, {"step_s": math.inf}, "StepReport.step_s is inf"),
        (REPORT, {"step_s": -1.0}, "StepReport.step_s is -1.0"),
        (REPORT, {"adopted": ((0, 0, 0),) * 16385}, "adopted_version has 16385 elements"),
        (REPORT, {"adopted": ((0, -1, 0),)}, "adopted_local_step is -1"),
        (METRICS, {"values": (m.Metric("x", 0.0),) * 65}, "MetricsReport.values_name has 65 elements, the limit is 64"),
        (METRICS, {"values": (m.Metric("x" * 65, 0.0),)}, "values_name has 65 characters, the limit is 64"),
        (SCORE, {"scores": (m.Metric("x", 0.0),) * 257}, "Score.scores_name has 257 elements, the limit is 256"),
        (SCORE, {"scores": (m.Metric("x" * 129, 0.0),)}, "scores_name has 129 characters, the limit is 128"),
        (PART, {"part": 1}, "StateChunk.part is 1 of 1, the limit is 4194304 parts"),
        (PART, {"parts": 0}, "StateChunk.part is 0 of 0"),
        (PART, {"parts": 1 << 23}, "the limit is 4194304 parts"),
        (VALUE, {"payload_bytes": -1}, "FragmentValue.payload_bytes is -1"),
        (m.Lease(0, 0, 1), {"stop": -1}, "Lease.stop is -1"),
    ],
)
def test_absurd_numbers_are_refused_by_sender_and_receiver(
    message: Any, changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = message._replace(**changes)
    with pytest.raises(ValueError, match=reason):
        wire.pack_body(bad)
    # The code of this peer does not check its own messages.
    with monkeypatch.context() as patch:
        patch.setattr(wire, "check_body", lambda body: None)
        receiver, frame = control(bad)
    with pytest.raises(wire.WireError, match=f"unusable message: .*{reason}"):
        receiver.read(frame)


def test_loss_of_a_run_that_diverges_travels() -> None:
    frame = pb.Frame.FromString(wire.pack_body(REPORT._replace(loss=math.inf)))
    assert wire.unpack_body(frame, "step_report") == REPORT._replace(loss=math.inf)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damaged_frames_raise_wire_error_and_nothing_else(data: st.DataObject) -> None:
    raw = bytearray(data.draw(st.sampled_from(frames(VALUE, b"0123456789"))))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    for candidate in (bytes(raw), bytes(raw[:cut]), data.draw(st.binary(max_size=60))):
        try:
            reader().read(candidate)
        except wire.WireError as error:
            assert str(error)


def bulk(message: m.Message, *parts: bytes, **header: Any) -> bytes:
    """Return the first frame of a message in the bulk lane, with other fields in its header."""
    frame = pb.Frame.FromString(frames(message, *parts)[0])
    for name, new in header.items():
        setattr(frame.header, name, new)
    return frame.SerializeToString()


BULK, CONTROL = pb.LANE_BULK, pb.LANE_CONTROL
CHUNK = pb.Frame(chunk=pb.Chunk(message=1)).SerializeToString()
SIZED = pb.Frame(chunk=pb.Chunk(message=1, payload_bytes=4)).SerializeToString()


@pytest.mark.parametrize(
    ("lane", "frame", "reason"),
    [
        (BULK, bulk(VALUE, run_id="other"), "run_id is 'other', not 'run'"),
        (BULK, bulk(VALUE, epoch=4), "epoch is 4, not 3"),
        (BULK, bulk(VALUE, sender="b"), "sender is 'b', not 'a'"),
        (BULK, bulk(VALUE, incarnation=1), "incarnation is 1, not 2"),
        (BULK, bulk(VALUE, session=8), "session is 8, not 7"),
        (BULK, bulk(VALUE, lane=pb.LANE_CONTROL), "lane is 1, not 2"),
        (BULK, bulk(m.Stop(1, "")), "a Stop is not expected here"),
        (BULK, bulk(m.Heartbeat("b", 2)), "'a' sent a message with learner_id 'b'"),
        (BULK, bulk(m.Heartbeat("a", 1)), "incarnation 1, its own is 2"),
        (BULK, bulk(m.Heartbeat("a", 2), b"0123"), "a Heartbeat with a payload"),
        (
            BULK,
            wire.pack_header(HEADER) + wire.pack_body(VALUE),
            "a FragmentValue without a chunk on a bulk connection",
        ),
        (BULK, frames(VALUE, number=0)[0], "a chunk without the number of its message"),
        (CONTROL, control(VALUE)[1] + CHUNK, "a payload on the control connection"),
        (CONTROL, control(VALUE)[1] + SIZED, "a payload on the control connection"),
        (CONTROL, control(VALUE)[1] + pb.Frame(data=b"0123").SerializeToString(), "data without a chunk"),
        (
            CONTROL,
            control(REPORT)[1] + pb.Frame(step_report=pb.StepReport(adopted_version=[1, 2])).SerializeToString(),
            r"columns of StepReport\.adopted differ in length",
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_frame_that_is_out_of_place_is_refused(lane: int, frame: bytes, reason: str) -> None:
    """Refuse frames of another session, lane, direction or sender, and frames that contradict themselves."""
    receiver = control(VALUE)[0] if lane == CONTROL else reader(allowed=LEARNER_TYPES)
    with pytest.raises(wire.WireError, match=reason):
        receiver.read(frame)


def test_ready_and_goodbye() -> None:
    header = wire.pack_header(HEADER)
    holdings = pb.Holdings(partials=[pb.PartialPayload(key=1)])
    assert reader().read(wire.ready_frame(header, holdings)) == wire.Ready(holdings)
    assert reader().read(wire.goodbye_frame(header, "done")) == wire.Goodbye("done")


def test_a_step_report_stays_small() -> None:
    """Check that the report for 24 fragments fits into a packet, because every learner sends one after each step."""
    adopted = tuple((step, step, step * 65536) for step in range(1000, 1024))
    report = m.StepReport("island-0", 1, 1024, 1024 * 65536, 1023, typing.cast(Any, adopted), 0.25, 2.0, 8192, 8704)
    assert len(wire.pack_body(report)) < 320


def test_strategies_cover_what_messages_hold() -> None:
    """Fail if a new field type has no rule in wire.py and here, because the property test would not see it."""
    assert len(MESSAGES) == 27 + 30 and not any(dataclasses.is_dataclass(kind) for kind in MESSAGES)
    assert {kind.__name__ for kind in MESSAGES} | {"Goodbye"} == set(wire._BODY_NAMES)


ROOT = Path(__file__).parents[2]
FOLDER = Path("diloco_jax/transport/proto")


def protobuf_of(module: str) -> str:
    """Return the version of protobuf that wrote a module; the module refuses an older one."""
    return re.findall(r"# Protobuf Python Version: ([\d.]+)", module)[0]


@pytest.mark.skipif(importlib.util.find_spec("grpc_tools") is None, reason="grpcio-tools is not installed")
def test_the_committed_protobuf_code_is_what_protoc_generates(tmp_path: Path) -> None:
    subprocess.run(
        [ROOT / "scripts/gen_proto", tmp_path],
        check=True,
        timeout=HANGS_S,
        env={**os.environ, "PYTHON": sys.executable},
    )
    committed, generated = ((root / FOLDER / "diloco_pb2.py").read_text(encoding="utf-8") for root in (ROOT, tmp_path))
    if protobuf_of(generated) != protobuf_of(committed):
        pytest.skip(f"protoc of protobuf {protobuf_of(generated)}, but {protobuf_of(committed)} wrote diloco_pb2.py")
    assert committed == generated, "diloco_pb2.py is not what diloco.proto gives: run scripts/gen_proto"
    committed, generated = ((root / FOLDER / "diloco_pb2.pyi").read_text(encoding="utf-8") for root in (ROOT, tmp_path))
    assert committed == generated, "diloco_pb2.pyi is not what diloco.proto gives: run scripts/gen_proto"


def test_every_admitted_protobuf_imports_the_committed_code() -> None:
    version = protobuf_of((ROOT / FOLDER / "diloco_pb2.py").read_text(encoding="utf-8"))
    (least,) = re.findall(r'"protobuf>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert [int(part) for part in version.split(".")] <= [int(part) for part in least.split(".")]


@pytest.mark.parametrize("kind", wire._FIELDS, ids=lambda kind: kind.__name__)
def test_proto_has_every_field_of_every_message(kind: type) -> None:
    names = {field.name for field in getattr(pb, kind.__name__).DESCRIPTOR.fields}
    expected = {column for _, _, columns in wire._FIELDS[kind] for column in columns}
    assert names == expected, f"{kind.__name__}: diloco.proto and the class differ"
