"""A loop of Hugging Face's accelerate, with accumulated gradients and a schedule: an island of a run.

    DILOCO_SYNCER=127.0.0.1:50051 DILOCO_ISLAND=a python docs/examples/accelerate_loop.py

Lines that end with `# island` make the loop an island. The model is that of torch_loop.py.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch.nn import functional
from torch_loop import BATCH, LENGTH, Bytes, load

import diloco_jax.torch  # island

MICRO_BATCHES = 2


def train() -> None:
    """Train until the run is over."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
    model = Bytes()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    # The island saves and restores what accelerate has prepared, and not its wrappers.
    parts = (accelerator.unwrap_model(model), optimizer.optimizer)  # island
    sizes = {"samples_per_step": BATCH, "tokens_per_step": BATCH * LENGTH}  # island
    with diloco_jax.torch.attach(*parts, scheduler=scheduler.scheduler, **sizes) as island:  # island
        while island.training:  # island
            # One step of the island is one step of the optimizer.
            for tokens in load(island.next_samples()).split(BATCH // MICRO_BATCHES):  # island
                with accelerator.accumulate(model):
                    loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            island.after_step(loss.detach())  # island


if __name__ == "__main__":
    train()
