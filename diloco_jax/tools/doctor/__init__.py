"""Checks of a machine and of its link to the syncer."""
