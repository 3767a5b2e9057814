"""Promises of link.py, tried over real connections."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from diloco_jax.protocol.messages import (
    Adopted,
    Advance,
    AnchorRequest,
    AnchorValue,
    Expel,
    FragmentValue,
    GlobalFragment,
    Heartbeat,
    Hello,
    LearnerMessage,
    Lease,
    Leave,
    Message,
    PullRequest,
    Refuse,
    StateDone,
    StateEnd,
    StatePart,
    StatePull,
    StateRefused,
    StateRequest,
    StateUnavailable,
    StepReport,
    Stop,
    SyncerMessage,
    Welcome,
)
from diloco_jax.transport import grpc_link
from diloco_jax.transport.grpc_link import GrpcListener
from diloco_jax.transport.link import Delivery, Link, LinkClosed, Rejected, TransportConfig, TransportError

pytestmark = pytest.mark.net
WAIT_S = 20.0  # a deadline, never a duration: nothing here waits it out when the code is right


class Bench:
    """A listener, and links to it; everything is closed at the end of the test."""

    def __init__(self) -> None:
        self.config = TransportConfig(payload_bytes_max=1 << 25, chunk_bytes=1 << 16)
        self._close: list[Callable[[float], None]] = []
        self._listener: GrpcListener

    def listen(self, **changes: Any) -> GrpcListener:
        config = dataclasses.replace(self.config, **changes)
        self._listener = grpc_link.listen(config, run_id="run", epoch=1)
        self._close.append(self._listener.close)
        return self._listener

    def connect(
        self, learner_id: str = "a", incarnation: int = 0, *, run_id: str = "run", epoch: int = 1, **changes: Any
    ) -> Link:
        config = dataclasses.replace(self.config, address=self._listener.address, **changes)
        link = grpc_link.connect(config, run_id=run_id, epoch=epoch, learner_id=learner_id, incarnation=incarnation)
        self._close.append(link.close)
        return link

    def close(self) -> None:
        for close in reversed(self._close):
            close(1.0)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def hear(side: Link | GrpcListener) -> Delivery:
    delivery = side.receive(WAIT_S)
    assert delivery is not None, "nothing came"
    return delivery


def hear_message(side: Link | GrpcListener) -> Message:
    delivery = hear(side)
    assert delivery.kind == "message" and delivery.message is not None, delivery
    return delivery.message


def meet(listener: GrpcListener, link: Link, learner_id: str = "a", incarnation: int = 0) -> None:
    link.send(Heartbeat(learner_id, incarnation))
    assert hear(listener)._replace(session=0) == Delivery("message", learner_id, Heartbeat(learner_id, incarnation))


LEARNER_SAYS: list[tuple[LearnerMessage, bytes]] = [
    (Hello("a", 0, (("model", "5f"), ("config", "é")), (-1, 0, 7), (0, 5, 2**64 - 1), 2, 8, 64), b""),
    (StepReport("a", 0, 3, 192, 2, (Adopted(), Adopted(2, 1, 64)), 0.25, 5.5, 24, 64), b""),
    (FragmentValue("a", 0, 2, 1, 3, 2, 128, -1, 16, 5), b"bytes"),
    (FragmentValue("a", 0, 2, 1, 3, 2, 128, -1, 16, 0), b""),
    (AnchorValue("a", 0, 1, 7, 2**63, 4), b"\x00\x01\x02\x03"),
    (StateRequest("a", 0, 7, "", 0, 0), b""),
    (StatePart("a", 0, "b", 40, (7, -1), 2, 3, 99, 6), b"a part"),
    (StateRefused("a", 0, "b", "leaving"), b""),
    (StateDone("a", 0, "c"), b""),
    (Heartbeat("a", 0), b""),
    (Leave("a", 0, "done"), b""),
]
SYNCER_SAYS: list[tuple[SyncerMessage, bytes]] = [
    (Welcome(4, (4, -1), 2), b""),
    (Refuse("no"), b""),
    (PullRequest(5, 1, 40), b""),
    (GlobalFragment(5, 1, 4, 2, 2**64 - 1, 4), b"\x00\xff\x00\xff"),
    (Expel("not usable three times"), b""),
    (Lease(64, 4096, 4608), b""),
    (AnchorRequest(1, 4), b""),
    (StatePull("b", 7, 0, 1), b""),
    (StatePart("b", 5, "a", 40, (7, -1), 2, 3, 99, 6), b"a part"),
    (StateEnd("b"), b""),
    (StateUnavailable("b", "it left"), b""),
    (Advance(6), b""),
    (Stop(7, "complete"), b""),
]


def test_every_message_goes_both_ways(bench: Bench) -> None:
    listener = bench.listen()
    link = bench.connect()
    for upward, payload in LEARNER_SAYS:
        link.send(upward, payload)
        delivery = hear(listener)
        assert (delivery.kind, delivery.peer, delivery.message) == ("message", "a", upward)
        assert bytes(delivery.payload) == payload
    for downward, payload in SYNCER_SAYS:
        assert listener.send("a", downward, payload)
        delivery = hear(link)
        assert (delivery.kind, delivery.peer, delivery.message) == ("message", "syncer", downward)
        assert bytes(delivery.payload) == payload


def test_twenty_megabytes_in_parts_both_ways(bench: Bench) -> None:
    listener = bench.listen()
    link = bench.connect(chunk_bytes=2 << 20)
    payload = os.urandom(20_000_000)
    link.send(FragmentValue("a", 0, 2, 1, 3, 2, 128, -1, 16, len(payload)), [payload[:7], memoryview(payload)[7:]])
    up = hear(listener).payload
    assert up == payload
    assert listener.send("a", GlobalFragment(5, 1, 4, 1, 99, len(payload)), up)
    assert hear(link).payload == payload


def test_order_within_a_lane_and_two_learners_apart(bench: Bench) -> None:
    listener = bench.listen()
    links = {name: bench.connect(name) for name in ("a", "b")}
    for step in range(50):
        for name, link in links.items():
            link.send(Leave(name, 0, str(step)))
    heard: dict[str, list[str]] = {"a": [], "b": []}
    for _ in range(100):
        message = hear_message(listener)
        assert isinstance(message, Leave)
        heard[message.learner_id].append(message.reason)
    assert heard["a"] == heard["b"] == [str(step) for step in range(50)]
    assert listener.send("b", Advance(1)) and hear_message(links["b"]) == Advance(1)
    assert links["a"].receive(0) is None and listener.receive(0) is None


def test_what_can_never_be_sent_is_the_callers_error_and_the_session_lives(bench: Bench) -> None:
    listener = bench.listen()
    link = bench.connect()
    meet(listener, link)
    big = bytes((1 << 25) + 1)
    value = FragmentValue("a", 0, 2, 1, 3, 2, 128, -1, 16, len(big))
    with pytest.raises(ValueError, match=r"33554433 bytes, the limit is 33554432: raise transport\.payload_bytes_max"):
        link.send(value, big)
    with pytest.raises(ValueError, match="33554433 bytes, the limit is 33554432"):
        listener.send("a", GlobalFragment(1, 0, 1, 1, 99, len(big)), big)
    with pytest.raises(ValueError, match="a Heartbeat has no payload"):
        link.send(Heartbeat("a", 0), b"x")
    with pytest.raises(ValueError, match="cannot send a Stop from this side"):
        link.send(Stop(1, ""))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot send a Heartbeat from this side"):
        listener.send("a", Heartbeat("a", 0))  # type: ignore[arg-type]
    meet(listener, link)


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ({"run_id": "other"}, "'a' belongs to run 'other', this syncer to run 'run'"),
        ({"epoch": 2}, "'a' has heard of epoch 2 of the syncer, this one is of epoch 1: stop this old syncer"),
        ({"incarnation": -1}, "incarnation -1 of 'a' is not allowed"),
    ],
)
def test_stranger_is_refused_with_the_reason(bench: Bench, names: dict[str, Any], reason: str) -> None:
    listener = bench.listen()
    with pytest.raises(TransportError, match=f"the syncer at .* refused .*{reason}") as raised:
        bench.connect(**names)
    # a newer syncer may take this one's place, the other faults stay
    assert isinstance(raised.value, Rejected) == ("epoch" not in names)
    meet(listener, bench.connect())
    assert listener.receive(0) is None, "the driver must not hear of whoever was refused"


def test_newer_incarnation_replaces_the_older_and_the_stale_one_is_refused(bench: Bench) -> None:
    listener = bench.listen()
    old = bench.connect(incarnation=1)
    meet(listener, old, incarnation=1)
    new = bench.connect(incarnation=2)
    new.send(Heartbeat("a", 2))
    for side in (listener, old):
        delivery = hear(side)
        assert delivery.kind == "disconnected" and "replaced by a newer connection of 'a'" in delivery.reason
    assert hear_message(listener) == Heartbeat("a", 2)
    with pytest.raises(TransportError, match="'a' incarnation 1 is stale"):
        bench.connect(incarnation=1)
    with pytest.raises(LinkClosed, match="replaced"):
        old.send(Heartbeat("a", 1))
    meet(listener, new, incarnation=2)
    assert listener.send("a", Advance(1)) and hear_message(new) == Advance(1)
    assert old.receive(0) is None and listener.receive(0) is None


def test_same_incarnation_may_reconnect(bench: Bench) -> None:
    listener = bench.listen()
    meet(listener, bench.connect())
    again = bench.connect()
    again.send(Heartbeat("a", 0))
    assert hear(listener).kind == "disconnected"
    assert hear_message(listener) == Heartbeat("a", 0)


def test_answers_go_to_the_session_that_was_heard(bench: Bench) -> None:
    """A new life of the learner must not get what was meant for the one before."""
    listener = bench.listen()
    old = bench.connect(incarnation=1)
    meet(listener, old, incarnation=1)
    new = bench.connect(incarnation=2)
    new.send(Heartbeat("a", 2))
    assert not listener.send("a", PullRequest(1, 0, 10)), "the driver does not know of the new incarnation yet"
    assert hear(listener).kind == "disconnected"
    assert not listener.send("a", PullRequest(1, 0, 10))
    assert hear_message(listener) == Heartbeat("a", 2)
    assert listener.send("a", PullRequest(2, 0, 1)) and hear_message(new) == PullRequest(2, 0, 1)


def test_unknown_peer_is_no_error(bench: Bench) -> None:
    assert not bench.listen().send("nobody", Advance(1))


def test_learner_that_closes_is_noticed_once_after_its_last_words(bench: Bench) -> None:
    listener = bench.listen()
    link = bench.connect()
    payload = bytes(3_000_000)
    for round_ in range(4):
        link.send(FragmentValue("a", 0, round_, 1, 3, 2, 128, -1, 16, len(payload)), payload)
    link.send(Leave("a", 0, "done"))
    link.close(WAIT_S)
    heard = [hear(listener) for _ in range(6)]
    assert sorted(type(delivery.message).__name__ for delivery in heard[:5]) == ["FragmentValue"] * 4 + ["Leave"]
    assert heard[5].kind == "disconnected" and "closed by" in heard[5].reason
    assert listener.receive(0) is None and not listener.send("a", Advance(1))
    assert link.receive(0) is None, "who closes is not told of it"
    with pytest.raises(LinkClosed, match="the session with 'syncer' is over: closed"):
        link.send(Heartbeat("a", 0))
    link.close()


def test_syncer_that_closes_is_noticed_once_after_its_last_words(bench: Bench) -> None:
    listener = bench.listen()
    links = {name: bench.connect(name) for name in ("a", "b")}
    payload = bytes(3_000_000)
    for name, link in links.items():
        meet(listener, link, name)
        for version in range(4):
            assert listener.send(name, GlobalFragment(version, 0, version, 1, 99, len(payload)), payload)
        assert listener.send(name, Stop(9, "complete"))
    listener.close(WAIT_S)
    for link in links.values():
        heard = [hear(link) for _ in range(6)]
        assert sorted(type(delivery.message).__name__ for delivery in heard[:5]) == ["GlobalFragment"] * 4 + ["Stop"]
        assert heard[5].kind == "disconnected" and "closed by the syncer" in heard[5].reason
        assert link.receive(0) is None
    listener.close()


def test_learner_that_does_not_read_is_cut_and_the_others_live(bench: Bench) -> None:
    listener = bench.listen(queue_messages_max=3, queue_payloads_max=2)
    deaf, link = bench.connect("deaf", queue_messages_max=3), bench.connect("a")
    meet(listener, deaf, "deaf")
    meet(listener, link)
    reason = "x" * 4_000  # so that the system's socket buffers do not hide that nobody reads
    while listener.send("deaf", Stop(1, reason)):
        pass
    delivery = hear(listener)
    assert (delivery.kind, delivery.peer) == ("disconnected", "deaf")
    assert "the control queue to 'deaf' is full" in delivery.reason
    assert not listener.send("deaf", Advance(2))
    heard = hear(deaf)
    while heard.kind == "message":
        heard = hear(deaf)
    assert deaf.receive(0) is None
    meet(listener, link)


def test_syncer_that_does_not_read_makes_send_raise_instead_of_block(bench: Bench) -> None:
    listener = bench.listen(queue_payloads_max=2)
    link = bench.connect(queue_payloads_max=2)
    payload = bytes(1 << 22)
    value = FragmentValue("a", 0, 2, 1, 3, 2, 128, -1, 16, len(payload))
    with pytest.raises(LinkClosed, match="the bulk queue to 'syncer' is full"):
        while True:
            link.send(value, payload)
    delivery = hear(link)
    assert delivery.kind == "disconnected" and "the bulk queue to 'syncer' is full" in delivery.reason
    heard = hear(listener)
    while heard.kind == "message":
        heard = hear(listener)
    assert heard.kind == "disconnected"


def test_bulk_that_nobody_reads_does_not_hold_up_control(bench: Bench) -> None:
    listener = bench.listen(queue_payloads_max=4)
    link = bench.connect(queue_payloads_max=4)
    payload = bytes(1 << 20)
    for round_ in range(4):
        link.send(FragmentValue("a", 0, round_, 1, 3, 2, 128, -1, 16, len(payload)), payload)
    link.send(Leave("a", 0, "overtakes"))
    rounds = [hear_message(listener) for _ in range(5)]
    assert [message.global_step for message in rounds if isinstance(message, FragmentValue)] == [0, 1, 2, 3]


def test_one_payload_is_shared_by_all_receivers(bench: Bench) -> None:
    listener = bench.listen()
    links = {name: bench.connect(name) for name in ("a", "b", "c")}
    payload = memoryview(os.urandom(1 << 20))
    for name, link in links.items():
        meet(listener, link, name)
        assert listener.send(name, GlobalFragment(1, 0, 1, 1, 99, len(payload)), payload)
    assert all(hear(link).payload == payload for link in links.values())


def test_no_thread_outlives_its_session_or_holds_the_process(bench: Bench) -> None:
    before = set(threading.enumerate())
    listener = bench.listen()
    link = bench.connect()
    meet(listener, link)
    made = [thread for thread in threading.enumerate() if thread not in before]
    ours = [thread for thread in made if thread.name.startswith("diloco-")]
    streams = 1 + bench.config.stripes
    assert len(ours) == 2 * 2 * streams  # at two ends, a reader and a writer each
    assert all(thread.daemon for thread in made)
    bench.close()
    for thread in ours:
        thread.join(WAIT_S)
        assert not thread.is_alive(), thread.name


def test_closed_listener_takes_nobody(bench: Bench) -> None:
    bench.listen().close(1.0)
    with pytest.raises(TransportError):
        bench.connect(connect_timeout_s=0.2)


def test_traffic_counts_what_moved(bench: Bench) -> None:
    listener = bench.listen()
    link = bench.connect()
    meet(listener, link)
    before = listener.traffic
    assert listener.send("a", GlobalFragment(1, 0, 1, 1, 99, 1000), b"x" * 1000)
    hear(link)
    link.send(FragmentValue("a", 0, 1, 0, 1, 1, 1, 0, 8, 500), b"y" * 500)
    hear(listener)
    sent, received = (
        listener.traffic.sent_bytes - before.sent_bytes,
        listener.traffic.received_bytes - before.received_bytes,
    )
    assert 1000 <= sent < 1200
    assert 500 <= received < 700


def test_wake_ends_a_wait(bench: Bench) -> None:
    listener = bench.listen()
    listener.wake()
    assert listener.receive(60.0) is None  # at once: the suite's time limit would tell
