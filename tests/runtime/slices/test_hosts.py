"""Slices of two hosts: host 0 decides, both do the same, and a slice has only what both have."""

from typing import Any

import numpy as np
import pytest

from diloco_jax.runtime.slices.following import BACKLOG_MAX, POLL_S
from diloco_jax.runtime.slices.forwarding import ForwardingIsland
from diloco_jax.runtime.slices.leading import Leadership, SliceLost
from diloco_jax.runtime.slices.messages import AdoptValue, Chunk, Lead, Mean, Stand, StatePart, Value
from diloco_jax.runtime.slices.obeying import ENDED_S
from diloco_jax.transport.slices.links import Item, SliceJoined
from diloco_jax.transport.slices.peer import MESSAGE_BYTES
from tests.runtime.slices.hosts import SECOND, HostsNet
from tests.runtime.slices.island import PARTS, SIZE, SLICES, TERM, stepped
from tests.runtime.slices.test_leading import island_of, make

FIRST = np.arange(SIZE, dtype=np.float32)


def expected(times: int) -> tuple[list[float], list[float]]:
    """The states of both hosts after so many steps."""
    one, two = FIRST, SECOND
    for _ in range(times):
        one, two = stepped(one, PARTS), stepped(two, PARTS)
    return one.tolist(), two.tolist()


def check_all(net: HostsNet, leadership: Leadership, times: int) -> None:
    """Commit the last turn, and check both hosts of all slices that train."""
    leadership._commit()
    net.others_work(0)
    for number in (0, *leadership.members):
        assert net.both(number) == expected(times), f"slice {number}"


def test_all_hosts_of_all_slices_make_the_steps_of_one(hosts_net: HostsNet) -> None:
    leadership = island_of(hosts_net)
    make(leadership, 3)
    check_all(hosts_net, leadership, 3)
    assert leadership.members == {1, 2}


def test_a_slice_whose_other_host_is_disconnected_is_lost(hosts_net: HostsNet) -> None:
    """Between hosts 1 nothing can be sent, so hosts 0 do not use their connection."""
    net = hosts_net
    leadership = island_of(net)
    make(leadership)
    net.second.cut(0, 2)
    make(leadership, 2)
    assert leadership.members == {1} and 2 in net.links[0].connected
    check_all(net, leadership, 3)


@pytest.mark.parametrize("kind", [Chunk, Mean])
def test_a_turn_is_made_when_every_host_holds_its_mean(hosts_net: HostsNet, kind: type) -> None:
    """A host 1 that waits for another one delays the step; the slice that owes the message is late."""
    net = hosts_net
    leadership = island_of(net)
    make(leadership)
    net.on_second = lambda number, item: number == 1 and item.slice == 2 and isinstance(item.message, kind)
    make(leadership)
    assert leadership.members < {1, 2}
    check_all(net, leadership, 2)


def test_a_slice_with_a_late_host_is_left_out(hosts_net: HostsNet) -> None:
    net = hosts_net
    leadership = island_of(net)
    make(leadership)
    net.still.add(2)
    make(leadership, 2)
    assert leadership.members == {1}
    check_all(net, leadership, 3)


def test_a_leader_with_a_late_host_lets_another_slice_lead(hosts_net: HostsNet) -> None:
    net = hosts_net
    leadership = island_of(net)
    make(leadership)
    net.still.add(0)
    with pytest.raises(SliceLost, match="a host of this slice is"):
        make(leadership)
    assert not net.links[0].dropped


def test_a_leader_blames_no_other_slice_for_a_host_that_stopped_while_it_waited(hosts_net: HostsNet) -> None:
    """Its last report names slices that have sent everything meanwhile."""
    net = hosts_net
    leadership = island_of(net)
    make(leadership)

    def stop(number: int, item: Item) -> bool:
        if number == 0 and isinstance(item.message, Chunk):
            net.still.add(0)
        return number == 0

    net.on_second = lambda number, item: stop(number, item) if item.slice != 0 else False
    with pytest.raises(SliceLost, match="a host of this slice is"):
        make(leadership)
    assert net.members[0].lacks and not net.links[0].dropped


def test_a_slice_that_returns_gets_the_shards_of_each_host(hosts_net: HostsNet) -> None:
    net = hosts_net
    leadership = island_of(net)
    make(leadership, 2)
    net.kill(2)
    make(leadership)
    assert leadership.members == {1}
    net.start(2)
    net.follow(2, leadership, has_state=False)
    steps = 3
    while leadership.members != {1, 2}:
        make(leadership)
        steps += 1
        assert steps < 20, "it does not return"
    make(leadership)
    check_all(net, leadership, steps + 1)
    assert any(isinstance(message, StatePart) for to, message in net.second.links[1].sent if to == 2)


def adopt(net: HostsNet, leadership: Leadership, *, first: bool, second: bool) -> None:
    """Adopt a value of fragment 0 on one host of the leader's slice, or on both as the learner does."""
    islands = [net.second_island(0)] * second + [ForwardingIsland(leadership, net.members[0])] * first
    fragment = net.members[0].fragments[0]
    for number, island in enumerate(islands, 7):
        island.adopt(fragment, {fragment.slices[0].key: np.full(4, number, np.float32)}, mode="overwrite")


def test_a_value_is_adopted_when_every_host_has_its_part(hosts_net: HostsNet) -> None:
    net = hosts_net
    leadership = island_of(net)
    make(leadership)
    net.others_work(0)
    adopt(net, leadership, first=True, second=False)
    net.others_work(0)
    assert net.members[1].standing.change == 1, "host 1 of slice 0 has not sent its part"
    adopt(net, leadership, first=False, second=True)
    net.others_work(0)
    for number in range(SLICES):
        one, two = net.both(number)
        assert one[:4] == two[:4] == [7] * 4, f"slice {number}"
    make(leadership)
    leadership._commit()
    net.others_work(0)
    assert net.both(1) == net.both(2) == net.both(0) and net.members[1].standing.change == 3


def test_a_leader_whose_hosts_send_values_of_two_fragments_is_dropped(hosts_net: HostsNet) -> None:
    """The other host would end its slice, because it cannot adopt what it holds."""
    net = hosts_net
    leadership = island_of(net)
    make(leadership)
    net.second.put(1, 0, Value(TERM, 2, 1), bytes(12))
    net.others_work(0)
    adopt(net, leadership, first=True, second=False)
    net.others_work(0)
    assert "fragment 0 here, of 1 on another host" in net.links[1].dropped[0]
    assert net.both(1) == expected(1)


def test_the_other_host_knows_who_gets_a_value_before_the_learner_adopts_one(hosts_net: HostsNet) -> None:
    net = hosts_net
    leadership = island_of(net)
    net.others_work(0)
    assert net.obeying[0].changes.receivers == (1, 2)
    make(leadership)
    net.second.cut(0, 1)
    make(leadership)
    net.others_work(0)
    assert net.obeying[0].changes.receivers == (2,)


def test_a_slice_is_connected_when_all_of_its_hosts_are(hosts_net: HostsNet) -> None:
    """What another slice sends before that waits, because its sender sends it only once."""
    net = hosts_net
    links, inner = net.members[0].links, net.links[0]
    net.second.cut(0, 1)
    net.others_work(-1)
    assert taken(links, inner) == [(1, None)] and 1 not in links.connected
    net.put(0, 1, Stand(TERM, 3))
    assert taken(links, inner) == []
    net.second.connect(0, 1)
    net.others_work(-1)
    assert taken(links, inner) == [(1, SliceJoined()), (1, Stand(TERM, 3))] and 1 in links.connected


def test_a_state_may_arrive_before_all_hosts_are_connected(hosts_net: HostsNet) -> None:
    """A donor sends its parts as soon as it is connected itself; more than a queue holds is never sent."""
    net = hosts_net
    links, inner = net.members[0].links, net.links[0]
    net.second.cut(0, 1)
    net.others_work(-1)
    assert taken(links, inner) == [(1, None)]
    most = inner.queue_bytes_max // MESSAGE_BYTES
    for _ in range(most):
        net.put(0, 1, Stand(TERM, 3))
    assert most > 256 and taken(links, inner) == [] and not inner.dropped
    net.put(0, 1, Stand(TERM, 3))
    taken(links, inner)
    assert f"{inner.queue_bytes_max} bytes wait for other hosts of slice 0" in inner.dropped[1]


def taken(links: Any, inner: Any) -> list[tuple[int, Any]]:
    items = []
    while inner.inbox or links._ready:
        item = links.receive(0.0)
        if item is not None:
            items.append((item.slice, item.message))
    return items


def test_the_start_of_a_slice_is_the_same_for_all_hosts(hosts_net: HostsNet) -> None:
    """A slice that started again is connected when no host has a connection with its earlier start."""
    net = hosts_net
    net.kill(1)
    net.others_work(-1)
    links, inner = net.members[0].links, net.links[0]
    assert taken(links, inner) == [(1, None)]
    net.second._sessions[1] += 1
    net.second.connect(0, 1)
    net.connect(0, 1)
    net.others_work(-1)
    assert taken(links, inner) == [] and 1 not in links.connected


@pytest.mark.parametrize(
    ("message", "payload"),
    [
        (Lead(TERM, TERM, 0), b""),
        (Value(TERM, 2, 2), bytes(16)),
        (Value(TERM, 2, 0), bytes(12)),
        (Value(TERM, -1, 0), bytes(16)),
        (Chunk(TERM, 1, 0, 0, {"loss": 1.0}, 1.0), bytes(3)),
    ],
)
def test_a_wrong_message_to_another_host_ends_only_its_connection(
    hosts_net: HostsNet, message: Any, payload: bytes
) -> None:
    net = hosts_net
    leadership = island_of(net)
    make(leadership)
    net.second.put(0, 2, message, payload)
    make(leadership, 2)
    assert 2 in net.second.links[0].dropped and leadership.members == {1}
    check_all(net, leadership, 3)


def test_values_that_nobody_orders_are_bounded(hosts_net: HostsNet) -> None:
    net = hosts_net
    for change in range(BACKLOG_MAX):
        net.second.put(0, 1, Value(TERM, change, 0), bytes(16))
    net.others_work(-1)
    assert not net.second.links[0].dropped
    net.second.put(0, 1, Value(TERM, BACKLOG_MAX, 0), bytes(16))
    net.others_work(-1)
    assert "cannot catch up" in net.second.links[0].dropped[1]


def test_a_second_value_of_a_change_ends_the_connection_of_its_sender(hosts_net: HostsNet) -> None:
    """It comes when host 0 has ordered the change for the first one; its numbers would fit another fragment only."""
    net = hosts_net
    leadership = island_of(net)
    make(leadership)
    foreign = [Item(2, net.session(2), Value(TERM, 2, 1), memoryview(bytes(12)))]

    def put_before(number: int, item: Item) -> bool:
        if foreign and (number, item.slice, type(item.message)) == (1, 1, AdoptValue):
            net.second.links[1].inbox.appendleft(foreign.pop())
        return False

    net.others_work(0)
    net.on_second = put_before
    adopt(net, leadership, first=True, second=True)
    net.others_work(0)
    assert net.second.links[1].dropped == {2: f"change 2 of term {TERM} has a value here already"}
    assert net.both(1) == net.both(0) and net.both(1)[1][:4] == [7] * 4


def test_a_value_of_an_earlier_change_is_dropped(hosts_net: HostsNet) -> None:
    """Its leader may have sent it before this slice got the state of a later change."""
    net = hosts_net
    leadership = island_of(net)
    make(leadership, 2)
    for change in (0, 1) * BACKLOG_MAX:
        net.second.put(1, 2, Value(TERM, change, 0), bytes(16))
    net.others_work(0)
    adopt(net, leadership, first=True, second=True)
    net.others_work(0)
    assert not net.second.links[1].dropped and net.both(1) == net.both(0)


def test_a_signal_to_another_host_reaches_host_0(hosts_net: HostsNet) -> None:
    net = hosts_net
    leadership = island_of(net)
    net.stops[1].set()
    make(leadership, 2)
    net.others_work(0)
    assert net.asked == [1]


def test_the_end_of_the_run_reaches_slices_whose_leader_has_several_hosts(three_hosts: HostsNet) -> None:
    """Host 0 sends it after its own hosts have left the learner; a slice gets it while all hosts are connected."""
    net = three_hosts
    leadership = island_of(net)
    make(leadership)
    others = dict(net.following)

    def end() -> None:
        leadership.end(75)
        net.others_work(0)
        for number in others.keys() - net.following.keys():
            net.kill(number)

    net.second.on_wait = end
    for host, own in net.nets.items():
        net.obeying_of[host][0].await_ended()
        own.kill(0)
        net.others_work(0)
    assert not net.following and [each.status for each in others.values()] == [75, 75]


def test_a_host_does_not_wait_long_for_slices_that_do_not_end(hosts_net: HostsNet) -> None:
    net = hosts_net

    def wait() -> None:
        net.now_s += POLL_S

    net.second.on_wait = wait
    net.obeying[0].await_ended()
    assert ENDED_S <= net.now_s < ENDED_S + 1 and net.second.links[0].connected
