"""Measure the slowdown of an island's steps while it saves its state.

Blocks of steps without a save alternate with blocks that start with a save; a block is as long as
`protocol.snapshot_every`. The state is copied from the devices and written in the background, as in a run. `value` is
the median ratio of the mean step times over all pairs of blocks. `cpu_value` is the same ratio for the processor time
of the process. `first_value` is the time of the step with the copy over the median step time.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import pairs as blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1, help="emulated devices of the island")
    parser.add_argument("--url", help="folder or URL of the states; default: a temporary folder")
    blocks.add_options(parser, batch_size=4, pairs=7, steps=100)
    arguments = parser.parse_args()
    blocks.emulate(arguments.devices)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments, arguments.url or folder)
    if arguments.json:
        sys.stdout.write(json.dumps(result) + "\n")
        return
    sys.stdout.write(
        f"step time with a save of {result['state_bytes'] / 1e6:.0f} MB every {arguments.steps} steps: x "
        f"{result['value']:.4f} of {1000 * result['step_s']:.1f} ms ({result['low']:.4f} to {result['high']:.4f}, "
        f"{result['runs']} pairs); processor time x {result['cpu_value']:.4f}; the step of the copy x "
        f"{result['first_value']:.2f}; written after {result['written_s']:.1f} s\n"
    )


def measure(arguments: argparse.Namespace, url: str) -> dict[str, object]:
    """Return the medians of all pairs of blocks, in this process."""
    import numpy as np

    from diloco_jax.runtime.island.saved_states import SavedStates, StateName
    from diloco_jax.training.island import Island
    from diloco_jax.training.models.config import ModelConfig
    from diloco_jax.training.optimizers import OptimizerConfig
    from diloco_jax.training.sharding import MeshConfig

    island = Island(ModelConfig(args=blocks.decoder_args(arguments)), OptimizerConfig(), MeshConfig(data=-1), seed=0)
    shape = (arguments.batch_size, arguments.seq_len + 1)
    batch = {"tokens": np.random.default_rng(0).integers(0, 256, shape, np.int32)}
    island.warm_up(batch)
    saves, saving, written_s = SavedStates([url]), list[Any](), list[float]()

    def save() -> None:
        number, began_s = len(saving), time.perf_counter()
        saving.append(saves.save(island.stage_shards(), StateName(1, number, number, (0,)), number - 1))
        saving[-1].add_done_callback(lambda _: written_s.append(time.perf_counter() - began_s))

    def block(before: Callable[[], None]) -> tuple[blocks.Costs, float]:
        """Return the mean costs of a step, and the seconds of the first one."""
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        for number in range(arguments.steps):
            if not number:
                before()
            island.wait(island.step(island.put_batch(batch), 1e-3))
            if not number:
                first_s = time.perf_counter() - start_s
        per_step = (time.perf_counter() - start_s) / arguments.steps
        return blocks.Costs(per_step, (time.process_time() - start_cpu_s) / arguments.steps), first_s

    block(lambda: None)
    pairs, firsts_s = list[blocks.Pair](), list[float]()
    for _ in range(arguments.pairs):
        (alone, _), (with_save, first_s) = block(lambda: None), block(save)
        if reason := saving[-1].result():
            raise SystemExit(f"the state was not saved: {reason}")
        pairs.append(blocks.Pair(with_save, alone))
        firsts_s.append(first_s)
    saves.close()
    return blocks.summary(
        "saving",
        "step time with saves / step time without",
        pairs,
        first_value=statistics.median(firsts_s) / statistics.median(pair.alone.wall_s for pair in pairs),
        written_s=statistics.median(written_s),
        state_bytes=island.state_layout.num_bytes,
        devices=arguments.devices,
    )


if __name__ == "__main__":
    main()
