"""Messages to bytes and back: the classes of protocol/messages.py <-> the messages of proto/diloco.proto.

Rules of this file
  * A frame is a protobuf `Frame`, but its payload bytes never go through a protobuf object: writers append them as
    the last field with one join, readers cut them off before they parse the rest. That halves the cost of a copy
    under the interpreter's lock, and any protobuf client can still read and write the stream.
  * Whatever arrives is checked before it is believed and before memory is taken for it. All that is wrong raises
    WireError, and a stream that raised it is not read any further.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
from google.protobuf.message import DecodeError

from diloco_jax.protocol import messages
from diloco_jax.protocol.messages import Message
from diloco_jax.transport.limits import REASON_LENGTH_MAX, check_body
from diloco_jax.transport.link import BULK_TYPES, CHUNK_BYTES_MAX
from diloco_jax.transport.proto import diloco_pb2 as pb

HEAD_BYTES_MAX = 1 << 20  # a frame without its data; a step report needs about 10 bytes per fragment
FRAME_BYTES_MAX = CHUNK_BYTES_MAX + HEAD_BYTES_MAX
_DATA_TAG = pb.Frame.DATA_FIELD_NUMBER << 3 | 2  # 2: length-delimited
_BODY_NAMES = {  # class name -> field of Frame
    field.message_type.name: field.name
    for field in pb.Frame.DESCRIPTOR.oneofs_by_name["body"].fields
    if field.message_type is not None
}


class WireError(ValueError):
    """What the peer sent breaks the contract, and how."""


class Goodbye(NamedTuple):
    """The peer ends this lane."""

    reason: str


class Ready(NamedTuple):
    """The syncer has both lanes of the session."""


class Received(NamedTuple):
    """A complete message with its payload."""

    message: Message
    payload: bytes | memoryview


# ---- one message ------------------------------------------------------------------------------------------------


def _plan(cls: type) -> tuple[tuple[str, type | None, tuple[str, ...]], ...]:
    """Return (field name, record class or None, protobuf field names) of a message class.

    A tuple of named tuples becomes one column per field, a tuple of pairs the columns `_key` and `_value`.
    """
    plan: list[tuple[str, type | None, tuple[str, ...]]] = []
    for name, hint in typing.get_type_hints(cls).items():
        element = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else None
        if element is None or element in (int, float, str):
            plan.append((name, None, (name,)))
        elif hasattr(element, "_fields"):
            plan.append((name, element, tuple(f"{name}_{field}" for field in element._fields)))
        else:
            assert typing.get_args(element) == (str, str), f"no rule for {cls.__name__}.{name}: {hint}"
            plan.append((name, tuple, (f"{name}_key", f"{name}_value")))
    return tuple(plan)


_FIELDS = {cls: _plan(cls) for cls in typing.get_args(Message)}


def pack_body(message: Message) -> bytes:
    """Return the message as the `body` of a serialised Frame.

    Raises:
        ValueError: A field does not fit its type on the wire, or the whole is larger than a frame may be.
    """
    body_name = _BODY_NAMES[type(message).__name__]
    frame = pb.Frame()
    body = getattr(frame, body_name)
    body.SetInParent()
    for name, record, columns in _FIELDS[type(message)]:
        value = getattr(message, name)
        try:
            if record is not None:
                for column, cells in zip(columns, zip(*value, strict=True), strict=False):
                    getattr(body, column).extend(cells)
            elif isinstance(value, tuple):
                getattr(body, name).extend(value)
            else:
                setattr(body, name, value[:REASON_LENGTH_MAX] if name == "reason" else value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{type(message).__name__}.{name} = {value!r} cannot be sent: {error}") from None
    check_body(body)
    packed = frame.SerializeToString()
    if len(packed) > HEAD_BYTES_MAX // 2:  # the other half is left for the header
        raise ValueError(f"{type(message).__name__} takes {len(packed)} bytes, the limit is {HEAD_BYTES_MAX // 2}")
    return packed


def unpack_body(frame: pb.Frame, body_name: str) -> Message:
    """Return the message that the frame holds in the field `body_name`.

    Raises:
        WireError: It holds more than it may, or columns of different length.
    """
    body = getattr(frame, body_name)
    try:
        check_body(body)
    except ValueError as error:
        raise WireError(f"unusable message: {error}") from None
    cls = getattr(messages, body.DESCRIPTOR.name)
    values: dict[str, Any] = {}
    for name, record, columns in _FIELDS[cls]:
        cell = getattr(body, columns[0])
        if record is not None:
            cells = [getattr(body, column) for column in columns]
            if len({len(column) for column in cells}) > 1:
                raise WireError(f"the columns of {cls.__name__}.{name} differ in length")
            rows = zip(*cells, strict=True)
            values[name] = tuple(rows) if record is tuple else tuple(record(*row) for row in rows)
        else:
            values[name] = cell if isinstance(cell, (int, float, str)) else tuple(cell)
    return typing.cast(Message, cls(**values))


# ---- writing ----------------------------------------------------------------------------------------------------


def pack_header(header: pb.Header) -> bytes:
    """Return the bytes with which every frame of a stream begins; alone they are the frame `Ready`."""
    return pb.Frame(header=header).SerializeToString()


def goodbye_frame(header: bytes, reason: str) -> bytes:
    """Return the last frame of a stream."""
    return header + pb.Frame(goodbye=pb.Goodbye(reason=reason[:REASON_LENGTH_MAX])).SerializeToString()


def frames(header: bytes, body: bytes, parts: Sequence[memoryview], chunk_bytes: int) -> Iterator[bytes]:
    """Yield the frames of one message, each made when it is asked for, so that one chunk at a time is copied."""
    total = sum(part.nbytes for part in parts)
    if total == 0:
        yield header + body
        return
    head, offset = header + body, 0
    for views in _cut(parts, chunk_bytes):
        size = sum(view.nbytes for view in views)
        crc = 0
        for view in views:
            crc = google_crc32c.extend(crc, np.frombuffer(view, np.uint8))  # it takes no writable memoryview
        chunk = pb.Frame(chunk=pb.Chunk(payload_bytes=total, offset=offset, crc32c=crc))
        yield b"".join((head, chunk.SerializeToString(), bytes((_DATA_TAG,)), _varint(size), *views))
        head, offset = header, offset + size


def _cut(parts: Sequence[memoryview], chunk_bytes: int) -> Iterator[list[memoryview]]:
    """Yield lists of views that together have `chunk_bytes` bytes, the last one what is left."""
    views: list[memoryview] = []
    room = chunk_bytes
    for part in parts:
        start = 0
        while start < part.nbytes:
            view = part[start : start + room]
            views.append(view)
            start, room = start + view.nbytes, room - view.nbytes
            if room == 0:
                yield views
                views, room = [], chunk_bytes
    if views:
        yield views


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


# ---- reading ----------------------------------------------------------------------------------------------------


def split(raw: bytes) -> tuple[bytes, memoryview]:
    """Return a serialised Frame without its `data`, and a view of the data.

    Raises:
        WireError: The bytes are no Frame, or hold more than one data field.
    """
    head: list[memoryview] = []
    data: memoryview | None = None
    view, position = memoryview(raw), 0
    while position < len(raw):
        start = position
        tag, position = _read_varint(raw, position)
        if tag & 7 != 2:  # every field of Frame is length-delimited
            raise WireError(f"malformed frame: wire type {tag & 7} at byte {start}")
        size, position = _read_varint(raw, position)
        if size > len(raw) - position:
            raise WireError(f"malformed frame: a field of {size} bytes at byte {start} of {len(raw)}")
        field, position = view[position : position + size], position + size
        if tag != _DATA_TAG:
            head.append(view[start:position])
        elif data is not None:
            raise WireError("malformed frame: two data fields")
        else:
            data = field
    return b"".join(head), memoryview(b"") if data is None else data


def _read_varint(raw: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 35, 7):
        if position >= len(raw):
            break
        byte = raw[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise WireError("malformed frame: bad length")


class Assembler:
    """Turns the frames of one lane into messages.

    Args:
        header: What the header of every frame must be.
        allowed: The message classes that this peer may send in this lane.
        payload_bytes_max: Largest payload that memory is taken for.
    """

    def __init__(self, header: pb.Header, allowed: tuple[type, ...], payload_bytes_max: int) -> None:
        self._header = header
        self._allowed = allowed
        self._payload_bytes_max = payload_bytes_max
        self._message: Message | None = None  # its payload is not complete yet
        self._buffer = np.empty(0, np.uint8)
        self._filled = 0

    def feed(self, raw: bytes) -> Received | Goodbye | Ready | None:
        """Take one frame; return what it completes, if anything.

        Raises:
            WireError: The frame is malformed, corrupt, of another session, too large, or out of place.
        """
        head, data = split(raw)
        if len(head) > HEAD_BYTES_MAX:
            raise WireError(f"a frame has {len(head)} bytes beside its data, the limit is {HEAD_BYTES_MAX}")
        try:
            frame = pb.Frame.FromString(head)
        except DecodeError as error:
            raise WireError(f"malformed frame: {error}") from None
        if frame.header != self._header:
            raise WireError(f"frame of another session: {_differences(frame.header, self._header)}")
        body_name = frame.WhichOneof("body")
        if body_name == "goodbye":
            return Goodbye(frame.goodbye.reason[:REASON_LENGTH_MAX])
        if body_name is None and not frame.HasField("chunk") and not data:
            return Ready()
        if (body_name is None) != (self._message is not None):
            raise WireError("a frame without a message" if body_name is None else "a message inside a payload")
        if body_name is not None:
            self._message = self._checked(unpack_body(frame, body_name))
            if frame.HasField("chunk"):
                self._begin(frame.chunk.payload_bytes)
        if not frame.HasField("chunk"):
            if body_name is None or data:
                raise WireError("data without a chunk")
            return self._complete(b"")
        return self._add(frame.chunk, data)

    def _checked(self, message: Message) -> Message:
        if not isinstance(message, self._allowed):
            raise WireError(f"a {type(message).__name__} is not expected here")
        if self._header.sender == messages.SYNCER:  # it passes on what other learners sent
            return message
        for field, own in (("learner_id", self._header.sender), ("incarnation", self._header.incarnation)):
            named = getattr(message, field, own)
            if named != own:
                raise WireError(f"{self._header.sender!r} sent a message with {field} {named!r}, its own is {own!r}")
        return message

    def _begin(self, payload_bytes: int) -> None:
        name = type(self._message).__name__
        if not isinstance(self._message, BULK_TYPES):
            raise WireError(f"a {name} with a payload")
        if payload_bytes > self._payload_bytes_max:
            raise WireError(
                f"{name} announces a payload of {payload_bytes} bytes, the limit here is {self._payload_bytes_max}: "
                "raise transport.payload_bytes_max on all sides, or use more fragments"
            )
        self._buffer = np.empty(payload_bytes, np.uint8)  # pages are taken when filled: an empty claim costs nothing
        self._filled = 0

    def _add(self, chunk: pb.Chunk, data: memoryview) -> Received | None:
        total, end = self._buffer.size, self._filled + data.nbytes
        if chunk.payload_bytes != total or chunk.offset != self._filled or end > total or not data:
            raise WireError(
                f"chunk of {data.nbytes} bytes at {chunk.offset} of {chunk.payload_bytes} is out of place: "
                f"expected offset {self._filled} of {total}"
            )
        values = np.frombuffer(data, np.uint8)
        if google_crc32c.value(values) != chunk.crc32c:
            raise WireError(f"corrupt chunk: crc32c differs at offset {chunk.offset} of {type(self._message).__name__}")
        if data.nbytes == total:
            return self._complete(data)
        self._buffer[self._filled : end] = values
        self._filled = end
        return self._complete(self._buffer.data.toreadonly()) if end == total else None

    def _complete(self, payload: bytes | memoryview) -> Received:
        assert self._message is not None
        received = Received(self._message, payload)
        self.forget()
        return received

    @property
    def buffered_bytes(self) -> int:
        """Memory that an incomplete payload may take."""
        return self._buffer.nbytes

    def forget(self) -> None:
        """Give back the memory of a payload that is not complete."""
        self._message, self._buffer, self._filled = None, np.empty(0, np.uint8), 0


def _differences(got: pb.Header, expected: pb.Header) -> str:
    names = [field.name for field in expected.DESCRIPTOR.fields]
    pairs = [(name, getattr(got, name), getattr(expected, name)) for name in names]
    return ", ".join(f"{name} is {new!r}, not {old!r}" for name, new, old in pairs if new != old)[:REASON_LENGTH_MAX]
