"""Who may connect, who replaces whom, how much may wait, and requests that run on the driver's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from diloco_jax.protocol.messages import FragmentValue, Heartbeat, Message
from diloco_jax.transport.link import Delivery, TransportConfig, check_name
from diloco_jax.transport.session import sessions
from diloco_jax.transport.session.inbox import Inbox, Session
from diloco_jax.transport.session.sessions import Refused, SessionListener

WAIT_S = 20.0


class Quiet(Session):
    """A session whose other end is nowhere."""

    def send(self, message: Message, parts: tuple[memoryview, ...]) -> None:
        del message, parts

    def fail(self, reason: str) -> None:
        self.finish(reason)


def listener(**settings: int) -> SessionListener[Quiet]:
    return SessionListener(TransportConfig(**settings), "run", 3)  # type: ignore[arg-type]


def admit(side: SessionListener[Quiet], learner_id: str = "a", incarnation: int = 0, number: int = 1) -> Quiet:
    return side.admit("run", 3, learner_id, incarnation, number, lambda: Quiet(side.inbox, learner_id, side.config))


def test_session_replaces_another_only_once_it_is_established() -> None:
    side = listener()
    old = admit(side)
    side.establish(old)
    new = admit(side, incarnation=1)
    assert admit(side, incarnation=1) is new and new is not old
    assert old.open, "half a connection must not end a healthy session"
    side.establish(new)
    assert not old.open and new.open and "replaced by a newer connection of 'a', incarnation 1" in old.reason
    assert side.receive(0) == Delivery("disconnected", "a", reason=old.reason)
    side.establish(new)  # by its second connection
    assert new.open and side.receive(0) is None


def test_session_that_broke_before_it_was_established_ends_nobodys_and_is_not_heard_of() -> None:
    side = listener()
    old = admit(side)
    side.establish(old)
    new = admit(side, incarnation=1)
    new.fail("the second connection did not come")
    with pytest.raises(Refused, match="did not come"):
        side.establish(new)
    assert old.open and side.receive(0) is None
    assert admit(side, incarnation=1) is not new


def test_of_two_that_open_at_the_same_time_the_newer_stays() -> None:
    side = listener()
    older, newer = admit(side, incarnation=1), admit(side, incarnation=2)
    side.establish(newer)
    with pytest.raises(Refused, match="incarnation 1 is stale, a later connection with incarnation 2"):
        side.establish(older)
    assert newer.open and not older.open and side.receive(0) is None


def test_session_that_opens_while_the_listener_closes_is_refused() -> None:
    side = listener()
    opening = admit(side)
    assert side.stop_admitting() == [opening]
    with pytest.raises(Refused, match="closing"):
        side.establish(opening)


def test_later_epoch_is_refused_and_an_earlier_one_welcome() -> None:
    """A learner that outlived the syncer returns with the old number; one that knows a newer syncer must not."""
    side = listener()
    with pytest.raises(Refused, match="heard of epoch 4 of the syncer, this one is of epoch 3: stop this old syncer"):
        side.admit("run", 4, "a", 0, 1, lambda: Quiet(side.inbox, "a", side.config))
    side.admit("run", 0, "a", 0, 1, lambda: Quiet(side.inbox, "a", side.config))


@pytest.mark.parametrize("name", ["", "syncer", "Syncer", "../x", ".x", "a/b", "a b", "a\n", "ä", "x" * 101, "ca"])
def test_name_that_is_no_plain_word_is_refused(name: str) -> None:
    with pytest.raises(Refused, match=r"learner_id .* is not allowed: use at most 100 letters"):
        admit(listener(), name)
    with pytest.raises(ValueError, match="is not allowed"):
        check_name(name)


def test_names_that_are_allowed() -> None:
    assert [check_name(name) for name in ("island-0", "A_b.9", "x" * 100)]


def test_learners_that_left_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "KNOWN_MAX", 2)
    side = listener()
    a, b = admit(side, "a", 5), admit(side, "b")
    side.establish(a)
    side.establish(b)
    with pytest.raises(Refused, match="2 learners are connected, this syncer takes no more"):
        side.establish(admit(side, "c"))
    a.fail("gone")
    side.establish(admit(side, "c"))
    assert set(side._newest) == {"b", "c"}


def test_payloads_that_nobody_reads_are_bounded_in_bytes() -> None:
    inbox = Inbox()
    session = Quiet(inbox, "a", TransportConfig(payload_bytes_max=100))
    value = FragmentValue("a", 0, 1, 0, 1, 1, 1, 0, 1, 60)
    assert session.offer(value, bytes(60))
    offered = threading.Event()

    def offer_another() -> None:
        session.offer(value, bytes(60))
        offered.set()

    thread = threading.Thread(target=offer_another, daemon=True)
    thread.start()
    assert session.offer(Heartbeat("a", 0), b""), "control messages have room of their own"
    assert session.waiting_bytes == 60 and not offered.is_set()
    assert inbox.get(0) is not None
    assert offered.wait(WAIT_S) and session.waiting_bytes == 60
    thread.join(WAIT_S)


# ---- requests that run on the driver's thread -------------------------------------------------------------------


@pytest.fixture
def side() -> SessionListener[Quiet]:
    return listener()


def ask(side: SessionListener[Quiet], drive: Callable[[], object]) -> tuple[bool, str]:
    """Ask for a drain in another thread while this one drives."""
    answers: list[tuple[bool, str]] = []
    thread = threading.Thread(target=lambda: answers.append(side.request_drain("a")))
    thread.start()
    try:
        while thread.is_alive() and not answers:
            drive()
    finally:
        thread.join(WAIT_S)
    return answers[0]


def test_drain_runs_on_the_drivers_thread(side: SessionListener[Quiet]) -> None:
    threads: list[int] = []

    def on_drain(name: str) -> str:
        threads.append(threading.get_ident())
        return f"{name} leaves after its step"

    side.on_drain = on_drain
    assert ask(side, lambda: side.receive(0.01)) == (True, "a leaves after its step")
    assert threads == [threading.get_ident()]


def test_drain_that_the_driver_refuses_tells_why(side: SessionListener[Quiet]) -> None:
    def on_drain(name: str) -> str:
        raise ValueError(f"no learner {name!r}")

    assert ask(side, lambda: side.receive(0.01)) == (False, "this syncer cannot drain learners")
    side.on_drain = on_drain
    assert ask(side, lambda: side.receive(0.01)) == (False, "no learner 'a'")


def test_drain_that_fails_is_the_drivers_error_and_the_caller_hears_of_it(side: SessionListener[Quiet]) -> None:
    def on_drain(name: str) -> str:
        raise RuntimeError(name)

    side.on_drain = on_drain
    seen: list[RuntimeError] = []

    def drive() -> None:
        try:
            side.receive(0.01)
        except RuntimeError as error:
            seen.append(error)

    assert ask(side, drive) == (False, "the syncer failed; see its log")
    assert len(seen) == 1


def test_drain_request_to_a_busy_driver_is_withdrawn(
    side: SessionListener[Quiet], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "DRAIN_ANSWER_S", 0.01)
    done: list[str] = []
    side.on_drain = lambda name: done.append(name) or "too late"  # type: ignore[func-returns-value]
    ok, message = side.request_drain("a")
    assert not ok and "was busy for 0.01 s and did nothing; ask again" in message
    side.receive(0)
    assert not done


def test_drain_requests_are_bounded(side: SessionListener[Quiet], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "DRAINS_MAX", 0)
    assert side.request_drain("a") == (False, "0 drain requests are waiting; ask again later")
    side.stop_admitting()
    assert side.request_drain("a") == (False, "the syncer is closing")
