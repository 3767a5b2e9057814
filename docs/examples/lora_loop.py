"""Fine-tuning of a public model with LoRA: only the adapters train, and only they travel between islands.

    DILOCO_SYNCER=127.0.0.1:50051 DILOCO_ISLAND=a python docs/examples/lora_loop.py FOLDER

FOLDER has the files of a model from the Hugging Face hub: config.json, *.safetensors and tokenizer.json. Lines that end
with `# island` make the loop an island. The text is the source of Python's standard library. tunix_sft.py does the same
with the trainer of google-tunix.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import diloco_jax  # island
from diloco_jax.training.convert.families import from_hf
from diloco_jax.training.convert.weights import Weights
from diloco_jax.training.data.tokenizer import open_tokenizer
from diloco_jax.training.models.protocol import join_model, load_model, split_model

BATCH, LENGTH, RANK = 8, 64, 8
TEXT = "".join(file.read_text(errors="replace") for file in sorted(Path(os.__file__).parent.glob("a*.py")))
OPTIMIZER = optax.adam(1e-2)

Values = dict[str, Any]


def public(folder: str) -> tuple[Any, Values, np.ndarray]:
    """Return the structure of a public model, its parameters by path, and the text in its tokens."""
    weights = Weights(folder)
    model = from_hf(weights.config)
    graphdef, _ = jax.eval_shape(lambda: split_model(load_model(model.module, model.args, 0)))
    return graphdef, dict(weights.read(model)), np.array(open_tokenizer(folder).encode(TEXT), np.int32)


def fresh(base: Values, key: jax.Array) -> Values:
    """Return adapters of all matrices between embedding and logits; their initial values change nothing."""
    shapes = {path: value.shape for path, value in base.items() if path.endswith("kernel")}
    return {
        path: {
            "a": jax.random.normal(jax.random.fold_in(key, i), (rows, RANK)) / rows**0.5,
            "b": jnp.zeros((RANK, columns)),
        }
        for i, (path, (rows, columns)) in enumerate(sorted(shapes.items()))
    }


@jax.jit(static_argnums=0)
def train_step(graphdef: Any, params: Values, base: Values, opt_state: Any, tokens: jax.Array) -> tuple[Any, Any, Any]:
    """Make one step of the adapters."""

    def loss_of(params: Values) -> jax.Array:
        adapted = base | {path: base[path] + pair["a"] @ pair["b"] for path, pair in params.items()}
        return join_model(graphdef, adapted).loss({"tokens": tokens})[0]

    loss, gradient = jax.value_and_grad(loss_of)(params)
    updates, opt_state = OPTIMIZER.update(gradient, opt_state)
    return optax.apply_updates(params, updates), opt_state, {"loss": loss}


def train(weights: str) -> None:
    """Train until the run is over."""
    graphdef, base, ids = public(weights)
    params = fresh(base, jax.random.key(0))
    opt_state = OPTIMIZER.init(params)
    sizes = {"samples_per_step": BATCH, "tokens_per_step": BATCH * LENGTH}  # island
    with diloco_jax.join(params=params, opt_state=opt_state, **sizes) as island:  # island
        params, opt_state = island.state().values()  # island
        while island.training:  # island
            starts = island.next_samples() * LENGTH % (len(ids) - LENGTH)  # island
            tokens = ids[starts[:, None] + np.arange(LENGTH + 1)]
            params, opt_state, metrics = train_step(graphdef, params, base, opt_state, tokens)
            params = island.after_step(params, metrics, opt_state=opt_state)  # island


if __name__ == "__main__":
    train(sys.argv[1])
