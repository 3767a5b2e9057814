"""`diloco simulate`: its arguments become cells, and the results of the cells become a table or JSON."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from diloco_jax.protocol.pacing import LEARNERS_MAX_LIMIT, ProtocolConfig
from diloco_jax.sim.goodput.hardware import Hardware, check_cluster
from diloco_jax.sim.goodput.methods import HOUR_S, METHODS, Cell, Row, Wan, expected, simulate
from diloco_jax.sim.goodput.settings import compact, number, read
from diloco_jax.sim.tapes import check_folder

Say = Callable[[str], None]
WORKERS_MAX = 256
SAY_EVERY_S = 5.0
SECTIONS = {"hardware": Hardware, "wan": Wan, "protocol": ProtocolConfig}
LEARNERS = (2, 4, 8, 16)
CHIPS = ("150k", "300k", "600k", "1.2m", "2.4m")
HOURS = 24.0
CELLS_MAX = 10_000
FRAGMENTS_MAX = 10_000
HOURS_MAX = 24.0 * 366
# More steps of all learners together would take hours to simulate.
STEPS_MAX = 1e9


class Result(NamedTuple):
    """Result of a cell."""

    cell: Cell
    row: Row
    cpu_s: float


def run_cell(cell: Cell, on_share: Callable[[float], None] | None = None) -> Result:
    """Run one simulation; `cpu_s` of its result is the processor time of this process."""
    began_s = time.process_time()
    row = expected(cell) if cell.fast else simulate(cell, on_share)
    return Result(cell, row, time.process_time() - began_s)


def run_cells(cells: Sequence[Cell], workers: int, say: Say) -> list[Result]:
    """Run all cells in this many processes (0: one per core), and return their results in order."""
    if not 0 <= workers <= WORKERS_MAX:
        raise ValueError(f"--workers is {workers}; use 1 to {WORKERS_MAX}, or 0 for one on each core")
    workers = min(workers or os.cpu_count() or 1, len(cells))
    results: dict[int, Result] = {}
    began_s = time.monotonic()
    count = count_of(len(cells))
    say(f"{count} on {workers} processes" if workers > 1 else count)
    for place, result in _one_by_one(cells, say) if workers <= 1 else _side_by_side(cells, workers):
        results[place] = result
        say(f"{len(results)} of {len(cells)} after {time.monotonic() - began_s:.0f} s: {_describe(result)}")
    return [results[place] for place in range(len(cells))]


def count_of(simulations: int) -> str:
    """Write a number of simulations in words, such as "1 simulation"."""
    return f"{simulations} simulation" + "s" * (simulations != 1)


def _describe(result: Result) -> str:
    row = result.row
    who = f"{row.learners} learner" + "s" * (row.learners != 1)
    return f"{row.method}, {who}, {compact(row.chips)} chips: goodput {row.goodput:.1%}"


def _one_by_one(cells: Sequence[Cell], say: Say) -> Iterator[tuple[int, Result]]:
    said_s = time.monotonic()

    def on_share(share: float) -> None:
        nonlocal said_s
        if time.monotonic() - said_s > SAY_EVERY_S:
            said_s = time.monotonic()
            say(f"  {share:.0%} of number {place + 1}")

    for place, cell in enumerate(cells):
        yield place, run_cell(cell, on_share)


def _side_by_side(cells: Sequence[Cell], workers: int) -> Iterator[tuple[int, Result]]:
    """Yield results as they come; the longest simulations start first."""
    longest = sorted(range(len(cells)), key=lambda n: -cells[n].learners * cells[n].hours * (not cells[n].fast))
    with _pool(workers) as pool:
        # Processes that are starting would print a traceback after an interrupt.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            places = {pool.submit(run_cell, cells[place]): place for place in longest}
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for done in as_completed(places):
            yield places[done], done.result()


def _begin_worker() -> None:
    """Make this process end after an interrupt, and after any end of its parent."""
    # In a background job of a shell the parent ignores the interrupt too.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "only worker processes call this"
    parent.join()
    os._exit(1)


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Open a pool whose processes end after an interrupt or an error."""
    # A caller may have threads of JAX, which do not survive a fork.
    fresh = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, fresh, initializer=_begin_worker)
    try:
        yield pool
    except BaseException:
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the command line; None means the default."""

    methods: Sequence[str] | None = None
    learners: Sequence[int] | None = None
    chips: Sequence[str] | None = None
    hours: float | None = None
    seed: int = 0
    workers: int | None = None
    fast: bool = False
    tapes: Path | None = None
    overrides: Sequence[str] = ()


def read_shared(overrides: Sequence[str], *, seed: int, fast: bool, hours: float | None) -> dict[str, Any]:
    """Return the settings that all cells of a command line share; ValueError names a wrong one."""
    if hours is not None and not 0 < hours <= HOURS_MAX:
        raise ValueError(f"--hours is {hours:g}; simulate more than 0 and at most {HOURS_MAX:g}")
    given = {} if hours is None else {"hours": hours}
    return {**read(overrides, SECTIONS), "seed": seed, "fast": fast, **given}


def plan_cells(options: Options) -> list[Cell]:
    """Return the cells of a command line; ValueError for a cell that cannot be simulated."""
    shared = read_shared(options.overrides, seed=options.seed, fast=options.fast, hours=options.hours)
    cells = _cross(options, {"hours": HOURS} | shared)
    for each in cells:
        _check_cell(each)
    return cells if options.tapes is None else [_taped(cells, options.tapes)]


def _check_cell(each: Cell) -> None:
    """Refuse, with ValueError, a cell that would take too long or show nothing."""
    learners = each.learners if each.method in ("sync", "decoupled") else 1
    check_cluster(each.hardware, learners, each.chips)
    every_s = min(each.hardware.step_s, each.protocol.heartbeat_s)
    steps = learners * each.hours * HOUR_S / every_s
    if steps > STEPS_MAX:
        raise ValueError(
            f"{each.hours:g} hours of {learners} learners are {steps:.3g} steps or heartbeats, more than "
            f"{STEPS_MAX:.0e}; simulate fewer --hours, or longer steps (--hardware.step-s)"
        )
    if not each.fast and each.method in ("sync", "decoupled"):
        for name, asked, most in (
            ("--learners", learners, LEARNERS_MAX_LIMIT),
            ("--protocol.num-fragments", each.protocol.num_fragments, FRAGMENTS_MAX),
        ):
            if asked > most:
                raise ValueError(f"{name} is {asked}; the protocol's machines run with at most {most}, or use --fast")
    if each.method == "decoupled" and each.fast and each.protocol.wait_steps:
        raise ValueError(
            f"--protocol.wait-steps is {each.protocol.wait_steps}, but --fast leaves out the machines that wait; leave "
            "--fast out, or set it to 0"
        )
    if each.hours * HOUR_S < each.hardware.step_s:
        raise ValueError(
            f"{each.hours:g} hours are shorter than one step of {each.hardware.step_s:g} s; simulate more --hours, or "
            "shorter steps (--hardware.step-s)"
        )
    if each.method == "decoupled" and not each.fast and each.protocol.quorum > learners:
        raise ValueError(
            f"--protocol.quorum is {each.protocol.quorum}, but {learners} learners would never "
            f"merge a round; use at most {learners}, or more --learners"
        )


def _cross(options: Options, shared: dict[str, Any]) -> list[Cell]:
    """Combine every method with every number of chips, and with every number of learners if it has learners."""
    methods = dict.fromkeys(METHODS if options.methods is None else options.methods)
    many = dict.fromkeys(LEARNERS if options.learners is None else options.learners)
    sizes = dict.fromkeys(number(text, "--chips") for text in (CHIPS if options.chips is None else options.chips))
    unknown = sorted(set(methods) - set(METHODS))
    if unknown:
        raise ValueError(f"the method {', '.join(unknown)} does not exist; choose from {', '.join(METHODS)}")
    cells: list[Cell] = []
    for method in methods:
        learners = (1,) if method in ("rigid", "elastic") else many
        cells += [Cell(method=method, learners=each, chips=chips, **shared) for each, chips in product(learners, sizes)]
    if len(cells) > CELLS_MAX:
        raise ValueError(f"{len(cells)} simulations, more than {CELLS_MAX}; ask for fewer methods, learners or chips")
    return cells


def _taped(cells: Sequence[Cell], folder: Path) -> Cell:
    if len(cells) != 1 or cells[0].fast or cells[0].method in ("rigid", "elastic"):
        raise ValueError(
            f"--tapes writes the tapes of one run of the protocol, not of {count_of(len(cells))}; name one method "
            "(sync or decoupled), one number of learners and one of chips, and leave --fast out"
        )
    check_folder(folder)
    return replace(cells[0], tapes=folder)


def run(options: Options, say: Say) -> tuple[dict[str, Any], str]:
    """Simulate, and return the object of `--json` and a table; ValueError for a cell that cannot be simulated."""
    cells = plan_cells(options)
    began_s = time.monotonic()
    results = run_cells(cells, options.workers or 0, say)
    wall_s = time.monotonic() - began_s
    events = sum(result.row.events for result in results)
    rows = [result.row._asdict() | {"hours": result.cell.hours} for result in results]
    summary: dict[str, Any] = {"rows": rows, "seed": options.seed, "wall_s": round(wall_s, 3), "events": events}
    return summary, f"{table(results)}\n{count_of(len(results))}, {events} events, seed {options.seed}, {wall_s:.1f} s"


def table(results: Sequence[Result]) -> str:
    """Return the results as a table."""
    lines = [
        f"{'method':<10} {'learners':>8} {'chips':>8} {'hours':>6} {'goodput':>8} {'uptime':>8} {'contributors':>13} "
        f"{'rounds':>8}"
    ]
    for which, row, _ in results:
        contributors = "-" if row.contributors_per_round is None else f"{row.contributors_per_round:.2f}"
        lines.append(
            f"{row.method:<10} {row.learners:>8} {compact(row.chips):>8} {which.hours:>6g} {row.goodput:>8.1%} "
            f"{row.uptime:>8.1%} {contributors:>13} {row.rounds:>8}"
        )
    return "\n".join(lines)
