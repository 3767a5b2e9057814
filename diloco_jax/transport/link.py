"""The contract of every connection: what it promises, what passes on it, its settings and its names.

Guarantees
  * Messages of one lane arrive in order, at most once. Control and bulk are two lanes with no order between them.
  * Nothing blocks the caller but `receive` and `close`, and both take a deadline.
  * A session (one incarnation's set of connections) ends as a whole, and its end is delivered once to each side
    that did not close it, after everything that was received before.
  * Payloads are shared, not copied: a sender must not change a payload after `send`.
"""

import math
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias, get_args

from diloco_jax.protocol.messages import (
    SYNCER,
    AnchorValue,
    FragmentValue,
    GlobalFragment,
    LearnerMessage,
    Message,
    MetricsReport,
    StatePart,
    SyncerMessage,
)
from diloco_jax.transport.commands import COMMANDS, REPLIES, Command, Reply

Buffer: TypeAlias = bytes | bytearray | memoryview
Payload: TypeAlias = Buffer | Sequence[Buffer]

# Those that may have a payload, and all that passes between the hosts of an island.
BULK_TYPES: tuple[type, ...] = (FragmentValue, GlobalFragment, AnchorValue, StatePart, *COMMANDS, *REPLIES)
LEARNER_TYPES: tuple[type, ...] = (*get_args(LearnerMessage), MetricsReport)
HOST_TYPES: tuple[type, ...] = (FragmentValue,)  # from a learner's hosts that are not its leader
SYNCER_TYPES: tuple[type, ...] = get_args(SyncerMessage)
NAME_LENGTH_MAX = 100
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{NAME_LENGTH_MAX - 1}}}", re.ASCII)
SYNCER_HOST = "syncer.diloco"  # what the syncer's certificate names, at whatever address it listens
ISLAND_HOSTS = ".island.diloco"  # behind an island's name: what its certificate names for its own hosts
RESERVED_NAMES = (SYNCER, SYNCER_HOST, "ca", "token")  # the last two are files beside the certificates
STRIPES_MAX = 16
HOSTS_MAX = 4096  # of one learner
CHUNK_BYTES_MAX = 4 << 20  # a receiver takes chunks up to this size, whatever its own `chunk_bytes`


class TransportError(ConnectionError):
    """The other side cannot be reached, or refused the connection."""


class Rejected(TransportError):
    """The syncer refused the connection and will not change its mind: another run, or a newer process of that name."""


class LinkClosed(TransportError):
    """The session is over: nothing can be sent on it any more."""


class Delivery(NamedTuple):
    """Item that `receive` returns: a message with its payload, or the end of the peer's session with the reason."""

    kind: Literal["message", "disconnected"]
    peer: str
    message: Message | None = None
    payload: bytes | memoryview = b""
    reason: str = ""
    session: int = 0  # its number, which a learner's sessions with a syncer and its shards share


class Traffic(NamedTuple):
    """Bytes moved: frames with their headers, without what TCP and HTTP/2 add. In one process: payloads only."""

    received_bytes: int
    sent_bytes: int


class Link(Protocol):
    """A learner's session with the syncer. Made by a transport's `connect`."""

    def send(self, message: LearnerMessage | MetricsReport, payload: Payload = b"") -> None:
        """Queue a message; never blocks.

        Raises:
            LinkClosed: The session is over, or has just been cut because the lane's queue is full.
            ValueError: The message or its payload can never be sent (wrong type, too large).
        """

    def receive(self, timeout_s: float) -> Delivery | None:
        """Return the next delivery, or None after `timeout_s` seconds; 0 only looks."""

    def close(self, grace_s: float = 5.0) -> None:
        """Send what is queued for at most `grace_s` seconds, then end the session; safe to call again.

        A session that the other side ended must be closed as well: only that gives its connections back.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportConfig:
    """Settings of the connections between learners and the syncer."""

    address: str = "127.0.0.1:0"
    """host:port where the syncer listens and learners connect. Port 0 lets the system choose one."""
    allow_plaintext: bool = False
    """Allow an address other than loopback although nothing is encrypted. Only on a network that you trust."""
    connect_timeout_s: float = 30.0
    """Seconds that a learner waits for the syncer to answer, and the syncer for the last connection of a session. Low:
    gives up on slow links. High: a wrong address is noticed late."""
    keepalive_s: float = 20.0
    """Seconds between pings on a silent connection. Low: traffic for nothing. High: a dead
    link is noticed late, and home routers forget after 30."""
    keepalive_timeout_s: float = 20.0
    """Seconds without an answer to a ping that end a connection. Low: cuts a link under load. High: noticed late."""
    payload_bytes_max: int = 1 << 30
    """Largest payload in bytes, sent or received; a larger one is refused before memory is taken for it. Low: refuses
    large fragments. High: a peer may take as much memory."""
    chunk_bytes: int = 512 << 10
    """Bytes of payload per frame, at most 4 MiB. Low: costs CPU time. High: the same, beyond the CPU's caches."""
    stripes: int = 4
    """Connections over which the chunks of bulk messages are spread, 1 to 16: the learner's choice. One connection
    moves at most its window per round trip: 67 MB/s at 60 ms with the 4 MB that Linux allows by default. Low: 1, one
    window for all. High: more sockets and threads."""
    resume_s: float = 120.0
    """Seconds for which a receiver keeps a payload above 1 MiB that a lost connection cut, so that the next session
    brings only the rest. Takes at most payload_bytes_max for each peer. Low: sends all again. High: holds memory for
    peers that are gone."""
    queue_messages_max: int = 1024
    """Control messages that may wait for one peer, in each direction. Sending to a full queue ends the session. Low: a
    peer that stalls for a moment is cut. High: memory."""
    queue_payloads_max: int = 256
    """The same for bulk messages. Low: at least the number of fragments, which a joining learner gets. High: memory."""
    connections_max: int = 1024
    """Connections that the syncer takes; a learner has stripes + 1, at times twice. Low: refuses. High: open files."""
    tls_ca: str = ""
    """File with the certificates of the authority that signs everybody's (PEM). With it, tls_certificate and tls_key
    every connection is encrypted and both sides prove who they are; `diloco certs` makes all three."""
    tls_certificate: str = ""
    """File with this process's certificate (PEM). "{name}" in it stands for the learner's name, or for "syncer"."""
    tls_key: str = ""
    """File with the private key of that certificate (PEM, without a password). "{name}" as above."""
    token_file: str = ""
    """File with a secret that all processes of the run share. The syncer refuses whoever does not send it."""

    def __post_init__(self) -> None:
        split_address(self.address)
        for name in ("connect_timeout_s", "keepalive_s", "keepalive_timeout_s", "resume_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"transport.{name} is {value}: use a number of seconds above 0")
        for name in ("payload_bytes_max", "chunk_bytes", "queue_messages_max", "queue_payloads_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"transport.{name} is {getattr(self, name)}: use at least 1")
        if not 1 <= self.stripes <= STRIPES_MAX:
            raise ValueError(f"transport.stripes is {self.stripes}: use 1 to {STRIPES_MAX}")
        if self.connections_max < self.stripes + 1:
            raise ValueError(
                f"transport.connections_max is {self.connections_max}: one learner needs {self.stripes + 1}, one more "
                "than transport.stripes"
            )
        if self.chunk_bytes > CHUNK_BYTES_MAX:
            raise ValueError(
                f"transport.chunk_bytes is {self.chunk_bytes}, receivers take at most {CHUNK_BYTES_MAX}: lower it"
            )
        missing = [name for name in ("tls_ca", "tls_certificate", "tls_key") if not getattr(self, name)]
        if len(missing) in (1, 2):
            raise ValueError(
                f"transport.{missing[0]} is empty: set tls_ca, tls_certificate and tls_key, or none of them"
            )

    @property
    def encrypted(self) -> bool:
        """Tell whether connections are encrypted and both sides are known by their certificates."""
        return bool(self.tls_ca)


def check_name(learner_id: str) -> str:
    """Return the name of a learner if it may be one: it appears in logs, certificates and file names.

    Raises:
        ValueError: It is reserved, too long, or has other characters than letters, digits, ".", "_" and "-".
    """
    if not _NAME.fullmatch(learner_id) or learner_id.lower() in RESERVED_NAMES:
        raise ValueError(
            f"learner_id {learner_id[:NAME_LENGTH_MAX]!r} is not allowed: use at most {NAME_LENGTH_MAX} letters, "
            f"digits, '.', '_' and '-', a letter or digit first, and none of {', '.join(RESERVED_NAMES)}"
        )
    return learner_id


def split_address(address: str, setting: str = "transport.address") -> tuple[str, int]:
    """Return host and port of "host:port" or "[v6]:port".

    Args:
        setting: where the address is written, for the error.

    Raises:
        ValueError: The address has no host, or no port from 0 to 65535.
    """
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isascii() and port.isdecimal() and int(port) <= 65535):
        raise ValueError(f"{setting} is {address!r}: write host:port, a port up to 65535, such as 127.0.0.1:50051")
    return host, int(port)


def check_free(address: str) -> None:
    """Bind and let go; OSError if this machine cannot listen there.

    gRPC would print its internal log, and JAX's service crashes.
    """
    host, port = split_address(address)
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does: TIME_WAIT is not "in use"
        probe.bind(target)


def is_bulk(message: Message | Command | Reply) -> bool:
    """Tell whether the message travels in the bulk lane, where payloads do."""
    return isinstance(message, BULK_TYPES)


def payload_parts(
    message: Message | Command | Reply, payload: Payload, allowed: tuple[type, ...], payload_bytes_max: int
) -> tuple[memoryview, ...]:
    """Return the payload as flat views of bytes, after the checks that are made before sending.

    Raises:
        ValueError: The message is not one of `allowed`, has a payload that it must not have, or one too large.
    """
    if not isinstance(message, allowed):
        names = ", ".join(kind.__name__ for kind in allowed)
        raise ValueError(f"cannot send a {type(message).__name__} from this side: it sends {names}")
    buffers = (payload,) if isinstance(payload, Buffer) else payload
    parts = tuple(memoryview(part).cast("B") for part in buffers if len(part))
    if parts and not is_bulk(message):
        names = ", ".join(kind.__name__ for kind in allowed if kind in BULK_TYPES)
        raise ValueError(f"a {type(message).__name__} has no payload: only {names} have")
    size = sum(part.nbytes for part in parts)
    if size > payload_bytes_max:
        raise ValueError(
            f"the payload of {type(message).__name__} has {size} bytes, the limit is {payload_bytes_max}: raise "
            "transport.payload_bytes_max on all sides, or use more fragments"
        )
    return parts
