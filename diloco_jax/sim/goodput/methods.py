"""Goodput and uptime of rigid and elastic data parallel, synchronous and Decoupled DiLoCo on chips that fail.

`simulate` runs the protocol's machines on virtual time for the methods that have a protocol. `expected` assumes only
that a decoupled learner never waits and a synchronous learner waits for the slowest; it is about thirty times faster.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.goodput.hardware import Hardware, Slices, cluster, goodput, uptime
from diloco_jax.sim.goodput.settings import setting
from diloco_jax.sim.network import NetworkOptions
from diloco_jax.sim.scenario import Scenario
from diloco_jax.sim.tapes import LearnerTapes

METHODS = ("rigid", "elastic", "sync", "decoupled")
HOUR_S = 3600.0
WAN_MAX = 1e15
# A run with this many global steps ends by its time.
ENDLESS = 1 << 60
# Progress is reported this many times.
PARTS = 100
# A taped run may take this many times its hours.
TAPED_MAX = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wan:
    """Settings of links between learners and syncer; synchronous learners wait for them, decoupled ones never do."""

    delay_s: float = setting(0.025, "seconds from a learner to the syncer, one way", "ours: across a continent")
    merge_s: float = setting(0.2, "mean seconds of a merge, drawn from half to 1.5 times the mean", "ours")
    fragment_bytes: float = setting(0.0, "bytes of an encoded fragment; 0: transfers take no time", "ours: see plan")
    bytes_per_s: float = setting(0.0, "rate of each link, each way; 0: transfers take no time", "ours: see plan")
    load_s: float = setting(2.0, "seconds until a learner that lost all slices has loaded a state", "ours")

    def __post_init__(self) -> None:
        for name in ("delay_s", "merge_s", "fragment_bytes", "bytes_per_s", "load_s"):
            value = getattr(self, name)
            if not 0 <= value <= WAN_MAX:
                raise ValueError(f"--wan.{name.replace('_', '-')} is {value}, but must be 0 to {WAN_MAX:g}")

    @property
    def round_s(self) -> float:
        """Return the seconds from a round's last report to its broadcast: report, pull, value, merge, broadcast."""
        transfer_s = self.fragment_bytes / self.bytes_per_s if self.bytes_per_s else 0.0
        return 4 * self.delay_s + 2 * transfer_s + self.merge_s


@dataclass(frozen=True, slots=True)
class Cell:
    """Input of one simulation."""

    hardware: Hardware
    # One of METHODS. Rigid and elastic data parallel have one learner, whatever `learners` is.
    method: str
    # M.
    learners: int
    # The chips of all learners together.
    chips: float
    # The simulated time.
    hours: float
    seed: int = 0
    wan: Wan = field(default_factory=Wan)
    # The algorithm; a synchronous run uses only its H.
    protocol: ProtocolConfig = field(default_factory=ProtocolConfig)
    # Folder for the run's tapes, which `diloco replay` trains from. Such a run ends with the global step that a cluster
    # without failures would reach in these hours, however long that takes.
    tapes: Path | None = None
    # True: the simulation does not run the protocol's machines.
    fast: bool = False
    # The name of the simulation in a preset.
    label: str = ""


class Row(NamedTuple):
    """Figures of one method on one cluster; shares are between 0 and 1."""

    method: str
    learners: int
    chips: float
    goodput: float
    uptime: float
    # The mean number of learners in a merged round; None if no round was merged.
    contributors_per_round: float | None
    # The number of merged rounds.
    rounds: int
    learner_steps: int
    # The number of events of the simulation.
    events: int


def expected(cell: Cell) -> Row:
    """Return goodput and uptime without a protocol; ValueError for an impossible method or cluster."""
    _check(cell)
    learners = cell.learners if cell.method in ("sync", "decoupled") else 1
    parts = cluster(cell.hardware, learners, cell.chips, cell.seed, elastic=cell.method != "rigid")
    rounds, contributors, until_s = 0, None, cell.hours * HOUR_S
    if cell.method == "sync":
        contributors = float(learners)
        rounds = _run_rounds(parts, until_s, cell.protocol.groups.gap_max, cell.wan.round_s)
    else:
        for part in parts:
            run_steps(part, 0.0, until_s)
    return _row(cell, parts, until_s, contributors, rounds, sum(part.steps for part in parts))


def run_steps(part: Slices, now_s: float, until_s: float, most: int = ENDLESS) -> float:
    """Make steps without a pause from `now_s` to `until_s`, and return the end of the last one."""
    for _ in range(most):
        begin_s = part.begins_s(now_s)
        end_s = begin_s + part.takes_s()
        if end_s > until_s:
            return until_s
        part.ended(begin_s, end_s)
        now_s = end_s
    return now_s


def _run_rounds(parts: Sequence[Slices], until_s: float, sync_every: int, round_s: float) -> int:
    """Run rounds and return their number: all learners make H steps, then wait for the slowest and for the round."""
    now_s, rounds = 0.0, 0
    while now_s < until_s:
        now_s = max(run_steps(part, now_s, until_s, sync_every) for part in parts) + round_s
        rounds += now_s < until_s
    return rounds


def simulate(cell: Cell, on_share: Callable[[float], None] | None = None) -> Row:
    """Return goodput and uptime from a run of the protocol's machines, if the method has a protocol.

    Args:
      on_share: called at times with the share of the time that is simulated.

    Raises:
      ValueError: the cell cannot be simulated, its folder has tapes already, or its run with tapes does not end.
    """
    _check(cell)
    if cell.method in ("rigid", "elastic"):
        return expected(cell)
    hardware, tapes, until_s = cell.hardware, cell.tapes, cell.hours * HOUR_S
    parts = cluster(hardware, cell.learners, cell.chips, cell.seed)
    # A tape needs an end.
    total_steps = ENDLESS if tapes is None else max(1, int(until_s / hardware.step_s))
    scenario = _scenario(cell, total_steps)
    paces = dict(zip(scenario.names, parts, strict=True))
    run = Cluster(scenario, taped=tapes is not None, paces=paces)
    recorder = LearnerTapes(run) if tapes is not None else None
    if recorder is not None:
        run.watch(recorder)
    if on_share is not None:
        for part in range(1, PARTS):
            run.engine.run(until_s * part / PARTS)
            on_share(part / PARTS)
    run.run(until_s if tapes is None else TAPED_MAX * until_s)
    if recorder is not None and tapes is not None:
        if not run.complete:
            raise ValueError(
                f"the run did not reach global step {total_steps} within {TAPED_MAX:g} times {cell.hours:g} hours, so "
                "there is nothing to replay; raise --hardware.mtbi-chip-s, or lower the quorum"
            )
        recorder.save(tapes)
        until_s = run.end_s
    syncer = run.syncer
    contributors = syncer.progress.merged_parts / syncer.merged_rounds if syncer.merged_rounds else None
    return _row(cell, parts, until_s, contributors, syncer.merged_rounds, run.engine.events)


def _scenario(cell: Cell, total_steps: int) -> Scenario:
    learners, wan = cell.learners, cell.wan
    config = replace(cell.protocol, learners_max=max(cell.protocol.learners_max, learners))
    if cell.method == "sync":
        config = replace(config, quorum=learners, num_fragments=1, overlap_steps=0, wait_steps=0.0)
    network = NetworkOptions(delay_s=wan.delay_s, bandwidth_bytes_per_s=wan.bytes_per_s)
    return Scenario(
        config=config,
        learners=learners,
        total_steps=total_steps,
        network=network,
        merge_s=wan.merge_s,
        payload_bytes=round(wan.fragment_bytes),
        load_s=wan.load_s,
        seed=cell.seed,
    )


def _check(cell: Cell) -> None:
    if cell.method not in METHODS:
        raise ValueError(f"the method {cell.method!r} is unknown; choose from {', '.join(METHODS)}")
    if not 0 < cell.hours < math.inf:
        raise ValueError(f"{cell.hours} hours; simulate a finite number above 0")


def _row(
    cell: Cell, parts: Sequence[Slices], until_s: float, contributors: float | None, rounds: int, events: int
) -> Row:
    for part in parts:
        part.finish(until_s)
    shares, steps = (goodput(parts, until_s), uptime(parts, until_s)), sum(part.steps for part in parts)
    return Row(cell.method, len(parts), cell.chips, *shares, contributors, rounds, steps, events)
