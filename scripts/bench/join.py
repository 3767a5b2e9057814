"""Measure the slowdown of a user's training loop by `diloco_jax.join`.

The loop makes a batch, runs a jitted step that consumes its state, and waits for the loss; with --ahead it waits for
the loss of the step before, as loops do that dispatch a step ahead. Blocks of steps with
calls of `after_step` alternate with bare blocks, and no round ends during a bare block. The syncer is a real process on
loopback with the lowest priority, because it shares this machine. Per step, one fragment returns and two are staged.
Each number of devices has a separate process and syncer.

`value` is the median ratio of the median times between two steps over all pairs of blocks, for the number of devices
where it is largest. `cpu_value` is the ratio of the processor time of all threads, which other load changes less.
`thread_value` is the additional processor time of the loop's thread over the time of a step. `by_devices` has all
figures for each number of devices.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import overhead
import pairs as blocks

WALL, CPU = ("value", "low", "high"), ("cpu_value", "cpu_low", "cpu_high")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2], help="emulated devices, in turn")
    parser.add_argument("--wire", default="int4", help="format of the island's updates")
    parser.add_argument("--nice", type=int, default=19, help="niceness of the syncer; 19 is the lowest priority")
    parser.add_argument("--ahead", action="store_true", help="the loop dispatches each step while the last one runs")
    blocks.add_options(parser, batch_size=8, pairs=9, steps=24)
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
    """Measure in a new process, because a process has a fixed number of devices."""
    # The last --devices of the arguments counts.
    command = [sys.executable, *sys.argv, "--devices", str(devices), "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1])["by_devices"][0])


def _alone(arguments: argparse.Namespace) -> dict[str, Any]:
    arguments.devices = arguments.devices[0]
    blocks.emulate(arguments.devices)
    blocks.restart_with_huge_pages()
    with tempfile.TemporaryDirectory() as folder:
        return measure(arguments, Path(folder))


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start a syncer, join it with a loop in this process, and stop both."""
    import yaml

    import diloco_jax

    path = folder / "config.yaml"
    settings = overhead.settings(arguments)
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    config = diloco_jax.load(path)
    # The loop brings the model.
    path.write_text(yaml.safe_dump(settings | {"model": {"module": "own"}}), encoding="utf-8")
    with blocks.running_syncer(path, config, arguments.nice) as address:
        return Loop(config, arguments).run(address, folder)


class Loop:
    """A user's training loop with a compiled step that consumes its state."""

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
        """Measure pairs of blocks; the first pair does not count."""
        import diloco_jax

        size, tokens = self._arguments.batch_size, self._arguments.batch_size * self._arguments.seq_len
        pairs: list[blocks.Pair] = []
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
                pairs.append(blocks.Pair(self._block(island), self._block(None)))
            rounds = island.global_step - rounds
        return blocks.summary(
            "join",
            "step time with join / step time of the bare loop",
            pairs,
            adopted_per_step=rounds / (len(pairs) * (self._arguments.steps + 1)),
            parameters=self._parameters,
            devices=self._arguments.devices,
        )

    def _block(self, island: Any) -> blocks.Costs:
        """Make a block of steps as an island or bare, and one more step, because a step ends with the next one."""
        import jax

        began, size, before = [], self._arguments.batch_size, None
        for number in range(self._arguments.steps + 1):
            began.append(blocks.clocks())
            first = number * size if island is None else int(island.next_samples()[0])
            batch = self._put_batch(self._order.batch([(first, first + size)]))
            self._state, metrics = self._program(self._state, batch, self._rate, None, {})
            jax.device_get(before if self._arguments.ahead else metrics)
            before = metrics
            if island is not None:
                params = island.after_step(self._state.params, metrics, opt_state=self._state.opt_state)
                self._state = self._state._replace(params=params)
                assert island.training, "the run has ended"
        jax.block_until_ready(self._state)
        return blocks.costs_of_steps(began)


def _rate(config: Any) -> Any:
    """Return a learning rate for all steps."""
    import numpy as np

    from diloco_jax.training.optimizers import learning_rate

    return np.asarray(learning_rate(config.optimizer, config.train.steps)(100), np.float32)


if __name__ == "__main__":
    main()
