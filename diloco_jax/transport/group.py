"""The network of one island of several hosts: its leader, host 0, and the others, over plain TCP.

It is for the private network between the hosts of one slice. Both sides prove that they know the island's secret before
anything else that they say is read; what they say then is neither encrypted nor signed. Nothing that comes in is ever
executed: a frame is a JSON object and raw bytes.

Who is silent for `silence_s`, or does not take what it is sent for as long, is lost. A host that is lost or has left
does not come back: the island is what fails, and starts again.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Mapping
from typing import Any

from diloco_jax.transport.group_wire import Connection, GroupConfig, GroupInbox, GroupItem, Outgoing, receive_exactly
from diloco_jax.transport.link import Payload, split_address

LEADER = 0
SECRET_BYTES = 32
HANDSHAKE_S = 10.0
STRANGERS_MAX = 64  # connections that have not proved yet who they are
RETRY_S = 0.2
_CLAIM = struct.Struct("<II")  # host, hosts
_VERDICT = struct.Struct("<H")  # bytes of the reason why the host is not taken, which follows; 0: it is
_NONCE_BYTES = _PROOF_BYTES = 32

log = logging.getLogger(__name__)


class GroupError(ConnectionError):
    """The leader cannot be reached, or does not take this host."""


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
        self._config = GroupConfig() if config is None else config
        self._secret = _checked_secret(secret)
        self._hosts = hosts
        self._inbox = GroupInbox()
        self._others = {host: Connection(host, self._config, self._inbox) for host in range(1, hosts)}
        self._strangers = threading.Semaphore(STRANGERS_MAX)
        self._meeting = threading.Lock()
        self._closed = False
        name, port = _split(address)
        try:
            family = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0][0]
            self._socket = socket.create_server((name, port), family=family, backlog=max(hosts, STRANGERS_MAX))
        except OSError as error:
            raise ValueError(
                f"cannot listen at {address} for the hosts of this island ({error}): use an address of this machine, "
                "and a port that is free (0: any)"
            ) from None
        self._address = f"{address.rpartition(':')[0]}:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, name="diloco-group-accept", daemon=True).start()

    @property
    def address(self) -> str:
        """Where members dial, with the real port."""
        return self._address

    def send(self, head: Mapping[str, Any], payload: Payload = b"", to: int | None = None) -> None:
        """Queue a message to one host, or to all others, in order; never blocks. Any thread.

        A host that has not joined yet gets it when it does. One that is lost or left gets nothing; a host whose queue
        is full is lost.

        Args:
            head: what JSON can say, at most HEAD_BYTES_MAX bytes of it.
            payload: shared, not copied: nobody may change it any more.
            to: the host, or None for all.

        Raises:
            ValueError: head or payload can never be sent, or there is no such host.
        """
        if to is not None and to not in self._others:
            raise ValueError(f"there is no host {to} to send to: this island has 1 to {self._hosts - 1}")
        item = Outgoing.of(head, payload, self._config)
        for host in self._others if to is None else (to,):
            self._others[host].send(item)

    def receive(self, timeout_s: float) -> GroupItem | None:
        """The next item of any host, or None after `timeout_s` seconds; 0 only looks."""
        return self._inbox.get(timeout_s)

    def close(self, grace_s: float = 5.0) -> None:
        """Send what is queued for at most `grace_s` seconds, tell all hosts, and end; safe to call again."""
        until_s = time.monotonic() + grace_s
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._socket.close()
        for each in self._others.values():
            each.retire("the leader closed")
        for each in self._others.values():
            each.wait_over(until_s)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if not self._closed:
                    log.warning(f"a host of this island could not be accepted: {error}")
                    time.sleep(RETRY_S)  # such as too many open files
                continue
            if self._strangers.acquire(blocking=False):
                threading.Thread(target=self._meet, args=(connection,), name="diloco-group-meet", daemon=True).start()
            else:
                connection.close()

    def _meet(self, connection: socket.socket) -> None:
        """Find out who dialled, and take it if it belongs here."""
        try:
            connection.settimeout(HANDSHAKE_S)
            host, wrong = self._identify(connection)
            with self._meeting:
                other = self._others.get(host)
                if not wrong and (other is None or not other.fresh):
                    wrong = f"host {host} joined before, or is none of the {self._hosts} hosts of this island"
                raw = wrong.encode()
                connection.sendall(_VERDICT.pack(len(raw)) + raw)
                if wrong or other is None or not other.start(connection, announce=True):
                    raise GroupError(wrong or "the leader is closing")
        except (OSError, EOFError) as error:
            log.warning(f"somebody who dialled this island's leader was turned away: {error}")
            connection.close()
        finally:
            self._strangers.release()

    def _identify(self, connection: socket.socket) -> tuple[int, str]:
        """Which host it is, and what is wrong with it.

        Raises:
            GroupError: it does not know the secret.
        """
        ours = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(ours)
        answer = bytes(receive_exactly(connection, _CLAIM.size + _NONCE_BYTES + _PROOF_BYTES))
        said, proof = ours + answer[:-_PROOF_BYTES], answer[-_PROOF_BYTES:]
        if not hmac.compare_digest(proof, _prove(self._secret, b"member", said)):
            raise GroupError("it does not know the island's secret")
        connection.sendall(_prove(self._secret, b"leader", said))
        host, hosts = _CLAIM.unpack_from(answer)
        return host, "" if hosts == self._hosts else f"host {host} says {hosts} hosts, the leader {self._hosts}"


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
        self._config = GroupConfig() if config is None else config
        self._secret = _checked_secret(secret)
        if not 1 <= host < hosts:
            raise ValueError(f"host {host} of an island of {hosts} cannot dial its leader: use 1 to {hosts - 1}")
        self._inbox = GroupInbox()
        self._leader = Connection(LEADER, self._config, self._inbox)
        connection = self._dial(_split(address), _CLAIM.pack(host, hosts))
        self._leader.start(connection)

    def send(self, head: Mapping[str, Any], payload: Payload = b"") -> None:
        """Queue a message to the leader; never blocks. See GroupLeader.send."""
        self._leader.send(Outgoing.of(head, payload, self._config))

    def receive(self, timeout_s: float) -> GroupItem | None:
        """The next item of the leader, or None after `timeout_s` seconds; 0 only looks."""
        return self._inbox.get(timeout_s)

    def close(self, grace_s: float = 5.0) -> None:
        """Send what is queued for at most `grace_s` seconds, tell the leader, and end; safe to call again."""
        until_s = time.monotonic() + grace_s
        self._leader.retire("the host closed")
        self._leader.wait_over(until_s)

    def _dial(self, target: tuple[str, int], claim: bytes) -> socket.socket:
        until_s = time.monotonic() + self._config.connect_timeout_s
        while True:
            left_s = max(RETRY_S, min(HANDSHAKE_S, until_s - time.monotonic()))
            connection = None
            try:
                connection = socket.create_connection(target, left_s)
                refusal = self._introduce(connection, claim)
            except (OSError, EOFError) as error:
                if connection is not None:
                    connection.close()
                if time.monotonic() + RETRY_S >= until_s:
                    raise GroupError(
                        f"the leader of this island at {target[0]}:{target[1]} cannot be reached within "
                        f"{self._config.connect_timeout_s:g} s ({str(error) or type(error).__name__}): check that it "
                        "runs, its address, and that all hosts have the same secret"
                    ) from None
                time.sleep(RETRY_S)
                continue
            if refusal:
                connection.close()
                raise GroupError(f"the leader of this island at {target[0]}:{target[1]} refused this host: {refusal}")
            return connection

    def _introduce(self, connection: socket.socket, claim: bytes) -> str:
        """Return why the leader does not take this host; "" if it does."""
        theirs = bytes(receive_exactly(connection, _NONCE_BYTES))
        answer = claim + secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(answer + _prove(self._secret, b"member", theirs + answer))
        proof = bytes(receive_exactly(connection, _PROOF_BYTES))
        if not hmac.compare_digest(proof, _prove(self._secret, b"leader", theirs + answer)):
            raise GroupError("who answered does not know the island's secret")
        (size,) = _VERDICT.unpack(receive_exactly(connection, _VERDICT.size))
        return bytes(receive_exactly(connection, size)).decode(errors="replace")


def _prove(secret: bytes, role: bytes, said: bytes) -> bytes:
    """Only who knows the secret can say this, and nobody can repeat it: both nonces are in `said`."""
    return hmac.digest(secret, b"diloco " + role + said, "sha256")


def _checked_secret(secret: bytes) -> bytes:
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"the island's secret has {len(secret)} bytes: use {SECRET_BYTES}, from secrets.token_bytes")
    return secret


def _split(address: str) -> tuple[str, int]:
    try:
        return split_address(address)
    except ValueError:
        raise ValueError(f"the address of the island's leader is {address!r}: write host:port") from None
