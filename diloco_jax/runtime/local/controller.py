"""Several islands in one process: a sub-mesh and a thread for each, for a controller that sees several slices.

An island's thread runs what an island's process would (learner/run.py), so nothing else knows the difference. If it
fails, it starts again as a new incarnation on the same devices; the others go on. What takes the whole process, such as
an abort of XLA, takes all islands.

On emulated devices no thread may leave several programs of more than one device in flight: they share one thread pool,
in which their rendezvous could starve one another. A learner waits for each of its steps, and the supervisor sizes the
pool for all devices (local.child_environment).
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
    """Let JAX see the devices of Pathways, before it looks for any; ValueError if its package is not installed."""
    try:
        module = importlib.import_module(PATHWAYS)
    except ImportError:
        raise ValueError(
            f"islands.pathways is set, but the package {PATHWAYS} is not installed: install it where `diloco islands` "
            "runs, or set islands.pathways to false"
        ) from None
    module.initialize()


def split_devices(config: RunConfig, devices: Sequence[jax.Device]) -> dict[str, list[jax.Device]]:
    """Share out the devices: each island gets a slice, if there are as many as islands; else consecutive ones.

    ValueError if the islands cannot share them, or a slice is not the one that the config names.
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
    final: bool  # another attempt would fail as well


@dataclass(eq=False)
class IslandsRun:
    """All islands of a run in this process, on all devices by default; ValueError if they cannot share them."""

    config: RunConfig
    run_dir: Path
    address: str  # where the syncer listens
    stop: threading.Event
    devices: Sequence[jax.Device] | None = None
    kind: type[LearnerRun] = LearnerRun

    def __post_init__(self) -> None:
        self._devices = split_devices(self.config, jax.devices() if self.devices is None else self.devices)
        self._lock = threading.Lock()
        self._lives: dict[str, threading.Event] = {}  # island -> what ends its present life
        self._outcomes: dict[str, Literal["left", "failed"]] = {}
        self._reasons: dict[str, str] = {}

    def run(self) -> None:
        """Train until every island has left, or until stopped; ValueError, with why, if too many failed for good."""
        threads = [threading.Thread(target=self._live, args=(name,), name=name) for name in self._devices]
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
        """Say whether no round can ever be merged again. An island that was drained may come back."""
        alive = len(self._devices) - len(self._outcomes)
        lost = "failed" in self._outcomes.values() and alive < self.config.protocol.quorum
        return lost and not complete(self.run_dir)

    def _live(self, name: str) -> None:
        """Live one life after the other; the body of an island's thread."""
        wait_s, brief = 0.0, 0
        for _ in range(self.config.islands.restarts_max + 1):
            if self.stop.wait(wait_s):
                return
            began_s = time.monotonic()
            failure = self._live_once(name)
            brief = brief + 1 if time.monotonic() - began_s < BRIEF_S else 1
            wait_s = pause_s(self.config.islands.restart_delay_s, brief)
            if failure is None or last_state(self.run_dir) == "complete":
                self._outcomes[name] = "left"
                return
            self._reasons[name] = failure.why
            if failure.final:
                break
        self._outcomes[name] = "failed"

    def _live_once(self, name: str) -> _Failure | None:
        """Live one incarnation; return what it failed of, and nothing that would keep its arrays on the devices."""
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
        except ValueError as error:  # a wrong setting stays wrong
            log.error(f"{name} is not started again: {error}")
            return _Failure(str(error), final=True)
        except Exception as error:
            log.exception(f"{name} failed")
            return _Failure(f"{type(error).__name__}: {error}", final=False)
        finally:
            life.set()  # its other threads end too
            gc.collect()
