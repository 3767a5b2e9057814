"""Islands of several hosts over real connections: who belongs to whom, what they may say, and how they end."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco_jax.core import codec
from diloco_jax.core.fragments import plan_fragments
from diloco_jax.core.merge import MergeConfig
from diloco_jax.core.parts import concat, pack_part, runs_of_box
from diloco_jax.core.shards import share, split
from diloco_jax.protocol.messages import Advance, FragmentValue, Heartbeat, Hello
from diloco_jax.transport import grpc_link, link
from diloco_jax.transport.calls import read_header
from diloco_jax.transport.grpc_link import GrpcLink, GrpcListener
from diloco_jax.transport.link import Delivery, Rejected, TransportConfig, TransportError
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.session.sessions import Refused
from diloco_jax.transport.sharded import Dialler
from diloco_jax.transport.trust import certificates
from tests.transport.waiting import comes_true

pytestmark = pytest.mark.net
WAIT_S = 20.0
SHAPES = {"embed": (1 << 10, 300), "norm": (300,), **{f"layer_{n}": (20, 30 + n) for n in range(4)}}
PLAN = plan_fragments(SHAPES, 1)


@pytest.fixture
def listener() -> Iterator[GrpcListener]:
    made = grpc_link.listen(TransportConfig(connect_timeout_s=WAIT_S), run_id="run")
    yield made
    made.close(1.0)


def connect(listener: GrpcListener, host: int = 0, number: int = 0, hosts: int = 3, **changes: Any) -> GrpcLink:
    config = TransportConfig(address=listener.address, stripes=1, connect_timeout_s=changes.pop("timeout_s", WAIT_S))
    names = {"run_id": "run", "learner_id": "a", "incarnation": 0} | changes
    return grpc_link.connect(config, number=number, host=host, hosts=hosts, **names)


def hear(side: Any) -> Delivery:
    delivery = side.receive(WAIT_S)
    assert isinstance(delivery, Delivery), "nothing came"
    return delivery


def value(size: int = 0) -> FragmentValue:
    return FragmentValue("a", 0, 1, 0, 9, 9, 9, 0, 100, size)


def parts_of(whole: bytes, hosts: int = 3) -> list[list[Any]]:
    """Equal rows of bytes, and what is left to the last host."""
    rows, width = len(whole) // 30, 30 // hosts
    grid = np.frombuffer(whole, np.uint8)[: rows * 30].reshape(rows, 30)
    found = []
    for host in range(hosts):
        box = slice(None), slice(host * width, (host + 1) * width)
        rest = whole[rows * 30 :] if host == hosts - 1 else b""
        tail = runs_of_box(rows * 30, (len(rest),), (slice(None),), 1)
        found.append(pack_part(concat(runs_of_box(0, (rows, 30), box, 1), tail), [grid[box].tobytes(), rest]))
    return found


def test_values_of_all_hosts_are_one_and_answers_go_to_the_leader(listener: GrpcListener) -> None:
    leader = connect(listener)
    others = [connect(listener, host, leader.number) for host in (1, 2)]
    whole = np.random.default_rng(1).bytes(3_000_017)
    leader.send(Heartbeat("a", 0))
    assert hear(listener).message == Heartbeat("a", 0)
    for each, part in zip([*others, leader], parts_of(whole)[1:] + parts_of(whole)[:1], strict=True):
        each.send(value(), part)
    delivery = hear(listener)
    assert (delivery.peer, delivery.session) == ("a", leader.number)
    assert delivery.message == value(len(whole)) and delivery.payload == whole
    assert listener.send("a", Advance(3)) and hear(leader).message == Advance(3)
    assert all(each.receive(0) is None for each in others)
    for each in (leader, *others):
        each.close(1.0)


def test_host_may_come_before_its_leader(listener: GrpcListener) -> None:
    number = 1 << 40
    found: list[GrpcLink] = []
    early = threading.Thread(target=lambda: found.append(connect(listener, 1, number, hosts=2)))
    early.start()
    assert comes_true(lambda: bool(listener._book._opening)) and not found
    leader = connect(listener, number=number, hosts=2)
    early.join(WAIT_S)
    assert len(found) == 1 and found[0].number == leader.number
    leader.send(value(), parts_of(bytes(90), 2)[0])
    found[0].send(value(), parts_of(bytes(90), 2)[1])
    assert hear(listener).payload == bytes(90)
    leader.close(1.0)
    found[0].close(1.0)


def test_host_without_a_leader_is_turned_away_and_may_try_again() -> None:
    listener = grpc_link.listen(TransportConfig(connect_timeout_s=0.2), run_id="run")
    with pytest.raises(TransportError, match="host 1 of 'a' came, but no session of its leader") as caught:
        connect(listener, 1, 5)
    assert not isinstance(caught.value, Rejected) and not listener._book._opening
    listener.close(1.0)


@pytest.mark.parametrize("ending", [0, 2])
def test_the_end_of_one_session_is_the_end_of_all(listener: GrpcListener, ending: int) -> None:
    links = [connect(listener)]
    links += [connect(listener, host, links[0].number) for host in (1, 2)]
    links[0].send(Heartbeat("a", 0))
    assert hear(listener).message == Heartbeat("a", 0)
    links[ending].close(1.0)
    delivery = hear(listener)
    assert delivery.kind == "disconnected" and delivery.peer == "a" and "closed by the learner" in delivery.reason
    assert ("host 2: " in delivery.reason) == (ending == 2)
    for host, each in enumerate(links):
        if host != ending:
            told = hear(each)
            assert told.kind == "disconnected" and "closed by the learner" in told.reason
        each.close(1.0)
    assert listener.receive(0) is None


def test_newer_session_of_the_leader_ends_the_hosts_of_the_older_one(listener: GrpcListener) -> None:
    leader = connect(listener)
    host = connect(listener, 1, leader.number)
    newer = connect(listener)
    assert all(hear(each).kind == "disconnected" for each in (leader, host))
    with pytest.raises(TransportError, match="the session of the leader of 'a' is over") as caught:
        connect(listener, 2, leader.number)
    assert not isinstance(caught.value, Rejected), "the host will hear of the newer session"
    with pytest.raises(Rejected, match="incarnation 0 is stale"):
        connect(listener, number=leader.number)
    again = connect(listener, 2, newer.number)
    for each in (leader, host, newer, again):
        each.close(1.0)


def test_hosts_must_agree_on_their_number_and_fit(listener: GrpcListener, monkeypatch: pytest.MonkeyPatch) -> None:
    leader = connect(listener)
    with pytest.raises(Rejected, match="host 1 of 'a' says 2 hosts, its leader 3: start all with the same number"):
        connect(listener, 1, leader.number, hosts=2)
    with pytest.raises(Rejected, match=r"connections_max is 1024: raise it above 1026"):
        connect(listener, hosts=513, learner_id="b")
    leader.close(1.0)


@pytest.mark.parametrize(("host", "hosts"), [(1, 0), (1, 1), (3, 3), (0, link.HOSTS_MAX + 1)])
def test_header_with_impossible_hosts_is_refused(host: int, hosts: int) -> None:
    header = pb.Header(sender="a", lane=pb.LANE_CONTROL, stripes=1, host=host, hosts=hosts)
    with pytest.raises(Refused, match=f"'a' has host {host} of {hosts}: use at most 4096"):
        read_header({"diloco-header-bin": header.SerializeToString()})


def test_host_that_is_not_the_leader_sends_values_only(listener: GrpcListener, monkeypatch: pytest.MonkeyPatch) -> None:
    leader = connect(listener)
    host = connect(listener, 1, leader.number)
    with pytest.raises(ValueError, match="cannot send a Heartbeat from this side: it sends FragmentValue"):
        host.send(Heartbeat("a", 0))
    monkeypatch.setattr(grpc_link, "HOST_TYPES", link.LEARNER_TYPES)
    host.send(Heartbeat("a", 0))
    assert "a Heartbeat is not expected here" in hear(leader).reason
    leader.close(1.0)
    host.close(1.0)


def test_parts_that_do_not_fit_end_the_sessions_and_both_hear_why(listener: GrpcListener) -> None:
    leader = connect(listener, hosts=2)
    host = connect(listener, 1, leader.number, hosts=2)
    for each in (leader, host):
        each.send(value(), parts_of(bytes(90), 2)[0])
    assert all("the parts that its hosts sent cannot be joined" in hear(each).reason for each in (leader, host))
    assert "cannot be joined" in hear(listener).reason
    leader.close(1.0)
    host.close(1.0)


def test_hosts_of_an_island_share_its_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificates.make(tmp_path, ["a", "b"])
    settings = TransportConfig(connect_timeout_s=WAIT_S, **certificates.settings(tmp_path))
    listener = grpc_link.listen(settings, run_id="run")
    config = dataclasses.replace(settings, address=listener.address, stripes=1)
    names = {"run_id": "run", "learner_id": "a", "incarnation": 0, "hosts": 2}
    leader = grpc_link.connect(config, **names)  # type: ignore[arg-type]
    stolen = dataclasses.replace(config, tls_certificate=str(tmp_path / "b.pem"), tls_key=str(tmp_path / "b.key"))
    monkeypatch.setattr(certificates, "check_owner", lambda *_: None)  # as a peer with other code would
    with pytest.raises(TransportError, match="refused 'a': the certificate is that of 'b'"):
        grpc_link.connect(stolen, number=leader.number, host=1, **names)  # type: ignore[arg-type]
    host = grpc_link.connect(config, number=leader.number, host=1, **names)  # type: ignore[arg-type]
    leader.send(value(), parts_of(bytes(90), 2)[0])
    host.send(value(), parts_of(bytes(90), 2)[1])
    assert hear(listener).payload == bytes(90)
    leader.close(1.0)
    host.close(1.0)
    listener.close(1.0)


@pytest.mark.parametrize("shards", [1, 2])
def test_dialler_connects_every_host_to_the_syncer_and_its_shards(shards: int) -> None:
    shares = share(PLAN, MergeConfig(), shards)
    config = TransportConfig(connect_timeout_s=WAIT_S, stripes=1)
    merging = [grpc_link.listen(config, run_id="run") for _ in range(shards if shards > 1 else 0)]
    ports = [":" + each.address.rpartition(":")[2] for each in merging]
    control = grpc_link.listen(config, run_id="run", shards=ports)
    diallers = [
        Dialler(
            dataclasses.replace(config, address=control.address),
            run_id="run",
            learner_id="a",
            incarnation=0,
            shares=shares,
            up="int8",
            down="int4",
            host=host,
            hosts=3,
        )
        for host in range(3)
    ]
    leader = diallers[0].connect(0)
    links = [leader, *(diallers[host].connect(0, leader.number) for host in (1, 2))]
    values = {key: np.random.default_rng(2).normal(size=shape) for key, shape in PLAN.fragments[0].keys_shapes}
    whole = codec.encode({key: each.astype(np.float32) for key, each in values.items()}, "int8")
    leader.send(Hello("a", 0, (), (), (), 0, 0, 0))
    for each, part in zip(links, parts_of(whole), strict=True):
        each.send(value(), part)
    for shard, listener in enumerate(merging or [control]):
        heard = {type(each.message): each for each in (hear(listener), hear(listener))}  # two lanes, in any order
        assert Hello in heard
        expected = b"".join(split(whole, shares.ranges(0, shard, "int8")))
        delivery = heard[FragmentValue]
        assert delivery.message == value(len(expected)) and delivery.payload == expected
        assert delivery.session == leader.number
    for each, part in zip(links, [b"", *parts_of(whole)[1:]], strict=True):
        each.send(value(), part)
    for listener in merging or [control]:
        assert hear(listener).payload == b"", "one host without a value: no value"
    links[2].close(1.0)
    assert hear(leader).kind == "disconnected"
    for each in links:
        each.close(1.0)
    for listener in (*merging, control):
        listener.close(1.0)
