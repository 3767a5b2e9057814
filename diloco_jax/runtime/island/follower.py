"""A host of an island that follows the leader: it has no machine, and obeys the leader's commands in their order.

docs/architecture.md lists its threads. The caller's thread steps; the link thread copies values to the devices.
"""

import json
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any, TypeVar, cast

import numpy as np

from diloco_jax.core.codec import Bytes
from diloco_jax.protocol.messages import CutFragment, FragmentValue, GlobalFragment
from diloco_jax.runtime.island.adoptions import ArrivedValue
from diloco_jax.runtime.island.host import Host, Ranges
from diloco_jax.runtime.island.join import CommandQueue, die
from diloco_jax.runtime.island.leader import END_S
from diloco_jax.runtime.island.passing import Passing
from diloco_jax.runtime.island.payloads import PayloadSender
from diloco_jax.runtime.island.saved_states import StateName
from diloco_jax.runtime.records.pulse import Pulse
from diloco_jax.runtime.records.signals import FAILED
from diloco_jax.training.exchange.outgoing import StagedFragment
from diloco_jax.transport import commands
from diloco_jax.transport.endpoints.dialler import Dialler
from diloco_jax.transport.group.direct import DirectLinks
from diloco_jax.transport.group.group import GroupItem, GroupMember
from diloco_jax.transport.limits import REASON_LENGTH_MAX
from diloco_jax.transport.link import Link, Payload, TransportError

POLL_S = 0.2
# A host reads at most so many versions ahead of the leader.
AHEAD_MAX = 4
# These commands may take longer than a step.
LONG = (commands.HostLoadState, commands.HostRestore, commands.HostEvaluate)

# Commands for the thread that has the link, and numbers of versions whose blocks have all arrived.
OfLink = commands.HostConnect | commands.HostHandled | int
# The start and the stop along each axis.
Bounds = tuple[tuple[int, int], ...]
T = TypeVar("T")
log = logging.getLogger(__name__)


class LeaderLeaf:
    """A leaf of the state that the leader loads. Indexing it requests that part from the leader."""

    def __init__(self, shape: tuple[int, ...], ask: Callable[[Bounds], np.ndarray]) -> None:
        self.shape = shape
        self._ask = ask
        # Several devices may hold the same part.
        self._parts: dict[Bounds, np.ndarray] = {}

    def __getitem__(self, box: tuple[slice, ...]) -> np.ndarray:
        bounds = tuple(each.indices(size)[:2] for each, size in zip(box, self.shape, strict=True))
        if bounds not in self._parts:
            self._parts[bounds] = self._ask(bounds)
        return self._parts[bounds]

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        del copy
        return np.asarray(self[(slice(None),) * len(self.shape)], dtype)


@dataclass(eq=False)
class Follower:
    """One following host, from its first message to its last; its loop calls `next_step` and `leave`."""

    host: Host
    dialler: Dialler
    group: GroupMember
    direct: DirectLinks
    # Set from outside to leave the run; the leader decides when.
    stop: threading.Event
    # Takes the samples of the next step, and the known samples of later steps.
    on_batch: Callable[[Ranges, Ranges], None]
    pulse: Pulse
    # The queue of commands in a slice of several hosts; its own by default.
    given: CommandQueue | None = None

    def __post_init__(self) -> None:
        # The exit status that the leader sent at the end; None before.
        self.status: int | None = None
        self._stepped_s = 0.0
        self._told_stop = False
        self._over = threading.Event()
        # The link thread's.
        self._values = self.host.global_values()
        # The versions that are not complete, by number, with the digest of all blocks of this host.
        self._own: dict[int, CutFragment] = {}
        # The values that may be adopted, in the order of their arrival.
        self._arrived: dict[GlobalFragment, ArrivedValue] = {}
        self._link: Link | None = None
        self._payloads = PayloadSender(lambda error: die(f"a value could not be sent: {error!r}"))
        self._leaves = ThreadPoolExecutor(1, "leaves")
        self._steps_do: CommandQueue = cast(Any, queue.SimpleQueue()) if self.given is None else self.given
        self._link_does: queue.SimpleQueue[OfLink] = queue.SimpleQueue()
        # Number of versions of the present link that have arrived here, and number that the leader has handled.
        self._taken, self._handled = 0, 0
        self._received_leaves: queue.SimpleQueue[tuple[commands.HostHave, Bytes]] = queue.SimpleQueue()
        blocks = self.host.blocks
        assert blocks is not None, "an island of several hosts has blocks"
        self._passing = Passing(blocks, self.host.format_of, self.direct.send, self._to_link)
        self.direct.dial(blocks.sources, self._on_shared)
        self._in_thread("group", self._receive)
        self._in_thread("link", self._serve_link)

    def next_step(self) -> int | None:
        """Obey the leader until it makes a step; return the step's global step, or None at the end.

        The process ends if a host is lost.
        """
        # A collective may fail because a host is lost.
        return self._guarded(self._obey)

    def _obey(self) -> int | None:
        while self.status is None:
            try:
                command = self._steps_do.get(timeout=POLL_S)
            # No command arrived, so this host is not stuck. The watchdog of the leader ends a leader that is stuck.
            except queue.Empty:
                self.pulse.beat()
                continue
            if isinstance(command, commands.HostStep):
                self.host.forget_saved()
                now_s, before_s = time.monotonic(), self._stepped_s
                self._stepped_s = now_s
                self.pulse.beat(now_s - before_s if before_s else None)
                self.pulse.ready(self._link is not None)
                return command.clock
            if isinstance(command, LONG):
                self.pulse.patient()
            else:
                self.pulse.beat()
            self._do(command)
        return None

    def leave(self) -> int:
        """End, and return the leader's exit status; FAILED if it sent none."""
        # The disk may take long.
        self.pulse.patient()
        self.host.close()
        self.pulse.close()
        self._payloads.close()
        if self._link is not None:
            self._link.close(0.0)
        self.group.close()
        self.direct.close()
        return FAILED if self.status is None else self.status

    def _do(self, command: commands.Command) -> None:
        host = self.host
        match command:
            case commands.HostWarmUp(number):
                self._in_thread("compile", partial(self._warm_up, number))
            case commands.HostPutBatch(ranges, ahead):
                self.on_batch(ranges, ahead)
            case commands.HostStage(fragment_id, local_step):
                host.stage(fragment_id, local_step)
            case commands.HostUnstage(fragment_id, local_step):
                host.unstage(fragment_id, local_step)
            case commands.HostSend(number, value):
                self._send(number, value)
            case commands.HostSupersede(value):
                _forget_older(self._arrived, value)
                self._values.forget_older(value)
            case commands.HostAdopt(value):
                host.adopt(value, self._arrived[value])
            case commands.HostSendAnchor(anchor):
                if self._link is not None:
                    self._payloads.anchor(self._link, anchor, host.take_anchor(anchor))
            case commands.HostStageState(name):
                host.stage_state(name)
            case commands.HostUnstageState(name):
                host.unstage_state(name)
            case commands.HostLeaf(number, name, leaf):
                self._send_leaf(number, name, leaf)
            case commands.HostEvaluate(number, global_step, final):
                score = host.evaluate(global_step, final=final)
                self._answer(number, reason="" if isfinite(score.loss) else score.reason)
            case commands.HostLoadState(number):
                host.island.load_moments(self._leaf)
                self._answer(number)
            case commands.HostSave(number, state, kept):
                saving = self.host.save_own(StateName.parse(json.loads(state)), kept)
                saving.add_done_callback(lambda done: self._answer(number, reason=done.result()))
            case commands.HostRestore(number, fragments):
                self.host.restore(fragments)
                self._answer(number)
            case commands.HostLoader(state):
                host.resume_loader(StateName.parse(json.loads(state)) if state else None)
            case commands.HostEnd(status):
                self.status = status
            case _:
                raise ValueError(f"a {type(command).__name__} is not expected here")

    def _warm_up(self, number: int) -> None:
        self.host.warm_up(self.pulse.phase)
        self._answer(number)
        self.host.warm_up_evaluation()

    def _send(self, number: int, value: FragmentValue) -> None:
        staged = self.host.take_for_round(value)
        if number:
            assert isinstance(staged, StagedFragment), "several hosts share an island of JAX arrays"
            self._leaves.submit(self._guarded, lambda: self._answer(number, staged.loose()))
        if self._link is not None:
            self._payloads.value(self._link, value, staged)

    def _send_leaf(self, number: int, name: int, leaf: str) -> None:
        if (staged := self.host.states.get(name)) is None:
            self._answer(number, reason=f"it has no copy of step {name} any more")
        else:
            self._leaves.submit(self._guarded, lambda: self._answer(number, staged.loose(leaf)))

    def _on_disk(self, command: commands.HostSaved | commands.HostRead) -> None:
        if isinstance(command, commands.HostSaved):
            self._answer(command.number, json.dumps(self.host.saved()).encode())
        else:
            self._answer(command.number, reason=self.host.read(StateName.parse(json.loads(command.state))))

    def _leaf(self, name: str) -> "LeaderLeaf":
        leaf = self.host.island.state_layout.by_name[name]

        def ask(bounds: Bounds) -> np.ndarray:
            self.group.send(commands.HostWant(name, *(tuple(each) for each in zip(*bounds, strict=True))))
            have, payload = self._received_leaves.get()
            assert have.leaf == name, f"asked for {name}, got {have.leaf}"
            return np.frombuffer(payload, np.dtype(leaf.dtype)).reshape([stop - start for start, stop in bounds])

        return LeaderLeaf(leaf.shape, ask)

    def _serve_link(self) -> None:
        """Obey the leader's commands for the link, and read the versions that the syncer sends."""
        while True:
            link = self._link
            # What the leader has not handled takes memory.
            reads = link is not None and self._taken < self._handled + AHEAD_MAX
            try:
                command = self._link_does.get(block=not reads, timeout=POLL_S)
            except queue.Empty:
                delivery = link.receive(POLL_S) if link is not None and reads else None
                if delivery is not None and isinstance(delivery.message, CutFragment):
                    self._take(delivery.message, delivery.payload)
                continue
            match command:
                case int() as number:
                    self._read(number)
                case commands.HostHandled(count):
                    self._handled = count
                    self._passing.handled(count)
                    self._drop_handled()
                case commands.HostConnect():
                    self._connect(command)

    def _connect(self, command: commands.HostConnect) -> None:
        if self._link is not None:
            self._link.close(0.0)
        self._link = None
        # The missing blocks of these values do not arrive any more.
        self._own.clear()
        self._passing.begin(command.session)
        self._taken, self._handled = 0, 0
        try:
            self._link = self.dialler.connect(command.epoch, command.session)
        except (TransportError, ValueError) as error:
            self.group.send(commands.HostAnswer(command.number, str(error)))
        else:
            self._answer(command.number)

    def _take(self, cut: CutFragment, payload: Bytes) -> None:
        """Take the blocks of a version that the syncer has sent."""
        self._taken += 1
        self._own[self._taken] = cut
        try:
            self._values.check(cut.value.fragment_id)
            self._passing.arrived(self._taken, cut.value, payload)
        except ValueError as error:
            del self._own[self._taken]
            self._refuse(cut.value, error)
        self._drop_handled()

    def _read(self, number: int) -> None:
        """Read and check a value whose blocks have all arrived, and tell the leader."""
        payload, cut = self._passing.take(number), self._own.pop(number, None)
        # The leader may have handled it meanwhile, or there is a new link.
        if payload is None or cut is None:
            return
        message = cut.value
        try:
            value = self._values.read(message, payload, cut.digest)
        except ValueError as error:
            self._refuse(message, error)
            return
        self._values.add(message, value)
        self.host.place(message.fragment_id, value)
        self._arrived[message] = value
        self.group.send(commands.HostHas(message))

    def _refuse(self, message: GlobalFragment, error: ValueError) -> None:
        self.group.send(commands.HostHas(message, str(error)[:REASON_LENGTH_MAX]))

    def _drop_handled(self) -> None:
        """Forget incomplete values that the leader has handled, because the island does not adopt them."""
        self._own = {number: cut for number, cut in self._own.items() if number > self._handled}

    def _to_link(self, command: OfLink) -> None:
        self._link_does.put(command)
        if (link := self._link) is not None:
            link.wake()

    def _on_shared(self, item: GroupItem) -> None:
        """Take blocks that another host passes on; on the thread of its connection."""
        if isinstance(item.message, commands.HostShared):
            self._guarded(partial(self._passing.on_shared, item.host, item.message, item.payload))
        # At the end of the island a host may end before this one has the leader's last command.
        elif not self._over.wait(END_S):
            die(f"host {item.host} is disconnected ({item.reason})")

    def _receive(self) -> None:
        while self.status is None:
            item = self.group.receive(POLL_S)
            if self.stop.is_set() and not self._told_stop:
                self._told_stop = True
                self.group.send(commands.HostStop())
            if item is None:
                continue
            match item.message:
                case None:
                    die(f"the leader is disconnected ({item.reason})")
                case commands.HostHave() as have:
                    self._received_leaves.put((have, item.payload))
                case commands.HostSaved() | commands.HostRead() as command:
                    self._leaves.submit(self._guarded, partial(self._on_disk, command))
                case commands.HostConnect() | commands.HostHandled() as command:
                    self._to_link(command)
                case commands.HostEnd() as command:
                    self._over.set()
                    self._steps_do.put(command)
                    return
                case command:
                    self._steps_do.put(cast(commands.Command, command))

    def _answer(self, number: int, payload: Payload = b"", reason: str = "") -> None:
        self.group.send(commands.HostAnswer(number, reason[:REASON_LENGTH_MAX]), payload)

    def _in_thread(self, name: str, body: Callable[[], None]) -> None:
        threading.Thread(target=self._guarded, args=(body,), name=name, daemon=True).start()

    def _guarded(self, body: Callable[[], T]) -> T:
        try:
            return body()
        # An error would be lost with the thread.
        except Exception as error:
            die(f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")


def _forget_older(values: dict[GlobalFragment, Any], message: GlobalFragment) -> None:
    """Forget the values of a fragment that came before this one."""
    known = list(values)
    for other in known[: known.index(message)] if message in values else ():
        if other.fragment_id == message.fragment_id:
            del values[other]
