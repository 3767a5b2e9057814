"""Your own inner optimizer (`optimizer.module: own_optimizer:lion`); the config still sets rate and schedule."""

import jax
import optax


def lion(b1: float = 0.9, b2: float = 0.99, weight_decay: float = 0.1) -> optax.GradientTransformation:
    """Return Lion for learning rate 1, with decay of matrices; the train step multiplies its update by the rate."""

    def matrices(params: optax.Params) -> optax.Params:  # {path: array}
        return jax.tree.map(lambda value: value.ndim > 1, params)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.lion(1.0, b1=b1, b2=b2, weight_decay=weight_decay, mask=matrices),
    )
