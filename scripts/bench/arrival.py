"""Measure the processor time of a version's arrival at an island beside that of the same work in NumPy.

The arrival is that of one fragment of 16 float32 tensors (128 MB): its payload is decoded, added to the value before
and digested. Here that is `GlobalValues.read`, with the memory that it uses again. In NumPy it is `codec.decode`, a sum
and `value_digest`, with new arrays, as it was before the compiled pass. Both take turns in one process. `value` is the
median ratio of the processor time of NumPy over that of the pass. Each run compares the two digests.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, get_args

import numpy as np

from diloco_jax.core import codec
from diloco_jax.core.fragments import plan_fragments
from diloco_jax.core.layout import value_digest
from diloco_jax.protocol.messages import NO_VERSION, GlobalFragment
from diloco_jax.runtime.island.adoptions import GlobalValues, Values

TENSORS, WIDTH = 16, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbytes", type=int, default=128, help="megabytes of the fragment in float32")
    parser.add_argument("--formats", nargs="+", default=[*get_args(codec.Format)], help="formats of the steps, in turn")
    parser.add_argument("--runs", type=int, default=9, help="runs of each way")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each format")
    arguments = parser.parse_args()
    for format in arguments.formats:
        result = measure(format, arguments.mbytes, arguments.runs)
        if arguments.json:
            sys.stdout.write(json.dumps(result) + "\n")
            continue
        times = ", ".join(f"{way} {result[f'{way}_ns']:.2f} ns" for way in ("numpy", "pass"))
        sys.stdout.write(
            f"{format:<9} x {result['value']:.2f} ({result['low']:.2f} to {result['high']:.2f}) less processor time; "
            f"per element {times}; wall time {1000 * result['numpy_s']:.0f} and {1000 * result['pass_s']:.0f} ms; load "
            f"{result['load']:.1f}\n"
        )


class Job:
    """A fragment's value at an island, and a step from it."""

    def __init__(self, format: codec.Format, mbytes: int) -> None:
        rows = max(1, mbytes * 2**20 // 4 // TENSORS // WIDTH)
        (self._fragment,) = plan_fragments({f"tensor{i:02}": (rows, WIDTH) for i in range(TENSORS)}, 1).fragments
        self.size = self._fragment.num_elements
        self._format: codec.Format = format
        rng = np.random.default_rng(0)
        shapes = self._fragment.keys_shapes
        first = {key: rng.standard_normal(shape, np.float32) for key, shape in shapes}
        self._payload = codec.encode({key: np.float32(1e-3) * value for key, value in first.items()}, format)
        self._values = GlobalValues([self._fragment], format)
        whole = codec.encode(first, "float32")
        message = GlobalFragment(1, 0, 1, 1, value_digest(first), len(whole), NO_VERSION)
        self._version = 1
        self._keep(message, whole)
        # The value and the digest that NumPy gave last.
        self._by_numpy: tuple[Values, int] = first, message.digest

    def _keep(self, message: GlobalFragment, payload: bytes) -> Values:
        arrived = self._values.read(message, payload)
        self._values.keep(message, arrived)
        return arrived.values

    def numpy(self) -> None:
        """Make the next value in NumPy."""
        step = codec.decode(self._payload, self._fragment.keys_shapes, self._format)
        values = {key: value + step[key] for key, value in self._by_numpy[0].items()}
        self._by_numpy = values, value_digest(values)

    def island(self) -> Values:
        """Make the next value as an island does, which checks that it is the one of NumPy."""
        base, self._version = self._version, self._version + 1
        message = GlobalFragment(self._version, 0, self._version, 1, self._by_numpy[1], len(self._payload), base)
        return self._keep(message, self._payload)


def measure(format: codec.Format, mbytes: int, runs: int) -> dict[str, Any]:
    """Return the figures of one format."""
    job = Job(format, mbytes)
    job.numpy(), job.island()
    samples = [(costs(job.numpy), costs(job.island)) for _ in range(runs)]
    ratios = [numpy[0] / own[0] for numpy, own in samples]
    figures = {
        f"{name}_{unit}": statistics.median(pair[way][clock] for pair in samples) * factor
        for way, name in enumerate(("numpy", "pass"))
        for clock, unit, factor in ((0, "ns", 1e9 / job.size), (1, "s", 1.0))
    }
    return {
        "name": f"arrival of {format}",
        "value": statistics.median(ratios),
        "unit": "processor time in NumPy / in one pass",
        "low": min(ratios),
        "high": max(ratios),
        "runs": runs,
        **figures,
        "load": os.getloadavg()[0],
    }


def costs(work: Callable[[], Any]) -> tuple[float, float]:
    """Return the seconds of processor time of all threads, and on the clock, of a call."""
    began = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - began[0], time.perf_counter() - began[1]


if __name__ == "__main__":
    main()
