"""MaxText as an island from Python: `run` is for your own launchers."""

from diloco_jax.adapters.maxtext.launch import run as run
