"""The syncer's machine: rounds, members, snapshots and the tape of its inputs."""
