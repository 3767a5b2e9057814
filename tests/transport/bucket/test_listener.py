"""The syncer's side of a bucket: who leads, what is asked, what is written once, and what is left behind."""

import threading
import time
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from diloco_jax.protocol import messages as m
from diloco_jax.transport.bucket import session as session_module
from diloco_jax.transport.bucket.listener import BucketListener
from diloco_jax.transport.endpoints.ends import listen
from diloco_jax.transport.endpoints.greeting import ask_description
from diloco_jax.transport.link import SUBSCRIBER, TransportError
from diloco_jax.transport.session.calls import ask_operator, ask_status
from diloco_jax.transport.session.description import Description
from diloco_jax.transport.session.operator_requests import DRAIN, OperatorRequest
from diloco_jax.transport.store import names
from diloco_jax.transport.store.seal import SEAL_BYTES
from diloco_jax.transport.store.store import ObjectStore, StoreError
from tests.limits import HANGS_S
from tests.transport.bucket.conftest import POLL_S
from tests.transport.bucket.faults import Faults
from tests.transport.ends import Ends, comes_true, greet, hear, hear_end, hear_message, value

VERSION = m.GlobalFragment(1, 0, 1, 1, 7, 3)


class Whole:
    """A version for learners of one host."""

    value_bytes = 3

    def __init__(self, payload: bytes) -> None:
        self.payload = payload

    def cut(self, blocks: bytes) -> Any:
        raise AssertionError("no learner has several hosts")


def payloads(store: ObjectStore) -> list[str]:
    return store.list("e/1/v/")


def test_a_version_for_three_learners_is_one_object(ends: Ends, listener: BucketListener) -> None:
    links = [ends.meet(name) for name in "abc"]
    puts: list[str] = []
    write = listener._bucket.write

    def counted(key: str, *parts: bytes) -> int:
        puts.append(key)
        return write(key, *parts)

    listener._bucket.write = counted  # type: ignore[method-assign,assignment]
    for name in "abc":
        assert listener.send_version(name, VERSION, Whole(b"abc"))
    for link in links:
        delivery = hear(link)
        assert (delivery.message, bytes(delivery.payload)) == (VERSION, b"abc")
    assert puts.count(names.payload(1, "", "", names.reference("v", 1))) == 1
    # The syncer sends the object once, and the link of each learner carries it.
    total, each = listener.traffic_of_learners()
    received, sent = map(sum, zip(*each.values(), strict=True))
    assert each.keys() == set("abc") and received == total.received_bytes
    assert sent == total.sent_bytes + 2 * (len(b"abc") + SEAL_BYTES)
    assert not [key for key in puts if "-p/" in key]
    # The message names the round of each learner; the payload is the same.
    assert listener.send_version("a", VERSION._replace(merged_round=5), Whole(b"never looked at"))
    delivery = hear(links[0])
    assert (delivery.message, bytes(delivery.payload)) == (VERSION._replace(merged_round=5), b"abc")


class Cut(Whole):
    """A version for islands of several hosts: a host gets the bytes that it holds, with their number as digest."""

    def cut(self, blocks: bytes) -> Any:
        return len(blocks), lambda: b"cut " + blocks


def test_hosts_with_equal_blocks_and_subscribers_share_objects(ends: Ends, listener: BucketListener) -> None:
    """Three islands of two hosts: the first two are cut alike, and the third holds all blocks on both hosts."""
    hosts = {}
    for name, held in {"a": (b"left", b"right"), "b": (b"left", b"right"), "c": (b"all", b"all")}.items():
        leader = ends.connect(name, hosts=2)
        greet(listener, leader, name)
        for host, blocks in enumerate(held):
            link = leader if host == 0 else ends.connect(name, number=leader.number, host=1, hosts=2)
            link.send(m.HostBlocks(name, 0), blocks)
            hosts[name, host] = link, blocks
    for number in range(2):
        version = VERSION._replace(version=number)
        for name in "abc":
            assert listener.send_version(name, version, Cut(b"whole"))
        for link, blocks in hosts.values():
            delivery = hear(link)
            assert delivery.message == m.CutFragment(version, len(blocks)) and delivery.payload == b"cut " + blocks
    # Two versions, each for left, right and all; and nothing in the sessions' own places.
    store = ObjectStore(listener.address)
    assert len(payloads(store)) == 2 * 3
    assert comes_true(lambda: not [key for key in store.list("e/1/s/") if "down-p/" in key])
    # A learner of one host gets the same version whole.
    one = ends.meet("d")
    assert listener.send_version("d", version, Cut(b"whole")) and hear(one).payload == b"whole"
    assert len(payloads(store)) == 2 * 3 + 1


def test_what_follows_a_message_at_once_shares_its_object(
    ends: Ends, listener: BucketListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "GATHER_SHARE", inf)
    link = ends.meet()
    session, counts = link._session, list[int]()
    write = session._writer.write
    session._writer.write = lambda batch: counts.append(len(batch.entries)) or write(batch)
    monkeypatch.setattr(session_module, "GATHER_S", inf)
    messages = [m.Heartbeat("a", 0), m.Leave("a", 0, "over"), m.Heartbeat("a", 0)]
    for message in messages:
        link.send(message)
    assert not counts
    monkeypatch.setattr(session_module, "GATHER_S", 0.0)
    with session._changed:
        session._changed.notify_all()
    assert [hear_message(listener) for _ in messages] == messages and counts[0] == len(messages)


def test_a_shared_version_is_deleted_when_the_last_learner_has_it(
    ends: Ends, listener: BucketListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco_jax.transport.bucket.listener.SHARED_MAX", 1)
    links = {name: ends.meet(name) for name in "ab"}
    store = ObjectStore(listener.address)
    for number in range(4):
        for name, link in links.items():
            assert listener.send_version(name, VERSION._replace(version=number), Whole(b"%d" % number * 9))
            assert bytes(hear(link).payload) == b"%d" % number * 9
    # The newest one is kept for a learner that comes later.
    assert comes_true(lambda: payloads(store) == ["e/1/v/000000000004"])
    # A learner that is gone needs nothing, whether or not it was sent something.
    links["a"].close(HANGS_S)
    hear_end(listener)
    assert not listener.send_version("a", VERSION._replace(version=8), Whole(b"x"))
    assert listener.send_version("b", VERSION._replace(version=9), Whole(b"y")) and hear(links["b"]).payload == b"y"
    assert comes_true(lambda: payloads(store) == ["e/1/v/000000000005"])


def test_a_message_to_a_session_that_ends_meanwhile_holds_no_version(ends: Ends, listener: BucketListener) -> None:
    ends.meet()
    session = listener._heard["a"]
    session.fail("over")
    assert not listener.send_version("a", VERSION, Whole(b"abc"))
    shared = next(iter(listener._shared.values()))[b""]
    assert comes_true(lambda: shared._holders == 1)


def test_what_is_read_is_deleted_while_the_session_lasts(ends: Ends, listener: BucketListener) -> None:
    link, store = ends.meet(), ObjectStore(listener.address)
    most = 0
    for number in range(100):
        for _ in range(10):
            link.send(m.Leave("a", 0, str(number)))
        link.send(value(number, 3), b"abc")
        for _ in range(11):
            hear(listener)
        most = max(most, len(store.list("")))
    assert most < 60
    total, each = listener.traffic_of_learners()
    assert total.received_bytes < 1_000_000 and each == {"a": total}


def test_closing_leaves_nothing(ends: Ends, listener: BucketListener) -> None:
    store = ObjectStore(listener.address)
    links = {name: ends.meet(name) for name in "ab"}
    store.put("other/object", b"of somebody else")
    links["a"].send(value(1, 3), b"abc")
    hear(listener)
    with pytest.raises(TransportError):
        ends.connect("a", run_id="other")
    links["b"].close(HANGS_S)
    hear_end(listener)
    ask_status(ends.there)
    assert listener.send("a", VERSION, b"abc")
    listener.close(HANGS_S)
    assert hear_message(links["a"]) == VERSION
    hear_end(links["a"], "closed by the syncer")
    assert store.list("") == ["other/object"]
    listener.close(HANGS_S)


def test_a_syncer_that_closes_waits_for_a_learner_that_reads_slowly(ends: Ends, listener: BucketListener) -> None:
    link = ends.meet()
    reader = link._session._reader
    read = reader.next
    reader.next = lambda: (time.sleep(0.1), read())[1]
    for version in range(3):
        assert listener.send("a", VERSION._replace(version=version), b"abc")
    listener.close(HANGS_S)
    assert [hear_message(link) for _ in range(3)] == [VERSION._replace(version=version) for version in range(3)]
    hear_end(link, "closed by the syncer")
    assert ObjectStore(listener.address).list("") == []


def test_a_syncer_that_closes_waits_no_longer_than_it_may_for_a_learner_that_is_gone(ends: Ends) -> None:
    listener = ends.listen()
    link = ends.meet()
    # Its process is stopped.
    link._session._reader.next = lambda: None
    listener.close(0.05)
    assert ObjectStore(listener.address).list("alive/") == []


def test_an_ended_session_is_cleaned_while_others_run(ends: Ends, listener: BucketListener, hurried: None) -> None:
    store = ObjectStore(listener.address)
    link = ends.meet("b")
    for incarnation in range(4):
        ends.meet("a", incarnation).close(HANGS_S)
        hear_end(listener)
    with pytest.raises(TransportError, match="stale"):
        ends.connect("a", 2)
    assert comes_true(lambda: {key.split("/")[3].split(".")[0] for key in store.list("e/1/s/")} <= {"b"})
    assert comes_true(lambda: len(store.list("e/1/in/")) == 1)
    greet(listener, link, "b")


def test_what_an_earlier_syncer_left_is_deleted(ends: Ends, address: str) -> None:
    store = ObjectStore(address)
    for key in ("e/1/s/a.0.1.0.ff/up/000000000001", "e/1/v/000000000001", "e/2/in/hello.x", "copy/1/base", "e/7/v/1"):
        store.put(key, b"")
    ends.listen(epoch=5)
    assert comes_true(lambda: not [key for key in store.list("e/") if not key.startswith(("e/5/", "e/7/"))])
    assert store.exists("copy/1/base") and store.exists("e/7/v/1")


def test_a_second_syncer_of_an_epoch_is_refused(ends: Ends, listener: BucketListener) -> None:
    for epoch in (0, 1):
        with pytest.raises(ValueError, match="has a syncer of epoch 1"):
            listen(ends.there, run_id="run", epoch=epoch)
    with pytest.raises(ValueError, match="has objects of run 'run'"):
        listen(ends.there, run_id="other", epoch=2)
    greet(listener, ends.connect())


def test_a_newer_syncer_takes_over(ends: Ends, listener: BucketListener, hurried: None) -> None:
    link = ends.meet(keepalive_s=0.1)
    newer = ends.listen(epoch=2)
    assert not listener.lost and not newer.lost
    # Its driver, which waits for messages, notices.
    assert comes_true(lambda: listener.receive(HANGS_S) is None and listener.lost)
    assert listener.lost == "another process leads the run as the syncer of epoch 2"
    # The earlier process is stopped, and a learner that hears nothing from it looks for the newer one.
    link._session._reader.next = lambda: None
    hear_end(link, "a newer syncer leads the run")
    greet(newer, ends.connect(epoch=2, incarnation=1), incarnation=1)
    listener.close(0.0)
    greet(newer, ends.connect("b", epoch=2), "b")


def test_questions_are_answered(ends: Ends, listener: BucketListener) -> None:
    there = ends.there
    assert ask_status(there) == "{}"
    listener.status_json = '{"round": 3}'
    assert ask_status(there) == '{"round": 3}'
    assert ask_description(there, "s") == Description("", "")
    known = Description("the config", "the layout", began_unix_s=5.0)
    listener.announce(dict, known, {"a": 4}.__getitem__)
    assert ask_description(there, "a") == known
    assert ask_description(there, "a", numbered=True) == known._replace(number=4)
    listener.on_operator = lambda request: f"{request.action} {request.learner_id}"
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(ask_operator(there, OperatorRequest(DRAIN, "a"))))
    asking.start()
    assert comes_true(lambda: listener.receive(POLL_S) or answers)
    asking.join(HANGS_S)
    assert "drain a" in str(answers[0])


def test_a_question_without_a_syncer_has_no_answer(ends: Ends, address: str, listener: BucketListener) -> None:
    quick = replace(ends.there, connect_timeout_s=0.05)
    with pytest.raises(TransportError, match=r"no syncer answered at .*nobody.* within 0\.05 s \(it has no syncer\)"):
        ask_status(replace(quick, address="memory://nobody"))
    listener._closing.set()
    listener._thread.join(HANGS_S)
    with pytest.raises(TransportError, match=r"did not answer within 0\.05 s"):
        ask_status(quick)
    assert ObjectStore(address).list(names.entrance(1)) == []


def test_an_operators_request_is_done_once_though_the_answer_is_not_written(ends: Ends, faults: Faults) -> None:
    listener = ends.listen()
    done: list[str] = []
    listener.on_operator = lambda request: done.append(request.action) or "done"  # type: ignore[func-returns-value]
    failures = iter(range(3))

    def refuse(name: str, key: Any) -> None:
        if name == "put" and "/answer/" in key and next(failures, None) is not None:
            raise StoreError("503")

    faults.before.append(refuse)
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(ask_operator(ends.there, OperatorRequest(DRAIN, "a"))))
    asking.start()
    assert comes_true(lambda: listener.receive(POLL_S) or answers)
    asking.join(HANGS_S)
    assert done == ["drain"] and next(failures, None) is None


def test_more_sessions_than_the_limit_are_refused(ends: Ends) -> None:
    listener = ends.listen(connections_max=5)
    links = [ends.meet(name) for name in "abcde"]
    with pytest.raises(TransportError, match=r"5 sessions are open: stop one, or raise transport\.connections_max"):
        ends.connect("f", connections_max=5)
    links[0].close(HANGS_S)
    hear_end(listener)
    ends.meet("f")


def test_subscribers_follow_without_a_port(ends: Ends, listener: BucketListener) -> None:
    link = ends.connect("s", subscribes=True)
    link.send(m.Hello("s", 0, (), (0,), (0,), 0, 0, 0, evaluates=False))
    assert hear(listener).peer == f"{SUBSCRIBER}s"
    learner = ends.meet()
    for peer in (f"{SUBSCRIBER}s", "a"):
        assert listener.send_version(peer, VERSION, Whole(b"abc"))
    assert bytes(hear(link).payload) == bytes(hear(learner).payload) == b"abc"
    assert len(payloads(ObjectStore(listener.address))) == 1
