"""A slice that follows: whom it lets lead, what it obeys, and what a wrong message costs."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from diloco_jax.runtime.island.saved_states import StateName
from diloco_jax.runtime.slices import member as member_module
from diloco_jax.runtime.slices.following import (
    BACKLOG_MAX,
    RETURN_S,
    START_S,
    VOTE_S,
    Chosen,
    FollowingSlice,
    Obedience,
)
from diloco_jax.runtime.slices.member import AHEAD_BYTES, CHANGED, HeldState
from diloco_jax.runtime.slices.messages import (
    AdoptValue,
    BeginCopy,
    Caught,
    Chunk,
    Commit,
    End,
    Follow,
    Give,
    GoBack,
    HoldsMean,
    Lead,
    Mean,
    Overwrite,
    Stand,
    StatePart,
    Turn,
)
from tests.runtime.slices.island import NAME, PARTS, SIZE, TERM, Net, stepped

HUGE = (1 << 63) - 1
PULSE = cast(Any, SimpleNamespace(beat=lambda: None, ready=lambda trains: None))
STATE = np.arange(SIZE, dtype=np.float32)


def turn(**changes: Any) -> Turn:
    whole = Turn(TERM, 1, 0, 0.5, PARTS, (0, 1, 2), (0, 1, 2), (), NAME)
    return whole._replace(**changes)


class Stop:
    """Tells the slice to stop after so many questions."""

    def __init__(self, questions: int) -> None:
        self._left = questions

    def __call__(self) -> bool:
        self._left -= 1
        return self._left < 0


def follower(net: Net, own: int = 1, least: int = 1, stopped: Callable[[], bool] = lambda: False) -> FollowingSlice:
    return FollowingSlice(net.members[own], 3, least, 3.0, stopped, PULSE)


def stands(net: Net, own: int, states: dict[int, tuple[int, int]]) -> None:
    """Give this slice a state, and let the others tell theirs."""
    net.members[own].standing = HeldState(*states.pop(own))
    for sender, state in states.items():
        net.put(own, sender, Stand(*state))


@pytest.mark.parametrize(
    ("states", "best"),
    [
        ({0: (0, 0), 1: (0, 0), 2: (0, 0)}, 0),
        ({0: (64, 4), 1: (64, 5), 2: (64, 5)}, 1),
        ({0: (64, 9), 1: (64, 8), 2: (129, 7)}, 2),
        ({0: (64, 5), 1: (64, 5), 2: (64, 4)}, 0),
    ],
)
def test_the_best_state_leads_then_the_lowest_number(net: Net, states: dict[int, tuple[int, int]], best: int) -> None:
    for own in range(3):
        stands(net, own, dict(states))
        if own != best:
            term = (max(term for term, _ in states.values()) // TERM + 1) * TERM + best
            net.put(own, best, Lead(term, *states[best]))
        chosen = follower(net, own).elect()
        assert chosen is not None and chosen.leader == best and chosen.base == states[best]
        assert chosen.term > max(term for term, _ in states.values()) and chosen.term % TERM == best
        assert (2 if own == 0 else 0, Stand(*states[own])) in net.links[own].sent


def test_a_slice_alone_leads_after_a_while(net: Net) -> None:
    net.kill(1)
    chosen = follower(net).elect()
    assert chosen == Chosen(1, TERM + 1, HeldState()) and START_S < net.now_s < START_S + 1, (
        "the others may be starting"
    )


def test_nobody_leads_while_too_few_are_connected(net: Net) -> None:
    net.kill(1)
    assert follower(net, least=2, stopped=Stop(500)).elect() is None
    net.connect(0, 1)
    net.put(1, 0, Stand(0, 0))
    assert follower(net, least=3, stopped=Stop(500)).elect() is None


def test_voters_whose_connection_was_lost_exchange_their_states_again(net: Net) -> None:
    """Otherwise each forgets the other one's state, waits in vain, and leads by itself."""
    events = iter([lambda: net.cut(0, 1), lambda: net.connect(0, 1)])
    net.on_wait = lambda: next(events, lambda: None)()
    assert follower(net, stopped=Stop(8)).elect() is None
    assert [to for to, message in net.links[1].sent if isinstance(message, Stand)] == [0, 2, 0]


def test_a_best_slice_that_does_not_lead_is_passed_over(net: Net) -> None:
    stands(net, 1, {0: (64, 9), 1: (64, 8), 2: (64, 7)})
    chosen = follower(net).elect()
    assert chosen is not None and chosen.leader == 1 and START_S + VOTE_S < net.now_s < START_S + 2 * VOTE_S + 1


def test_an_old_leader_is_not_followed(net: Net) -> None:
    stands(net, 1, {1: (129, 8), 2: (129, 8)})
    net.put(1, 0, Lead(64, 0, 0))
    net.put(1, 2, Lead(130, 129, 8))
    assert follower(net).elect() == Chosen(2, 130, HeldState(129, 8))


def test_messages_of_an_ended_connection_elect_nobody(net: Net) -> None:
    net.put(1, 0, Lead(64, 0, 0))
    net.cut(0, 1)
    net.put(1, 2, Lead(66, 0, 0))
    chosen = follower(net).elect()
    assert chosen is not None and chosen.leader == 2


@pytest.mark.parametrize("message", [Stand(HUGE, 1), Stand(1, HUGE), Stand(-1, 0), Lead(HUGE, 0, 0), Lead(64, -1, 0)])
def test_a_slice_with_an_impossible_term_is_dropped_by_voters(net: Net, message: Any) -> None:
    net.put(1, 2, message)
    net.put(1, 0, Lead(64, 0, 0))
    chosen = follower(net).elect()
    assert chosen is not None and chosen.leader == 0 and net.links[1].dropped.keys() == {2}


def follows(
    net: Net, messages: Iterable[Any], stopped: Callable[[], bool] = lambda: False
) -> tuple[str, FollowingSlice]:
    """Let slice 1 follow slice 0 while these messages arrive."""
    for message in messages:
        net.put(1, 0, message)
    found = follower(net, stopped=stopped)
    return found.follow(Chosen(0, TERM, HeldState())), found


def test_the_leader_ends_the_others_with_a_status(net: Net) -> None:
    ended, found = follows(net, [End(75)])
    assert (ended, found.status) == ("over", 75)
    assert net.links[1].sent == [(0, Follow(TERM, True))]


@pytest.mark.parametrize("before", [[], [BeginCopy(TERM, 9)], [turn(), Commit(1)]])
def test_a_slice_that_waits_for_a_message_ends_with_its_leader(net: Net, before: list[Any]) -> None:
    """The state or the mean that it waits for may never come."""
    ended, found = follows(net, [*before, End(0)])
    assert (ended, found.status) == ("over", 0) and net.now_s < 1


def test_a_slice_that_is_asked_to_end_stops_following(net: Net) -> None:
    assert follows(net, [], Stop(3))[0] == "stopped"


def test_a_leader_that_is_lost_or_not_there_is_not_followed(net: Net) -> None:
    net.cut(0, 1)
    assert follows(net, [])[0] == "lost"
    net.links[1].inbox.clear()
    net.connect(0, 1)
    net.links[1].inbox.append(net.links[0].inbox[-1]._replace(slice=0))
    assert follows(net, [])[0] == "lost"


def loses_leader(net: Net, lose: Callable[[], object]) -> FollowingSlice:
    """Return slice 1 after it followed slice 0 and lost it; slice 2 has ended."""
    net.kill(2)
    net.links[1].inbox.clear()
    looking = follower(net)
    net.put(1, 0, Lead(TERM, 0, 0))
    chosen = looking.elect()
    assert chosen == Chosen(0, TERM, HeldState())
    net.on_wait = lambda: (setattr(net, "on_wait", lambda: None), lose())
    assert looking.follow(chosen) == "lost"
    return looking


@pytest.mark.parametrize("other", [0, 2])
def test_a_slice_that_lost_its_leader_waits_until_one_that_listens_returns(net: Net, other: int) -> None:
    """The leader, or another one, trains on, so a term of this slice would undo its steps."""
    looking, began_s = loses_leader(net, lambda: net.kill(0)), net.now_s
    net.ended.remove(other)

    def back() -> None:
        if net.now_s > began_s + RETURN_S - 0.5 and not net.links[1].connected:
            net.connect(other, 1)
            net.put(1, other, Lead(TERM + 64 * other + other, 0, 0))

    net.on_wait = back
    again = looking.elect()
    assert again is not None and again.leader == other


def test_a_slice_leads_without_one_that_listens_and_does_not_return(net: Net) -> None:
    looking, began_s = loses_leader(net, lambda: net.cut(0, 1)), net.now_s
    again = looking.elect()
    assert again is not None and again.leader == 1 and RETURN_S < net.now_s - began_s < RETURN_S + 1


def test_a_slice_leads_at_once_if_the_processes_of_the_others_ended(net: Net) -> None:
    looking, began_s = loses_leader(net, lambda: net.kill(0)), net.now_s
    again = looking.elect()
    assert again is not None and again.leader == 1 and net.now_s == began_s


def test_a_slice_leads_at_once_if_its_leader_stood_still(net: Net) -> None:
    """The leader's port is open, but its process would have sent a beat."""
    looking, began_s = loses_leader(net, lambda: net.silent_since_s.update({0: net.now_s})), net.now_s
    again = looking.elect()
    assert again is not None and again.leader == 1 and net.now_s == began_s


def test_a_slice_that_was_suspended_does_not_blame_its_leader(net: Net) -> None:
    """All that it knows after it is that it has not read for long; the leader's messages may be on their way."""

    def resume() -> None:
        net.now_s += 60.0
        net.silent_since_s[0] = net.now_s - 60.0
        net.on_wait = lambda: net.silent_since_s.clear() if net.now_s > 62.0 else None

    net.on_wait = resume
    assert follows(net, [], lambda: net.now_s > 70.0)[0] == "stopped" and not net.links[1].dropped


def test_what_a_leader_sent_before_it_was_lost_is_obeyed(net: Net) -> None:
    net.put(1, 0, Overwrite(1, 1), np.ones(3, np.float32).tobytes())
    net.cut(0, 1)
    net.links[1].connected[0] = 0
    assert follows(net, [])[0] == "lost" and net.members[1].standing == (TERM, 1)


def test_a_silent_leader_is_dropped(net: Net) -> None:
    net.silent_since_s[0] = 0.0
    assert follows(net, [])[0] == "lost" and 3.0 < net.now_s < 3.5
    assert net.links[1].dropped == {0: "it was silent for 3.1 s"} or "silent" in net.links[1].dropped[0]


def test_a_newer_leader_is_elected_again(net: Net) -> None:
    net.put(1, 2, Lead(TERM, 0, 0))
    net.put(1, 2, Lead(TERM + 2, 0, 0))
    assert follows(net, [])[0] == "lost" and not net.links[1].inbox


def obedient(net: Net, has_state: bool = True) -> Obedience:
    if has_state:
        net.members[1].begin_term(TERM)
    return Obedience(net.members[1], 0, TERM, has_state)


def take(obedience: Obedience, message: Any, payload: bytes = b"", sender: int = 0) -> None:
    assert obedience.take(sender, message, payload) is None


def test_a_turn_is_held_and_made_only_with_its_commit(net: Net) -> None:
    obedience, flat = obedient(net), (STATE - stepped(STATE, PARTS)) / np.float32(0.5)
    take(obedience, turn())
    take(obedience, Commit(1))
    assert obedience.advance() is None and net.computed(1) == [PARTS[1]]
    chunks = [(to, message.part) for to, message in net.links[1].sent if isinstance(message, Chunk)]
    assert chunks == [(0, 1), (2, 1)]
    # The others may add what they want: this slice applies the mean that it gets.
    for number, (start, stop) in ((0, (0, 2)), (2, (4, 7))):
        take(obedience, Chunk(TERM, 1, 0, number, {"loss": 1.0}, 1.0), flat[2:4].tobytes(), number)
        take(obedience, Mean(TERM, 1, 0, number), flat[start:stop].tobytes(), number)
    assert obedience.advance() is None and net.members[1].standing == (TERM, 1)
    assert [m for _, m in net.links[1].sent if isinstance(m, HoldsMean)] == [], "it was committed at once"
    assert net.state(1)[:2].tobytes() == (STATE - np.float32(0.5) * flat)[:2].tobytes()


def test_a_state_in_parts_comes_before_the_changes_after_it(net: Net) -> None:
    obedience, there = obedient(net, has_state=False), np.full(SIZE, 5, np.float32)
    take(obedience, BeginCopy(TERM, 9))
    take(obedience, Overwrite(10, 1), np.zeros(3, np.float32).tobytes())
    content = there.tobytes()
    for start, stop in ((0, 8), (8, 28)):
        assert obedience.advance() is None and net.state(1).tobytes() == STATE.tobytes()
        take(obedience, StatePart(TERM, 9, start, 28), content[start:stop], 2)
    assert obedience.advance() is None
    assert net.state(1).tolist() == [5, 5, 5, 5, 0, 0, 0] and net.members[1].standing == (TERM, 10)
    assert net.links[1].sent == [(0, Caught(10))]


def test_a_state_is_sent_as_fast_as_it_leaves(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection whose queue is full would end, so no state beyond the size of the queue would ever arrive."""
    waits: list[float] = []
    monkeypatch.setattr(member_module, "time", SimpleNamespace(sleep=waits.append))
    net.links[1].queued.extend((AHEAD_BYTES + 1, AHEAD_BYTES + 1, AHEAD_BYTES))
    net.members[1].give(2, 0, lambda body: body())
    assert len(waits) == 2 and net.links[1].looked == 3
    assert [message for _, message in net.links[1].sent] == [StatePart(0, 0, 0, 28)]


def test_what_a_leader_changed_before_its_first_turn_is_undone(net: Net) -> None:
    """Nothing names the state after these changes, so the next leader could not tell a replay what it has."""
    member, name = net.members[1], StateName.from_text(NAME)._replace(local_step=4)
    member.standing, member.name = HeldState(1, 9), name
    obedience = obedient(net)
    take(obedience, adopt(change=10), np.full(4, 8, np.float32).tobytes())
    assert obedience.advance() is None and net.state(1)[:4].tolist() == [8] * 4
    assert member.name == name._replace(digests=(CHANGED, 6))
    member.end_term()
    assert (net.state(1).tobytes(), member.standing, member.name) == (STATE.tobytes(), (TERM, 9), name)
    member.end_term()
    assert member.standing == (TERM, 9) and member.copy is None

    obedience = obedient(net)
    take(obedience, adopt(change=10), np.full(4, 8, np.float32).tobytes())
    take(obedience, GoBack(11))
    take(obedience, Overwrite(12, 1), np.zeros(3, np.float32).tobytes())
    take(obedience, turn(change=13))
    assert obedience.advance() is None
    member.end_term()
    assert net.state(1).tolist() == [0, 1, 2, 3, 0, 0, 0] and member.standing == (TERM, 12), "its turn has a name"
    assert member.name == StateName.from_text(NAME)


def test_a_state_that_is_begun_again_forgets_what_came(net: Net) -> None:
    obedience = obedient(net, has_state=False)
    take(obedience, BeginCopy(TERM, 9))
    take(obedience, StatePart(TERM, 9, 0, 28), bytes(8), 2)
    take(obedience, Commit(10))
    take(obedience, BeginCopy(TERM, 12))
    take(obedience, StatePart(TERM, 9, 8, 28), bytes(8), 2)
    take(obedience, StatePart(TERM - 64, 12, 0, 28), bytes(8), 2)
    take(obedience, StatePart(TERM, 12, 0, 28), np.ones(SIZE, np.float32).tobytes(), 0)
    assert obedience.advance() is None and net.members[1].standing == (0, 0), "the state has no name yet"
    take(obedience, turn(change=13, owners=(0, 0, 2), members=(0, 2), listeners=(1,)))
    assert obedience.advance() is None and net.members[1].standing == (TERM, 12) and net.state(1).tolist() == [1] * 7


def test_means_before_a_state_that_is_begun_again_are_forgotten(net: Net) -> None:
    obedience = obedient(net, has_state=False)
    for change in (8, 9, 10):
        take(obedience, Mean(TERM, change, 0, 1), bytes(8), 2)
    take(obedience, BeginCopy(TERM, 9))
    assert [message.change for message, _ in net.members[1]._early[2]] == [10]


def test_a_chunk_of_an_earlier_leader_is_not_mixed_into_a_turn(net: Net) -> None:
    """Both leaders may make a turn with one number, from other samples."""
    obedience = obedient(net)
    old = Chunk(TERM - 64, 1, 0, 2, {"loss": 1.0}, 1.0)
    take(obedience, old, bytes(8), 2)
    take(obedience, turn())
    assert obedience.advance() is None
    take(obedience, old, bytes(8), 2)
    exchange = net.members[1].exchange
    assert exchange is not None and exchange.lacks == {0, 2} and not net.links[1].dropped


def test_a_slice_that_cannot_catch_up_drops_its_leader(net: Net) -> None:
    obedience = obedient(net, has_state=False)
    for number in range(BACKLOG_MAX):
        take(obedience, Commit(number))
    assert obedience.take(0, Commit(0), b"") == f"{BACKLOG_MAX} messages wait here, and this slice cannot catch up"


OF_OTHERS = [
    (turn(), b""),
    (Commit(1), b""),
    (Overwrite(1, 0), bytes(16)),
    (GoBack(1), b""),
    (Give(2, 0), b""),
    (BeginCopy(TERM, 5), b""),
    (End(2), b""),
    (StatePart(TERM, 0, 0, 28), bytes(28)),
    (HoldsMean(1, 0), b""),
    (Caught(1), b""),
    (Follow(TERM, True), b""),
]


@pytest.mark.parametrize(("message", "payload"), OF_OTHERS)
def test_only_the_leader_is_obeyed(net: Net, message: Any, payload: bytes) -> None:
    obedience = obedient(net)
    take(obedience, message, payload, 2)
    assert obedience.advance() is None and net.members[1].standing == (TERM, 0) and not net.computed(1)
    assert net.state(1).tobytes() == STATE.tobytes() and not net.links[1].dropped


def adopt(fragment_id: int = 0, mode: str = "overwrite", change: int = 1) -> AdoptValue:
    return AdoptValue(change, fragment_id, mode, 0.5)


WRONG: list[tuple[Any, bytes]] = [
    *(
        (turn(name=name), b"")
        for name in (
            "",
            "no JSON",
            "5",
            "[]",
            "[1,0,0,[5]]",
            "[1,0,0,[5,6,7]]",
            '[1,2,3,"x"]',
            "[Infinity,0,0,[]]",
            "[" * 100_000,
        )
    ),
    *((turn(change=number), b"") for number in (0, 2, HUGE >> 1)),
    (turn(term=TERM + 64), b""),
    *((turn(rate=rate), b"") for rate in (float("nan"), float("inf"))),
    *((turn(owners=owners), b"") for owners in ((), (0, 1), (0, 1, 2, 0), (0, 1, 9), (-1, 1, 2))),
    *((turn(members=members), b"") for members in ((), (0,), (0, 2), (2, 1, 0), (0, 1, 1, 2), (0, 1, 2, 3), (-1, 1))),
    *((turn(listeners=listeners), b"") for listeners in ((1,), (3,), (-1,), (HUGE,))),
    (turn(parts=(), owners=()), b""),
    (turn(parts=PARTS * 2, owners=(0, 1, 2) * 2), b""),
    *(
        (turn(parts=(PARTS[0], part, PARTS[2])), b"")
        for part in ((), ((0, 3),), ((3, 1),), ((-1, 1),), ((0, 4), (8, 6)), ((HUGE, HUGE + 2),))
    ),
    *((Commit(change), b"") for change in (0, 1, 2, HUGE >> 1)),
    *((adopt(fragment_id), bytes(16)) for fragment_id in (2, 99, HUGE >> 1)),
    *((adopt(), bytes(size)) for size in (0, 4, 12, 15, 20)),
    *((adopt(mode=mode), bytes(16)) for mode in ("", "rebase", "x" * 1000)),
    *((adopt(change=change), bytes(16)) for change in (0, 2)),
    *((Overwrite(1, fragment_id), bytes(16)) for fragment_id in (1, 2)),
    (Overwrite(5, 0), bytes(16)),
    (GoBack(1), b""),
    *((Give(to, 0), b"") for to in (1, 3, HUGE >> 1)),
    (Give(2, 7), b""),
    (End(256), b""),
    (End(HUGE >> 1), b""),
]


@pytest.mark.parametrize(("message", "payload"), WRONG, ids=[f"{m!r:.60}" for m, _ in WRONG])
def test_a_leader_that_cannot_be_obeyed_is_dropped(net: Net, message: Any, payload: bytes) -> None:
    obedience = obedient(net)
    take(obedience, message, payload)
    assert obedience.advance() == "lost" and net.links[1].dropped.keys() == {0}
    assert net.state(1).tobytes() == STATE.tobytes() and net.members[1].standing == (TERM, 0) and not net.computed(1)


@pytest.mark.parametrize(
    "message",
    [Commit(-1), End(-1), Give(-1, 0), AdoptValue(-1, 0, "blend", 0.5), Overwrite(1, -1), BeginCopy(TERM, -1)],
)
def test_a_negative_number_drops_its_sender_before_anything_else(net: Net, message: Any) -> None:
    ended, _ = follows(net, [message])
    assert ended == "lost" and net.links[1].dropped.keys() == {0}
    assert "expected 0 to" in net.links[1].dropped[0]


@pytest.mark.parametrize(
    ("part", "payload"),
    [
        (StatePart(TERM, 9, 4, 28), bytes(4)),
        (StatePart(TERM, 9, 0, 27), bytes(27)),
        (StatePart(TERM, 9, 0, 28), bytes(29)),
        (StatePart(TERM, 9, 0, HUGE), bytes(4)),
    ],
)
def test_a_part_that_does_not_fit_a_state_names_the_reason(net: Net, part: StatePart, payload: bytes) -> None:
    obedience = obedient(net, has_state=False)
    take(obedience, BeginCopy(TERM, 9))
    problem = obedience.take(2, part, payload)
    assert problem is not None and "do all slices have the same config?" in problem
    assert obedience.advance() is None and net.members[1].standing == (0, 0)
