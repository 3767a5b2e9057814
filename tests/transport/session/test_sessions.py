"""Sessions: permission to connect, replacement, the limit of waiting bytes, and values from several hosts."""

import threading
import weakref
from collections.abc import Callable
from functools import partial
from operator import mul

import pytest

from diloco_jax.core.host_bytes import pack_host_bytes, runs_of_box
from diloco_jax.protocol.messages import (
    SYNCER,
    CutFragment,
    FragmentValue,
    GlobalFragment,
    Heartbeat,
    HostBlocks,
    StateChunk,
)
from diloco_jax.transport.link import Delivery, TransportConfig, check_name
from diloco_jax.transport.partials import Partials
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.session import sessions
from diloco_jax.transport.session.inbox import Inbox
from diloco_jax.transport.session.sessions import HostParts, HostSessions, Refused, SessionBook
from diloco_jax.transport.session.stream import StreamSession
from tests.limits import HANGS_S
from tests.transport.ends import Quiet, comes_true, value

# The id of the listener's run.
ID = "5eed"


class Side:
    """A listener's book of sessions with their inbox."""

    def __init__(self, **limits: int) -> None:
        self.config, self.inbox = TransportConfig(), Inbox()
        self.book = SessionBook(self.config, "run", 3, run=ID, **limits)  # type: ignore[arg-type]

    def admit(
        self, learner_id: str = "a", incarnation: int = 0, number: int = 1, epoch: int = 3, run: str = ""
    ) -> Quiet:
        header = pb.Header(run_id="run", epoch=epoch, sender=learner_id, incarnation=incarnation, session=number)
        header.run = run
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
    # The learner has opened its second connection.
    side.book.establish(new)
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


@pytest.mark.parametrize("epoch", [0, 3, 4])
def test_a_learner_of_another_run_of_the_same_name_is_refused_for_good(side: Side, epoch: int) -> None:
    words = "'a' has joined another run with the id cafe, and this syncer trains the run with the id 5eed: stop this"
    with pytest.raises(Refused, match=words) as raised:
        side.admit(epoch=epoch, run="cafe")
    assert raised.value.final
    side.admit(run=ID)


def test_later_epoch_is_refused_and_an_earlier_one_welcome(side: Side) -> None:
    """A learner that outlived the syncer returns with the old number; one that knows a newer syncer must not."""
    with pytest.raises(Refused, match="heard of epoch 4 of the syncer, this one is of epoch 3: stop this old syncer"):
        side.admit(epoch=4)
    side.admit(epoch=0)


@pytest.mark.parametrize("name", ["", "syncer", "Syncer", "../x", ".x", "a/b", "a b", "a\n", "ä", "x" * 101, "ca"])
def test_name_that_is_not_a_plain_word_is_refused(side: Side, name: str) -> None:
    with pytest.raises(Refused, match=r"learner_id .* is not allowed: use at most 100 letters"):
        side.admit(name)
    with pytest.raises(ValueError, match="is not allowed"):
        check_name(name)


def test_names_that_are_allowed() -> None:
    assert [check_name(name) for name in ("island-0", "A_b.9", "x" * 100)]


def test_learners_that_left_are_forgotten_when_there_are_too_many() -> None:
    side = Side(known_max=2)
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
    assert session.offer(Heartbeat("a", 0), b""), "control messages have separate room"
    assert session.waiting_bytes == 60 and not offered.is_set()
    assert inbox.get(0) is not None
    assert offered.wait(HANGS_S) and session.waiting_bytes == 60
    thread.join(HANGS_S)


def of(fragment_id: int, size: int = 0) -> FragmentValue:
    return value(1, size, fragment_id=fragment_id)


def part(start: int, data: bytes) -> bytes:
    return b"".join(pack_host_bytes(runs_of_box(start, (len(data),), (slice(None),), 1), [data]))


def at_once(do: Callable[[], None]) -> None:
    """Cut versions on the thread that sends them."""
    do()


def separate(hosts: int, payload_bytes_max: int = 100) -> list[Quiet]:
    """Return the sessions of all hosts; the driver knows the session of the leader."""
    inbox = Inbox()
    headers = [pb.Header(sender="a", host=host, hosts=hosts) for host in range(hosts)]
    made = [Quiet(inbox, header, payload_bytes_max=payload_bytes_max) for header in headers]
    made[0].announced = True
    return made


def learner(hosts: int = 3, payload_bytes_max: int = 1000) -> list[Quiet]:
    sessions = separate(hosts, payload_bytes_max)
    joined = HostSessions(sessions[0], at_once)
    for session in sessions[1:]:
        joined.add(session)
    return sessions


def test_values_under_way_do_not_mix_and_a_repeated_part_counts_once() -> None:
    leader, follower = learner(2)
    for fragment_id in (1, 2, 1):
        leader.offer(of(fragment_id), part(0, bytes([fragment_id])))
    assert leader.inbox.get(0) is None
    for fragment_id in (2, 1):
        follower.offer(of(fragment_id), part(1, bytes([fragment_id])))
    found = [leader.inbox.get(0) for _ in range(2)]
    assert [item and item[1].payload for item in found] == [b"\2\2", b"\1\1"]


@pytest.mark.parametrize("ending", [0, 1, 2])
def test_sessions_end_together_and_are_heard_of_once(ending: int) -> None:
    sessions = learner()
    sessions[0].offer(of(1), part(0, b"a"))
    sessions[ending].fail("it broke")
    assert not any(session.open for session in sessions)
    reason = "it broke" if ending == 0 else f"host {ending}: it broke"
    assert sessions[0].inbox.get(0) == (sessions[0], Delivery("disconnected", "a", reason=reason))
    assert sessions[0].inbox.get(0) is None
    assert not sessions[1].offer(of(1), part(1, b"b")), "parts of an ended session are gone"


@pytest.mark.parametrize(("ended", "reason"), [(1, "host 1: it broke"), (0, "it broke")])
def test_session_that_ended_before_one_was_added_ends_the_other(ended: int, reason: str) -> None:
    sessions = separate(2)
    joined = HostSessions(sessions[0], at_once)
    sessions[ended].fail("it broke")
    joined.add(sessions[1])
    assert not sessions[1 - ended].open and sessions[1 - ended].reason == reason


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ((part(0, b"ab"), part(1, b"cd")), "cannot be joined: the parts have 4 bytes, but not byte 3"),
        ((bytes(60), bytes(41)), "have 101 bytes, the limit is 100: raise transport.payload_bytes_max"),
    ],
)
def test_parts_that_cannot_be_end_the_sessions_with_the_reason(parts: tuple[bytes, bytes], reason: str) -> None:
    leader, follower = learner(2, payload_bytes_max=100)
    leader.offer(of(1), parts[0])
    assert not follower.offer(of(1), parts[1])
    assert not leader.open and reason in leader.reason


def test_of_what_never_becomes_whole_the_oldest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = HostParts(2, 100)
    for number in range(5):
        assert not parts.add(0, of(number), bytes(30))
        assert parts.held_bytes <= 100
    assert parts.take(of(1)) == [] and parts.take(of(4)) == [bytes(30)] and parts.held_bytes == 60
    monkeypatch.setattr(sessions, "VALUES_MAX", 2)
    for number in range(10, 13):
        parts.add(0, of(number), b"x")
    assert [len(parts.take(of(number))) for number in (10, 11, 12)] == [0, 1, 1]
    parts.add(1, of(1), b"x")
    parts.clear()
    assert parts.held_bytes == 0 and parts.take(of(1)) == []


def test_driver_that_does_not_read_holds_up_the_host_that_brings_the_last_part() -> None:
    leader, follower = learner(2, payload_bytes_max=300)
    leader.offer(of(1), part(0, bytes(100)))
    follower.offer(of(1), part(100, bytes(80)))
    leader.offer(of(2), part(0, bytes(100)))
    through = threading.Event()

    def bring() -> None:
        follower.offer(of(2), part(100, bytes(80)))
        through.set()

    thread = threading.Thread(target=bring, daemon=True)
    thread.start()
    assert not through.wait(0.1) and leader.waiting_bytes == 180
    assert leader.inbox.get(0) is not None
    assert through.wait(HANGS_S) and leader.inbox.get(0) is not None
    thread.join(HANGS_S)


def test_only_one_value_at_a_time_is_whole_while_the_driver_does_not_read() -> None:
    leader, *others = learner(3, payload_bytes_max=300)
    parts = leader.on_host.func.__self__._parts  # type: ignore[union-attr]
    # The inbox has room for the first value.
    for number, busy, held_bytes in ((1, 0, 0), (2, 1, 0), (3, 1, 210)):
        threads = [threading.Thread(target=bring, args=(each, number), daemon=True) for each in (leader, *others)]
        for thread in threads:
            thread.start()
        state = busy, held_bytes
        assert comes_true(lambda: (sum(each.is_alive() for each in threads), parts.held_bytes) == state)  # noqa: B023
    assert leader.waiting_bytes == 180
    found = [leader.inbox.get(HANGS_S) for _ in range(3)]
    assert [item and len(item[1].payload) for item in found] == [180, 180, 90]
    assert parts.held_bytes == 0


def bring(session: Quiet, number: int) -> None:
    size = 30 if number == 3 else 60
    session.offer(of(number), part(size * session.host, bytes(size)))


class Letters:
    """A version whose cut for a host is what the host stated, repeated; nothing else is known."""

    payload = b"whole"
    value_bytes = 30

    def __init__(self, number: int, fragment_id: int = 0) -> None:
        self.message = GlobalFragment(number, fragment_id, number, 1, number, 5)

    def cut(self, blocks: bytes) -> tuple[int, Callable[[], bytes]]:
        if blocks == b"?":
            raise ValueError("'?' is not a block")
        return len(blocks), partial(mul, blocks, self.message.version)


def received(session: Quiet) -> list[tuple[int, int, bytes]]:
    """The version, digest and payload of each cut that was sent."""
    found = []
    for message, parts in session.sent:
        assert isinstance(message, CutFragment)
        found.append((message.value.version, message.digest, b"".join(parts)))
    return found


def hosts_of(leader: Quiet) -> HostSessions:
    found: HostSessions = leader.on_host.func.__self__  # type: ignore[union-attr]
    return found


def test_every_host_gets_its_cut_of_each_version_in_order_once_it_has_stated_its_blocks() -> None:
    leader, *others = learner(3)
    joined, versions = hosts_of(leader), [Letters(number) for number in (1, 2, 3)]
    joined.send_version(versions[0].message, versions[0])
    leader.offer(HostBlocks("a", 0), b"x")
    assert received(leader) == [(1, 1, b"x")] and not received(others[0])
    joined.send_version(versions[1].message, versions[1])
    others[0].offer(HostBlocks("a", 0), b"yz")
    joined.send_version(versions[2].message, versions[2])
    assert received(leader) == [(1, 1, b"x"), (2, 1, b"xx"), (3, 1, b"xxx")]
    assert received(others[0]) == [(1, 2, b"yz"), (2, 2, b"yzyz"), (3, 2, b"yzyzyz")]
    assert not received(others[1]), "it has not stated its blocks"
    assert leader.inbox.get(0) is None


def test_a_host_that_states_no_blocks_of_the_model_ends_the_sessions_with_the_reason() -> None:
    leader, follower = learner(2)
    follower.offer(HostBlocks("a", 0), b"?")
    assert leader.open
    version = Letters(1)
    hosts_of(leader).send_version(version.message, version)
    assert not leader.open and "its host 1 cannot get a version: '?' is not a block" in leader.reason


def test_a_host_states_its_blocks_once_and_only_where_there_are_several() -> None:
    leader, follower = learner(2)
    follower.offer(HostBlocks("a", 0), b"x")
    assert not follower.offer(HostBlocks("a", 0), b"x")
    assert not leader.open and "its host 1 stated its blocks twice" in leader.reason
    alone = Quiet(Inbox(), pb.Header(sender="a"))
    assert not alone.offer(HostBlocks("a", 0), b"x") and not alone.open
    assert alone.reason == "a learner with one host has no blocks to state"


def test_a_statement_larger_than_the_limit_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "STATEMENT_BYTES_MAX", 7)
    leader, follower = learner(2)
    assert follower.offer(HostBlocks("a", 0), bytes(7))
    assert not leader.offer(HostBlocks("a", 0), bytes(8)) and not follower.open
    assert leader.reason.startswith("its host 0 stated its blocks in 8 bytes, the limit is 7: shard tensors")


def test_chunks_of_a_state_that_wait_for_a_slow_leader_do_not_hold_up_versions() -> None:
    header, config = pb.Header(sender="a", hosts=2, stripes=1), TransportConfig()
    leader = StreamSession(Inbox(), header, SYNCER, "a", config, Partials(0, 1.0), (HostBlocks,))
    joined = HostSessions(leader, at_once)
    leader.offer(HostBlocks("a", 0), b"x")
    for part_number in range(4):
        leader.send(StateChunk("b", 0, "a", 1, part_number, 4, 0, 1), (memoryview(b"chunk"),))
    for version in map(Letters, range(4)):
        joined.send_version(version.message, version)
    waiting = [bytes(item.parts[0]) if item.parts else b"" for item in leader._outboxes[True]._waiting]
    assert waiting == [b"chunk"] * 4 + [b"", b"x"], "two cuts follow the chunks, and two wait for room"
    leader.fail("done")


def test_a_host_that_states_no_blocks_holds_few_replaced_values_and_every_newest_one() -> None:
    leader, _ = learner(2, payload_bytes_max=100)
    leader.offer(HostBlocks("a", 0), b"x")
    versions = [Letters(1, fragment_id) for fragment_id in range(9)] + [Letters(number) for number in range(2, 6)]
    for version in versions:
        assert leader.open, "the newest values of nine fragments, and at most three that were replaced"
        hosts_of(leader).send_version(version.message, version)
    assert not leader.open
    assert "its host 1 has stated no blocks, and 120 bytes of replaced values wait for it, the limit is 100" in (
        leader.reason
    )


def test_versions_that_wait_for_a_host_that_does_not_read_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = learner(2)
    monkeypatch.setattr(Quiet, "cuts_waiting", property(lambda self: 2 if self is follower else 0))
    for each in (leader, follower):
        each.offer(HostBlocks("a", 0), b"x")
    limit = leader.config.queue_payloads_max
    for number in range(limit + 1):
        assert leader.open
        version = Letters(number)
        hosts_of(leader).send_version(version.message, version)
    assert not leader.open
    assert f"its host 1 does not read what it is sent: {limit + 1} versions wait for it" in leader.reason


@pytest.mark.parametrize("wrong", ["not of the model", "twice", "too large"])
def test_a_learner_whose_blocks_cannot_be_used_is_refused_until_it_starts_again(
    side: Side, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    def admit(incarnation: int, number: int) -> Quiet:
        names = {"run_id": "run", "sender": "a", "incarnation": incarnation, "session": number, "hosts": 2}
        header = pb.Header(**names)  # type: ignore[arg-type]
        session: Quiet = side.book.admit(header, lambda: Quiet(side.inbox, header))
        side.book.establish(session)
        return session

    leader, version = admit(5, 1), Letters(1)
    monkeypatch.setattr(sessions, "STATEMENT_BYTES_MAX", 7)
    if wrong == "not of the model":
        leader.offer(HostBlocks("a", 5), b"?")
        hosts_of(leader).send_version(version.message, version)
    elif wrong == "twice":
        leader.offer(HostBlocks("a", 5), b"x")
        leader.offer(HostBlocks("a", 5), b"x")
    else:
        leader.offer(HostBlocks("a", 5), bytes(8))
    assert not leader.open
    with pytest.raises(Refused, match="'a' incarnation 5 is refused: its host 0 ") as refused:
        admit(5, 2)
    assert refused.value.final, "it would state the same again"
    assert admit(6, 3).open


def test_few_cuts_wait_for_a_slow_host_and_the_next_follow_as_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = learner(2)
    waiting = {leader: 0, follower: 0}
    monkeypatch.setattr(Quiet, "cuts_waiting", property(lambda self: waiting[self]))
    for each in (leader, follower):
        each.offer(HostBlocks("a", 0), b"x")
    for number in range(3):
        waiting[leader] = number
        version = Letters(number)
        hosts_of(leader).send_version(version.message, version)
    assert [number for number, *_ in received(leader)] == [0, 1]
    assert [number for number, *_ in received(follower)] == [0, 1, 2]
    freed = weakref.ref(version)
    del version
    assert freed() is None, "what waits for room has no value"
    waiting[leader] = 1
    assert leader.on_room is not None
    leader.on_room()
    assert [number for number, *_ in received(leader)] == [0, 1, 2]
