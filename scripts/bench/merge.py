"""Speed of a round's arithmetic beside that of memory, and of tsugi-mend for the same.

The job: 4 learners, one fragment of 16 float32 tensors, 256 MB; int4 in and out; radial-directional averaging, Nesterov
0.9 with error feedback. Timed is all that a round does: inspect, then update with digests, on all cores, with warm
buffers as in a run.

Bound: the bytes that must move at least (payloads in once; value, trace and residual in and out; the step out) at the
rate of a copy of as many arrays, of the same sizes, cut in the same chunks, by the same threads. Copy, merge and
tsugi-mend take turns. `value` is the median of bound / time: 1 is the speed of a copy.

tsugi-mend 0.1.5 (PyTorch) has no syncer that does the same, so its own functions are put together: `quant4_decode` of
every value in blocks of 256, `token_weighted_merge` (an average; it has no other), torch.optim.SGD with Nesterov's
momentum, `quant4_compress_delta` of the step with its error feedback, and the sum; no products, no digests. Its
environment is made in .bench/mend on the first start. `mend_ratio` is its time / the time here, and
`mend_merge_ratio` that of its `token_weighted_merge` alone, from values that are already decoded.
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
    parser.add_argument("--mbytes", type=int, default=256, help="of the fragment in float32, a multiple of 16")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--no-mend", action="store_true", help="without tsugi-mend")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    size = arguments.mbytes * 2**20 // 4 // TENSORS
    with ThreadPoolExecutor(arguments.threads) as pool:
        job = Job(size, pool)
        mend = None if arguments.no_mend else Mend(size, arguments.threads)
        for _ in range(WARM_UP):  # compiling, and memory that nobody has touched, are not what a run is made of
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
    """The merge, and a copy of as much as it must move.

    Args:
        size: elements of a tensor.
        pool: of the threads.
    """

    def __init__(self, size: int, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self.layout = make_layout(Piece(f"tensor{i:02}", 0, size, (size // 256, 256)) for i in range(TENSORS))
        self._merger = Merger(self.layout, [Rule("rda", size)] * TENSORS, Nesterov(0.7, 0.9), "int4", "int4", pool.map)
        self._values = Values([random_payload(self.layout, m) for m in range(LEARNERS)], [None] * LEARNERS)
        self._state = self._merger.first(np.random.default_rng(0).standard_normal(self.layout.size, np.float32))
        # Written once: arrays that nobody wrote to share one page of zeros, and reading that costs nothing.
        self._pairs = [[np.ones(self.layout.size, np.float32) for _ in range(2)] for _ in range(STATE_ARRAYS)]
        payloads = LEARNERS * self._merger.up_bytes + self._merger.down_bytes
        self.num_bytes = payloads + 2 * STATE_ARRAYS * 4 * self.layout.size

    def copy_s(self) -> float:
        """Seconds that the bytes of a merge take at the rate of a copy."""

        def copy_leaf(number: int) -> None:
            here = self.layout.where(self.layout.leaves[number])
            for source, target in self._pairs:
                target[here] = source[here]

        taken_s = seconds(lambda: list(self._pool.map(copy_leaf, range(len(self.layout.leaves)))))
        return taken_s * self.num_bytes / (2 * STATE_ARRAYS * 4 * self.layout.size)

    def round_s(self) -> tuple[float, float]:
        """Seconds of `inspect` and of `update`."""
        began_s = time.perf_counter()
        products = self._merger.inspect(self._values)
        inspected_s = time.perf_counter()
        update = self._merger.update(self._values, products, np.full(LEARNERS, 1 / LEARNERS), self._state)
        done_s = time.perf_counter()
        assert update.finite
        self._state = update.state
        return inspected_s - began_s, done_s - inspected_s


def random_payload(layout: Layout, seed: int) -> np.ndarray:
    """int4 values that look like those of a learner."""
    payload = np.random.default_rng(seed + 1).integers(0, 256, layout.payload_bytes("int4"), np.uint8)
    for place in layout.places("int4"):
        payload[place.scales : place.codes].view(np.float32)[:] = 1e-3
    return payload


def seconds(work: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


class Mend:
    """The other side, in a process and an environment of its own.

    Args:
        size: elements of a tensor.
        threads: for PyTorch.
    """

    def __init__(self, size: int, threads: int) -> None:
        code = str(ROOT / "scripts" / "bench" / "_mend_merge.py")
        command = [str(python_with("mend", PINS)), code, str(size), str(TENSORS), str(LEARNERS), str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._ask, self._answers = self._process.stdin, self._process.stdout

    def round_s(self) -> tuple[float, float]:
        """Seconds of a round, and of `token_weighted_merge` alone in it."""
        self._ask.write("round\n")
        self._ask.flush()
        whole, merge = self._answers.readline().split()
        return float(whole), float(merge)


def summary(job: Job, samples: list[tuple[float, tuple[float, float], tuple[float, float]]], threads: int) -> dict:
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
