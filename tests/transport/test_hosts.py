"""Islands of several hosts: which of them form one, and how payloads become whole."""

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from diloco_jax.protocol.messages import (
    Advance,
    AnchorValue,
    CutFragment,
    FragmentValue,
    GlobalFragment,
    Heartbeat,
    Hello,
    HostBlocks,
)
from diloco_jax.transport import link
from diloco_jax.transport.endpoints import grpc_link
from diloco_jax.transport.endpoints.dialler import Dialler
from diloco_jax.transport.endpoints.grpc_link import GrpcLink, GrpcListener
from diloco_jax.transport.link import Rejected, TransportError
from diloco_jax.transport.trust import certificates
from tests.fuzz.inputs import parts_of
from tests.limits import HANGS_S
from tests.transport.ends import Ends, comes_true, greet, hear, hear_end, hear_message, value

pytestmark = pytest.mark.net


def island(ends: Ends, hosts: int = 3, **changes: str) -> list[GrpcLink]:
    """The links of all hosts, the leader's first."""
    leader = ends.connect(hosts=hosts, stripes=1, **changes)
    return [leader, *(join(ends, leader, host, hosts, **changes) for host in range(1, hosts))]


def join(ends: Ends, leader: GrpcLink, host: int, hosts: int = 3, **changes: str) -> GrpcLink:
    return ends.connect(number=leader.number, host=host, hosts=hosts, stripes=1, **changes)


def send_parts(links: list[GrpcLink], whole: bytes) -> None:
    for each, part in zip(links, parts_of(whole, len(links)), strict=True):
        each.send(value(), part)


def test_values_of_all_hosts_are_one_and_answers_go_to_the_leader(ends: Ends, listener: GrpcListener) -> None:
    leader, *others = island(ends)
    whole = np.random.default_rng(1).bytes(3_000_017)
    greet(listener, leader)
    send_parts([leader, *others], whole)
    delivery = hear(listener)
    assert (delivery.peer, delivery.session) == ("a", leader.number)
    assert delivery.message == value(1, len(whole)) and delivery.payload == whole
    assert listener.send("a", Advance(3)) and hear_message(leader) == Advance(3)
    assert all(each.receive(0) is None for each in others)
    # The bytes of all hosts are those of the island.
    assert comes_true(lambda: listener.traffic_of_learners()[0].received_bytes > len(whole))
    total, each = listener.traffic_of_learners()
    assert each == {"a": total}


def test_host_may_come_before_its_leader(ends: Ends, listener: GrpcListener) -> None:
    number, found = 1 << 40, list[GrpcLink]()
    early = threading.Thread(target=lambda: found.append(ends.connect(number=number, host=1, hosts=2, stripes=1)))
    early.start()
    assert comes_true(lambda: listener._book._opening) and not found
    leader = ends.connect(number=number, hosts=2, stripes=1)
    early.join(HANGS_S)
    assert len(found) == 1 and found[0].number == leader.number
    send_parts([leader, *found], bytes(90))
    assert hear(listener).payload == bytes(90)


def test_host_without_a_leader_is_turned_away_and_may_try_again(ends: Ends) -> None:
    listener = ends.listen(connect_timeout_s=0.2)
    with pytest.raises(TransportError, match="host 1 of 'a' came, but no session of its leader") as caught:
        ends.connect(number=5, host=1, hosts=3)
    assert not isinstance(caught.value, Rejected) and not listener._book._opening


def test_newer_session_of_the_leader_ends_the_hosts_of_the_older_one(ends: Ends, listener: GrpcListener) -> None:
    leader = ends.connect(hosts=3, stripes=1)
    host = join(ends, leader, 1)
    newer = ends.connect(hosts=3, stripes=1)
    for each in (leader, host):
        hear_end(each)
    with pytest.raises(TransportError, match="the session of the leader of 'a' is over") as caught:
        join(ends, leader, 2)
    assert not isinstance(caught.value, Rejected), "the host will hear of the newer session"
    with pytest.raises(Rejected, match="incarnation 0 is stale"):
        join(ends, leader, 0)
    join(ends, newer, 2)


def test_hosts_must_agree_on_their_number_and_fit(ends: Ends, listener: GrpcListener) -> None:
    leader = ends.connect(hosts=3, stripes=1)
    with pytest.raises(Rejected, match="host 1 of 'a' says 2 hosts, its leader 3: start all with the same number"):
        join(ends, leader, 1, hosts=2)
    with pytest.raises(Rejected, match=r"connections_max is 1024: raise it above 1026"):
        ends.connect("b", hosts=513, stripes=1)


def test_host_that_is_not_the_leader_sends_values_only(
    ends: Ends, listener: GrpcListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, host = island(ends, 2)
    with pytest.raises(
        ValueError, match="cannot send a Heartbeat from this side: it sends FragmentValue, AnchorValue, HostBlocks"
    ):
        host.send(Heartbeat("a", 0))
    monkeypatch.setattr(grpc_link, "HOST_TYPES", link.LEARNER_TYPES)
    host.send(Heartbeat("a", 0))
    hear_end(leader, "a Heartbeat is not expected here")


class Cut:
    """A version that gives every host what it stated."""

    payload = b"all"
    value_bytes = 3

    def cut(self, blocks: bytes) -> tuple[int, Callable[[], bytes]]:
        return len(blocks), lambda: blocks


def test_each_host_gets_its_blocks_of_a_version_over_its_own_session(ends: Ends, listener: GrpcListener) -> None:
    links, version = island(ends), GlobalFragment(1, 0, 1, 1, 7, 3)
    greet(listener, links[0])
    assert listener.send_version("a", version, Cut())
    # Blocks may be stated after a version was sent.
    stated = [np.random.default_rng(host).bytes(300_000 * host + 7) for host in range(3)]
    for each, blocks in zip(links, stated, strict=True):
        each.send(HostBlocks("a", 0), blocks)
    for each, blocks in zip(links, stated, strict=True):
        delivery = hear(each)
        assert delivery.message == CutFragment(version, len(blocks)) and delivery.payload == blocks
    alone = ends.meet("b")
    assert listener.send_version("b", version, Cut())
    assert hear(alone).payload == b"all"


def test_the_anchor_of_all_hosts_is_one(ends: Ends, listener: GrpcListener) -> None:
    links, whole = island(ends), np.random.default_rng(1).bytes(30_007)
    greet(listener, links[0])
    anchor = AnchorValue("a", 0, 0, 4, 5, 0)
    for each, part in zip(links, parts_of(whole), strict=True):
        each.send(anchor, part)
    delivery = hear(listener)
    assert delivery.message == anchor._replace(payload_bytes=len(whole)) and delivery.payload == whole


def test_hosts_of_an_island_share_its_certificate(tmp_path: Path, ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    certificates.make(tmp_path, ["a", "b"])
    trusted = certificates.settings(tmp_path)
    stolen = trusted | {"tls_certificate": str(tmp_path / "b.pem"), "tls_key": str(tmp_path / "b.key")}
    listener = ends.listen(**trusted)
    leader = ends.connect(hosts=2, **trusted)
    # A peer with other code may skip this check.
    monkeypatch.setattr(certificates, "check_owner", lambda *_: None)
    with pytest.raises(TransportError, match="refused 'a': the certificate is that of 'b'"):
        ends.connect(number=leader.number, host=1, hosts=2, **stolen)
    host = ends.connect(number=leader.number, host=1, hosts=2, **trusted)
    send_parts([leader, host], bytes(90))
    assert hear(listener).payload == bytes(90)


def test_dialler_connects_every_host(ends: Ends) -> None:
    listener = ends.listen()
    config = dataclasses.replace(ends.config, stripes=1, address=listener.address)
    names = {"run_id": "run", "learner_id": "a", "incarnation": 0}
    diallers = [Dialler(config, **names, host=host, hosts=3) for host in range(3)]  # type: ignore[arg-type]
    leader = ends.keep(diallers[0].connect(0))
    links = [leader, *(ends.keep(diallers[host].connect(0, leader.number)) for host in (1, 2))]
    whole = np.random.default_rng(2).bytes(300_017)
    leader.send(Hello("a", 0, (), (), (), 0, 0, 0))
    send_parts(links, whole)
    # There are two lanes, in any order.
    heard = {type(each.message): each for each in (hear(listener), hear(listener))}
    assert Hello in heard
    delivery = heard[FragmentValue]
    assert delivery.message == value(1, len(whole)) and delivery.payload == whole
    assert delivery.session == leader.number
    for each, part in zip(links, [b"", *parts_of(whole)[1:]], strict=True):
        each.send(value(), part)
    assert hear(listener).payload == b"", "one host without a value: no value"
    links[2].close(1.0)
    hear_end(leader)
