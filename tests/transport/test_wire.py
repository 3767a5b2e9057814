"""Frames and messages: every message survives the trip, and nothing that is wrong is believed."""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Any

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_jax.protocol.messages import (
    FragmentValue,
    Heartbeat,
    Hello,
    Lease,
    Message,
    StatePart,
    StepReport,
    Stop,
)
from diloco_jax.transport import wire
from diloco_jax.transport.limits import COUNTER_MAX, PAIR_LENGTH_MAX, PARTS_MAX, REASON_LENGTH_MAX
from diloco_jax.transport.link import LEARNER_TYPES
from diloco_jax.transport.proto import diloco_pb2 as pb

HEADER = pb.Header(run_id="run", epoch=3, sender="a", incarnation=2, session=7, lane=pb.LANE_BULK)
VALUE = FragmentValue("a", 2, 5, 1, 40, 24, 9000, -1, 80, 10)
MESSAGES: tuple[type, ...] = typing.get_args(Message)


def message_strategy(kind: Any) -> st.SearchStrategy[Any]:
    """Messages of a class, built from its annotations."""
    hints = typing.get_type_hints(kind)
    version, digest = st.integers(-1, COUNTER_MAX), st.integers(0, 2**64 - 1)
    special = {"version": version, "base_version": version, "versions": st.lists(version, max_size=4).map(tuple)}
    special |= {"digest": digest, "step_s": st.floats(0, 1e300)}
    made = st.builds(kind, *(special.get(name, strategy_of(hint)) for name, hint in hints.items()))
    if kind is Hello:  # a digest for each version
        digests = st.lists(digest, min_size=4, max_size=4)
        return st.builds(lambda hello, d: hello._replace(digests=tuple(d[: len(hello.versions)])), made, digests)
    if kind is StatePart:
        return st.builds(lambda part, n: part._replace(part=part.part % n, parts=n), made, st.integers(1, PARTS_MAX))
    return made


def strategy_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of any type that a message field may have, built from the annotation alone."""
    if typing.get_origin(hint) is tuple:
        first, *rest = typing.get_args(hint)
        if rest == [Ellipsis]:
            return st.lists(strategy_of(first), max_size=4).map(tuple)
        return st.tuples(*(strategy_of(part) for part in (first, *rest)))
    if hasattr(hint, "_fields"):
        return st.builds(hint, *(strategy_of(part) for part in typing.get_type_hints(hint).values()))
    return {
        int: st.integers(0, COUNTER_MAX),
        str: st.text(max_size=20),
        float: st.floats(allow_nan=False),
    }[hint]


def assembler(payload_bytes_max: int = 1 << 20, allowed: tuple[type, ...] = MESSAGES) -> wire.Assembler:
    return wire.Assembler(HEADER, allowed, payload_bytes_max)


def frames(message: Message, *parts: bytes, chunk_bytes: int = 4) -> list[bytes]:
    views = [memoryview(part) for part in parts]
    return list(wire.frames(wire.pack_header(HEADER), wire.pack_body(message), views, chunk_bytes))


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_every_message_comes_back_equal(kind: type, data: st.DataObject) -> None:
    message = data.draw(message_strategy(kind))
    frame = pb.Frame.FromString(wire.pack_body(message))
    again = wire.unpack_body(frame, typing.cast(str, frame.WhichOneof("body")))
    assert type(again) is kind and again == message
    assert [type(value) for value in again] == [type(value) for value in message]


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(st.binary(max_size=50), max_size=4), chunk_bytes=st.integers(1, 60))
def test_payload_of_any_parts_comes_back_through_chunks_of_any_size(parts: list[bytes], chunk_bytes: int) -> None:
    reader, whole = assembler(), b"".join(parts)
    made = frames(VALUE, *parts, chunk_bytes=chunk_bytes)
    assert len(made) == max(1, -(-len(whole) // chunk_bytes))
    *early, last = [reader.feed(frame) for frame in made]
    assert early == [None] * len(early)
    assert isinstance(last, wire.Received) and last.message == VALUE and bytes(last.payload) == whole


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
    view = memoryview(values).cast("B")  # writable: the checksum library alone would not take it
    for chunk_bytes in (7, 100):
        reader = assembler()
        made = wire.frames(wire.pack_header(HEADER), wire.pack_body(VALUE), [view], chunk_bytes)
        last = [reader.feed(frame) for frame in made][-1]
        assert isinstance(last, wire.Received) and memoryview(last.payload).readonly
        assert np.array_equal(np.frombuffer(last.payload, np.float32), values)


def test_value_that_does_not_fit_is_refused_before_it_travels() -> None:
    with pytest.raises(ValueError, match=r"Heartbeat\.incarnation = 9223372036854775808 cannot be sent"):
        wire.pack_body(Heartbeat("a", 2**63))
    with pytest.raises(ValueError, match=r"Stop\.reason"):
        wire.pack_body(Stop(1, typing.cast(str, 5)))
    pairs = tuple((str(number), "x" * PAIR_LENGTH_MAX) for number in range(9))
    with pytest.raises(ValueError, match="the limit is 524288"):
        wire.pack_body(Hello("a", 0, pairs, (), (), 0, 1, 0))


def test_long_reason_is_shortened_rather_than_refused() -> None:
    """Reasons quote what others sent; to send one must never fail."""
    frame = pb.Frame.FromString(wire.pack_body(Stop(1, "x" * 10_000)))
    assert wire.unpack_body(frame, "stop") == Stop(1, "x" * REASON_LENGTH_MAX)
    assert assembler().feed(wire.goodbye_frame(wire.pack_header(HEADER), "y" * 10_000)) == wire.Goodbye(
        "y" * REASON_LENGTH_MAX
    )


HELLO = Hello("a", 2, (("run", "r"),), (1, 2), (3, 4), 1, 8, 16)
REPORT = StepReport("a", 2, 1, 1, 1, (), 0.5, 1.0, 1, 1)
PART = StatePart("a", 2, "b", 1, (1,), 0, 1, 5, 0)


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
        (PART, {"part": 1}, "StatePart.part is 1 of 1, the limit is 4194304 parts"),
        (PART, {"parts": 0}, "StatePart.part is 0 of 0"),
        (PART, {"parts": 1 << 23}, "the limit is 4194304 parts"),
        (VALUE, {"payload_bytes": -1}, "FragmentValue.payload_bytes is -1"),
        (Lease(0, 0, 1), {"stop": -1}, "Lease.stop is -1"),
    ],
)
def test_absurd_numbers_are_refused_by_sender_and_receiver(
    message: Any, changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = message._replace(**changes)
    with pytest.raises(ValueError, match=reason):
        wire.pack_body(bad)
    with monkeypatch.context() as patch:  # a peer whose code does not look
        patch.setattr(wire, "check_body", lambda body: None)
        frame = wire.pack_header(HEADER) + wire.pack_body(bad)
    with pytest.raises(wire.WireError, match=f"unusable message: .*{reason}"):
        assembler().feed(frame)


def test_loss_of_a_run_that_diverges_travels() -> None:
    frame = pb.Frame.FromString(wire.pack_body(REPORT._replace(loss=math.inf)))
    assert wire.unpack_body(frame, "step_report") == REPORT._replace(loss=math.inf)


def test_oversize_payload_is_refused_before_allocation() -> None:
    frame = pb.Frame.FromString(frames(VALUE, b"0123")[0])
    frame.chunk.payload_bytes = 1 << 62  # an attempt to allocate this raises another error
    with pytest.raises(wire.WireError, match=r"payload of 4611686018427387904 bytes, the limit here is 100: raise"):
        assembler(payload_bytes_max=100).feed(frame.SerializeToString())
    assert assembler(payload_bytes_max=4).feed(frames(VALUE, b"0123")[0]) is not None
    with pytest.raises(wire.WireError, match="the limit here is 3"):
        assembler(payload_bytes_max=3).feed(frames(VALUE, b"0123")[0])


def test_every_flipped_data_bit_is_found() -> None:
    raw = frames(VALUE, b"0123")[0]
    for bit in range(32):
        broken = bytearray(raw)
        broken[len(raw) - 4 + bit // 8] ^= 1 << bit % 8
        with pytest.raises(wire.WireError, match="corrupt chunk: crc32c differs at offset 0 of FragmentValue"):
            assembler().feed(bytes(broken))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damaged_frames_raise_wire_error_and_nothing_else(data: st.DataObject) -> None:
    raw = bytearray(data.draw(st.sampled_from(frames(VALUE, b"0123456789"))))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    for candidate in (bytes(raw), bytes(raw[:cut]), data.draw(st.binary(max_size=60))):
        reader = assembler()
        try:
            reader.feed(candidate)
        except wire.WireError as error:
            assert str(error)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("run_id", "other", "run_id is 'other', not 'run'"),
        ("epoch", 4, "epoch is 4, not 3"),
        ("sender", "b", "sender is 'b', not 'a'"),
        ("incarnation", 1, "incarnation is 1, not 2"),
        ("session", 8, "session is 8, not 7"),
        ("lane", pb.LANE_CONTROL, "lane is 1, not 2"),
    ],
)
def test_frame_of_another_session_is_refused_with_the_difference(field: str, value: Any, reason: str) -> None:
    frame = pb.Frame.FromString(frames(VALUE)[0])
    setattr(frame.header, field, value)
    with pytest.raises(wire.WireError, match=reason):
        assembler().feed(frame.SerializeToString())


def test_message_in_the_wrong_direction_or_in_anothers_name_is_refused() -> None:
    with pytest.raises(wire.WireError, match="a Stop is not expected here"):
        assembler(allowed=LEARNER_TYPES).feed(frames(Stop(1, ""))[0])
    with pytest.raises(wire.WireError, match="'a' sent a message with learner_id 'b'"):
        assembler().feed(frames(Heartbeat("b", 2))[0])
    with pytest.raises(wire.WireError, match="incarnation 1, its own is 2"):
        assembler().feed(frames(Heartbeat("a", 1))[0])


def test_chunks_out_of_place_are_refused() -> None:
    one, two, three = frames(VALUE, b"0123456789")
    for sequence, reason in (
        ([one, three], "expected offset 4 of 10"),
        ([one, two, two], "expected offset 8 of 10"),
        ([two], "a frame without a message"),
        ([one, one], "a message inside a payload"),
        ([one, frames(VALUE, b"0123456789AB")[1]], "of 12 is out of place"),
    ):
        reader = assembler()
        *early, last = sequence
        for frame in early:
            assert reader.feed(frame) is None
        with pytest.raises(wire.WireError, match=reason):
            reader.feed(last)
    with pytest.raises(wire.WireError, match="a Heartbeat with a payload"):
        assembler().feed(frames(Heartbeat("a", 2), b"0123")[0])
    empty = pb.Frame.FromString(one)
    empty.data = b""
    with pytest.raises(wire.WireError, match="chunk of 0 bytes"):
        assembler().feed(empty.SerializeToString())


def test_columns_of_different_length_are_refused() -> None:
    frame = pb.Frame(header=HEADER, step_report=pb.StepReport(learner_id="a", incarnation=2, adopted_version=[1, 2]))
    with pytest.raises(wire.WireError, match=r"columns of StepReport\.adopted differ in length"):
        assembler().feed(frame.SerializeToString())


def test_ready_and_goodbye() -> None:
    header = wire.pack_header(HEADER)
    assert assembler().feed(header) == wire.Ready()
    assert assembler().feed(wire.goodbye_frame(header, "done")) == wire.Goodbye("done")


def test_a_step_report_stays_small() -> None:
    """It is sent after every inner step of every learner: 24 fragments must not take more than a packet."""
    adopted = tuple((step, step, step * 65536) for step in range(1000, 1024))
    report = StepReport("island-0", 1, 1024, 1024 * 65536, 1023, typing.cast(Any, adopted), 0.25, 2.0, 8192, 8704)
    assert len(wire.pack_body(report)) < 320


def test_strategies_cover_what_messages_hold() -> None:
    """A new field type must get a rule in wire.py and here, not silently escape the property test."""
    assert len(set(MESSAGES)) == 22 and not any(dataclasses.is_dataclass(kind) for kind in MESSAGES)
    assert {kind.__name__ for kind in MESSAGES} | {"Goodbye"} == set(wire._BODY_NAMES)
