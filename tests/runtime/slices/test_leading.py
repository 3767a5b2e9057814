"""The slice that leads: the others compute with it, and may be lost, slow, late or wrong at any moment."""

from typing import Any

import numpy as np
import pytest

from diloco_jax.runtime.slices.leading import BEAT_S, ForwardingIsland, Leadership, SliceLost
from diloco_jax.runtime.slices.messages import (
    BeginCopy,
    Caught,
    Chunk,
    Commit,
    End,
    Follow,
    Give,
    HoldsMean,
    Lead,
    Mean,
    Stand,
    StatePart,
    Turn,
)
from diloco_jax.runtime.slices.state import copy_of
from diloco_jax.transport.slices.links import Item
from tests.runtime.slices.island import NAME, PARTS, RATE, SIZE, SLICES, TERM, Net, stepped

HUGE = (1 << 63) - 1


def island_of(net: Net, **settings: Any) -> Leadership:
    """Let slice 0 lead, and the others follow from its state."""
    leadership = net.lead(**settings)
    for number in range(1, SLICES):
        net.follow(number, leadership)
    leadership.gather()
    assert leadership.members == {1, 2}
    return leadership


def make(leadership: Leadership, times: int = 1) -> None:
    for _ in range(times):
        leadership.make(RATE, PARTS, NAME)


def island_that_one_returns_to(net: Net) -> Leadership:
    """Return an island after three steps; slice 2 was lost after two, and follows again without a state."""
    leadership = island_of(net)
    make(leadership, 2)
    net.kill(2)
    make(leadership)
    net.start(2)
    net.follow(2, leadership, has_state=False)
    return leadership


def settled(net: Net, leadership: Leadership) -> None:
    """Commit the last turn everywhere, and check that all that train have one state."""
    leadership._commit()
    net.others_work(0)
    for number in leadership.members:
        assert net.state(number).tobytes() == net.state(0).tobytes(), f"slice {number} has another state"
        assert net.members[number].standing == net.members[0].standing


def expected(net: Net, times: int) -> bytes:
    x = np.arange(SIZE, dtype=np.float32)
    for _ in range(times):
        x = stepped(x, PARTS)
    return x.tobytes()


def test_all_slices_make_the_steps_of_one(net: Net) -> None:
    leadership = island_of(net)
    make(leadership, 3)
    settled(net, leadership)
    assert net.state(0).tobytes() == expected(net, 3)
    assert [len(net.computed(number)) for number in range(SLICES)] == [3, 3, 3] and leadership.count == 3


def test_a_turn_is_committed_elsewhere_with_the_next_message(net: Net) -> None:
    """Until then the step may be missing on the learner's tape."""
    leadership = island_of(net)
    make(leadership)
    net.others_work(0)
    assert [member.standing.change for member in net.members] == [1, 0, 0]
    make(leadership)
    assert [member.standing.change for member in net.members] == [2, 1, 1]


def test_a_leader_that_computes_for_too_long_lets_another_slice_lead(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that steps waits for the devices, so the one that beats looks at the time."""
    leadership = island_of(net)
    make(leadership)
    loop = net.members[0].loop
    gradient = loop.parts.gradient

    def slow(*batch: Any) -> Any:
        for _ in range(7):
            leadership._look_at_own_share()
            assert net.links[0].connected
            net.now_s += BEAT_S
        leadership._look_at_own_share()
        return gradient(*batch)

    monkeypatch.setattr(loop.parts, "gradient", slow)
    with pytest.raises(SliceLost, match="its own share of a step is late"):
        make(leadership)
    assert not net.links[0].connected and not net.links[0].dropped


def test_a_leader_may_compute_several_parts_one_after_the_other(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    leadership = island_of(net)
    make(leadership)
    net.kill(2)
    loop = net.members[0].loop
    gradient = loop.parts.gradient

    def slow(*batch: Any) -> Any:
        for _ in range(4):
            leadership._look_at_own_share()
            net.now_s += BEAT_S
        return gradient(*batch)

    monkeypatch.setattr(loop.parts, "gradient", slow)
    make(leadership)
    assert leadership.members == {1} and net.now_s >= 2 * 4 * BEAT_S


def test_a_member_that_is_lost_in_a_turn_costs_only_its_parts(net: Net) -> None:
    leadership = island_of(net)
    make(leadership)

    def lose(number: int, item: Item) -> None:
        if number == 1 and isinstance(item.message, Turn):
            net.kill(1)

    net.on_message = lose
    make(leadership)
    settled(net, leadership)
    assert net.state(0).tobytes() == expected(net, 2) and leadership.members == {2}
    turns = [message for to, message in net.links[0].sent if to == 2 and isinstance(message, Turn)]
    assert [(turn.attempt, turn.owners, turn.members) for turn in turns] == [
        (0, (0, 1, 2), (0, 1, 2)),
        (0, (0, 1, 2), (0, 1, 2)),
        (1, (0, 0, 2), (0, 2)),
    ]
    assert net.computed(0) == [PARTS[0], PARTS[0], PARTS[1]] and net.computed(2) == [PARTS[2]] * 2


def test_the_leader_trains_on_alone(net: Net) -> None:
    leadership = island_of(net)
    net.kill(1)
    net.kill(2)
    make(leadership, 2)
    assert net.state(0).tobytes() == expected(net, 2) and leadership.count == 1


@pytest.mark.parametrize("how", ["silent", "late"])
def test_a_straggler_is_left_out(net: Net, how: str) -> None:
    leadership = island_of(net, straggler_s=3.0)
    make(leadership)
    if how == "silent":
        net.silent_since_s[2] = net.now_s
    else:
        net.slow.add(2)
    make(leadership)
    assert leadership.members == {1} and how in net.links[0].dropped[2], net.links[0].dropped
    assert "islands.straggler_s" in net.links[0].dropped[2]
    settled(net, leadership)
    assert net.state(0).tobytes() == expected(net, 2)


@pytest.mark.parametrize(("sender", "to", "kind", "left"), [(2, 1, Chunk, {2}), (1, 2, Chunk, {1}), (1, 2, Mean, {1})])
def test_a_message_that_is_lost_between_two_followers_delays_one_step(
    net: Net, sender: int, to: int, kind: type, left: set[int]
) -> None:
    """Nothing, or only the mean of the receiver, is missing at the leader then."""
    leadership = island_of(net)
    make(leadership)
    net.on_message = lambda number, item: number == to and item.slice == sender and isinstance(item.message, kind)
    make(leadership)
    assert leadership.members == left
    settled(net, leadership)
    assert net.state(0).tobytes() == expected(net, 2)


def test_a_slice_that_is_only_slower_than_usual_stays(net: Net) -> None:
    leadership = island_of(net, straggler_s=3.0)
    make(leadership)
    net.slow.add(2)
    began_s = net.now_s

    def wait() -> None:
        if net.now_s > began_s + 2.5:
            net.slow.clear()

    net.on_wait = wait
    make(leadership)
    assert leadership.members == {1, 2} and not net.links[0].dropped


def test_too_few_slices_end_the_leader(net: Net) -> None:
    leadership = island_of(net, least=3)
    make(leadership)
    net.kill(1)
    with pytest.raises(SliceLost, match=r"2 slices are left, fewer than islands\.slices_least = 3"):
        make(leadership)


def test_a_newer_leader_ends_the_leader(net: Net) -> None:
    leadership = island_of(net)
    net.put(0, 1, Lead(TERM, 0, 0))
    make(leadership)
    net.put(0, 1, Lead(TERM + 1, 0, 0))
    with pytest.raises(SliceLost, match="slice 1 leads in a newer term"):
        make(leadership)


def test_a_leader_that_is_asked_to_end_lets_another_one_lead_at_once(net: Net) -> None:
    """Its process may write a state to disk for minutes; the step that it has made is not lost."""
    leadership = island_of(net)
    make(leadership)
    leadership._leaving = lambda: True
    with pytest.raises(SliceLost, match="asked to end"):
        make(leadership)
    assert not net.links[0].connected and leadership._closed.is_set()
    net.others_work(0)
    assert [member.standing.change for member in net.members] == [1, 1, 1]


def test_a_leader_without_others_steps_on_until_its_learner_leaves(net: Net) -> None:
    leadership = island_of(net)
    leadership._leaving = lambda: True
    for number in (1, 2):
        net.kill(number)
        leadership._forget(number, "killed")
    make(leadership, 2)
    assert net.state(0).tobytes() == expected(net, 2) and not leadership._closed.is_set()


def test_a_slice_that_looks_for_a_leader_is_answered(net: Net) -> None:
    leadership = island_of(net)
    net.put(0, 2, Stand(0, 0))
    make(leadership)
    assert net.links[0].sent.count((2, Lead(TERM, 0, 0))) == 2, "at the start, and as an answer"


def test_a_slice_that_returns_gets_the_state_from_a_member_while_steps_go_on(net: Net) -> None:
    leadership = island_that_one_returns_to(net)
    make(leadership)
    turn = next(message for _, message in reversed(net.links[0].sent) if isinstance(message, Turn))
    assert (turn.members, turn.listeners) == ((0, 1), (2,)), "it takes the mean of this step, and adds nothing yet"
    assert net.links[0].sent.count((2, BeginCopy(TERM, 3))) == net.links[0].sent.count((1, Give(2, 3))) == 1
    assert any(isinstance(message, StatePart) for to, message in net.links[1].sent if to == 2)
    make(leadership, 2)
    assert leadership.members == {1, 2} and len(net.computed(2)) == 2
    settled(net, leadership)
    assert net.state(2).tobytes() == expected(net, 6)


def test_a_slice_that_loses_its_donor_requests_the_state_again(net: Net) -> None:
    """The leader does not notice that the connection between two others was lost."""
    leadership = island_that_one_returns_to(net)

    def lose(number: int, item: Item) -> bool:
        if number == 1 and isinstance(item.message, Give):
            net.cut(1, 2)
            net.connect(1, 2)
            net.on_message = lambda number, item: None
            return True
        return False

    net.on_message = lose
    make(leadership, 4)
    assert leadership.members == {1, 2} and net.links[2].sent.count((0, Follow(TERM, False))) == 2
    settled(net, leadership)
    assert net.state(2).tobytes() == expected(net, 7)


def test_another_slice_gives_the_state_if_the_donor_is_lost(net: Net) -> None:
    leadership = island_that_one_returns_to(net)

    def lose(number: int, item: Item) -> None:
        if number == 1 and isinstance(item.message, Give):
            net.kill(1)

    net.on_message = lose
    make(leadership, 3)
    assert leadership.members == {2}
    assert any(isinstance(message, StatePart) for to, message in net.links[0].sent if to == 2), "from the leader"
    settled(net, leadership)
    assert net.state(2).tobytes() == expected(net, 6)


def test_a_slice_that_comes_during_the_first_turn_gets_the_state(net: Net) -> None:
    """It has the state before this turn, but it did not get the request."""
    leadership = net.lead()
    net.follow(1, leadership)
    leadership.gather()

    def join(number: int, item: Item) -> None:
        if number == 1 and isinstance(item.message, Turn):
            net.on_message = lambda number, item: None
            net.follow(2, leadership)

    net.on_message = join
    make(leadership, 3)
    assert leadership.members == {1, 2} and not net.links[2].dropped
    settled(net, leadership)
    assert net.state(2).tobytes() == expected(net, 3)


def test_changes_from_outside_are_made_on_every_slice(net: Net) -> None:
    leadership = island_of(net)
    island = ForwardingIsland(leadership, leadership.member)
    fragments = net.members[0].fragments
    make(leadership)
    island.adopt(fragments[0], {fragments[0].slices[0].key: np.full(4, 8, np.float32)}, mode="blend", alpha=0.25)
    island.overwrite(fragments[1], {fragments[1].slices[0].key: np.array([1, 2, 3], np.float32)})
    make(leadership)
    settled(net, leadership)
    assert [member.standing.change for member in net.members] == [4, 4, 4]
    x = np.frombuffer(expected(net, 1), np.float32).copy()
    x[:4] = np.float32(0.25) * x[:4] + np.float32(0.75) * 8
    x[4:] = [1, 2, 3]
    assert net.state(2).tobytes() == stepped(x, PARTS).tobytes()


def test_a_new_leader_goes_back_to_its_first_state_with_all_slices(net: Net) -> None:
    for number in range(SLICES):
        net.members[number].standing = net.members[number].standing._replace(change=1)
    leadership = net.lead()
    leadership._base = net.members[0].standing
    for number in (1, 2):
        net.follow(number, leadership)
    leadership.gather()
    island, copy = ForwardingIsland(leadership, leadership.member), net.members[0].copy
    fragments = net.members[0].fragments
    island.overwrite(fragments[1], {fragments[1].slices[0].key: np.zeros(3, np.float32)})
    assert copy is not None
    island.load_shards(copy)
    settled(net, leadership)
    assert net.state(1).tolist() == [*range(SIZE)] and net.members[1].standing.change == 3


def test_slices_start_again_if_the_learner_does_not_load_their_state(net: Net) -> None:
    """Its moments would be those of another state than the tapes have."""
    leadership = island_of(net)
    leadership.has_unloaded = True
    with pytest.raises(SliceLost, match="too old or of another run"):
        make(leadership)
    net.others_work(0)
    assert not net.following and [to for to, message in net.links[0].sent if message == End(1)] == [1, 2]
    assert not net.computed(0)


@pytest.mark.parametrize("moments", [False, True])
def test_slices_continue_with_a_state_that_the_learner_has_loaded(net: Net, moments: bool) -> None:
    leadership = island_of(net)
    leadership.has_unloaded = True
    island = ForwardingIsland(leadership, leadership.member)
    if moments:
        net.members[0].loop.island.load_moments = lambda leaf: None  # type: ignore[attr-defined,method-assign]
        island.load_moments(lambda name: None)
    else:
        island.load_shards(copy_of(net.members[0].loop.island))
    make(leadership)
    assert not leadership._closed.is_set()


def test_the_others_get_a_state_that_only_the_leader_has_loaded(net: Net) -> None:
    leadership = island_of(net)
    make(leadership)
    other = Net().members[0]
    other.loop.island.x += 1  # type: ignore[attr-defined]
    ForwardingIsland(leadership, leadership.member).load_shards(copy_of(other.loop.island))
    assert leadership.count == 1
    make(leadership, 3)
    settled(net, leadership)
    assert leadership.members == {1, 2} and net.state(1).tobytes() == net.state(0).tobytes()


WRONG = [
    (Chunk(TERM, 3, 0, -1, {"loss": 1.0}, 1.0), bytes(8)),
    (Chunk(TERM, 3, 0, 1, {"loss": 1.0}, 1.0), bytes(7)),
    (Chunk(TERM, 3, 0, 1, {"loss": 1.0}, 1.0), bytes(4 * SIZE + 4)),
    (Chunk(TERM, 3, 0, 2, {"loss": 1.0}, 1.0), bytes(8)),
    (Chunk(TERM, 3, 0, 1, {}, 1.0), bytes(8)),
    (Chunk(TERM, 3, 0, HUGE, {"loss": 1.0}, 1.0), bytes(8)),
    (Chunk(TERM, HUGE, 0, 0, {"loss": 1.0}, 1.0), bytes(8)),
    (Mean(TERM, 3, 0, -3), bytes(8)),
    (Mean(TERM, 3, 0, 2), bytes(12)),
    (Mean(TERM, 3, 0, 1), bytes(4)),
    (Mean(-1, 3, 0, 1), bytes(8)),
    (HoldsMean(3, HUGE), b""),
    (Follow(-1, True), b""),
    (Stand(HUGE, HUGE), b""),
    (Lead(HUGE, 0, 0), b""),
    (Caught(-1), b""),
]


@pytest.mark.parametrize(("message", "payload"), WRONG)
def test_a_wrong_message_ends_only_the_connection_of_its_sender(net: Net, message: Any, payload: bytes) -> None:
    leadership = island_of(net)
    make(leadership, 2)
    # One that came before the turn waits for it.
    net.put(0, 1, message, payload)
    make(leadership)
    assert leadership.members == {2} and net.links[0].dropped.keys() == {1}, net.links[0].dropped
    settled(net, leadership)
    assert net.state(0).tobytes() == expected(net, 3)


@pytest.mark.parametrize(
    "message",
    [
        Caught(0),
        HoldsMean(1, 0),
        HoldsMean(99, 99),
        Follow(TERM - 1, True),
        Give(0, 0),
        Give(9, 9),
        BeginCopy(TERM, 0),
        Commit(3),
        StatePart(TERM, 2, 0, 4),
        Turn(TERM, 3, 0, 0.1, (), (), (), (), ""),
        Chunk(TERM - 1, 3, 0, 1, {"loss": 9.0}, 1e9),
    ],
)
def test_what_is_not_for_a_leader_changes_nothing(net: Net, message: Any) -> None:
    leadership = island_of(net)
    make(leadership, 2)
    net.put(0, 1, message, bytes(8))
    make(leadership)
    settled(net, leadership)
    assert leadership.members == {1, 2} and net.state(0).tobytes() == expected(net, 3)


def test_chunks_of_later_turns_are_bounded_for_each_sender(net: Net) -> None:
    leadership = island_of(net)
    for change in range(2, 1000):
        net.put(0, 1, Chunk(TERM, change, 9, 0, {"loss": 1.0}, 1.0), bytes(8))
    make(leadership)
    assert net.links[0].dropped == {1: "256 chunks came before their turns"}
    assert leadership.members == {2} and net.state(0).tobytes() == expected(net, 1)
