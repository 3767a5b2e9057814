"""The syncer's listener and those of its merge shards, as one.

A learner has a session with each of them, all of one number. The driver gets a learner's value when all shards that
work on the fragment have their part of it, and its hello when all shards have heard it too: from then on they can
answer. Until then what else the learner says is not passed on; the protocol bears the loss of any message.

Everything that waits here is bounded, and belongs to one session of one learner.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from diloco_jax.protocol.membership import difference
from diloco_jax.protocol.messages import FragmentValue, GlobalFragment, Hello, SyncerMessage
from diloco_jax.runtime.model.arithmetic import LocalShares
from diloco_jax.runtime.model.remote_shares import HeldPart, RemoteShares
from diloco_jax.runtime.syncer.begin import open_listener
from diloco_jax.settings.run import RunConfig
from diloco_jax.transport.grpc_link import GrpcListener
from diloco_jax.transport.link import Delivery, Payload, Traffic

REPEATS_MAX = 2  # of the same value that wait for their other parts

Waiting = dict[FragmentValue, dict[int, deque[HeldPart]]]  # parts by shard, oldest value first


class ShardedListener:
    """A listener for the driver, made of several; the interface is that of transport/link.py.

    Args:
        listener: of this process.
        shards: with the processes that listen too.
        fingerprint: what a learner must agree on to be one that shards will hear.
        rounds_max: rounds in flight, so values of one learner that may wait for their parts.
    """

    def __init__(
        self,
        listener: GrpcListener,
        shards: RemoteShares,
        fingerprint: tuple[tuple[str, str], ...],
        rounds_max: int,
    ) -> None:
        self._listener = listener
        self._shards = shards
        self._fingerprint = fingerprint
        self._rounds_max = rounds_max
        self._events: queue.SimpleQueue[tuple[int, Mapping[str, Any]]] = queue.SimpleQueue()
        self._ready: deque[Delivery] = deque()
        self._heard: list[dict[str, int]] = [{} for _ in shards.proxies]  # by shard: learner -> session
        self._hellos: dict[str, Delivery] = {}  # learner -> its hello that some shard has not heard yet
        self._values: dict[tuple[str, int], Waiting] = {}  # learner and session -> incomplete values
        self._moved = {proxy.shard: (0, 0) for proxy in shards.proxies}
        shards.on_event = self._on_event

    def _on_event(self, shard: int, said: Mapping[str, Any]) -> None:
        """Take note of an event, on a thread of a pipe."""
        self._events.put((shard, said))
        self._listener.wake()

    @property
    def address(self) -> str:
        """Return where learners connect, with the real port."""
        return self._listener.address

    @property
    def traffic(self) -> Traffic:
        """Return the bytes received from, and sent to, all learners so far, by the shards too."""
        own = self._listener.traffic
        received, sent = (sum(moved) for moved in zip(*self._moved.values(), strict=True))
        return Traffic(own.received_bytes + received, own.sent_bytes + sent)

    @property
    def status_json(self) -> str:
        """Return what `diloco status` is told."""
        return self._listener.status_json

    @status_json.setter
    def status_json(self, text: str) -> None:
        self._listener.status_json = text

    @property
    def on_drain(self) -> Callable[[str], str] | None:
        """Return what the driver does when somebody asks that a learner leave."""
        return self._listener.on_drain

    @on_drain.setter
    def on_drain(self, drain: Callable[[str], str] | None) -> None:
        self._listener.on_drain = drain

    def wake(self) -> None:
        """Let a `receive` that waits return None at once."""
        self._listener.wake()

    def receive(self, timeout_s: float) -> Delivery | None:
        """Return the next delivery, or None after `timeout_s` seconds; a FragmentValue's payload is a HeldValue."""
        self._take_events()
        if not self._ready:
            delivery = self._listener.receive(timeout_s)
            if delivery is not None:
                self._on_delivery(delivery)
            self._take_events()
        return self._ready.popleft() if self._ready else None

    def send(self, peer: str, message: SyncerMessage, payload: Payload = b"") -> bool:
        """Queue a message to a learner; a version goes out from the shards. See GrpcListener.send."""
        if isinstance(message, GlobalFragment):
            self._shards.send(peer, message)
            return True
        return self._listener.send(peer, message, payload)

    def close(self, grace_s: float = 5.0) -> None:
        """Send what is queued for at most `grace_s` seconds, then end all sessions."""
        for proxy in self._shards.proxies:
            proxy.tell("close", grace_s=grace_s)
        self._listener.close(grace_s)
        self._take_events()

    # ---- what waits -----------------------------------------------------------------------------------------------

    def _on_delivery(self, delivery: Delivery) -> None:
        peer = delivery.peer
        if delivery.kind == "disconnected":
            self._hellos.pop(peer, None)
            self._values.pop((peer, delivery.session), None)
            for heard in self._heard:
                if heard.get(peer) == delivery.session:
                    del heard[peer]
        elif isinstance(delivery.message, Hello):
            if not difference(dict(self._fingerprint), delivery.message.fingerprint):
                self._hellos[peer] = delivery
                self._greet(peer)
                return
        elif peer in self._hellos or isinstance(delivery.message, FragmentValue):
            return
        self._ready.append(delivery)

    def _take_events(self) -> None:
        while not self._events.empty():
            shard, said = self._events.get()
            if said["op"] == "traffic":
                self._moved[shard] = tuple(said["moved"])
            elif said["op"] == Hello.__name__:
                self._heard[shard][said["learner"]] = said["session"]
                self._greet(said["learner"])
            else:
                self._on_part(shard, said)

    def _greet(self, peer: str) -> None:
        """Pass a hello on when all shards have heard its session."""
        hello = self._hellos.get(peer)
        if hello is not None and all(heard.get(peer) == hello.session for heard in self._heard):
            self._ready.append(self._hellos.pop(peer))

    def _on_part(self, shard: int, said: Mapping[str, Any]) -> None:
        part = HeldPart(self._shards.proxies[shard], said["number"], said["size"])
        # A learner of several hosts names the size of its value to nobody: each shard finds that of its own part.
        message = FragmentValue(*said["message"])._replace(payload_bytes=0)
        peer, session = said["learner"], said["session"]
        if self._heard[shard].get(peer) != session or not 0 <= message.fragment_id < len(
            self._shards.setup.shares.wholes
        ):
            return
        waiting = self._values.setdefault((peer, session), {})
        parts = waiting.setdefault(
            message, {holder: deque() for holder in self._shards.setup.shares.holders(message.fragment_id)}
        )
        if shard not in parts or len(parts[shard]) >= REPEATS_MAX:
            return
        parts[shard].append(part)
        if all(parts.values()):
            value: Any = {holder: found.popleft() for holder, found in parts.items()}
            whole = message._replace(payload_bytes=sum(each.size for each in value.values()))
            self._ready.append(Delivery("message", peer, whole, value, session=session))
            if not any(parts.values()):
                del waiting[message]
        elif len(waiting) > 2 * self._rounds_max:
            del waiting[next(iter(waiting))]


class Life(NamedTuple):
    """One process of the syncer, from its beginning to its end."""

    mode: str  # how it begins
    epoch: int
    stop: threading.Event


def open_listeners(
    config: RunConfig,
    run_dir: Path,
    life: Life,
    arithmetic: LocalShares | RemoteShares,
    fingerprint: tuple[tuple[str, str], ...],
) -> GrpcListener | ShardedListener:
    """Listen, the merge shards first; see open_listener.

    Args:
        config: the run.
        run_dir: its folder.
        life: of the syncer.
        arithmetic: with the shards, if there are any.
        fingerprint: what a learner must agree on.

    Raises:
        ValueError: an address is in use, or not allowed.
    """
    shards: tuple[str, ...] = ()
    if isinstance(arithmetic, RemoteShares):
        shards = arithmetic.listen(config.transport.address, life.epoch, life.stop)
    listener = open_listener(config, run_dir, life.mode, life.epoch, life.stop, shards)
    listener.desk.settings = dict(fingerprint)
    if isinstance(arithmetic, LocalShares):
        return listener
    return ShardedListener(listener, arithmetic, fingerprint, max(1, config.protocol.overlap_steps))
