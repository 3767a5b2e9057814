"""Measure the slowdown of a learner's steps by the exchange with a syncer.

The learner is the real driver with all its threads. The syncer is a real process on loopback with the lowest priority,
because it shares this machine. Blocks of the driver's steps (stage, report, payloads, adopt) alternate with blocks of
bare steps of the same island on the same data; during a bare block no round ends, and the syncer idles. `value` is the
median ratio of the median times between two steps over all pairs of blocks. `cpu_value` is the ratio of the processor
time of the learner's process, which other load changes less. `thread_value` is the additional processor time of the
step thread over the time of a step.
"""

import argparse
import json
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pairs as blocks

ISLAND = "island-0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2, help="emulated devices of the island")
    parser.add_argument("--wire", default="int4", help="format of the learner's updates")
    parser.add_argument("--nice", type=int, default=19, help="niceness of the syncer; 19 is the lowest priority")
    parser.add_argument(
        "--accelerator", action="store_true", help="use the accelerator of this machine instead of emulated devices"
    )
    blocks.add_options(parser, batch_size=8, pairs=9, steps=24)
    arguments = parser.parse_args()
    if not arguments.accelerator:
        blocks.emulate(arguments.devices)
    blocks.restart_with_huge_pages()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments, Path(folder))
    if arguments.json:
        sys.stdout.write(json.dumps(result) + "\n")
        return
    sys.stdout.write(
        f"step time with a syncer x {result['value']:.3f} of {1000 * result['step_s']:.1f} ms "
        f"({result['low']:.3f} to {result['high']:.3f}, {result['runs']} pairs; {result['adopted_per_step']:.2f} "
        f"fragments adopted per step); the process's processor time x {result['cpu_value']:.3f}; "
        f"the step thread's additional time per step {100 * result['thread_value']:.2f}% of a step\n"
    )


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of a run with one island and more steps than any measurement."""
    args = blocks.decoder_args(arguments) | ({"dtype": "bfloat16"} if arguments.accelerator else {})
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
    from diloco_jax.settings.text import load

    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(settings(arguments)), encoding="utf-8")
    config = load(path)
    with blocks.running_syncer(path, config, arguments.nice) as address:
        stop = threading.Event()
        learner = LearnerRun(Joining(config, ISLAND, 1, address, folder, island_pulse(config, folder, ISLAND)), stop)
        measured = MeasuredSteps(learner, config, arguments, stop)
        learner.run()
        return measured.result()


class MeasuredSteps:
    """Replacement of `Island.step` that measures blocks of the driver's steps and bare blocks in turn."""

    def __init__(self, learner: Any, config: Any, arguments: argparse.Namespace, stop: threading.Event) -> None:
        from diloco_jax.training.data.corpus import load_source
        from diloco_jax.training.data.order import SampleOrder

        self._run, self._island = learner.host.run, learner.host.island
        self._order = SampleOrder(load_source(config.data, config.train.seq_len), config.data.shuffle_seed)
        self._step, self._adopt = self._island.step, self._island.adopt
        self._island.step, self._island.adopt = self._measured, self._counted
        self._arguments, self._stop = arguments, stop
        # The clocks at the start of each step of the driver's block.
        self._began: list[blocks.Costs] = []
        self._pairs: list[blocks.Pair] = []
        self._warm = False
        self._adopted = 0

    def _counted(self, *arguments: Any, **options: Any) -> None:
        self._adopted += 1
        self._adopt(*arguments, **options)

    def _measured(self, batch: Any, rate: float, position: int) -> Any:
        self._began.append(blocks.clocks())
        if len(self._began) > self._arguments.steps:
            pair = blocks.Pair(blocks.costs_of_steps(self._began), self._alone(rate))
            if self._warm:
                self._pairs.append(pair)
            else:
                self._adopted = 0
            self._warm = True
            if len(self._pairs) >= self._arguments.pairs:
                self._stop.set()
            self._began = [blocks.clocks()]
        return self._step(batch, rate, position)

    def _alone(self, rate: float) -> blocks.Costs:
        order, size = self._order, self._arguments.batch_size
        began = []
        for number in range(self._arguments.steps + 1):
            began.append(blocks.clocks())
            batch = self._island.put_batch(order.batch([(number * size, (number + 1) * size)]))
            self._island.wait(self._step(batch, rate))
        return blocks.costs_of_steps(began)

    def result(self) -> dict[str, object]:
        """Summarise all pairs."""
        return blocks.summary(
            "overhead",
            "step time with a syncer / step time alone",
            self._pairs,
            adopted_per_step=self._adopted / (len(self._pairs) * self._arguments.steps),
            parameters=self._run.num_parameters,
            devices=self._arguments.devices,
        )


if __name__ == "__main__":
    main()
