"""The network of an island's hosts over real sockets: who is let in, what arrives, and how an end is noticed."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from diloco_jax.transport import group
from diloco_jax.transport.group import GroupError, GroupLeader, GroupMember
from diloco_jax.transport.group_wire import HEAD_BYTES_MAX, GroupConfig, GroupItem, receive_exactly
from tests.transport.waiting import comes_true

pytestmark = pytest.mark.net
WAIT_S = 20.0
SECRET = bytes(range(32))
CONFIG = GroupConfig(heartbeat_s=0.05, connect_timeout_s=WAIT_S)
FRAME = struct.Struct("<BIQ")

MEMBER = """
import sys, time
from diloco_jax.transport.group import GroupMember
member = GroupMember(sys.argv[1], 1, 2, bytes(range(32)))
member.send({"pid": True})
time.sleep(60)
"""


def hear(side: GroupLeader | GroupMember) -> GroupItem:
    item = side.receive(WAIT_S)
    assert item is not None, "nothing came"
    return item


@contextlib.contextmanager
def leading(hosts: int = 3, **changes: Any) -> Iterator[GroupLeader]:
    leader = GroupLeader(hosts, "127.0.0.1:0", SECRET, config(**changes))
    try:
        yield leader
    finally:
        leader.close(1.0)


def config(**changes: Any) -> GroupConfig:
    return GroupConfig(**({"heartbeat_s": 0.05, "connect_timeout_s": WAIT_S} | changes))


def join(leader: GroupLeader, host: int = 1, hosts: int = 3, **changes: Any) -> GroupMember:
    member = GroupMember(leader.address, host, hosts, SECRET, config(**changes))
    assert hear(leader) == GroupItem("joined", host)
    return member


class Pipe:
    """A forwarder that can be told to carry nothing more, as a network that lost one side does."""

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._target = host, int(port)
        self.dead = threading.Event()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        near = self._listening.accept()[0]
        far = socket.create_connection(self._target)
        self._sockets += [near, far]
        for source, sink in ((near, far), (far, near)):
            threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if not self.dead.is_set():
                    sink.sendall(data)

    def close(self) -> None:
        for each in (self._listening, *self._sockets):
            each.close()


def introduce(leader: GroupLeader, host: int = 1, hosts: int = 3, secret: bytes = SECRET) -> socket.socket:
    """A host without our code that proves who it is."""
    name, port = leader.address.rsplit(":", 1)
    raw = socket.create_connection((name, int(port)), WAIT_S)
    theirs = bytes(receive_exactly(raw, 32))
    said = struct.pack("<II", host, hosts) + bytes(32)
    raw.sendall(said + group._prove(secret, b"member", theirs + said))
    return raw


def test_messages_go_both_ways_in_order_with_payloads() -> None:
    with leading() as leader:
        leader.send({"early": 1})  # before anybody is there
        members = [join(leader, host) for host in (1, 2)]
        leader.send({"to": 2}, b"only two", to=2)
        leader.send({"all": True}, [b"in ", memoryview(b"pieces")])
        assert [hear(members[0])[2:4] for _ in range(2)] == [({"early": 1}, b""), ({"all": True}, b"in pieces")]
        assert [bytes(hear(members[1]).payload) for _ in range(3)] == [b"", b"only two", b"in pieces"]
        large = bytes(range(256)) * 40_000
        for number in range(3):
            members[1].send({"n": number}, large)
        for number in range(3):
            assert hear(leader) == GroupItem("message", 2, {"n": number}, memoryview(large))
        assert leader.receive(0) is None and members[0].receive(0) is None
        for member in members:
            member.close(WAIT_S)
        assert {hear(leader)[:2] for _ in range(2)} == {("left", 1), ("left", 2)}


def test_one_that_closes_is_said_to_have_left_after_its_last_words() -> None:
    with leading() as leader:
        first, second = join(leader, 1), join(leader, 2)
        first.send({"last": 1}, bytes(5_000_000))
        first.close(WAIT_S)
        assert hear(leader).head == {"last": 1}
        assert hear(leader) == GroupItem("left", 1, reason="the host closed")
        leader.send({"still": "here"})  # nobody is host 1 any more
        assert hear(second).head == {"still": "here"}
        leader.close(WAIT_S)
        assert hear(second) == GroupItem("left", 0, reason="the leader closed")
        second.send({"nobody": "hears"})
        second.close(1.0)
        assert second.receive(0) is None and leader.receive(0) is None


def test_silence_is_a_loss_on_both_sides_once() -> None:
    with leading(silence_s=0.5) as leader:
        pipe = Pipe(leader.address)
        member = GroupMember(pipe.address, 1, 3, SECRET, config(silence_s=0.5))
        assert hear(leader).kind == "joined"
        member.send({"n": 1})
        assert hear(leader).head == {"n": 1}
        pipe.dead.set()
        for side, host in ((leader, 1), (member, 0)):
            assert hear(side) == GroupItem("lost", host, reason="nothing came from it for 0.5 s")
        leader.send({"n": 2})
        assert leader.receive(0) is None and member.receive(0) is None
        member.close(0.1)
        pipe.close()


def test_heartbeats_keep_an_idle_group_together() -> None:
    with leading(silence_s=0.5) as leader:
        member = join(leader, silence_s=0.5)
        assert leader.receive(1.2) is None and member.receive(0) is None
        member.close(1.0)


def test_killed_process_is_noticed() -> None:
    with leading(2) as leader:
        process = subprocess.Popen([sys.executable, "-c", MEMBER, leader.address])
        assert [hear(leader).kind for _ in range(2)] == ["joined", "message"]
        process.kill()
        process.wait()
        item = hear(leader)
        assert item.kind == "lost" and item.host == 1 and "its connection broke" in item.reason


def test_wrong_secret_gets_nowhere_on_either_side() -> None:
    with leading() as leader:
        with pytest.raises(
            GroupError, match="check that it runs, its address, and that all hosts have the same secret"
        ):
            GroupMember(leader.address, 1, 3, bytes(32), config(connect_timeout_s=0.5))
        assert leader.receive(0) is None
        join(leader).close(1.0)
    raw = socket.create_server(("127.0.0.1", 0))

    def pose() -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                with raw.accept()[0] as connection:
                    connection.sendall(bytes(32))
                    receive_exactly(connection, 72)
                    connection.sendall(bytes(32) + b"\0\0")

    threading.Thread(target=pose, daemon=True).start()
    with pytest.raises(GroupError, match="who answered does not know the island's secret"):
        GroupMember(f"127.0.0.1:{raw.getsockname()[1]}", 1, 3, SECRET, config(connect_timeout_s=0.5))
    raw.shutdown(socket.SHUT_RDWR)
    raw.close()


def test_proof_of_one_connection_or_of_the_leader_is_none_for_another() -> None:
    with leading() as leader:
        name, port = leader.address.rsplit(":", 1)
        good = introduce(leader)
        receive_exactly(good, 34)
        assert hear(leader).kind == "joined"
        for role, nonce in ((b"member", bytes(32)), (b"leader", None)):
            raw = socket.create_connection((name, int(port)), WAIT_S)
            theirs = bytes(receive_exactly(raw, 32))
            said = struct.pack("<II", 2, 3) + bytes(32)
            raw.sendall(said + group._prove(SECRET, role, (nonce or theirs) + said))
            assert raw.recv(1) == b"", "the leader says nothing to who does not know the secret"
            raw.close()
        good.close()


def test_a_host_joins_once_and_must_fit() -> None:
    with leading() as leader:
        member = join(leader)
        for host, hosts, words in ((1, 3, "host 1 joined before"), (3, 4, "host 3 says 4 hosts, the leader 3")):
            with pytest.raises(GroupError, match=f"refused this host: {words}"):
                GroupMember(leader.address, host, hosts, SECRET, CONFIG)
        member.close(1.0)
        assert hear(leader).kind == "left"
        with pytest.raises(GroupError, match="host 1 joined before"):
            GroupMember(leader.address, 1, 3, SECRET, CONFIG)


def test_member_that_starts_first_waits_for_its_leader() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    found: list[GroupMember] = []
    thread = threading.Thread(target=lambda: found.append(GroupMember(address, 1, 2, SECRET, CONFIG)))
    thread.start()
    leader = GroupLeader(2, address, SECRET, CONFIG)
    assert hear(leader).kind == "joined"
    thread.join(WAIT_S)
    leader.close(1.0)
    found[0].close(1.0)


def test_nobody_answers_names_address_time_and_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(GroupError, match=rf"{address} cannot be reached within 0\.3 s .*refused.*: check that it runs"):
        GroupMember(address, 1, 2, SECRET, config(connect_timeout_s=0.3))


BAD_FRAMES = {
    "head too large": (FRAME.pack(1, HEAD_BYTES_MAX + 1, 0), f"the limits are {HEAD_BYTES_MAX} and 1000"),
    "payload too large": (FRAME.pack(1, 2, 1001) + b"{}", "raise payload_bytes_max on all hosts"),
    "no such kind": (FRAME.pack(9, 0, 0), "a frame of kind 9"),
    "heartbeat with bytes": (FRAME.pack(0, 2, 0) + b"{}", "a frame of kind 0"),
    "no JSON": (FRAME.pack(1, 2, 0) + b"{]", "it sent what cannot be used"),
    "no object": (FRAME.pack(1, 2, 0) + b"[]", "no JSON object but a list"),
    "no text": (FRAME.pack(1, 2, 0) + b"\xff\xff", "it sent what cannot be used"),
    "deep": (FRAME.pack(1, 200_000, 0) + b"[" * 200_000, "it sent what cannot be used"),
    "cut off": (FRAME.pack(1, 20, 0) + b"{", "ended it without a goodbye"),
}


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_what_breaks_the_rules_is_a_loss_with_the_reason(name: str) -> None:
    raw, words = BAD_FRAMES[name]
    with leading(payload_bytes_max=1000) as leader:
        peer = introduce(leader)
        peer.sendall(raw)
        with contextlib.suppress(OSError):  # the leader may have ended it by now
            peer.shutdown(socket.SHUT_WR)
        assert hear(leader).kind == "joined"
        item = hear(leader)
        assert item.kind == "lost" and words in item.reason
        peer.close()


def test_host_that_takes_nothing_is_lost_when_its_queue_is_full() -> None:
    with leading(2, queue_messages_max=3) as leader:
        for _ in range(3):
            leader.send({}, b"x")
        assert leader.receive(0) is None
        leader.send({}, b"x")
        assert "3 messages wait" in hear(leader).reason
        with pytest.raises(GroupError, match="joined before"):
            GroupMember(leader.address, 1, 2, SECRET, CONFIG)
    with leading(2, queue_bytes_max=100) as leader:
        leader.send({}, bytes(200))  # alone it always fits
        leader.send({}, bytes(200))
        assert "1 messages wait" in hear(leader).reason


def test_host_that_stops_reading_is_lost() -> None:
    with leading(2, silence_s=0.5) as leader:
        peer = introduce(leader, hosts=2)
        assert hear(leader).kind == "joined"
        leader.send({}, bytes(50_000_000))
        over = threading.Event()

        def beat() -> None:
            with contextlib.suppress(OSError):
                while not over.wait(0.05):
                    peer.sendall(FRAME.pack(0, 0, 0))

        threading.Thread(target=beat, daemon=True).start()
        assert hear(leader).reason == "it took nothing for 0.5 s"
        over.set()
        peer.close()


def test_messages_that_nobody_reads_are_bounded_and_none_is_dropped() -> None:
    with leading(2, queue_messages_max=4) as leader:
        member = join(leader, hosts=2)
        for number in range(4):
            member.send({"n": number})
        assert comes_true(lambda: leader._others[1].unread == 4)
        for number in range(4, 7):
            member.send({"n": number})
        assert not comes_true(lambda: leader._others[1].unread > 4, within_s=0.2)
        assert [hear(leader).head["n"] for _ in range(7)] == list(range(7))
        member.close(1.0)


def test_what_can_never_be_sent_is_the_callers_error() -> None:
    with leading(payload_bytes_max=10) as leader:
        with pytest.raises(ValueError, match="a payload of 11, the limits are 1048576 and 10"):
            leader.send({}, bytes(11))
        with pytest.raises(ValueError, match="a head of"):
            leader.send({"x": "y" * HEAD_BYTES_MAX})
        with pytest.raises(ValueError, match="cannot be sent: Object of type bytes"):
            leader.send({"x": b"y"})
        with pytest.raises(ValueError, match="there is no host 3 to send to: this island has 1 to 2"):
            leader.send({}, to=3)
        assert json.dumps({}) == "{}" and leader.receive(0) is None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GroupLeader(2, "127.0.0.1:0", b"short"), "secret has 5 bytes: use 32"),
        (lambda: GroupLeader(2, "127.0.0.1", SECRET), "write host:port"),
        (lambda: GroupLeader(2, "192.0.2.1:1", SECRET), "cannot listen at 192.0.2.1:1"),
        (
            lambda: GroupMember("127.0.0.1:1", 0, 2, SECRET),
            "host 0 of an island of 2 cannot dial its leader: use 1 to 1",
        ),
        (lambda: GroupConfig(silence_s=1.0), "not above heartbeat_s"),
        (lambda: GroupConfig(queue_bytes_max=0), "use at least 1"),
        (lambda: GroupConfig(heartbeat_s=float("nan")), "use a number of seconds above 0"),
    ],
)
def test_settings_that_cannot_be_used_are_named(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
