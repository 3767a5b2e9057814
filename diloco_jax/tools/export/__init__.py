"""Models in and out: a config that begins with public weights, and a run's model in formats that others read."""
