"""The files of a run: tapes, telemetry, checkpoints, status."""
