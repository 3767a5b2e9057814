"""A whole run on this machine: one process per island, one for the syncer, watched by a supervisor.

The supervisor starts the processes, starts a dead one again (an island as a new incarnation, the syncer where its tape
ends), turns Ctrl-C or SIGTERM into a polite stop of everybody, and leaves no process behind: children also end when it
is killed. It knows nothing of the algorithm, and no process waits for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from diloco_jax.runtime.files import ADDRESS_FILE, CONFIG_FILE, LOGS, TAPES
from diloco_jax.runtime.island_processes import Child, Process, free_address
from diloco_jax.runtime.islands import IslandsConfig
from diloco_jax.runtime.processes import PARENT_ENV, USER_ERROR
from diloco_jax.runtime.settings import RunConfig
from diloco_jax.runtime.status import complete

START_TIMEOUT_S = 300.0  # for the syncer to build the model and listen
STOP_TIMEOUT_S = 120.0  # for checkpoint and last evaluation after a stop
LEARNER_STOP_TIMEOUT_S = 15.0
POLL_S = 0.1
CONTROLLER = "islands"  # name and command of the one process that drives all islands


class RunFailed(Exception):
    """The run cannot go on; the message says why and where to look."""


class LocalRun:
    """Supervisor of one local run.

    Args:
        config: the run.
        run_dir: its folder, with config.yaml in it.
        say: gets lines for people, such as the death of an island.
        stop: set from outside (Ctrl-C) to end the run early, in good order.
        resume: the folder is of a run that ended early, and of which no process is left; go on from its newest
            snapshot.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        say: Callable[[str], None],
        stop: threading.Event,
        *,
        resume: bool = False,
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._resume = resume
        self._say = say
        self._stop = stop
        self._islands: dict[str, Child] = {}
        self._syncer: Child | None = None
        self._config_path = str(run_dir / CONFIG_FILE)
        (run_dir / LOGS).mkdir(parents=True, exist_ok=True)

    def run(self) -> None:
        """Start everything, keep it running, return when the syncer has written the summary.

        Raises:
            RunFailed: the syncer, or too many islands, could not be kept running.
        """
        if self._resume:  # nobody listens there any more
            (self._run_dir / ADDRESS_FILE).unlink(missing_ok=True)
        try:
            if self._config.algorithm == "data_parallel":
                self._syncer = Child("trainer", [self._start("trainer", ["baseline", self._config_path])])
            else:
                self._syncer = self._start_syncer(["--rewind"] if self._resume else [])
                address = self._await_address()
                single = self._config.islands.controller == "single"
                for name in ((CONTROLLER,) if single else self._config.islands.names) if address else ():
                    self._islands[name] = self._start_island(name, address)
            self._watch()
        finally:
            self._end_all()

    # ---- starting -------------------------------------------------------------------------------------------------

    def _start_syncer(self, options: Sequence[str] = ()) -> Child:
        return Child("syncer", [self._start("syncer", ["syncer", self._config_path, *options])])

    def _start_island(self, name: str, address: str) -> Child:
        if name == CONTROLLER:
            return Child(name, [self._start(name, [CONTROLLER, self._config_path, "--syncer", address])])
        words = ["learner", self._config_path, "--island", name, "--syncer", address]
        words += ["--incarnation", str(next_incarnation(self._run_dir, name))]
        hosts = self._config.island(name).hosts
        if hosts == 1:
            return Child(name, [self._start(name, words)])
        words += ["--coordinator", free_address()]  # another one at each start: the last one may not be free yet
        return Child(name, [self._start(name, [*words, "--host", str(host)], host) for host in range(hosts)])

    def _start(self, name: str, arguments: list[str], host: int = 0) -> Process:
        title = f"{name}.host-{host}" if host else name
        log = self._run_dir / LOGS / f"{title}.log"
        pins = hasattr(os, "sched_setaffinity")
        cores = core_share(self._config.islands, name, sorted(os.sched_getaffinity(0))) if pins else set()
        with log.open("ab") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", "diloco_jax", *arguments, "--run-dir", str(self._run_dir)],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=child_environment(self._config, name),
                start_new_session=True,  # a terminal's Ctrl-C must reach the supervisor alone
            )
        if cores:
            with contextlib.suppress(OSError):  # it has ended already, or the machine does not let us
                os.sched_setaffinity(process.pid, cores)
        return Process(title, process, log)

    def _await_address(self) -> str:
        assert self._syncer is not None
        path = self._run_dir / ADDRESS_FILE
        ends_s = time.monotonic() + START_TIMEOUT_S
        while not self._stop.is_set():
            ended = self._syncer.poll() is not None  # before we look: it may listen, then die
            if path.exists() and (text := path.read_text(encoding="utf-8")):
                return text
            if ended:
                raise RunFailed(self._syncer.obituary())
            if time.monotonic() > ends_s:
                raise RunFailed(f"the syncer did not listen within {START_TIMEOUT_S:.0f} s; see {self._syncer.log}")
            time.sleep(POLL_S)
        return ""

    # ---- watching -------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Until the syncer has ended the run."""
        assert self._syncer is not None
        stopping_until_s: float | None = None
        while not self._ended(asked_to_stop=stopping_until_s is not None):
            if self._stop.is_set() and stopping_until_s is None:
                stopping_until_s = time.monotonic() + STOP_TIMEOUT_S
                for child in [*self._islands.values(), self._syncer]:
                    child.signal(signal.SIGTERM)
            if stopping_until_s is None:
                for child in self._islands.values():
                    self._tend_island(child)
                self._give_up_without_quorum()
            elif time.monotonic() > stopping_until_s:
                raise RunFailed(f"the syncer did not stop within {STOP_TIMEOUT_S:.0f} s; see {self._syncer.log}")
            time.sleep(POLL_S)

    def _ended(self, *, asked_to_stop: bool) -> bool:
        """Whether the run is over; a syncer that died is started again when its time has come."""
        syncer = self._syncer
        assert syncer is not None
        if syncer.again_at_s is not None:
            if asked_to_stop or self._stop.is_set():
                raise RunFailed("stopped while the syncer was away; --resume goes on from the newest snapshot")
            if time.monotonic() >= syncer.again_at_s:
                syncer.start_again(self._start_syncer().hosts)
            return False
        code = syncer.poll()
        if code is None:
            return False
        if code == 0 or (asked_to_stop and code == -signal.SIGTERM):  # it may not have had a handler yet
            return True
        limit = self._config.syncer.restarts_max
        alone = not self._islands  # the data-parallel trainer, or a syncer that never listened
        if asked_to_stop or alone or code == USER_ERROR:
            raise RunFailed(syncer.obituary())
        if syncer.starts > limit:
            raise RunFailed(f"{syncer.obituary()}; given up after {syncer.starts} starts (syncer.restarts_max)")
        syncer.again_at_s = time.monotonic() + self._config.syncer.restart_delay_s
        self._say(f"{syncer.obituary()}; starting it again, training goes on")
        return False

    def _tend_island(self, child: Child) -> None:
        """Notice that an island ended; start it again when its time has come."""
        if child.left or child.failed:
            return
        if child.again_at_s is not None:
            if time.monotonic() >= child.again_at_s:
                address = (self._run_dir / ADDRESS_FILE).read_text(encoding="utf-8")
                child.start_again(self._start_island(child.name, address).hosts)
            return
        code = child.poll()
        if code is None:
            return
        if code == 0:  # the syncer ended the run, or somebody drained this island
            child.left = True
            if not complete(self._run_dir):
                self._say(f"{child.name} left: {child.hosts[0].last_line()}")
        elif complete(self._run_dir):  # nothing is left to do for it
            child.left = True
        elif code == USER_ERROR:  # a wrong setting stays wrong
            child.failed = True
            self._say(f"{child.obituary()}; not started again")
        elif child.starts > self._config.islands.restarts_max:
            child.failed = True
            self._say(f"{child.obituary()}; given up after {child.starts} starts")
        else:
            child.again_at_s = time.monotonic() + self._config.islands.restart_delay_s
            self._say(f"{child.obituary()}; starting it again")

    def _give_up_without_quorum(self) -> None:
        """End a run that can never merge again. An island that was drained may come back: that is somebody's wish."""
        failed = [child for child in self._islands.values() if child.failed]
        left = sum(not (child.failed or child.left) for child in self._islands.values())
        quorum = self._config.protocol.quorum
        if failed and left < quorum and not complete(self._run_dir):
            words = "; ".join(child.obituary() for child in failed)
            raise RunFailed(f"{left} islands are left, fewer than protocol.quorum = {quorum}: {words}")

    def _end_all(self) -> None:
        """Leave nobody behind: ask the rest, wait a little, then kill."""
        children = [*self._islands.values(), *([self._syncer] if self._syncer is not None else [])]
        for child in children:
            child.signal(signal.SIGTERM)
        ends_s = time.monotonic() + LEARNER_STOP_TIMEOUT_S
        for child in children:
            patience_s = STOP_TIMEOUT_S if child is self._syncer else 0.1  # it saves the model
            child.wait(max(patience_s, ends_s - time.monotonic()))


def next_incarnation(run_dir: Path, name: str) -> int:
    """A number above those of all earlier lives of this learner, also when the clock was set back between them."""
    tapes = [path.name.split(".")[-2] for path in (run_dir / TAPES).glob(f"{name}.*.jsonl")]
    earlier = [int(number) for number in tapes if number.isdecimal()]
    return max([int(time.time() * 1000), *(number + 1 for number in earlier)])


def child_environment(config: RunConfig, name: str) -> Mapping[str, str]:
    """Environment of a child: emulated devices, and this process as the parent it must not outlive."""
    environment = dict(os.environ)
    environment[PARENT_ENV] = str(os.getpid())
    environment["PYTHONUNBUFFERED"] = "1"
    own = config.island(name)
    hosts = own.hosts if config.algorithm == "decoupled" else 1  # the data-parallel trainer is one process
    devices = own.devices // hosts if name != "syncer" else 1
    if name == CONTROLLER:
        devices = sum(config.island(each).devices for each in config.islands.names)
    if devices:
        environment["JAX_PLATFORMS"] = "cpu"
        environment["JAX_NUM_CPU_DEVICES"] = str(devices)
        # The CPU client's thread pool must hold every device of two programs, or their rendezvous deadlocks.
        environment["NPROC"] = str(2 * max(devices, os.cpu_count() or 1))
        # Huge pages for large arrays: a fifth to a third less time per step on Linux.
        environment.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    return environment


def core_share(islands: IslandsConfig, name: str, cores: Sequence[int]) -> set[int]:
    """Cores of an emulated island, when all islands can have an equal share; empty: leave it to the system.

    Emulated islands that share cores freely get them unevenly for seconds at a time, so that their step times differ
    by a factor of five (docs/decisions/0005-core-shares.md). Real islands have accelerators of their own.
    """
    count, available = islands.count, len(cores)
    if not islands.devices or name not in islands.names or count == 1:
        return set()
    index = islands.names.index(name)
    if count % available == 0:
        return {cores[index % available]}
    if available % count == 0:
        share = available // count
        return set(cores[index * share : (index + 1) * share])
    return set()
