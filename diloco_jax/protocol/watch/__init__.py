"""Statistics and alarms that are computed from the syncer's inputs."""
