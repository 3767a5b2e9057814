"""Invariants of the protocol, checked while the simulator runs."""
