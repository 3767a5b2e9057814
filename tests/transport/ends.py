"""Both ends of connections, for tests: what a test opens is closed when it is over."""

import inspect
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from diloco_jax.protocol.messages import FragmentValue, Heartbeat, Message
from diloco_jax.transport import wire
from diloco_jax.transport.endpoints import ends, grpc_link
from diloco_jax.transport.link import Delivery, TransportConfig
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.session.assembly import Assembly
from diloco_jax.transport.session.inbox import Inbox, Session
from tests.limits import HANGS_S

# The tests never wait so long when the code is right.
LIMIT = 1 << 25
CONFIG = TransportConfig(payload_bytes_max=LIMIT, chunk_bytes=1 << 16, connect_timeout_s=HANGS_S)
NAMES = inspect.signature(grpc_link.connect).parameters

T = TypeVar("T")


class Ends:
    """Listeners and links to them; `close` closes all, the newest first.

    Args:
        settings: Settings of all of them, where they differ from CONFIG.
    """

    def __init__(self, **settings: Any) -> None:
        self.config = replace(CONFIG, **settings)
        self._close: list[Callable[[float], None]] = []
        self.listener: Any  # opened last

    def keep(self, made: T) -> T:
        """Close this at the end too."""
        self._close.append(made.close)  # type: ignore[attr-defined]
        return made

    @property
    def there(self) -> TransportConfig:
        """Settings of a process that dials the listener."""
        return replace(self.config, address=self.listener.address)

    def listen(self, *, epoch: int = 1, subscribers_max: int = 0, **changes: Any) -> Any:
        """Open a listener; `changes` are those of its settings."""
        config = replace(self.config, **changes)
        self.listener = self.keep(ends.listen(config, run_id="run", epoch=epoch, subscribers_max=subscribers_max))
        return self.listener

    def connect(self, learner_id: str = "a", incarnation: int = 0, *, to: str = "", **changes: Any) -> Any:
        """Open a link; `changes` are those of its settings, and names for `connect`."""
        names = {"run_id": "run", "epoch": 1} | {name: changes.pop(name) for name in list(changes) if name in NAMES}
        config = replace(self.config, **{"address": to or self.listener.address, **changes})
        return self.keep(ends.connect(config, learner_id=learner_id, incarnation=incarnation, **names))

    def meet(self, learner_id: str = "a", incarnation: int = 0, **changes: Any) -> Any:
        """Open a link, and wait until the listener has noticed it."""
        link = self.connect(learner_id, incarnation, **changes)
        greet(self.listener, link, learner_id, incarnation)
        return link

    def close(self) -> None:
        for close in reversed(self._close):
            close(1.0)


def greet(listener: Any, link: Any, learner_id: str = "a", incarnation: int = 0) -> None:
    """Send a message over a link, and check that the listener receives it next."""
    link.send(Heartbeat(learner_id, incarnation))
    heard = hear(listener)._replace(session=0)
    assert heard == Delivery("message", learner_id, Heartbeat(learner_id, incarnation))


def hear(side: Any, within_s: float = HANGS_S) -> Delivery:
    """Return the next delivery."""
    delivery = side.receive(within_s)
    assert isinstance(delivery, Delivery), "nothing came"
    return delivery


def hear_message(side: Any) -> Message:
    delivery = hear(side)
    assert delivery.kind == "message" and delivery.message is not None, delivery
    return delivery.message


def hear_end(side: Any, words: str = "") -> Delivery:
    """Receive the end of a session, and check that its reason has this text."""
    delivery = hear(side)
    assert delivery.kind == "disconnected" and words in delivery.reason, delivery
    return delivery


def value(number: int = 1, size: int = 0, incarnation: int = 0, *, fragment_id: int = 0) -> FragmentValue:
    """Learner a's value for a round, with a payload of this size."""
    return FragmentValue("a", incarnation, number, fragment_id, 9, 9, 9, 0, 9, size)


def bulk_bytes(piece: wire.BulkPiece) -> bytes:
    """Return the frame of a piece on a plaintext bulk connection."""
    digested = piece.chunk.digested
    return b"".join(wire.bulk_frame(wire.piece_head(piece), piece.views, checked=True, digested=digested))


def read_bulk(reader: wire.Reader, frame: bytes) -> tuple[wire.Prefix, wire.Incoming, bytes]:
    """Return prefix, chunk and data of a frame of a plaintext bulk connection; the data are not checked yet."""
    prefix = wire.read_prefix(frame[: wire.PREFIX_BYTES])
    head = frame[wire.PREFIX_BYTES :][: prefix.head_bytes]
    wire.check_head(prefix, head)
    event = reader.read_head(head, prefix.data_bytes)
    assert isinstance(event, wire.Incoming)
    return prefix, event, frame[wire.PREFIX_BYTES + prefix.head_bytes :]


def add(assembly: Assembly, reader: wire.Reader, frame: bytes) -> None:
    """Add the chunk of a frame to an assembly, as a plaintext bulk connection does."""
    prefix, event, data = read_bulk(reader, frame)
    place = assembly.claim(event.message, event.chunk, prefix.data_bytes)
    if place is not None:
        place.view[:] = data
        wire.check_data(prefix, event.chunk, place.view)
        assembly.filled(place)


def comes_true(condition: Callable[[], object], within_s: float = HANGS_S) -> bool:
    """Wait until a condition holds; False if it does not in time."""
    until_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.005)
    return True


class Quiet(Session):
    """Session without another end."""

    def __init__(self, inbox: Inbox, header: pb.Header | None = None, **settings: Any) -> None:
        header = header or pb.Header(sender="a")
        super().__init__(inbox, header, header.sender, TransportConfig(**settings))
        self.sent: list[tuple[Message, tuple[memoryview, ...]]] = []

    def send(self, message: Message, parts: tuple[memoryview, ...]) -> None:
        self.sent.append((message, parts))

    def fail(self, reason: str) -> None:
        self.finish(reason)
