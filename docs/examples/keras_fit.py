"""Keras on JAX: `model.fit` trains, a callback makes it an island, and each island reads its data in a separate order.

    KERAS_BACKEND=jax DILOCO_SYNCER=127.0.0.1:50051 DILOCO_ISLAND=a python docs/examples/keras_fit.py

Lines that end with `# island` make it one. The model predicts bytes of the source of Python's standard library.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

import diloco_jax  # island

BATCH, LENGTH = 16, 64
TEXT = np.frombuffer(b"".join(file.read_bytes() for file in sorted(Path(os.__file__).parent.glob("*.py"))), np.uint8)


def batches(island: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:  # island
    """Yield bytes and the bytes that follow them, int32 [batch, length], until the run is over."""
    # The island's name seeds the draws, so that each island draws different samples.
    draw = np.random.default_rng([*island.name.encode()])  # island
    while island.training:  # island
        windows = TEXT[draw.integers(len(TEXT) - LENGTH, size=(BATCH, 1)) + np.arange(LENGTH + 1)].astype(np.int32)
        yield windows[:, :-1], windows[:, 1:]


def build() -> keras.Model:
    """Return a model of the next byte, from up to eight bytes before it."""
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((LENGTH,), dtype="int32"),
            layers.Embedding(256, 32),
            layers.Conv1D(128, 8, padding="causal", activation="gelu"),
            layers.Dense(256),
        ]
    )
    model.compile(keras.optimizers.Adam(1e-2), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.optimizer.build(model.trainable_variables)  # island
    return model


def values(variables: list[keras.Variable]) -> dict[str, Any]:  # island
    """Return the arrays of Keras variables by path."""
    return {variable.path: variable.value for variable in variables}  # island


def train() -> None:
    """Train until the run is over."""
    model = build()
    params, moments = model.trainable_variables, model.optimizer.variables  # island
    state = {"params": values(params), "opt_state": values(moments)}  # island
    sizes = {"samples_per_step": BATCH, "tokens_per_step": BATCH * LENGTH}  # island
    with diloco_jax.join(**state, **sizes, data="own") as island:  # island
        start = island.state()  # island
        for variable in params + moments:  # island
            variable.assign((start["params"] | start["opt_state"])[variable.path])  # island

        def exchange(batch: int, logs: dict[str, Any]) -> None:  # island
            model.jax_state_sync()  # island
            merged = island.after_step(values(params), logs, opt_state=values(moments))  # island
            for variable in params:  # island
                variable.assign(merged[variable.path])  # island

        each_step = keras.callbacks.LambdaCallback(on_train_batch_end=exchange)  # island
        model.fit(batches(island), callbacks=[each_step], verbose=0)  # island


if __name__ == "__main__":
    train()
