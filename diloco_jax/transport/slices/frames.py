"""Frames between slices: a named tuple as JSON, and a payload of raw bytes.

A frame is a prefix with the sizes of its head and its payload and a checksum, then the head, then the payload in pieces
of PIECE_BYTES. In plaintext a checksum follows each piece; TLS checks all bytes itself. A frame without a head is a
beat. A reader checks sizes before it allocates memory, and every field before anyone uses it.
"""

import json
import struct
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from diloco_jax.core.codec import digest
from diloco_jax.transport.connection import Connection
from diloco_jax.transport.wire import HEAD_BYTES_MAX, WireError

PAYLOAD_BYTES_MAX = 1 << 34
# A piece stays in the processor's cache between its checksum and its way through the socket.
PIECE_BYTES = 1 << 20
INTEGER_MIN, INTEGER_MAX = -(1 << 63), (1 << 64) - 1
# Sizes of head and payload, and the xxh3 of both and the head; 0 under TLS.
_PREFIX = struct.Struct("<IQQ")
_SIZES = struct.Struct("<IQ")
_CHECK = struct.Struct("<Q")
NOTHING = memoryview(b"")

# A rule takes a JSON value and returns the field's value; WireError if it does not fit.
Rule: TypeAlias = Callable[[Any], Any]


class Vocabulary:
    """The messages that one side may send and receive, by name.

    Args:
        messages: NamedTuple classes. Their fields are bool, int, float, str, another NamedTuple, or a tuple, a dict
            with texts as keys, or an optional value of these.

    Raises:
        TypeError: A field has another type.
    """

    def __init__(self, messages: Sequence[type]) -> None:
        self._rules = {cls.__name__: _record_rule(cls) for cls in messages}
        self.classes = frozenset(messages)
        # The last message and its head, because a slice sends most messages to all others.
        self._last: tuple[Any, bytes] = object(), b""

    def pack(self, message: Any) -> bytes:
        """Return the head of a message, which nobody changes afterwards; any thread may call this.

        Raises:
            ValueError: The message has another class, a field does not fit its type, or the head is too large.
        """
        last, head = self._last
        if message is last:
            return head
        name = type(message).__name__
        if type(message) not in self.classes:
            raise ValueError(f"cannot send a {name}: this connection has {', '.join(self._rules)}")
        try:
            head = json.dumps([name, message], separators=(",", ":")).encode()
            self.unpack(head)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name} cannot be sent: {error}") from None
        if len(head) > HEAD_BYTES_MAX:
            raise ValueError(
                f"the fields of {name} take {len(head)} bytes, the limit is {HEAD_BYTES_MAX}: send them as its payload"
            )
        self._last = message, head
        return head

    def unpack(self, head: bytes) -> Any:
        """Return the message of a head; WireError if it is none of this vocabulary, or a field does not fit."""
        try:
            found = json.loads(head)
        # A head of 1 MiB may have brackets within brackets beyond Python's limit.
        except (ValueError, RecursionError) as error:
            raise WireError(f"a head that is not JSON: {error}") from None
        if not isinstance(found, list) or len(found) != 2 or not isinstance(found[0], str):
            raise WireError("a head without the name of a message")
        name, fields = found
        rule = self._rules.get(name)
        if rule is None:
            raise WireError(f"a {name[:100]!r} is not expected here")
        return rule(fields)


def _record_rule(cls: type) -> Rule:
    hints = typing.get_type_hints(cls)
    rules = {name: _rule(hint, f"{cls.__name__}.{name}") for name, hint in hints.items()}

    def read(value: Any) -> Any:
        if not isinstance(value, list) or len(value) != len(rules):
            raise WireError(f"{cls.__name__} does not have {len(rules)} fields")
        return cls(*(rule(cell) for rule, cell in zip(rules.values(), value, strict=True)))

    return read


def _rule(hint: Any, name: str) -> Rule:
    """Return the rule of a field, or of an element of it."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in _PLAIN:
        return lambda value: _plain(hint, name, value)
    if isinstance(hint, type) and hasattr(hint, "_fields"):
        return _record_rule(hint)
    if origin in (types.UnionType, typing.Union) and len(inner) == 2 and type(None) in inner:
        some = _rule(next(each for each in inner if each is not type(None)), name)
        return lambda value: None if value is None else some(value)
    if origin is tuple and len(inner) == 2 and inner[1] is Ellipsis:
        element = _rule(inner[0], name)
        return lambda value: tuple(element(each) for each in _of(list, name, value))
    if origin is tuple:
        elements = [_rule(each, name) for each in inner]
        return lambda value: _fixed(elements, name, value)
    if origin is dict and inner[0] is str:
        cell = _rule(inner[1], name)
        key = _rule(str, name)
        return lambda value: {key(k): cell(v) for k, v in _of(dict, name, value).items()}
    raise TypeError(f"{name} has the type {hint}, which no frame carries: use plain values, tuples or dicts of them")


def _plain(kind: Any, name: str, value: Any) -> Any:
    # JSON does not tell 1.0 from 1 in every language, but a bool is not a number.
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise WireError(f"{name} is {str(value)[:100]!r}, not {kind.__name__}")
    if type(value) is int and not INTEGER_MIN <= value <= INTEGER_MAX:
        raise WireError(f"{name} is {value}, beyond 64 bits")
    if type(value) is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise WireError(f"{name} is not text") from None
    return kind(value)


_PLAIN = (bool, int, float, str)


def _of(kind: type, name: str, value: Any) -> Any:
    if not isinstance(value, kind):
        raise WireError(f"{name} is {str(value)[:100]!r}, not a {kind.__name__}")
    return value


def _fixed(elements: Sequence[Rule], name: str, value: Any) -> tuple[Any, ...]:
    cells = _of(list, name, value)
    if len(cells) != len(elements):
        raise WireError(f"{name} has {len(cells)} elements, not {len(elements)}")
    return tuple(element(cell) for element, cell in zip(elements, cells, strict=True))


def payload_view(payload: bytes | bytearray | memoryview | np.ndarray) -> memoryview:
    """Return the bytes of a payload without a copy; ValueError if they are not contiguous, or too many."""
    if isinstance(payload, np.ndarray):
        if not payload.flags.c_contiguous:
            raise ValueError("the payload is an array that is not contiguous: send np.ascontiguousarray of it")
        # Not every element type of an array has a buffer, but its bytes have.
        payload = payload.reshape(-1).view(np.uint8).data
    view = memoryview(payload)
    if view.nbytes > PAYLOAD_BYTES_MAX:
        raise ValueError(f"the payload has {view.nbytes} bytes, the limit is {PAYLOAD_BYTES_MAX}: send it in parts")
    return view.cast("B") if view.nbytes else NOTHING


def send_frame(connection: Connection, head: bytes, payload: memoryview = NOTHING) -> None:
    """Send one frame; OSError if the connection is lost. It waits while the other side does not read."""
    sizes = len(head), payload.nbytes
    checked = not connection.encrypted
    check = digest((_SIZES.pack(*sizes), head)) if checked else 0
    views = [memoryview(_PREFIX.pack(*sizes, check) + head)]
    for at in range(0, payload.nbytes, PIECE_BYTES):
        piece = payload[at : at + PIECE_BYTES]
        views.append(piece)
        if checked:
            views.append(memoryview(_CHECK.pack(digest(piece))))
        connection.send(views)
        views = []
    if views:
        connection.send(views)


class FrameReader:
    """Reader of the frames of one connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._prefix = memoryview(bytearray(_PREFIX.size))
        self._check = memoryview(bytearray(_CHECK.size))

    def read(
        self,
        head_bytes_max: int = HEAD_BYTES_MAX,
        payload_bytes_max: int = PAYLOAD_BYTES_MAX,
        until_s: float | None = None,
    ) -> tuple[bytes, memoryview]:
        """Return head and payload of the next frame, in memory that nobody else uses.

        Args:
            until_s: Time on the monotonic clock when the frame must be complete; by default only silence ends the wait.

        Raises:
            WireError: The frame is too large, or a checksum differs.
            EOFError: The other side ended the connection.
            OSError: The connection is lost.
        """
        fill, checked = self._connection.fill, not self._connection.encrypted
        fill(self._prefix, until_s)
        head_bytes, payload_bytes, check = _PREFIX.unpack(self._prefix)
        if head_bytes > head_bytes_max or payload_bytes > payload_bytes_max:
            raise WireError(
                f"a frame announces {head_bytes} bytes and a payload of {payload_bytes}, the limits are "
                f"{head_bytes_max} and {payload_bytes_max}"
            )
        head = bytearray(head_bytes)
        fill(memoryview(head), until_s)
        if checked and digest((_SIZES.pack(head_bytes, payload_bytes), head)) != check:
            raise WireError("corrupt frame: its checksum differs")
        if not payload_bytes:
            return bytes(head), NOTHING
        try:
            # Unlike a bytearray, its pages are not written twice.
            payload = np.empty(payload_bytes, np.uint8).data
        except MemoryError:
            raise WireError(f"there is no memory for a payload of {payload_bytes} bytes") from None
        for at in range(0, payload_bytes, PIECE_BYTES):
            piece = payload[at : at + PIECE_BYTES]
            fill(piece, until_s)
            if checked:
                fill(self._check, until_s)
                if digest(piece) != _CHECK.unpack(self._check)[0]:
                    raise WireError(f"corrupt payload: its checksum differs at byte {at}")
        return bytes(head), payload
