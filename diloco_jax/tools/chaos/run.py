"""`diloco chaos`: it runs a real local job under a schedule of faults, and judges the result (docs/faults.md)."""

import json
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from diloco_jax.protocol.messages import SYNCER
from diloco_jax.runtime.local.processes import Child, Handle, Process
from diloco_jax.runtime.local.run import LocalRun, RunFailed, slice_name, split_slice
from diloco_jax.runtime.records.files import LOGS, SUMMARY_FILE
from diloco_jax.runtime.records.signals import stop_on_signals
from diloco_jax.settings.run import RunConfig
from diloco_jax.tools.chaos.actions import Saboteur
from diloco_jax.tools.chaos.driver import Driver
from diloco_jax.tools.chaos.ledger import judge
from diloco_jax.tools.chaos.relay import Relay
from diloco_jax.tools.chaos.schedule import ChaosFault
from diloco_jax.tools.page.page import write_report
from diloco_jax.tools.replay.audit import audit
from diloco_jax.transport.link import bucket_scheme

DRIVER_STOP_S = 30.0


class ChaosRun(LocalRun):
    """A local run whose islands connect through relays and accept orders with SIGUSR1."""

    def __init__(self, config: RunConfig, run_dir: Path, say: Callable[[str], None], stop: threading.Event) -> None:
        if several := next((name for name in config.islands.names if config.island(name).hosts > 1), ""):
            raise ValueError(f"{several} has several hosts, which chaos does not support yet; set islands.hosts to 1")
        super().__init__(config, run_dir, say, stop)
        self.relays: dict[str, Relay] = {}
        if not bucket_scheme(config.transport.address):
            self.relays = {name: Relay(self.address) for name in config.islands.names}

    def close(self) -> None:
        for relay in self.relays.values():
            relay.close()

    def pid(self, name: str) -> int | None:
        process = self._process(name)
        return None if process is None else process.pid

    def send(self, name: str, number: signal.Signals) -> bool:
        found = self._processes(name)
        for process in found:
            process.send_signal(number)
        return bool(found)

    def slice_of(self, island: str, number: int) -> str:
        return slice_name(island, number % self._config.islands.slices)

    def _process(self, name: str) -> Handle | None:
        return next(iter(self._processes(name)), None)

    def _processes(self, name: str) -> list[Handle]:
        """Return the processes with this name; an island of several slices has one for each."""
        children = [self._syncer] if name == SYNCER else [self._islands.get(name)]
        if self._config.islands.slices > 1 and name in self._config.islands.names:
            children = [self._islands.get(self.slice_of(name, k)) for k in range(self._config.islands.slices)]
        return [each.process for each in children if each is not None and each.process.poll() is None]

    def _start_island(self, name: str, address: str) -> Child:
        # The relay looks up the syncer's address at every connection. A bucket has none.
        return super()._start_island(name, self.relays[split_slice(name)[0]].address if self.relays else address)

    def _start(
        self, name: str, arguments: list[str], host: int = 0, told: Mapping[str, str] = MappingProxyType({})
    ) -> Process:
        if arguments[:1] == ["learner"]:
            arguments = ["chaos-learner", *arguments[1:]]
        return super()._start(name, arguments, host, told)


def for_chaos(config: RunConfig, faults: int) -> RunConfig:
    """Return the config with enough restarts for the faults; ValueError if islands are threads of one process."""
    if config.islands.controller == "single":
        raise ValueError("`diloco chaos` kills the processes of single islands; set islands.controller to processes")
    islands = replace(config.islands, restarts_max=max(config.islands.restarts_max, 2 * faults))
    syncer = replace(config.syncer, restarts_max=max(config.syncer.restarts_max, 2 * faults))
    return replace(config, islands=islands, syncer=syncer)


def run_chaos(
    config: RunConfig, run_dir: Path, schedule: Sequence[ChaosFault], say: Callable[[str], None]
) -> dict[str, Any]:
    """Run the job to its end under the schedule, and return the verdict of `judge`; its `problems` may be empty."""
    stop = stop_on_signals()
    # Processes that start inherit this, so that an order does not end a slice before it can read orders.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    run = ChaosRun(config, run_dir, say, stop)
    saboteur = Saboteur(run_dir, run, run.relays)
    islands, steps, silence_s = config.islands.names, config.planned_steps, config.protocol.silence_s
    driver = Driver(schedule, islands, steps, silence_s, run_dir, run, saboteur, say)
    if not run.relays:
        say("the address is a bucket, so faults are kills, pauses, wrong values and full disks, and none of a link")
    say(f"run folder {run_dir}, logs in {run_dir / LOGS}, {len(schedule)} faults")
    return run_under(driver, run, config, run_dir, say, stop)


def run_under(
    driver: Driver, run: ChaosRun, config: RunConfig, run_dir: Path, say: Callable[[str], None], stop: threading.Event
) -> dict[str, Any]:
    """Run a job to its end while a driver inflicts faults; return the same as `run_chaos`."""
    problems, over = [], threading.Event()

    def drive() -> None:
        try:
            driver.run(over)
        except Exception as error:
            # An error of this thread must not be lost.
            problems.append(f"the faults ended early: {error!r}")
            stop.set()

    thread = threading.Thread(target=drive, name="chaos")
    thread.start()
    try:
        run.run()
    except RunFailed as error:
        problems.append(str(error))
    finally:
        over.set()
        thread.join(DRIVER_STOP_S)
        run.close()
    driver.conclude()
    path = run_dir / SUMMARY_FILE
    summary = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    samples: dict[str, Any] = {}
    if summary:
        say(f"report {write_report(run_dir)}")
    try:
        samples = audit(run_dir, config.protocol, config.train.steps, config.budget)
    except (ValueError, OSError) as error:
        problems.append(f"the tapes cannot be audited: {error}")
    result = judge(driver.ledger, run_dir, driver.inflicted, driver.skipped, summary, samples)
    return result | {"problems": [*problems, *result["problems"]]}
