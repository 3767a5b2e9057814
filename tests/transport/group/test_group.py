"""The network of an island's hosts over real connections: who is let in, what arrives, and how an end is noticed."""

import contextlib
import random
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from diloco_jax.tools.chaos.relay import Relay
from diloco_jax.transport import wire
from diloco_jax.transport.commands import HostAnswer, HostEnd, HostHave, HostMeet, HostStep, HostWant
from diloco_jax.transport.group.group import GroupError, GroupItem, GroupLeader, GroupMember, group_config
from diloco_jax.transport.link import TransportConfig, split_address
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.session import calls
from diloco_jax.transport.trust import certificates
from tests.limits import HANGS_S
from tests.sockets import free_port
from tests.transport.ends import Ends, comes_true

pytestmark = pytest.mark.net
GONE = None


def config(address: str = "127.0.0.1:0", **changes: Any) -> TransportConfig:
    return replace(group_config(TransportConfig(), address), **{"connect_timeout_s": HANGS_S, **changes})


class Group:
    """A leader, and members that join it; all are closed at the end of the test."""

    def __init__(self, ends: Ends) -> None:
        self._ends = ends
        self.hosts = 3
        self.leader: GroupLeader

    def lead(self, hosts: int = 3, **changes: Any) -> GroupLeader:
        self.hosts = hosts
        self.leader = self._ends.keep(GroupLeader(config(**changes), "run", "island-0", hosts))
        return self.leader

    def join(self, host: int = 1, **changes: Any) -> GroupMember:
        names = {"run_id": "run", "learner_id": "island-0", "number": self.leader.number, "hosts": self.hosts}
        names |= {key: changes.pop(key) for key in list(changes) if key in names}
        own = config(**{"address": self.leader.address, **changes})
        return self._ends.keep(GroupMember(own, host=host, **names))


@pytest.fixture
def group(ends: Ends) -> Group:
    return Group(ends)


def hear(side: GroupLeader | GroupMember) -> GroupItem:
    item = side.receive(HANGS_S)
    assert item is not None, "nothing came"
    return item


def hear_loss(side: GroupLeader | GroupMember, host: int, words: str) -> None:
    item = hear(side)
    assert item[:2] == (host, GONE) and words in item.reason, item


def test_messages_go_both_ways_in_order_with_payloads(group: Group) -> None:
    leader = group.lead()
    # No member has joined yet.
    leader.send(HostMeet(5, (("seed", "0"),)))
    members = [group.join(host) for host in (1, 2)]
    leader.send(HostHave("only two"), b"only two", to=2)
    leader.send(HostStep(5))
    leader.send(HostHave("all"), [b"in ", memoryview(b"pieces")])
    meet = HostMeet(5, (("seed", "0"),))
    heard = [[(item.message, bytes(item.payload)) for item in map(hear, [member] * 3)] for member in members]
    assert heard[0] == [(meet, b""), (HostStep(5), b""), (HostHave("all"), b"in pieces")]
    assert heard[1] == [(meet, b""), (HostHave("only two"), b"only two"), (HostStep(5), b"")]
    assert hear(members[1]).payload == b"in pieces"
    large = bytes(range(256)) * 40_000
    for number in range(3):
        members[1].send(HostAnswer(number), large)
    for number in range(3):
        assert hear(leader) == GroupItem(2, HostAnswer(number), memoryview(large))
    assert leader.receive(0) is None and members[0].receive(0) is None
    for member in members:
        member.close(HANGS_S)
    assert {hear(leader)[:2] for _ in range(2)} == {(1, GONE), (2, GONE)}


def test_one_that_closes_is_said_to_have_left_after_its_last_words(group: Group) -> None:
    leader = group.lead()
    first, second = group.join(1), group.join(2)
    first.send(HostWant("last"), bytes(5_000_000))
    first.close(HANGS_S)
    assert hear(leader).message == HostWant("last")
    assert hear(leader) == GroupItem(1, GONE, reason="'host 1' ended the session: the host closed")
    # No member is host 1 any more.
    leader.send(HostStep(1))
    assert hear(second).message == HostStep(1)
    leader.close(HANGS_S)
    assert hear(second) == GroupItem(0, GONE, reason="'the leader' ended the session: the leader closed")
    second.send(HostWant("nobody hears"))
    second.close(1.0)
    assert second.receive(0) is None and leader.receive(0) is None


def test_silence_is_a_loss_on_both_sides_once(group: Group) -> None:
    short = {"keepalive_s": 0.3, "keepalive_timeout_s": 0.5}
    leader = group.lead(**short)
    with Relay(leader.address) as relay:
        member = group.join(address=relay.address, **short)
        member.send(HostWant("x"))
        assert hear(leader).message == HostWant("x")
        assert leader.receive(1.2) is None and member.receive(0) is None, "an idle group stays together"
        relay.change(hold=True)
        for side, host in ((leader, 1), (member, 0)):
            hear_loss(side, host, "connection to")
        leader.send(HostStep(1))
        assert leader.receive(0) is None and member.receive(0) is None
        member.close(0.1)


def test_a_host_joins_once_and_must_fit(group: Group) -> None:
    leader = group.lead()
    member = group.join()
    for changes, words in (
        ({}, "host 1 joined before"),
        ({"host": 3, "hosts": 4}, "host 3 states 4 hosts, this host 3"),
        ({"host": 2, "run_id": "other"}, "another island"),
        ({"host": 2, "learner_id": "island-1"}, "another island"),
        ({"host": 2, "number": 1}, "an earlier start"),
    ):
        with pytest.raises(GroupError, match=f"refused this host: .*{words}"):
            group.join(**changes)
    member.close(1.0)
    assert hear(leader).message is GONE
    with pytest.raises(GroupError, match="host 1 joined before"):
        group.join()


def test_a_host_of_an_older_release_is_refused_at_once(group: Group) -> None:
    """Check the call of release 0.3.0, whose hosts had all messages on one bulk lane in gRPC."""
    leader = group.lead()
    header = pb.Header(run_id="run", sender="island-0", session=leader.number, stripes=1, host=1, hosts=3)
    header.lane = pb.LANE_BULK
    with grpc.insecure_channel(leader.address) as channel:
        call = channel.stream_stream(f"/{calls.ISLAND_SERVICE}/{calls.FOLLOW}")
        with pytest.raises(grpc.RpcError, match="host 1 is of another release: start all hosts of an island with one"):
            list(call(iter([]), metadata=[calls.header_metadata(header)], timeout=HANGS_S))


def test_strangers_that_only_connect_leave_descriptors_for_the_host(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco_jax.transport.group.group.STRANGERS_MAX", 1)
    leader = group.lead(2)
    member = group.join()
    # Two connections for each of the host itself, the other one and the stranger; the other host has two of them.
    free = 2 * (2 + 1) - 2
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(split_address(leader.address))) for _ in range(20)]
        for stranger in strangers:
            stranger.setblocking(False)
        assert comes_true(lambda: sum(map(is_closed, strangers)) == len(strangers) - free)
        leader.send(HostStep(1))
        assert hear(member).message == HostStep(1)


def is_closed(stream: socket.socket) -> bool:
    """Tell whether the other side has closed a connection; it may have sent something before."""
    try:
        while stream.recv(1 << 12):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


def test_nobody_answers_names_address_time_and_remedy() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(GroupError, match=rf"{address} cannot be reached within 0\.3 s: check that it runs"):
        GroupMember(config(address, connect_timeout_s=0.3), "run", "island-0", 1, 2, 7)


@pytest.mark.parametrize(
    ("message", "payload", "words"),
    [
        (HostEnd(0), b"", "a HostEnd is not expected here"),
        # The member still sends when the leader has closed the connection.
        (HostWant("x"), bytes(1 << 25), "announces a payload of 33554432 bytes, the limit here is 1000"),
        (HostWant("x"), bytes(1001), "announces a payload of 1001 bytes, the limit here is 1000"),
    ],
)
def test_what_breaks_the_rules_is_a_loss_with_the_reason(
    group: Group, message: Any, payload: bytes, words: str
) -> None:
    leader = group.lead(payload_bytes_max=1000)
    member = group.join()
    member._session.send(message, (memoryview(payload),))
    for side, host in ((leader, 1), (member, 0)):
        hear_loss(side, host, words)


def test_host_that_takes_nothing_is_lost_when_its_queue_is_full(group: Group) -> None:
    leader = group.lead(2, queue_payloads_max=3)
    for _ in range(3):
        leader.send(HostHave("x"), b"x")
    assert leader.receive(0) is None
    leader.send(HostHave("x"), b"x")
    hear_loss(leader, 1, "the bulk queue to 'host 1' is full")
    with pytest.raises(GroupError, match="joined before"):
        group.join()


def test_messages_that_nobody_reads_are_bounded_and_none_is_dropped(group: Group) -> None:
    leader = group.lead(2, queue_payloads_max=4)
    member = group.join()
    for number in range(4):
        member.send(HostAnswer(number))
    assert comes_true(lambda: len(leader._inbox.waiting) == 4)
    for number in range(4, 7):
        member.send(HostAnswer(number))
    assert not comes_true(lambda: len(leader._inbox.waiting) > 4, within_s=0.2)
    assert [hear(leader).message for _ in range(7)] == [HostAnswer(number) for number in range(7)]


def test_what_can_never_be_sent_is_the_callers_error(group: Group) -> None:
    leader = group.lead(payload_bytes_max=10)
    for command, payload, to, words in (
        (HostHave("x"), bytes(11), None, "the payload of HostHave has 11 bytes, the limit is 10"),
        (HostHave("x" * 5000), b"", None, r"HostHave\.leaf has 5000 characters"),
        (HostWant("x"), b"", None, "cannot send a HostWant from this side"),
        (HostStep(1), b"", 3, "there is no other host 3: this island has 3 hosts"),
    ):
        with pytest.raises(ValueError, match=words):
            leader.send(command, payload, to)  # type: ignore[arg-type]
    assert leader.receive(0) is None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GroupLeader(config("192.0.2.1:1", allow_plaintext=True), "r", "a", 2), "cannot listen on .*192.0.2.1"),
        (lambda: GroupLeader(config("10.0.0.1:0"), "r", "a", 2), "is not loopback and nothing would be encrypted"),
        (lambda: GroupMember(config("10.0.0.1:5"), "r", "a", 1, 2, 7), "is not loopback"),
        (lambda: GroupMember(config(), "r", "a", 0, 2, 7), "host 0 of an island of 2 cannot dial host 0"),
    ],
)
def test_settings_that_cannot_be_used_are_named(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_a_leader_with_a_name_listens_at_all_addresses_of_its_machine(group: Group) -> None:
    """The name may lead to loopback on the leader's machine, and to another address on all others."""
    leader = group.lead(address="machine.invalid:0", allow_plaintext=True)
    name, port = leader.address.split(":")
    assert name == "machine.invalid"
    for host, address in ((1, "127.0.0.1"), (2, "127.0.0.2")):
        leader.send(HostStep(host), to=host)
        assert hear(group.join(host, address=f"{address}:{port}")).message == HostStep(host)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    certificates.make(folder, ["island-0", "island-1"])
    return folder


def test_hosts_of_an_island_know_each_other_by_its_certificate(
    group: Group, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted = certificates.settings(files)
    leader = group.lead(**trusted)
    other = trusted | {key: trusted[key].replace("{name}", "island-1") for key in ("tls_certificate", "tls_key")}
    with pytest.raises(ValueError, match="belongs to 'island-1', not to 'island-0'"):
        group.join(**other)
    with pytest.raises(GroupError, match="the token was not sent"):
        group.join(**(trusted | {"token_file": ""}))
    with pytest.raises(GroupError, match=r"cannot be reached within 0\.5 s: .* have the same certificates"):
        group.join(connect_timeout_s=0.5)  # plaintext
    # The link is plaintext, and the listener there is not island-1.
    with pytest.raises(GroupError, match="cannot be reached"):
        group.join(learner_id="island-1", connect_timeout_s=0.5, **trusted)
    member = group.join(**trusted)
    leader.send(HostHave("x"), bytes(3_000_000))
    assert len(hear(member).payload) == 3_000_000
    # A peer with other code may skip its checks.
    for check in ("check_owner", "check_serves"):
        monkeypatch.setattr(certificates, check, lambda *certificate: None)
    with pytest.raises(GroupError, match="the certificate is that of 'island-1'"):
        group.join(host=2, **other)


@pytest.mark.parametrize("encrypted", [False, True], ids=["plaintext", "tls"])
def test_messages_travel_on_the_bulk_connection_and_a_damaged_one_is_not_delivered(
    group: Group, files: Path, monkeypatch: pytest.MonkeyPatch, encrypted: bool
) -> None:
    control = list[bytes]()
    right = wire.Reader.read

    def read(self: wire.Reader, raw: bytes) -> Any:
        control.append(raw)
        return right(self, raw)

    monkeypatch.setattr(wire.Reader, "read", read)
    trusted = certificates.settings(files) if encrypted else {}
    payload = random.Random(0).randbytes(3_000_000)
    leader = group.lead(2, **trusted)
    with Relay(leader.address) as relay:
        member = group.join(address=relay.address, **trusted)
        leader.send(HostHave("x"), payload)
        assert hear(member).payload == payload
        member.send(HostAnswer(1), payload)
        assert hear(leader).payload == payload
        # The leader's frame that opens the session is the only one.
        assert len(control) == 1 and len(control[0]) < 200
        relay.damage("up", flip_after=100_000)
        member.send(HostAnswer(2), payload)
        hear_loss(
            leader, 1, "BAD_RECORD_MAC" if encrypted else "corrupt chunk: its checksum differs at offset 0 of mess"
        )
        hear_loss(member, 0, "")
        assert leader.receive(0) is None and member.receive(0) is None


def test_a_certificate_that_cannot_serve_an_island_is_named(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "ISLAND_HOSTS", ".elsewhere")
    certificates.make(files, ["island-2"])
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"island-2\.pem lacks the DNS name 'island-2.island.diloco'"):
        GroupLeader(config(**certificates.settings(files)), "run", "island-2", 2)
