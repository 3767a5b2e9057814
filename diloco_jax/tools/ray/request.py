"""One start of an island on a Ray cluster: the request for its place, its processes there, and their end.

A thread of the supervisor's process serves a request. It asks Ray for a placement group, waits until Ray has placed it,
and starts the island's processes in it as actors. It takes their output twice a second and writes it to the island's
log. At the end it gives the place back.

    waits  ->  starts  ->  runs  ->  ended
      ^ a node that is lost ends the request; the supervisor then starts the island again with a new one
"""

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from diloco_jax.runtime.records.signals import FAILED, INTERRUPTED, TERMINATED, WRONG_INPUT
from diloco_jax.tools.ray.host import HostProcess, Launch

# A wait for Ray returns after this time at the latest, to look for a request to stop.
POLL_S = 0.5
# An island that Ray places within this time was not waiting.
PLACED_AT_ONCE_S = 3.0
# The longest time for the actors of an island to start and to answer. Ray may install an environment first.
START_MAX_S = 300.0
# A process that was killed must end within this time, else its actor is killed.
KILL_S = 10.0
REASON_MAX = 200


class RemoteProcess:
    """A process on a node of the cluster; it offers what the supervisor uses of a subprocess.Popen."""

    # The supervisor's machine does not know the process by a number.
    pid = 0
    stdin: IO[bytes] | None = None

    def __init__(self) -> None:
        self.returncode: int | None = None
        self._ended = threading.Event()
        self._signals: list[int] = []
        # Time of the first request to end, and to end by force; infinity if there was none.
        self.asked_s = self.killed_s = float("inf")

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, sig: int) -> None:
        self._signals.append(int(sig))
        self.asked_s = min(self.asked_s, time.monotonic())
        if sig == signal.SIGKILL:
            self.killed_s = min(self.killed_s, time.monotonic())

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; without a timeout only after a kill, which Ray may be unable to deliver."""
        if not self._ended.wait(KILL_S if timeout is None else timeout):
            if timeout is not None:
                raise subprocess.TimeoutExpired("an island on Ray", timeout)
            self.end(-signal.SIGKILL)
        assert self.returncode is not None
        return self.returncode

    def take_signals(self) -> list[int]:
        """Return the signals that the process has not got yet."""
        taken, self._signals = self._signals, []
        return taken

    def end(self, status: int) -> None:
        """Set the exit status, unless it is known."""
        if self.returncode is None:
            self.returncode = status
        self._ended.set()


@dataclass(frozen=True, slots=True)
class Placement:
    """An incarnation of an island to start on the cluster.

    Attributes:
        name: name of the learner.
        title: name of the placement group, which Ray's tools show.
        syncer: host:port of the syncer.
        bundles: resources of each process.
        launches: the process of each host.
        log: file for the output, for messages about the node too.
    """

    name: str
    title: str
    syncer: str
    bundles: Sequence[Mapping[str, float]]
    launches: Sequence[Launch]
    log: Path


class _Stopped(Exception):
    """The supervisor asked the island to end before its processes ran, or the run is over."""


@dataclass(slots=True)
class _Running:
    """A process that runs: its actor, and the report that is under way."""

    actor: Any
    process: RemoteProcess
    report: Any = None


class Request:
    """The request for an island's place, served in a thread until the island has ended.

    Args:
        ray: the module, connected to the cluster.
        say: gets one line for people when the island waits, and one when it is placed.
        tell: gets what the island waits for as long as it waits, and "" after that, for status and live view.
        over: tells whether the run is complete, so that no island must start any more.
    """

    def __init__(
        self,
        ray: Any,
        placement: Placement,
        say: Callable[[str], None],
        tell: Callable[[str], None] = lambda _: None,
        over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._ray = ray
        self._placement = placement
        self._say = say
        self._tell = tell
        self._over = over
        self.processes = [RemoteProcess() for _ in placement.bundles]
        self._group: Any = None
        # Ids of the nodes of the place. Ray forgets them when it looks for another place after the loss of a node.
        self._nodes: list[str] = []
        self._actors: list[Any] = []
        self._thread = threading.Thread(name=f"ray-{placement.name}", target=self._serve, daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Tell whether the island has ended and its place is given back."""
        return not self._thread.is_alive()

    def kill(self) -> None:
        """Ask the island to end by force, or to wait no longer."""
        for each in self.processes:
            if each.poll() is None:
                each.kill()

    def join(self, within_s: float) -> None:
        """Wait until the place is given back, or the time is over."""
        self._thread.join(within_s)

    def _serve(self) -> None:
        status = FAILED
        try:
            self._place()
            self._attend(self._start())
        except _Stopped:
            status = 0 if self._over() else INTERRUPTED
            self._note("ended before it ran")
        except Exception as error:
            # Ray raises errors of many kinds when it loses nodes or its own processes.
            status = self._status_of(error)
        finally:
            self._tell("")
            # Ray may not answer when the place is given back.
            for each in self.processes:
                each.end(status)
            self._give_back()

    def _place(self) -> None:
        """Ask for the place and wait until Ray has it; _Stopped if the island need not run any more."""
        placement, begins_s, told = self._placement, time.monotonic(), False
        # Each host of an island may be another node, and a node that fits several hosts may hold them all.
        self._group = self._ray.util.placement_group(
            [dict(bundle) for bundle in placement.bundles], strategy="PACK", name=placement.title
        )
        ready = self._group.ready()
        while not self._ray.wait([ready], timeout=POLL_S)[0]:
            self._check_stop()
            if not told and time.monotonic() > begins_s + PLACED_AT_ONCE_S:
                told = True
                line = waiting(placement.bundles, self._ray.nodes())
                self._say(f"{placement.name} {line}")
                self._tell(line)
        self._check_stop()
        self._tell("")
        self._ray.get(ready)
        nodes = self._ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        self._nodes = list(dict.fromkeys(node for _, node in sorted(nodes.items())))
        self._say(f"{placement.name} starts on {' and '.join(map(node_name, self._described()))}")

    def _start(self) -> list[_Running]:
        placement, ray = self._placement, self._ray
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        for index, bundle in enumerate(placement.bundles):
            actor = ray.remote(HostProcess).options(
                **options_of(bundle),
                max_restarts=0,
                scheduling_strategy=strategy(self._group, placement_group_bundle_index=index),
            )
            self._actors.append(actor.remote())
        arguments: tuple[str, ...] = ()
        if len(self._actors) > 1:
            (coordinator,) = self._await([self._actors[0].free_address.remote(placement.syncer)])
            arguments = ("--coordinator", coordinator)
        starts = [
            actor.start.remote(launch.with_arguments(arguments))
            for actor, launch in zip(self._actors, placement.launches, strict=True)
        ]
        self._await(starts)
        return [_Running(*each) for each in zip(self._actors, self.processes, strict=True)]

    def _await(self, answers: Sequence[Any]) -> list[Any]:
        """Return the answers of actors; _Stopped if the island need not run any more."""
        ends_s = time.monotonic() + START_MAX_S
        while len(self._ray.wait(answers, num_returns=len(answers), timeout=POLL_S)[0]) < len(answers):
            self._check_stop()
            if time.monotonic() > ends_s:
                raise TimeoutError(f"the actors did not start within {START_MAX_S:.0f} s")
        return list(self._ray.get(list(answers)))

    def _check_stop(self) -> None:
        if self._over() or min(each.asked_s for each in self.processes) < float("inf"):
            raise _Stopped

    def _attend(self, running: Sequence[_Running]) -> None:
        """Write the output of the processes and deliver signals, until all have ended."""
        with self._placement.log.open("ab") as log:
            while left := [each for each in running if each.process.poll() is None]:
                for each in left:
                    if each.report is None:
                        each.report = each.actor.report.remote(each.process.take_signals())
                done, _ = self._ray.wait([each.report for each in left], num_returns=len(left), timeout=POLL_S)
                for each in left:
                    if each.report in done:
                        self._take(each, log)
                    elif time.monotonic() > each.process.killed_s + KILL_S:
                        each.process.end(-signal.SIGKILL)
                log.flush()
                time.sleep(POLL_S)

    def _take(self, each: _Running, log: IO[bytes]) -> None:
        report, each.report = each.report, None
        try:
            output, status = self._ray.get(report)
        except self._ray.exceptions.ActorUnavailableError:
            # The connection broke. Ray finds out whether the node is lost, and the next report shows it.
            return
        log.write(output)
        if status is not None:
            each.process.end(status)

    def _status_of(self, error: Exception) -> int:
        """Return the exit status that stands for an error of Ray, and write the reason to the island's log.

        The loss of a node does not count as a failure of the island.
        """
        lost: list[Mapping[str, Any]] = []
        # Ray may be lost as a whole.
        with contextlib.suppress(Exception):
            lost = [node for node in self._described() if not node.get("Alive")]
        if lost:
            self._note(f"Ray lost its {node_name(lost[0])}")
            return TERMINATED
        # Ray adds the traceback of its worker, whose last line is the error.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        last = lines[-1][:REASON_MAX] if lines else "it gave no reason"
        if "ModuleNotFoundError" in last:
            self._note(f"{last}; install this version of diloco-jax with the extra ray on every node")
            return WRONG_INPUT
        self._note(f"Ray ended it, {type(error).__name__}: {last}")
        return FAILED

    def _described(self) -> list[Mapping[str, Any]]:
        """Return Ray's present description of the nodes of the place."""
        known = {node["NodeID"]: node for node in self._ray.nodes()}
        return [known.get(number, {"NodeID": number}) for number in self._nodes]

    def _note(self, text: str) -> None:
        with self._placement.log.open("a", encoding="utf-8") as log:
            log.write(f"{text}\n")

    def _give_back(self) -> None:
        """Remove actors and placement group; Ray ends what is left of them."""
        for actor in self._actors:
            with contextlib.suppress(Exception):
                self._ray.kill(actor)
        if self._group is not None:
            with contextlib.suppress(Exception):
                self._ray.util.remove_placement_group(self._group)


def node_name(node: Mapping[str, Any]) -> str:
    """Return words for a node of the cluster, with the first characters of its id, which Ray's tools show."""
    return f"node {node['NodeID'][:8]} at {node.get('NodeManagerAddress') or 'an unknown address'}"


def resources_text(bundle: Mapping[str, float]) -> str:
    """Return resources as people write them: {CPU: 1, site: 1}."""
    return f"{{{', '.join(f'{name}: {amount:g}' for name, amount in bundle.items())}}}"


def bundle_text(bundles: Sequence[Mapping[str, float]]) -> str:
    """Return the resources of an island's processes, which are equal: {CPU: 1}, or 2 x {GPU: 8}."""
    return f"{len(bundles)} x " * (len(bundles) > 1) + resources_text(bundles[0])


def waiting(bundles: Sequence[Mapping[str, float]], nodes: Sequence[Mapping[str, Any]]) -> str:
    """Return what an island waits for; it names resources that no node of the cluster has.

    Args:
        bundles: the resources of each process of the island.
        nodes: Ray's description of its nodes.
    """
    bundle = bundles[0]
    line = f"waits for {bundle_text(bundles)}"
    have = [node["Resources"] for node in nodes if node.get("Alive")]
    lacking = {key: amount for key, amount in bundle.items() if all(each.get(key, 0) < amount for each in have)}
    if not lacking and not any(all(each.get(key, 0) >= amount for key, amount in bundle.items()) for each in have):
        lacking = dict(bundle)
    if not lacking:
        return line
    return f"{line}; no node of the cluster has {resources_text(lacking)}: add one, or correct islands.resources"


def options_of(bundle: Mapping[str, float]) -> dict[str, Any]:
    """Return the options of an actor that takes a whole bundle."""
    own = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    found: dict[str, Any] = {"num_cpus": 0}
    found |= {own[name]: amount for name, amount in bundle.items() if name in own}
    return found | {"resources": {name: amount for name, amount in bundle.items() if name not in own}}
