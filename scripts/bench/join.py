"""Slowdown of a training loop of one's own by `diloco_jax.join`. Interleaved in one process, several times.

The loop is bare: it makes a batch, runs a jitted step that consumes its state, and waits for the loss. Blocks of steps
in which it calls `after_step` too alternate with blocks in which it does not; meanwhile no round ends. The syncer is a
real process on loopback, at the lowest priority, since it has no machine of its own here; a fragment comes back and two
are staged per step. Each number of devices has a process and a syncer of its own.

`value` is the median, over the pairs of blocks, of the ratio of the median times from one step to the next, on the
number of devices where that is largest; `cpu_value` the ratio of the processor time of the process, all its threads
included, which other load on the machine touches less; `thread_value` what the loop's own thread computes more, over
the time of a step; `by_devices` has all of it for each number of devices.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import overhead

ROOT = Path(__file__).resolve().parents[2]
WALL, CPU = ("value", "low", "high"), ("cpu_value", "cpu_low", "cpu_high")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dim", type=int, default=256, help="width of the decoder")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2], help="emulated devices, in turn")
    parser.add_argument("--wire", default="int4", help="format of the island's updates")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=24, help="in each block")
    parser.add_argument("--nice", type=int, default=19, help="of the syncer: 19 is the lowest priority")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(accelerator=False)
    arguments = parser.parse_args()
    if len(arguments.devices) == 1:
        results = [_alone(arguments)]
    else:
        results = [_in_a_process(count) for count in arguments.devices]
    worst = max(results, key=lambda result: float(result["value"]))
    if arguments.json:
        sys.stdout.write(json.dumps({**worst, "by_devices": results}) + "\n")
        return
    for result in results:
        value, cpu = ("{:.3f} ({:.3f} to {:.3f})".format(*(result[k] for k in keys)) for keys in (WALL, CPU))
        sys.stdout.write(
            f"{result['devices']} devices: step time with join x {value} of {1000 * result['step_s']:.1f} ms, "
            f"{result['runs']} pairs, {result['adopted_per_step']:.2f} fragments adopted per step; the process's "
            f"processor time x {cpu}; the loop's thread {100 * result['thread_value']:.2f}% of a step more\n"
        )


def _in_a_process(devices: int) -> dict[str, Any]:
    """Measure on so many devices: a process has one number of them."""
    command = [sys.executable, *sys.argv, "--devices", str(devices), "--json"]  # the last --devices counts
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1])["by_devices"][0])


def _alone(arguments: argparse.Namespace) -> dict[str, Any]:
    arguments.devices = arguments.devices[0]
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(arguments.devices), "NPROC": "16"}
    os.environ["PYTHONPATH"] = str(ROOT)
    if "GLIBC_TUNABLES" not in os.environ:  # as an island of a local run has it; read when a process starts
        os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    with tempfile.TemporaryDirectory() as folder:
        return measure(arguments, Path(folder))


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start a syncer, join it with a loop in this process, and stop both."""
    import yaml

    import diloco_jax
    from diloco_jax.runtime.local.run import child_environment
    from diloco_jax.runtime.records.files import ADDRESS_FILE, CONFIG_FILE

    path = folder / CONFIG_FILE
    settings = overhead.settings(arguments)
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    config = diloco_jax.load(path)
    path.write_text(yaml.safe_dump(settings | {"model": {"module": "own"}}), encoding="utf-8")  # the loop brings it
    command = ["nice", "-n", str(arguments.nice), sys.executable, "-m", "diloco_jax"]
    command += ["syncer", str(path), "--run-dir", str(folder)]
    syncer = subprocess.Popen(command, env=child_environment(config, "syncer"), stdout=subprocess.DEVNULL)
    try:
        while not (folder / ADDRESS_FILE).exists():
            if syncer.poll() is not None:
                raise SystemExit(f"the syncer ended with {syncer.returncode}")
            time.sleep(0.2)
        return Loop(config, arguments).run((folder / ADDRESS_FILE).read_text(encoding="utf-8"), folder)
    finally:
        syncer.terminate()
        syncer.wait()


class Loop:
    """A training loop of a user's own, with a compiled step that consumes its state."""

    def __init__(self, config: Any, arguments: argparse.Namespace) -> None:
        import jax

        from diloco_jax.training.blueprint import Blueprint
        from diloco_jax.training.data.corpus import load_source
        from diloco_jax.training.data.order import SampleOrder
        from diloco_jax.training.sharding import put_array

        mesh = config.island(overhead.ISLAND).mesh
        blueprint = Blueprint(config.model, config.optimizer, mesh, jax.devices(), seed=config.seed)
        self._order = SampleOrder(load_source(config.data, config.train.seq_len), config.data.shuffle_seed)
        layout = blueprint.batch_sharding
        self._put_batch = lambda batch: {name: put_array(x, layout(x.shape)) for name, x in batch.items()}
        self._program = blueprint.lower_step(self._order.batch([(0, arguments.batch_size)])).compile()
        self._rate = put_array(_rate(config), blueprint.layout.replicated)
        self._state = blueprint.create()
        self._arguments = arguments
        self._parameters = sum(value.size for value in self._state.params.values())

    def run(self, address: str, folder: Path) -> dict[str, Any]:
        """Measure pairs of blocks, after a first one that is not counted."""
        import diloco_jax

        size, tokens = self._arguments.batch_size, self._arguments.batch_size * self._arguments.seq_len
        pairs: list[tuple[list[float], list[float]]] = []  # (joined, bare): wall, process, thread
        with diloco_jax.join(
            address,
            name=overhead.ISLAND,
            params=self._state.params,
            opt_state=self._state.opt_state,
            samples_per_step=size,
            tokens_per_step=tokens,
            run_dir=folder,
        ) as island:
            self._state = self._state._replace(**island.state())
            self._block(island)
            self._block(None)
            rounds = island.global_step
            for _ in range(self._arguments.pairs):
                pairs.append((self._block(island), self._block(None)))
            rounds = island.global_step - rounds
        ratios, cpu = ([joined[i] / bare[i] for joined, bare in pairs] for i in range(2))
        return {
            "name": "join",
            "value": statistics.median(ratios),
            "unit": "step time with join / step time of the bare loop",
            "low": min(ratios),
            "high": max(ratios),
            "runs": len(ratios),
            "cpu_value": statistics.median(cpu),
            "cpu_low": min(cpu),
            "cpu_high": max(cpu),
            "thread_value": statistics.median((joined[2] - bare[2]) / bare[0] for joined, bare in pairs),
            "step_s": statistics.median(bare[0] for _, bare in pairs),
            "cpu_s": statistics.median(bare[1] for _, bare in pairs),
            "adopted_per_step": rounds / (len(pairs) * (self._arguments.steps + 1)),
            "parameters": self._parameters,
            "devices": self._arguments.devices,
        }

    def _block(self, island: Any) -> list[float]:
        """Make a block of steps, as an island or bare; one more than are counted, since a step ends with the next."""
        import jax

        began, size = [], self._arguments.batch_size
        for number in range(self._arguments.steps + 1):
            began.append(overhead.clocks())
            first = number * size if island is None else int(island.next_samples()[0])
            batch = self._put_batch(self._order.batch([(first, first + size)]))
            self._state, metrics = self._program(self._state, batch, self._rate, None)
            if island is None:
                jax.device_get(metrics)
            else:
                params = island.after_step(self._state.params, metrics, opt_state=self._state.opt_state)
                self._state = self._state._replace(params=params)
                assert island.training, "the run has ended"
        return overhead.medians(began)


def _rate(config: Any) -> Any:
    """Return a learning rate for all steps."""
    import numpy as np

    from diloco_jax.training.optimizers import learning_rate

    return np.asarray(learning_rate(config.optimizer, config.train.steps)(100), np.float32)


if __name__ == "__main__":
    main()
