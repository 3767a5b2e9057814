"""Replay of a run from its tapes, and the audit of its samples."""
