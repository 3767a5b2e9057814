"""Pairs of blocks of steps, with and without the measured activity: options, clocks and the summary.

The benches `overhead`, `join`, `donor` and `saving` use it. Both blocks of a pair run one after another in one process,
so that other load disturbs both equally; a ratio is taken within each pair.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
START_WAIT_S = 300


class Costs(NamedTuple):
    """Seconds of one step: on the clock, of the process's processor time, and of the stepping thread's."""

    wall_s: float
    process_s: float
    thread_s: float = 0.0


class Pair(NamedTuple):
    """A block with the measured activity, and the block without it that ran next to it."""

    measured: Costs
    alone: Costs


def add_options(parser: argparse.ArgumentParser, *, batch_size: int, pairs: int, steps: int) -> None:
    """Add the options that all benches of blocks share."""
    parser.add_argument("--dim", type=int, default=256, help="width of the decoder")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=batch_size)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=pairs, help="pairs of blocks")
    parser.add_argument("--steps", type=int, default=steps, help="steps in each block")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def decoder_args(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return `model.args` of the decoder that the options describe."""
    dim = arguments.dim
    args = {"dim": dim, "num_layers": arguments.layers, "num_heads": 4, "num_kv_heads": 4, "head_dim": dim // 4}
    return args | {"mlp_dim": 4 * dim, "seq_len_max": arguments.seq_len, "activation": "relu2"}


def emulate(devices: int) -> None:
    """Give this process emulated devices; JAX must not be imported yet."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "NPROC": "16"}


def restart_with_huge_pages() -> None:
    """Restart this program with the allocator's setting of islands, which a process reads only at its start."""
    os.environ["PYTHONPATH"] = str(ROOT)
    if "GLIBC_TUNABLES" not in os.environ:
        os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        os.execv(sys.executable, [sys.executable, *sys.argv])


@contextlib.contextmanager
def running_syncer(config_path: Path, config: Any, nice: int) -> Iterator[str]:
    """Run a syncer of this config in another process, in the config's folder, and yield its address.

    Raises:
        SystemExit: the syncer ended, or did not listen within START_WAIT_S.
    """
    from diloco_jax.runtime.local.run import child_environment

    folder = config_path.parent
    command = ["nice", "-n", str(nice), sys.executable, "-m", "diloco_jax"]
    command += ["syncer", str(config_path), "--run-dir", str(folder)]
    # This environment makes the syncer end when this process does.
    syncer = subprocess.Popen(command, env=child_environment(config, "syncer"), stdout=subprocess.DEVNULL)
    try:
        ends_s, address = time.monotonic() + START_WAIT_S, folder / "syncer.address"
        while not address.exists():
            if syncer.poll() is not None or time.monotonic() > ends_s:
                raise SystemExit(f"the syncer does not listen; its exit status is {syncer.poll()}")
            time.sleep(0.2)
        yield address.read_text(encoding="utf-8")
    finally:
        syncer.terminate()
        syncer.wait()


def clocks() -> Costs:
    """Read the three clocks."""
    return Costs(time.perf_counter(), time.process_time(), time.thread_time())


def costs_of_steps(readings: Sequence[Costs]) -> Costs:
    """Return the median wall time between readings, the mean processor time, and the median of the thread."""
    wall, process, thread = ([b[i] - a[i] for a, b in pairwise(readings)] for i in range(3))
    return Costs(statistics.median(wall), statistics.mean(process), statistics.median(thread))


def summary(name: str, unit: str, pairs: Sequence[Pair], **more: Any) -> dict[str, Any]:
    """Summarise pairs: the median ratio of wall and of processor time with their spread, and further figures.

    `thread_value` is the additional processor time of the stepping thread, as a share of a step's wall time.
    """
    wall = [pair.measured.wall_s / pair.alone.wall_s for pair in pairs]
    process = [pair.measured.process_s / pair.alone.process_s for pair in pairs]
    thread = [(pair.measured.thread_s - pair.alone.thread_s) / pair.alone.wall_s for pair in pairs]
    return {
        "name": name,
        "value": statistics.median(wall),
        "unit": unit,
        "low": min(wall),
        "high": max(wall),
        "runs": len(pairs),
        "cpu_value": statistics.median(process),
        "cpu_low": min(process),
        "cpu_high": max(process),
        "thread_value": statistics.median(thread),
        "step_s": statistics.median(pair.alone.wall_s for pair in pairs),
        "cpu_s": statistics.median(pair.alone.process_s for pair in pairs),
        **more,
    }
