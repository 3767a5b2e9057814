"""Your own figures at each evaluation (`evaluation.module: own_evaluation:Guesses`)."""

import jax.numpy as jnp
import optax
from flax import nnx


class Guesses:
    """Share of a text's tokens that the global model predicts correctly, and the norm of its parameters."""

    def __init__(self, text: str) -> None:
        self.tokens = jnp.frombuffer(text.encode(), jnp.uint8).astype(jnp.int32)[None]
        self.logits = nnx.jit(lambda model, tokens: model(tokens))

    def __call__(self, model: nnx.Module, step: int) -> dict[str, float]:
        guessed = self.logits(model, self.tokens[:, :-1]).argmax(-1)
        right = (guessed == self.tokens[:, 1:]).mean()
        return {"guessed": float(right), "length": float(optax.tree.norm(nnx.state(model, nnx.Param)))}
