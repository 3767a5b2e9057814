"""A late driver reads the newest report of a learner, and loses nothing of an older one."""

from hypothesis import given
from hypothesis import strategies as st

from diloco_jax.protocol.messages import Adopted, Arrived, Heartbeat, Leave, Message, StepReport
from diloco_jax.protocol.reports import merged_report
from diloco_jax.transport.link import TransportConfig
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.session.inbox import Inbox, Session


def report(step: int, *arrived: Arrived, incarnation: int = 1, name: str = "a") -> StepReport:
    return StepReport(name, incarnation, step, step * 8, step, (Adopted(step, 0, 0),), 0.1, 2.0, step, 64, arrived)


def session(inbox: Inbox, name: str = "a", **settings: int) -> Session:
    return Session(inbox, pb.Header(sender=name), name, TransportConfig(**settings))


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
