"""Several islands in one process: a sub-mesh and a thread for each, for a controller that sees several slices.

An island's thread runs the same code as an island's process (learner/run.py), so the rest of the program needs no
special case. If a thread fails, it restarts as a new incarnation on the same devices, and the others continue. A
failure of the whole process, such as an abort of XLA, ends all islands.

On emulated devices no thread may leave several programs of more than one device in flight: they share one thread pool,
and their rendezvous could starve each other. So a learner waits for each of its steps, and the supervisor makes the
pool large enough for all devices (run.child_environment).
"""

import gc
import importlib
import logging
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import jax

from diloco_jax.runtime.learner.joined import Joining, island_pulse
from diloco_jax.runtime.learner.run import LearnerRun
from diloco_jax.runtime.local.processes import BRIEF_S, pause_s
from diloco_jax.runtime.local.run import next_incarnation
from diloco_jax.runtime.records.status import complete, last_state
from diloco_jax.settings.run import RunConfig

POLL_S = 0.1
PATHWAYS = "pathwaysutils"

log = logging.getLogger(__name__)


def use_pathways() -> None:
    """Let JAX find the devices of Pathways, before it looks for others; ValueError if the package is not installed."""
    try:
        module = importlib.import_module(PATHWAYS)
    except ImportError:
        raise ValueError(
            f"islands.pathways is set, but the package {PATHWAYS} is not installed: install it where `diloco islands` "
            "runs, or set islands.pathways to false"
        ) from None
    module.initialize()


def split_devices(config: RunConfig, devices: Sequence[jax.Device]) -> dict[str, list[jax.Device]]:
    """Assign devices to islands: a slice each if there are as many slices as islands, else consecutive devices.

    ValueError if the islands cannot share the devices, or if a slice differs from the config's.
    """
    names = config.islands.names
    slices: dict[int, list[jax.Device]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
    if len(slices) > 1 and len(slices) != len(names):
        raise ValueError(
            f"JAX sees {len(slices)} slices, but there are {len(names)} islands; set islands.count to {len(slices)}"
        )
    if len(slices) > 1:
        groups = [slices[index] for index in sorted(slices)]
    else:
        groups = _consecutive(config, devices)
    for name, group in zip(names, groups, strict=True):
        topology = config.island(name).slice
        if topology and topology.devices != len(group):
            raise ValueError(
                f"{name} is to have {topology}, {topology.devices} devices, but gets {len(group)}; "
                "correct islands.topology or islands.each"
            )
    return dict(zip(names, groups, strict=True))


def _consecutive(config: RunConfig, devices: Sequence[jax.Device]) -> list[list[jax.Device]]:
    names = config.islands.names
    wanted = [config.island(name).devices for name in names]
    if not all(wanted):  # auto
        if len(devices) % len(names):
            raise ValueError(
                f"{len(names)} islands cannot share {len(devices)} devices equally; correct islands.count, or set "
                "islands.devices"
            )
        wanted = [len(devices) // len(names)] * len(names)
    if sum(wanted) > len(devices):
        raise ValueError(
            f"the islands want {sum(wanted)} devices, but JAX sees {len(devices)}; lower islands.devices or set "
            f"JAX_NUM_CPU_DEVICES={sum(wanted)}"
        )
    starts = [sum(wanted[:index]) for index in range(len(names))]
    return [list(devices[start : start + count]) for start, count in zip(starts, wanted, strict=True)]


class _Failure(NamedTuple):
    why: str
    # Another attempt would fail as well.
    final: bool


@dataclass(eq=False)
class IslandsRun:
    """All islands of a run in this process, on all devices by default; ValueError if they cannot share them."""

    config: RunConfig
    run_dir: Path
    # The syncer listens here.
    address: str
    stop: threading.Event
    devices: Sequence[jax.Device] | None = None
    kind: type[LearnerRun] = LearnerRun

    def __post_init__(self) -> None:
        self._devices = split_devices(self.config, jax.devices() if self.devices is None else self.devices)
        self._lock = threading.Lock()
        # Island -> event that ends its present incarnation.
        self._lives: dict[str, threading.Event] = {}
        self._outcomes: dict[str, Literal["left", "failed"]] = {}
        self._reasons: dict[str, str] = {}

    def run(self) -> None:
        """Train until all islands have left, or until stopped; ValueError with reasons if too many failed for good."""
        threads = [threading.Thread(target=self._run_island, args=(name,), name=name) for name in self._devices]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            self.stop.wait(POLL_S)
            if self.stop.is_set() or self._hopeless():
                self.stop.set()
                with self._lock:
                    for life in self._lives.values():
                        life.set()
                for thread in threads:
                    thread.join()
        if self._hopeless():
            raise ValueError("; ".join(f"{name} failed: {why}" for name, why in sorted(self._reasons.items())))

    def _hopeless(self) -> bool:
        """Tell whether no round can ever be merged again. An island that was drained may return."""
        alive = len(self._devices) - len(self._outcomes)
        lost = "failed" in self._outcomes.values() and alive < self.config.protocol.quorum
        return lost and not complete(self.run_dir)

    def _run_island(self, name: str) -> None:
        """Run one incarnation after another, as the body of an island's thread."""
        wait_s, brief = 0.0, 0
        for _ in range(self.config.islands.restarts_max + 1):
            if self.stop.wait(wait_s):
                return
            began_s = time.monotonic()
            failure = self._run_incarnation(name)
            brief = brief + 1 if time.monotonic() - began_s < BRIEF_S else 1
            wait_s = pause_s(self.config.islands.restart_delay_s, brief)
            if failure is None or last_state(self.run_dir) == "complete":
                self._outcomes[name] = "left"
                return
            self._reasons[name] = failure.why
            if failure.final:
                break
        self._outcomes[name] = "failed"

    def _run_incarnation(self, name: str) -> _Failure | None:
        """Run one incarnation; return its failure, without references to its arrays on the devices."""
        life = threading.Event()
        with self._lock:
            self._lives[name] = life
            if self.stop.is_set():
                life.set()
        try:
            incarnation, devices = next_incarnation(self.run_dir, name), self._devices[name]
            with closing(island_pulse(self.config, self.run_dir, name)) as pulse:
                joining = Joining(self.config, name, incarnation, self.address, self.run_dir, pulse)
                log.info(f"{name}: {self.kind(joining, life, devices=devices).run()}")
            return None
        except ValueError as error:
            # Another attempt would fail on the same setting.
            log.error(f"{name} is not started again: {error}")
            return _Failure(str(error), final=True)
        except Exception as error:
            log.exception(f"{name} failed")
            return _Failure(f"{type(error).__name__}: {error}", final=False)
        finally:
            # The other threads of the incarnation end too.
            life.set()
            gc.collect()
