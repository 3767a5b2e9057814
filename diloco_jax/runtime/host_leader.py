"""The leader's side of an island of several hosts: what it does, the others are told first, in the same order.

A message to the other hosts is {"do": name of a method of `Follower`, ...}. One that is answered has an "id", which the
answer repeats; an answer that says "error" is a refusal. The others say by themselves only {"say": "stop"}, when they
shall end, and {"say": "want", "leaf": name}, while they load a state.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from diloco_jax.core.codec import Bytes
from diloco_jax.protocol.messages import FragmentValue, GlobalFragment
from diloco_jax.runtime.global_values import Values
from diloco_jax.runtime.host import Host, Ranges, State
from diloco_jax.runtime.hosts import Hosts, die
from diloco_jax.runtime.settings import RunConfig
from diloco_jax.training.island import StepHandle
from diloco_jax.training.outgoing import StagedFragment
from diloco_jax.training.staging import CopyGone, StagedState
from diloco_jax.transport.group import GroupItem, GroupLeader
from diloco_jax.transport.link import Payload, TransportError

POLL_S = 1.0
END_S = 10.0  # for the others to end, once they were told

log = logging.getLogger(__name__)


class Answers:
    """What the other hosts answer to one question. If one of them is lost the process ends, so `wait` has no limit."""

    def __init__(self, number: int, hosts: int) -> None:
        self.number = number
        self._missing = hosts - 1
        self._all = threading.Event()
        self._found: dict[int, GroupItem] = {}

    def add(self, item: GroupItem) -> bool:
        """Take an answer; whether it was the last."""
        self._found[item.host] = item
        if len(self._found) == self._missing:
            self._all.set()
        return self._all.is_set()

    def wait(self) -> Mapping[int, GroupItem]:
        """All answers, by host."""
        self._all.wait()
        return self._found

    def payloads(self) -> Mapping[int, Bytes]:
        """Their payloads, by host."""
        return {host: item.payload for host, item in self.wait().items()}

    def problem(self) -> str:
        """The first refusal, "" if there is none."""
        found = self.wait()
        return next((f"host {host}: {item.head['error']}" for host, item in found.items() if "error" in item.head), "")


class LeadingHost(Host):
    """Host 0 of several. What `Host` allows one thread at a time is told to the others in that order.

    Args:
        config: the run.
        learner_id: name of the island.
        hosts: all of them.
        stop: set when another host shall end.
    """

    def __init__(self, config: RunConfig, learner_id: str, hosts: Hosts, stop: threading.Event) -> None:
        super().__init__(config, learner_id)
        assert isinstance(hosts.group, GroupLeader), "another host than 0 leads"
        self._group = hosts.group
        self._count = hosts.count
        self._stop = stop
        self._ending = False
        self._gone: set[int] = set()
        self._all_gone = threading.Event()
        self._numbers = itertools.count()
        self._open: dict[int, Answers] = {}
        # Versions are counted anew by a syncer that went back, arrivals never.
        self._arrivals: dict[GlobalFragment, int] = {}
        self._loading: State = {}
        threading.Thread(target=self._listen, name="hosts", daemon=True).start()

    # ---- what Host does, told to the others first -----------------------------------------------------------------

    def warm_up(self) -> None:
        """Compile what the island runs, on all hosts. Any thread."""
        others = self._ask("warm_up")
        super().warm_up()
        others.wait()

    def connect(self, epoch: int, number: int) -> None:
        """See Host.connect."""
        if problem := self._ask("connect", epoch=epoch, number=number).problem():
            raise TransportError(f"{problem}; all hosts of the island try again")

    def put_batch(self, ranges: Ranges) -> None:
        """See Host.put_batch."""
        self._tell("put_batch", ranges=list(ranges))
        super().put_batch(ranges)

    def step(self, rate: float) -> StepHandle:
        """See Host.step."""
        self._tell("step", rate=rate)
        return super().step(rate)

    def stage(self, fragment_id: int, local_step: int) -> None:
        """See Host.stage."""
        self._tell("stage", fragment_id=fragment_id, local_step=local_step)
        super().stage(fragment_id, local_step)

    def unstage(self, fragment_id: int, local_step: int) -> None:
        """See Host.unstage."""
        self._tell("unstage", fragment_id=fragment_id, local_step=local_step)
        super().unstage(fragment_id, local_step)

    def send(self, message: FragmentValue) -> StagedFragment:
        """See Host.send; the other hosts send their parts by themselves."""
        staged = super().send(message)
        if staged.has_loose:
            staged.of_others = self._ask("send", message=message._asdict()).payloads
        else:
            self._tell("send", message=message._asdict())
        return staged

    def arrived(self, message: GlobalFragment, payload: Bytes) -> Callable[[], None]:
        """See Host.arrived."""
        others = self._ask("arrived", payload, message=message._asdict())
        self._arrivals[message] = others.number

        def wait() -> None:
            if problem := others.problem():
                raise ValueError(f"cannot be read by {problem}")

        return wait

    def supersede(self, message: GlobalFragment) -> None:
        """See Host.supersede."""
        arrival, fragment_id = self._arrivals[message], message.fragment_id
        known = self._arrivals.items()
        self._arrivals = {other: n for other, n in known if other.fragment_id != fragment_id or n >= arrival}
        self._tell("supersede", fragment_id=fragment_id, arrival=arrival)

    def adopt(self, message: GlobalFragment, values: Values) -> None:
        """See Host.adopt; every other host has the value already."""
        self._tell("adopt", message=message._asdict(), arrival=self._arrivals[message])
        super().adopt(message, values)

    def stage_state(self, name: int) -> StagedState:
        """See Host.stage_state; its leaves are asked for when they are needed, one at a time."""
        self._tell("stage_state", name=name)
        staged = super().stage_state(name)
        staged.of_others = partial(self._leaf_of_others, name)
        return staged

    def _leaf_of_others(self, name: int, leaf: str) -> Mapping[int, Bytes]:
        answers = self._ask("leaf", name=name, leaf=leaf)
        if problem := answers.problem():
            raise CopyGone(problem)
        return answers.payloads()

    def unstage_state(self, name: int) -> None:
        """See Host.unstage_state."""
        super().unstage_state(name)
        self._tell("unstage_state", name=name)

    def load_state(self, state: State, fragments: Iterable[int], *, checked: bool = False) -> None:
        """See Host.load_state; the others ask for its leaves, one at a time."""
        del checked
        chosen = list(fragments)
        layout = self.island.state_layout
        if isinstance(state, bytes | bytearray | memoryview):
            state = layout.decode(state)
        layout.check(state)  # before anybody begins: then nobody can refuse it
        self._loading = state
        others = self._ask("load_state", fragments=chosen)
        super().load_state(state, chosen, checked=True)
        others.wait()
        self._loading = {}

    def end(self, status: int) -> None:
        """See Host.end."""
        self._ending = True
        self._tell("end", status=status)
        if not self._all_gone.wait(END_S):
            log.warning(f"the other hosts did not end within {END_S:.0f} s")
        self._group.close()

    # ---- messages -------------------------------------------------------------------------------------------------

    def _tell(self, do: str, payload: Payload = b"", **what: Any) -> None:
        self._group.send({"do": do, **what}, payload)

    def _ask(self, do: str, payload: Payload = b"", **what: Any) -> Answers:
        number = next(self._numbers)
        self._open[number] = answers = Answers(number, self._count)
        self._tell(do, payload, id=number, **what)
        return answers

    def _listen(self) -> None:
        """The body of the thread "hosts"."""
        try:
            while True:
                item = self._group.receive(POLL_S)
                if item is not None:
                    self._on_item(item)
        except Exception as error:  # it would be lost with the thread
            die(f"what a host said cannot be understood: {error!r}")

    def _on_item(self, item: GroupItem) -> None:
        if item.kind in ("left", "lost"):
            if not self._ending:
                die(f"host {item.host} is gone ({item.reason})")
            self._gone.add(item.host)
            if len(self._gone) == self._count - 1:
                self._all_gone.set()
        elif item.kind == "message" and "id" in item.head:
            if self._open[item.head["id"]].add(item):
                del self._open[item.head["id"]]
        elif item.kind == "message" and item.head["say"] == "stop":
            log.info(f"host {item.host} was asked to end; so the island leaves politely")
            self._stop.set()
        elif item.kind == "message" and item.head["say"] == "want":
            leaf = item.head["leaf"]
            assert isinstance(self._loading, Mapping), "no state is being loaded"
            value = np.ascontiguousarray(self._loading[leaf])
            self._group.send({"do": "have", "leaf": leaf}, value.reshape(-1).view(np.uint8).data, item.host)
