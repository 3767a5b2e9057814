"""The process of one slice: it follows a leader, or leads, until the run ends or somebody asks it to end.

A slice that follows finds a new leader when its leader is lost. A slice that has led and cannot lead any more ends, and
its supervisor starts it again.

If slices have several hosts, host 0 does this, and the other hosts obey it. If one of them is lost, all end at once.
"""

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from hashlib import blake2s
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax

from diloco_jax.protocol.messages import RUN_COMPLETE
from diloco_jax.protocol.syncer.progress import GLOBAL_STEPS
from diloco_jax.runtime.island.adoptions import GlobalValues
from diloco_jax.runtime.island.blocks import IslandBlocks
from diloco_jax.runtime.island.built_in import BuiltInLoop
from diloco_jax.runtime.island.join import Hosts, die
from diloco_jax.runtime.island.kept_state import KeptState
from diloco_jax.runtime.island.threads import start_thread
from diloco_jax.runtime.learner.joined import Joining, island_pulse
from diloco_jax.runtime.learner.run import LearnerRun
from diloco_jax.runtime.records.liveness import slice_loop
from diloco_jax.runtime.records.pulse import Pulse
from diloco_jax.runtime.records.signals import FAILED, INTERRUPTED, WRONG_INPUT, RefusedForGood, end_now
from diloco_jax.runtime.slices.following import POLL_S, Chosen, FollowingSlice
from diloco_jax.runtime.slices.forwarding import ForwardingIsland
from diloco_jax.runtime.slices.hosts import JointLinks, LedHosts
from diloco_jax.runtime.slices.leading import Leadership, SlicedLoop, SliceLost
from diloco_jax.runtime.slices.member import SliceMember
from diloco_jax.runtime.slices.messages import MESSAGES
from diloco_jax.runtime.slices.obeying import ObeyingHost
from diloco_jax.runtime.slices.orders import REPORTS, Serve
from diloco_jax.settings.fingerprint import own_corpus
from diloco_jax.settings.resolved import ResolvedRun, resolve
from diloco_jax.settings.run import RunConfig
from diloco_jax.transport.commands import HostEnd, HostOrder, HostReport
from diloco_jax.transport.endpoints.reach import await_listener
from diloco_jax.transport.group.group import GroupItem, GroupLeader, GroupMember
from diloco_jax.transport.link import TransportError
from diloco_jax.transport.slices.links import QUEUE_BYTES_MAX, SliceLinks

# A leader that was asked to end and is not making a step says goodbye to the syncer after so long.
HAND_OVER_S = 3.0

log = logging.getLogger(__name__)


class SlicePlace(NamedTuple):
    """This process's place in its island."""

    own: int
    # Where each slice, or its host of this number, listens for the others.
    addresses: tuple[str, ...]
    # The processes of this slice; None if it is one.
    hosts: Hosts | None = None

    @property
    def host(self) -> int:
        """Return the number of this process in its slice."""
        return 0 if self.hosts is None else self.hosts.host


def settings_of(run: ResolvedRun, loop: BuiltInLoop) -> str:
    """Return a digest of what must be equal on the hosts of one number, so that slices compute the same bits."""
    # An operator may raise the limits of a run, and start its slices again one after the other.
    agreed = [pair for pair in run.fingerprint(loop.corpus, loop.island.base.digest) if pair[0] != GLOBAL_STEPS]
    corpus = own_corpus(run.config, loop.corpus, 0, "").content
    mesh = loop.island.mesh
    devices = [*mesh.shape.items()], mesh.devices.flat[0].device_kind, jax.__version__
    # Messages have only sizes, so hosts of one number must hold the same shards.
    shards = loop.parts.places, [(shard.name, shard.spans) for shard in loop.island.shards()]
    return blake2s(repr((agreed, corpus, loop.batch_size, devices, shards)).encode(), digest_size=8).hexdigest()


class SliceProcess:
    """One slice from the start of its process to the end.

    Args:
        config: the run's, not resolved.
        learner_id: name of the island.
        address: of the syncer.
        incarnation: returns the number of the learner's next incarnation.
        stop: is set when this process shall end.
        make: makes the learner when this slice leads.

    Raises:
        ValueError: the model cannot be divided over slices, or the connections are refused by a setting.
    """

    _member: SliceMember
    # Of host 0 of several.
    _listener: "GroupListener"
    _links: SliceLinks

    def __init__(
        self,
        config: RunConfig,
        learner_id: str,
        place: SlicePlace,
        address: str,
        run_dir: Path,
        incarnation: Callable[[], int],
        stop: threading.Event,
        make: Callable[..., LearnerRun] = LearnerRun,
    ) -> None:
        self._make = make
        self._config, self._learner_id, self._place = config, learner_id, place
        self._address, self._run_dir, self._incarnation, self._stop = address, run_dir, incarnation, stop
        loop = BuiltInLoop(config, learner_id)
        self._run = run = resolve(config, loop.island.shapes, loop.island.kinds)
        self._loop, hosts = loop, place.hosts
        # The blocks of each fragment that this host holds.
        self._held = None
        if hosts is not None:
            self._held = IslandBlocks(run.fragments, loop.island.exchange.boxes, hosts.host, hosts.count).held

    def run(self) -> int:
        """Train until the run ends, or this process shall; return the exit status."""
        config, islands, place, loop = self._config, self._config.islands, self._place, self._loop
        hosts, number = place.hosts, slice_loop(place.own, islands.slices, place.host)
        with closing(island_pulse(config, self._run_dir, self._learner_id, number)) as pulse:
            pulse.phase("compiling")
            loop.warm_up_steps()
            loop.island.warm_up_exchange(self._run.fragments)
            # A slice that comes to lead reads values of the syncer at once, and their kernels take seconds to load.
            GlobalValues(self._run.fragments, config.wire.down, self._held)
            # A slice that computes all parts queues a gradient, and at the start of a term two models before it.
            queue = max(QUEUE_BYTES_MAX, 4 * loop.parts.size * (2 + islands.slices))
            who = config.transport, config.name, self._learner_id, place.own, place.addresses
            same = settings_of(self._run, loop)
            # The others count on a slice that they can reach, so it must be able to follow by now.
            links = SliceLinks(*who, MESSAGES, queue, same, place.host, None if hosts is None else hosts.start)
            try:
                if hosts is None:
                    self._member = SliceMember(place.own, self._run, loop, links)
                    return self._follow(pulse)
                if place.host:
                    return self._obey(hosts, links, pulse)
                return self._direct(hosts, links, pulse)
            finally:
                links.close(1.0)
                loop.close()

    def _follow(self, pulse: Pulse) -> int:
        """Follow a leader, or lead; return the exit status."""
        islands = self._config.islands
        follower = FollowingSlice(
            self._member,
            len(self._place.addresses),
            islands.slices_least,
            islands.straggler_s,
            self._stop.is_set,
            pulse,
        )
        while (chosen := follower.elect()) is not None:
            if chosen.leader == self._place.own:
                # The learner's own signs of life count from now on.
                pulse.rest()
                pulse.phase("")
                return self._lead(chosen)
            ended = follower.follow(chosen)
            if ended == "over":
                return follower.status
        return INTERRUPTED

    def _direct(self, hosts: Hosts, links: SliceLinks, pulse: Pulse) -> int:
        """Decide for all hosts of this slice; return the exit status."""
        assert isinstance(hosts.group, GroupLeader), "another host than 0 decides"
        self._listener = listener = GroupListener(hosts.group, lambda item: put_report(links, item))
        self._links = links
        led = LedHosts(hosts.count, hosts.group.send)
        joint = JointLinks(self._place.own, links, led, hosts.count, self._stop.set)
        self._member = SliceMember(self._place.own, self._run, self._loop, joint, led, self._held)
        joint.await_hosts(pulse.beat)
        status = self._follow(pulse)
        if not listener.over:
            listener.close()
            hosts.group.send(HostEnd(status))
            hosts.group.close()
            hosts.direct.close()
        return status

    def _obey(self, hosts: Hosts, links: SliceLinks, pulse: Pulse) -> int:
        """Obey host 0 of this slice until it ends; return the exit status."""
        assert isinstance(hosts.group, GroupMember), "host 0 decides"
        member = SliceMember(self._place.own, self._run, self._loop, links, held=self._held)
        obeying = ObeyingHost(member, links, hosts.group, self._stop)
        GroupListener(hosts.group, lambda item: put_order(obeying, item))
        while True:
            try:
                command = obeying.get(POLL_S)
            # Another start may succeed, which a ValueError of this process would deny.
            except ValueError as error:
                die(f"it cannot do what host 0 of its slice does: {error}")
            except queue.Empty:
                pulse.beat()
                pulse.ready(member.standing.change > 0)
                continue
            if isinstance(command, HostEnd):
                hosts.group.close()
                hosts.direct.close()
                return command.status
            assert isinstance(command, Serve), f"a {type(command).__name__} is not expected before the slice leads"
            return self._serve(replace(hosts, commands=obeying), obeying, command.incarnation, pulse)

    def _serve(self, hosts: Hosts, obeying: ObeyingHost, incarnation: int, pulse: Pulse) -> int:
        """Be a host of the island's learner, whose leader is host 0; return the exit status."""
        member, loop = obeying.member, self._loop
        kept = None if member.copy is None or member.name is None else KeptState(member.name, member.copy)
        joining = Joining(self._config, self._learner_id, incarnation, self._address, self._run_dir, pulse, hosts, kept)
        # Host 0 decides when this process ends, and learns of a signal to it from a report.
        never = threading.Event()
        island = ForwardingIsland(obeying.changes, member)
        host = joining.host(island, loop.warm_up_steps, loop.evaluate, never)  # type: ignore[arg-type]
        follower = joining.follower(host, never, lambda ranges, ahead: None)
        while follower.next_step() is not None:
            pass
        status = follower.leave()
        if status in (0, WRONG_INPUT):
            # Host 0 ends the other slices now, and they get its message while they are connected with all hosts.
            obeying.await_ended()
        return status

    def _lead(self, chosen: Chosen) -> int:
        """Be the island's learner with the other slices; return the exit status."""
        islands, ended = self._config.islands, threading.Event()
        log.info(f"slice {self._place.own} leads {self._learner_id} in term {chosen.term}")
        leadership = Leadership(self._member, chosen, islands.slices_least, islands.straggler_s, self._stop.is_set)
        hurry = threading.Event()
        start_thread(lambda: self._hurry(hurry, ended), "hurry", daemon=True)
        try:
            leadership.gather()
            if self._member.copy is not None:
                self._await_syncer(leadership, hurry)
            with closing(island_pulse(self._config, self._run_dir, self._learner_id)) as pulse:
                incarnation, member = self._incarnation(), self._member
                kept = None
                if member.copy is not None and member.name is not None:
                    kept = KeptState(member.name, member.copy)
                    leadership.has_unloaded = True
                joining = Joining(
                    self._config,
                    self._learner_id,
                    incarnation,
                    self._address,
                    self._run_dir,
                    pulse,
                    self._served(incarnation),
                    kept,
                )
                loop = SlicedLoop(leadership, shrinks=islands.slices_batch == "shrink")
                make_loop = cast(Any, lambda *_: loop)
                run = self._make(joining, hurry, make_loop=make_loop, explain=self._explain)
                loop.machine = run.joined.machine
                reason = run.run()
        except SliceLost as error:
            log.warning(f"slice {self._place.own} leads no more: {error}")
            status = INTERRUPTED if self._stop.is_set() else FAILED
            if self._place.hosts is not None:
                # The other hosts end without an orderly goodbye, and JAX would wait for it.
                end_now(status)
            return status
        except RefusedForGood:
            leadership.end(WRONG_INPUT)
            raise
        finally:
            ended.set()
            leadership.close()
        log.info(f"{self._learner_id}: {reason}")
        if self._stop.is_set() and reason != RUN_COMPLETE:
            # Only this slice was asked to end.
            return INTERRUPTED
        leadership.end(0)
        return 0

    def _explain(self, error: Exception) -> str:
        """Return the reason of the learner's goodbye: with one, all hosts end as processes that were asked to end."""
        return str(error) if isinstance(error, SliceLost) and self._stop.is_set() else ""

    def _served(self, incarnation: int) -> Hosts | None:
        """Let the other hosts of this slice become hosts of the learner; return all of them."""
        hosts = self._place.hosts
        if hosts is None:
            return None
        links = self._links
        self._member.hosts.order(Serve(incarnation))
        # The learner's host reads their messages from now on.
        self._listener.close()
        return replace(hosts, incarnation=incarnation, reports=lambda item: put_report(links, item))

    def _await_syncer(self, leadership: Leadership, hurry: threading.Event) -> None:
        """Wait without a limit until the syncer listens, because the island's state would be lost with this process."""
        transport = replace(self._config.transport, address=self._address)
        while not hurry.is_set():
            try:
                await_listener(transport, "the syncer's address", log.warning, hurry)
                break
            except TransportError as error:
                log.warning(f"{error}; waiting on, because this slice has the island's state")
                leadership.look()
        if hurry.is_set():
            raise SliceLost("this slice was asked to end while no syncer listened")

    def _hurry(self, hurry: threading.Event, ended: threading.Event) -> None:
        while not ended.is_set():
            if self._stop.wait(0.5):
                if not ended.wait(HAND_OVER_S):
                    hurry.set()
                return


class GroupListener:
    """Reads the messages of the other hosts of this slice on a thread, until `take` returns False or it is closed."""

    def __init__(self, group: GroupLeader | GroupMember, take: Callable[[GroupItem], bool]) -> None:
        self._group, self._take = group, take
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="slice-hosts", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        """Tell whether it is closed."""
        return self._closing.is_set()

    def close(self) -> None:
        """End the thread, and leave further messages to another reader."""
        self._closing.set()
        self._thread.join()

    def _listen(self) -> None:
        try:
            while not self.over:
                item = self._group.receive(POLL_S)
                if item is not None and not self._take(item):
                    return
        # An error would be lost with the thread.
        except Exception as error:
            die(f"a message of a host cannot be handled: {error!r}")


def put_report(links: SliceLinks, item: GroupItem) -> bool:
    """Put a report of another host among the items of host 0."""
    if not isinstance(item.message, HostReport):
        die(f"host {item.host} is disconnected ({item.reason or item.message})")
    links.put((item.host, REPORTS.unpack(item.message.message.encode())))
    return True


def put_order(obeying: ObeyingHost, item: GroupItem) -> bool:
    """Give a command of host 0 to this host; return False after the last one before the slice leads or ends."""
    if not isinstance(item.message, HostOrder | HostEnd):
        die(f"host 0 is disconnected ({item.reason or item.message})")
    last = obeying.put(item.message)
    return not last
