"""Direct preference optimization (DPO) of a decoder, in Flax NNX: your own loop as an island of a run.

    DILOCO_SYNCER=127.0.0.1:50051 DILOCO_ISLAND=a python docs/examples/dpo_loop.py

Lines that end with `# island` make the loop an island. The loss is equation 7 of Rafailov et al. 2023 (arXiv
2305.18290). In the generated pairs the preferred answer has the case of its question: after "please?" it is "thanks",
and "THANKS" is rejected; after "PLEASE?" it is the other way round.

Shapes: B pairs, T = 2 WORD + 1 tokens. Answer 0 of a pair is the preferred one, answer 1 the rejected one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from diloco_jax.nnx import attach  # island
from diloco_jax.training.models.decoder import Decoder

BATCH, WORD, BETA = 16, 6, 0.1
# Positions of the pairs to train on, and of the held-out ones.
TRAIN, HELD_OUT = range(1_000_000), range(1_000_000, 1_000_256)
SIZES = {"dim": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "mlp_dim": 64}


def pairs(positions: Iterable[int]) -> np.ndarray:
    """Return the pairs at these positions: int32 [2, B, T]; the question and "?" fill the first WORD + 1 tokens."""
    both = []
    for position in positions:
        rng = np.random.default_rng(int(position))
        question, answer = rng.integers(ord("a"), ord("z") + 1, (2, WORD))
        capitals = rng.integers(2) * 32
        start = [*question - capitals, ord("?")]
        both.append([[*start, *answer - capitals], [*start, *answer - 32 + capitals]])
    return np.array(both, np.int32).swapaxes(0, 1)


def log_probability(model: Decoder, tokens: jax.Array) -> jax.Array:
    """Return log pi(y | x) of each answer y after its question x: float32 [2, B] of tokens [2, B, T]."""
    logits = model(tokens.reshape(-1, tokens.shape[-1])[:, :-1]).reshape(*tokens.shape[:2], -1, 256)
    each = jax.nn.log_softmax(logits)[:, :, WORD:]
    return jnp.take_along_axis(each, tokens[:, :, WORD + 1 :, None], axis=-1).sum((-2, -1))


def margins(model: Decoder, reference: Decoder, tokens: jax.Array) -> jax.Array:
    """Return how much more the model than the reference prefers the preferred answers: float32 [B].

    beta ((log pi(y_w | x) - log pi_ref(y_w | x)) - (log pi(y_l | x) - log pi_ref(y_l | x)))
    """
    preferred, rejected = log_probability(model, tokens) - log_probability(reference, tokens)
    return BETA * (preferred - rejected)


def loss_of(model: Decoder, reference: Decoder, tokens: jax.Array) -> jax.Array:
    """Return the mean of -log sigmoid(margin), in nats per pair."""
    return -jax.nn.log_sigmoid(margins(model, reference, tokens)).mean()


@nnx.jit
def train_step(model: Decoder, reference: Decoder, optimizer: nnx.Optimizer[Any], tokens: jax.Array) -> jax.Array:
    """Make one step of the model; the reference stays as it is."""
    loss, gradient = nnx.value_and_grad(loss_of)(model, reference, tokens)
    optimizer.update(model, gradient)
    return loss


@nnx.jit
def scores_of(model: Decoder, reference: Decoder, tokens: jax.Array) -> dict[str, jax.Array]:
    """Return the loss, the share of pairs with a positive margin, and the mean margin."""
    found = margins(model, reference, tokens)
    return {"loss": -jax.nn.log_sigmoid(found).mean(), "accuracy": (found > 0).mean(), "margin": found.mean()}


def train() -> None:
    """Train until the run is over, and write the global model to ISLAND.npz."""
    # Both are drawn from one seed, in every start on every island; in practice load the same files into both.
    model, reference = (Decoder.from_config(SIZES, rngs=nnx.Rngs(0)) for _ in range(2))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    held_out = pairs(HELD_OUT)

    def evaluate(model: Decoder) -> dict[str, jax.Array]:
        return scores_of(model, reference, held_out)

    sizes = {"samples_per_step": BATCH, "tokens_per_step": 2 * BATCH * WORD}  # island
    with attach(model, optimizer, evaluate=evaluate, **sizes) as island:  # island
        while island.training:  # island
            tokens = pairs(island.next_samples() % len(TRAIN))  # island
            loss = train_step(model, reference, optimizer, tokens)
            island.after_step(loss)  # island
        np.savez(f"{island.name}.npz", **island.global_params())


if __name__ == "__main__":
    train()
