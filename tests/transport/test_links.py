"""The promises of link.py hold over real connections."""

import dataclasses
import math
import os
import threading
from typing import Any

import pytest

from diloco_jax.protocol import messages as m
from diloco_jax.transport import wire
from diloco_jax.transport.endpoints.grpc_link import GrpcListener
from diloco_jax.transport.link import LinkClosed, Rejected, TransportConfig, TransportError, split_address
from tests.limits import HANGS_S
from tests.transport.ends import CONFIG, LIMIT, Ends, comes_true, greet, hear, hear_end, hear_message, value

pytestmark = pytest.mark.net

LEARNER_SAYS: list[tuple[m.LearnerMessage, bytes]] = [
    (m.Hello("a", 0, (), (0,), (5,), 2, 8, 64, run="5eed"), b""),
    (m.Hello("a", 0, (("model", "5f"), ("config", "é")), (-1, 0, 7), (0, 5, 2**64 - 1), 2, 8, 64), b""),
    (m.StepReport("a", 0, 3, 192, 2, (m.Adopted(), m.Adopted(2, 1, 64)), 0.25, 5.5, 24, 64), b""),
    (m.FragmentValue("a", 0, 2, 1, 3, 2, 128, -1, 16, 5), b"bytes"),
    (m.FragmentValue("a", 0, 2, 1, 3, 2, 128, -1, 16, 0), b""),
    (m.AnchorValue("a", 0, 1, 7, 2**63, 4), b"\x00\x01\x02\x03"),
    (m.StateRequest("a", 0, 7, "", 0, 0), b""),
    (m.StateChunk("a", 0, "b", 40, 2, 3, 99, 6), b"a part"),
    (m.StateRefused("a", 0, "b", "leaving"), b""),
    (m.Score("a", 0, 3, 9, (1, -1), 2.5, 3.5, 640, (m.Metric("books loss", 1.5),), 0.5, "why"), b""),
    (m.StateDone("a", 0, "c"), b""),
    (m.Heartbeat("a", 0), b""),
    (m.Leave("a", 0, "done"), b""),
]
SYNCER_SAYS: list[tuple[m.SyncerMessage, bytes]] = [
    (m.Welcome(4, (4, -1), 2, 7), b""),
    (m.Welcome(4, (4, -1), 2, 7, "5eed"), b""),
    (m.Refuse("no"), b""),
    (m.PullRequest(5, 1, 40), b""),
    (m.GlobalFragment(5, 1, 4, 2, 2**64 - 1, 4, -1, 3, -(2**40)), b"\x00\xff\x00\xff"),
    (m.Expel("not usable three times"), b""),
    (m.Lease(64, 4096, 4608), b""),
    (m.AnchorRequest(1, 4), b""),
    (m.Evaluate(3, (1, -1)), b""),
    (m.StatePull("b", 7, 0, 1), b""),
    (m.StateChunk("b", 5, "a", 40, 2, 3, 99, 6), b"a part"),
    (m.StateEnd("b"), b""),
    (m.StateUnavailable("b", "it left"), b""),
    (m.Advance(6, -2), b""),
    (m.Stop(7, "complete"), b""),
]


def test_every_message_goes_both_ways(ends: Ends, listener: GrpcListener) -> None:
    link = ends.connect()
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


def test_twenty_megabytes_in_parts_both_ways(ends: Ends, listener: GrpcListener) -> None:
    link = ends.connect(chunk_bytes=2 << 20)
    payload = os.urandom(20_000_000)
    link.send(value(2, len(payload)), [payload[:7], memoryview(payload)[7:]])
    up = hear(listener).payload
    assert up == payload
    assert listener.send("a", m.GlobalFragment(5, 1, 4, 1, 99, len(payload)), up)
    assert hear(link).payload == payload


def test_order_within_a_lane_and_two_learners_apart(ends: Ends, listener: GrpcListener) -> None:
    links = {name: ends.connect(name) for name in ("a", "b")}
    for step in range(50):
        for name, link in links.items():
            link.send(m.Leave(name, 0, str(step)))
    heard: dict[str, list[str]] = {"a": [], "b": []}
    for _ in range(100):
        message = hear_message(listener)
        assert isinstance(message, m.Leave)
        heard[message.learner_id].append(message.reason)
    assert heard["a"] == heard["b"] == [str(step) for step in range(50)]
    assert listener.send("b", m.Advance(1)) and hear_message(links["b"]) == m.Advance(1)
    assert not listener.send("nobody", m.Advance(1)), "an unknown peer is not an error"
    assert links["a"].receive(0) is None and listener.receive(0) is None


def test_what_can_never_be_sent_is_the_callers_error_and_the_session_lives(ends: Ends, listener: GrpcListener) -> None:
    link, big = ends.meet(), bytes(LIMIT + 1)
    with pytest.raises(ValueError, match=r"33554433 bytes, the limit is 33554432: raise transport\.payload_bytes_max"):
        link.send(value(2, len(big)), big)
    with pytest.raises(ValueError, match="33554433 bytes, the limit is 33554432"):
        listener.send("a", m.GlobalFragment(1, 0, 1, 1, 99, len(big)), big)
    with pytest.raises(ValueError, match="a Heartbeat has no payload"):
        link.send(m.Heartbeat("a", 0), b"x")
    with pytest.raises(ValueError, match="cannot send a Stop from this side"):
        link.send(m.Stop(1, ""))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot send a Heartbeat from this side"):
        listener.send("a", m.Heartbeat("a", 0))  # type: ignore[arg-type]
    greet(listener, link)


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ({"run_id": "other"}, "'a' belongs to run 'other', this syncer to run 'run'"),
        ({"epoch": 2}, "'a' has heard of epoch 2 of the syncer, this one is of epoch 1: stop this old syncer"),
        ({"incarnation": -1}, "incarnation -1 of 'a' is not allowed"),
        ({"incarnation": 1 << 62}, "incarnation 4611686018427387904 of 'a' is not allowed: use 0 to 1"),
    ],
)
def test_stranger_is_refused_with_the_reason(
    ends: Ends, listener: GrpcListener, names: dict[str, Any], reason: str
) -> None:
    with pytest.raises(TransportError, match=f"the syncer at .* refused .*{reason}") as raised:
        ends.connect(**names)
    # A newer syncer may replace this one; the other faults are permanent.
    assert isinstance(raised.value, Rejected) == ("epoch" not in names)
    ends.meet()
    assert listener.receive(0) is None, "the driver must not see a peer that was refused"


def test_newer_incarnation_replaces_the_older_and_the_stale_one_is_refused(ends: Ends, listener: GrpcListener) -> None:
    """Check that a restarted learner gets no message that was sent to the process before it."""
    old = ends.meet(incarnation=1)
    new = ends.connect(incarnation=2)
    new.send(m.Heartbeat("a", 2))
    assert not listener.send("a", m.PullRequest(1, 0, 10)), "the driver does not know of the new incarnation yet"
    for side in (listener, old):
        hear_end(side, "replaced by a newer connection of 'a'")
    assert not listener.send("a", m.PullRequest(1, 0, 10))
    assert hear_message(listener) == m.Heartbeat("a", 2)
    with pytest.raises(TransportError, match="'a' incarnation 1 is stale"):
        ends.connect(incarnation=1)
    with pytest.raises(LinkClosed, match="replaced"):
        old.send(m.Heartbeat("a", 1))
    greet(listener, new, incarnation=2)
    assert listener.send("a", m.Advance(1)) and hear_message(new) == m.Advance(1)
    assert old.receive(0) is None and listener.receive(0) is None


def test_same_incarnation_may_reconnect(ends: Ends, listener: GrpcListener) -> None:
    ends.meet()
    again = ends.connect()
    hear_end(listener)
    greet(listener, again)


def test_learner_that_closes_is_noticed_once_after_its_last_words(ends: Ends, listener: GrpcListener) -> None:
    link, payload = ends.connect(), bytes(3_000_000)
    for number in range(4):
        link.send(value(number, len(payload)), payload)
    link.send(m.Leave("a", 0, "done"))
    link.close(HANGS_S)
    heard = [hear_message(listener) for _ in range(5)]
    assert sorted(type(message).__name__ for message in heard) == ["FragmentValue"] * 4 + ["Leave"]
    hear_end(listener, "closed by")
    assert listener.receive(0) is None and not listener.send("a", m.Advance(1))
    assert link.receive(0) is None, "who closes is not told of it"
    with pytest.raises(LinkClosed, match="the session with 'syncer' is over: closed"):
        link.send(m.Heartbeat("a", 0))


def test_syncer_that_closes_is_noticed_once_after_its_last_words(ends: Ends, listener: GrpcListener) -> None:
    # All receivers share the bytes.
    payload = memoryview(os.urandom(3_000_000))
    links = {name: ends.meet(name) for name in ("a", "b")}
    for name in links:
        for version in range(4):
            assert listener.send(name, m.GlobalFragment(version, 0, version, 1, 99, len(payload)), payload)
        assert listener.send(name, m.Stop(9, "complete"))
    listener.close(HANGS_S)
    for link in links.values():
        heard = {type(each.message): each.payload for each in (hear(link) for _ in range(5))}
        assert heard == {m.GlobalFragment: payload, m.Stop: b""}
        hear_end(link, "closed by the syncer")
        assert link.receive(0) is None


def test_learner_that_does_not_read_is_cut_and_the_others_live(ends: Ends) -> None:
    listener = ends.listen(queue_messages_max=3, queue_payloads_max=2)
    deaf, link = ends.meet("deaf", queue_messages_max=3), ends.meet()
    # Shorter texts fit into the system's socket buffers, and nobody would notice that the peer does not read.
    reason = "x" * 4_000
    while listener.send("deaf", m.Stop(1, reason)):
        pass
    assert hear_end(listener, "the control queue to 'deaf' is full").peer == "deaf"
    assert not listener.send("deaf", m.Advance(2))
    while hear(deaf).kind == "message":
        pass
    assert deaf.receive(0) is None
    greet(listener, link)


def test_syncer_that_does_not_read_makes_send_raise_instead_of_block(ends: Ends) -> None:
    listener, payload = ends.listen(queue_payloads_max=2), bytes(1 << 22)
    link = ends.connect(queue_payloads_max=2)
    with pytest.raises(LinkClosed, match="the bulk queue to 'syncer' is full"):
        while True:
            link.send(value(2, len(payload)), payload)
    hear_end(link, "the bulk queue to 'syncer' is full")
    while hear(listener).kind == "message":
        pass


def test_bulk_that_nobody_reads_does_not_hold_up_control(ends: Ends) -> None:
    listener, payload = ends.listen(queue_payloads_max=4), bytes(1 << 20)
    link = ends.connect(queue_payloads_max=4)
    for number in range(4):
        link.send(value(number, len(payload)), payload)
    link.send(m.Leave("a", 0, "overtakes"))
    heard = [hear_message(listener) for _ in range(5)]
    assert [message.global_step for message in heard if isinstance(message, m.FragmentValue)] == [0, 1, 2, 3]


def test_no_thread_outlives_its_session_or_holds_the_process(ends: Ends) -> None:
    before = set(threading.enumerate())
    ends.listen()
    ends.meet()
    made = [thread for thread in threading.enumerate() if thread not in before]
    ours = [thread for thread in made if thread.name.startswith("diloco-")]
    streams = 1 + CONFIG.stripes
    # Each of two ends has a reader and a writer for each stream, and one thread has the port.
    assert len(ours) == 2 * 2 * streams + 1
    assert all(thread.daemon for thread in made)
    ends.close()
    for thread in ours:
        thread.join(HANGS_S)
        assert not thread.is_alive(), thread.name


def test_closed_listener_takes_nobody(ends: Ends, listener: GrpcListener) -> None:
    listener.close(1.0)
    with pytest.raises(TransportError):
        ends.connect(connect_timeout_s=0.2)


def test_traffic_counts_what_moved(ends: Ends, listener: GrpcListener) -> None:
    link, other = ends.meet(), ends.meet("b")
    (_, before), size = listener.traffic_of_learners(), len(wire.pack_body(m.Advance(1)))
    assert listener.send("a", m.GlobalFragment(1, 0, 1, 1, 99, 1000), b"x" * 1000)
    hear(link)
    link.send(value(1, 500), b"y" * 500)
    hear(listener)
    assert listener.send("b", m.Advance(1)) and hear_message(other) == m.Advance(1)

    def moved(name: str) -> tuple[int, int]:
        now, then = listener.traffic_of_learners()[1][name], before[name]
        return now.received_bytes - then.received_bytes, now.sent_bytes - then.sent_bytes

    # Payloads are counted after they were delivered.
    assert comes_true(lambda: moved("a")[0] >= 500)
    received, sent = moved("a")
    assert 1000 <= sent < 1200 and 500 <= received < 700
    received, sent = moved("b")
    assert received == 0 and size < sent < size + 100
    total, each = listener.traffic_of_learners()
    assert total == tuple(map(sum, zip(*each.values(), strict=True)))


def test_wake_ends_a_wait(listener: GrpcListener) -> None:
    listener.wake()
    # It returns at once; otherwise the suite's time limit fails the test.
    assert listener.receive(60.0) is None


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("address", "127.0.0.1", "'127.0.0.1': write host:port"),
        ("address", ":80", "write host:port"),
        ("address", "host:65536", "write host:port"),
        ("address", "host:http", "write host:port"),
        ("connect_timeout_s", 0.0, "transport.connect_timeout_s is 0.0: use a number of seconds above 0"),
        ("keepalive_s", math.inf, "keepalive_s is inf"),
        ("keepalive_timeout_s", math.nan, "keepalive_timeout_s is nan"),
        ("payload_bytes_max", 0, "payload_bytes_max is 0: use at least 1"),
        ("chunk_bytes", 4194305, "receivers take at most 4194304: lower it"),
        ("queue_messages_max", 0, "queue_messages_max is 0"),
        ("queue_payloads_max", -1, "queue_payloads_max is -1"),
        ("connections_max", 4, "connections_max is 4: one learner needs 5, one more than transport.stripes"),
        ("stripes", 0, "stripes is 0: use 1 to 16"),
        ("stripes", 17, "stripes is 17: use 1 to 16"),
        ("resume_s", 0.0, "resume_s is 0.0: use a number of seconds above 0"),
    ],
)
def test_bad_setting(field: str, value: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        dataclasses.replace(TransportConfig(), **{field: value})


def test_split_address() -> None:
    assert split_address("[::1]:5") == ("::1", 5)
    assert split_address("syncer.example:50051") == ("syncer.example", 50051)
