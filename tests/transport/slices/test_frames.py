"""Frames between slices: what they carry, and what a reader refuses."""

import json
import socket
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from diloco_jax.core.codec import digest
from diloco_jax.transport.connection import Connection
from diloco_jax.transport.slices.frames import PIECE_BYTES, FrameReader, Vocabulary, payload_view, send_frame
from diloco_jax.transport.wire import WireError
from tests.limits import HANGS_S

pytestmark = pytest.mark.net


class Inner(NamedTuple):
    name: str
    rate: float


class Outer(NamedTuple):
    number: int
    flag: bool
    loss: float
    pair: tuple[int, str]
    inners: tuple[Inner, ...]
    counts: dict[str, int]
    maybe: int | None


VOCABULARY = Vocabulary((Outer, Inner))
OUTER = Outer(1 << 63, True, float("inf"), (-3, "ä\n"), (Inner("a", 0.1), Inner("b", 1e-300)), {"x": 2}, None)


def test_a_message_returns_as_it_was() -> None:
    found = VOCABULARY.unpack(VOCABULARY.pack(OUTER))
    assert found == OUTER and isinstance(found.inners[0], Inner)
    assert json.loads(VOCABULARY.pack(Inner("a", 2))) == ["Inner", ["a", 2]]
    assert isinstance(VOCABULARY.unpack(b'["Inner",["a",2]]').rate, float)


def test_a_message_to_several_slices_is_packed_once() -> None:
    one, equal, other = Inner("a", 2.0), Inner("a", 2.0), Inner("b", 2.0)
    first = VOCABULARY.pack(one)
    assert VOCABULARY.pack(one) is first
    assert VOCABULARY.pack(other) != first == VOCABULARY.pack(equal)


WRONG: dict[str, Any] = {
    "number": (True, 1.0, "1", None, 1 << 64, -(1 << 63) - 1, [1]),
    "flag": (1, None),
    "loss": (True, "1"),
    "pair": ([1], [1, "a", "b"], ["a", "b"], "ab", {"0": 1}),
    "inners": ([["a"]], [["a", 1.0, 2]], [1], {"a": 1}),
    "counts": ({"x": "y"}, [1], {"\ud800": 1}),
    "maybe": ("x", 1.5),
}


@pytest.mark.parametrize("field", WRONG)
def test_a_field_of_another_type_is_refused(field: str) -> None:
    right = json.loads(VOCABULARY.pack(OUTER))[1]
    for wrong in WRONG[field]:
        fields = list(right)
        fields[Outer._fields.index(field)] = wrong
        with pytest.raises(WireError):
            VOCABULARY.unpack(json.dumps(["Outer", fields]).encode())


@pytest.mark.parametrize(
    "head", [b"{", b"\xff", b"[]", b'["Outer"]', b"[1,[]]", b'["Other",[]]', b'["Inner",["\\ud800",1]]', b"[" * 100_000]
)
def test_a_head_that_is_no_message_is_refused(head: bytes) -> None:
    with pytest.raises(WireError):
        VOCABULARY.unpack(head)


def test_a_sender_learns_what_it_cannot_send() -> None:
    for message, words in (
        (OUTER._replace(number=np.int64(3)), "not JSON serializable"),
        (Inner("x" * (1 << 20), 0.0), "the limit is 1048576"),
        ((1, 2), "cannot send a tuple"),
    ):
        with pytest.raises(ValueError, match=words):
            VOCABULARY.pack(message)

    class Odd(NamedTuple):
        data: bytes

    with pytest.raises(TypeError, match=r"Odd\.data"):
        Vocabulary((Odd,))
    with pytest.raises(ValueError, match="not contiguous"):
        payload_view(np.zeros((4, 4), np.float32)[:, 1])
    assert payload_view(np.zeros((0, 3), np.float32)).nbytes == 0
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert bytes(payload_view(array)) == array.tobytes() and np.shares_memory(array, payload_view(array))


@pytest.fixture
def ends() -> Iterator[tuple[Connection, socket.socket]]:
    """Return a reader's connection, and the socket of the side that sends."""
    ours, theirs = socket.socketpair()
    connection = Connection(ours, HANGS_S)
    yield connection, theirs
    connection.close()
    theirs.close()


def test_a_payload_arrives_in_its_own_memory(ends: tuple[Connection, socket.socket]) -> None:
    ours, theirs = ends
    # The buffer of this socket holds both frames.
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
    payloads = [bytes(100), bytes(range(256)) * 500]
    sender = Connection(theirs, HANGS_S)
    for payload in payloads:
        send_frame(sender, b"head", memoryview(payload))
    reader = FrameReader(ours)
    found = [reader.read(until_s=None) for _ in payloads]
    assert [(head, bytes(view)) for head, view in found] == [(b"head", payload) for payload in payloads]


def frame(head: bytes, payload: bytes) -> bytes:
    """Return a small frame, written here a second time."""
    sizes = struct.pack("<IQ", len(head), len(payload))
    checks = [struct.pack("<Q", digest(each)) for each in (sizes + head, payload)]
    assert len(payload) <= PIECE_BYTES
    return sizes + checks[0] + head + (payload + checks[1] if payload else b"")


@pytest.mark.parametrize(
    ("at", "words"),
    [(0, "checksum differs"), (20, "checksum differs"), (26, "corrupt payload"), (31, "corrupt payload")],
)
def test_a_flipped_bit_is_noticed(ends: tuple[Connection, socket.socket], at: int, words: str) -> None:
    raw = bytearray(frame(b"headed", b"load"))
    ends[1].sendall(bytes(raw))
    assert FrameReader(ends[0]).read() == (b"headed", memoryview(b"load"))
    raw[at] ^= 1
    ends[1].sendall(bytes(raw))
    with pytest.raises(WireError, match=words):
        FrameReader(ends[0]).read()


@pytest.mark.parametrize("sizes", [((1 << 20) + 1, 0), (0, (1 << 34) + 1)])
def test_a_frame_beyond_a_limit_is_refused_before_it_takes_memory(
    ends: tuple[Connection, socket.socket], sizes: tuple[int, int]
) -> None:
    ends[1].sendall(struct.pack("<IQQ", *sizes, 0))
    with pytest.raises(WireError, match=f"announces {sizes[0]} bytes and a payload of {sizes[1]}"):
        FrameReader(ends[0]).read()
