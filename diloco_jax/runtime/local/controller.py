"""Several islands in one process: a sub-mesh and a thread for each, for a controller that sees several slices.

An island's thread runs the same code as an island's process (learner/run.py), so the rest of the program needs no
special case. If a thread fails, it restarts as a new incarnation on the same devices, and the others continue. A
failure of the whole process, such as an abort of XLA, ends all islands.

On emulated devices no thread may leave several programs of more than one device in flight: they share one thread pool,
and their rendezvous could starve each other. So a learner waits for each of its steps, and the supervisor makes the
pool large enough for all devices (run.child_environment).
"""

import gc
import logging
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import jax

from diloco_jax.protocol.bans import BANNED
from diloco_jax.protocol.messages import RUN_COMPLETE
from diloco_jax.runtime.learner.joined import Joining, island_pulse
from diloco_jax.runtime.learner.run import LearnerRun
from diloco_jax.runtime.local.pathways import WAITS, LentSlices, Wait
from diloco_jax.runtime.local.processes import BRIEF_S, STEADY_S, pause_s
from diloco_jax.runtime.local.run import next_incarnation
from diloco_jax.runtime.records.status import complete, last_state
from diloco_jax.settings.run import RunConfig

POLL_S = 0.1

log = logging.getLogger(__name__)


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
    # The island's slice may have been taken away.
    slice_lost: bool = False


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
    # Set on Pathways, which may take slices away.
    slices: LentSlices | None = None

    def __post_init__(self) -> None:
        self._devices = split_devices(self.config, jax.devices() if self.devices is None else self.devices)
        self._lock = threading.Lock()
        # Island -> event that ends its present incarnation.
        self._stops: dict[str, threading.Event] = {}
        self._outcomes: dict[str, Literal["left", "failed"]] = {}
        self._reasons: dict[str, str] = {}
        # The syncer ended the run. Only an island that runs gets this message.
        self._complete = False

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
                    for stop in self._stops.values():
                        stop.set()
                for thread in threads:
                    thread.join()
        if self._hopeless():
            raise ValueError("; ".join(f"{name} failed: {why}" for name, why in sorted(self._reasons.items())))

    def _hopeless(self) -> bool:
        """Tell whether no round can ever be merged again. An island that was drained may return."""
        alive = len(self._devices) - len(self._outcomes)
        lost = "failed" in self._outcomes.values() and alive < self.config.protocol.quorum
        return lost and not (self._complete or complete(self.run_dir))

    def _run_island(self, name: str) -> None:
        """Run one incarnation after another, as the body of an island's thread."""
        wait_s, brief, failures = 0.0, 0, 0
        while failures <= self.config.islands.restarts_max:
            if self.stop.wait(wait_s):
                return
            began_s = time.monotonic()
            failure = self._run_incarnation(name)
            lived_s = time.monotonic() - began_s
            wait = self._await_slice(name) if failure is not None and failure.slice_lost else "there"
            if failure is None or self._over():
                self._outcomes[name] = "left"
                return
            self._reasons[name] = failure.why
            if wait == "away":
                self._reasons[name] = f"its slice did not return within {self.config.islands.slice_wait_s:.0f} s"
                self._reasons[name] += ", islands.slice_wait_s"
            if failure.final or wait == "away":
                break
            if wait == "back":
                wait_s = 0.0
                continue
            failures = 1 + (0 if lived_s > STEADY_S else failures)
            brief = brief + 1 if lived_s < BRIEF_S else 1
            wait_s = pause_s(self.config.islands.restart_delay_s, brief)
        self._outcomes[name] = "failed"

    def _over(self) -> bool:
        return self._complete or last_state(self.run_dir) == "complete"

    def _await_slice(self, name: str) -> Wait:
        """Wait for the slice of an island; a slice that was there all the time did not cause the failure."""
        assert self.slices is not None, "only Pathways takes slices away"
        devices, patience_s = self._devices[name], self.config.islands.slice_wait_s
        log.warning(f"{name} {WAITS} of {len(devices)} devices, for at most {patience_s:.0f} s")
        began_s = time.monotonic()
        with closing(island_pulse(self.config, self.run_dir, name)) as pulse:
            pulse.phase(WAITS)
            pulse.rest()
            wait = self.slices.wait(devices, patience_s, lambda: self.stop.is_set() or self._over())
        log.info(f"the slice of {name} is {wait} after {time.monotonic() - began_s:.1f} s")
        return wait

    def _run_incarnation(self, name: str) -> _Failure | None:
        """Run one incarnation; return its failure, without references to its arrays on the devices."""
        stop = threading.Event()
        with self._lock:
            self._stops[name] = stop
            if self.stop.is_set():
                stop.set()
        try:
            incarnation, devices = next_incarnation(self.run_dir, name), self._devices[name]
            with closing(island_pulse(self.config, self.run_dir, name)) as pulse, jax.default_device(devices[0]):
                joining = Joining(self.config.of_island(name), name, incarnation, self.address, self.run_dir, pulse)
                reason = self.kind(joining, stop, devices=devices, explain=self._explain).run()
            self._complete = self._complete or reason == RUN_COMPLETE
            log.info(f"{name}: {reason}")
            return None
        except Exception as error:
            if BANNED in str(error):
                # A ban is not a failure, so the other islands continue.
                log.error(f"{name} is not started again: {error}")
                return None
            slice_lost = bool(self._explain(error))
            if isinstance(error, ValueError) and not slice_lost:
                # Another attempt would fail on the same setting.
                log.error(f"{name} is not started again: {error}")
                return _Failure(str(error), final=True)
            log.exception(f"{name} failed")
            return _Failure(f"{type(error).__name__}: {error}", final=False, slice_lost=slice_lost)
        finally:
            # The other threads of the incarnation end too.
            stop.set()
            gc.collect()

    def _explain(self, error: Exception) -> str:
        """Return the reason of the goodbye of an island that failed; "" if nothing is known."""
        return WAITS if self.slices is not None and self.slices.caused(error) else ""
