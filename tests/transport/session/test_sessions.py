"""Tests of who may connect, who replaces whom, how much may wait, and requests that run on the driver's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from diloco_jax.protocol.messages import Heartbeat
from diloco_jax.transport.link import Delivery, TransportConfig, check_name
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.session import sessions
from diloco_jax.transport.session.inbox import Inbox
from diloco_jax.transport.session.sessions import Drains, Refused, SessionBook
from tests.transport.ends import WAIT_S, Quiet, value


class Side:
    """A listener's book of sessions with their inbox."""

    def __init__(self) -> None:
        self.config, self.inbox = TransportConfig(), Inbox()
        self.book = SessionBook[Quiet](self.config, "run", 3)

    def admit(self, learner_id: str = "a", incarnation: int = 0, number: int = 1, epoch: int = 3) -> Quiet:
        header = pb.Header(run_id="run", epoch=epoch, sender=learner_id, incarnation=incarnation, session=number)
        return self.book.admit(header, lambda: Quiet(self.inbox, header))

    def open(self, learner_id: str = "a", incarnation: int = 0) -> Quiet:
        """Admit a session and establish it."""
        session = self.admit(learner_id, incarnation)
        self.book.establish(session)
        return session

    def heard(self) -> Delivery | None:
        item = self.inbox.get(0)
        return None if item is None else item[1]


@pytest.fixture
def side() -> Side:
    return Side()


def test_session_replaces_another_only_once_it_is_established(side: Side) -> None:
    old = side.open()
    new = side.admit(incarnation=1)
    assert side.admit(incarnation=1) is new and new is not old
    assert old.open, "half a connection must not end a healthy session"
    side.book.establish(new)
    assert not old.open and new.open and "replaced by a newer connection of 'a', incarnation 1" in old.reason
    assert side.heard() == Delivery("disconnected", "a", reason=old.reason, session=1)
    side.book.establish(new)  # by its second connection
    assert new.open and side.heard() is None


def test_session_that_broke_before_it_was_established_ends_nobodys_and_is_not_heard_of(side: Side) -> None:
    old = side.open()
    new = side.admit(incarnation=1)
    new.fail("the second connection did not come")
    with pytest.raises(Refused, match="did not come"):
        side.book.establish(new)
    assert old.open and side.heard() is None
    assert side.admit(incarnation=1) is not new


def test_of_two_that_open_at_the_same_time_the_newer_stays(side: Side) -> None:
    older, newer = side.admit(incarnation=1), side.admit(incarnation=2)
    side.book.establish(newer)
    with pytest.raises(Refused, match="incarnation 1 is stale, a later connection with incarnation 2"):
        side.book.establish(older)
    assert newer.open and not older.open and side.heard() is None


def test_session_that_opens_while_the_listener_closes_is_refused(side: Side) -> None:
    opening = side.admit()
    assert side.book.stop_admitting() == [opening]
    with pytest.raises(Refused, match="closing"):
        side.book.establish(opening)


def test_later_epoch_is_refused_and_an_earlier_one_welcome(side: Side) -> None:
    """A learner that outlived the syncer returns with the old number; one that knows a newer syncer must not."""
    with pytest.raises(Refused, match="heard of epoch 4 of the syncer, this one is of epoch 3: stop this old syncer"):
        side.admit(epoch=4)
    side.admit(epoch=0)


@pytest.mark.parametrize("name", ["", "syncer", "Syncer", "../x", ".x", "a/b", "a b", "a\n", "ä", "x" * 101, "ca"])
def test_name_that_is_no_plain_word_is_refused(side: Side, name: str) -> None:
    with pytest.raises(Refused, match=r"learner_id .* is not allowed: use at most 100 letters"):
        side.admit(name)
    with pytest.raises(ValueError, match="is not allowed"):
        check_name(name)


def test_names_that_are_allowed() -> None:
    assert [check_name(name) for name in ("island-0", "A_b.9", "x" * 100)]


def test_learners_that_left_are_forgotten_when_there_are_too_many(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "KNOWN_MAX", 2)
    a, _ = side.open("a", 5), side.open("b")
    with pytest.raises(Refused, match="2 learners are connected, this syncer takes no more"):
        side.open("c")
    a.fail("gone")
    side.open("c")
    assert set(side.book._newest) == {"b", "c"}


def test_payloads_that_nobody_reads_are_bounded_in_bytes() -> None:
    inbox = Inbox()
    session = Quiet(inbox, payload_bytes_max=100)
    assert session.offer(value(1, 60), bytes(60))
    offered = threading.Event()

    def offer_another() -> None:
        session.offer(value(1, 60), bytes(60))
        offered.set()

    thread = threading.Thread(target=offer_another, daemon=True)
    thread.start()
    assert session.offer(Heartbeat("a", 0), b""), "control messages have room of their own"
    assert session.waiting_bytes == 60 and not offered.is_set()
    assert inbox.get(0) is not None
    assert offered.wait(WAIT_S) and session.waiting_bytes == 60
    thread.join(WAIT_S)


@pytest.fixture
def drains() -> Drains:
    return Drains(lambda: None)


def ask(drains: Drains, on_drain: Callable[[str], str] | None) -> tuple[bool, str]:
    """Ask for a drain in another thread while this one drives."""
    answers: list[tuple[bool, str]] = []
    thread = threading.Thread(target=lambda: answers.append(drains.ask("a")))
    thread.start()
    try:
        while thread.is_alive() and not answers:
            drains.answer(on_drain)
    finally:
        thread.join(WAIT_S)
    return answers[0]


def test_drain_runs_on_the_drivers_thread_or_tells_why_not(drains: Drains) -> None:
    threads: list[int] = []

    def leave(name: str) -> str:
        threads.append(threading.get_ident())
        return f"{name} leaves after its step"

    def refuse(name: str) -> str:
        raise ValueError(f"no learner {name!r}")

    assert ask(drains, leave) == (True, "a leaves after its step")
    assert threads == [threading.get_ident()]
    assert ask(drains, refuse) == (False, "no learner 'a'")
    assert ask(drains, None) == (False, "this syncer cannot drain learners")


def test_drain_that_fails_is_the_drivers_error_and_the_caller_hears_of_it(drains: Drains) -> None:
    answers: list[tuple[bool, str]] = []
    thread = threading.Thread(target=lambda: answers.append(drains.ask("a")))
    thread.start()
    with pytest.raises(KeyError):
        while thread.is_alive():
            drains.answer(lambda name: {}[name])
    thread.join(WAIT_S)
    assert answers == [(False, "the syncer failed; see its log")]


def test_drain_request_to_a_busy_driver_is_withdrawn(drains: Drains, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "DRAIN_ANSWER_S", 0.01)
    done: list[str] = []
    ok, message = drains.ask("a")
    assert not ok and "was busy for 0.01 s and did nothing; ask again" in message
    drains.answer(lambda name: done.append(name) or "too late")  # type: ignore[func-returns-value]
    assert not done


def test_drain_requests_are_bounded(drains: Drains, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "DRAINS_MAX", 0)
    assert drains.ask("a") == (False, "0 drain requests are waiting; ask again later")
    drains.close()
    assert drains.ask("a") == (False, "the syncer is closing")
