"""A bucket that fails, lies or is shared with strangers: messages arrive in order, or their session ends."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from diloco_jax.protocol import messages as m
from diloco_jax.transport.bucket import listener as listening
from diloco_jax.transport.link import LinkClosed, TransportError
from diloco_jax.transport.store import names
from diloco_jax.transport.store.store import LISTED_MAX, ObjectStore, StoreError
from tests.limits import HANGS_S
from tests.transport.bucket.faults import Drawn, Faults, outage, spoil
from tests.transport.ends import Ends, comes_true, greet, hear, hear_end, hear_message, value

SEEDS = 10
SILENCE = {"keepalive_s": 0.15, "keepalive_timeout_s": 0.15}


@pytest.fixture(autouse=True)
def quick(hurried: None) -> None:
    """Every test here waits for what takes seconds."""


@pytest.fixture
def listener(ends: Ends, faults: Faults) -> Any:
    """A listener whose store has these faults."""
    return ends.listen()


@pytest.fixture
def store(address: str) -> ObjectStore:
    """The store as a stranger sees it."""
    return ObjectStore(address)


def exchange(ends: Ends, link: Any, number: int) -> None:
    """Send a message of each lane both ways."""
    link.send(m.Leave("a", 0, str(number)))
    link.send(value(number, 3), b"abc")
    heard = [hear(ends.listener) for _ in range(2)]
    assert {type(each.message) for each in heard} == {m.Leave, m.FragmentValue}
    assert ends.listener.send("a", m.Advance(number))
    assert ends.listener.send("a", m.GlobalFragment(number, 0, number, 1, 7, 3), b"abc")
    heard = [hear(link) for _ in range(2)]
    assert {type(each.message) for each in heard} == {m.Advance, m.GlobalFragment}


def test_an_outage_delays_and_loses_nothing(ends: Ends, listener: Any, faults: Faults) -> None:
    link = ends.meet()
    faults.before.append(outage)
    for number in range(5):
        link.send(m.Leave("a", 0, str(number)))
        link.send(value(number, 3), b"abc")
    time.sleep(0.05)
    assert listener.receive(0) is None and link.open
    faults.before.clear()
    heard = [hear_message(listener) for _ in range(10)]
    assert [each.reason for each in heard if isinstance(each, m.Leave)] == list("01234")
    assert [each.global_step for each in heard if isinstance(each, m.FragmentValue)] == list(range(5))


def test_an_outage_that_lasts_ends_both_sides(ends: Ends, faults: Faults) -> None:
    listener = ends.listen(**SILENCE)
    link = ends.meet(**SILENCE)
    faults.before.append(outage)
    link.send(m.Leave("a", 0, "lost"))
    for side in (link, listener):
        hear_end(side, "503 Slow Down")
    with pytest.raises(TransportError, match="503 Slow Down"):
        ends.connect(connect_timeout_s=0.05)
    with pytest.raises(LinkClosed):
        link.send(m.Leave("a", 0, "later"))


def test_a_session_that_closes_in_an_outage_flushes_when_it_is_over(ends: Ends, listener: Any, faults: Faults) -> None:
    link = ends.meet()
    faults.before.append(outage)
    link.send(m.Leave("a", 0, "last words"))
    link.send(value(1, 3), b"abc")
    closing = threading.Thread(target=link.close, args=(HANGS_S,))
    closing.start()
    time.sleep(0.05)
    assert closing.is_alive()
    faults.before.clear()
    assert {type(hear_message(listener)) for _ in range(2)} == {m.Leave, m.FragmentValue}
    hear_end(listener, "closed by the learner")
    closing.join(HANGS_S)


def test_a_session_that_closes_in_an_outage_without_end_gives_up(ends: Ends, listener: Any, faults: Faults) -> None:
    link = ends.meet()
    faults.before.append(outage)
    link.send(value(1, 3), b"abc")
    began_s = time.monotonic()
    link.close(0.1)
    assert time.monotonic() - began_s < HANGS_S
    assert comes_true(lambda: not [each for each in threading.enumerate() if each.name.endswith("-syncer")])
    faults.before.clear()


@pytest.mark.parametrize("name", ["put", "create", "delete"])
def test_a_lost_answer_repeats_nothing(ends: Ends, listener: Any, faults: Faults, name: str) -> None:
    odd: list[int] = []

    def lose(done: str, key: Any, _: Any) -> None:
        if done == name:
            odd.append(0)
            if len(odd) % 2:
                raise StoreError(f"no answer to {name} {key}")

    faults.after.append(lose)
    link = ends.connect()
    for number in range(3):
        exchange(ends, link, number)
    assert len(odd) > 1 and listener.receive(0) is None and link.receive(0) is None


def test_what_appears_late_is_found(ends: Ends, listener: Any, faults: Faults) -> None:
    seen: dict[str, int] = {}

    def late(name: str, key: Any) -> Any:
        if name not in ("get", "read_whole", "list"):
            return None
        seen[f"{name} {key}"] = seen.get(f"{name} {key}", 0) + 1
        if name == "list":
            return ([],) if key == names.entrance(1) and seen[f"list {key}"] % 4 else None
        return (None,) if seen[f"{name} {key}"] < 3 else None

    faults.before.append(late)
    link = ends.connect()
    for number in range(2):
        exchange(ends, link, number)
    # A listing shows a request again that is answered.
    faults.before[:] = [
        lambda name, key: ([f"{names.entrance(1)}hello.gone"],) if name == "list" and "/in/" in key else None
    ]
    exchange(ends, link, 3)


def test_a_request_that_is_listed_before_it_can_be_read_is_read_later(
    ends: Ends, listener: Any, faults: Faults
) -> None:
    hidden = iter(range(2))
    faults.before.append(
        lambda name, key: (None,) if name == "get" and "/in/" in key and next(hidden, None) is not None else None
    )
    ends.meet(connect_timeout_s=20.0)
    assert next(hidden, None) is None


def test_a_stream_object_that_is_gone_ends_its_session_and_no_other(
    ends: Ends, faults: Faults, store: ObjectStore
) -> None:
    listener = ends.listen(**SILENCE)
    link, other = ends.meet(**SILENCE), ends.meet("b", **SILENCE)

    def swallow(name: str, key: Any) -> Any:
        return (None,) if name == "get" and "/s/a." in key and "/up/" in key else None

    faults.before.append(swallow)
    link.send(m.Leave("a", 0, "lost"))
    hear_end(listener, "'a' has written nothing for")
    hear_end(link, "'a' has written nothing for")
    greet(listener, other, "b")


def test_a_payload_that_is_gone_or_changed_ends_its_session_and_no_other(
    ends: Ends, listener: Any, faults: Faults, store: ObjectStore
) -> None:
    other = ends.meet("b")
    listener._bucket.write("copied", bytes(300))
    copied = store.get("copied", 999) or b""
    sabotage: dict[str, Callable[[str], None]] = {
        "it is no longer in the bucket: somebody else deletes or changes objects there": lambda key: store.delete(
            [key]
        ),
        "is damaged, or not written with this run's token": lambda key: store.put(key, bytes(len(copied))),
        "somebody else deletes or changes": lambda key: store.put(key, b"short"),
        "is damaged, or": lambda key: store.put(key, copied),
    }
    for number, (words, spoils) in enumerate(sabotage.items()):
        link = ends.meet(incarnation=number)

        def meddle(name: str, key: Any, _: Any, spoils: Callable[[str], None] = spoils) -> None:
            if name == "put" and "/up-p/" in key:
                spoils(key)

        faults.after[:] = [meddle]
        link.send(value(1, 300, number), bytes(300))
        hear_end(listener, "a payload of 'a' cannot be read")
        assert words in hear_end(link).reason
    greet(listener, other, "b")


def test_strangers_objects_in_a_stream_are_replaced(
    ends: Ends, listener: Any, faults: Faults, store: ObjectStore
) -> None:
    """Check that somebody who knows all names cannot end a session by writing there first."""
    link = ends.connect()
    session = link._session
    copied = store.get(names.leader(1), 9999) or b""
    contents = [b"", b"foreign" * 50, bytes(4 << 20), copied]
    for number, content in enumerate(contents):
        with session._changed:
            planted = [
                names.in_stream(session.place.prefix, way, at)
                for way, at in ((names.UP, session._writer.number + 3), (names.DOWN, session._reader.read + 3))
            ]
            for key in planted:
                store.put(key, content)
        for each in range(6):
            exchange(ends, link, 10 * number + each)
        assert link.open


def test_strangers_objects_at_the_entrance_are_deleted(
    ends: Ends, listener: Any, store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    link = ends.meet()
    hello = store.list(names.entrance(1))[0]
    entrance = names.entrance(1)
    foreign = {
        "nonsense": b"x",
        "folder/hello.b.0.1.0": b"x",
        "hello.": b"",
        "ask.x": bytes(5000),
        "follow.b.0.1.0.00": b"x",
        "hello.b.0.5.0.0011223344556677": store.get(hello, 9999) or b"",
    }
    for name, content in foreign.items():
        store.put(entrance + name, content)
    # Objects with the run's key that are not what their names say.
    bucket = listener._bucket
    bucket.write(f"{entrance}hello.b.0.1.0.0011223344556677", bucket.read(hello, 9999) or b"")
    bucket.write(f"{entrance}hello.c", b"\xff")
    bucket.write(f"{entrance}ask.y", b"\xff")
    assert comes_true(lambda: store.list(entrance) == [hello])
    greet(listener, link)
    assert "is not used, and deleted" in caplog.text


def test_an_entrance_full_of_strangers_costs_bounded_work(
    ends: Ends, listener: Any, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "HANDLED_MAX", 4)
    flood = [f"{names.entrance(1)}hello.{number:06}" for number in range(LISTED_MAX)]
    deleted: list[str] = []
    most: list[int] = []

    def listing(name: str, key: Any) -> Any:
        if name == "list" and key == names.entrance(1):
            most.append(sum(each.name == "diloco-entrance" for each in threading.enumerate()))
            return (flood[len(deleted) :][:LISTED_MAX],)
        if name == "get" and "hello.0" in key:
            return (b"foreign",)
        if name == "delete" and "hello.0" in key[0]:
            deleted.extend(key)
            return ((),)
        return None

    faults.before.append(listing)
    assert comes_true(lambda: len(deleted) > 20)
    faults.before.clear()
    assert max(most) <= 4 and len(listener._seen) <= LISTED_MAX
    greet(listener, ends.connect())


def test_nothing_depends_on_the_clock_of_the_day(ends: Ends, listener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    link, real = ends.meet(), time.time
    for number, skew_s in enumerate((4e7, -4e7)):
        with monkeypatch.context() as patched:
            patched.setattr(time, "time", lambda skew_s=skew_s: real() + skew_s)
            exchange(ends, link, number)
            ends.meet(f"b{number}")


def numbered(number: int, bulk: bool, down: bool) -> tuple[Any, bytes]:
    payload = number.to_bytes(2, "little") * 20 if bulk else b""
    if down:
        return (m.GlobalFragment(1, 0, number, 1, 7, 40), payload) if bulk else (m.Advance(number), b"")
    return (value(number, 40), payload) if bulk else (m.Leave("a", 0, str(number)), b"")


def number_of(message: Any) -> int:
    if isinstance(message, m.GlobalFragment):
        return message.version
    return int(message.reason) if isinstance(message, m.Leave) else message.global_step  # type: ignore[no-any-return]


def check_session(seed: int, address: str, faults: Faults) -> bool:
    """Talk over one session under the faults of a seed; return whether all arrived."""
    drawn = Drawn(seed)
    ends = Ends(address=address, poll_s=0.002, queue_payloads_max=8, connect_timeout_s=2.0, **SILENCE)
    store = ObjectStore(address)
    try:
        listener = ends.listen()
        faults.before[:], faults.after[:] = [drawn.before], [drawn.after]
        link = connected(ends, drawn)
        talks = {down: {False: ([], []), True: ([], [])} for down in (False, True)}
        ended = {"link": 0, "listener": 0}

        def pump(side: Any, down: bool) -> None:
            while (delivery := side.receive(0.0)) is not None:
                if delivery.kind == "disconnected":
                    ended["link" if down else "listener"] += 1
                    continue
                assert not ended["link" if down else "listener"], "a message behind the end"
                bulk = isinstance(delivery.message, m.FragmentValue | m.GlobalFragment)
                number = number_of(delivery.message)
                talks[down][bulk][1].append(number)
                assert bytes(delivery.payload) == (number.to_bytes(2, "little") * 20 if bulk else b"")

        for number in range(24):
            bulk = bool(number % 2)
            try:
                link.send(*numbered(number, bulk, False))
                talks[False][bulk][0].append(number)
            except LinkClosed:
                pass
            if listener.send("a", *numbered(number, bulk, True)):
                talks[True][bulk][0].append(number)
            if number == 12 and seed % 3 == 0:
                spoil(store, seed, "e/1/s/")
            time.sleep(0.003)
            pump(listener, False)
            pump(link, True)
        drawn.over = True

        def complete() -> bool:
            pump(listener, False)
            pump(link, True)
            arrived = all(sent == heard for lanes in talks.values() for sent, heard in lanes.values())
            return arrived or all(ended.values()) or not (link.open or listener._book.connected)

        assert comes_true(complete, 30.0), (seed, talks, ended)
        pump(listener, False)
        pump(link, True)
        for down, lanes in talks.items():
            for sent, heard in lanes.values():
                # What arrives is what was sent, without a gap; less only if the end was told.
                assert heard == sent[: len(heard)], (seed, sent, heard)
                assert heard == sent or ended["link" if down else "listener"] == 1, (seed, down, sent, heard)
        assert max(ended.values()) <= 1
        return not any(ended.values())
    finally:
        drawn.over = True
        ends.close()
        faults.before.clear()
        faults.after.clear()
        assert not store.list(""), (seed, store.list(""))


def connected(ends: Ends, drawn: Drawn) -> Any:
    """Connect, which may take several attempts under faults, and let the listener hear of it."""
    for number in range(20):
        try:
            link = ends.connect(incarnation=0)
            break
        except TransportError:
            drawn.over = number > 10
    link.send(m.Heartbeat("a", 0))
    until_s = time.monotonic() + 30.0
    while time.monotonic() < until_s:
        delivery = ends.listener.receive(0.05)
        if delivery is not None and delivery.session == link.number:
            return link
    raise AssertionError("the first message does not arrive")


@pytest.mark.parametrize("seed", range(SEEDS))
def test_messages_arrive_in_order_or_the_session_ends(seed: int, address: str, faults: Faults) -> None:
    check_session(seed, address, faults)
    assert comes_true(lambda: not [each for each in threading.enumerate() if each.name.startswith("diloco-")])


@pytest.mark.nightly
def test_messages_arrive_under_two_hundred_drawn_faults(faults: Faults) -> None:
    arrived = [check_session(seed, f"memory://drawn-{seed}", faults) for seed in range(200)]
    assert comes_true(lambda: not [each for each in threading.enumerate() if each.name.startswith("diloco-")])
    assert 20 < sum(arrived) < 190, "faults that always or never end a session show nothing"
