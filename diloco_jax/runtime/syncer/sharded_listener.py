"""The syncer's listener, alone or together with the listeners of its merge shards.

A learner has a session with each listener, all with the same number. The driver gets a learner's value once all shards
of the fragment have their part of it. It gets a hello once all shards have received it too, so that all can answer.
Other messages of the learner before that are dropped; the protocol tolerates the loss of any message.

Everything that waits here is bounded, and belongs to one session of one learner.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from diloco_jax.protocol.membership import difference
from diloco_jax.protocol.messages import FragmentValue, GlobalFragment, Hello, SyncerMessage
from diloco_jax.runtime.model.merge_shards import HeldPart, MergeShards
from diloco_jax.runtime.model.shard_process import ShardHello, ShardHolds, ShardRun
from diloco_jax.runtime.records.files import ADDRESS_FILE
from diloco_jax.runtime.syncer.begin import FAILOVER
from diloco_jax.runtime.syncer.context import Results
from diloco_jax.settings.run import RunConfig
from diloco_jax.transport.endpoints.greeting import Description
from diloco_jax.transport.endpoints.grpc_link import GrpcListener, listen
from diloco_jax.transport.link import Delivery, Payload, Traffic, split_address

# A restarted syncer waits so long until the process before it has freed its ports.
LISTEN_PATIENCE_S = 30.0
LISTEN_RETRY_S = 0.5
# Repetitions of the same value that may wait for their other context.
REPEATS_MAX = 2

# SyncerContext of incomplete values by shard, oldest value first.
Waiting = dict[FragmentValue, dict[int, deque[HeldPart]]]
ResultT = TypeVar("ResultT")

log = logging.getLogger(__name__)


@dataclass(eq=False)
class ShardedListener:
    """A listener for the driver that combines several; its methods are those of transport/link.py."""

    # The syncer's own listener, which also answers `diloco status`.
    control: GrpcListener
    shards: MergeShards
    # Events of the shards, each with the number of its shard.
    events: Results
    # Shards serve a learner only if it agrees on this.
    fingerprint: tuple[tuple[str, str], ...]
    # Rounds in flight. So many values of one learner may wait for their context.
    rounds_max: int

    def __post_init__(self) -> None:
        self._dealt = self.shards.setup.shares
        self._ready: deque[Delivery] = deque()
        # For each shard: learner -> session of the hello that the shard received.
        self._heard: list[dict[str, int]] = [{} for _ in self.shards.shares]
        # Learner -> hello that some shard has not received yet.
        self._hellos: dict[str, Delivery] = {}
        # Learner and session -> incomplete values.
        self._values: dict[tuple[str, int], Waiting] = {}
        self._moved = [Traffic(0, 0) for _ in self.shards.shares]
        self.events.wake_with(self.control.wake)

    @property
    def traffic(self) -> Traffic:
        """Return the bytes from and to all learners so far, including those of the shards."""
        moved = (self.control.traffic, *self._moved)
        return Traffic(sum(each.received_bytes for each in moved), sum(each.sent_bytes for each in moved))

    def receive(self, timeout_s: float) -> Delivery | None:
        """Return the next delivery, or None after `timeout_s` seconds; a FragmentValue's payload is a HeldValue."""
        self._take_events()
        if not self._ready:
            delivery = self.control.receive(timeout_s)
            if delivery is not None:
                self._on_delivery(delivery)
            self._take_events()
        return self._ready.popleft() if self._ready else None

    def send(self, peer: str, message: SyncerMessage, payload: Payload = b"") -> bool:
        """Queue a message to a learner; the shards send versions. See GrpcListener.send."""
        if isinstance(message, GlobalFragment):
            for shard in self._dealt.holders(message.fragment_id):
                self.shards.shares[shard].tell(ShardRun.send, peer, message)
            return True
        return self.control.send(peer, message, payload)

    def close(self, grace_s: float = 5.0) -> None:
        """Send what is queued for at most `grace_s` seconds, then end all sessions."""
        for share in self.shards.shares:
            share.tell(ShardRun.hang_up, grace_s)
        self.control.close(grace_s)
        self._take_events()

    def _on_delivery(self, delivery: Delivery) -> None:
        peer = delivery.peer
        if delivery.kind == "disconnected":
            self._hellos.pop(peer, None)
            self._values.pop((peer, delivery.session), None)
            for heard in self._heard:
                if heard.get(peer) == delivery.session:
                    del heard[peer]
        elif isinstance(delivery.message, Hello):
            if not difference(dict(self.fingerprint), delivery.message.fingerprint):
                self._hellos[peer] = delivery
                self._greet(peer)
                return
        elif peer in self._hellos or isinstance(delivery.message, FragmentValue):
            return
        self._ready.append(delivery)

    def _take_events(self) -> None:
        for shard, event in self.events.take():
            match event:
                case Traffic():
                    self._moved[shard] = event
                case ShardHello(learner_id, session):
                    self._heard[shard][learner_id] = session
                    self._greet(learner_id)
                case ShardHolds():
                    self._on_part(shard, event)

    def _greet(self, peer: str) -> None:
        """Deliver a hello once all shards have received one of the same session."""
        hello = self._hellos.get(peer)
        if hello is not None and all(heard.get(peer) == hello.session for heard in self._heard):
            self._ready.append(self._hellos.pop(peer))

    def _on_part(self, shard: int, said: ShardHolds) -> None:
        part = HeldPart(self.shards.shares[shard], said.part, said.size)
        # A learner of several hosts does not send the size of its value. Each shard knows the size of its part.
        message = said.message._replace(payload_bytes=0)
        peer, session, fragment_id = message.learner_id, said.session, message.fragment_id
        if self._heard[shard].get(peer) != session or not 0 <= fragment_id < len(self._dealt.wholes):
            return
        waiting = self._values.setdefault((peer, session), {})
        context = waiting.setdefault(message, {holder: deque() for holder in self._dealt.holders(fragment_id)})
        if shard not in context or len(context[shard]) >= REPEATS_MAX:
            return
        context[shard].append(part)
        if all(context.values()):
            value: Any = {holder: found.popleft() for holder, found in context.items()}
            whole = message._replace(payload_bytes=sum(each.size for each in value.values()))
            self._ready.append(Delivery("message", peer, whole, value, session=session))
            if not any(context.values()):
                del waiting[message]
        elif len(waiting) > 2 * self.rounds_max:
            del waiting[next(iter(waiting))]


Listener = GrpcListener | ShardedListener


def control_of(listener: Listener) -> GrpcListener:
    """Return the listener that answers `diloco status` and `diloco drain`."""
    return listener.control if isinstance(listener, ShardedListener) else listener


class Life(NamedTuple):
    """One process of the syncer: how it starts, and what it announces."""

    mode: str
    epoch: int
    stop: threading.Event
    # Learners must agree on it.
    fingerprint: tuple[tuple[str, str], ...]
    # A loop of a user asks for this before it joins.
    description: Description
    # The number of each island that asks for it, by name.
    number_of: Callable[[str], int] = lambda _: 0


def open_listener(
    config: RunConfig, run_dir: Path, life: Life, shards: MergeShards | None, events: Results
) -> Listener:
    """Open the listeners, merge shards first. After a failover they use the old address, where learners look for them.

    ValueError if an address is in use or not allowed.
    """
    others = _open_shards(config.transport.address, shards, life) if shards is not None else ()
    transport, file = config.transport, run_dir / ADDRESS_FILE
    # Learners know the address of a process before this one.
    known = life.mode == FAILOVER or config.model.own
    if known and file.exists() and split_address(transport.address)[1] == 0:
        transport = replace(transport, address=file.read_text(encoding="utf-8"))
    patience_s = LISTEN_PATIENCE_S if known else 0.0
    # Only the shards have the values that subscribers request.
    most = 0 if others else config.syncer.subscribers_max
    listener = patiently(
        lambda: listen(transport, run_id=config.name, epoch=life.epoch, shards=others, subscribers_max=most),
        patience_s,
        life.stop,
    )
    # An unchanged file is not written again, since the disk may be full.
    if not file.exists() or file.read_text(encoding="utf-8") != listener.address:
        file.write_text(listener.address, encoding="utf-8")
    log.info(f"listening at {listener.address}")
    listener.desk.settings = dict(life.fingerprint)
    listener.greeter.description, listener.greeter.number_of = life.description, life.number_of
    if shards is None:
        return listener
    return ShardedListener(listener, shards, events, life.fingerprint, max(1, config.protocol.overlap_steps))


def _open_shards(address: str, shards: MergeShards, life: Life) -> tuple[str, ...]:
    """Let the shards listen at the ports after the syncer's, or at free ports; return ":port" of each."""
    host, _, port = address.rpartition(":")
    found = []
    for number, share in enumerate(shards.shares, 1):
        own = f"{host}:{int(port) + number if int(port) else 0}"
        real = patiently(partial(share.ask, ShardRun.listen, own, life.epoch), LISTEN_PATIENCE_S, life.stop)
        found.append(":" + real.rpartition(":")[2])
    return tuple(found)


def patiently(begin: Callable[[], ResultT], patience_s: float, stop: threading.Event) -> ResultT:
    """Call `begin` until an earlier process has freed its port; return the result. ValueError after `patience_s`."""
    until_s = time.monotonic() + patience_s
    while True:
        try:
            return begin()
        except ValueError as error:
            if time.monotonic() >= until_s or stop.wait(LISTEN_RETRY_S):
                raise
            log.info(f"waiting for the port of the process before: {error}")
