"""Parts of versions become whole whatever their order, once, and what never becomes whole is bounded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from diloco_jax.core import codec
from diloco_jax.core.fragments import plan_fragments
from diloco_jax.core.merge import MergeConfig
from diloco_jax.core.shards import share, split
from diloco_jax.protocol.messages import NO_VERSION, SYNCER, Advance, FragmentValue, GlobalFragment, Heartbeat, Hello
from diloco_jax.transport.link import Delivery
from diloco_jax.transport.sharded import INCOMPLETE_MAX, ShardedLink

SHAPES = {"embed": (1 << 10, 300), "norm": (300,), **{f"layer_{n}": (20, 30 + n) for n in range(4)}}
PLAN = plan_fragments(SHAPES, 1)
SHARES = share(PLAN, MergeConfig(), 3)


class FakeSession:
    """A session that only remembers what was sent."""

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


def test_what_a_shard_must_not_say_is_not_heard(rig: Rig) -> None:
    rig.inbox.waiting.append(Delivery("message", "shard-1", Advance(7)))
    rig.inbox.waiting.append(Delivery("message", SYNCER, Advance(8)))
    assert [each.message for each in rig.drain()] == [Advance(8)]


def test_a_value_goes_in_parts_to_the_shards_and_all_else_to_the_syncer(rig: Rig) -> None:
    values = {key: np.ones(shape, np.float32) for key, shape in PLAN.fragments[0].keys_shapes}
    payload = codec.encode(values, "int8")
    value = FragmentValue("a", 1, 1, 0, 1, 1, 1, 0, 1, len(payload))
    rig.link.send(value, payload)
    rig.link.send(value, b"")  # an answer without a value
    for shard, session in enumerate(rig.shards):
        part = b"".join(split(payload, SHARES.ranges(0, shard, "int8")))
        assert session.sent == [(value, part), (value, b"")] and part
    hello, heartbeat = Hello("a", 1, (), (), (), 0, 1, 0), Heartbeat("a", 1)
    rig.link.send(hello)
    rig.link.send(heartbeat)
    assert [sent for sent, _ in rig.control.sent] == [hello, heartbeat]
    assert all(session.sent[2:] == [(hello, b"")] for session in rig.shards)
