"""Frames and messages: every message arrives as it was sent, and every wrong frame is refused."""

import dataclasses
import importlib.util
import math
import os
import re
import struct
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
from tests.transport import ends

HEADER = pb.Header(run_id="run", epoch=3, sender="a", incarnation=2, session=7, lane=pb.LANE_CONTROL)
BULK_HEADER = pb.Header(run_id="run", epoch=3, sender="a", incarnation=2, session=7, lane=pb.LANE_BULK)
PACKED = wire.pack_header(HEADER)
VALUE = m.FragmentValue("a", 2, 5, 1, 40, 24, 9000, -1, 80, 10)
MESSAGES: tuple[type, ...] = tuple(dict.fromkeys((*typing.get_args(m.Message), *COMMANDS, *REPLIES)))
CONTROL_TYPES = tuple(kind for kind in MESSAGES if kind not in wire.BULK_TYPES)
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


def reader() -> wire.Reader:
    """Return a reader of the control lane."""
    return wire.Reader(HEADER, CONTROL_TYPES)


def frames(message: m.Message, *parts: bytes, chunk_bytes: int = 4, digested: bool = False) -> list[bytes]:
    views = [memoryview(part) for part in parts]
    pieces = wire.pieces(1, wire.pack_body(message), views, chunk_bytes, digested=digested)
    return [ends.bulk_bytes(piece) for piece in pieces]


def assemble(frames: list[bytes]) -> list[tuple[m.Message, memoryview]]:
    """Return the messages that a receiver assembles from frames of the bulk lane."""
    assembly, came = Assembly(1 << 20, Partials(1 << 20, 60.0)), list[tuple[m.Message, memoryview]]()
    for frame in frames:
        ends.add(assembly, wire.Reader(BULK_HEADER, MESSAGES), frame)
        assembly.deliver(lambda message, payload: came.append((message, payload)))
    return came


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


FLIPPED = [
    m.StepReport("a", 2, 7, 9000, 6, (m.Adopted(5, 4, 4096), m.Adopted(-1, 0, 0)), 0.25, 2.5, 56, 64),
    m.PullRequest(9, 1, 40),
    m.Lease(64, 128, 192),
]


def flips(raw: bytes) -> Iterator[bytes]:
    """Yield a frame once for each of its bits, with that bit flipped."""
    for bit in range(8 * len(raw)):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)


@pytest.mark.parametrize("message", FLIPPED, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("first", [True, False], ids=["first frame", "later frame"])
def test_a_flipped_bit_is_never_taken_for_another_value(message: m.Message, first: bool) -> None:
    """Flip each bit of a control frame: the frame is refused, or the message is the one that was sent."""
    raw = wire.control_frame(PACKED, wire.pack_body(message))
    taken = 0
    for flipped in flips(raw):
        receiver = reader()
        if not first:
            receiver.read(raw)
        try:
            event = receiver.read(flipped)
        except wire.WireError:
            continue
        taken += 1
        assert event == wire.Incoming(message, pb.Chunk())
    assert taken <= 16 * first, "only the tag of the checksum itself may be damaged, and only before one was seen"


def test_no_flipped_bit_makes_a_checksum_a_message_of_the_control_lane() -> None:
    """Check that no message can take the place of another one when the tag of the first checksum is damaged."""
    for kind in CONTROL_TYPES:
        number = pb.Frame.DESCRIPTOR.fields_by_name[wire._BODY_NAMES[kind.__name__]].number
        assert (number ^ pb.Frame.CHECK_FIELD_NUMBER).bit_count() > 1, kind


@pytest.mark.parametrize("message", [VALUE, m.StateChunk("a", 2, "b", 3, 0, 2, 99, 10)], ids=["value", "state"])
def test_every_flipped_bit_of_a_bulk_frame_is_found(message: m.Message) -> None:
    """Flip each bit of prefix, head and data."""
    (raw,) = frames(message, b"0123456789", chunk_bytes=10)
    assert assemble([raw]) == [(message, memoryview(b"0123456789"))]
    found = set()
    for flipped in flips(raw):
        with pytest.raises(wire.WireError) as raised:
            assemble([flipped])
        found.add(re.sub(r"\d+", "N", str(raised.value)))
    assert found == {
        "a frame announces N bytes beside N bytes of data, the limits are N and N",
        "corrupt frame: its checksum differs",
        "corrupt chunk: its checksum differs at offset N of message N",
    }


@pytest.mark.parametrize(
    "message",
    [
        m.GlobalFragment(1, 0, 1, 10, 1, 99),
        m.CutFragment(m.GlobalFragment(1, 0, 1, 10, 1, 99), 98),
        m.AnchorValue("a", 2, 0, 1, 99, 10),
        m.StateChunk("a", 2, "b", 3, 0, 2, 99, 10),
    ],
    ids=lambda each: type(each).__name__,
)
def test_flipped_bits_of_digested_data_are_left_to_the_receiver_and_all_others_are_found(message: m.Message) -> None:
    """Flip each bit: in head and prefix it is found, and in data it arrives with the head that was sent."""
    (raw,) = frames(message, b"0123456789", chunk_bytes=10, digested=True)
    assert struct.unpack("<IIQQ", raw[:24])[3] == 0, "the data have no checksum"
    arrived = 0
    for at, flipped in enumerate(flips(raw)):
        try:
            ((came, payload),) = assemble([flipped])
        except wire.WireError:
            assert at // 8 < len(raw) - 10
            continue
        assert came == message
        # Nobody reads the 8 bytes of a checksum that is not there.
        assert bytes(payload) == flipped[-10:] and (16 <= at // 8 < 24 or payload != b"0123456789")
        arrived += 1
    assert arrived == 8 * (8 + 10)


@pytest.mark.parametrize(
    "message", [VALUE, m.EvaluateWithout(1, 0, 10), m.HostBlocks("a", 2)], ids=lambda each: type(each).__name__
)
def test_a_message_whose_content_has_no_digest_needs_checksums(message: m.Message) -> None:
    with pytest.raises(wire.WireError, match=f"a {type(message).__name__} without the checksums that it needs"):
        assemble(frames(message, b"0123456789", digested=True))


def test_chunks_of_a_message_are_all_digested_or_none_is() -> None:
    """A chunk that arrives before its message cannot leave out the checksum that the message needs."""
    checked, bare = frames(VALUE, b"0123", b"4567"), frames(VALUE, b"0123", b"4567", digested=True)
    with pytest.raises(wire.WireError, match="is out of place"):
        assemble([bare[1], checked[0]])


@pytest.mark.parametrize(
    ("seal", "reason"),
    [(pb.Frame(check=b"crc!").SerializeToString(), "\x82\x04\x08x"), (b"", "\x82\x04\x08" + "x" * 8)],
    ids=["release-0.3.0", "release-0.2.0"],
)
def test_frames_of_peers_with_another_checksum_or_none_are_accepted(seal: bytes, reason: str) -> None:
    """Read frames of older releases, also if their bytes look like the start of our checksum."""
    receiver = reader()
    for message in (FLIPPED[0], m.Stop(1, reason), FLIPPED[0]):
        event = receiver.read(PACKED + wire.pack_body(message) + seal)
        expected = m.Stop(1, clean(reason)) if isinstance(message, m.Stop) else message
        assert event == wire.Incoming(expected, pb.Chunk())


def test_older_peers_skip_our_checksum() -> None:
    """Check that a frame is a frame without a checksum, and one more field, which is not a checksum to older peers."""
    bare = PACKED + wire.pack_body(FLIPPED[0])
    raw = wire.control_frame(PACKED, wire.pack_body(FLIPPED[0]))
    last = raw.removeprefix(bare)
    # Release 0.3.0 compares checksums of exactly 4 bytes, and its parser takes length-delimited fields only.
    assert len(last) == 11 and last[:3] == bytes((0x82, 0x04, 8))
    assert pb.Frame.FromString(last) == pb.Frame(check=last[3:])


def test_a_peer_that_sends_checksums_sends_them_always() -> None:
    receiver, body = reader(), wire.pack_body(FLIPPED[0])
    receiver.read(wire.control_frame(PACKED, body))
    for seal in (b"", pb.Frame(check=b"crc!").SerializeToString()):
        with pytest.raises(wire.WireError, match="without a checksum"):
            receiver.read(PACKED + body + seal)


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(st.binary(max_size=50), max_size=4), chunk_bytes=st.integers(1, 60))
def test_payload_of_any_parts_comes_back_through_chunks_of_any_size(parts: list[bytes], chunk_bytes: int) -> None:
    whole = b"".join(parts)
    made = frames(VALUE, *parts, chunk_bytes=chunk_bytes)
    assert len(made) == max(1, -(-len(whole) // chunk_bytes))
    _, events, data = zip(*(ends.read_bulk(wire.Reader(BULK_HEADER, MESSAGES), frame) for frame in made), strict=True)
    assert [event.message for event in events] == [VALUE, *[None] * (len(made) - 1)]
    assert b"".join(data) == whole
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


def test_frames_are_prefix_protobuf_and_data() -> None:
    data = [b"0123", b"4567", b"89"]
    first, second, third = frames(VALUE, *data)
    for raw, expected in zip((first, second, third), data, strict=True):
        *sizes, head_check, data_check = struct.unpack("<IIQQ", raw[:24])
        assert sizes == [len(raw) - 24 - len(expected), len(expected)] and raw.endswith(expected)
        assert head_check == xxhash.xxh3_64_intdigest(raw[:8] + raw[24 : -len(expected)])
        assert data_check == xxhash.xxh3_64_intdigest(expected)
    heads = [
        pb.Frame.FromString(raw[24 : -len(expected)]) for raw, expected in zip((first, third), data[::2], strict=True)
    ]
    assert heads[0].fragment_value.tokens == 9000 and not heads[1].HasField("fragment_value")
    assert (heads[1].chunk.offset, heads[1].chunk.payload_bytes) == (8, 10)
    raw = wire.control_frame(PACKED, wire.pack_body(FLIPPED[0]))
    frame = pb.Frame.FromString(raw)
    assert frame.header == HEADER and frame.step_report.tokens == 9000
    assert int.from_bytes(frame.check, "little") == xxhash.xxh3_64_intdigest(raw[:-11])


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
    assert reader().read(wire.goodbye_frame(PACKED, "y" * 10_000)) == wire.Goodbye("y" * REASON_KEPT_MAX)


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
        frame = PACKED + wire.pack_body(bad)
    with pytest.raises(wire.WireError, match=f"unusable message: .*{reason}"):
        reader().read(frame)


def test_loss_of_a_run_that_diverges_travels() -> None:
    frame = pb.Frame.FromString(wire.pack_body(REPORT._replace(loss=math.inf)))
    assert wire.unpack_body(frame, "step_report") == REPORT._replace(loss=math.inf)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damaged_frames_raise_wire_error_and_nothing_else(data: st.DataObject) -> None:
    made = [PACKED + wire.pack_body(FLIPPED[0]), *map(wire.piece_head, wire.pieces(1, wire.pack_body(VALUE), [], 4))]
    raw = bytearray(data.draw(st.sampled_from(made)))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    for candidate in (bytes(raw), bytes(raw[:cut]), data.draw(st.binary(max_size=60))):
        for read in (reader().read, lambda head: wire.Reader(BULK_HEADER, MESSAGES).read_head(head, 4)):
            try:
                read(candidate)
            except wire.WireError as error:
                assert str(error)


def headed(message: m.Message, **changes: Any) -> bytes:
    """Return a control frame of another session."""
    header = pb.Header()
    header.CopyFrom(HEADER)
    for name, new in changes.items():
        setattr(header, name, new)
    return wire.pack_header(header) + wire.pack_body(message)


BEAT, BODY = m.Heartbeat("a", 2), wire.pack_body(VALUE)
CHUNK = pb.Frame(chunk=pb.Chunk(message=1)).SerializeToString()
SIZED = pb.Frame(chunk=pb.Chunk(message=1, payload_bytes=4)).SerializeToString()
UNNUMBERED = pb.Frame(chunk=pb.Chunk()).SerializeToString()
COLUMNS = pb.Frame(step_report=pb.StepReport(adopted_version=[1, 2])).SerializeToString()


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (headed(BEAT, run_id="other"), "run_id is 'other', not 'run'"),
        (headed(BEAT, epoch=4), "epoch is 4, not 3"),
        (headed(BEAT, sender="b"), "sender is 'b', not 'a'"),
        (headed(BEAT, incarnation=1), "incarnation is 1, not 2"),
        (headed(BEAT, session=8), "session is 8, not 7"),
        (headed(BEAT, lane=pb.LANE_BULK), "lane is 2, not 1"),
        (headed(m.Stop(1, "")), "a Stop is not expected here"),
        (headed(m.Heartbeat("b", 2)), "'a' sent a message with learner_id 'b'"),
        (headed(m.Heartbeat("a", 1)), "incarnation 1, its own is 2"),
        (headed(VALUE) + CHUNK, "a payload on the control connection"),
        (headed(VALUE) + SIZED, "a payload on the control connection"),
        (headed(REPORT) + COLUMNS, r"columns of StepReport\.adopted differ in length"),
        (headed(BEAT) + bytes(wire.HEAD_BYTES_MAX), r"a frame has \d+ bytes, the limit is 1048576"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_frame_that_is_out_of_place_is_refused(frame: bytes, reason: str) -> None:
    """Refuse frames of another session, lane, direction or sender, and frames that contradict themselves."""
    with pytest.raises(wire.WireError, match=reason):
        wire.Reader(HEADER, LEARNER_TYPES).read(frame)


@pytest.mark.parametrize(
    ("allowed", "head", "data_bytes", "reason"),
    [
        (LEARNER_TYPES, wire.pack_body(BEAT) + CHUNK, 4, "a Heartbeat with a payload"),
        (LEARNER_TYPES, wire.pack_body(m.Stop(1, "")) + CHUNK, 0, "a Stop is not expected here"),
        (LEARNER_TYPES, BODY, 0, "a FragmentValue without a chunk on a bulk connection"),
        (LEARNER_TYPES, BODY, 4, "data without a chunk"),
        (LEARNER_TYPES, BODY + UNNUMBERED, 0, "a chunk without the number of its message"),
        (LEARNER_TYPES, PACKED + BODY + CHUNK, 0, "with fields of the control lane"),
        (
            LEARNER_TYPES,
            BODY + CHUNK + pb.Frame(check=b"8 bytes!").SerializeToString(),
            0,
            "fields of the control lane",
        ),
        ((), SIZED, 4, "a payload from a side that sends none"),
        (LEARNER_TYPES, b"\xff\x00noise", 0, "malformed frame"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_head_that_is_out_of_place_is_refused(
    allowed: tuple[type, ...], head: bytes, data_bytes: int, reason: str
) -> None:
    with pytest.raises(wire.WireError, match=reason):
        wire.Reader(BULK_HEADER, allowed).read_head(head, data_bytes)


def test_ready_and_goodbye() -> None:
    holdings = pb.Holdings(partials=[pb.PartialPayload(key=1)])
    assert reader().read(wire.ready_frame(PACKED, holdings)) == wire.Ready(holdings)
    assert reader().read(wire.goodbye_frame(PACKED, "done")) == wire.Goodbye("done")
    bulk = wire.Reader(BULK_HEADER, MESSAGES)
    assert bulk.read_head(wire.ready_head(), 0) == wire.Ready(pb.Holdings())
    assert bulk.read_head(wire.goodbye_head("done"), 0) == wire.Goodbye("done")


def test_a_step_report_stays_small() -> None:
    """Check that the report for 24 fragments fits into a packet, because every learner sends one after each step."""
    adopted = tuple((step, step, step * 65536) for step in range(1000, 1024))
    report = m.StepReport("island-0", 1, 1024, 1024 * 65536, 1023, typing.cast(Any, adopted), 0.25, 2.0, 8192, 8704)
    assert len(wire.pack_body(report)) < 320


def test_strategies_cover_what_messages_hold() -> None:
    """Fail if a new field type has no rule in wire.py and here, because the property test would not see it."""
    assert len(MESSAGES) == 28 + 32 and not any(dataclasses.is_dataclass(kind) for kind in MESSAGES)
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
