"""An island of several slices: each computes parts of every step, and the island trains on when one is lost."""
