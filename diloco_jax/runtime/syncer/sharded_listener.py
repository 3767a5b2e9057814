"""The syncer's listener, or it and those of its merge shards as one.

A learner has a session with each of them, all of one number. The driver gets a learner's value when all shards that
work on the fragment have their part of it, and its hello when all shards have heard it too: from then on they can
answer. Until then what else the learner says is not passed on; the protocol bears the loss of any message.

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
from diloco_jax.runtime.syncer.parts import Results
from diloco_jax.settings.run import RunConfig
from diloco_jax.transport.endpoints.greeting import Description
from diloco_jax.transport.endpoints.grpc_link import GrpcListener, listen
from diloco_jax.transport.link import Delivery, Payload, Traffic, split_address

LISTEN_PATIENCE_S = 30.0  # how long a restarted syncer waits for the ports of the one before it
LISTEN_RETRY_S = 0.5
REPEATS_MAX = 2  # of the same value that wait for their other parts

Waiting = dict[FragmentValue, dict[int, deque[HeldPart]]]  # parts by shard, oldest value first
ResultT = TypeVar("ResultT")

log = logging.getLogger(__name__)


@dataclass(eq=False)
class ShardedListener:
    """A listener for the driver, made of several; what it does is as in transport/link.py."""

    control: GrpcListener  # the syncer's own, which people ask
    shards: MergeShards
    events: Results  # what these say unasked, each with the number of its shard
    fingerprint: tuple[tuple[str, str], ...]  # what a learner must agree on to be one that shards will hear
    rounds_max: int  # rounds in flight, so values of one learner that may wait for their parts

    def __post_init__(self) -> None:
        self._dealt = self.shards.setup.shares
        self._ready: deque[Delivery] = deque()
        self._heard: list[dict[str, int]] = [{} for _ in self.shards.shares]  # by shard: learner -> session
        self._hellos: dict[str, Delivery] = {}  # learner -> its hello that some shard has not heard yet
        self._values: dict[tuple[str, int], Waiting] = {}  # learner and session -> incomplete values
        self._moved = [Traffic(0, 0) for _ in self.shards.shares]
        self.events.wake_with(self.control.wake)

    @property
    def traffic(self) -> Traffic:
        """Return the bytes received from, and sent to, all learners so far, by the shards too."""
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
        """Queue a message to a learner; a version goes out from the shards. See GrpcListener.send."""
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
        """Pass a hello on when all shards have heard its session."""
        hello = self._hellos.get(peer)
        if hello is not None and all(heard.get(peer) == hello.session for heard in self._heard):
            self._ready.append(self._hellos.pop(peer))

    def _on_part(self, shard: int, said: ShardHolds) -> None:
        part = HeldPart(self.shards.shares[shard], said.part, said.size)
        # A learner of several hosts names the size of its value to nobody: each shard finds that of its own part.
        message = said.message._replace(payload_bytes=0)
        peer, session, fragment_id = message.learner_id, said.session, message.fragment_id
        if self._heard[shard].get(peer) != session or not 0 <= fragment_id < len(self._dealt.wholes):
            return
        waiting = self._values.setdefault((peer, session), {})
        parts = waiting.setdefault(message, {holder: deque() for holder in self._dealt.holders(fragment_id)})
        if shard not in parts or len(parts[shard]) >= REPEATS_MAX:
            return
        parts[shard].append(part)
        if all(parts.values()):
            value: Any = {holder: found.popleft() for holder, found in parts.items()}
            whole = message._replace(payload_bytes=sum(each.size for each in value.values()))
            self._ready.append(Delivery("message", peer, whole, value, session=session))
            if not any(parts.values()):
                del waiting[message]
        elif len(waiting) > 2 * self.rounds_max:
            del waiting[next(iter(waiting))]


Listener = GrpcListener | ShardedListener


def control_of(listener: Listener) -> GrpcListener:
    """Return the listener whom people ask."""
    return listener.control if isinstance(listener, ShardedListener) else listener


class Life(NamedTuple):
    """One process of the syncer, from its beginning to its end."""

    mode: str  # how it begins
    epoch: int
    stop: threading.Event
    fingerprint: tuple[tuple[str, str], ...]  # what a learner must agree on
    description: Description  # of the run, for whoever asks


def open_listener(
    config: RunConfig, run_dir: Path, life: Life, shards: MergeShards | None, events: Results
) -> Listener:
    """Listen, the merge shards first; after a failover where the process before it did: learners look for it there.

    ValueError if an address is in use, or not allowed.
    """
    others = _open_shards(config.transport.address, shards, life) if shards is not None else ()
    transport, file = config.transport, run_dir / ADDRESS_FILE
    known = life.mode == FAILOVER or config.model.own  # learners were here before
    if known and file.exists() and split_address(transport.address)[1] == 0:
        transport = replace(transport, address=file.read_text(encoding="utf-8"))
    patience_s = LISTEN_PATIENCE_S if known else 0.0
    listener = patiently(
        lambda: listen(transport, run_id=config.name, epoch=life.epoch, shards=others), patience_s, life.stop
    )
    if not file.exists() or file.read_text(encoding="utf-8") != listener.address:  # else a full disk need not matter
        file.write_text(listener.address, encoding="utf-8")
    log.info(f"listening at {listener.address}")
    listener.desk.settings = dict(life.fingerprint)
    listener.greeter.description = life.description
    if shards is None:
        return listener
    return ShardedListener(listener, shards, events, life.fingerprint, max(1, config.protocol.overlap_steps))


def _open_shards(address: str, shards: MergeShards, life: Life) -> tuple[str, ...]:
    """Let the shards listen, at the ports after the syncer's if it has one of its own; returns ":port" of each."""
    host, _, port = address.rpartition(":")
    found = []
    for number, share in enumerate(shards.shares, 1):
        own = f"{host}:{int(port) + number if int(port) else 0}"
        real = patiently(partial(share.ask, ShardRun.listen, own, life.epoch), LISTEN_PATIENCE_S, life.stop)
        found.append(":" + real.rpartition(":")[2])
    return tuple(found)


def patiently(begin: Callable[[], ResultT], patience_s: float, stop: threading.Event) -> ResultT:
    """Return what `begin` returns, once the process before has left its port; ValueError after `patience_s`."""
    until_s = time.monotonic() + patience_s
    while True:
        try:
            return begin()
        except ValueError as error:
            if time.monotonic() >= until_s or stop.wait(LISTEN_RETRY_S):
                raise
            log.info(f"waiting for the port of the process before: {error}")
