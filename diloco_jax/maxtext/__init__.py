"""MaxText's pre-training as an island of a run: `python -m diloco_jax.maxtext base.yml key=value ...`.

docs/maxtext.md explains the command. Importing this package imports neither MaxText nor Flax. The code is in
`diloco_jax/adapters/maxtext/`.
"""
