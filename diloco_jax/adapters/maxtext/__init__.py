"""MaxText's pre-training as an island of a run. Importing this package imports neither MaxText nor Flax."""
