"""Invariants that are checked while the simulator runs."""
