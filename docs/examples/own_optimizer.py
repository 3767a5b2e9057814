"""An inner optimizer of your own, `optimizer.module: own_optimizer:lion`; rate and schedule stay the config's."""

import jax
import optax


def lion(b1: float = 0.9, b2: float = 0.99, weight_decay: float = 0.1) -> optax.GradientTransformation:
    """Lion for learning rate 1; matrices decay. What optax.lion would do with its rate, the train step does."""

    def matrices(params: optax.Params) -> optax.Params:  # {path: array}
        return jax.tree.map(lambda value: value.ndim > 1, params)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.lion(1.0, b1=b1, b2=b2, weight_decay=weight_decay, mask=matrices),
    )
