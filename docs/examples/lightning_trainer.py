"""Lightning's Trainer through a callback: an island of a run.

    DILOCO_SYNCER=127.0.0.1:50051 DILOCO_ISLAND=a python docs/examples/lightning_trainer.py

Lines that end with `# island` make the trainer an island. It reads its own data. The model is that of torch_loop.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning
import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset
from torch_loop import BATCH, LENGTH, Bytes, load

import diloco_jax.torch  # island


class Island(lightning.Callback):  # island
    """The callback that makes a trainer an island."""

    def on_train_start(self, trainer: lightning.Trainer, module: Any) -> None:  # island
        """Wait for the run's model. The module inside gives parameters the names that they have in a plain loop."""
        sizes = {"samples_per_step": BATCH, "tokens_per_step": BATCH * LENGTH}  # island
        self.island = diloco_jax.torch.attach(module.net, trainer.optimizers, data="own", **sizes).__enter__()  # island
        trainer.should_stop = not self.island.training  # island

    def on_train_batch_end(self, trainer: lightning.Trainer, module: Any, outputs: Any, *batch: Any) -> None:  # island
        """Report a step, and stop at the end of the run."""
        self.island.after_step(outputs["loss"])  # island
        trainer.should_stop = not self.island.training  # island

    def on_train_end(self, trainer: lightning.Trainer, module: Any) -> None:  # island
        """Leave the run."""
        self.island.__exit__(None, None, None)  # island


class LitBytes(lightning.LightningModule):
    """The model of bytes with its loss and optimizer."""

    def __init__(self) -> None:
        """Draw the parameters."""
        super().__init__()
        self.net = Bytes()

    def training_step(self, tokens: torch.Tensor, number: int) -> torch.Tensor:
        """Return the mean loss in nats per byte."""
        return functional.cross_entropy(self.net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Windows(IterableDataset[torch.Tensor]):
    """Random batches of the text without end."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        draw = np.random.default_rng()
        while True:
            yield load(draw.integers(1 << 20, size=BATCH))


def train() -> None:
    """Train until the run is over."""
    torch.manual_seed(0)
    trainer = lightning.Trainer(
        max_steps=-1, max_epochs=-1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, callbacks=[Island()],  # island
    )  # fmt: skip
    trainer.fit(LitBytes(), DataLoader(Windows(), batch_size=None))


if __name__ == "__main__":
    train()
