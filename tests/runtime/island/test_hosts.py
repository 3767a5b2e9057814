"""A leading host and one that follows, in one process, and what surrounds them; real islands: test_island_hosts.py."""

import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from diloco_jax.core import codec
from diloco_jax.core.fragments import Fragment
from diloco_jax.core.held import one_buffer
from diloco_jax.core.host_bytes import join_host_bytes
from diloco_jax.core.layout import value_digest, whole
from diloco_jax.protocol.messages import AnchorValue, CutFragment, FragmentValue, GlobalFragment
from diloco_jax.runtime.island import follower as follower_module
from diloco_jax.runtime.island import join as hosts
from diloco_jax.runtime.island import leader as host_leader
from diloco_jax.runtime.island.adoptions import ArrivedValue
from diloco_jax.runtime.island.blocks import IslandBlocks
from diloco_jax.runtime.island.built_in import BuiltInLoop
from diloco_jax.runtime.island.follower import AHEAD_MAX
from diloco_jax.runtime.island.host import Host
from diloco_jax.runtime.island.join import Hosts, join
from diloco_jax.runtime.island.leader import LeadingHost
from diloco_jax.runtime.island.saved_states import SavedStates, StateName
from diloco_jax.runtime.learner.joined import Joining
from diloco_jax.runtime.local import processes as island_processes
from diloco_jax.runtime.local.processes import Child, Process
from diloco_jax.runtime.model.cuts import Cuts
from diloco_jax.runtime.records.pulse import Pulse
from diloco_jax.runtime.records.signals import WRONG_INPUT
from diloco_jax.settings.resolved import resolve
from diloco_jax.settings.run import RunConfig, WatchdogConfig
from diloco_jax.training.whole_state.moving import MovingLayout, MovingState
from diloco_jax.training.whole_state.staging import CopyGone
from diloco_jax.transport.commands import HostHave, HostWarmUp
from diloco_jax.transport.group.direct import DirectLinks
from diloco_jax.transport.group.group import GroupLeader, GroupMember, group_config
from diloco_jax.transport.link import Delivery, LinkClosed, TransportConfig, TransportError
from diloco_jax.transport.session.inbox import Inbox
from tests.limits import HANGS_S
from tests.runtime.helpers import wait_for
from tests.runtime.learner.test_run import CONFIG
from tests.sockets import free_port
from tests.transport.ends import Quiet

pytestmark = [pytest.mark.net, pytest.mark.usefixtures("shared_programs", "quick_compiler")]

TWO_HOSTS = replace(CONFIG, islands=replace(CONFIG.islands, devices=4, hosts=2))


def group_of(count: int) -> tuple[GroupLeader, list[GroupMember]]:
    """Both sides of an island's network, in one process."""
    leader = GroupLeader(group_config(TransportConfig(), "127.0.0.1:0"), "run", "island-0", count)
    there = group_config(TransportConfig(), leader.address)
    return leader, [GroupMember(there, "run", "island-0", host, count, leader.number) for host in range(1, count)]


def direct_of(count: int) -> list[DirectLinks]:
    """The connections for blocks of an island's hosts, in one process."""
    here = group_config(TransportConfig(), "127.0.0.1:0")
    made = [DirectLinks(here, "run", "island-0", host, count) for host in range(count)]
    for each in made:
        each.meet([(other.address, other.number) for other in made])
    return made


PULSE = Pulse(WatchdogConfig(least_s=0.0), "a loop", None)


class Deliveries:
    """A link of the other host whose messages the test brings."""

    open = True

    def __init__(self) -> None:
        self._inbox = Inbox()
        self._session = Quiet(self._inbox, payload_bytes_max=1 << 30)
        self.sent: list[tuple[Any, bytes]] = []

    def put(self, message: CutFragment, payload: bytes) -> None:
        assert self._session.put(message, payload)

    def receive(self, timeout_s: float) -> Delivery | None:
        item = self._inbox.get(timeout_s)
        return None if item is None else item[1]

    def wake(self) -> None:
        self._inbox.wake()

    def send(self, message: Any, payload: Any = b"") -> None:
        self.sent.append((message, payload if isinstance(payload, bytes) else b"".join(payload)))

    def close(self, grace_s: float = 5.0) -> None:
        pass


def twice(island: Any) -> Any:
    """Return a function that returns the boxes of all devices for each of two hosts."""

    def boxes(fragment: Fragment) -> dict[int, Any]:
        (mine,) = island.exchange.boxes(fragment).values()
        return {0: mine, 1: mine}

    return boxes


class Pair:
    """Both hosts of an island, each with the whole model; they share nothing but messages."""

    def __init__(self, deaths: list[str], folder: Path) -> None:
        config = replace(CONFIG, transport=replace(CONFIG.transport, connect_timeout_s=1.0))
        (group, (member,)), direct = group_of(2), direct_of(2)
        self.stop, self.asked = threading.Event(), threading.Event()
        nobody = f"127.0.0.1:{free_port()}"
        self.loop, loop = BuiltInLoop(config, "island-0"), BuiltInLoop(config, "island-0")
        self.folder = folder
        saves = [SavedStates([str(folder)], host, 2) for host in range(2)]
        run = resolve(config, loop.island.shapes, loop.island.kinds)
        # Each has all devices of its process, so every block is on both.
        blocks = [IslandBlocks(run.fragments, twice(self.loop.island), host, 2) for host in range(2)]
        self.leader = LeadingHost(
            run,
            self.loop.island,
            self.loop.warm_up,
            None,
            Hosts(0, 2, group, direct[0], 1),
            self.stop,
            saves[0],
            blocks[0],
        )
        self.cuts, self.blocks = Cuts([whole(each) for each in run.fragments], run.config.wire.down), blocks
        self.heads = self.leader.global_values()
        self.follows = host = Host(run, loop.island, loop.warm_up, saves=saves[1], blocks=blocks[1])
        joining = Joining(config, "island-0", 1, nobody, folder, PULSE, Hosts(1, 2, member, direct[1], 1))
        self.follower = joining.follower(host, self.asked, loop.put_batch)
        self._steps = loop.step
        # Without a syncer, the other host's link is this one.
        self.link = self.follower._link = Deliveries()
        self.statuses: list[int] = []
        self.deaths = deaths
        self.thread = threading.Thread(target=self.follow, daemon=True)
        self.thread.start()

    def follow(self) -> None:
        while (clock := self.follower.next_step()) is not None:
            self._steps(clock)
        self.statuses.append(self.follower.leave())

    def step(self, ranges: list[tuple[int, int]], clock: int) -> None:
        """A step of both hosts."""
        self.leader.tell_batch(ranges, ())
        self.loop.put_batch(ranges)
        self.leader.tell_step(clock)
        self.loop.wait(self.loop.step(clock))

    def give(self, version: int, fill: float, *, damage: bool = False) -> tuple[GlobalFragment, ArrivedValue]:
        """A global value of fragment 0 that both hosts get."""
        shapes = self.leader.fragments[0].keys_shapes
        values = {key: np.full(shape, fill, np.float32) for key, shape in shapes}
        payload = codec.encode(values, "float32")
        message = GlobalFragment(version, 0, version, 1, value_digest(values), len(payload))
        flat = whole(self.leader.fragments[0]).flat(values)
        sent = self.cuts.version(0, payload, flat, is_whole=True)
        cuts = [sent.cut(blocks.statement) for blocks in self.blocks]
        # The syncer sends the other host its cut, with a wrong digest if it shall be damaged.
        self.link.put(CutFragment(message, cuts[1][0] + damage), one_buffer(cuts[1][1]()))
        own = self.leader.complete(message, one_buffer(cuts[0][1]()), lambda: True)
        arrived = self.heads.read(message, own, cuts[0][0])
        self.leader.wait_for_others(message, lambda: True)
        self.heads.keep(message, arrived)
        self.leader.handled()
        self.leader.supersede(message)
        return message, arrived

    def settle(self) -> None:
        """Wait until the follower has handled all messages."""
        self.leader._questions.ask(HostWarmUp).payloads()

    def same(self) -> bool:
        theirs = self.follows.island.parameters()
        alike = all(np.array_equal(value, theirs[key]) for key, value in self.leader.island.parameters().items())
        return alike and self.moments() == self.moments(self.follows)

    def moments(self, host: Host | None = None) -> bytes:
        island = (host or self.leader).island
        return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(island.state.opt_state))


@pytest.fixture
def deaths(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Why a host would have ended its process."""
    found: list[str] = []

    def die(reason: str) -> None:
        found.append(reason)
        # A real process would have ended here.
        threading.Event().wait()

    monkeypatch.setattr(host_leader, "die", die)
    monkeypatch.setattr(follower_module, "die", die)
    return found


@pytest.fixture
def pair(deaths: list[str], tmp_path: Path) -> Iterator[Pair]:
    made = Pair(deaths, tmp_path)
    yield made
    if made.thread.is_alive() and not deaths:
        made.leader.end(0)
    # The loss of a host would end this process after the test.
    made.leader._ending = True
    made.follower._over.set()
    for network in (made.leader._group, made.follower.group, made.leader._direct, made.follower.direct):
        network.close()


def test_a_follower_does_what_the_leader_does(pair: Pair) -> None:
    pair.leader.warm_up()
    pair.leader.adopt(*pair.give(0, 0.5))
    for step in range(3):
        pair.step([(8 * step, 8 * step + 8)], step)
    pair.leader.stage(0, 3)
    staged = pair.leader.take_for_round(FragmentValue("island-0", 1, 1, 0, 3, 3, 24, 0, 0, 0))
    assert staged.encode()
    pair.settle()
    assert pair.same()
    pair.give(3, 0.25)
    # This value comes from a syncer that went back to a snapshot.
    late = pair.give(2, 0.125)
    pair.settle()
    (waiting,) = [value for value in pair.follower._arrived.values() if value.placed is not None]
    assert 0.125 in np.asarray(waiting.values[next(iter(waiting.values))]) and [*pair.follows._placed] == [
        waiting.placed
    ]
    pair.leader.adopt(*late)
    anchor = AnchorValue("island-0", 1, 0, 2, 0, 0)
    of_hosts = [b"".join(pair.leader.take_anchor(anchor)())]
    wait_for(lambda: AnchorValue in [type(message) for message, _ in pair.link.sent], "the other host's bytes")
    of_hosts += [payload for message, payload in pair.link.sent if isinstance(message, AnchorValue)]
    shapes = pair.leader.fragments[0].keys_shapes
    assert bytes(join_host_bytes(of_hosts, 1 << 30)) == codec.encode(
        {key: np.full(shape, 0.125, np.float32) for key, shape in shapes}, "float32"
    )
    pair.leader.unstage(0, 3)
    pair.settle()
    assert pair.same() and not pair.follows._adoptions.staged and len(pair.follower._arrived) == 1
    assert waiting.placed is None and not pair.follows._placed
    copy = pair.leader.stage_state(7)
    name = next(leaf.name for leaf in copy.layout.leaves if not leaf.name.startswith("params/"))
    assert copy.of_others(name).keys() == {1}
    moving = pair.leader.moving_state(7, "b")
    parts = b"".join(moving.part(0, pair.leader.moving.bytes.num_bytes))
    want = pair.moments()
    pair.step([(0, 8)], 0)
    assert pair.moments() != want
    pair.leader.load_state(parts)
    pair.settle()
    assert pair.same() and pair.moments() == want
    pair.leader.unstage_state(7)
    with pytest.raises(CopyGone, match="step 7"):
        copy.of_others(name)
    pair.leader.end(130)
    pair.thread.join(HANGS_S)
    assert pair.statuses == [130] and not pair.deaths


def test_a_value_counts_only_when_all_hosts_can_read_it(pair: Pair) -> None:
    with pytest.raises(ValueError, match=r"host 1: arrived damaged"):
        pair.give(0, 0.5, damage=True)
    # What is missing on the other host does not come when the link is over.
    with pytest.raises(LinkClosed, match="before all hosts had a value"):
        pair.leader.wait_for_others(GlobalFragment(9, 0, 9, 1, 0, 0), lambda: False)
    with pytest.raises(TransportError, match=r"host 1: .*all hosts of the island try again"):
        pair.leader.connect(0, 5)


def test_a_follower_reads_only_a_few_versions_ahead_of_the_leader(pair: Pair) -> None:
    pair.leader.warm_up()
    flat = np.zeros(whole(pair.leader.fragments[0]).size, np.float32)
    digest = pair.blocks[1].held[0].digest(flat)
    messages = [GlobalFragment(version, 0, version, 1, 0, 0) for version in range(AHEAD_MAX + 4)]
    # Both hold all blocks, and get half of them from the syncer.
    halves = [bytes(4 * each.got[0].layout.size) for each in pair.blocks]
    assert sum(map(len, halves)) == flat.nbytes
    for message in messages:
        pair.link.put(CutFragment(message, digest), halves[1])
    follower = pair.follower
    wait_for(lambda: follower._taken == AHEAD_MAX, "the versions that may be read")
    # The leader does not want the first one, and passes on the next two.
    pair.leader.handled()
    for message in messages[1:3]:
        pair.leader.complete(message, halves[0], lambda: True)
        pair.leader.wait_for_others(message, lambda: True)
        pair.leader.handled()
    wait_for(lambda: follower._taken == AHEAD_MAX + 3, "three more")
    assert [*follower._arrived] == messages[1:3] and [*follower._own] == [*range(4, AHEAD_MAX + 4)]


def test_a_leader_does_not_wait_for_blocks_of_a_host_that_cannot_read_its_own(pair: Pair) -> None:
    message = GlobalFragment(1, 0, 1, 1, 0, 0)
    pair.link.put(CutFragment(message, 0), bytes(9))
    half = bytes(4 * pair.blocks[0].got[0].layout.size)
    with pytest.raises(ValueError, match="cannot be read by host 1: has 9 bytes, but the blocks of this host take"):
        pair.leader.complete(message, half, lambda: True)
    with pytest.raises(LinkClosed, match="before all hosts had a value"):
        pair.leader.complete(message, half, lambda: False)


def test_a_state_of_another_model_is_refused_before_any_host_begins(pair: Pair) -> None:
    other = MovingLayout(pair.leader.island.state_layout, "int8")
    state = MovingState(other, pair.leader.island.stage_moments().leaf)
    with pytest.raises(ValueError, match="another model"):
        pair.leader.load_state(b"".join(state.part(0, other.bytes.num_bytes)))
    pair.settle()
    assert pair.same()


def test_a_follower_requests_only_the_parts_of_a_state_that_it_needs(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, send = list[tuple[Any, int]](), pair.leader._group.send

    def count(command: Any, payload: Any = b"", to: int | None = None) -> None:
        sent.append((command, len(payload)))
        send(command, payload, to)

    monkeypatch.setattr(pair.leader._group, "send", count)
    leaves = pair.leader.island.state_layout.leaves
    matrix = next(leaf for leaf in leaves if len(leaf.shape) == 2 and leaf.dtype == "float32")
    number = next(leaf for leaf in leaves if not leaf.shape)
    whole_leaf = np.arange(np.prod(matrix.shape), dtype=np.float32).reshape(matrix.shape)
    pair.leader._loading = {matrix.name: whole_leaf, number.name: np.array(7, number.dtype)}.__getitem__
    leaf, rows = pair.follower._leaf(matrix.name), slice(1, 3)
    # Two devices hold the same part.
    for _ in range(2):
        np.testing.assert_array_equal(leaf[rows, slice(None)], whole_leaf[rows])
    assert sent == [(HostHave(matrix.name), 2 * 4 * matrix.shape[1])]
    np.testing.assert_array_equal(np.array(leaf), whole_leaf)
    assert pair.follower._leaf(number.name)[()] == 7


def test_hosts_save_together_and_agree_on_what_all_of_them_have(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """A state counts when both have it; the newest complete one stays until there is another."""
    pair.leader.adopt(*pair.give(0, 0.5))
    for step in (1, 2, 3):
        pair.step([(0, 8)], step)
        assert pair.leader.save(StateName(1, step, 10 * step, (step,)))
        assert not pair.leader.save(StateName(1, step, 99, (step,))), "one is being written"
        assert pair.leader._saving is not None
        wait_for(lambda outcome=pair.leader._saving[1]: outcome() == "", "a save")
        kept = pair.moments()
        if step == 2:
            # The saved state of the other host is lost.
            shutil.rmtree(pair.folder / "host-1-of-2")
    steps = [[name.global_step for name in host.saved()] for host in (pair.leader, pair.follows)]
    assert steps == [[30, 20], [30]]
    pair.step([(0, 8)], 4)
    pair.leader.adopt(*pair.give(7, 0.125))
    assert pair.moments() != kept
    assert pair.leader.find_saved() == StateName(1, 3, 30, (3,))
    pair.leader.restore([])
    pair.settle()
    assert pair.same() and pair.moments() == kept
    fragment = pair.leader.fragments[0]
    path = fragment.slices[0].path
    assert 0.125 in pair.leader.island.parameters()[path], "the syncer's newer value holds"
    damaged = pair.folder / "host-1-of-2" / "step_00000030.shards"
    damaged.write_bytes(damaged.read_bytes()[1:])
    assert pair.leader.find_saved() is None
    assert "global step 30 cannot be used: host 1: in " in caplog.text and "instead of" in caplog.text


def test_a_follower_that_is_asked_to_end_tells_the_leader(pair: Pair) -> None:
    pair.asked.set()
    assert pair.stop.wait(HANGS_S)


def test_who_loses_a_host_ends(pair: Pair) -> None:
    pair.follower.group.close()
    wait_for(lambda: pair.deaths, "the leader's end")
    assert "host 1 is disconnected" in pair.deaths[0]


@pytest.mark.parametrize("lost", [0, 1])
def test_who_loses_a_host_that_passes_on_blocks_ends(pair: Pair, monkeypatch: pytest.MonkeyPatch, lost: int) -> None:
    monkeypatch.setattr(follower_module, "END_S", 0.1)
    (pair.leader._direct if lost == 0 else pair.follower.direct).close()
    # On a busy machine the host that was cut may see its own loss first.
    words = f"host {lost} is disconnected"
    wait_for(lambda: any(words in each for each in pair.deaths), "the other host's end")


@pytest.mark.parametrize(
    ("config", "host", "coordinator", "message"),
    [
        (TWO_HOSTS, 2, "127.0.0.1:1", "has hosts 0 to 1"),
        (TWO_HOSTS, 0, "", "belong together"),
        (TWO_HOSTS, 0, "nowhere", "--coordinator is 'nowhere'"),
        (TWO_HOSTS, 0, "127.0.0.1:0", "--coordinator is '127.0.0.1:0'"),
        (CONFIG, 1, "127.0.0.1:1", "island-0 has 1"),
    ],
)
def test_wrong_places_are_refused_before_jax_begins(
    config: RunConfig, host: int, coordinator: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        join(config, "island-0", 1, host, coordinator, str)


@pytest.mark.parametrize("where", ["127.0.0.1", "192.0.2.1", "nobody.invalid"])
def test_a_coordinator_that_cannot_listen_is_one_error(where: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"{where}:{taken.getsockname()[1]}"
        with pytest.raises(ConnectionError, match="cannot listen at --coordinator"):
            join(TWO_HOSTS, "island-0", 1, 0, address, str)


@pytest.mark.parametrize(
    ("where", "listens"), [("machine.invalid", ("[::]", "0.0.0.0")), ("127.0.0.1", ("127.0.0.1",))]
)
def test_a_coordinator_listens_where_other_machines_reach_it(
    monkeypatch: pytest.MonkeyPatch, where: str, listens: tuple[str, ...]
) -> None:
    """The name of a machine may lead to loopback on that machine, and to another address on all others."""
    asked: list[str] = []

    def initialize(*places: Any, coordinator_bind_address: str, **how: Any) -> None:
        asked.extend((places[0], coordinator_bind_address))
        raise RuntimeError("enough")

    monkeypatch.setattr(hosts.jax.distributed, "initialize", initialize)
    port = free_port()
    with pytest.raises(ConnectionError, match="enough"):
        join(TWO_HOSTS, "island-0", 1, 0, f"{where}:{port}", str)
    assert asked[0] == f"{where}:{port}" and asked[1] in {f"{each}:{port}" for each in listens}


def test_a_host_whose_others_do_not_come_says_so_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    died, words = threading.Event(), list[str]()

    def die(reason: str) -> None:
        words.append(reason)
        died.set()

    def initialize(*where: Any, **how: Any) -> None:
        assert died.wait(HANGS_S), "JAX would abort"
        raise RuntimeError("the process would be gone")

    monkeypatch.setattr(hosts, "START_S", 0.1)
    monkeypatch.setattr(hosts, "die", die)
    monkeypatch.setattr(hosts.jax.distributed, "initialize", initialize)
    with pytest.raises(ConnectionError, match="would be gone"):
        join(TWO_HOSTS, "island-0", 1, 1, "127.0.0.1:1", str)
    assert "start all 2 of them, with the same --coordinator (here 127.0.0.1:1)" in words[0]


def agreed(*same: dict[str, str]) -> list[Any]:
    """Return what hosts with these settings find: the incarnation of the leader, or an error."""
    count = len(same)
    leader, members = group_of(count)
    groups, direct = [leader, *members], direct_of(count)

    def agree(host: int) -> Any:
        try:
            return hosts._agree(Hosts(host, count, groups[host], direct[host], 100 + host), same[host])
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(count) as threads:
        found = list(threads.map(agree, range(count), timeout=HANGS_S))
    for network in (*groups[::-1], *direct):
        network.close()
    return found


def test_hosts_agree_on_the_leaders_incarnation_or_are_all_refused() -> None:
    assert agreed({"seed": "0"}, {"seed": "0"}, {"seed": "0"}) == [100, 100, 100]
    found = agreed({"seed": "0"}, {"seed": "0"}, {"seed": "1"})
    assert all("host 2 has seed '1', host 0 has '0'" in each for each in found)


def test_an_island_forgets_that_it_could_be_a_part_of_a_multislice_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "2")
    assert join(CONFIG, "island-0", 1, None, "", str) is None
    assert "MEGASCALE_NUM_SLICES" not in os.environ


def metadata(words: bytes) -> Any:
    """Return a function that asks a fake metadata server with this answer."""
    return lambda *handlers: SimpleNamespace(open=lambda request, timeout: io.BytesIO(words))


def test_a_slice_of_a_multislice_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "exists", lambda path: str(path).startswith("/dev/"))
    words = b"TYPE: 'V5P'\nMEGASCALE_NUM_SLICES: '2'\n"
    monkeypatch.setattr(hosts.urllib.request, "build_opener", metadata(words))
    with pytest.raises(ValueError, match="MEGASCALE_NUM_SLICES: '2'"):
        hosts._refuse_multislice()
    monkeypatch.setattr(hosts.urllib.request, "build_opener", metadata(b"TYPE: 'V5P'\n"))
    hosts._refuse_multislice()


def child_of(folder: Path, *bodies: str) -> Child:
    """An island whose processes run these words of Python."""
    processes = []
    for host, body in enumerate(bodies):
        log = folder / f"{host}.log"
        with log.open("wb") as stream:
            process = subprocess.Popen([sys.executable, "-c", body], stdout=stream, stderr=stream)
        processes.append(Process(f"island-0.host-{host}", process, log))
    return Child("island-0", processes)


def ended(child: Child) -> int:
    return int(wait_for(lambda: None if child.poll() is None else (child.poll(),), "the end")[0])


def test_what_is_left_of_an_island_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(island_processes, "GRACE_S", 0.2)
    child = child_of(tmp_path, "import time; time.sleep(600)", "import time; time.sleep(600)")
    assert child.poll() is None
    child.hosts[1].process.kill()
    assert ended(child) == -signal.SIGKILL
    assert "island-0.host-1 killed by SIGKILL" in child.describe_exit()


def test_the_status_of_an_island_is_that_of_who_knows_why(tmp_path: Path) -> None:
    assert ended(child_of(tmp_path, "", "")) == 0
    wrong = child_of(tmp_path, f"import time; time.sleep(1); print('bad'); raise SystemExit({WRONG_INPUT})", "exit(1)")
    assert ended(wrong) == WRONG_INPUT and "host-0 ended with status 2: bad" in wrong.describe_exit()
    assert ended(child_of(tmp_path, "", "exit(1)")) == 1
