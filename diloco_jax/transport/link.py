"""The contract of every connection: its guarantees, its types of messages, its settings and its names.

Guarantees
  * Messages of one lane arrive in order, at most once. Control and bulk are two lanes with no order between them.
  * Only `receive` and `close` block the caller, and both take a deadline.
  * A session (one incarnation's set of connections) ends as a whole. Each side that did not close it gets the end
    delivered once, after everything that was received before.
  * Payloads are shared, not copied: a sender must not change a payload after `send`.
"""

import ipaddress
import math
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias, get_args

from diloco_jax.protocol.messages import (
    SYNCER,
    AnchorValue,
    CutFragment,
    EvaluateWithout,
    FragmentValue,
    GlobalFragment,
    Hello,
    HostBlocks,
    LearnerMessage,
    Message,
    MetricsReport,
    StateChunk,
    SyncerMessage,
)
from diloco_jax.transport.commands import COMMANDS, REPLIES, Command, Reply

Buffer: TypeAlias = bytes | bytearray | memoryview
Payload: TypeAlias = Buffer | Sequence[Buffer]

# Messages that may have a payload, and all messages between the hosts of an island.
_OF_HOSTS = (HostBlocks, CutFragment)
_OF_LEARNERS = (FragmentValue, GlobalFragment, AnchorValue, StateChunk, EvaluateWithout)
BULK_TYPES: tuple[type, ...] = (*_OF_LEARNERS, *_OF_HOSTS, *COMMANDS, *REPLIES)
# The transport refuses a HostBlocks of a learner with one host.
LEARNER_TYPES: tuple[type, ...] = (*get_args(LearnerMessage), MetricsReport, HostBlocks)
# A learner's hosts send and receive these types, except for its leader.
HOST_TYPES: tuple[type, ...] = (FragmentValue, AnchorValue, HostBlocks)
TO_HOST_TYPES: tuple[type, ...] = (CutFragment,)
# A subscriber can only request the model.
SUBSCRIBER_TYPES: tuple[type, ...] = (Hello,)
# The name of a subscriber in deliveries starts with this text, which no learner's name contains.
SUBSCRIBER = "subscriber/"
SYNCER_TYPES: tuple[type, ...] = (*get_args(SyncerMessage), EvaluateWithout, CutFragment)
NAME_LENGTH_MAX = 100
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{NAME_LENGTH_MAX - 1}}}", re.ASCII)
# The syncer's certificate names this host, at whatever address the syncer listens.
SYNCER_HOST = "syncer.diloco"
# An island's certificate names its own hosts by the island's name and this ending.
ISLAND_HOSTS = ".island.diloco"
# ca and token are files beside the certificates.
RESERVED_NAMES = (SYNCER, SYNCER_HOST, "ca", "token")
# Buckets that an address may name; memory:// is one within a process.
BUCKETS = ("s3", "gs", "az", "file", "memory")
STRIPES_MAX = 16
HOSTS_MAX = 4096  # per learner
# A receiver accepts chunks up to this size, whatever its own `chunk_bytes` is.
CHUNK_BYTES_MAX = 4 << 20


class TransportError(ConnectionError):
    """The other side cannot be reached, or refused the connection."""


class Rejected(TransportError):
    """The syncer refused the connection for good: it serves another run, or knows a newer process of that name."""


class LinkClosed(TransportError):
    """The session is over: nothing can be sent on it any more."""


class Delivery(NamedTuple):
    """Item that `receive` returns: a message with its payload, or the reason why the peer's session ended."""

    kind: Literal["message", "disconnected"]
    peer: str
    message: Message | None = None
    payload: bytes | memoryview = b""
    reason: str = ""
    session: int = 0


class Traffic(NamedTuple):
    """Bytes moved: frames with headers, without the overhead of TCP and HTTP/2; only payloads within one process."""

    received_bytes: int
    sent_bytes: int

    def plus(self, received_bytes: int, sent_bytes: int) -> "Traffic":
        """Return this traffic and some more."""
        return Traffic(self.received_bytes + received_bytes, self.sent_bytes + sent_bytes)


class Version(Protocol):
    """A version of a fragment on its way to learners."""

    @property
    def payload(self) -> Payload:
        """Return the payload for a learner of one host."""

    @property
    def value_bytes(self) -> int:
        """Return the bytes of the value, which the version keeps in memory."""

    def cut(self, blocks: bytes) -> tuple[int, Callable[[], Payload]]:
        """Return the digest of the blocks that a host holds, and a function that makes the payload for it.

        The function holds this version's payload, and not its value.

        Args:
            blocks: The payload of the host's HostBlocks.

        Raises:
            ValueError: These are not blocks of this model.
        """


class Link(Protocol):
    """A learner's session with the syncer, opened by a transport's `connect`."""

    @property
    def open(self) -> bool:
        """Tell whether the session is not over."""

    @property
    def receiving(self) -> bool:
        """Tell whether a payload has arrived in part, or waits to be read."""

    def send(self, message: LearnerMessage | MetricsReport, payload: Payload = b"") -> None:
        """Queue a message; never blocks.

        Raises:
            LinkClosed: The session is over, or has just been cut because the lane's queue is full.
            ValueError: The message or its payload can never be sent (wrong type, too large).
        """

    def receive(self, timeout_s: float) -> Delivery | None:
        """Return the next delivery, or None after `timeout_s` seconds or a `wake`; 0 only looks."""

    def wake(self) -> None:
        """Make a waiting `receive` return None at once; any thread may call it."""

    def close(self, grace_s: float = 5.0) -> None:
        """Send what is queued for at most `grace_s` seconds, then end the session; safe to call again.

        A session that the other side ended must be closed as well: only `close` frees its connections.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportConfig:
    """Settings of the connections between learners and the syncer."""

    address: str = "127.0.0.1:0"
    """host:port where the syncer listens and learners connect. Port 0 lets the system choose one. Set it for islands on
    other machines, to an address that they can reach. If no machine may open a port, name a bucket with a prefix that
    only this run uses, as s3://, gs://, az:// or file:// (docs/bucket.md): they exchange messages there."""
    poll_s: float = 1.0
    """Seconds between two looks into a bucket while nothing new is there. Lower it for shorter rounds, to what one
    inner step takes; each look is a request that costs money (diloco plan). It has no effect with host:port."""
    allow_plaintext: bool = False
    """Allow an address other than loopback although nothing is encrypted. Set it only in a network where every machine
    may read and change the run's messages. In any other network, make certificates with diloco certs."""
    connect_timeout_s: float = 30.0
    """Seconds that a learner waits for the syncer to answer, and the syncer for the last connection of a session. Raise
    it if islands may start long before the syncer; a wrong address is then noticed later."""
    keepalive_s: float = 20.0
    """Seconds between pings on a silent connection. Lower it if a router forgets silent connections sooner; home
    routers do so after 30 seconds."""
    keepalive_timeout_s: float = 20.0
    """Seconds without an answer to a ping that end a connection. Raise it if a loaded link is cut; a dead link is then
    noticed later."""
    payload_bytes_max: int = 1 << 30
    """Largest payload in bytes, sent or received; a larger one is refused before memory is allocated for it. Raise it
    if a fragment is larger; a peer may then take as much memory."""
    chunk_bytes: int = 2 << 20
    """Bytes of payload per frame, at most 4 MiB. Lower it if payloads have fewer chunks than stripes; small chunks cost
    processor time."""
    stripes: int = 4
    """Connections that share the chunks of bulk messages, 1 to 16: the learner's choice. One connection moves at most
    its window per round trip: 67 MB/s at 60 ms with the 4 MB that Linux allows by default. Raise it if one window per
    round trip is less than the link; each stripe takes a socket and threads."""
    resume_s: float = 120.0
    """Seconds that a receiver keeps a payload above 1 MiB that a lost connection cut, so that the next session brings
    only the rest. Takes at most payload_bytes_max for each peer. Raise it if a link may be down for longer, because the
    payload is otherwise sent again from its start."""
    queue_messages_max: int = 1024
    """Control messages that may wait for one peer, in each direction. Sending to a full queue ends the session. Raise
    it if peers that stall for a moment lose their session."""
    queue_payloads_max: int = 256
    """Bulk messages that may wait for one peer, in each direction. It must be at least the number of fragments, which a
    joining learner gets. Raise it if protocol.num_fragments is larger. The sender holds this many payloads in memory if
    a peer reads slowly."""
    connections_max: int = 1024
    """Connections that the syncer takes; a learner has stripes + 1, at times twice. Raise it for more islands or
    stripes; each connection is an open file."""
    tls_ca: str = ""
    """File with the certificates of the authority that signs everybody's (PEM). With it, tls_certificate and tls_key
    every connection is encrypted and both sides prove who they are; `diloco certs` makes all three. Set it for every
    run over a network that you do not trust."""
    tls_certificate: str = ""
    """File with this process's certificate (PEM). "{name}" in it stands for the learner's name, or for "syncer". Set it
    together with tls_ca and tls_key."""
    tls_key: str = ""
    """File with the private key of that certificate (PEM, without a password). "{name}" as above. Set it together with
    tls_ca and tls_certificate, and let only the process's user read the file."""
    token_file: str = ""
    """File with a secret that all processes of the run share. The syncer refuses anyone who does not send it. Set it
    together with the certificates."""

    def __post_init__(self) -> None:
        check_address(self.address)
        for name in ("poll_s", "connect_timeout_s", "keepalive_s", "keepalive_timeout_s", "resume_s"):
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
    def answer_s(self) -> float:
        """Return the seconds until an answer may have come through a bucket, besides its requests; 0 for host:port.

        A request and its answer each wait up to a poll to be written, and up to another one to be read.
        """
        return 4 * self.poll_s if bucket_scheme(self.address) else 0.0

    @property
    def encrypted(self) -> bool:
        """Tell whether connections are encrypted and both sides are known by their certificates."""
        return bool(self.tls_ca)


def check_name(learner_id: str) -> str:
    """Return the name of a learner if it is allowed: it appears in logs, certificates and file names.

    Raises:
        ValueError: The name is reserved, too long, or has other characters than letters, digits, ".", "_" and "-".
    """
    if not _NAME.fullmatch(learner_id) or learner_id.lower() in RESERVED_NAMES:
        raise ValueError(
            f"learner_id {learner_id[:NAME_LENGTH_MAX]!r} is not allowed: use at most {NAME_LENGTH_MAX} letters, "
            f"digits, '.', '_' and '-', a letter or digit first, and none of {', '.join(RESERVED_NAMES)}"
        )
    return learner_id


def bucket_scheme(address: str) -> str:
    """Return the scheme of an address that is a bucket; "" for host:port."""
    scheme, colon, _ = address.partition("://")
    return scheme if colon else ""


def check_address(address: str, setting: str = "transport.address") -> None:
    """Check that an address of a syncer is host:port or a bucket; ValueError with the setting and the remedy."""
    scheme = bucket_scheme(address)
    if not scheme:
        split_address(address, setting)
        return
    rest = address.partition("://")[2]
    if scheme not in BUCKETS or not rest.strip("/") or (scheme == "file" and not rest.startswith("/")):
        raise ValueError(
            f"{setting} is {address!r}: a bucket is s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or "
            "file:///FOLDER"
        )


def split_address(address: str, setting: str = "transport.address") -> tuple[str, int]:
    """Return host and port of "host:port" or "[v6]:port".

    Args:
        setting: Name of the setting that holds the address, for the error.

    Raises:
        ValueError: The address has no host, or no port from 0 to 65535.
    """
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isascii() and port.isdecimal() and int(port) <= 65535):
        raise ValueError(f"{setting} is {address!r}: write host:port, a port up to 65535, such as 127.0.0.1:50051")
    return host, int(port)


def listening_address(address: str) -> str:
    """Return where to listen so that others can call this machine at `address`.

    If the host is a name, that is every address of this machine: /etc/hosts may map the machine's own name to loopback,
    and a name server may not know the name yet. An IP address and localhost stay as they are.
    """
    host, port = split_address(address)
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if host != "localhost":
            return f"{'[::]' if socket.has_dualstack_ipv6() else '0.0.0.0'}:{port}"
    return address


def check_free(address: str) -> None:
    """Bind to an address and free it again, because gRPC and JAX's service report a failure badly.

    Raises:
        OSError: This machine cannot listen there.
    """
    host, port = split_address(address)
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        # gRPC sets this option too: an address in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(target)


def is_bulk(message: Message | Command | Reply) -> bool:
    """Tell whether the message travels in the bulk lane, together with payloads."""
    return isinstance(message, BULK_TYPES)


def payload_parts(
    message: Message | Command | Reply, payload: Payload, allowed: tuple[type, ...], payload_bytes_max: int
) -> tuple[memoryview, ...]:
    """Check a message before it is sent, and return its payload as flat views of bytes.

    Raises:
        ValueError: The message is not one of `allowed`, must not have a payload, or has one above the limit.
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
