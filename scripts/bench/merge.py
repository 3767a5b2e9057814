"""Measure the speed of a round's arithmetic beside the speed of memory, and beside tsugi-mend.

The job has 4 learners and one fragment of 16 float32 tensors (256 MB), or as `--learners`, `--tensors` and `--mbytes`
say; with many tensors each is small. It has the same format in and out, radial-directional averaging, and Nesterov 0.9
with error feedback. The time covers all arithmetic of a round (inspect, then update with digests), on all cores, with
warm buffers as in a run.

The bound is the time for the least bytes that must move (payloads in once; value, trace and residual in and out; the
delta out) at the rate of a copy. The copy has as many arrays of the same sizes, in the same chunks, with the same
threads. Copy, the merges of all formats and tsugi-mend take turns. `value` is the median of bound / time; 1 is the
speed of a copy. `--json` prints the first format's figures, and those of the others below `formats`.

tsugi-mend 0.1.5 (PyTorch) has no comparable syncer, so this bench combines its functions: `quant4_decode` of every
value in blocks of 256, `token_weighted_merge` (an average, its only merge), torch.optim.SGD with Nesterov's momentum,
`quant4_compress_delta` with error feedback, and the sum. It computes no products and no digests. The first start makes
its environment in .bench/mend. `mend_ratio` is its time over the time here with the first format. `mend_merge_ratio` is
the time of its `token_weighted_merge` alone, from decoded values, over the time here.
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
from typing import Any, NamedTuple

import numpy as np
from environments import python_with

from diloco_jax.core.codec import Format, encode
from diloco_jax.core.layout import Layout, Piece, make_layout
from diloco_jax.core.merge import Rule
from diloco_jax.core.outer import Nesterov
from diloco_jax.core.passes import Merger, Values
from diloco_jax.runtime.model.arithmetic import FREE_MAX
from diloco_jax.runtime.model.buffers import Buffers

ROOT = Path(__file__).resolve().parent.parent.parent
PINS = ("torch==2.13.0", "tsugi-mend==0.1.5")
INTEGERS: tuple[Format, ...] = ("int8", "int4", "int2", "ternary")
FORMATS: tuple[Format, ...] = ("int4", "int2", "ternary")
WARM_UP = 3
STATE_ARRAYS = 3  # value, trace, residual


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--mbytes", type=int, default=256, help="megabytes of the fragment in float32, a multiple of 16"
    )
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--tensors", type=int, default=16, help="tensors of the fragment, each of whole rows of 256")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--formats", nargs="+", default=FORMATS, choices=INTEGERS, help="formats of the wire")
    parser.add_argument("--no-mend", action="store_true", help="leave tsugi-mend out")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    size = arguments.mbytes * 2**20 // 4 // arguments.tensors // 256 * 256
    job = Shape(size, arguments.tensors, arguments.learners)
    with ThreadPoolExecutor(arguments.threads) as pool:
        copy = Copy(job, pool)
        jobs = [Job(job, format, pool) for format in dict.fromkeys(arguments.formats)]
        mend = None if arguments.no_mend else Mend(job, arguments.threads)

        def measure() -> Sample:
            return Sample(copy.byte_s(), [job.round_s() for job in jobs], mend.round_s() if mend else None)

        # A run compiles and touches its memory only once, so these rounds do not count.
        for _ in range(WARM_UP):
            measure()
        samples = [measure() for _ in range(arguments.runs)]
    results = [summary(job, number, samples, arguments.threads) for number, job in enumerate(jobs)]
    if arguments.json:
        others = {job.format: result for job, result in zip(jobs[1:], results[1:], strict=True)}
        sys.stdout.write(json.dumps({**results[0], "formats": others}) + "\n")
        return
    for result in results:
        sys.stdout.write(
            f"{result['format']}: a round takes {1000 * result['round_s']:.0f} ms "
            f"({1000 * result['inspect_s']:.0f} to inspect), {100 * result['value']:.0f} % of the copy bound "
            f"({100 * result['low']:.0f} to {100 * result['high']:.0f} %, {result['runs']} runs); "
            f"copies run at {result['copy_bytes_per_s'] / 1e9:.1f} GB/s\n"
        )
    if "mend_ratio" in results[0]:
        sys.stdout.write(f"tsugi-mend takes x {results[0]['mend_ratio']:.1f} as long as {results[0]['format']}\n")


class Shape(NamedTuple):
    """The size of a round."""

    # Elements of a tensor.
    size: int
    tensors: int
    learners: int

    @property
    def layout(self) -> Layout:
        pieces = (Piece(f"tensor{i:05}", (self.size // 256, 256)) for i in range(self.tensors))
        return make_layout(pieces)


class Sample(NamedTuple):
    """One turn of everything that is measured, in seconds."""

    # To copy one byte.
    byte_s: float
    # `inspect` and `update` of each format.
    rounds_s: list[tuple[float, float]]
    # A round of tsugi-mend and its merge alone; None if it was left out.
    mend_s: tuple[float, float] | None


class Copy:
    """A copy of as many arrays as the merge reads and writes.

    Args:
        shape: size of the round.
        pool: threads of the copy.
    """

    def __init__(self, shape: Shape, pool: ThreadPoolExecutor) -> None:
        self._pool, self._layout = pool, shape.layout
        # Unwritten arrays would share one page of zeros, and reading it would cost nothing.
        self._pairs = [[np.ones(self._layout.size, np.float32) for _ in range(2)] for _ in range(STATE_ARRAYS)]

    def byte_s(self) -> float:
        """Return the seconds to copy one byte, in and out counted separately."""

        def copy_leaf(number: int) -> None:
            here = self._layout.where(self._layout.leaves[number])
            for source, target in self._pairs:
                target[here] = source[here]

        taken_s = seconds(lambda: list(self._pool.map(copy_leaf, range(len(self._layout.leaves)))))
        return taken_s / (2 * STATE_ARRAYS * 4 * self._layout.size)


class Job:
    """The merge with one format in both directions.

    Args:
        shape: size of the round.
        pool: threads of the merge.
    """

    def __init__(self, shape: Shape, format: Format, pool: ThreadPoolExecutor) -> None:
        self.format, self.layout, self._learners = format, shape.layout, shape.learners
        rules, outer = [Rule("rda", shape.size)] * shape.tensors, Nesterov(0.7, 0.9)
        buffers = Buffers(self.layout.size, FREE_MAX)
        self._merger = Merger(self.layout, rules, outer, format, format, pool.map, buffers.take)
        payloads = [random_payload(shape, format, m) for m in range(shape.learners)]
        self._values = Values(payloads, [None] * shape.learners)
        self._state = self._merger.first(np.random.default_rng(0).standard_normal(self.layout.size, np.float32))
        moved = shape.learners * self._merger.up_bytes + self._merger.down_bytes
        self.num_bytes = moved + 2 * STATE_ARRAYS * 4 * self.layout.size

    def round_s(self) -> tuple[float, float]:
        """Return the seconds of `inspect` and of `update`."""
        began_s = time.perf_counter()
        products = self._merger.inspect(self._values)
        inspected_s = time.perf_counter()
        update = self._merger.update(self._values, products, np.full(self._learners, 1 / self._learners), self._state)
        done_s = time.perf_counter()
        assert update.finite
        self._state = update.state
        return inspected_s - began_s, done_s - inspected_s


def random_payload(shape: Shape, format: Format, seed: int) -> np.ndarray:
    """Return values like those of a learner."""
    tensor = np.random.default_rng(seed + 1).normal(0.0, 1e-3, shape.size).astype(np.float32)
    # All tensors have the same values, because encoding takes longer than a merge.
    payload = encode({"tensor": tensor}, format)
    return np.frombuffer(payload * shape.tensors, np.uint8)


def seconds(work: Callable[[], Any]) -> float:
    """Return the seconds of a call."""
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


class Mend:
    """tsugi-mend in a separate process and environment.

    Args:
        shape: size of the round.
        threads: number of threads of PyTorch.
    """

    def __init__(self, shape: Shape, threads: int) -> None:
        code = str(ROOT / "scripts" / "bench" / "_mend_merge.py")
        command = [str(python_with("mend", PINS)), code, *map(str, (*shape, threads))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._ask, self._answers = self._process.stdin, self._process.stdout

    def round_s(self) -> tuple[float, float]:
        """Return the seconds of a round, and of its `token_weighted_merge` alone."""
        self._ask.write("round\n")
        self._ask.flush()
        whole, merge = self._answers.readline().split()
        return float(whole), float(merge)


def summary(job: Job, number: int, samples: list[Sample], threads: int) -> dict[str, Any]:
    """Return the medians of all runs for the format of this number."""
    rounds_s = [sample.rounds_s[number] for sample in samples]
    shares = [job.num_bytes * sample.byte_s / sum(own) for sample, own in zip(samples, rounds_s, strict=True)]
    result: dict[str, Any] = {
        "name": "merge",
        "format": job.format,
        "value": statistics.median(shares),
        "unit": "share of the copy bound",
        "low": min(shares),
        "high": max(shares),
        "runs": len(shares),
        "threads": threads,
        "bytes": job.num_bytes,
        "copy_bytes_per_s": 1 / statistics.median(sample.byte_s for sample in samples),
        "inspect_s": statistics.median(own[0] for own in rounds_s),
        "update_s": statistics.median(own[1] for own in rounds_s),
        "round_s": statistics.median(map(sum, rounds_s)),
    }
    others_s = [sample.mend_s for sample in samples if sample.mend_s is not None]
    if others_s and not number:
        for name, index in (("mend_ratio", 0), ("mend_merge_ratio", 1)):
            ratios = [other[index] / sum(own) for other, own in zip(others_s, rounds_s, strict=True)]
            result |= {name: statistics.median(ratios), f"{name}_low": min(ratios), f"{name}_high": max(ratios)}
        result["mend_s"] = statistics.median(other[0] for other in others_s)
    return result


if __name__ == "__main__":
    main()
