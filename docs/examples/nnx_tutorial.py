"""Flax NNX as in Flax's tutorial: images, BatchNorm, Dropout, metrics; as an island of a run.

    DILOCO_SYNCER=127.0.0.1:50051 DILOCO_ISLAND=a python docs/examples/nnx_tutorial.py

Lines that end with `# island` make the loop an island. The model reads generated digits.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from digits import Digits
from flax import nnx

from diloco_jax.nnx import attach  # island

BATCH, REPORT_EVERY = 32, 100
TRAIN, TEST = range(1_000_000), range(1_000_000, 1_000_256)
DIGITS = Digits(TEST.stop)


def read(positions: Any) -> dict[str, np.ndarray]:
    """Return the digits at these positions: images [batch, 16, 16, 1] from 0 to 1, and labels [batch]."""
    samples = [DIGITS[int(position)] for position in positions]
    images = np.stack([sample["image"] for sample in samples]).astype(np.float32) / 255
    return {"image": images, "label": np.stack([sample["label"] for sample in samples])}


class CNN(nnx.Module):
    """A small convolutional network."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        """Draw the parameters."""
        self.conv1 = nnx.Conv(1, 8, kernel_size=(3, 3), rngs=rngs)
        self.batch_norm1 = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(8, 16, kernel_size=(3, 3), rngs=rngs)
        self.batch_norm2 = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.avg_pool = partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
        self.linear1 = nnx.Linear(256, 32, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.linear2 = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return logits [batch, 10]."""
        x = self.avg_pool(nnx.relu(self.batch_norm1(self.conv1(x))))
        x = self.avg_pool(nnx.relu(self.batch_norm2(self.conv2(x))))
        x = nnx.relu(self.linear1(x.reshape(x.shape[0], -1)))
        return self.linear2(self.dropout(x))


def new_metrics() -> nnx.MultiMetric:
    """Return accuracy and mean loss since their last reset."""
    return nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))


def loss_of(model: CNN, batch: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """Return the mean loss in nats, and the logits."""
    logits = model(batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), logits


@nnx.jit
def train_step(
    model: CNN, optimizer: nnx.Optimizer[Any], metrics: nnx.MultiMetric, batch: dict[str, np.ndarray]
) -> None:
    """Make one step; model, optimizer and metrics change in place."""
    (loss, logits), gradient = nnx.value_and_grad(loss_of, has_aux=True)(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, gradient)


@nnx.jit
def eval_step(model: CNN, metrics: nnx.MultiMetric, batch: dict[str, np.ndarray]) -> None:
    """Add a batch to the metrics."""
    loss, logits = loss_of(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])


def test(model: CNN) -> dict[str, jax.Array]:
    """Return loss and accuracy on digits that are not in the training set."""
    model.eval()
    metrics = new_metrics()
    for start in range(TEST.start, TEST.stop, BATCH):
        eval_step(model, metrics, read(range(start, start + BATCH)))
    return metrics.compute()


def train() -> None:
    """Train until the run is over."""
    model, metrics = CNN(nnx.Rngs(0)), new_metrics()
    optimizer = nnx.Optimizer(model, optax.adamw(0.005), wrt=nnx.Param)
    step = 0
    with attach(model, optimizer, samples_per_step=BATCH, tokens_per_step=BATCH, evaluate=test) as island:  # island
        while island.training:  # island
            batch = read(island.next_samples() % len(TRAIN))  # island
            train_step(model, optimizer, metrics, batch)
            island.after_step(metrics.compute())  # island
            step += 1
            if step % REPORT_EVERY == 0:
                print(f"step {step}: " + ", ".join(f"{name} {value:.3f}" for name, value in metrics.compute().items()))
                metrics.reset()


if __name__ == "__main__":
    train()
