"""A whole run on this machine: one process per island, one for the syncer, watched by a supervisor.

The supervisor starts the processes and restarts those that fail: an island as a new incarnation, the syncer at the end
of its tape. On Ctrl-C or SIGTERM it asks all processes to stop. It leaves no process behind: children also end when the
supervisor is killed. It has no part in the algorithm, and no process waits for it.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from diloco_jax.runtime.local.ends import IslandEnd, rule_of
from diloco_jax.runtime.local.machine import AT_INPUT, CONTROLLER, Machine, check, count_of, look, settings_of
from diloco_jax.runtime.local.processes import GRACE_S, Child, Machines, Process, Silence, free_address
from diloco_jax.runtime.local.programs import mend, name_of_set, restore
from diloco_jax.runtime.local.standby import EarlyIslands, Spares, shared_by_several
from diloco_jax.runtime.own_loop.environment import ISLAND_ENV, SYNCER_ENV
from diloco_jax.runtime.own_loop.surroundings import (
    CONFIG_ENV,
    COORDINATOR_ENV,
    HOST_ENV,
    HOSTS_ENV,
    INCARNATION_ENV,
    RUN_DIR_ENV,
)
from diloco_jax.runtime.records.files import ADDRESS_FILE, CONFIG_FILE, HEALTH, LOGS, TAPES, resume_command
from diloco_jax.runtime.records.liveness import forget_phases, loop_name, tell_phase, tell_restart
from diloco_jax.runtime.records.signals import PARENT_ENV, WRONG_INPUT, after_end
from diloco_jax.runtime.records.status import clear_for_start, complete, is_banned, last_state
from diloco_jax.settings.islands import IslandsConfig
from diloco_jax.settings.run import RunConfig

# A starting process is given up after so many seconds without progress.
SILENT_MAX_S = 300.0
# After a stop, the syncer writes the last snapshot within this time.
STOP_TIMEOUT_S = 120.0
LEARNER_STOP_TIMEOUT_S = 15.0
POLL_S = 0.1
# Between the name of an island and the number of its slice.
SLICE = ".slice-"


class RunFailed(Exception):
    """The run cannot continue; the message has the reason and the log to read."""

    def __init__(self, message: str, *, wrong_input: bool = False) -> None:
        super().__init__(message)
        # A process refused a setting, so a retry would fail as well.
        self.wrong_input = wrong_input


class LocalRun:
    """Supervisor of one local run; ValueError if this machine lacks the devices that the config names.

    Args:
        say: gets lines for people, such as the failure of an island.
        stop: set from outside (Ctrl-C) to end the run early and in order.
        resume: continue from the newest snapshot of a run that ended early. None of its processes may be left.
        machines: where the islands start; None: on this machine.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        say: Callable[[str], None],
        stop: threading.Event,
        *,
        resume: bool = False,
        machines: Machines | None = None,
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._resume = resume
        self._say = say
        self._stop = stop
        self._address = ""
        self._islands: dict[str, Child] = {}
        self._syncer: Child | None = None
        self._compilers: list[Silence] = []
        # The addresses of the slices of each island, for each of their hosts.
        self._slices: dict[str, list[str]] = {}
        self._config_path = str(run_dir / CONFIG_FILE)
        (run_dir / LOGS).mkdir(parents=True, exist_ok=True)
        self._spares = Spares(run_dir, self._start_spare)
        self._early = EarlyIslands(self._start_early)
        self._machine, self._machines = look(os.environ), machines
        say(check(config, self._machine) if machines is None else machines.describe())

    def run(self) -> None:
        """Start all processes, and return when the syncer has written the summary; RunFailed if that cannot happen."""
        forget_phases(self._run_dir)
        mend(self._run_dir)
        put_back = clear_for_start(self._run_dir, resume=self._resume)
        try:
            if self._config.algorithm == "data_parallel":
                self._syncer = Child("trainer", [self._start("trainer", ["baseline", self._config_path])])
            else:
                self._start_compilers()
                self._syncer = self._start_syncer(["--rewind"] if self._resume else [])
                self._early.begin(self._names_early())
                try:
                    address = self._address = self._await_address()
                except RunFailed:
                    # The run did not start, so the old status in its folder is still true.
                    put_back()
                    raise
                self._await_compilers()
                single = self._config.islands.controller == "single"
                # Elsewhere these are the islands that the run asks for; it starts with those that get a machine.
                names = (CONTROLLER,) if single else processes_of(self._config.islands)
                for name in names if address else ():
                    self._islands[name] = self._start_island(name, address)
            self._watch()
        finally:
            self._end_all()

    def _start_compilers(self) -> None:
        for name in (
            () if self._resume or self._machines is not None else shared_by_several(self._config, self._machine)
        ):
            kept = self._set_of(name)
            if restore(kept, self._run_dir):
                continue
            words = ["compile", self._config_path, "--island", name, "--set", kept]
            environment = child_environment(self._config, name, self._machine)
            self._compilers.append(Silence(self._start_process(f"compiler-{name}", words, environment)))

    def _set_of(self, name: str) -> str:
        return name_of_set(self._config, name, child_environment(self._config, name, self._machine))

    def _await_compilers(self) -> None:
        """Wait until the shared programs are compiled; islands compile missing programs themselves."""
        while not (self._stop.is_set() or self._compiled()):
            time.sleep(POLL_S)
        self._early.load(self._set_of)

    def _compiled(self) -> bool:
        """Tell whether every compiler has ended, or makes no progress."""
        return all(each.ended() or each.seconds() >= SILENT_MAX_S for each in self._compilers)

    def _names_early(self) -> list[str]:
        """Name the islands that can start before the syncer listens: single processes of the built-in loop, here."""
        islands = self._config.islands
        if self._machines is not None or islands.command or islands.controller == "single" or islands.slices > 1:
            return []
        return [name for name in islands.names if self._config.island(name).hosts == 1]

    def _start_early(self, name: str) -> Process:
        return self._start(name, self._learner_words(name, AT_INPUT, str(next_incarnation(self._run_dir, name))))

    def _learner_words(self, name: str, address: str, incarnation: str) -> list[str]:
        words = ["learner", self._config_path, "--island", name, "--syncer", address]
        return [*words, "--incarnation", incarnation]

    def _start_syncer(self, options: Sequence[str] = ()) -> Child:
        return Child("syncer", [self._start("syncer", ["syncer", self._config_path, *options])])

    def _start_island(self, name: str, address: str) -> Child:
        if name == CONTROLLER:
            return Child(name, [self._start(name, [CONTROLLER, self._config_path, "--syncer", address])])
        if self._config.islands.slices > 1:
            return Child(name, self._start_slice(name, address))
        if (early := self._early.take(name, address)) is not None:
            return Child(name, [early])
        incarnation, hosts = str(next_incarnation(self._run_dir, name)), self._config.island(name).hosts
        if self._machines is not None:
            return Child(name, self._machines.start(name, address, incarnation))
        # Each start uses another port, since the last one may not be free yet.
        coordinator = free_address() if hosts > 1 else ""
        if self._config.islands.command:
            variables = {
                SYNCER_ENV: address,
                ISLAND_ENV: name,
                INCARNATION_ENV: incarnation,
                COORDINATOR_ENV: coordinator,
            }
            variables |= {RUN_DIR_ENV: str(self._run_dir), CONFIG_ENV: self._config_path, HOSTS_ENV: str(hosts)}
            return Child(
                name, [self._start(name, [], host, variables | {HOST_ENV: str(host)}) for host in range(hosts)]
            )
        if (spare := self._spares.take(name, address, incarnation)) is not None:
            return Child(name, [spare])
        words = self._learner_words(name, address, incarnation)
        if hosts == 1:
            return Child(name, [self._start(name, words)])
        words += ["--coordinator", coordinator]
        return Child(name, [self._start(name, [*words, "--host", str(host)], host) for host in range(hosts)])

    def _start_slice(self, name: str, address: str) -> list[Process]:
        """Start the hosts of one slice; the slices of an island keep their addresses for the whole run."""
        island, number = split_slice(name)
        slices, hosts = self._config.islands.slices, self._config.island(island).hosts
        if island not in self._slices:
            self._slices[island] = [",".join(free_address() for _ in range(slices)) for _ in range(hosts)]
        words = ["learner", self._config_path, "--island", island, "--syncer", address, "--slice", str(number)]
        if hosts == 1:
            return [self._start(name, [*words, "--slices", *self._slices[island]])]
        words += ["--coordinator", free_address()]
        addresses = enumerate(self._slices[island])
        return [self._start(name, [*words, "--host", str(host), "--slices", each], host) for host, each in addresses]

    def _start_spare(self, name: str) -> Process:
        return self._start(name, ["learner", self._config_path, "--island", name, "--standby"])

    def _start(
        self, name: str, arguments: list[str], host: int = 0, variables: Mapping[str, str] = MappingProxyType({})
    ) -> Process:
        """Start a process of this program, or of islands.command if `arguments` is empty, with further `variables`."""
        island, number = split_slice(name)
        place = number * self._config.island(island).hosts + host
        environment = {**child_environment(self._config, island, self._machine, place), **variables}
        title = f"{name}.standby" if "--standby" in arguments else f"{name}.host-{host}" if host else name
        process = self._start_process(title, arguments, environment)
        shares_cores = self._machine.emulates and hasattr(os, "sched_setaffinity")
        cores = core_share(self._config.islands, name, sorted(os.sched_getaffinity(0))) if shares_cores else set()
        if cores:
            # The process may have ended, or the system may forbid this.
            with contextlib.suppress(OSError):
                os.sched_setaffinity(process.process.pid, cores)
        return process

    def _start_process(self, title: str, arguments: list[str], environment: Mapping[str, str]) -> Process:
        log = self._run_dir / LOGS / f"{title}.log"
        command: Sequence[str] = self._config.islands.command
        # The package is installed for the interpreter that runs this process.
        if command[:1] == ("python",):
            command = (sys.executable, *command[1:])
        if arguments:
            command = [sys.executable, "-m", "diloco_jax", *arguments, "--run-dir", str(self._run_dir)]
        with log.open("ab") as stream:
            begins = stream.tell()
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if {"--standby", AT_INPUT} & {*arguments} else subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment,
                # Ctrl-C on the terminal must reach only the supervisor.
                start_new_session=True,
            )
        return Process(title, process, log, begins)

    def _await_address(self) -> str:
        assert self._syncer is not None
        path = self._run_dir / ADDRESS_FILE
        silence = Silence(self._syncer.hosts[0])
        while not self._stop.is_set():
            if self._compiled():
                self._early.load(self._set_of)
            # The syncer may write its address and then fail, so its end is checked first.
            ended = self._syncer.poll() is not None
            if text := _read(path):
                return text
            if ended:
                raise RunFailed(self._syncer.describe_exit(), wrong_input=self._syncer.poll() == WRONG_INPUT)
            if silence.seconds() > SILENT_MAX_S:
                raise RunFailed(
                    f"the syncer does not listen, and made no progress for {SILENT_MAX_S:.0f} s; its last line was: "
                    f"{self._syncer.hosts[0].last_line()} (log: {self._syncer.log}); look for what it waits for, such "
                    "as a disk or a stopped process, and start again"
                )
            time.sleep(POLL_S)
        return ""

    def address(self) -> str:
        """Return the syncer's address from its file; a file that was removed is written again."""
        path = self._run_dir / ADDRESS_FILE
        if text := _read(path):
            self._address = text
        elif self._address:
            with contextlib.suppress(OSError):
                path.write_text(self._address, encoding="utf-8")
        return self._address

    def _watch(self) -> None:
        """Restart what fails until the syncer has ended the run."""
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
        """Tell whether the run is over; restart a syncer that failed when its delay is over."""
        syncer = self._syncer
        assert syncer is not None
        if syncer.again_at_s is not None:
            if asked_to_stop or self._stop.is_set():
                raise RunFailed(f"stopped while no syncer was running; to continue: {resume_command(self._run_dir)}")
            if time.monotonic() >= syncer.again_at_s:
                # The new process listens at the address in the file.
                self.address()
                syncer.start_again(self._start_syncer().hosts)
            return False
        code = syncer.poll()
        if code is None:
            return False
        # A syncer without a signal handler or a model ends by the signal.
        if code == 0 or (asked_to_stop and not after_end(code).failed):
            return True
        limit = self._config.syncer.restarts_max
        # The data-parallel trainer, or a syncer that never listened, is not restarted.
        alone = not self._islands
        if asked_to_stop or alone or code == WRONG_INPUT:
            raise RunFailed(syncer.describe_exit(), wrong_input=code == WRONG_INPUT)
        syncer.plan_restart(self._config.syncer.restart_delay_s)
        if syncer.failures > limit:
            raise RunFailed(
                f"{syncer.describe_exit()}; given up after {count_of(syncer.starts, 'start')} (syncer.restarts_max)"
            )
        meanwhile = ", islands train on" if last_state(self._run_dir) == "running" else ""
        self._say(f"{syncer.describe_exit()}; starting it again{meanwhile}")
        return False

    def _tend_island(self, child: Child) -> None:
        """Handle the end of an island, and restart it when its delay is over."""
        if child.left or child.failed:
            return
        if child.again_at_s is not None:
            if time.monotonic() >= child.again_at_s:
                child.start_again(self._start_island(child.name, self.address()).hosts)
            return
        code = child.poll()
        if code is None:
            if self._config.islands.standby:
                self._spares.tend(child.name)
            return
        island, number = split_slice(child.name)
        loop = loop_name(island, 1 + number) if SLICE in child.name else island
        tell_phase(self._run_dir, loop, "")
        # The mark of readiness belongs to the process that ended.
        with contextlib.suppress(OSError):
            (self._run_dir / HEALTH / f"{loop}.ready").unlink(missing_ok=True)
        joined, state = self._joined(child.name), last_state(self._run_dir)
        own_program = bool(self._config.islands.command)
        banned, unloadable = is_banned(self._run_dir, island), child.unloadable
        rule = rule_of(IslandEnd(code, state, own_program, joined, unloadable, banned))
        if rule.then == "restart":
            self._restart_island(child)
            return
        child.left, child.failed = rule.then == "left", rule.then == "failed"
        if rule.line:
            last = child.hosts[0].last_line()
            self._say(rule.line.format(name=child.name, exit=child.describe_exit(), last=last))
        if rule.reason:
            self._tell_given_up(child, rule.reason)

    def _restart_island(self, child: Child) -> None:
        """Plan another start of an island, or give it up after too many failures."""
        limit, starts = self._config.islands.restarts_max, count_of(child.starts, "start")
        child.plan_restart(self._config.islands.restart_delay_s)
        if child.failures > limit:
            child.failed, child.again_at_s = True, None
            self._say(f"{child.describe_exit()}; given up after {starts}")
            self._tell_given_up(child, f"has given it up after {starts}")
            return
        # An end that somebody asked for does not count as a failure.
        counted = f", failure {child.failures} of at most {limit}" * bool(child.failures)
        words = f"`diloco train` restarts it by itself (restart {child.starts}{counted}); its log is {child.log}"
        tell_restart(self._run_dir, child.name, words)
        at_once = child.brief == 1 and self._spares.ready(child.name)
        self._say(f"{child.describe_exit()}; {'its spare takes over' if at_once else 'starting it again'}")
        if at_once:
            child.again_at_s = 0.0
            self._tend_island(child)

    def _tell_given_up(self, child: Child, why: str) -> None:
        again = resume_command(self._run_dir)
        words = f"`diloco train` {why}: correct what its log {child.log} shows; then stop the run, and `{again}`"
        tell_restart(self._run_dir, child.name, words)

    def _joined(self, name: str) -> bool:
        return any((self._run_dir / TAPES).glob(f"{split_slice(name)[0]}.*.jsonl"))

    def _give_up_without_quorum(self) -> None:
        """End a run that can never merge again. Drained islands do not count, since the user may restart them."""
        failed = [child for child in self._islands.values() if child.failed]
        left = len({split_slice(name)[0] for name, child in self._islands.items() if not (child.failed or child.left)})
        quorum = self._config.protocol.quorum
        if failed and left < quorum and not complete(self._run_dir):
            words = "; ".join(child.describe_exit() for child in failed)
            refused = any(child.poll() == WRONG_INPUT for child in failed)
            remain = f"{count_of(left, 'island')} {'is' if left == 1 else 'are'} left"
            message = f"{remain}, fewer than protocol.quorum = {quorum}: {words}"
            raise RunFailed(message, wrong_input=refused)

    def _end_all(self) -> None:
        """End all processes: ask them to stop, wait, then kill those that are left."""
        self._spares.end()
        self._early.end()
        for each in self._compilers:
            each.watched.process.kill()
            each.watched.process.wait()
        # Islands of a complete run end by themselves. The user's loop may have more to do after the run.
        ends_s = time.monotonic() + (GRACE_S if complete(self._run_dir) else 0.0)
        while time.monotonic() < ends_s and any(child.poll() is None for child in self._islands.values()):
            time.sleep(POLL_S)
        children = [*self._islands.values(), *([self._syncer] if self._syncer is not None else [])]
        for child in children:
            child.signal(signal.SIGTERM)
        ends_s = time.monotonic() + LEARNER_STOP_TIMEOUT_S
        for child in children:
            # The syncer saves the model.
            patience_s = STOP_TIMEOUT_S if child is self._syncer else 0.1
            child.wait(max(patience_s, ends_s - time.monotonic()))
        forget_phases(self._run_dir)


def processes_of(islands: IslandsConfig) -> list[str]:
    """Return the names of the processes of all islands; each slice of an island is one, and restarts alone."""
    if islands.slices == 1:
        return list(islands.names)
    return [slice_name(name, number) for name in islands.names for number in range(islands.slices)]


def slice_name(island: str, number: int) -> str:
    """Return the name of the process of one slice."""
    return f"{island}{SLICE}{number}"


def split_slice(name: str) -> tuple[str, int]:
    """Return the island of a process, and the number of its slice."""
    island, _, number = name.partition(SLICE)
    return island, int(number or 0)


def _read(path: Path) -> str:
    """Return the text of a file; "" if it is missing or cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def next_incarnation(run_dir: Path, name: str) -> int:
    """Return a number above all earlier incarnations of this learner, even if the clock was set back."""
    tapes = [path.name.split(".")[-2] for path in (run_dir / TAPES).glob(f"{name}.*.jsonl")]
    earlier = [int(number) for number in tapes if number.isdecimal()]
    return max([int(time.time() * 1000), *(number + 1 for number in earlier)])


def child_environment(
    config: RunConfig, name: str, machine: Machine | None = None, place: int = 0
) -> Mapping[str, str]:
    """Return the environment of a child: its devices, and this process as the parent that it must not outlive.

    Args:
        place: as for `settings_of`.
    """
    machine = look(os.environ) if machine is None else machine
    environment = dict(os.environ)
    environment[PARENT_ENV] = str(os.getpid())
    environment["PYTHONUNBUFFERED"] = "1"
    settings = settings_of(config, name, machine, place)
    environment.update(settings)
    if settings.get("JAX_PLATFORMS") == "cpu":
        # With huge pages for large arrays a step takes 20 to 33 % less time on Linux.
        environment.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    return environment


def core_share(islands: IslandsConfig, name: str, cores: Sequence[int]) -> set[int]:
    """Return the cores of an emulated island if all islands can have an equal share; an empty set means any core.

    Emulated islands that share cores freely get them unevenly for seconds at a time, so that their step times differ
    by a factor of five (docs/decisions/0022-devices.md).
    """
    count, available = islands.count, len(cores)
    if name not in islands.names or count == 1:
        return set()
    index = islands.names.index(name)
    if count % available == 0:
        return {cores[index % available]}
    if available % count == 0:
        share = available // count
        return set(cores[index * share : (index + 1) * share])
    return set()
