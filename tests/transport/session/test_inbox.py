"""A late driver reads the newest report of a learner, and loses nothing of an older one."""

from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_jax.protocol.messages import Adopted, Arrived, Heartbeat, Leave, Message, StepReport
from diloco_jax.protocol.reports import merged_report
from diloco_jax.transport.link import SUBSCRIBER, Traffic, TransportConfig
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.session import inbox as inboxes
from diloco_jax.transport.session.inbox import Inbox, Session

FOLLOWS = f"{SUBSCRIBER}a"


def report(step: int, *arrived: Arrived, incarnation: int = 1, name: str = "a") -> StepReport:
    return StepReport(name, incarnation, step, step * 8, step, (Adopted(step, 0, 0),), 0.1, 2.0, step, 64, arrived)


def session(inbox: Inbox, name: str = "a", host: int = 0, **settings: int) -> Session:
    return Session(inbox, pb.Header(sender=name, host=host), name, TransportConfig(**settings))


def read(inbox: Inbox) -> list[Message | None]:
    found = []
    while (item := inbox.get(0.0)) is not None:
        found.append(item[1].message)
    return found


def test_the_newest_of_the_reports_that_wait_is_read_in_the_place_of_the_first() -> None:
    inbox = Inbox()
    a, b = session(inbox), session(inbox, "b")
    a.put(report(1), b"")
    b.put(report(1, name="b"), b"")
    a.put(report(2), b"")
    a.put(report(3), b"")
    assert read(inbox) == [report(3), report(1, name="b")]
    a.put(report(4), b"")
    assert read(inbox) == [report(4)], "one that was read is not replaced"


def test_another_control_message_stays_between_reports() -> None:
    inbox = Inbox()
    a = session(inbox)
    for message in (report(1), Heartbeat("a", 1), report(2), report(3), Leave("a", 1, "done")):
        a.put(message, b"")
    assert read(inbox) == [report(1), Heartbeat("a", 1), report(3), Leave("a", 1, "done")]


def test_reports_of_another_incarnation_or_out_of_order_are_all_read() -> None:
    inbox = Inbox()
    a = session(inbox)
    told = [report(5), report(1, incarnation=2), report(4, incarnation=2), report(3, incarnation=2)]
    for message in told:
        a.put(message, b"")
    assert read(inbox) == [told[0], told[2], told[3]]


def test_reports_that_wait_take_the_room_of_one() -> None:
    """A fast learner neither fills its own queue nor is it held up."""
    inbox = Inbox()
    a = session(inbox, queue_messages_max=2)
    for step in range(1, 1000):
        a.put(report(step), b"")
    a.put(Heartbeat("a", 1), b"")
    assert a.room[False] == 0
    assert read(inbox) == [report(999), Heartbeat("a", 1)] and a.room[False] == 2


def test_the_traffic_of_a_learner_is_that_of_its_hosts() -> None:
    inbox = Inbox()
    a, follower, b, subscriber = (session(inbox), session(inbox, host=1), session(inbox, "b"), session(inbox, FOLLOWS))
    a.count(received_bytes=1)
    follower.count(received_bytes=20, sent_bytes=300)
    b.count(sent_bytes=4000)
    assert inbox.traffic_of_learners() == ((21, 4300), {"a": (21, 300), "b": (0, 4000)})
    subscriber.count(sent_bytes=50_000)
    b.count(shared_bytes=600_000)
    assert inbox.traffic_of_learners() == ((21, 54_300), {"a": (21, 300), "b": (0, 604_000)})


def test_the_learners_that_are_counted_are_bounded_and_all_bytes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inboxes, "LEARNERS_MAX_LIMIT", 2)
    inbox = Inbox()
    for name in (FOLLOWS, "a", "b", "c", "a"):
        session(inbox, name).count(1, 2)
    assert inbox.traffic_of_learners() == ((5, 10), {"a": Traffic(2, 4), "b": Traffic(1, 2)})


def test_threads_count_every_byte() -> None:
    inbox, sessions = Inbox(), range(4)
    threads = [
        Thread(target=lambda s: [s.count(1, 2) for _ in range(2000)], args=(session(inbox, "ab"[n % 2]),))
        for n in sessions
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert inbox.traffic_of_learners() == ((8000, 16_000), {"a": (4000, 8000), "b": (4000, 8000)})


ARRIVED = st.builds(Arrived, st.integers(0, 3), st.integers(0, 50), st.floats(0, 100))


@given(st.lists(st.lists(ARRIVED, max_size=4), min_size=2, max_size=6), st.floats(0, 10))
def test_the_newest_arrival_of_each_fragment_is_reported(told: list[list[Arrived]], later_s: float) -> None:
    merged, expected = report(1, *told[0]), {each.fragment_id: each for each in told[0]}
    for step, arrived in enumerate(told[1:], 2):
        found = merged_report(merged, report(step, *arrived), later_s)
        assert found is not None
        expected = {p: each._replace(ago_s=each.ago_s + later_s) for p, each in expected.items()}
        expected |= {each.fragment_id: each for each in arrived}
        if merged.arrived:
            assert {each.fragment_id: each for each in found.arrived} == expected
            assert len(found.arrived) == len({each.fragment_id for each in found.arrived})
        assert found._replace(arrived=()) == report(step)
        merged = found
