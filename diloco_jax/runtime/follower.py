"""A host of an island that does not lead: no machine, no decisions. It does what the leader says, in that order.

Threads
  * the caller's ("steps"): the only one to touch the devices: steps, copies, adoptions, states.
  * "group": receives what the leader says and hands it on.
  * "link": reads and checks global fragments before they are adopted; connects to the syncer.
  * "payload": encodes and sends this host's parts of fragments (learner_payloads.py).
  * "leaves": sends what only this host has to the leader: of a copied state, of what the leader encodes.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from diloco_jax.protocol.messages import FragmentValue, GlobalFragment
from diloco_jax.runtime.global_values import GlobalValues, Values
from diloco_jax.runtime.host import Host
from diloco_jax.runtime.hosts import Hosts, die, make_dialler
from diloco_jax.runtime.learner_payloads import PayloadSender
from diloco_jax.runtime.settings import RunConfig
from diloco_jax.training.state_bytes import StateLayout
from diloco_jax.transport.group import GroupItem, GroupMember
from diloco_jax.transport.link import Link, Payload, TransportError

POLL_S = 0.2

log = logging.getLogger(__name__)


class Follower:
    """One host that follows, from its first message to its last.

    Args:
        config: the run.
        learner_id: name of the island.
        address: where the syncer listens.
        stop: set from outside to leave politely; the leader decides when.
        hosts: of the island.
    """

    def __init__(self, config: RunConfig, learner_id: str, address: str, stop: threading.Event, hosts: Hosts) -> None:
        assert isinstance(hosts.group, GroupMember), "host 0 leads"
        self._group = hosts.group
        self._stop = stop
        self._told_stop = False
        self._host = host = Host(config, learner_id)
        self._dialler = make_dialler(config, host.plan, learner_id, hosts.incarnation, address, hosts)
        self._values = GlobalValues(host.fragments, config.wire.down)  # the link thread's
        self._arrived: dict[tuple[int, int], Values] = {}  # fragment, arrival -> value that may be adopted
        self._link: Link | None = None
        self._payloads = PayloadSender(lambda error: die(f"a value could not be sent: {error!r}"))
        self._leaves = ThreadPoolExecutor(1, "leaves")
        self._steps_do: queue.SimpleQueue[GroupItem] = queue.SimpleQueue()
        self._link_does: queue.SimpleQueue[GroupItem] = queue.SimpleQueue()
        self._received_leaves: queue.SimpleQueue[GroupItem] = queue.SimpleQueue()
        self._status: int | None = None

    def run(self) -> int:
        """Follow until the leader ends; returns the exit status that it says. If a host is lost the process ends."""
        self._in_thread("group", self._receive)
        self._in_thread("link", self._serve_link)
        try:
            while self._status is None:
                item = self._steps_do.get()
                self._do(item)
        except Exception as error:  # such as a collective that lost one of its hosts
            die(f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")
        self._payloads.close()
        if self._link is not None:
            self._link.close(0.0)
        self._group.close()
        return self._status

    def _do(self, item: GroupItem) -> None:
        what = dict(item.head)
        getattr(self, f"_{what.pop('do')}")(**what)

    # ---- the thread "steps" ---------------------------------------------------------------------------------------

    def _warm_up(self, id: int) -> None:
        def compile() -> None:
            self._host.warm_up()
            self._answer(id)

        self._in_thread("compile", compile)

    def _put_batch(self, ranges: list[tuple[int, int]]) -> None:
        self._host.put_batch([(start, stop) for start, stop in ranges])

    def _step(self, rate: float) -> None:
        self._host.step(rate)

    def _stage(self, fragment_id: int, local_step: int) -> None:
        self._host.stage(fragment_id, local_step)

    def _unstage(self, fragment_id: int, local_step: int) -> None:
        self._host.unstage(fragment_id, local_step)

    def _send(self, message: dict[str, Any], id: int | None = None) -> None:
        value = FragmentValue(**message)
        staged = self._host.send(value)
        if id is not None:
            self._leaves.submit(self._guarded, lambda: self._answer(id, staged.loose()))
        if self._link is not None:
            self._payloads.value(self._link, value, staged)

    def _supersede(self, fragment_id: int, arrival: int) -> None:
        for key in [key for key in list(self._arrived) if key[0] == fragment_id and key[1] < arrival]:
            del self._arrived[key]

    def _adopt(self, message: dict[str, Any], arrival: int) -> None:
        fragment = GlobalFragment(**message)
        self._host.adopt(fragment, self._arrived[fragment.fragment_id, arrival])

    def _stage_state(self, name: int) -> None:
        self._host.stage_state(name)

    def _unstage_state(self, name: int) -> None:
        self._host.unstage_state(name)

    def _leaf(self, id: int, name: int, leaf: str) -> None:
        try:
            staged = self._host.staged_state(name)
        except KeyError:
            self._group.send({"id": id, "error": f"it has no copy of step {name} any more"})
            return
        self._leaves.submit(self._guarded, lambda: self._answer(id, staged.loose(leaf)))

    def _load_state(self, id: int, fragments: list[int]) -> None:
        self._host.load_state(_LeaderState(self._host.island.state_layout, self._ask_leaf), fragments, checked=True)
        self._answer(id)

    def _ask_leaf(self, leaf: str) -> memoryview:
        self._group.send({"say": "want", "leaf": leaf})
        item = self._received_leaves.get()
        assert item.head["leaf"] == leaf, f"asked for {leaf}, got {item.head['leaf']}"
        return item.payload

    def _end(self, status: int) -> None:
        self._status = status

    # ---- the thread "link" ----------------------------------------------------------------------------------------

    def _serve_link(self) -> None:
        while True:
            item = self._link_does.get()
            if item.head["do"] == "connect":
                self._connect(**{key: item.head[key] for key in ("id", "epoch", "number")})
            else:
                self._read(item.head["id"], GlobalFragment(**item.head["message"]), item.payload)

    def _connect(self, id: int, epoch: int, number: int) -> None:
        if self._link is not None:
            self._link.close(0.0)
        try:
            self._link = self._dialler.connect_host(epoch, number)
        except (TransportError, ValueError) as error:
            self._link = None
            self._group.send({"id": id, "error": str(error)})
            return
        self._answer(id)

    def _read(self, id: int, message: GlobalFragment, payload: memoryview) -> None:
        try:
            values = self._values.read(message, payload)
        except ValueError as error:
            self._group.send({"id": id, "error": str(error)})
            return
        self._values.keep(message, values)
        self._arrived[message.fragment_id, id] = values
        self._answer(id)

    # ---- the thread "group" ---------------------------------------------------------------------------------------

    def _receive(self) -> None:
        while self._status is None:
            item = self._group.receive(POLL_S)
            if self._stop.is_set() and not self._told_stop:
                self._told_stop = True
                self._group.send({"say": "stop"})
            if item is None:
                continue
            if item.kind != "message":
                die(f"the leader is gone ({item.reason})")
            do = item.head["do"]
            if do == "have":
                self._received_leaves.put(item)
            else:
                (self._link_does if do in ("connect", "arrived") else self._steps_do).put(item)
                if do == "end":
                    return

    def _answer(self, id: int | None, payload: Payload = b"") -> None:
        if id is not None:
            self._group.send({"id": id}, payload)

    def _in_thread(self, name: str, body: Callable[[], None]) -> None:
        threading.Thread(target=self._guarded, args=(body,), name=name, daemon=True).start()

    def _guarded(self, body: Callable[[], None]) -> None:
        try:
            body()
        except Exception as error:  # it would be lost with the thread
            die(f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")


class _LeaderState(Mapping[str, np.ndarray]):
    """A whole state that the leader has, leaf by leaf: none is kept."""

    def __init__(self, layout: StateLayout, ask: Callable[[str], memoryview]) -> None:
        self._leaves = {leaf.name: leaf for leaf in layout.leaves}
        self._ask = ask

    def __getitem__(self, name: str) -> np.ndarray:
        leaf = self._leaves[name]
        return np.frombuffer(self._ask(name), np.dtype(leaf.dtype)).reshape(leaf.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)
