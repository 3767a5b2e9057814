"""Everything that parses bytes from the network, as functions of one byte string that raise only when there is a bug.

A target takes any bytes. What it says of them (a WireError, a refusal, ...) does not matter; it fails with an
AssertionError when something was accepted that should not have been, or memory was taken that should not have been, and
with whatever else the code under test raises. `test_fuzz.py` runs each target for a short time, `python -m tests.fuzz`
for as long as you like.
"""

import contextlib
import json
import random
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from diloco_jax.core import codec
from diloco_jax.core.fragments import plan_fragments
from diloco_jax.core.host_bytes import join_host_bytes
from diloco_jax.core.layout import value_digest, whole
from diloco_jax.protocol.messages import AnchorValue, FragmentValue, GlobalFragment, Message
from diloco_jax.protocol.syncer.tape import replay
from diloco_jax.runtime.model.cuts import COLUMNS, Cuts
from diloco_jax.training.whole_state.layout import StateLayout
from diloco_jax.transport import commands as c
from diloco_jax.transport import wire
from diloco_jax.transport.link import (
    BULK_TYPES,
    HOSTS_MAX,
    STRIPES_MAX,
    SYNCER_HOST,
    Delivery,
    TransportConfig,
    check_name,
)
from diloco_jax.transport.partials import Partials
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.session import calls
from diloco_jax.transport.session.front import LOOK_BYTES_MAX, is_bulk
from diloco_jax.transport.session.inbox import Inbox
from diloco_jax.transport.session.sessions import Refused
from diloco_jax.transport.session.stream import StreamSession
from diloco_jax.transport.session.stripe import GREETING, Stripe
from diloco_jax.transport.trust.certificates import learner_names
from diloco_jax.transport.trust.security import TOKEN_KEY, Denied, Gate
from tests.fuzz import machines
from tests.fuzz.inputs import PAYLOAD_BYTES_MAX, framed, parts_of, unframed
from tests.fuzz.machines import EXAMPLES

HEADER = pb.Header(run_id="run", epoch=1, sender="a", incarnation=1, session=7, lane=pb.LANE_CONTROL, stripes=1)
HOLDINGS = pb.Holdings(
    partials=[
        pb.PartialPayload(key=3, payload_bytes=100, start=[0, 50], stop=[20, 60], valid_s=60.0),
        pb.PartialPayload(key=1 << 60, payload_bytes=1 << 30, start=[1], stop=[1 << 30], valid_s=60.0),
    ],
)
HOST_HEADER = pb.Header(run_id="run", sender="a", session=7, lane=pb.LANE_BULK, stripes=1, host=2, hosts=4)
PACKED_HEADER = wire.pack_header(HEADER)
TOKEN = b"correct horse battery staple"


class Target(NamedTuple):
    """One parser.

    Args:
        seeds: the first inputs; all others are mutations of them.
        run: tries one input.
    """

    seeds: tuple[bytes, ...]
    run: Callable[[bytes], None]


PAYLOAD = bytes(range(90))


class Arriving:
    """Connection that brings these bytes, and then ends."""

    def __init__(self, data: bytes, *, encrypted: bool) -> None:
        self.encrypted, self.arrived = encrypted, 0
        self._data = memoryview(data)

    def fill(self, view: memoryview) -> None:
        self.arrived = min(view.nbytes, self._data.nbytes)
        view[: self.arrived] = self._data[: self.arrived]
        self._data = self._data[self.arrived :]
        if self.arrived < view.nbytes:
            raise EOFError

    def stop_reading(self) -> None: ...


def read_stripe(data: bytes, *, encrypted: bool) -> list[Delivery]:
    """Read a bulk connection to its end, and return what it delivered; WireError if it is not to be used."""
    config = TransportConfig(payload_bytes_max=PAYLOAD_BYTES_MAX)
    partials, inbox = Partials(PAYLOAD_BYTES_MAX, 60.0), Inbox()
    session = StreamSession(inbox, HEADER, "syncer", "a", config, partials, READABLE)
    lane = session.lanes[pb.LANE_BULK, 0]
    # A reader that waits for room would wait forever.
    right = session.assembly.has_room

    def has_room(chunk: pb.Chunk, size: int) -> bool:
        if not right(chunk, size):
            raise wire.WireError("no room")
        return True

    session.assembly.has_room = has_room  # type: ignore[method-assign]
    try:
        Stripe(session, lane, Arriving(data, encrypted=encrypted))._read()  # type: ignore[arg-type]
    except EOFError:
        pass
    finally:
        assert session.assembly.claimed_bytes <= 2 * PAYLOAD_BYTES_MAX
        session.retire("over")
        assert session.assembly.claimed_bytes == 0 and partials.held_bytes <= PAYLOAD_BYTES_MAX
    return [item[1] for item in iter(lambda: inbox.get(0), None)]


def run_stripe(data: bytes) -> None:
    """One encrypted bulk connection, whose frames have no checksums."""
    with contextlib.suppress(wire.WireError):
        for delivery in read_stripe(data, encrypted=True):
            assert len(delivery.payload) <= PAYLOAD_BYTES_MAX
            if delivery.message is not None:
                check_own(delivery.message)


def check_own(message: Message) -> None:
    """Check that a message is in its sender's name, and can be sent again."""
    assert getattr(message, "learner_id", "a") == "a", "a message in somebody else's name"
    wire.pack_body(message)


def control_reader() -> wire.Reader:
    return wire.Reader(HEADER, tuple(kind for kind in READABLE if kind not in BULK_TYPES))


def run_control(data: bytes) -> None:
    """Frames of the control lane, some of them without checksums: what is accepted keeps its promises."""
    reader = control_reader()
    with contextlib.suppress(wire.WireError):
        for frame in unframed(data):
            event = reader.read(frame)
            if isinstance(event, wire.Incoming):
                assert event.message is not None and not event.chunk.ByteSize()
                check_own(event.message)
            elif isinstance(event, wire.Goodbye):
                assert len(event.reason) <= wire.REASON_LENGTH_MAX


def run_forged_control(data: bytes) -> None:
    """Change bytes of a frame of the control lane anywhere: it must not be accepted."""
    number, reader = random.Random(data), control_reader()
    right = wire.control_frame(PACKED_HEADER, number.choice(CONTROL_BODIES))
    reader.read(right)
    forged = bytearray(right)
    for _ in range(number.randint(1, 3)):
        forged[number.randrange(len(forged))] ^= number.randint(1, 255)
    try:
        event = reader.read(bytes(forged))
    except wire.WireError:
        return
    assert forged == right, f"a forged frame was accepted: {event}"


def stripe_frames(
    payload: bytes, chunk_bytes: int, number: int = 1, *, checked: bool = False, digested: bool = False
) -> list[bytes]:
    """Return the frames of a value on a bulk connection, or those of an anchor, whose chunks are digested."""
    value = FragmentValue("a", 1, 5, 1, 40, 24, 9000, -1, 80, len(payload))
    body = wire.pack_body(AnchorValue("a", 1, 1, 5, 7, len(payload)) if digested else value)
    pieces = wire.pieces(number, body, [memoryview(payload)], chunk_bytes, digested=digested)
    return [
        b"".join(wire.bulk_frame(wire.piece_head(each), each.views, checked=checked, digested=digested))
        for each in pieces
    ]


FRAMES = stripe_frames(PAYLOAD, 40)


def run_forged_digested(data: bytes) -> None:
    """Change bytes of digested chunks on plaintext: a payload of the right size and message comes, or nothing."""
    right = b"".join(stripe_frames(PAYLOAD, 40, checked=True, digested=True))
    number, whole = random.Random(data), bytearray(right)
    for _ in range(number.randint(1, 3)):
        whole[number.randrange(len(whole))] ^= number.randint(1, 255)
    with contextlib.suppress(wire.WireError):
        came = [(each.message, len(each.payload)) for each in read_stripe(bytes(whole), encrypted=False)]
        assert came in ([], [(AnchorValue("a", 1, 1, 5, 7, len(PAYLOAD)), len(PAYLOAD))]), "a forged head was accepted"


def head_frame(head: bytes) -> bytes:
    """Return a frame of a bulk connection without data."""
    return b"".join(wire.bulk_frame(head, (), checked=False))


def run_forged_stripe(data: bytes) -> None:
    """Change bytes of a plaintext bulk connection anywhere: nothing but the right payload may come out."""
    right = b"".join(stripe_frames(PAYLOAD, 40, checked=True))
    number, whole = random.Random(data), bytearray(right)
    for _ in range(number.randint(1, 3)):
        whole[number.randrange(len(whole))] ^= number.randint(1, 255)
    with contextlib.suppress(wire.WireError):
        came = [delivery.payload for delivery in read_stripe(bytes(whole), encrypted=False)]
        assert not came or (came == [PAYLOAD] and whole == right), "a forged payload was accepted"


def run_first_bytes(data: bytes) -> None:
    """What the public port sees first: every connection is sorted, at the latest when all that it looks at is there."""
    for encrypted in (False, True):
        verdict = is_bulk(data, encrypted=encrypted)
        assert verdict is not None or len(data) < LOOK_BYTES_MAX
        assert is_bulk(data + bytes(LOOK_BYTES_MAX), encrypted=encrypted) in (
            (verdict,) if verdict is not None else (True, False)
        )


def run_forged_header(data: bytes) -> None:
    """Change the header of a frame, byte by byte or field by field: nothing of it must be believed."""
    number = random.Random(data)
    if number.random() < 0.5:
        header = bytearray(PACKED_HEADER)
        header[number.randrange(len(header))] ^= number.randint(1, 255)
        forged = bytes(header) + CONTROL_BODIES[0]
    else:
        header = pb.Header()
        header.CopyFrom(HEADER)
        field = number.choice(HEADER.DESCRIPTOR.fields)
        old = getattr(header, field.name)
        new: Any = data.decode("utf-8", "replace") if isinstance(old, str) else number.choice((0, old + 1, 1 << 30))
        if field.name == "lane":
            new = number.choice((0, 2, 3, 77))
        if new == old:
            return
        setattr(header, field.name, new)
        forged = wire.pack_header(header) + CONTROL_BODIES[0]
    try:
        event = control_reader().read(forged)
    except wire.WireError:
        return
    raise AssertionError(f"a frame of another session was accepted: {event}")


def run_message(data: bytes) -> None:
    """Whatever is accepted as a message can be sent again, and is the same then."""
    try:
        frame = pb.Frame.FromString(data)
        name = frame.WhichOneof("body")
        if name is None or name == "goodbye":
            return
        message = wire.unpack_body(frame, name)
    except (wire.WireError, DecodeError):
        return
    again = wire.unpack_body(pb.Frame.FromString(wire.pack_body(message)), name)
    # NaN is not equal to itself.
    assert repr(again) == repr(message)


def run_metadata(data: bytes) -> None:
    with contextlib.suppress(Refused):
        header = calls.read_header({calls.HEADER_KEY: data})
        assert header.stripe < header.stripes <= STRIPES_MAX and len(data) <= calls.HEADER_BYTES_MAX
        assert header.host < max(1, header.hosts) <= HOSTS_MAX
        with contextlib.suppress(ValueError):
            assert check_name(header.sender).isascii() and "/" not in header.sender


def run_holdings(data: bytes) -> None:
    """Check that what a peer says it has of a payload is within the payload, or is refused."""
    with contextlib.suppress(Refused):
        held = calls.read_holdings({calls.HOLDINGS_KEY: data})
        for each in pb.Holdings.FromString(data).partials:
            ranges = held.claim((each.key, each.payload_bytes))
            holes = [] if ranges is None else ranges.holes(each.payload_bytes)
            missing = sum(stop - start for start, stop in holes)
            assert ranges is None or missing + ranges.filled == each.payload_bytes


def run_token(data: bytes) -> None:
    gate = Gate(encrypted=False, token=TOKEN)
    for sent in (data, data.decode("latin-1")):
        try:
            gate.check({TOKEN_KEY: sent})
        except Denied:
            assert data != TOKEN
        else:
            assert data == TOKEN, "a wrong token was accepted"


def run_identity(data: bytes) -> None:
    """Names of a certificate, as gRPC hands them over: lines of DNS names, a blank line, URIs, a blank line, the CN."""
    dns, uris, common = (part.split(b"\n") for part in (*data.split(b"\n\n", 2), b"", b"", b"")[:3])
    context = {"peer_dns": dns, "peer_uri": uris, "x509_common_name": common}
    texts = [[value.decode("utf-8", "replace") for value in values] for values in (dns, uris, common)]
    speaks = "a" in learner_names(texts[2][0], texts[0], texts[1])
    assert speaks <= any(b"a" in value for value in (*dns, *uris, *common))
    for or_syncer in (False, True):
        try:
            Gate(encrypted=True, token=b"").check_speaks_for("a", context, or_syncer=or_syncer)
        except Denied as error:
            assert not speaks and len(str(error)) < 1000
        else:
            assert speaks or (or_syncer and SYNCER_HOST.encode() in dns)


def run_drain_request(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert len(calls.read_drain_request(data).learner_id) <= 100


def run_operator_request(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        request = calls.read_operator_request(data)
        assert len(request.learner_id) <= 100 and request.action in ("ban", "admit")


FRAGMENTS = plan_fragments({"a": (1500,), "b": (3, 5), "c": (40, 30), "d": (2000,)}, 2).fragments
FLATS = [np.arange(whole(each).size, dtype=np.float32) for each in FRAGMENTS]


def statement(*rows: tuple[int, ...]) -> bytes:
    """Return what a host states: fragment, slice, whether it gets the blocks, start, size, stride and count."""
    return np.array(rows, "<i8").tobytes()


def run_blocks(data: bytes) -> None:
    """Blocks that a host states: refused, or the host gets exactly these of every version."""
    layouts = [whole(each) for each in FRAGMENTS]
    cuts = Cuts(layouts, "int4")
    try:
        cuts.of(0, data)
    except ValueError:
        return
    rows = list(struct.iter_unpack(f"<{COLUMNS}q", data))
    for number, (layout, flat) in enumerate(zip(layouts, FLATS, strict=True)):
        picked: list[dict[str, np.ndarray]] = [{}, {}]
        for got, of_kind in enumerate(picked):
            for piece, value in enumerate(layout.views(flat).values()):
                mine = [row[3:] for row in rows if row[:3] == (number, piece, got)]
                assert sum(size * count for _, size, _, count in mine) <= -(-value.size // 256), "more than there are"
                starts = [
                    256 * block
                    for start, size, stride, count in mine
                    for first in range(start, start + stride * count, stride)
                    for block in range(first, first + size)
                ]
                if starts:
                    line = value.reshape(-1)
                    of_kind[layout.pieces[piece].key] = np.concatenate([line[at : at + 256] for at in starts])
        digest, make = cuts.version(number, flat.data, flat, is_whole=True).cut(data)
        assert digest == value_digest(picked[0])
        assert b"".join(make()) == codec.encode(picked[1], "float32")


LAYOUT = [("a", (300,)), ("b", (3, 5)), ("empty", (0, 4)), ("scalar", ())]
VALUES = {
    key: np.linspace(-1, 1, max(1, int(np.prod(shape))), dtype=np.float32)[: int(np.prod(shape))].reshape(shape)
    for key, shape in LAYOUT
}
FORMATS: tuple[codec.Format, ...] = ("float32", "bfloat16", "int8", "int4", "int2", "ternary")
STATE = {"params/w": np.arange(20, dtype=np.float32).reshape(4, 5), "opt/count": np.int32(7)}
STATE_LAYOUT = StateLayout(STATE)


def state_bytes(state: dict[str, Any]) -> bytes:
    layout = StateLayout(state)
    return b"".join(layout.slices(0, layout.num_bytes, lambda name: np.asarray(state[name])))


def run_codec(data: bytes) -> None:
    """Check that a payload has the right size or is refused, and that its claims allocate no memory."""
    format = FORMATS[data[0] % len(FORMATS)] if data else "int4"
    payload = data[1:]
    with contextlib.suppress(ValueError), np.errstate(all="ignore"):
        values = codec.decode(payload, LAYOUT, format)
        assert [(key, value.shape) for key, value in values.items()] == LAYOUT
        assert all(value.dtype == np.float32 for value in values.values())
        assert len(payload) == codec.encoded_size([shape for _, shape in LAYOUT], format)


def run_state(data: bytes) -> None:
    """Bytes of a donor's state are this layout's, or are refused."""
    with contextlib.suppress(ValueError):
        state = STATE_LAYOUT.decode(data)
        assert {name: (value.dtype, value.shape) for name, value in state.items()} == {
            name: (value.dtype, value.shape) for name, value in STATE.items()
        }
        assert len(data) == STATE_LAYOUT.num_bytes


# These parts are two rows, and the rest in a third.
PARTS = parts_of(bytes(range(66)))
ARRIVED = GlobalFragment(5, 1, 5, 1, 1 << 60, 90)
COMMANDS = (
    c.HostMeet(3, (("seed", "0"), ("mesh", "fsdp"))),
    c.HostPutBatch((c.SampleRange(0, 8), c.SampleRange(16, 24)), (c.SampleRange(24, 40),)),
    c.HostStep(5),
    c.HostShared(ARRIVED, 7, 3, 1),
    c.HostAdopt(ARRIVED),
    c.HostHas(ARRIVED, "damaged"),
    c.HostLeaf(8, -1, "params/w"),
    c.HostLoadState(9),
    c.HostSave(10, "[1, 2, 3, [4]]", -1),
    c.HostRestore(11, (0, 1)),
    c.HostLoader("[1, 2, 3, [4]]"),
    c.HostOrder('["EndTerm",[]]'),
    c.HostReport('["HasValue",[64,3]]'),
    c.HostAnswer(9, "no"),
    c.HostStop(),
)


READABLE = tuple(type(example) for example in (*EXAMPLES, *COMMANDS))


def run_parts(data: bytes) -> None:
    """Parts of a payload: each byte of the data once in the whole, or refused."""
    parts = list(unframed(data))
    with contextlib.suppress(ValueError):
        whole = join_host_bytes(parts, PAYLOAD_BYTES_MAX)
        heads = [8 + 32 * int.from_bytes(part[:8], "little") for part in parts]
        data_bytes = b"".join(part[head:] for part, head in zip(parts, heads, strict=True))
        assert all(parts) or not whole
        assert not all(parts) or sorted(whole) == sorted(data_bytes)


def run_tape(data: bytes) -> None:
    """Lines of a tape: replayed or refused with the number of the line."""
    lines = data.decode("utf-8", "replace").splitlines()
    with contextlib.suppress(ValueError):
        for _ in replay(lines, machines.new_syncer()):
            pass


def run_snapshot(data: bytes) -> None:
    """The state of a machine in a snapshot: taken over, or refused by an ordinary error."""
    with contextlib.suppress(ValueError, TypeError, LookupError, AttributeError):
        machines.new_syncer().restore(json.loads(data))


BODIES = tuple(wire.pack_body(example) for example in (*EXAMPLES, *COMMANDS))
CONTROL_BODIES = tuple(wire.pack_body(example) for example in EXAMPLES if not isinstance(example, BULK_TYPES))
# No mutation of a frame with a checksum gets past the reader.
UNCHECKED = tuple(PACKED_HEADER + body for body in CONTROL_BODIES)
ONE_CHUNK = pb.Frame(chunk=pb.Chunk(message=1)).SerializeToString()
TARGETS = {
    "control": Target(
        (
            framed(wire.ready_frame(PACKED_HEADER, HOLDINGS), wire.control_frame(PACKED_HEADER, CONTROL_BODIES[0])),
            framed(*UNCHECKED, wire.goodbye_frame(PACKED_HEADER, "done")),
            framed(PACKED_HEADER, PACKED_HEADER + BODIES[2] + ONE_CHUNK),
            *map(framed, UNCHECKED),
        ),
        run_control,
    ),
    "forged_control": Target((b"0", b"more"), run_forged_control),
    "stripe": Target(
        (
            b"".join(FRAMES),
            b"".join((*stripe_frames(b"", 40), *stripe_frames(bytes(900), 300, 2), bytes(wire.PREFIX_BYTES))),
            b"".join((*stripe_frames(bytes(900), 300, 2)[::-1], *FRAMES)),
            b"".join((*stripe_frames(bytes(900), 300, digested=True), *stripe_frames(PAYLOAD, 40, 2))),
            head_frame(wire.goodbye_head("done")),
            head_frame(wire.ready_head()),
            *(head_frame(body + ONE_CHUNK) for body in BODIES),
        ),
        run_stripe,
    ),
    "forged_stripe": Target((b"0", b"more"), run_forged_stripe),
    "forged_digested": Target((b"0", b"more"), run_forged_digested),
    "first_bytes": Target((GREETING, b"\x16\x03\x01\x00\x10" + bytes(16), b"PRI * HTTP/2.0"), run_first_bytes),
    "forged_header": Target((b"0", b"run", b"\xff"), run_forged_header),
    "message": Target(BODIES, run_message),
    "metadata": Target((HEADER.SerializeToString(), HOST_HEADER.SerializeToString(), b""), run_metadata),
    "holdings": Target((HOLDINGS.SerializeToString(), b""), run_holdings),
    "token": Target((TOKEN, TOKEN[:-1], TOKEN + b"x", b""), run_token),
    "identity": Target(
        (b"a\nb\n\ndiloco://learner/a\n\nb", b"syncer.diloco\n\n\n\nsyncer", b"\n\ndiloco://learner/b\n\na"),
        run_identity,
    ),
    "blocks": Target(
        (
            statement((0, 0, 0, 0, 2, 3, 2), (0, 0, 1, 0, 1, 1, 1), (1, 0, 1, 0, 4, 4, 1)),
            statement((0, 0, 0, 0, 1, 2, 3), (1, 0, 0, 1, 1, 1, 1), (1, 1, 0, 0, 1, 1, 1), (1, 1, 1, 0, 1, 1, 1)),
            b"",
        ),
        run_blocks,
    ),
    "operator_request": Target(
        (pb.OperatorRequest(action="ban", learner_id="a", why="bad data").SerializeToString(),), run_operator_request
    ),
    "drain_request": Target((pb.DrainRequest(learner_id="a").SerializeToString(),), run_drain_request),
    "codec": Target(
        tuple(bytes([i]) + codec.encode(VALUES, format) for i, format in enumerate(FORMATS)),
        run_codec,
    ),
    "state": Target((state_bytes(STATE), state_bytes({**STATE, "x": np.zeros((2, 3), np.float64)})), run_state),
    "parts": Target((framed(*PARTS), framed(*PARTS[:2], b"")), run_parts),
    "syncer_machine": Target(machines.SYNCER_SEEDS, machines.run_syncer),
    "learner_machine": Target(machines.LEARNER_SEEDS, machines.run_learner),
    "tape": Target(machines.TAPE_SEEDS, run_tape),
    "snapshot": Target(machines.SNAPSHOT_SEEDS, run_snapshot),
}
