"""A PyTorch loop with running statistics and momentum; it prints what it starts with, and what each saved state had."""

from __future__ import annotations

import os
import time

import numpy as np
import torch
from torch import nn

import diloco_jax.torch

BATCH, WIDTH = 8, 16
PACE_S = float(os.environ.get("DILOCO_TEST_STEP_S", "0"))


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    sizes = {"samples_per_step": BATCH, "tokens_per_step": BATCH}
    held_out = torch.from_numpy(np.random.default_rng(10**6).standard_normal((64, WIDTH)).astype(np.float32))

    def loss_of(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (module(x) - torch.sin(3 * x[:, :4])).square().mean()

    def evaluate(module: nn.Module) -> dict[str, torch.Tensor]:
        return {"loss": loss_of(module, held_out)}

    attached = diloco_jax.torch.attach(model, optimizer, scheduler=scheduler, evaluate=evaluate, **sizes)
    with attached as island:
        first = island.training
        step = int(optimizer.state[model[0].weight]["step"]) if model[0].weight in optimizer.state else 0
        print(
            f"starts after {step} steps, {int(model[1].num_batches_tracked)} batches, {scheduler.last_epoch} epochs",
            flush=True,
        )
        while first or island.training:
            first = False
            rows = [np.random.default_rng(int(position)).standard_normal(WIDTH) for position in island.next_samples()]
            optimizer.zero_grad()
            loss = loss_of(model, torch.from_numpy(np.float32(rows)))
            loss.backward()
            optimizer.step()
            scheduler.step()
            island.after_step(loss)
            time.sleep(PACE_S)


if __name__ == "__main__":
    main()
