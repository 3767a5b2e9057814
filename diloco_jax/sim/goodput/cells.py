"""Many simulations at once: cells of a table, on as many processes as wanted."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from typing import NamedTuple

from diloco_jax.sim.goodput.methods import Cell, Row, expected, simulate
from diloco_jax.sim.goodput.settings import compact

Say = Callable[[str], None]
WORKERS_MAX = 256
TELL_EVERY_S = 5.0


class Result(NamedTuple):
    """Result of a cell."""

    cell: Cell
    row: Row
    cpu_s: float


def run_cell(cell: Cell, on_share: Callable[[float], None] | None = None) -> Result:
    """Run one simulation; `cpu_s` is this process's time for it."""
    began_s = time.process_time()
    row = expected(cell) if cell.fast else simulate(cell, on_share)
    return Result(cell, row, time.process_time() - began_s)


def run_cells(cells: Sequence[Cell], workers: int, say: Say) -> list[Result]:
    """Run all cells, and return the results in their order.

    Args:
        workers: processes; 1 simulates in this one, 0 takes one for each core.

    Raises:
        ValueError: a cell that cannot be simulated, or a senseless number of workers.
    """
    if not 0 <= workers <= WORKERS_MAX:
        raise ValueError(f"--workers is {workers}; use 1 to {WORKERS_MAX}, or 0 for one on each core")
    workers = min(workers or os.cpu_count() or 1, len(cells))
    results: dict[int, Result] = {}
    began_s = time.monotonic()
    count = count_of(len(cells))
    say(f"{count} on {workers} processes" if workers > 1 else count)
    for number, result in _one_by_one(cells, say) if workers <= 1 else _side_by_side(cells, workers):
        results[number] = result
        say(f"{len(results)} of {len(cells)} after {time.monotonic() - began_s:.0f} s: {_describe(result)}")
    return [results[number] for number in range(len(cells))]


def count_of(simulations: int) -> str:
    """Write a number as people say it."""
    return f"{simulations} simulation" + "s" * (simulations != 1)


def _describe(result: Result) -> str:
    row = result.row
    who = f"{row.learners} learner" + "s" * (row.learners != 1)
    return f"{row.method}, {who}, {compact(row.chips)} chips: goodput {row.goodput:.1%}"


def _one_by_one(cells: Sequence[Cell], say: Say) -> Iterator[tuple[int, Result]]:
    told_s = time.monotonic()

    def on_share(share: float) -> None:
        nonlocal told_s
        if time.monotonic() - told_s > TELL_EVERY_S:
            told_s = time.monotonic()
            say(f"  {share:.0%} of number {number + 1}")

    for number, cell in enumerate(cells):
        yield number, run_cell(cell, on_share)


def _side_by_side(cells: Sequence[Cell], workers: int) -> Iterator[tuple[int, Result]]:
    """Yield results in the order in which they come; the longest simulations begin first."""
    longest = sorted(range(len(cells)), key=lambda n: -cells[n].learners * cells[n].hours * (not cells[n].fast))
    with _pool(workers) as pool:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # for processes that only begin
        try:
            numbers = {pool.submit(run_cell, cells[number]): number for number in longest}
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for done in as_completed(numbers):
            yield numbers[done], done.result()


def _begin_worker() -> None:
    """Let an interrupt end this process, and the end of the parent, however that came."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a shell's background job: the parent ignores it too
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is a worker's"
    parent.join()
    os._exit(1)


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Open a pool whose processes do not outlive an interrupt or an error."""
    fresh = multiprocessing.get_context("spawn")  # a caller may have JAX's threads, which a fork would leave behind
    pool = ProcessPoolExecutor(workers, fresh, initializer=_begin_worker)
    try:
        yield pool
    except BaseException:
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
