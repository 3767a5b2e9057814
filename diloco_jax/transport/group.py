"""The network of one island of several hosts: its leader, host 0, and the others, over plain TCP.

It is for the private network between the hosts of one slice. Both sides prove that they know the island's secret before
anything else that they say is read; what they say then is neither encrypted nor signed. Nothing that comes in is ever
executed: a frame is a JSON object and raw bytes.

Each connection has a thread that writes and one that reads. The writer sends a heartbeat when it has nothing else to
send. Who is silent for `silence_s`, or does not take what is sent for as long, is lost. A member that is lost or has
left does not come back: the island is what fails, and starts again.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from diloco_jax.transport.link import Payload

LEADER = 0
SECRET_BYTES = 32
HEAD_BYTES_MAX = 1 << 20
HANDSHAKE_S = 10.0
STRANGERS_MAX = 64  # connections that have not proved yet who they are
RETRY_S = 0.2
_PIECE_BYTES = 1 << 20  # of a payload that is written at once
_FRAME = struct.Struct("<BIQ")  # kind, bytes of the head, bytes of the payload
_CLAIM = struct.Struct("<II")  # host, hosts
_HEARTBEAT, _MESSAGE, _GOODBYE = range(3)


class GroupError(ConnectionError):
    """The leader cannot be reached, or does not take this host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """How the hosts of an island talk to each other; the same on all of them."""

    payload_bytes_max: int = 1 << 30
    """Largest payload in bytes, sent or received; a larger one is refused before memory is taken for it."""
    queue_messages_max: int = 1024
    """Messages that may wait for one host, and received ones that wait for the driver. Of those that are to be sent, one
    more means that the host is lost."""
    queue_bytes_max: int = 2 << 30
    """The same for the bytes of their payloads."""
    heartbeat_s: float = 1.0
    """Seconds without anything to send after which a heartbeat is."""
    silence_s: float = 20.0
    """Seconds without a byte from a host, or without its taking one, after which it is lost."""
    connect_timeout_s: float = 60.0
    """Seconds for which a host tries to reach its leader."""

    def __post_init__(self) -> None:
        for name in ("heartbeat_s", "silence_s", "connect_timeout_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"group {name} is {value}: use a number of seconds above 0")
        for name in ("payload_bytes_max", "queue_messages_max", "queue_bytes_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"group {name} is {getattr(self, name)}: use at least 1")
        if self.silence_s <= self.heartbeat_s:
            raise ValueError(
                f"group silence_s is {self.silence_s}, not above heartbeat_s {self.heartbeat_s}: use several of them"
            )


class GroupItem(NamedTuple):
    """What `receive` returns.

    Attributes:
        kind: "joined": the host is there now (the leader's side only). "message": it said something. "left": it closed
            its side. "lost": its connection broke, it was silent, or it did not take what it was sent. After "left" and
            "lost" nothing more comes of it.
        host: which one; LEADER on the side of a member.
        head: of a message.
        payload: of a message.
        reason: why it left or was lost.
    """

    kind: Literal["joined", "message", "left", "lost"]
    host: int
    head: Mapping[str, Any] = {}
    payload: memoryview = memoryview(b"")
    reason: str = ""


class GroupLeader:
    """The leader's side: listens, and has one connection to each other host.

    Args:
        hosts: number of hosts of the island with the leader, at least 1.
        address: host:port to listen at; port 0 lets the system choose one.
        secret: of the island, SECRET_BYTES bytes.
        config: the same for all hosts.

    Raises:
        ValueError: the address cannot be listened at, or the secret has another length.
    """

    def __init__(self, hosts: int, address: str, secret: bytes, config: GroupConfig | None = None) -> None:
        raise NotImplementedError

    @property
    def address(self) -> str:
        """Where members dial, with the real port."""
        raise NotImplementedError

    def send(self, head: Mapping[str, Any], payload: Payload = b"", to: int | None = None) -> None:
        """Queue a message to one host, or to all others, in order; never blocks. Any thread.

        A host that has not joined yet gets it when it does. One that is lost or left gets nothing; a host whose queue is
        full is lost.

        Args:
            head: what JSON can say, at most HEAD_BYTES_MAX bytes of it.
            payload: shared, not copied: nobody may change it any more.
            to: the host, or None for all.

        Raises:
            ValueError: head or payload can never be sent, or there is no such host.
        """
        raise NotImplementedError

    def receive(self, timeout_s: float) -> GroupItem | None:
        """The next item of any host, or None after `timeout_s` seconds; 0 only looks."""
        raise NotImplementedError

    def close(self, grace_s: float = 5.0) -> None:
        """Send what is queued for at most `grace_s` seconds, tell all hosts, and end; safe to call again."""
        raise NotImplementedError


class GroupMember:
    """The side of a host that is not the leader: dials it, for at most `config.connect_timeout_s`.

    Args:
        address: host:port of the leader.
        host: which one we are, 1 or more.
        hosts: number of hosts of the island with the leader.
        secret: of the island, SECRET_BYTES bytes.
        config: the same for all hosts.

    Raises:
        GroupError: nobody answered in time, or the leader refused, or does not know the secret.
        ValueError: address, host or secret cannot be used.
    """

    def __init__(self, address: str, host: int, hosts: int, secret: bytes, config: GroupConfig | None = None) -> None:
        raise NotImplementedError

    def send(self, head: Mapping[str, Any], payload: Payload = b"") -> None:
        """Queue a message to the leader; never blocks. See GroupLeader.send."""
        raise NotImplementedError

    def receive(self, timeout_s: float) -> GroupItem | None:
        """The next item of the leader, or None after `timeout_s` seconds; 0 only looks."""
        raise NotImplementedError

    def close(self, grace_s: float = 5.0) -> None:
        """Send what is queued for at most `grace_s` seconds, tell the leader, and end; safe to call again."""
        raise NotImplementedError
