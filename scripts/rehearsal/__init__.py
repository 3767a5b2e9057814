"""A rehearsal on this machine of what a config would run on slices, under a schedule of faults (docs/launch.md)."""
