"""PyTorch, a module and an optimizer that change in place: your own loop as an island of a run.

    DILOCO_SYNCER=127.0.0.1:50051 DILOCO_ISLAND=a python docs/examples/torch_loop.py

Lines that end with `# island` make the loop an island. The model predicts bytes of the source of
Python's standard library.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import diloco_jax.torch  # island

BATCH, LENGTH, CONTEXT = 16, 64, 8
TEXT = np.frombuffer(b"".join(file.read_bytes() for file in sorted(Path(os.__file__).parent.glob("*.py"))), np.uint8)


def load(positions: np.ndarray) -> torch.Tensor:
    """Return the windows of the text at these positions of the run's order: int64 [batch, length + 1]."""
    starts = positions * 1_000_003 % (len(TEXT) - LENGTH)
    return torch.from_numpy(TEXT[starts[:, None] + np.arange(LENGTH + 1)].astype(np.int64))


class Bytes(nn.Module):
    """A model of the next byte, from up to `CONTEXT` bytes before it."""

    def __init__(self) -> None:
        """Draw the parameters."""
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.hidden = nn.Linear(CONTEXT * 32, 128)
        self.out = nn.Linear(128, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [batch, length, 256]."""
        x = self.embed(tokens)
        x = torch.cat([functional.pad(x, (0, 0, k, 0))[:, : x.shape[1]] for k in range(CONTEXT)], dim=-1)
        return self.out(functional.gelu(self.hidden(x), approximate="tanh"))


def train_step(model: Bytes, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> torch.Tensor:
    """Make one step, and return the mean loss in nats per byte."""
    loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def train() -> None:
    """Train until the run is over."""
    torch.manual_seed(0)
    model = Bytes()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    sizes = {"samples_per_step": BATCH, "tokens_per_step": BATCH * LENGTH}  # island
    with diloco_jax.torch.attach(model, optimizer, **sizes) as island:  # island
        while island.training:  # island
            tokens = load(island.next_samples())  # island
            loss = train_step(model, optimizer, tokens)
            island.after_step(loss)  # island


if __name__ == "__main__":
    train()
