"""Measure the speed of a round's arithmetic beside the speed of memory, and beside tsugi-mend.

The job has 4 learners and one fragment of 16 float32 tensors (256 MB), int4 in and out, radial-directional averaging,
and Nesterov 0.9 with error feedback. The time covers all arithmetic of a round (inspect, then update with digests), on
all cores, with warm buffers as in a run.

The bound is the time for the least bytes that must move (payloads in once; value, trace and residual in and out; the
delta out) at the rate of a copy. The copy has as many arrays of the same sizes, in the same chunks, with the same
threads. Copy, merge and tsugi-mend take turns. `value` is the median of bound / time; 1 is the speed of a copy.

tsugi-mend 0.1.5 (PyTorch) has no comparable syncer, so this bench combines its functions: `quant4_decode` of every
value in blocks of 256, `token_weighted_merge` (an average, its only merge), torch.optim.SGD with Nesterov's momentum,
`quant4_compress_delta` with error feedback, and the sum. It computes no products and no digests. The first start makes
its environment in .bench/mend. `mend_ratio` is its time over the time here, and `mend_merge_ratio` is the time of its
`token_weighted_merge` alone, from decoded values, over the time here.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from environments import python_with

from diloco_jax.core.layout import Layout, Piece, make_layout
from diloco_jax.core.merge import Rule
from diloco_jax.core.outer import Nesterov
from diloco_jax.core.passes import Merger, Values

ROOT = Path(__file__).resolve().parent.parent.parent
PINS = ("torch==2.13.0", "tsugi-mend==0.1.5")
LEARNERS, TENSORS = 4, 16
WARM_UP = 3
STATE_ARRAYS = 3  # value, trace, residual


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--mbytes", type=int, default=256, help="megabytes of the fragment in float32, a multiple of 16"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--no-mend", action="store_true", help="leave tsugi-mend out")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    size = arguments.mbytes * 2**20 // 4 // TENSORS
    with ThreadPoolExecutor(arguments.threads) as pool:
        job = Job(size, pool)
        mend = None if arguments.no_mend else Mend(size, arguments.threads)
        # A run compiles and touches its memory only once, so these rounds do not count.
        for _ in range(WARM_UP):
            job.copy_s(), job.round_s(), mend and mend.round_s()
        samples = [(job.copy_s(), job.round_s(), mend.round_s() if mend else (0.0, 0.0)) for _ in range(arguments.runs)]
    result = summary(job, samples, arguments.threads)
    if arguments.json:
        sys.stdout.write(json.dumps(result) + "\n")
        return
    sys.stdout.write(
        f"a round takes {1000 * result['round_s']:.0f} ms, {100 * result['value']:.0f} % of the copy bound "
        f"({100 * result['low']:.0f} to {100 * result['high']:.0f} %, {result['runs']} runs); "
        f"copies run at {result['copy_bytes_per_s'] / 1e9:.1f} GB/s; "
        + (f"tsugi-mend takes x {result['mend_ratio']:.1f} as long\n" if "mend_ratio" in result else "\n")
    )


class Job:
    """The merge, and a copy of as many bytes.

    Args:
        size: elements of a tensor.
        pool: threads for both.
    """

    def __init__(self, size: int, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self.layout = make_layout(Piece(f"tensor{i:02}", 0, size, (size // 256, 256)) for i in range(TENSORS))
        self._merger = Merger(self.layout, [Rule("rda", size)] * TENSORS, Nesterov(0.7, 0.9), "int4", "int4", pool.map)
        self._values = Values([random_payload(self.layout, m) for m in range(LEARNERS)], [None] * LEARNERS)
        self._state = self._merger.first(np.random.default_rng(0).standard_normal(self.layout.size, np.float32))
        # Unwritten arrays would share one page of zeros, and reading it would cost nothing.
        self._pairs = [[np.ones(self.layout.size, np.float32) for _ in range(2)] for _ in range(STATE_ARRAYS)]
        payloads = LEARNERS * self._merger.up_bytes + self._merger.down_bytes
        self.num_bytes = payloads + 2 * STATE_ARRAYS * 4 * self.layout.size

    def copy_s(self) -> float:
        """Return the seconds for the bytes of a merge at the rate of a copy."""

        def copy_leaf(number: int) -> None:
            here = self.layout.where(self.layout.leaves[number])
            for source, target in self._pairs:
                target[here] = source[here]

        taken_s = seconds(lambda: list(self._pool.map(copy_leaf, range(len(self.layout.leaves)))))
        return taken_s * self.num_bytes / (2 * STATE_ARRAYS * 4 * self.layout.size)

    def round_s(self) -> tuple[float, float]:
        """Return the seconds of `inspect` and of `update`."""
        began_s = time.perf_counter()
        products = self._merger.inspect(self._values)
        inspected_s = time.perf_counter()
        update = self._merger.update(self._values, products, np.full(LEARNERS, 1 / LEARNERS), self._state)
        done_s = time.perf_counter()
        assert update.finite
        self._state = update.state
        return inspected_s - began_s, done_s - inspected_s


def random_payload(layout: Layout, seed: int) -> np.ndarray:
    """Return int4 values like those of a learner."""
    payload = np.random.default_rng(seed + 1).integers(0, 256, layout.payload_bytes("int4"), np.uint8)
    for place in layout.places("int4"):
        payload[place.scales : place.codes].view(np.float32)[:] = 1e-3
    return payload


def seconds(work: Callable[[], Any]) -> float:
    """Return the seconds of a call."""
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


class Mend:
    """tsugi-mend in a separate process and environment.

    Args:
        size: elements of a tensor.
        threads: number of threads of PyTorch.
    """

    def __init__(self, size: int, threads: int) -> None:
        code = str(ROOT / "scripts" / "bench" / "_mend_merge.py")
        command = [str(python_with("mend", PINS)), code, str(size), str(TENSORS), str(LEARNERS), str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._ask, self._answers = self._process.stdin, self._process.stdout

    def round_s(self) -> tuple[float, float]:
        """Return the seconds of a round, and of its `token_weighted_merge` alone."""
        self._ask.write("round\n")
        self._ask.flush()
        whole, merge = self._answers.readline().split()
        return float(whole), float(merge)


def summary(job: Job, samples: list[tuple[float, tuple[float, float], tuple[float, float]]], threads: int) -> dict:
    """Return the medians of all runs."""
    shares = [bound / sum(own) for bound, own, _ in samples]
    result = {
        "name": "merge",
        "value": statistics.median(shares),
        "unit": "share of the copy bound",
        "low": min(shares),
        "high": max(shares),
        "runs": len(shares),
        "threads": threads,
        "bytes": job.num_bytes,
        "copy_bytes_per_s": job.num_bytes / statistics.median(bound for bound, _, _ in samples),
        "inspect_s": statistics.median(own[0] for _, own, _ in samples),
        "update_s": statistics.median(own[1] for _, own, _ in samples),
        "round_s": statistics.median(sum(own) for _, own, _ in samples),
    }
    if samples[0][2][0]:
        for name, index in (("mend_ratio", 0), ("mend_merge_ratio", 1)):
            ratios = [other[index] / sum(own) for _, own, other in samples]
            result |= {name: statistics.median(ratios), f"{name}_low": min(ratios), f"{name}_high": max(ratios)}
        result["mend_s"] = statistics.median(other[0] for _, _, other in samples)
    return result


if __name__ == "__main__":
    main()
