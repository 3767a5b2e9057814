"""Fine-tuning with LoRA in Flax NNX: only the adapters train, and only they travel between islands.

    python docs/examples/lora_loop.py --syncer 127.0.0.1:50051 --name a

Lines that end with `# island` make it one. The model predicts bytes of the source of Python's standard library.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro  # island
from flax import nnx

import diloco_jax  # island

BATCH, LENGTH, CONTEXT = 16, 64, 8
CHANGE = 32  # the bit of a byte that tells upper from lower case; the base model learned the text without the change
TEXT = np.frombuffer(b"".join(file.read_bytes() for file in sorted(Path(os.__file__).parent.glob("*.py"))), np.uint8)


def load(positions: np.ndarray) -> np.ndarray:
    """Return the windows of the text at these positions of the run's order: int32 [batch, length + 1]."""
    starts = positions * 1_000_003 % (len(TEXT) - LENGTH)
    return TEXT[starts[:, None] + np.arange(LENGTH + 1)].astype(np.int32)


class Bytes(nnx.Module):
    """A model of the next byte, from up to `CONTEXT` bytes before it, with adapters of rank 8."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        """Draw the parameters."""
        self.embed = nnx.Embed(256, 32, rngs=rngs)
        self.hidden = nnx.LoRALinear(CONTEXT * 32, 128, lora_rank=8, rngs=rngs)
        self.out = nnx.LoRALinear(128, 256, lora_rank=8, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return logits [batch, length, 256]."""
        x = self.embed(tokens)
        x = jnp.concatenate([jnp.pad(x, ((0, 0), (k, 0), (0, 0)))[:, : x.shape[1]] for k in range(CONTEXT)], axis=-1)
        return self.out(nnx.gelu(self.hidden(x)))


OPTIMIZER = optax.adam(1e-2)


@jax.jit(static_argnums=0)
def train_step(
    structure: Any, trained: Any, frozen: Any, opt_state: Any, tokens: jax.Array
) -> tuple[Any, Any, dict[str, jax.Array]]:
    """Make one step of what is trained."""

    def loss_of(trained: Any) -> jax.Array:
        logits = nnx.merge(structure, trained, frozen)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, gradient = jax.value_and_grad(loss_of)(trained)
    updates, opt_state = OPTIMIZER.update(gradient, opt_state)
    return optax.apply_updates(trained, updates), opt_state, {"loss": loss}


def pretrained() -> Bytes:
    """Return what a checkpoint would hold elsewhere: the model after 200 steps on the text, the same on each island."""
    model = Bytes(nnx.Rngs(0))
    structure, adapters, base = nnx.split(model, nnx.LoRAParam, ...)
    opt_state = OPTIMIZER.init(base)
    for step in range(200):
        base, opt_state, _ = train_step(structure, base, adapters, opt_state, load(np.arange(BATCH) - BATCH * step))
    return nnx.merge(structure, adapters, base)


def train(syncer: str | None = None, name: str | None = None) -> None:  # island
    """Train until the run is over."""
    structure, params, base = nnx.split(pretrained(), nnx.LoRAParam, ...)
    opt_state = OPTIMIZER.init(params)
    sizes = {"samples_per_step": BATCH, "tokens_per_step": BATCH * LENGTH}  # island
    with diloco_jax.join(syncer, name=name, params=params, opt_state=opt_state, **sizes) as island:  # island
        params, opt_state = island.state().values()  # island
        while island.training:  # island
            tokens = load(island.next_samples()) ^ CHANGE  # island
            params, opt_state, metrics = train_step(structure, params, base, opt_state, tokens)
            params = island.after_step(params, metrics, opt_state=opt_state)  # island


if __name__ == "__main__":
    tyro.cli(train)  # island
