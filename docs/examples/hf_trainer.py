"""Hugging Face's Trainer through a callback: an island of a run.

    DILOCO_SYNCER=127.0.0.1:50051 DILOCO_ISLAND=a python docs/examples/hf_trainer.py

Lines that end with `# island` make the trainer an island. It reads its own data. The model is that of torch_loop.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from torch_loop import BATCH, LENGTH, Bytes, load
from transformers import Trainer, TrainerCallback, TrainingArguments

import diloco_jax.torch  # island

SIZES: dict[str, Any] = {"samples_per_step": BATCH, "tokens_per_step": BATCH * LENGTH, "data": "own"}  # island


class Island(TrainerCallback):  # island
    """The callback that makes a trainer an island."""

    loss: torch.Tensor  # island

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:  # island
        """Wait for the run's model. The trainer has wrapped the optimizer, and `attach` needs the one inside."""
        inner = (parts["model"], parts["optimizer"].optimizer)  # island
        attached = diloco_jax.torch.attach(*inner, scheduler=parts["lr_scheduler"], **SIZES)  # island
        self.island = attached.__enter__()  # island
        control.should_training_stop = not self.island.training  # island

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:  # island
        """Report the step of the optimizer, and stop at the end of the run."""
        self.island.after_step(self.loss)  # island
        control.should_training_stop = not self.island.training  # island

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:  # island
        """Leave the run."""
        self.island.__exit__(None, None, None)  # island


class BytesTrainer(Trainer):
    """A trainer of the model of bytes that keeps its loss, which callbacks do not get."""

    def compute_loss(self, model: Any, inputs: Any, *others: Any, **more: Any) -> torch.Tensor:
        """Return the mean loss in nats per byte."""
        logits = model(inputs["tokens"][:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs["tokens"][:, 1:].flatten())

    def training_step(self, *inputs: Any, **more: Any) -> torch.Tensor:  # island
        """Make a step, and keep its loss for the island."""
        self.island.loss = super().training_step(*inputs, **more)  # island
        return self.island.loss  # island


class Windows(Dataset[Any]):
    """Windows of the text, by position."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, position: int) -> dict[str, torch.Tensor]:
        return {"tokens": load(np.array([position]))[0]}


def train() -> None:
    """Train until the run is over."""
    torch.manual_seed(0)
    # The run ends the training. A schedule by the trainer's own steps would need their number.
    arguments = TrainingArguments(
        output_dir="trainer", per_device_train_batch_size=BATCH, max_steps=1_000_000, learning_rate=1e-2,
        lr_scheduler_type="constant", save_strategy="no", report_to=[], use_cpu=True, remove_unused_columns=False,
        disable_tqdm=True,
    )  # fmt: skip
    trainer = BytesTrainer(Bytes(), arguments, train_dataset=Windows())
    trainer.island = Island()  # island
    trainer.add_callback(trainer.island)  # island
    trainer.train()


if __name__ == "__main__":
    train()
