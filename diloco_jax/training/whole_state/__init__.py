"""A learner's whole state as bytes, for recovery."""
