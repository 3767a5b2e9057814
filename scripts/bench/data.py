"""Measure the cost of a slow source: steps on data that arrive at twice and at half the rate that the loop needs.

The built-in loop runs blocks of steps on a free and on a throttled source in turn, in one process. A throttled source
sleeps between two samples, as if it waited for a disk or a network. `value` is the time of a step at twice the needed
rate over the time of a step in the free block before it, as the median of all pairs.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator

import numpy as np
from jobs import ROOT

from diloco_jax.runtime.island.built_in import BuiltInLoop
from diloco_jax.runtime.island.host import DATA_WAIT
from diloco_jax.settings.text import load

# The pause before each sample.
PAUSE_S = [0.0]


class Throttled:
    """Source of random ids that sleeps for PAUSE_S before each sample."""

    def __init__(self, seq_len: int) -> None:
        self._seq_len = seq_len

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> np.ndarray:
        time.sleep(PAUSE_S[0])
        return np.random.default_rng(index).integers(0, 256, self._seq_len + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20, help="steps of a block")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    words = ["--islands.count", "1", "--islands.devices", "1", "--train.batch_size", str(arguments.batch_size)]
    words += ["--train.seq_len", str(arguments.seq_len), "--data.module", f"{__name__}:Throttled"]
    words += ["--data.args", json.dumps({"seq_len": arguments.seq_len}), "--data.vocab_size", "256"]
    loop = BuiltInLoop(load(ROOT / "configs" / "quickstart.yaml", words), "island-0")
    loop.warm_up()
    steps = steps_of(loop)
    block(steps, arguments.steps)
    rows: dict[str, list[tuple[float, float]]] = {"twice": [], "half": []}
    for _ in range(arguments.pairs):
        for name, share in (("twice", 0.5), ("half", 2.0)):
            PAUSE_S[0] = 0.0
            free_s = block(steps, arguments.steps)[0]
            PAUSE_S[0] = share * free_s / arguments.batch_size
            # These steps use the samples that were read before.
            block(steps, loop.prefetch + 2)
            took_s, waited_s = block(steps, arguments.steps)
            rows[name].append((took_s / free_s, waited_s / took_s))
    loop.close()
    ratios = [ratio for ratio, _ in rows["twice"]]
    result = {"name": "data", "value": statistics.median(ratios), "unit": "step at twice the need / free step"}
    result |= {"low": min(ratios), "high": max(ratios), "step_s": free_s}
    result["waiting_at_twice"] = statistics.median(share for _, share in rows["twice"])
    result["half_ratio"] = statistics.median(ratio for ratio, _ in rows["half"])
    result["waiting_at_half"] = statistics.median(share for _, share in rows["half"])
    sys.stdout.write(json.dumps(result, indent=None if arguments.json else 1) + "\n")


def steps_of(loop: BuiltInLoop) -> Iterator[float]:
    """Make steps, and yield the seconds that each waited for data."""
    size = loop.batch_size
    loop.put_batch([(0, size)], [(size, 8 * size)])
    for number in range(1, 1_000_000):
        handle = loop.step(number)
        start = number * size
        loop.put_batch([(start, start + size)], [(start + size, start + 8 * size)])
        yield loop.wait(handle)[DATA_WAIT]


def block(steps: Iterator[float], count: int) -> tuple[float, float]:
    """Make `count` steps, and return their mean seconds and the mean seconds of waiting for data."""
    began_s = time.monotonic()
    waited_s = sum(next(steps) for _ in range(count))
    return (time.monotonic() - began_s) / count, waited_s / count


if __name__ == "__main__":
    main()
