"""The loop that drives the syncer's machine, its start and its snapshots."""
