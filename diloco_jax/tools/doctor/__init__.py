"""Checks of a machine and of its way to the syncer."""
