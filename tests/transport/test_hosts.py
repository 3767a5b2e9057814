"""Islands of several hosts and syncers of several shards: which of them form one, and how payloads become whole."""

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
from diloco_jax.core.shards import share, split
from diloco_jax.protocol.messages import (
    NO_VERSION,
    SYNCER,
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
from diloco_jax.transport.endpoints.grpc_link import GrpcLink, GrpcListener
from diloco_jax.transport.endpoints.sharded import INCOMPLETE_MAX, Dialler, ShardedLink
from diloco_jax.transport.link import Delivery, Rejected, TransportError
from diloco_jax.transport.trust import certificates
from tests.fuzz.inputs import parts_of
from tests.transport.ends import CONFIG, WAIT_S, Ends, comes_true, greet, hear, hear_end, hear_message, value

pytestmark = pytest.mark.net
SHAPES = {"embed": (1 << 10, 300), "norm": (300,), **{f"layer_{n}": (20, 30 + n) for n in range(4)}}
PLAN = plan_fragments(SHAPES, 1)


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


def test_host_may_come_before_its_leader(ends: Ends, listener: GrpcListener) -> None:
    number, found = 1 << 40, list[GrpcLink]()
    early = threading.Thread(target=lambda: found.append(ends.connect(number=number, host=1, hosts=2, stripes=1)))
    early.start()
    assert comes_true(lambda: listener._book._opening) and not found
    leader = ends.connect(number=number, hosts=2, stripes=1)
    early.join(WAIT_S)
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

    def cut(self, blocks: bytes | memoryview) -> tuple[int, bytes]:
        return len(blocks), bytes(blocks)


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


@pytest.mark.parametrize("shards", [1, 2])
def test_dialler_connects_every_host_to_the_syncer_and_its_shards(ends: Ends, shards: int) -> None:
    shares = share(PLAN, MergeConfig(), shards)
    merging = [ends.listen() for _ in range(shards if shards > 1 else 0)]
    control = ends.listen(shards=[":" + each.address.rpartition(":")[2] for each in merging])
    config = dataclasses.replace(CONFIG, stripes=1, address=control.address)
    names = {"run_id": "run", "learner_id": "a", "incarnation": 0, "shares": shares, "up": "int8", "down": "int4"}
    diallers = [Dialler(config, **names, host=host, hosts=3) for host in range(3)]  # type: ignore[arg-type]
    leader = ends.keep(diallers[0].connect(0))
    links = [leader, *(ends.keep(diallers[host].connect(0, leader.number)) for host in (1, 2))]
    values = {key: np.random.default_rng(2).normal(size=shape) for key, shape in PLAN.fragments[0].keys_shapes}
    whole = codec.encode({key: each.astype(np.float32) for key, each in values.items()}, "int8")
    leader.send(Hello("a", 0, (), (), (), 0, 0, 0))
    send_parts(links, whole)
    for shard, listener in enumerate(merging or [control]):
        # There are two lanes, in any order.
        heard = {type(each.message): each for each in (hear(listener), hear(listener))}
        assert Hello in heard
        expected = b"".join(split(whole, shares.ranges(0, shard, "int8")))
        delivery = heard[FragmentValue]
        assert delivery.message == value(1, len(expected)) and delivery.payload == expected
        assert delivery.session == leader.number
    for each, part in zip(links, [b"", *parts_of(whole)[1:]], strict=True):
        each.send(value(), part)
    for listener in merging or [control]:
        assert hear(listener).payload == b"", "one host without a value: no value"
    links[2].close(1.0)
    hear_end(leader)


SHARES = share(PLAN, MergeConfig(), 3)


class FakeSession:
    """Session that only records the messages that were sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, bytes]] = []

    def send(self, message: Any, payload: Any = b"") -> None:
        self.sent.append((message, payload if isinstance(payload, bytes) else b"".join(payload)))

    def close(self, grace_s: float = 5.0) -> None:
        pass


class FakeInbox:
    """Deliveries that are there already."""

    def __init__(self) -> None:
        self.waiting: list[Delivery] = []

    def get(self, timeout_s: float) -> tuple[None, Delivery] | None:
        return (None, self.waiting.pop(0)) if self.waiting else None


class Rig:
    """A link over fakes."""

    def __init__(self) -> None:
        self.control, self.shards, self.inbox = FakeSession(), [FakeSession() for _ in range(3)], FakeInbox()
        self.link = ShardedLink(self.control, self.shards, self.inbox, SHARES, "int8", "int4")  # type: ignore[arg-type]

    def part(self, shard: int, version: int, base: int = NO_VERSION, cut: int = 0) -> None:
        """Let a shard's part of a version arrive, shortened by `cut` bytes."""
        ranges = SHARES.ranges(0, shard, "float32" if base == NO_VERSION else "int4")
        data = b"".join(split(whole(version, base), ranges))
        self.inbox.waiting.append(Delivery("message", f"shard-{shard}", message(version, base), data[cut:]))

    def drain(self) -> Iterator[Delivery]:
        while self.inbox.waiting:
            if (delivery := self.link.receive(0)) is not None:
                yield delivery


def whole(version: int, base: int = NO_VERSION) -> bytes:
    rng = np.random.default_rng(version)
    values = {key: rng.normal(size=shape).astype(np.float32) for key, shape in PLAN.fragments[0].keys_shapes}
    return codec.encode(values, "float32" if base == NO_VERSION else "int4")


def message(version: int, base: int = NO_VERSION) -> GlobalFragment:
    return GlobalFragment(version, 0, version, 1, version, 0, base)


@pytest.fixture
def rig() -> Rig:
    assert SHARES.holders(0) == (0, 1, 2)
    return Rig()


@pytest.mark.parametrize("base", [NO_VERSION, 3])
def test_parts_in_any_order_become_one_payload(rig: Rig, base: int) -> None:
    for shard in (2, 0):
        rig.part(shard, 4, base)
    assert list(rig.drain()) == []
    rig.part(1, 4, base)
    (delivery,) = rig.drain()
    assert delivery == Delivery("message", SYNCER, message(4, base), whole(4, base))


def test_two_versions_under_way_do_not_mix(rig: Rig) -> None:
    for shard, version in ((0, 1), (0, 2), (1, 1), (2, 1), (2, 2), (1, 2)):
        rig.part(shard, version)
    assert [(each.message, each.payload) for each in rig.drain()] == [(message(v), whole(v)) for v in (1, 2)]


def test_a_part_that_comes_twice_counts_once(rig: Rig) -> None:
    for shard in (0, 0, 1, 1):
        rig.part(shard, 1)
    assert list(rig.drain()) == []
    rig.part(2, 1)
    assert [each.payload for each in rig.drain()] == [whole(1)]


def test_of_what_never_becomes_whole_only_the_newest_is_kept(rig: Rig) -> None:
    for version in range(1, 10):
        rig.part(0, version)
    assert list(rig.drain()) == []
    assert [list(each) for each in rig.link._incomplete.values()] == [[message(v) for v in (8, 9)]]
    assert INCOMPLETE_MAX == 2
    for shard in (1, 2):
        rig.part(shard, 8)
    assert [each.payload for each in rig.drain()] == [whole(8)]


def test_a_part_of_a_wrong_size_gives_what_nobody_can_decode(rig: Rig) -> None:
    rig.part(0, 1, cut=4)
    (delivery,) = rig.drain()
    assert delivery.message == message(1) and delivery.payload == b""


def test_the_end_of_one_session_is_the_end_of_the_link(rig: Rig) -> None:
    rig.inbox.waiting.append(Delivery("disconnected", "shard-1", reason="it broke"))
    (delivery,) = rig.drain()
    assert delivery == Delivery("disconnected", SYNCER, reason="merge shard 1: it broke")


def test_messages_that_a_shard_must_not_send_are_ignored(rig: Rig) -> None:
    rig.inbox.waiting.append(Delivery("message", "shard-1", Advance(7)))
    rig.inbox.waiting.append(Delivery("message", SYNCER, Advance(8)))
    assert [each.message for each in rig.drain()] == [Advance(8)]


def test_a_value_goes_in_parts_to_the_shards_and_all_else_to_the_syncer(rig: Rig) -> None:
    values = {key: np.ones(shape, np.float32) for key, shape in PLAN.fragments[0].keys_shapes}
    payload = codec.encode(values, "int8")
    value = FragmentValue("a", 1, 1, 0, 1, 1, 1, 0, 1, len(payload))
    rig.link.send(value, payload)
    # This is an answer without a value.
    rig.link.send(value, b"")
    for shard, session in enumerate(rig.shards):
        part = b"".join(split(payload, SHARES.ranges(0, shard, "int8")))
        assert session.sent == [(value, part), (value, b"")] and part
    hello, heartbeat = Hello("a", 1, (), (), (), 0, 1, 0), Heartbeat("a", 1)
    rig.link.send(hello)
    rig.link.send(heartbeat)
    assert [sent for sent, _ in rig.control.sent] == [hello, heartbeat]
    assert all(session.sent[2:] == [(hello, b"")] for session in rig.shards)
