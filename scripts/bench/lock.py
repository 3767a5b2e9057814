"""Measure how long the bulk lane holds the interpreter's lock per gigabyte, which limits one syncer process.

The frames of a payload pass through the lane's own code (connection, frames, assembly) over a stream that moves no
byte: each call returns at once, as many bytes as a call of a real stream would move. So the processor time is that of
Python, which holds the lock. Copies of the system, TLS and checksums run beside the lock, and are not in it. With TLS a
call moves a record of 16 KiB.
"""

import argparse
import json
import statistics
import sys
import threading
import time
from typing import Any, NamedTuple

from diloco_jax.protocol.messages import FragmentValue, Message
from diloco_jax.transport import wire
from diloco_jax.transport.connection import Connection
from diloco_jax.transport.link import TransportConfig
from diloco_jax.transport.partials import Partials
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.session.assembly import Assembly

# Below this size a read is one of a frame's prefix or head.
DATA_BYTES_MIN = 4096
RECORD_BYTES = 1 << 14
PAYLOADS = 4


class Kind(NamedTuple):
    """A kind of connection, and the most bytes that one call moves."""

    name: str
    encrypted: bool
    call_bytes: int


KINDS = (Kind("plain", False, 1 << 18), Kind("tls", True, RECORD_BYTES))


class Still:
    """A stream that moves nothing: reads of prefixes and heads return `heads`, all others leave the buffer as it is."""

    def __init__(self, call_bytes: int, heads: bytes = b"") -> None:
        self._call_bytes, self._heads, self._at = call_bytes, memoryview(heads), 0

    def setblocking(self, flag: bool) -> None:
        del flag

    def setsockopt(self, *option: int) -> None:
        del option

    def recv_into(self, view: memoryview) -> int:
        size = view.nbytes
        if size >= DATA_BYTES_MIN:
            return min(size, self._call_bytes)
        view[:] = self._heads[self._at : self._at + size]
        self._at += size
        return size

    def send(self, view: memoryview) -> int:
        return min(view.nbytes, self._call_bytes)

    def sendmsg(self, views: list[memoryview]) -> int:
        return min(sum(view.nbytes for view in views), self._call_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=128 << 20, help="size of a payload")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print one JSON object per result and line")
    arguments = parser.parse_args()
    payload = memoryview(bytearray(arguments.bytes))
    found: dict[str, list[float]] = {}
    for _ in range(arguments.runs):
        for kind in KINDS:
            for name, move in (("received", receive), ("sent", send)):
                gigabytes = PAYLOADS * payload.nbytes / 1e9
                found.setdefault(f"lock_{kind.name}_{name}", []).append(1e3 * move(kind, payload) / gigabytes)
    for name, values in found.items():
        result = {"name": name, "value": statistics.median(values), "unit": "ms/GB"}
        result |= {"low": min(values), "high": max(values), "runs": len(values)}
        if arguments.json:
            sys.stdout.write(json.dumps(result) + "\n")
        else:
            sys.stdout.write("{name}: {value:.3g} {unit} ({low:.3g} to {high:.3g}, {runs} runs)\n".format(**result))


def connection(kind: Kind, heads: bytes = b"") -> Connection:
    made = Connection(Still(kind.call_bytes, heads), 10.0)  # type: ignore[arg-type]
    made.encrypted = kind.encrypted
    if kind.encrypted:
        made._turn = threading.Lock()
    return made


def frames(payload: memoryview) -> list[tuple[bytes, list[memoryview]]]:
    """Return head and data of each frame of all payloads."""
    found = []
    for number in range(1, PAYLOADS + 1):
        body = wire.pack_body(FragmentValue("a", 1, number, 0, number, 1, 1, 0, 1, payload.nbytes))
        for piece in wire.pieces(number, body, [payload], TransportConfig().chunk_bytes, 1, None):
            found.append((wire.piece_head(piece), list(piece.views)))
    return found


def send(kind: Kind, payload: memoryview) -> float:
    """Return the processor seconds to frame and send the payloads."""
    stream, began_s = connection(kind), time.thread_time()
    for head, views in frames(payload):
        stream.send(wire.bulk_frame(head, views, checked=False))
    return time.thread_time() - began_s


def receive(kind: Kind, payload: memoryview) -> float:
    """Return the processor seconds to receive and assemble the payloads."""
    heads = bytearray()
    for head, views in frames(payload):
        for part in wire.bulk_frame(head, views, checked=False)[: -len(views)]:
            heads += part
    stream, count = connection(kind, bytes(heads)), len(frames(payload))
    reader = wire.Reader(pb.Header(lane=pb.LANE_BULK, sender="a", incarnation=1), (FragmentValue,))
    assembly = Assembly(2 * payload.nbytes, Partials(0, 1.0))
    whole: list[int] = []

    def deliver(message: Message, arrived: memoryview) -> None:
        del message
        whole.append(arrived.nbytes)

    prefix_view = memoryview(bytearray(wire.PREFIX_BYTES))
    began_s = time.thread_time()
    for _ in range(count):
        stream.fill(prefix_view)
        prefix = wire.read_prefix(prefix_view)
        head = memoryview(bytearray(prefix.head_bytes))
        stream.fill(head)
        event: Any = reader.read_head(bytes(head), prefix.data_bytes)
        place = assembly.claim(event.message, event.chunk, prefix.data_bytes)
        assert place is not None
        stream.fill(place.view)
        assembly.filled(place)
        del place
        assembly.deliver(deliver)
    took_s = time.thread_time() - began_s
    assert whole == [payload.nbytes] * PAYLOADS, whole
    return took_s


if __name__ == "__main__":
    main()
