"""Measure the slowdown of a PyTorch training loop by `diloco_jax.torch.attach`, on the CPU.

The loop makes a batch, a step of a transformer with AdamW, and reads the loss. Blocks of steps with calls of
`after_step` alternate with bare blocks, and no round ends during a bare block. The syncer is a real process on loopback
with the lowest priority, because it shares this machine. Per step, one fragment returns and two are staged.

`value` is the median ratio of the median times between two steps over all pairs of blocks. `cpu_value` is the ratio of
the processor time of all threads, which other load changes less. `thread_value` is the additional processor time of the
loop's thread over the time of a step.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import overhead
import pairs as blocks

VOCABULARY = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1, help="PyTorch's threads; others are for the exchange")
    parser.add_argument("--wire", default="int4", help="format of the island's updates")
    parser.add_argument("--nice", type=int, default=19, help="niceness of the syncer; 19 is the lowest priority")
    blocks.add_options(parser, batch_size=8, pairs=9, steps=24)
    parser.set_defaults(accelerator=False, devices=1)
    arguments = parser.parse_args()
    blocks.restart_with_huge_pages()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments, Path(folder))
    if arguments.json:
        sys.stdout.write(json.dumps(result) + "\n")
        return
    value, cpu = (
        "{:.3f} ({:.3f} to {:.3f})".format(*(result[key] for key in keys))
        for keys in (("value", "low", "high"), ("cpu_value", "cpu_low", "cpu_high"))
    )
    sys.stdout.write(
        f"step time with attach x {value} of {1000 * result['step_s']:.1f} ms, {result['runs']} pairs, "
        f"{result['adopted_per_step']:.2f} fragments adopted per step, {result['parameters']} parameters; the "
        f"process's processor time x {cpu}; the loop's thread {100 * result['thread_value']:.2f}% of a step more\n"
    )


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start a syncer, attach a loop in this process to it, and stop both."""
    import yaml

    import diloco_jax

    path = folder / "config.yaml"
    settings = overhead.settings(arguments) | {"model": {"module": "own"}}
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    with blocks.running_syncer(path, diloco_jax.load(path), arguments.nice) as address:
        return Loop(arguments).run(address, folder)


class Loop:
    """A training loop of a small transformer."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import torch
        from torch import nn

        torch.set_num_threads(arguments.threads)
        torch.manual_seed(0)
        dim = arguments.dim
        layer = nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.0, batch_first=True, norm_first=True)
        layers = nn.TransformerEncoder(layer, arguments.layers, enable_nested_tensor=False)
        self._model = nn.Sequential(nn.Embedding(VOCABULARY, dim), layers, nn.Linear(dim, VOCABULARY))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._arguments = arguments

    def run(self, address: str, folder: Path) -> dict[str, Any]:
        """Measure pairs of blocks; the first pair does not count."""
        import diloco_jax.torch

        size, tokens = self._arguments.batch_size, self._arguments.batch_size * self._arguments.seq_len
        pairs: list[blocks.Pair] = []
        with diloco_jax.torch.attach(
            self._model,
            self._optimizer,
            address,
            name=overhead.ISLAND,
            samples_per_step=size,
            tokens_per_step=tokens,
            run_dir=folder,
        ) as island:
            assert island.training, "the run has just started"
            self._block(island)
            self._block(None)
            rounds = island.global_step
            for _ in range(self._arguments.pairs):
                pairs.append(blocks.Pair(self._block(island), self._block(None)))
            rounds = island.global_step - rounds
        return blocks.summary(
            "pytorch",
            "step time with attach / step time of the bare loop",
            pairs,
            adopted_per_step=rounds / (len(pairs) * (self._arguments.steps + 1)),
            parameters=sum(value.numel() for value in self._model.parameters()),
        )

    def _block(self, island: Any) -> blocks.Costs:
        """Make a block of steps as an island or bare, and one more step, because a step ends with the next one."""
        began = []
        for number in range(self._arguments.steps + 1):
            began.append(blocks.clocks())
            first = number if island is None else int(island.next_samples()[0])
            loss = self._step(first)
            loss.item()
            if island is not None:
                island.after_step(loss)
                assert island.training, "the run has ended"
        return blocks.costs_of_steps(began)

    def _step(self, seed: int) -> Any:
        import torch

        shape = self._arguments.batch_size, self._arguments.seq_len + 1
        tokens = torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))
        logits = self._model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss


if __name__ == "__main__":
    main()
