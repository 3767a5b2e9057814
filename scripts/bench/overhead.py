"""Slowdown of a learner's steps because there is a syncer. Interleaved in one process, several times.

The learner is the real driver with all its threads; the syncer is a real process on loopback, at the lowest priority,
since it has no machine of its own here. Blocks of steps of the driver (stage, report, payloads, adopt) alternate with
blocks in which the same island makes the same steps on the same data and does nothing else; meanwhile no round ends and
the syncer idles. `value` is the median, over the pairs of blocks, of the ratio of the median times from one step to the
next; `cpu_value` the ratio of the processor time that the learner's process took, encoding and sending included, which
other load on the machine touches less; `thread_value` that of the step thread alone, over the time of a step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ISLAND = "island-0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dim", type=int, default=256, help="width of the decoder")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--devices", type=int, default=2, help="emulated devices of the island")
    parser.add_argument("--wire", default="int4", help="format of the learner's updates")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=24, help="in each block")
    parser.add_argument("--nice", type=int, default=19, help="of the syncer: 19 is the lowest priority")
    parser.add_argument("--accelerator", action="store_true", help="of this machine, instead of emulated devices")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    if not arguments.accelerator:
        os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(arguments.devices), "NPROC": "16"}
    os.environ["PYTHONPATH"] = str(ROOT)
    if "GLIBC_TUNABLES" not in os.environ:  # as an island of a local run has it; read when a process starts
        os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments, Path(folder))
    if arguments.json:
        sys.stdout.write(json.dumps(result) + "\n")
        return
    sys.stdout.write(
        f"step time with a syncer x {result['value']:.3f} of {1000 * result['step_s']:.1f} ms "
        f"({result['low']:.3f} to {result['high']:.3f}, {result['runs']} pairs; {result['adopted_per_step']:.2f} "
        f"fragments adopted per step); the process's processor time x {result['cpu_value']:.3f}; "
        f"the step thread's more per step {100 * result['thread_value']:.2f}% of a step\n"
    )


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Make the settings of a run with one island; the syncer would go on for ever."""
    dim = arguments.dim
    args = {"dim": dim, "num_layers": arguments.layers, "num_heads": 4, "num_kv_heads": 4, "head_dim": dim // 4}
    args |= {"mlp_dim": 4 * dim, "seq_len_max": arguments.seq_len, "activation": "relu2"}
    args |= {"dtype": "bfloat16"} if arguments.accelerator else {}
    return {
        "name": "overhead",
        "islands": {"count": 1, "devices": arguments.devices},
        "train": {"steps": 10**6, "batch_size": arguments.batch_size, "seq_len": arguments.seq_len, "eval_every": 0},
        "model": {"args": args},
        "protocol": {"num_fragments": 24, "sync_every": 24, "overlap_steps": 2, "snapshot_every": 0},
        "wire": {"up": arguments.wire},
        "trackers": [],
    }


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Start a syncer, train against it in this process, and stop both."""
    import yaml

    from diloco_jax.runtime.learner.joined import Joining, island_pulse
    from diloco_jax.runtime.learner.run import LearnerRun
    from diloco_jax.runtime.local.run import child_environment
    from diloco_jax.runtime.records.files import ADDRESS_FILE, CONFIG_FILE
    from diloco_jax.settings.text import load

    path = folder / CONFIG_FILE
    path.write_text(yaml.safe_dump(settings(arguments)), encoding="utf-8")
    config = load(path)
    command = ["nice", "-n", str(arguments.nice), sys.executable, "-m", "diloco_jax"]
    command += ["syncer", str(path), "--run-dir", str(folder)]
    syncer = subprocess.Popen(
        command,
        env=child_environment(config, "syncer"),  # it ends when this process does, however that ends
        stdout=subprocess.DEVNULL,
    )
    try:
        while not (folder / ADDRESS_FILE).exists():
            if syncer.poll() is not None:
                raise SystemExit(f"the syncer ended with {syncer.returncode}")
            time.sleep(0.2)
        address = (folder / ADDRESS_FILE).read_text(encoding="utf-8")
        stop = threading.Event()
        learner = LearnerRun(Joining(config, ISLAND, 1, address, folder, island_pulse(config, folder, ISLAND)), stop)
        blocks = Blocks(learner, config, arguments, stop)
        learner.run()
        return blocks.result()
    finally:
        syncer.terminate()
        syncer.wait()


class Blocks:
    """Takes the place of `Island.step` and measures: the driver's steps, and now and then a block of its own."""

    def __init__(self, learner: Any, config: Any, arguments: argparse.Namespace, stop: threading.Event) -> None:
        from diloco_jax.training.data.corpus import load_source
        from diloco_jax.training.data.order import SampleOrder

        self._plan, self._island = learner.host.plan, learner.host.island
        self._order = SampleOrder(load_source(config.data, config.train.seq_len), config.data.shuffle_seed)
        self._step, self._adopt = self._island.step, self._island.adopt
        self._island.step, self._island.adopt = self._measured, self._counted
        self._arguments, self._stop = arguments, stop
        self._began: list[tuple[float, float, float]] = []  # of steps of the driver's block: wall, process, thread
        self._pairs: list[tuple[list[float], list[float]]] = []  # (with a syncer, alone): wall, process, thread
        self._alone_s: list[float] = []
        self._warm = False
        self._adopted = 0

    def _counted(self, *arguments: Any, **options: Any) -> None:
        self._adopted += 1
        self._adopt(*arguments, **options)

    def _measured(self, batch: Any, rate: float, position: int) -> Any:
        self._began.append(clocks())
        if len(self._began) > self._arguments.steps:
            with_syncer = medians(self._began)
            alone = self._alone(rate)
            if self._warm:
                self._pairs.append((with_syncer, alone))
                self._alone_s.append(alone[0])
            else:
                self._adopted = 0
            self._warm = True
            if len(self._pairs) >= self._arguments.pairs:
                self._stop.set()
            self._began = [clocks()]
        return self._step(batch, rate, position)

    def _alone(self, rate: float) -> list[float]:
        order, size = self._order, self._arguments.batch_size
        began = []
        for number in range(self._arguments.steps + 1):
            began.append(clocks())
            batch = self._island.put_batch(order.batch([(number * size, (number + 1) * size)]))
            self._island.wait(self._step(batch, rate))
        return medians(began)

    def result(self) -> dict[str, object]:
        """Summarise all pairs."""
        ratios = [pair[0][0] / pair[1][0] for pair in self._pairs]
        return {
            "name": "overhead",
            "value": statistics.median(ratios),
            "unit": "step time with a syncer / step time alone",
            "low": min(ratios),
            "high": max(ratios),
            "runs": len(ratios),
            "cpu_value": statistics.median(pair[0][1] / pair[1][1] for pair in self._pairs),
            "thread_value": statistics.median((pair[0][2] - pair[1][2]) / pair[1][0] for pair in self._pairs),
            "step_s": statistics.median(self._alone_s),
            "adopted_per_step": self._adopted / (len(ratios) * self._arguments.steps),
            "parameters": sum(fragment.num_elements for fragment in self._plan.fragments),
            "devices": self._arguments.devices,
        }


def clocks() -> tuple[float, float, float]:
    return time.perf_counter(), time.process_time(), time.thread_time()


def medians(began: list[tuple[float, float, float]]) -> list[float]:
    """Median wall time from step to step, mean processor time of the process, median of the thread."""
    wall, process, thread = ([b[i] - a[i] for a, b in pairwise(began)] for i in range(3))
    return [statistics.median(wall), statistics.mean(process), statistics.mean(thread)]


if __name__ == "__main__":
    main()
