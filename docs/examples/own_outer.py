"""Your own outer optimizer (`outer.module: own_outer:decayed`); it updates one fragment at a time."""

import jax.numpy as jnp
import optax


def decayed(rate: float = 0.7, momentum: float = 0.9, rounds: int = 1000) -> optax.GradientTransformation:
    """Return Nesterov's momentum, with a rate that decays over a fragment's rounds.

    The gradient is the global value minus the learners' merged one, so the optimizer descends as usual.
    """

    def schedule(count: jnp.ndarray) -> jnp.ndarray:
        return rate * jnp.maximum(0.1, 1 - count / rounds)

    return optax.sgd(schedule, momentum=momentum, nesterov=True)
