"""Measure the slowdown of MaxText's pre-training as an island: the same loop with and without the island, in blocks.

    python scripts/bench/maxtext_steps.py --python ENVIRONMENT/bin/python --corpus FOLDER

MaxText runs in the environment of `--python`, on the corpus of docs/examples/maxtext_corpus.py. Blocks of iterations
with the island alternate with blocks of MaxText's own function in one process, so both use one compiled program, and no
round ends during a block without the island. The syncer is a real process on loopback with the lowest priority, because
it shares this machine. `value` is the median ratio of the median times between two steps over all pairs of blocks.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pairs as blocks

INSIDE = "DILOCO_BENCH_MAXTEXT"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", type=Path, help="interpreter of MaxText's environment")
    parser.add_argument("--corpus", type=Path, help="folder that maxtext_corpus.py wrote")
    parser.add_argument("--nice", type=int, default=19, help="niceness of the syncer; 19 is the lowest priority")
    blocks.add_options(parser, batch_size=32, pairs=9, steps=24)
    parser.set_defaults(dim=64, layers=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments, Path(folder))
    if arguments.json:
        sys.stdout.write(json.dumps(result) + "\n")
        return
    sys.stdout.write(
        "MaxText as an island: step time x {value:.3f} ({low:.3f} to {high:.3f}) of {ms:.1f} ms, {runs} pairs, "
        "one fragment per step; processor time x {cpu_value:.3f} ({cpu_low:.3f} to "
        "{cpu_high:.3f}); the loop's thread {thread:.2f}% of a step more\n".format(
            **result, ms=1000 * result["step_s"], thread=100 * result["thread_value"]
        )
    )


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start a syncer, and MaxText in its own environment as the only island."""
    import yaml

    import diloco_jax

    path = folder / "config.yaml"
    settings = {
        "name": "bench",
        "model": {"module": "own"},
        "train": {"steps": 100_000},
        "protocol": {"sync_every": 24, "num_fragments": 24, "overlap_steps": 4},
        "islands": {"count": 1},
        "trackers": [],
    }
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    around = {"JAX_PLATFORMS": "cpu", "DECOUPLE_GCLOUD": "TRUE", "PYTHONPATH": f"{blocks.ROOT}:{Path(__file__).parent}"}
    around |= {"DILOCO_RUN_DIR": str(folder), "DILOCO_ISLAND": "island-0"}
    around[INSIDE] = json.dumps({"pairs": arguments.pairs, "steps": arguments.steps})
    with blocks.running_syncer(path, diloco_jax.load(path), arguments.nice) as address:
        done = subprocess.run(
            [arguments.python, __file__, *maxtext_words(arguments, folder)],
            env=os.environ | around | {"DILOCO_SYNCER": address},
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise SystemExit(f"MaxText failed: {done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def maxtext_words(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """Return MaxText's arguments for the model of the options."""
    dim, corpus = arguments.dim, arguments.corpus.absolute()
    values = {
        "hardware": "cpu",
        "base_emb_dim": dim,
        "base_num_query_heads": 4,
        "base_num_kv_heads": 4,
        "base_mlp_dim": 2 * dim,
        "base_num_decoder_layers": arguments.layers,
        "head_dim": dim // 4,
        "vocab_size": 512,
        "max_target_length": arguments.seq_len,
        "per_device_batch_size": arguments.batch_size,
        "dtype": "float32",
        "weight_dtype": "float32",
        "attention": "dot_product",
        "grain_file_type": "arrayrecord",
        "dataset_type": "grain",
        "grain_train_files": f"{corpus}/train.array_record",
        "grain_worker_count": 0,
        "num_epoch": 1000,
        "tokenizer_type": "huggingface",
        "tokenizer_path": f"{corpus}/tokenizer",
        "base_output_directory": folder,
        "enable_tensorboard": "false",
        "log_config": "false",
    }
    return ["base.yml", *(f"{key}={value}" for key, value in values.items())]


def inside() -> None:
    """Run MaxText's loop with blocks, and print the summary; in MaxText's environment."""
    from maxtext.utils.exceptions import StopTraining

    from diloco_jax.adapters.maxtext import launch
    from diloco_jax.adapters.maxtext.loop import IslandLoop

    wanted = json.loads(os.environ[INSIDE])
    pairs: list[blocks.Pair] = []

    class Alternating:
        """Takes the place of `IslandLoop`: every second block is MaxText's own function."""

        trouble = ""

        def __init__(self, iteration: Any, *more: Any) -> None:
            self._iteration = iteration
            self._island = IslandLoop(iteration, *more)
            self._number = 0
            self._readings: list[blocks.Costs] = []
            self._costs: list[blocks.Costs] = []

        def __call__(self, device: Any, host: Any, fixed: Any) -> Any:
            block, within = divmod(self._number, wanted["steps"] + 1)
            if within == 0 and self._readings:
                self._costs.append(blocks.costs_of_steps(self._readings))
                self._readings = []
            # The first pair does not count.
            if len(self._costs) == 2 * (wanted["pairs"] + 1):
                each = iter(self._costs[2:])
                pairs.extend(blocks.Pair(measured, alone) for measured, alone in zip(each, each, strict=True))
                raise StopTraining("the blocks are complete")
            self._readings.append(blocks.clocks())
            self._number += 1
            return (self._iteration if block % 2 else self._island)(device, host, fixed)

    launch.IslandLoop = Alternating
    launch.run(sys.argv[1:])
    result = blocks.summary("maxtext_steps", "step time as an island / step time alone", pairs)
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    inside() if INSIDE in os.environ else main()
