"""An island in a training loop of the user's own: `diloco_jax.join`."""
