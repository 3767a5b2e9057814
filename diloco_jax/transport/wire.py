"""Messages to bytes and back: the classes of protocol/messages.py and transport/commands.py <-> proto/diloco.proto.

Rules of this file
  * A frame of the control lane is a protobuf `Frame`. Its last field is a checksum of all bytes before it, so that a
    flipped bit is noticed on connections without encryption too. A peer of another release may use another checksum,
    or none; its frames are accepted unchecked (docs/decisions/0091-bulk-beside-grpc.md).
  * A frame of a bulk connection is a prefix, a protobuf `Frame` as its head, and data. The data never pass through a
    protobuf object: they are read into the memory of their payload.
  * On plaintext, head and data of such a frame have a checksum each. The data of a digested message have none, because
    its receiver checks a digest of the content anyway (protocol/messages.py). A receiver of an older release compares
    all checksums, so chunks are digested only if the peer states that it takes them (Holdings).
  * Control characters are removed from texts, and reasons are cut, before anyone reads them (protocol/texts.py).
  * A reader checks everything before it uses it and before it allocates memory for it. A violation raises WireError,
    and the stream is not read any further.
"""

import struct
import typing
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtoMessage

from diloco_jax.core.codec import digest
from diloco_jax.protocol.messages import SYNCER, Digested, Message
from diloco_jax.protocol.texts import REASON_LENGTH_MAX as REASON_KEPT_MAX
from diloco_jax.protocol.texts import clean
from diloco_jax.transport.commands import Command, Reply
from diloco_jax.transport.limits import REASON_LENGTH_MAX, check_body
from diloco_jax.transport.link import BULK_TYPES, CHUNK_BYTES_MAX, Buffer
from diloco_jax.transport.partials import Ranges
from diloco_jax.transport.proto import diloco_pb2 as pb

# The limit of a frame without its data; a step report needs about 10 bytes per fragment.
HEAD_BYTES_MAX = 1 << 20
_CHECK_TAG = pb.Frame.CHECK_FIELD_NUMBER << 3 | 2  # 2: length-delimited
# Tag and length of a checksum: an xxh3 of 8 bytes.
_CHECK_HEAD = bytes((_CHECK_TAG & 0x7F | 0x80, _CHECK_TAG >> 7, 8))
_CHECK_BYTES = len(_CHECK_HEAD) + 8
# What precedes each frame of a bulk connection: the sizes of its head and of its data in bytes, the xxh3 of both sizes
# and the head, and that of the data. Both are 0 under TLS, which checks all bytes; that of digested data is always 0.
_PREFIX = struct.Struct("<IIQQ")
_SIZES = struct.Struct("<II")
PREFIX_BYTES = _PREFIX.size
_BODY_NAMES = {  # name -> field
    field.message_type.name: field.name
    for field in pb.Frame.DESCRIPTOR.oneofs_by_name["body"].fields
    if field.message_type is not None
}


class WireError(ValueError):
    """Violation of the contract by the peer; the text says which."""


class Goodbye(NamedTuple):
    """End of this lane, sent by the peer."""

    reason: str


class Ready(NamedTuple):
    """Notice that the syncer has all connections of the session."""

    holdings: pb.Holdings


class Incoming(NamedTuple):
    """A message of the control lane, or a chunk of the bulk lane, whose data follow on the connection."""

    # In the bulk lane, one of a message's chunks has it.
    message: Message | None
    chunk: pb.Chunk


class BulkPiece(NamedTuple):
    """The content of one frame of the bulk lane."""

    body: bytes  # first piece only
    chunk: pb.Chunk
    views: list[memoryview]


def _plan(cls: type) -> tuple[tuple[str, type | None, tuple[str, ...]], ...]:
    """Return (field name, record class or None, protobuf field names) of a message class.

    A tuple of named tuples becomes one column per field, a tuple of pairs the columns `_key` and `_value`.
    """
    plan: list[tuple[str, type | None, tuple[str, ...]]] = []
    for name, hint in typing.get_type_hints(cls).items():
        element = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else None
        # A message may contain another message.
        if element is None or element in (int, float, str):
            plan.append((name, None, (name,)))
        elif hasattr(element, "_fields"):
            plan.append((name, element, tuple(f"{name}_{field}" for field in element._fields)))
        else:
            assert typing.get_args(element) == (str, str), f"no rule for {cls.__name__}.{name}: {hint}"
            plan.append((name, tuple, (f"{name}_key", f"{name}_value")))
    return tuple(plan)


_FIELDS = {cls: _plan(cls) for union in (Message, Command, Reply) for cls in typing.get_args(union)}
_CLASSES = {cls.__name__: cls for cls in _FIELDS}
# Names of leaves and of kept states stay within one island: a key of a user's tree is compared without changes.
_OWN_NAMES = ("leaf", "state")


def _texts(cls: type) -> tuple[tuple[str, int | None], ...]:
    """Return (name, maximal length or None) of each text field of a class."""
    found: list[tuple[str, int | None]] = []
    for name, record, _ in _FIELDS[cls]:
        hint = typing.get_type_hints(cls)[name]
        texts = record is tuple or hint is str or (record is not None and str in typing.get_type_hints(record).values())
        if texts and name not in _OWN_NAMES:
            found.append((name, REASON_KEPT_MAX if name == "reason" else None))
    return tuple(found)


_TEXTS = {cls: _texts(cls) for cls in _FIELDS}


# The message that was packed last, with its bytes.
_packed: tuple[Any, bytes] = (None, b"")


def pack_body(message: Message | Command | Reply) -> bytes:
    """Return the message as the `body` of a serialised Frame.

    Raises:
        ValueError: A field does not fit its type on the wire, or the whole is larger than a frame may be.
    """
    global _packed
    before, packed = _packed
    # A broadcast is the same object for every peer.
    if before is message:
        return packed
    body_name = _BODY_NAMES[type(message).__name__]
    frame = pb.Frame()
    body = getattr(frame, body_name)
    body.SetInParent()
    _fill(body, message)
    check_body(body)
    packed = frame.SerializeToString()
    # The other half is left for the header.
    if len(packed) > HEAD_BYTES_MAX // 2:
        raise ValueError(f"{type(message).__name__} takes {len(packed)} bytes, the limit is {HEAD_BYTES_MAX // 2}")
    _packed = message, packed
    return packed


def _fill(body: Any, message: Any) -> None:
    for name, record, columns in _FIELDS[type(message)]:
        value = getattr(message, name)
        try:
            if record is not None:
                for column, cells in zip(columns, zip(*value, strict=True), strict=False):
                    getattr(body, column).extend(cells)
            elif type(value) in _FIELDS:
                _fill(getattr(body, name), value)
            elif isinstance(value, tuple):
                getattr(body, name).extend(value)
            else:
                setattr(body, name, value[:REASON_LENGTH_MAX] if name == "reason" else value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{type(message).__name__}.{name} = {value!r} cannot be sent: {error}") from None


def unpack_body(frame: pb.Frame, body_name: str) -> Message:
    """Return the message in the field `body_name`; WireError if it exceeds a limit, or its columns differ in length."""
    body = getattr(frame, body_name)
    try:
        check_body(body)
    except ValueError as error:
        raise WireError(f"unusable message: {error}") from None
    return typing.cast(Message, _read(body))


def _read(body: Any) -> Any:
    cls = _CLASSES[body.DESCRIPTOR.name]
    values: dict[str, Any] = {}
    for name, record, columns in _FIELDS[cls]:
        cell = getattr(body, columns[0])
        if record is not None:
            cells = [getattr(body, column) for column in columns]
            if len({len(column) for column in cells}) > 1:
                raise WireError(f"the columns of {cls.__name__}.{name} differ in length")
            rows = zip(*cells, strict=True)
            values[name] = tuple(rows) if record is tuple else tuple(record(*row) for row in rows)
        elif isinstance(cell, ProtoMessage):
            values[name] = _read(cell)
        else:
            values[name] = cell if isinstance(cell, (int, float, str)) else tuple(cell)
    for name, length_max in _TEXTS[cls]:
        values[name] = _cleaned(values[name], length_max)
    return cls(**values)


def _cleaned(value: Any, length_max: int | None) -> Any:
    """Clean a text, the texts of a tuple, or those of the records in a tuple."""
    if isinstance(value, str):
        return clean(value, length_max)
    if isinstance(value, tuple):
        cells = [_cleaned(each, length_max) for each in value]
        return type(value)(*cells) if hasattr(value, "_fields") else tuple(cells)
    return value


def pack_header(header: pb.Header) -> bytes:
    """Return the first bytes of every frame of a stream."""
    return pb.Frame(header=header).SerializeToString()


def _sealed(head: bytes) -> bytes:
    """Append the checksum to a frame without its data."""
    return head + _CHECK_HEAD + digest(head).to_bytes(8, "little")


def control_frame(header: bytes, body: bytes) -> bytes:
    """Return the frame of a message of the control lane."""
    return _sealed(header + body)


def ready_frame(header: bytes, holdings: pb.Holdings) -> bytes:
    """Return the first frame of the syncer in a stream."""
    return _sealed(header + pb.Frame(holdings=holdings).SerializeToString())


def goodbye_frame(header: bytes, reason: str) -> bytes:
    """Return the last frame of a stream."""
    return _sealed(header + goodbye_head(reason))


def pieces(
    number: int,
    body: bytes,
    parts: Sequence[memoryview],
    chunk_bytes: int,
    key: int = 0,
    held: Ranges | None = None,
    *,
    digested: bool = False,
) -> Iterator[BulkPiece]:
    """Yield the content of the frames of one message of the bulk lane.

    Args:
        key: The payload's `key_of`, so that a later session can continue it; 0 if none can.
        held: Ranges that the peer has already; they are not sent.
        digested: Whether the peer checks a digest of the content, and takes chunks without a checksum of their data.
    """
    size = sum(part.nbytes for part in parts)
    holes = [(0, size)] if held is None else held.holes(size)
    resumed, whole, sent = held is not None, 0 if held is None else digest(parts), False

    def chunk_at(offset: int) -> pb.Chunk:
        fields = {"payload_bytes": size, "offset": offset, "message": number, "key": key}
        return pb.Chunk(resumed=resumed, digest=whole, digested=digested, **fields)

    for start, stop in holes:
        for views in _cut(parts, start, stop, chunk_bytes):
            yield BulkPiece(b"" if sent else body, chunk_at(start), views)
            start += sum(view.nbytes for view in views)
            sent = True
    # The message has no payload, or the peer has all of it.
    if not sent:
        yield BulkPiece(body, chunk_at(0), [])


class Prefix(NamedTuple):
    """Sizes and checksums before a frame of a bulk connection; the frame of a beat is empty."""

    head_bytes: int
    data_bytes: int
    head_check: int
    data_check: int


def bulk_frame(head: bytes, views: Sequence[memoryview], *, checked: bool, digested: bool = False) -> list[memoryview]:
    """Return a frame of a bulk connection as views to send one after another; the data are not copied."""
    sizes = len(head), sum(view.nbytes for view in views)
    head_check = digest((_SIZES.pack(*sizes), head)) if checked else 0
    data_check = digest(views) if checked and not digested else 0
    return [memoryview(_PREFIX.pack(*sizes, head_check, data_check) + head), *views]


def piece_head(piece: BulkPiece) -> bytes:
    """Return the head of the frame of a piece on a bulk connection, which names its session once at its start."""
    return piece.body + pb.Frame(chunk=piece.chunk).SerializeToString()


def ready_head() -> bytes:
    """Return the head of the syncer's first frame on a bulk connection."""
    return pb.Frame(holdings=pb.Holdings()).SerializeToString()


def goodbye_head(reason: str) -> bytes:
    """Return the head of the last frame of a stream."""
    return pb.Frame(goodbye=pb.Goodbye(reason=reason[:REASON_LENGTH_MAX])).SerializeToString()


def read_prefix(raw: Buffer) -> Prefix:
    """Return what precedes a frame of a bulk connection; WireError if the frame would be too large."""
    prefix = Prefix(*_PREFIX.unpack(raw))
    if prefix.head_bytes > HEAD_BYTES_MAX or prefix.data_bytes > CHUNK_BYTES_MAX:
        raise WireError(
            f"a frame announces {prefix.head_bytes} bytes beside {prefix.data_bytes} bytes of data, the limits are "
            f"{HEAD_BYTES_MAX} and {CHUNK_BYTES_MAX}"
        )
    return prefix


def check_head(prefix: Prefix, head: Buffer) -> None:
    """Compare sizes and head of a frame with their checksum; WireError if it differs."""
    if digest((_SIZES.pack(prefix.head_bytes, prefix.data_bytes), head)) != prefix.head_check:
        raise WireError("corrupt frame: its checksum differs")


def check_data(prefix: Prefix, chunk: pb.Chunk, data: Buffer) -> None:
    """Compare the data of a frame with their checksum; WireError if it differs. Digested data have none."""
    if not chunk.digested and digest(data) != prefix.data_check:
        raise WireError(f"corrupt chunk: its checksum differs at offset {chunk.offset} of message {chunk.message}")


def _cut(parts: Sequence[memoryview], start: int, stop: int, chunk_bytes: int) -> Iterator[list[memoryview]]:
    """Yield lists of views with `chunk_bytes` bytes each; the last list has the rest."""
    views: list[memoryview] = []
    room, base = chunk_bytes, 0
    for part in parts:
        at, end = max(start - base, 0), min(stop - base, part.nbytes)
        base += part.nbytes
        while at < end:
            view = part[at : min(at + room, end)]
            views.append(view)
            at, room = at + view.nbytes, room - view.nbytes
            if room == 0:
                yield views
                views, room = [], chunk_bytes
    if views:
        yield views


class Reader:
    """Reader of the frames of one connection.

    Args:
        header: The header that every frame must have.
        allowed: The message classes that this peer may send here.
    """

    def __init__(self, header: pb.Header, allowed: tuple[type, ...]) -> None:
        self._header = header
        self._allowed = allowed
        self._bulk = header.lane == pb.LANE_BULK
        # Set by the peer's first checksum: all later frames need one.
        self._checks = False

    def read(self, raw: bytes) -> Incoming | Goodbye | Ready:
        """Return the content of a frame of the control lane.

        Raises:
            WireError: The frame is malformed, of another session, or not allowed on this connection.
        """
        if len(raw) > HEAD_BYTES_MAX:
            raise WireError(f"a frame has {len(raw)} bytes, the limit is {HEAD_BYTES_MAX}")
        frame = _parsed(raw)
        if frame.header != self._header:
            raise WireError(f"frame of another session: {_differences(frame.header, self._header)}")
        self._check(raw, frame.check)
        return self._content(frame, False)

    def read_head(self, head: bytes, data_bytes: int) -> Incoming | Goodbye | Ready:
        """Return the content of a frame of a bulk connection, without its data; WireError as `read`."""
        frame = _parsed(head)
        if frame.HasField("header") or frame.check:
            raise WireError("a frame of a bulk connection with fields of the control lane")
        return self._content(frame, bool(data_bytes))

    def _content(self, frame: pb.Frame, has_data: bool) -> Incoming | Goodbye | Ready:
        body_name = frame.WhichOneof("body")
        if body_name == "goodbye":
            return Goodbye(clean(frame.goodbye.reason, REASON_KEPT_MAX))
        has_chunk = frame.HasField("chunk")
        if body_name is None and not has_chunk and not has_data:
            return Ready(frame.holdings)
        message = None if body_name is None else self._checked(unpack_body(frame, body_name))
        self._check_place(message, frame.chunk if has_chunk else None, has_data)
        return Incoming(message, frame.chunk)

    def _check(self, raw: bytes, check: bytes) -> None:
        """Compare a frame with its checksum; once a peer has sent a checksum, every frame needs one."""
        # The checksum of another release may follow bytes that look like the start of ours.
        checked = len(check) == 8 and raw.endswith(_CHECK_HEAD + check)
        if not checked and self._checks:
            raise WireError("a frame without a checksum behind one that has it")
        self._checks = checked
        if checked and digest(raw[:-_CHECK_BYTES]) != int.from_bytes(check, "little"):
            raise WireError("corrupt frame: its checksum differs")

    def _checked(self, message: Message) -> Message:
        if not isinstance(message, self._allowed):
            raise WireError(f"a {type(message).__name__} is not expected here")
        # The syncer passes on messages of other learners.
        if self._header.sender == SYNCER:
            return message
        for field, own in (("learner_id", self._header.sender), ("incarnation", self._header.incarnation)):
            named = getattr(message, field, own)
            if named != own:
                raise WireError(f"{self._header.sender!r} sent a message with {field} {named!r}, its own is {own!r}")
        return message

    def _check_place(self, message: Message | None, chunk: pb.Chunk | None, has_data: bool) -> None:
        if chunk is None and has_data:
            raise WireError("data without a chunk")
        if not self._bulk and chunk is not None:
            raise WireError("a payload on the control connection")
        # The memory for a chunk is taken before its message arrives.
        if self._bulk and not self._allowed:
            raise WireError("a payload from a side that sends none")
        if self._bulk and chunk is None:
            raise WireError(f"a {type(message).__name__} without a chunk on a bulk connection")
        if chunk is not None and chunk.message < 1:
            raise WireError("a chunk without the number of its message")
        if message is not None and chunk is not None and not isinstance(message, BULK_TYPES):
            raise WireError(f"a {type(message).__name__} with a payload")
        if message is not None and chunk is not None and chunk.digested and not isinstance(message, Digested):
            raise WireError(f"a {type(message).__name__} without the checksums that it needs")


def _parsed(head: bytes) -> pb.Frame:
    try:
        return pb.Frame.FromString(head)
    except DecodeError as error:
        raise WireError(f"malformed frame: {error}") from None


def _differences(got: pb.Header, expected: pb.Header) -> str:
    names = [field.name for field in expected.DESCRIPTOR.fields]
    pairs = [(name, getattr(got, name), getattr(expected, name)) for name in names]
    return ", ".join(f"{name} is {new!r}, not {old!r}" for name, new, old in pairs if new != old)[:REASON_LENGTH_MAX]
