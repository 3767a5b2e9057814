"""A rehearsal of a config for slices on this machine, under a schedule of faults (docs/launch.md)."""
