"""The network of one island of several hosts: the leader, host 0, serves the other hosts.

Hosts that pass on blocks serve other hosts in the same way (direct.py).

The settings of the syncer's connections protect it too (docs/security.md), with the island's certificate on both
sides. Every other host has one session with the leader. All its messages travel on one bulk connection, so that
commands and payloads keep their order; the control call only opens the session. A host that is silent for SILENCE_S is
lost. A host that was lost or left does not return, because the whole island fails and starts again.
"""

import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import grpc

from diloco_jax.transport.commands import COMMANDS, REPLIES, Command, Reply
from diloco_jax.transport.link import (
    LinkClosed,
    Payload,
    TransportConfig,
    TransportError,
    listening_address,
    payload_parts,
    split_address,
)
from diloco_jax.transport.partials import Partials
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.session import calls
from diloco_jax.transport.session.dialled import DialledStreams
from diloco_jax.transport.session.entrance import Entrance
from diloco_jax.transport.session.inbox import Inbox
from diloco_jax.transport.session.sessions import Refused
from diloco_jax.transport.session.stream import StreamSession
from diloco_jax.transport.trust.security import BulkContexts, Gate, bulk_context, credentials, island_host

LEADER = 0
# A host that sends nothing for this long is lost.
SILENCE_S = 20.0
# A host tries to reach its leader for this long.
CONNECT_S = 60.0
# Large enough for the largest leaf of a state.
PAYLOAD_BYTES_MAX = 1 << 36
# Limit of the messages that wait for one host, in each direction.
COMMANDS_MAX = 1024
# Limit of the calls by processes other than the hosts.
STRANGERS_MAX = 64


class GroupError(TransportError):
    """The leader cannot be reached, or refuses this host."""


class GroupItem(NamedTuple):
    """A message of another host, or the end of its session."""

    host: int  # sender; 0 leads
    # None if the host left or was lost; it sends nothing more.
    message: Command | Reply | None
    payload: bytes | memoryview = b""
    # Why the host's session ended.
    reason: str = ""


def group_config(config: TransportConfig, address: str) -> TransportConfig:
    """Return the settings of an island's network: the files and permissions of the run, with separate limits."""
    return replace(
        config,
        address=address,
        stripes=1,
        payload_bytes_max=PAYLOAD_BYTES_MAX,
        queue_payloads_max=COMMANDS_MAX,
        connect_timeout_s=CONNECT_S,
        keepalive_s=SILENCE_S / 4,
        keepalive_timeout_s=3 * SILENCE_S / 4,
    )


class GroupLeader:
    """The leader's side: a listener with one session per other host.

    Args:
        config: Settings from `group_config`, with the address where other hosts reach this one; port 0 lets the system
            choose one. `listening_address` says where it listens.
        host: Number of this host.

    Attributes:
        address: Address for members, with the real port.
        number: Random number of this group; members of an earlier group are refused.

    Raises:
        ValueError: The leader cannot listen on the address, the address is not loopback while plaintext was not
            allowed, or certificate, key or token cannot be used.
    """

    def __init__(self, config: TransportConfig, run_id: str, learner_id: str, hosts: int, host: int = LEADER) -> None:
        config = replace(config, connections_max=hosts + STRANGERS_MAX)
        own = credentials(config, learner_id, server=island_host(learner_id))
        calls.keep_freed_memory()
        self._gate = Gate(encrypted=config.encrypted, token=own.token)
        self.number = secrets.randbits(62)
        header = partial(pb.Header, run_id=run_id, sender=learner_id, session=self.number, stripes=1, hosts=hosts)
        self._header = header()
        self._inbox = Inbox()
        self._others: dict[int, StreamSession] = {}
        for other in sorted({*range(hosts)} - {host}):
            self._others[other] = _new_session(self._inbox, header(host=other), config, REPLIES, f"host {other}")
        handlers = {calls.FOLLOW: grpc.stream_stream_rpc_method_handler(self._serve)}
        listens = replace(config, address=listening_address(config.address))
        self._entrance = Entrance(listens, own, self._gate, BulkContexts(config, learner_id, island_host(learner_id)))
        _, port = split_address(self._entrance.open(calls.ISLAND_SERVICE, handlers))
        self.address = f"{config.address.rpartition(':')[0]}:{port}"

    def send(self, command: Command, payload: Payload = b"", to: int | None = None) -> None:
        """Queue a command to one host, or to all other hosts, in order; never blocks, and any thread may call it.

        A host that has not joined yet gets the command when it joins. A host that is lost or left gets nothing, and a
        host with a full queue is lost.

        Args:
            payload: Shared, not copied: the caller must not change it afterwards.

        Raises:
            ValueError: Command or payload can never be sent, or there is no such host.
        """
        if to is not None and to not in self._others:
            raise ValueError(f"there is no other host {to}: this island has {1 + len(self._others)} hosts")
        for host in self._others if to is None else (to,):
            _send(self._others[host], command, payload, COMMANDS)

    def receive(self, timeout_s: float) -> GroupItem | None:
        """Return the next item of any host, or None after `timeout_s` seconds; 0 does not wait."""
        return _receive(self._inbox, timeout_s)

    def close(self, grace_s: float = 5.0) -> None:
        """Send what is queued for at most `grace_s` seconds, then end all sessions; safe to call again."""
        self._entrance.close(list(self._others.values()), "the leader closed", grace_s)

    def _serve(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """Serve the control call of one host."""
        with calls.refusing(context):
            session = self._admit(context)
        yield from self._entrance.serve(session, requests, context)

    def _admit(self, context: Any) -> StreamSession:
        """Check the caller's credentials before everything else, then return its session.

        Raises:
            Denied: The caller does not belong to this island.
            Refused: The caller does not belong to this group, or has joined before.
        """
        metadata = dict(context.invocation_metadata())
        self._gate.check(metadata)
        self._gate.check_speaks_for(self._header.sender, context.auth_context())
        header = calls.read_header(metadata)
        ours = self._header
        if (header.run_id, header.sender, header.session) != (ours.run_id, ours.sender, ours.session):
            raise Refused(f"host {header.host} is of another island, or of an earlier start of this one")
        if header.lane != pb.LANE_CONTROL:
            raise Refused(f"host {header.host} is of another release: start all hosts of an island with one release")
        if header.hosts != ours.hosts:
            raise Refused(f"host {header.host} states {header.hosts} hosts, this host {ours.hosts}")
        session = self._others.get(header.host)
        if session is None or not session.bind(session.control, context.cancel) or not session.open:
            raise Refused(f"host {header.host} joined before, or is none of the {ours.hosts} hosts of this island")
        return session


class GroupMember:
    """A connection that a host dials, to the leader or to another host, for at most `config.connect_timeout_s`.

    Args:
        config: Settings from `group_config`, with the other host's address.
        host: Number of this host.
        number: Random number of the other host's group.
        server: Number of the other host.

    Raises:
        GroupError: Nobody answered in time, or the other host refused.
        ValueError: There is no such host, the address is not loopback while plaintext was not allowed, or certificate,
            key or token cannot be used.
    """

    def __init__(
        self,
        config: TransportConfig,
        run_id: str,
        learner_id: str,
        host: int,
        hosts: int,
        number: int,
        server: int = LEADER,
    ) -> None:
        if not 0 <= host < hosts or host == server:
            raise ValueError(f"host {host} of an island of {hosts} cannot dial host {server}: use another number")
        whom = "the leader" if server == LEADER else f"host {server}"
        name = island_host(learner_id)
        own, context = credentials(config, learner_id, server=name), bulk_context(config, learner_id)
        calls.keep_freed_memory()
        header = pb.Header(run_id=run_id, sender=learner_id, session=number, stripes=1, host=host, hosts=hosts)
        self._inbox = Inbox()
        self._server = server
        self._session = session = _new_session(self._inbox, header, config, COMMANDS, whom)
        self._streams = DialledStreams(session, own, f"/{calls.ISLAND_SERVICE}/{calls.FOLLOW}", context, name)
        if not session.wait_ready(config.connect_timeout_s):
            answered, reason = not session.open, session.reason
            session.fail("not connected")
            session.cancel()
            self._streams.close("not connected", 1.0)
            if answered:
                raise GroupError(f"{whom} of this island at {config.address} refused this host: {reason}")
            raise GroupError(
                f"{whom} of this island at {config.address} cannot be reached within "
                f"{config.connect_timeout_s:g} s: check that it runs, its address, and that all hosts have the same "
                "certificates"
            )

    def send(self, reply: Reply, payload: Payload = b"") -> None:
        """Queue a message to the other host; never blocks. Raises as `GroupLeader.send`."""
        _send(self._session, reply, payload, REPLIES)

    def receive(self, timeout_s: float) -> GroupItem | None:
        """Return the next item of the other host, or None after `timeout_s` seconds; 0 does not wait."""
        item = _receive(self._inbox, timeout_s)
        return None if item is None else item._replace(host=self._server)

    def close(self, grace_s: float = 5.0) -> None:
        """Send what is queued for at most `grace_s` seconds, then end the session; safe to call again."""
        self._streams.close("the host closed", grace_s)


def _new_session(
    inbox: Inbox, header: pb.Header, config: TransportConfig, readable: tuple[type, ...], name: str
) -> StreamSession:
    """Return one end of a session that keeps no incomplete payload, because a lost host restarts the whole island."""
    sender, nothing = header.sender, Partials(0, config.resume_s)
    session = StreamSession(inbox, header, sender, sender, config, nothing, readable, name=name)
    session.announced = True
    return session


def _send(session: StreamSession, message: Command | Reply, payload: Payload, allowed: tuple[type, ...]) -> None:
    parts = payload_parts(message, payload, allowed, session.config.payload_bytes_max)
    # The inbox delivers the end of the session.
    with contextlib.suppress(LinkClosed):
        session.send(message, parts)


def _receive(inbox: Inbox, timeout_s: float) -> GroupItem | None:
    item = inbox.get(timeout_s)
    if item is None:
        return None
    session, delivery = item
    return GroupItem(session.host, cast(Command | Reply | None, delivery.message), delivery.payload, delivery.reason)
