"""The leader of an island of several hosts: it sends every command to the other hosts before it obeys it itself."""

import itertools
import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from math import inf

import numpy as np

from diloco_jax.core.codec import Bytes
from diloco_jax.protocol.messages import AnchorValue, FragmentValue, GlobalFragment, Score
from diloco_jax.runtime.island.adoptions import ArrivedValue
from diloco_jax.runtime.island.blocks import IslandBlocks
from diloco_jax.runtime.island.evaluation import Change, Evaluation
from diloco_jax.runtime.island.host import Host, Report, SaveResult
from diloco_jax.runtime.island.join import Hosts, die
from diloco_jax.runtime.island.passing import Passing
from diloco_jax.runtime.island.saved_states import OwnStates, StateName
from diloco_jax.settings.resolved import ResolvedRun
from diloco_jax.training.exchange.outgoing import StagedFragment
from diloco_jax.training.island_state import IslandState
from diloco_jax.training.whole_state.staging import CopyGone, StagedState
from diloco_jax.transport import commands
from diloco_jax.transport.group.group import GroupItem, GroupLeader
from diloco_jax.transport.limits import REASON_LENGTH_MAX
from diloco_jax.transport.link import LinkClosed, Payload, TransportError

POLL_S = 1.0
# The other hosts must end within this time after the command.
END_S = 10.0

log = logging.getLogger(__name__)


class Answers:
    """The other hosts' answers to one command; waits have no limit, because a lost host ends the process."""

    def __init__(self, number: int, hosts: int) -> None:
        self.number = number
        self._missing = hosts - 1
        self.complete = threading.Event()
        self._payloads: dict[int, Bytes] = {}
        self._problem = ""

    def add(self, host: int, reason: str, payload: Bytes) -> None:
        self._payloads[host] = payload
        if reason:
            self._problem = self._problem or f"host {host}: {reason}"
        if len(self._payloads) == self._missing:
            self.complete.set()

    def payloads(self) -> Mapping[int, Bytes]:
        """Wait for all answers, and return their payloads by host."""
        self.complete.wait()
        return self._payloads

    def problem(self) -> str:
        """Wait for all answers, and return the first refusal, "" if there is none."""
        self.complete.wait()
        return self._problem


class Questions:
    """The commands that wait for the answers of all other hosts."""

    def __init__(self, group: GroupLeader, hosts: int) -> None:
        self._group = group
        self._count = hosts
        self._numbers = itertools.count(1)
        self._open: dict[int, Answers] = {}

    def ask(self, command: Callable[[int], commands.Command], payload: Payload = b"") -> Answers:
        """Send a command, made of its number, to all other hosts."""
        number = next(self._numbers)
        self._open[number] = answers = Answers(number, self._count)
        self._group.send(command(number), payload)
        return answers

    def on_answer(self, host: int, number: int, reason: str, payload: Bytes) -> None:
        self._open[number].add(host, reason, payload)
        if self._open[number].complete.is_set():
            del self._open[number]


class Arrivals:
    """The global values that each of the other hosts has read."""

    def __init__(self, hosts: int) -> None:
        self._others = hosts - 1
        self._changed = threading.Condition()
        # Value -> host -> why it could not be read, or ""; oldest first.
        self._told: dict[GlobalFragment, dict[int, str]] = {}

    def add(self, host: int, message: GlobalFragment, reason: str) -> None:
        with self._changed:
            self._told.setdefault(message, {})[host] = reason
            self._changed.notify_all()

    def wait(self, message: GlobalFragment, alive: Callable[[], bool]) -> None:
        """Wait for all other hosts, or for the first one that cannot read the value; raises as `Host`."""
        with self._changed:
            while len(self._told.get(message, ())) < self._others:
                self._check(message, alive)
                self._changed.wait(POLL_S)
            # The value is on all hosts, so the link does not matter any more.
            self._check(message, lambda: True)
            self._forget(message)

    def check(self, message: GlobalFragment, alive: Callable[[], bool]) -> None:
        """Raise as `wait` if the value cannot reach all hosts any more."""
        with self._changed:
            self._check(message, alive)

    def _check(self, message: GlobalFragment, alive: Callable[[], bool]) -> None:
        for host, reason in sorted(self._told.get(message, {}).items()):
            if reason:
                self._forget(message)
                raise ValueError(f"cannot be read by host {host}: {reason}")
        if not alive():
            raise LinkClosed("the link ended before all hosts had a value")

    def _forget(self, message: GlobalFragment) -> None:
        known = [*self._told]
        # Every host gets the values of a fragment in one order, so nothing is missing before this one.
        for other in known[: known.index(message) + 1]:
            if other.fragment_id == message.fragment_id:
                del self._told[other]

    def clear(self) -> None:
        with self._changed:
            self._told.clear()


class LeadingHost(Host):
    """Host 0 of several: it sends the actions of `Host` to the others in order; `stop` is set when a host shall end."""

    def __init__(
        self,
        run: ResolvedRun,
        island: IslandState,
        compile_step: Callable[[], None] | None,
        evaluate: Evaluation | None,
        hosts: Hosts,
        stop: threading.Event,
        saves: OwnStates | None = None,
        blocks: IslandBlocks | None = None,
    ) -> None:
        super().__init__(run, island, compile_step, evaluate, saves, blocks)
        assert isinstance(hosts.group, GroupLeader), "another host than 0 leads"
        assert blocks is not None, "an island of several hosts has blocks"
        self._group, self._direct, self._reports = hosts.group, hosts.direct, hosts.reports
        self._questions = Questions(hosts.group, hosts.count)
        self._stop = stop
        self._ending = False
        # Counts the hosts whose connection has ended.
        self._gone = Answers(0, hosts.count)
        self._arrivals = Arrivals(hosts.count)
        # Versions of the present link that were handled.
        self._handled = 0
        self._passing = Passing(blocks, self.format_of, hosts.direct.send)
        # Returns a leaf of the state that is being loaded.
        self._loading: Callable[[str], np.ndarray] | None = None
        threading.Thread(target=self._listen, name="hosts", daemon=True).start()
        hosts.direct.dial(blocks.sources, self._on_shared)

    def tell(self, command: commands.Command) -> None:
        self._group.send(command)

    def warm_up(self, report: Report = lambda words: None) -> None:
        """Compile the island's programs on all hosts, and report this host's progress; any thread."""
        others = self._questions.ask(commands.HostWarmUp)
        super().warm_up(report)
        others.payloads()

    def connect(self, epoch: int, number: int) -> None:
        self._arrivals.clear()
        self._handled = 0
        self._passing.begin(number)
        if problem := self._questions.ask(lambda n: commands.HostConnect(n, epoch, number)).problem():
            raise TransportError(f"{problem}; all hosts of the island try again")

    def take_for_round(self, message: FragmentValue) -> StagedFragment:
        """Do what Host does, and let every other host take its copy and send its own bytes of the value."""
        staged = super().take_for_round(message)
        assert isinstance(staged, StagedFragment), "several hosts share an island of JAX arrays"
        if staged.has_loose:
            staged.of_others = self._questions.ask(lambda n: commands.HostSend(n, message)).payloads
        else:
            self.tell(commands.HostSend(0, message))
        return staged

    def take_anchor(self, message: AnchorValue) -> Callable[[], Payload]:
        self.tell(commands.HostSendAnchor(message))
        return super().take_anchor(message)

    def complete(self, message: GlobalFragment, payload: Bytes, alive: Callable[[], bool]) -> Bytes:
        number = self._handled + 1
        self._passing.arrived(number, message, payload)
        while (whole := self._passing.take(number, POLL_S)) is None:
            self._arrivals.check(message, alive)
        return whole

    def wait_for_others(self, message: GlobalFragment, alive: Callable[[], bool]) -> None:
        self._arrivals.wait(message, alive)

    def handled(self) -> None:
        self._handled += 1
        self._passing.handled(self._handled)
        self.tell(commands.HostHandled(self._handled))

    def supersede(self, message: GlobalFragment) -> None:
        self.tell(commands.HostSupersede(message))

    def adopt(self, message: GlobalFragment, value: ArrivedValue) -> None:
        self.tell(commands.HostAdopt(message))
        super().adopt(message, value)

    def evaluate(self, global_step: int, *, final: bool, change: Change | None = None) -> Score:
        """Do what Host does; a change is not evaluated, because each host holds only parts of the values."""
        others = self._questions.ask(lambda n: commands.HostEvaluate(n, global_step, final))
        score = super().evaluate(global_step, final=final)
        problem = others.problem()
        return score._replace(loss=inf, reason=f"{problem}; {score.reason}"[:REASON_LENGTH_MAX]) if problem else score

    def stage_state(self, name: int) -> StagedState:
        """Do what Host does; the leaves of other hosts are requested when they are needed, one at a time."""
        staged = super().stage_state(name)
        staged.of_others = partial(self._leaf_of_others, name)
        return staged

    def _leaf_of_others(self, name: int, leaf: str) -> Mapping[int, Bytes]:
        answers = self._questions.ask(lambda n: commands.HostLeaf(n, name, leaf))
        if problem := answers.problem():
            raise CopyGone(problem)
        return answers.payloads()

    def load_state(self, state: Bytes) -> None:
        """Do what Host does; the other hosts request their parts of the leaves one at a time."""
        # It is read before any host starts to load, because then no host can refuse it.
        leaf = self.received(state)
        # Hosts request several parts of a leaf, one after the other.
        self._loading = lru_cache(1)(leaf)
        others = self._questions.ask(commands.HostLoadState)
        self.island.load_moments(leaf)
        others.payloads()
        self._loading = None

    def _common(self) -> list[StateName]:
        answers = self._questions.ask(commands.HostSaved)
        mine = self.saved()
        theirs = [{StateName.parse(each) for each in json.loads(bytes(p))} for p in answers.payloads().values()]
        common = [name for name in mine if all(name in names for names in theirs)]
        if any([mine, *theirs]) and not common:
            log.warning("hosts of this island have saved states, but none that all of them have; it starts without one")
        return common

    def _read_all(self, name: StateName) -> str:
        others = self._questions.ask(lambda n: commands.HostRead(n, name.to_text()))
        return self.read(name) or others.problem()

    def restore(self, fragments: Iterable[int]) -> None:
        chosen = tuple(fragments)
        others = self._questions.ask(lambda n: commands.HostRestore(n, chosen))
        super().restore(chosen)
        others.payloads()

    def resume_loader(self, name: StateName | None) -> bool:
        self.tell(commands.HostLoader("" if name is None else name.to_text()))
        return super().resume_loader(name)

    def _save_all(self, name: StateName, kept: int) -> SaveResult:
        others = self._questions.ask(lambda n: commands.HostSave(n, name.to_text(), kept))
        own = super()._save_all(name, kept)

        def outcome() -> str | None:
            reason = own()
            return None if reason is None or not others.complete.is_set() else reason or others.problem()

        return outcome

    def end(self, status: int) -> None:
        self._ending = True
        self.tell(commands.HostEnd(status))
        if not self._gone.complete.wait(END_S):
            log.warning(f"the other hosts did not end within {END_S:.0f} s")
        self._group.close()
        self._direct.close()

    def _listen(self) -> None:
        try:
            while True:
                item = self._group.receive(POLL_S)
                if item is not None:
                    self._on_item(item)
        # An error would be lost with the thread.
        except Exception as error:
            die(f"a message of a host cannot be handled: {error!r}")

    def _on_shared(self, item: GroupItem) -> None:
        """Take blocks that another host passes on; on the thread of its connection."""
        try:
            if isinstance(item.message, commands.HostShared):
                self._passing.on_shared(item.host, item.message, item.payload)
            elif not self._ending:
                die(f"host {item.host} is disconnected ({item.reason})")
        # An error would be lost with the thread.
        except Exception as error:
            die(f"blocks of host {item.host} cannot be used: {error!r}")

    def _on_item(self, item: GroupItem) -> None:
        match item.message:
            case None:
                if not self._ending:
                    die(f"host {item.host} is disconnected ({item.reason})")
                self._gone.add(item.host, "", b"")
            case commands.HostAnswer(number, reason):
                self._questions.on_answer(item.host, number, reason, item.payload)
            case commands.HostHas(message, reason):
                self._arrivals.add(item.host, message, reason)
            case commands.HostReport():
                assert self._reports is not None, f"host {item.host} reports as one of a slice"
                self._reports(item)
            case commands.HostStop():
                log.info(f"host {item.host} was asked to end, so the island leaves the run")
                self._stop.set()
            case commands.HostWant(leaf, start, stop):
                assert self._loading is not None, f"host {item.host} asks for {leaf}, but nothing is loaded"
                value = np.ascontiguousarray(self._loading(leaf)[tuple(map(slice, start, stop))])
                self._group.send(commands.HostHave(leaf), value.reshape(-1).view(np.uint8).data, item.host)
